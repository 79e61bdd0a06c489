"""The N/A rule: where a metric says nothing, the cell shows both sides' maxima instead.

    N/A, unsupported, Nan   ->   NPU:<NPU max>  Bench:<Bench max>        two blanks between

This is what msprobe's merge has done since 1.2.2: non-tensors such as a process group then show their value
(`NPU:[0, 1]  Bench:[0, 1]`). A side without a maximum says `N/A`.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from aggregator import cells

# In lower case; files also spell them `Nan`, `NaN`, `nan`.
UNRESOLVED = ("n/a", "unsupported", "nan")

NO_MAXIMUM = "N/A"


def needs_resolution(texts: pa.Array) -> pa.Array:
    """Mask of the metric texts that say nothing (null texts stand for a number: False)."""
    lowered = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
    return pc.fill_null(pc.is_in(lowered, value_set=pa.array(UNRESOLVED)), False)


def resolve(texts: pa.Array, mask: pa.Array, npu_max: pa.Array, bench_max: pa.Array) -> pa.Array:
    """Metric texts with the rule applied where `mask` says so.

    `npu_max` and `bench_max` are shown cells (`cells.join`) of the masked rows only, in order.
    """
    shown = pc.binary_join_element_wise("NPU:", _side(npu_max), "  Bench:", _side(bench_max), "")
    return pc.replace_with_mask(texts, mask, shown)


def _side(shown: pa.Array) -> pa.Array:
    filled = pc.fill_null(cells.python_exponents(shown), NO_MAXIMUM)
    return pc.if_else(pc.equal(filled, ""), NO_MAXIMUM, filled)
