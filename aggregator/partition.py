"""Columns of a partition (see `model`) as arrays, and what its rows are: what everyone who judges a table needs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import coded, columns
from aggregator.coded import Coded
from aggregator.columns import BENCH_STATISTICS, NPU_STATISTICS, TEXT_SUFFIX
from aggregator.items import NO_CHECKSUM

if TYPE_CHECKING:
    import numpy.typing as npt


def matched(table: pa.Table) -> npt.NDArray[np.bool_]:
    """True for rows that have a bench row."""
    lacking = pc.is_in(table[columns.BENCH_NAME], value_set=pa.array(["N/A", "", "nan", "None", None], pa.string()))
    return np.asarray(~lacking.to_numpy())


def texts(table: pa.Table, name: str) -> Coded:
    """A column of texts, dictionary-encoded or not."""
    return coded.codes(table[name])


def same_codes(a: Coded, b: Coded, canonical: Any = str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Both columns as numbers of one vocabulary, so that equal texts are equal numbers."""
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(canonical(text), len(places))

    return a.of(place, -1.0), b.of(place, -1.0)


NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "+inf": math.inf}
"""Words that msprobe's tables have for numbers, in lower case."""


def says_nothing(text: str) -> bool:
    """A cell that stands for nothing recorded."""
    return text.strip() in ("N/A", "", "None", "nan")


def no_checksum(text: str) -> bool:
    """None, or recorded without a checksum, which msprobe shows as that of no bytes."""
    return says_nothing(text) or text == NO_CHECKSUM


@dataclass(frozen=True, slots=True)
class Side:
    """max, min, mean, norm of one side: numbers (NaN also where none is), which of them are numbers, and words."""

    numbers: tuple[npt.NDArray[np.float64], ...]
    is_number: tuple[npt.NDArray[np.bool_], ...]
    words: tuple[Coded, ...]


def side_of(table: pa.Table, names: tuple[str, ...]) -> Side:
    """`names`: NPU_STATISTICS or BENCH_STATISTICS."""
    numbers, is_number, words = [], [], []
    for name in names:
        plain = table[name].to_numpy().astype(np.float64)
        text = texts(table, name + TEXT_SUFFIX)
        special = text.of(lambda word: NON_FINITE.get(word.strip().lower(), 0.0), 0.0)
        is_special = text.among(lambda word: word.strip().lower() in NON_FINITE)
        valid = table[name].is_valid().to_numpy()
        numbers.append(np.where(is_special & ~valid, special, np.where(valid, plain, np.nan)))
        is_number.append(valid | is_special)
        words.append(text)
    return Side(tuple(numbers), tuple(is_number), tuple(words))


def largest_of(npu: Side, bench: Side) -> npt.NDArray[np.float64]:
    """Largest finite absolute value of each row's item on either side, 0 for none."""
    found = np.zeros(len(npu.numbers[0]))
    for side in (npu, bench):
        for i in (0, 1):
            found = np.fmax(found, np.where(np.isfinite(side.numbers[i]), np.abs(side.numbers[i]), 0.0))
    return found


def largest_values(table: pa.Table) -> npt.NDArray[np.float64]:
    """As `largest_of`, of a table."""
    return largest_of(side_of(table, NPU_STATISTICS), side_of(table, BENCH_STATISTICS))


def not_finite(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Rows whose maximum or minimum is NaN or infinite on the target's side and finite on the bench's."""
    npu, bench = side_of(table, NPU_STATISTICS), side_of(table, BENCH_STATISTICS)

    def odd(side: Side) -> npt.NDArray[np.bool_]:
        return np.logical_or(*(side.is_number[i] & ~np.isfinite(side.numbers[i]) for i in (0, 1)))

    return odd(npu) & ~(odd(bench) & matched(table))


def elements_of(shape: str) -> float:
    """Number of elements of a shape's text (`[2, 3]` -> 6, `[]` -> 1), NaN for `N/A`."""
    inside = shape.strip()[1:-1]
    if not re.fullmatch(r"[\d, ]*", inside):
        return math.nan
    return float(math.prod(int(part) for part in re.findall(r"\d+", inside)))


@dataclass(frozen=True, slots=True)
class Gradients:
    """Which rows belong to a backward call, are a parameter's gradient, or come after the last backward call."""

    backward: npt.NDArray[np.bool_]
    of_parameters: npt.NDArray[np.bool_]
    after: npt.NDArray[np.bool_]


def gradients(table: pa.Table) -> Gradients:
    """By the names of ops, and the roles of rows."""
    backward = np.asarray(pc.match_substring_regex(table["op"], r"\.backward(?:\.\d+)?$").to_numpy())
    of_parameters = texts(table, "role").among(lambda text: text == "parameters_grad")
    calls = np.flatnonzero(backward)
    after = np.arange(len(backward)) > (calls[-1] if len(calls) else len(backward))
    return Gradients(backward, of_parameters, after & ~of_parameters)
