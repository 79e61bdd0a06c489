"""Columns of texts as numbers: what is asked of a text is asked once, and columns are compared as integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Coded:
    """A text column: numbers of distinct texts in order of first appearance, -1 for null."""

    codes: npt.NDArray[np.int64]
    texts: list[str]

    def among(self, says: Any) -> npt.NDArray[np.bool_]:
        """True for rows whose text fulfils `says` (asked once per distinct text); False for null."""

        found: npt.NDArray[np.bool_] = np.array([*(bool(says(text)) for text in self.texts), False])[self.codes]
        return found

    def of(self, function: Any, missing: float) -> npt.NDArray[np.float64]:
        """A number for each row's text."""

        found: npt.NDArray[np.float64] = np.array([*(function(text) for text in self.texts), missing])[self.codes]
        return found


def codes(column: Any) -> Coded:
    """A column of texts, dictionary-encoded or not."""
    array = one(column)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    indices = pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return Coded(indices, [str(text) for text in array.dictionary.to_pylist()])


def joined(column: Any, other: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], tuple[str, ...]]:
    """Codes of both columns in one vocabulary (-1 for null), and the vocabulary."""

    a, b = codes(column), codes(other)
    places: dict[str, int] = {}
    maps = [np.array([*(places.setdefault(text, len(places)) for text in side.texts), -1]) for side in (a, b)]
    return maps[0][a.codes], maps[1][b.codes], tuple(places)


def pairwise(a: Coded, b: Coded, holds: Any) -> npt.NDArray[np.bool_]:
    """`holds(text, other)` row by row, asked once per distinct pair; False where one side is null."""

    width = len(b.texts) + 1
    pairs, place = np.unique(a.codes * width + b.codes + 1, return_inverse=True)
    answers: npt.NDArray[np.bool_] = np.array(
        [
            pair % width > 0 and pair >= 0 and bool(holds(a.texts[pair // width], b.texts[pair % width - 1]))
            for pair in pairs
        ],
        bool,
    )
    found: npt.NDArray[np.bool_] = answers[place.reshape(-1)]
    return found


def one(column: Any) -> Any:
    """One Array of a column whose chunks were combined."""

    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.array([], column.type) if column.num_chunks == 0 else column.combine_chunks()
