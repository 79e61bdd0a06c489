"""Values that are not finite in a run that has no bench: which are wrong, and which came first.

A NaN or an infinity is a finding unless the script asked for it: attention masks are filled with -inf on purpose
(`masked_fill(mask, float("-inf"))`, `torch.full(size, -inf)`). So infinities of a sign that an earlier call of the same
step took as a plain argument, and nothing else non-finite in that item, are counted apart. A NaN is always a finding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Mask = npt.NDArray[np.bool_]

# A plain Python number's dtype cell, `<class 'float'>`, unlike a tensor's `torch.float32`.
PLAIN = "<class 'float'>"


@dataclass(frozen=True, slots=True)
class Scan:
    """Per item of one (step, rank): the masks, in call order."""

    nan: Mask
    positive: Mask
    negative: Mask
    asked_for: Mask

    @property
    def findings(self) -> Mask:
        return (self.nan | self.positive | self.negative) & ~self.asked_for

    def words(self, row: int) -> str:
        """`NaN`, `+Inf`, `-Inf`, or several of them."""
        pairs = ((self.nan, "NaN"), (self.positive, "+Inf"), (self.negative, "-Inf"))
        return " and ".join(word for mask, word in pairs if mask[row])


def scan(items: pa.Table) -> Scan:
    """Look at the items of a `read.RankDump` (NaN and infinities are numbers there, null is no number).

    Only the maximum and the minimum decide about infinities: a norm can overflow while every element is finite.
    """
    columns = {name: _floats(items.column(name)) for name in ("max", "min", "mean", "norm")}
    valid = {name: _valid(items.column(name)) for name in columns}
    nan = np.zeros(items.num_rows, dtype=bool)
    for name in ("max", "min"):
        nan |= valid[name] & np.isnan(columns[name])
    # The mean of a tensor that holds both infinities is NaN without a NaN in the tensor.
    infinite = np.isinf(columns["max"]) | np.isinf(columns["min"])
    nan |= valid["mean"] & np.isnan(columns["mean"]) & ~infinite
    positive = np.isposinf(columns["max"]) | np.isposinf(columns["min"])
    negative = np.isneginf(columns["min"]) | np.isneginf(columns["max"])
    plain = np.asarray(pc.equal(items.column("dtype").cast(pa.string()), PLAIN), dtype=bool)
    # A NaN is a finding wherever it comes from, also as an argument that the script wrote down.
    asked = plain & (positive | negative) & ~nan
    for own, other in ((positive, negative), (negative, positive)):
        given = np.flatnonzero(plain & own)
        if len(given):
            later = np.arange(items.num_rows) >= given[0]
            asked |= own & ~other & ~nan & later
    return Scan(nan, positive, negative, asked)


def _floats(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    return np.asarray(pc.fill_null(column, 0.0).to_numpy(), dtype=np.float64)


def _valid(column: pa.ChunkedArray) -> Mask:
    return np.asarray(pc.is_valid(column).to_numpy(), dtype=bool)
