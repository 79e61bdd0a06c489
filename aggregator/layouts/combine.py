"""Statistics of a whole value from those of its parts.

shards       max, min   of the maxima and minima
             norm       sqrt(sum of squares)
             mean       of the means, weighted by the numbers of elements
replicas     one of them, where they agree within the tolerance of their dtype
summands     the mean is the sum of the means; max, min and norm of a sum do not follow from those of its parts
             (one element: its value is the sum of the values)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator.divergence import tolerance_of
from aggregator.layouts.decide import Decisions, Kind
from aggregator.layouts.gather import Column
from aggregator.layouts.pairing import shape_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]
    Codes = npt.NDArray[np.int64]

MAX, MIN, MEAN, NORM = range(4)

NOTHING = "None"
"""What the cell of a statistic shows that nobody knows; every reader of the field takes it for that."""


class Vocabulary:
    """Texts and their numbers, shared by all parts of a comparison."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.nothing = self.add(NOTHING)

    def add(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))

    def codes(self, column: Any) -> Codes:
        """Numbers of a dictionary-encoded column, -1 for null."""
        places = np.array([*map(self.add, column.dictionary.to_pylist()), -1], np.int64)
        return np.asarray(places[pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)])

    def column(self, codes: Codes) -> pa.Array:
        """The texts of some numbers."""
        texts = pa.array(list(self.places), pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=codes < 0), texts)

    def texts(self) -> list[str]:
        return list(self.places)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank, or some put together, has for each row."""

    there: Flags
    numbers: tuple[Floats, ...]
    is_number: tuple[Flags, ...]
    texts: tuple[Codes, ...]
    shapes: Codes

    @classmethod
    def of(cls, column: Column, vocabulary: Vocabulary) -> Part:
        return cls(
            column.there,
            column.numbers,
            column.is_number,
            tuple(vocabulary.codes(texts) for texts in column.texts),
            vocabulary.codes(column.shapes),
        )

    def take(self, rows: Codes) -> Part:
        """Rows by number; a row of -1 is not there."""
        known = rows >= 0
        at = np.where(known, rows, 0)
        if not len(self.there):
            empty = np.zeros(len(rows), bool)
            none = np.full(len(rows), -1, np.int64)
            return Part(empty, (np.full(len(rows), np.nan),) * 4, (empty,) * 4, (none,) * 4, none)
        return Part(
            self.there[at] & known,
            tuple(np.where(known, part[at], np.nan) for part in self.numbers),
            tuple(part[at] & known for part in self.is_number),
            tuple(np.where(known, part[at], -1) for part in self.texts),
            np.where(known, self.shapes[at], -1),
        )


def elements(codes: Codes, vocabulary: Vocabulary) -> Floats:
    """Number of elements of each shape, NaN for what is none."""
    counts = []
    for text in vocabulary.texts():
        shape = shape_of(text)
        counts.append(float(math.prod(shape)) if isinstance(shape, tuple) else math.nan)
    return np.array([*counts, math.nan])[codes]


def choose(parts: Sequence[Part], which: Codes) -> Part:
    """Of each row the part with that number."""
    if len(parts) == 1:
        return parts[0]

    def chosen(arrays: Sequence[Any]) -> Any:
        return np.choose(which, arrays) if len(arrays) < 32 else np.stack(arrays)[which, np.arange(len(which))]

    return Part(
        chosen([part.there for part in parts]),
        tuple(chosen([part.numbers[i] for part in parts]) for i in range(4)),
        tuple(chosen([part.is_number[i] for part in parts]) for i in range(4)),
        tuple(chosen([part.texts[i] for part in parts]) for i in range(4)),
        chosen([part.shapes for part in parts]),
    )


def tolerances(dtypes: Any) -> Floats:
    """The relative tolerance of each row's dtype, 0 for what must be equal."""
    texts = dtypes.dictionary.to_pylist()
    allowed = np.array([*(tolerance_of(str(text)) or 0.0 for text in texts), 0.0])
    return np.asarray(allowed[pc.fill_null(dtypes.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)])


