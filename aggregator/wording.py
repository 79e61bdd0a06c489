"""What differs in one row of a partition, in words with both values (target first)."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING

from aggregator import columns, dtypes, partition, placement
from aggregator.columns import BENCH_STATISTICS, NPU_STATISTICS, TEXT_SUFFIX, Mode

if TYPE_CHECKING:
    import pyarrow as pa

_STATISTIC_CELLS = tuple(zip(("max", "min", "mean", "norm"), NPU_STATISTICS, BENCH_STATISTICS, strict=True))
"""(word, column of the target, column of the bench)."""

_NOT_SHOWN = "differs by what the table does not show"


def cell(table: pa.Table, name: str, row: int, *, whole: bool = False) -> str:
    """A cell's text; numbers as Python writes them, whole ones of an integer type without `.0`."""
    value = table[name][row].as_py()
    if value is None and name + TEXT_SUFFIX in table.column_names:
        value = table[name + TEXT_SUFFIX][row].as_py()
    if isinstance(value, float):
        return str(int(value)) if whole and value.is_integer() else repr(value)
    return "" if value is None else str(value).strip()


def frames(cell: str) -> tuple[str, ...]:
    """The frames of a cell of `columns.STACK`; a text that is no list is one frame."""
    if not cell.startswith("["):
        return ()
    try:
        return tuple(str(frame) for frame in ast.literal_eval(cell))
    except (ValueError, SyntaxError):
        return (cell,)


def reason(cells: dict[str, str], mode: Mode, found: float) -> str:
    """What differs in a row of these cells (by column), whose excess is `found`."""
    if cells.get(columns.OUR_REASON):
        return cells[columns.OUR_REASON]
    types = cells["NPU Dtype"], cells["Bench Dtype"]
    shapes = cells["NPU Tensor Shape"], cells["Bench Tensor Shape"]
    if cells[columns.BENCH_NAME] == "N/A":
        if cells.get("NPU max", "").lower() in partition.NON_FINITE:
            return f"max {cells['NPU max']}, and no counterpart in the bench"
        if cells.get("role") == "output":
            return "the bench has no such call, and what comes after it differs"
        if types[0] == "N/A":
            return "None, and the bench's call has a value in this place"
        return f"the bench's call has no item of this place and type ({types[0]})"
    if not dtypes.same_dtype(*types):
        return f"dtype {types[0]} against {types[1]}"
    if shapes[0] != shapes[1]:
        return f"shape {shapes[0]} against {shapes[1]}"
    if mode is Mode.MD5:
        return f"checksum {cells[columns.CHECKSUMS[0]]} against {cells[columns.CHECKSUMS[1]]}"
    weights: dict[str, float] = {}
    told: dict[str, str] = {}
    values = {name: (_number(cells[n]), _number(cells[b])) for name, n, b in _STATISTIC_CELLS}
    top = max((abs(v) for name in ("max", "min") for v in values[name] if v is not None), default=0.0)
    for name, npu, bench in _STATISTIC_CELLS:
        a, b = cells[npu], cells[bench]
        x, y = values[name]
        if a == b or partition.says_nothing(a) or partition.says_nothing(b):
            continue
        if x is None or y is None or not (math.isfinite(x) and math.isfinite(y)):
            return f"{'value' if x is None or y is None else name} {a} against {b}"
        scale = max(abs(x), abs(y)) if name == "norm" else max(top, abs(x), abs(y))
        weights[name] = abs(x - y) / scale if x != y else 0.0
        told[name] = f"{name} {_short(x)} against {_short(y)}, {_percent(x, y)} apart"
    if not weights:
        return f"{_NOT_SHOWN} (slice bounds, peer, memory format)"
    if math.isinf(found) and cells["NPU max"] == cells["NPU min"] == cells["NPU mean"]:
        return f"value {cells['NPU max']} against {cells['Bench max']}"
    worst = max(weights, key=lambda name: weights[name])
    # The norm sums up all elements, so it is the better witness where it tells nearly as much.
    if weights.get("norm", 0.0) > weights[worst] / 2:
        worst = "norm"
    return told[worst] + ("" if math.isinf(found) else f" ({found:.3g} times the tolerance)")


def with_placement(reason: str, placed: str) -> str:
    """The reason with the DTensor's placement, which comes first where it is another one on the two sides."""
    if placement.AGAINST in placed:
        return f"placement {placed}" if reason.startswith(_NOT_SHOWN) else f"placement {placed}; {reason}"
    return f"{reason}; this rank's part, {placed}" if placed else reason


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _short(value: float) -> str:
    return f"{value:.7g}"


def _percent(x: float, y: float) -> str:
    return f"{abs(x - y) / abs(y) * 100:.3g} %" if y else "all of it"
