"""Metrics of matched items, whole columns at a time: pure functions of both sides' statistics.

The cells are those of MindStudio Probe 26.2, read off its results (docs/compatibility.md). For a target value t and a
bench value b of one statistic:

    equal as written     0                  (`3` and `3.0` are not, nor are `0.0` and `-0.0`)
    unmatched            N/A
    both device names    N/A                (`cpu` against `cuda:0` is no difference that a number could tell)
    one is no number     Diff               (`True` against `False`, None against 1.0)
    difference           t - b, or `Nan`, `inf`, `-inf`
    relative error       |(t - b) / b| in percent; `inf` where b is 0; `Nan`, `inf`, `-inf` as the difference
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import numpy.typing as npt

WORDS = ("N/A", "Diff", "Nan", "inf", "-inf", "inf%")
"""Texts of metric cells that are no number, by their number in `Cells.words`."""

NOT_APPLICABLE, DIFF, NAN, INF, MINUS_INF, INF_PERCENT = range(6)

DEVICE = re.compile(r"^(?:cpu|cuda|npu)(?::\d+)?$")
"""Names of devices: which one a rank runs on is no difference between two runs."""
_NUMBER = re.compile(r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$|^[+-]?(?:inf|infinity)$|^nan$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cells:
    """A metric column: `numbers` (NaN where there is none) and `words` (place in WORDS, -1 for a number)."""

    numbers: npt.NDArray[np.float64]
    words: npt.NDArray[np.int8]

    def arrays(self) -> tuple[pa.Array, pa.Array]:
        """(float64, string) columns as partitions keep them."""

        wordy = self.words >= 0
        found = pa.DictionaryArray.from_arrays(pa.array(self.words, mask=~wordy), pa.array(WORDS))
        return pa.array(self.numbers, mask=wordy), found.cast(pa.string())


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic of one side, row by row.

    `numbers` is NaN where the value is no number (or is NaN); `is_number` tells which; `codes` are the texts' places
    in a vocabulary that both sides share (-1 for none); `is_integer` is the spelling (`3`, not `3.0`).
    """

    numbers: npt.NDArray[np.float64]
    is_number: npt.NDArray[np.bool_]
    codes: npt.NDArray[np.int64]
    is_integer: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pair:
    """One statistic of both sides, and the texts that `codes` stand for."""

    target: Statistic
    bench: Statistic
    texts: tuple[str, ...]


def equal_as_written(pair: Pair) -> npt.NDArray[np.bool_]:
    """True where both cells show the same text."""

    t, b = pair.target, pair.bench
    same_number = (t.numbers == b.numbers) & (np.signbit(t.numbers) == np.signbit(b.numbers))
    both_nan = np.isnan(t.numbers) & np.isnan(b.numbers)
    same: npt.NDArray[np.bool_] = (
        (t.is_number == b.is_number)
        & (t.codes == b.codes)
        & (~t.is_number | same_number | both_nan)
        & (t.is_integer == b.is_integer)
    )
    return same


def statistics_cells(pair: Pair, matched: npt.NDArray[np.bool_]) -> tuple[Cells, Cells, npt.NDArray[np.bool_]]:
    """(difference, relative error in percent, equal as written) of one statistic."""

    equal = equal_as_written(pair)
    readings = [_reading(text) for text in pair.texts]
    t, t_numeric = _read(pair.target, readings)
    b, b_numeric = _read(pair.bench, readings)
    devices = [bool(DEVICE.match(text)) for text in pair.texts]
    blank = [text == "N/A" for text in pair.texts]
    neither = (_flag(pair.target, devices) & _flag(pair.bench, devices)) | (
        _flag(pair.target, blank) | _flag(pair.bench, blank)
    )
    with np.errstate(all="ignore"):
        difference = t - b
        relative = np.abs(difference / b) * 100.0
    words = np.full(len(t), -1, np.int8)
    words[np.isnan(difference)] = NAN
    words[np.isposinf(difference)] = INF
    words[np.isneginf(difference)] = MINUS_INF
    words[~(t_numeric & b_numeric)] = DIFF
    words[neither] = NOT_APPLICABLE
    words[equal] = -1
    words[~matched] = NOT_APPLICABLE
    relative_words = words.copy()
    plain = (words < 0) & ~equal
    relative_words[plain & np.isinf(relative)] = INF_PERCENT
    relative_words[plain & (b == 0.0)] = INF
    difference = np.where(equal, 0.0, difference)
    relative = np.where(equal, 0.0, relative)
    return (
        Cells(np.where(words < 0, difference, np.nan), words),
        Cells(np.where(relative_words < 0, relative, np.nan), relative_words),
        equal & matched,
    )


def _read(side: Statistic, readings: list[float | None]) -> tuple[Any, Any]:
    """(values, which are numeric): texts that spell a number count as that number, as msprobe has it."""

    if not any(reading is not None for reading in readings):
        return side.numbers, side.is_number
    values = np.array([np.nan if reading is None else reading for reading in readings] + [np.nan])
    numeric = np.array([reading is not None for reading in readings] + [False])
    textual = ~side.is_number
    return (
        np.where(textual, values[side.codes], side.numbers),
        np.where(textual, numeric[side.codes], True),
    )


def _flag(side: Statistic, of_text: list[bool]) -> npt.NDArray[np.bool_]:
    """True for rows whose cell is a text with the flag."""

    flags: npt.NDArray[np.bool_] = np.array([*of_text, False])[side.codes] & ~side.is_number
    return flags


def _reading(text: str) -> float | None:
    """The number that a text spells, or None."""
    stripped = text.strip()
    return float(stripped) if _NUMBER.match(stripped) else None


def ratio(relative: Cells) -> npt.NDArray[np.float64]:
    """Relative errors as ratios, infinite where the cell says so and NaN where it holds no measure."""

    out = relative.numbers / 100.0
    infinite = np.isin(relative.words, (INF, MINUS_INF, INF_PERCENT))
    out[infinite] = math.inf
    return out