def apart(a: Part, b: Part, allowed: Floats, counts: Floats) -> Floats:
    """By how many tolerances two parts differ in their statistics; infinite where they cannot be the same value.

    As `divergence` judges: maximum and minimum against the largest value, the mean against the root mean square.
    """
    out = np.zeros(len(a.there))
    with np.errstate(all="ignore"):
        largest = np.zeros(len(out))
        for part in (a, b):
            for i in (MAX, MIN):
                largest = np.fmax(largest, np.abs(np.where(np.isfinite(part.numbers[i]), part.numbers[i], 0.0)))
        norm = np.fmax(np.abs(a.numbers[NORM]), np.abs(b.numbers[NORM]))
        spread = np.where((counts > 0) & (norm > 0), norm / np.sqrt(counts), largest)
        for i, scale in ((MAX, 2 * largest), (MIN, 2 * largest), (MEAN, spread), (NORM, norm)):
            both = a.is_number[i] & b.is_number[i]
            x, y = a.numbers[i], b.numbers[i]
            if i == NORM:
                x, y = np.abs(x), np.abs(y)
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            far = np.abs(x - y) / (scale * allowed)
            far = np.where(np.isnan(far) | (allowed == 0.0), np.inf, far)
            out = np.where(both & ~same, np.fmax(out, far), out)
            texts = (a.is_number[i] != b.is_number[i]) | (~both & (a.texts[i] != b.texts[i]))
            out[texts] = np.inf
    out[(a.shapes != b.shapes) | (a.there != b.there)] = np.inf
    return out


def joined(parts: Sequence[Part], dims: Codes, vocabulary: Vocabulary) -> Part:
    """Every row as the shards of one value along its dimension; below 0: part after part, shapes as they are."""
    counts = [elements(part.shapes, vocabulary) for part in parts]
    empty = [~(count > 0) for count in counts]
    total = np.sum([np.nan_to_num(count) for count in counts], axis=0)
    numbers: list[Floats] = []
    is_number: list[Flags] = []
    texts: list[Codes] = []
    with np.errstate(all="ignore"):
        for i in range(4):
            values = [part.numbers[i] for part in parts]
            if i in (MAX, MIN):
                neutral = -np.inf if i == MAX else np.inf
                pick: Any = np.maximum if i == MAX else np.minimum
                found = pick.reduce([np.where(none, neutral, value) for none, value in zip(empty, values, strict=True)])
            elif i == NORM:
                squares = [np.where(none, 0.0, value) ** 2 for none, value in zip(empty, values, strict=True)]
                found = np.sqrt(np.sum(squares, axis=0))
            else:
                weighted = [
                    np.where(none, 0.0, value * count) for none, value, count in zip(empty, values, counts, strict=True)
                ]
                found = np.sum(weighted, axis=0) / total
            known = np.logical_and.reduce(
                [part.is_number[i] | none for part, none in zip(parts, empty, strict=True)]
            ) & ~np.logical_and.reduce(empty)
            numbers.append(np.where(known, found, np.nan))
            is_number.append(known)
            texts.append(np.where(known, -1, _words(parts, i, vocabulary)))
    shapes = _joined_shapes(parts, dims, vocabulary)
    there = np.logical_and.reduce([part.there for part in parts])
    return Part(there, tuple(numbers), tuple(is_number), tuple(texts), shapes)


def _words(parts: Sequence[Part], statistic: int, vocabulary: Vocabulary) -> Codes:
    """Texts of shards: what all of them say; of truth values the larger or the smaller; else nothing."""
    codes = np.stack([part.texts[statistic] for part in parts])
    same = (codes == codes[0]).all(axis=0)
    yes, no = vocabulary.places.get("True", -2), vocabulary.places.get("False", -2)
    truth = np.isin(codes, [yes, no]).all(axis=0)
    has_yes, all_yes = (codes == yes).any(axis=0), (codes == yes).all(axis=0)
    wins = has_yes if statistic == MAX else all_yes
    return np.where(same, codes[0], np.where(truth, np.where(wins, yes, no), vocabulary.nothing))


def _joined_shapes(parts: Sequence[Part], dims: Codes, vocabulary: Vocabulary) -> Codes:
    matrix = np.column_stack([*(part.shapes for part in parts), dims])
    unique, place = np.unique(matrix, axis=0, return_inverse=True)
    texts = vocabulary.texts()
    made = []
    for *codes, dim in unique.tolist():
        shapes = [shape_of(texts[code]) if code >= 0 else "" for code in codes]
        known = [shape for shape in shapes if isinstance(shape, tuple)]
        if dim < 0 or len(known) != len(shapes) or any(len(shape) <= dim for shape in known):
            made.append(codes[0])
            continue
        whole = [*known[0][:dim], sum(shape[dim] for shape in known), *known[0][dim + 1 :]]
        made.append(vocabulary.add(str(whole)))
    return np.array(made, np.int64)[place.reshape(-1)]


def summed(parts: Sequence[Part], counts: Floats, vocabulary: Vocabulary, *, mean: bool = False) -> Part:
    """Every row as the sum (or mean) of the parts: the mean is known, and all of it where there is one element."""
    known = np.logical_and.reduce([part.is_number[MEAN] for part in parts])
    total = np.sum([np.where(known, part.numbers[MEAN], 0.0) for part in parts], axis=0) / (len(parts) if mean else 1)
    # Of one element all statistics are the value, also where no mean was recorded.
    single = (counts == 1) & np.logical_and.reduce([part.is_number[MAX] for part in parts])
    value = np.sum([np.where(single, part.numbers[MAX], 0.0) for part in parts], axis=0) / (len(parts) if mean else 1)
    numbers, is_number, texts = [], [], []
    for i in range(4):
        has = (single & np.logical_and.reduce([part.is_number[i] for part in parts])) | (known if i == MEAN else False)
        found = np.where(single, np.abs(value) if i == NORM else value, total if i == MEAN else np.nan)
        if i == NORM:  # msprobe signs the norm of a 0-d tensor
            found = np.where(single & (parts[0].numbers[NORM] < 0), -np.abs(value), found)
        numbers.append(np.where(has, found, np.nan))
        is_number.append(np.asarray(has, bool))
        texts.append(np.where(has, -1, vocabulary.nothing))
    return Part(parts[0].there, tuple(numbers), tuple(is_number), tuple(texts), parts[0].shapes)


def mixed(decisions: Decisions, parts: Sequence[Part], chosen: Part, vocabulary: Vocabulary, summands: Flags) -> Part:
    """Every row as its verdict has it: joined, summed (where `summands`), or what was chosen."""
    if len(parts) == 1:
        return parts[0]
    kinds = decisions.kinds
    dims = decisions.of(lambda verdict: verdict.dim if verdict.kind is Kind.SHARD else -1, np.int64)
    shard = (kinds == Kind.SHARD) | (kinds == Kind.BESIDE)
    return merged(
        merged(chosen, joined(parts, dims, vocabulary), shard),
        summed(parts, elements(parts[0].shapes, vocabulary), vocabulary),
        summands,
    )


def merged(first: Part, second: Part, where: Flags) -> Part:
    """`second` in the rows marked, `first` in the others."""
    if not where.any():
        return first
    return Part(
        np.where(where, second.there, first.there),
        tuple(np.where(where, b, a) for a, b in zip(first.numbers, second.numbers, strict=True)),
        tuple(np.where(where, b, a) for a, b in zip(first.is_number, second.is_number, strict=True)),
        tuple(np.where(where, b, a) for a, b in zip(first.texts, second.texts, strict=True)),
        np.where(where, second.shapes, first.shapes),
    )
