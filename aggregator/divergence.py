"""Where two runs part: how far each item is off in units of rounding, and the first item that is off by more.

Independent of msprobe's verdicts, which look at the norm of outputs only and start at 50 %. The excess of an item is

    max over its statistics of   |t - b| / (scale * tolerance)

    statistic   scale                                                   tolerance
    norm        the larger of the two norms (their absolute values:     T
                msprobe signs the norm of a 0-d tensor)
    mean        root mean square, norm / sqrt(elements): a mean near    T
                zero is the sum of what cancels, so its error is that
                of the summands (Higham, Accuracy and Stability of
                Numerical Algorithms, 2nd ed., section 4.2), not its own
    max, min    largest absolute value of the item (max abs of both)    2 T: one element, which averages nothing out

T is a multiple of the unit roundoff u = 2^-p of the dtype (p significand bits):

    16 bits and fewer    2 u      products are summed in float32 and rounded once; the factor 2 is one unit in the last
                                  place where the significand is near 1. 32 u for gradients: kernels sum those of
                                  shared parameters over all tokens, and round on the way
    float32, float64     2^11 u   errors of a sum of K products grow as sqrt(K) u (Higham & Mary 2019, probabilistic
                                  rounding error): K = 4096 gives 2^6, times 2^5 for the layers an error runs through

so float32 tolerates 2^-13 = 0.012 % in a norm, an eighth of a weight that is off by 0.1 %, and bfloat16 0.8 %.
Measured on a 6-layer transformer with other kernels and another number of threads (docs/compare.md): the largest excess
is 0.24 in three steps of float32 and 0.94 in the first step of bfloat16.

What a float32 item was computed from may have been bfloat16 (autocast). So T is that of the widest-rounding dtype that
was recorded so far; only parameters and plain values, which nothing was computed into, keep their own.

Gradients that cancel to zero by construction (the bias of attention keys) are nothing but rounding. So there is a least
scale: 1/128 of the largest value that came in, times sqrt(K) where K elements came in for each that goes out (the sum
over the tokens), for an output of a backward call; 1/128 of the largest gradient of its module, for a parameter's;
and 2^-12 (which is u times 2^12) of the largest value in the same place of all calls of the same API, for calls after
the step's last backward call (clipping, optimizer, reductions of gradients). Inputs and forward outputs before that
have no such floor.

The excess is infinite, whatever the tolerance, where NaN or infinity stands on one side only or in another place,
where dtype or shape differ, where a value that is no tensor differs (floats among them are judged as float32), where an
integer or boolean tensor differs, where a checksum differs, and where an op lacks an item of that type on the bench's
side. It is null where nothing can be compared: unmatched ops, items without values.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import columns, dtypes, partition, placement, wording
from aggregator.columns import BENCH_STATISTICS, NPU_NAME, NPU_STATISTICS, TEXT_SUFFIX, Mode
from aggregator.metrics import DEVICE
from aggregator.model import Divergence

if TYPE_CHECKING:
    import numpy.typing as npt

EXCESS = "excess"


WIDE_MULTIPLE = 2.0**11  # unit roundoffs for float32 and float64, see above
NARROW_MULTIPLE = 2.0  # for formats of 16 bits and fewer
SINGLE_ELEMENT = 2.0  # a maximum or minimum may be off by twice what a norm may
NARROW_ELEMENTS = 4.0  # times T: stored values of 16 bits are compared one by one, and each may be rounded elsewhere
NARROW_GRADIENTS = 16.0  # times T; see above
GRADIENT_FLOOR = 2.0**-7  # of the largest value around, for gradients that cancel
OPTIMIZER_FLOOR = 2.0**-12  # of the largest value in the same place of the same API, after the last backward call


def tolerance_of(dtype: str) -> float | None:
    """T of a dtype as a dump spells it (`torch.float32`, `Float32`, `<class 'float'>`); None: must be equal."""
    name = dtypes.canonical_dtype(dtype)
    if name == "<class 'float'>" or name == "float":
        name = "float32"  # a Python float in a training loop is mostly the item() of a float32 tensor
    bits = dtypes.SIGNIFICAND_BITS.get(name)
    if bits is None:
        return None
    return (WIDE_MULTIPLE if bits >= 24 else NARROW_MULTIPLE) * 2.0**-bits


@dataclass(frozen=True, slots=True)
class Limits:
    """Row by row, in place of T and beside the floors above: what `--verdict noise` tolerates (see `noise`)."""

    allowed: npt.NDArray[np.float64]
    floor: npt.NDArray[np.float64]


def excess(
    table: pa.Table,
    mode: Mode,
    *,
    tolerance: float | None = None,
    differs: npt.NDArray[np.bool_] | None = None,
    apart: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None,
    limits: Limits | None = None,
) -> npt.NDArray[np.float64]:
    """Excess of each row of a partition (see model.py; `op` and `role` included), NaN where nothing can be compared.

    `tolerance` replaces T of every floating dtype, for all statistics alike; `limits` replaces T row by row. `differs`
    marks rows that are known to differ by what the table does not show (slice bounds, an item of another type).
    `apart`, in tensor mode, is how far the stored values are apart: (|t - b| over the norm, largest difference over the
    largest value), NaN for none.
    """

    height = table.num_rows
    out = np.full(height, np.nan)
    if height == 0:
        return out
    matched = partition.matched(table)
    certain = np.zeros(height, bool)
    if mode is Mode.STRUCTURE:
        pass
    elif mode is Mode.MD5:
        checksums = [partition.texts(table, name) for name in columns.CHECKSUMS]
        npu, bench = partition.same_codes(*checksums)
        has_both = matched & ~np.logical_or(*(side.among(partition.no_checksum) for side in checksums))
        out[has_both] = 0.0
        certain |= has_both & (npu != bench)
    else:
        _of_statistics(table, tolerance, limits, matched, out, certain, apart)
    unread = uninitialised(table)
    out[unread] = np.nan
    certain[unread] = False
    for name in ("Dtype", "Tensor Shape"):
        canonical = dtypes.canonical_dtype if name == "Dtype" else str
        texts = partition.texts(table, f"NPU {name}"), partition.texts(table, f"Bench {name}")
        npu, bench = partition.same_codes(*texts, canonical)
        other = matched & (npu != bench)
        if name == "Dtype" and other.any():
            for pair in (*dtypes.INDICES, *(pair[::-1] for pair in dtypes.INDICES)):
                other &= ~(texts[0].among(pair[0].__eq__) & texts[1].among(pair[1].__eq__))
        certain |= other
    if differs is not None:
        certain |= differs
    out[certain] = math.inf
    _blame_additions(table, matched, out)
    return out


def _blame_additions(table: pa.Table, matched: npt.NDArray[np.bool_], out: npt.NDArray[np.float64]) -> None:
    """Where the first finding is the value of an input, and the call just before it is none of the bench's, that call
    is named: it changed what the next one takes in."""
    rows = np.flatnonzero(np.nan_to_num(out, nan=0.0, posinf=math.inf) > 1.0)
    if not len(rows) or rows[0] == 0 or math.isinf(out[rows[0]]) or table["role"][int(rows[0])].as_py() != "input":
        return
    dtypes = [str(table[f"{side} Dtype"][int(rows[0])].as_py()) for side in ("NPU", "Bench")]
    if dtypes[0].startswith("torch.") != dtypes[1].startswith("torch."):
        return  # two frameworks: many calls are none of the other's
    ops = partition.texts(table, "op").codes
    first_row = int(np.flatnonzero(ops == ops[rows[0]])[0])
    if first_row == 0:
        return
    before = np.flatnonzero(ops == ops[first_row - 1])
    if not matched[before].any() and table["role"][int(before[-1])].as_py() == "output":
        out[before[-1]] = math.inf


_ALLOCATES = re.compile(r"\.(?:new_)?empty(?:_like|_strided|_with_format|_permuted)?\.\d+\.forward$")
_OVERWRITES = re.compile(
    r"\.(?:zero_|fill_|copy_|normal_|uniform_|random_|bernoulli_|exponential_|geometric_|cauchy_|log_normal_)"
    r"\.\d+\.forward$"
)


def uninitialised(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Rows whose values nobody has computed: what an allocation gives, and what an in-place fill finds."""
    ops = partition.texts(table, "op")
    found = ops.among(_ALLOCATES.search) & partition.texts(table, "role").among(lambda text: text == "output")
    overwritten = np.flatnonzero(ops.among(_OVERWRITES.search))
    if len(overwritten):
        names = table[NPU_NAME].take(pa.array(overwritten))
        found[overwritten] |= pc.ends_with(names, ".input.0").to_numpy()
    return found


def with_excess(table: pa.Table, mode: Mode, *, tolerance: float | None = None) -> pa.Table:
    """The partition with its `excess` column added or replaced."""

    values = excess(table, mode, tolerance=tolerance)
    column = pa.array(values, mask=np.isnan(values))
    if EXCESS in table.column_names:
        return table.set_column(table.column_names.index(EXCESS), EXCESS, column)
    return table.append_column(EXCESS, column)


def findings(table: pa.Table) -> int:
    """Number of rows with excess > 1."""

    return int(pc.sum(pc.fill_null(pc.greater(table[EXCESS], 1.0), False)).as_py() or 0)


def first(table: pa.Table, mode: Mode, *, step: int | None, rank: int | None) -> Divergence | None:
    """The earliest row with excess > 1, or None. Rows are in call order, inputs and parameters before outputs."""

    values = table[EXCESS].to_numpy()
    rows = np.flatnonzero(np.nan_to_num(values, nan=0.0, posinf=math.inf) > 1.0)
    if not len(rows):
        return None
    row = int(rows[0])
    ops = partition.texts(table, "op")
    whole = "int" in str(table["NPU Dtype"][row].as_py())
    shown = [name for name in table.column_names if not name.endswith(TEXT_SUFFIX) and name != columns.STACK]
    cells = {name: wording.cell(table, name, row, whole=whole) for name in shown}
    op_rows = np.flatnonzero(ops.codes == ops.codes[row])
    stack = wording.cell(table, columns.STACK, int(op_rows[0])) if columns.STACK in table.column_names else ""
    reason = wording.with_placement(wording.reason(cells, mode, float(values[row])), cells.get(placement.COLUMN, ""))
    return Divergence(
        step=step,
        rank=rank,
        row=row,
        position=int(ops.codes[row]),
        item=cells[NPU_NAME],
        bench_item=cells[columns.BENCH_NAME],
        reason="; ".join(part for part in (reason, cells.get(columns.LAYOUT)) if part),
        excess=float(values[row]),
        npu_max=cells.get("NPU max", ""),
        bench_max=cells.get("Bench max", ""),
        npu_norm=cells.get("NPU l2norm", ""),
        bench_norm=cells.get("Bench l2norm", ""),
        parent=table["parent"][row].as_py() if "parent" in table.column_names else None,
        stack=wording.frames(stack),
    )


def sentence(found: Divergence) -> str:
    """One line that names the item, the module around it and what differs."""
    inside = f", inside {found.parent}" if found.parent else ""
    return f"{found.item}{inside}: {found.reason}"


# -- statistics mode


def _of_statistics(
    table: pa.Table,
    tolerance: float | None,
    limits: Limits | None,
    matched: npt.NDArray[np.bool_],
    out: npt.NDArray[np.float64],
    certain: npt.NDArray[np.bool_],
    apart: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None,
) -> None:
    """Fill `out` with finite excesses and mark in `certain` what is infinite."""

    npu, bench = partition.side_of(table, NPU_STATISTICS), partition.side_of(table, BENCH_STATISTICS)
    dtype = partition.texts(table, "NPU Dtype")
    allowed = dtype.of(lambda text: tolerance_of(text) or 0.0, 0.0)
    exact = allowed == 0.0
    gradients = partition.gradients(table)
    # A cast that only the target has is a divergence, and excuses nothing after it.
    allowed = _widened(table, allowed, npu.is_number[0] & matched, gradients)
    single = SINGLE_ELEMENT
    if tolerance is not None:
        allowed, single = np.full(len(allowed), tolerance), 1.0
    if limits is not None:
        allowed = limits.allowed
    half = dtype.among(lambda text: dtypes.canonical_dtype(text) == "float16")
    elements = partition.texts(table, "NPU Tensor Shape").of(partition.elements_of, math.nan)

    both = [a & b & matched for a, b in zip(npu.is_number, bench.is_number, strict=True)]
    largest = partition.largest_of(npu, bench)
    norms = [np.abs(side.numbers[3]) for side in (npu, bench)]
    norm = np.fmax(*(np.where(np.isfinite(value), value, 0.0) for value in norms))
    with np.errstate(all="ignore"):
        spread = np.where((elements > 0) & (norm > 0.0), norm / np.sqrt(elements), largest)
        # No mean is larger than the root mean square, but for tables whose statistics do not belong together.
        for side in (npu, bench):
            spread = np.fmax(spread, np.where(np.isfinite(side.numbers[2]), np.abs(side.numbers[2]), 0.0))
    floor = _floor(table, largest, elements, gradients)
    if limits is not None:
        floor = np.fmax(floor, limits.floor)
    count = np.sqrt(np.where(elements > 0, elements, 1.0))
    scales = (
        np.fmax(largest, floor),
        np.fmax(largest, floor),
        np.fmax(spread, floor),
        np.fmax(norm, floor * count),
    )
    finite_elements = [np.isfinite(side.numbers[0]) & np.isfinite(side.numbers[1]) for side in (npu, bench)]
    for i in range(4):
        a, b = npu.numbers[i], bench.numbers[i]
        if i == 3:
            a, b = np.abs(a), np.abs(b)
        comparable = both[i]
        odd = comparable & ~(np.isfinite(a) & np.isfinite(b))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        # msprobe sums float16 in float16: its norm overflows where no element does. No sign of a fault.
        overflow = half & finite_elements[0] & finite_elements[1] if i >= 2 else np.zeros(len(out), bool)
        certain |= odd & ~same & ~overflow
        even = comparable & ~odd
        with np.errstate(all="ignore"):
            # Scaled first: differences of values near the largest double overflow.
            relative = np.abs(a / scales[i] - b / scales[i])
        relative = np.where(np.isfinite(relative), relative, np.where(a == b, 0.0, math.inf))
        if i < 2:
            certain |= even & exact & (a != b)
        part = relative / (allowed * (single if i < 2 else 1.0))
        out[even] = np.fmax(out[even], part[even])
    _of_words(npu, bench, matched, out, certain)
    if apart is not None:
        _of_values(apart, allowed, single, exact, (norm, scales[3]), (largest, scales[0]), out, certain)
    # A NaN or +inf with no counterpart has come from nowhere else; -inf alone is what attention masks are made of.
    lone = ~matched & npu.is_number[0] & (np.isnan(npu.numbers[0]) | np.isposinf(npu.numbers[0]))
    certain |= lone & (elements >= 0)


def _of_values(
    apart: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
    allowed: npt.NDArray[np.float64],
    single: float,
    exact: npt.NDArray[np.bool_],
    norm: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
    largest: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
    out: npt.NDArray[np.float64],
    certain: npt.NDArray[np.bool_],
) -> None:
    """Stored values: the distance is judged as a norm and the largest difference as a single element.

    `norm` and `largest` are (what the item has, what it is judged against, see `_floor`).
    """
    elementwise = np.where(allowed > WIDE_MULTIPLE * 2.0**-24, NARROW_ELEMENTS, 1.0)
    for value, factor, (own, scale) in zip(apart, (1.0, single), (norm, largest), strict=True):
        known = ~np.isnan(value)
        with np.errstate(all="ignore"):
            # Statistics may be missing (float8): then the values' own size is all there is.
            shrunk = np.where((own > 0.0) & (scale > 0.0), own / scale, 1.0)
            part = value * shrunk / (allowed * factor * elementwise)
        finite = known & np.isfinite(value)
        out[finite] = np.fmax(out[finite], part[finite])
        certain |= known & np.isinf(value)
        certain |= finite & exact & (value > 0.0)


def _of_words(
    npu: partition.Side,
    bench: partition.Side,
    matched: npt.NDArray[np.bool_],
    out: npt.NDArray[np.float64],
    certain: npt.NDArray[np.bool_],
) -> None:
    """What is no number: equal or not. A statistic that only one side recorded (None) says nothing."""

    for i in (0, 1):
        a, b = partition.same_codes(npu.words[i], bench.words[i])
        wordy = matched & ~npu.is_number[i] & ~bench.is_number[i]
        told = wordy & ~npu.words[i].among(partition.says_nothing) & ~bench.words[i].among(partition.says_nothing)
        devices = npu.words[i].among(_is_device) & bench.words[i].among(_is_device)
        out[wordy & (a == b)] = np.fmax(out[wordy & (a == b)], 0.0)
        certain |= told & (a != b) & ~devices


def _is_device(text: str) -> bool:
    return bool(DEVICE.match(text.strip()))


def _widened(
    table: pa.Table, own: npt.NDArray[np.float64], widens: npt.NDArray[np.bool_], gradients: partition.Gradients
) -> npt.NDArray[np.float64]:
    """T of each row, given that of its dtype (0 for what must be equal); rows that widen do so for all after them."""
    keeps = partition.texts(table, "role").among(lambda text: text == "parameters")
    keeps |= partition.texts(table, "NPU Dtype").among(lambda text: text.startswith("<class") or text == "float")
    so_far = np.maximum.accumulate(np.where(widens & ~keeps, own, 0.0))
    # Mean and norm of an integer tensor were computed in floating point all the same.
    float32 = WIDE_MULTIPLE * 2.0**-24
    allowed = np.where(own > 0.0, np.where(keeps, own, np.fmax(own, so_far)), float32)
    narrow = allowed > float32
    return np.where(
        narrow & ~keeps & (gradients.backward | gradients.of_parameters | gradients.after),
        allowed * NARROW_GRADIENTS,
        allowed,
    )


def _floor(
    table: pa.Table,
    largest: npt.NDArray[np.float64],
    elements: npt.NDArray[np.float64],
    gradients: partition.Gradients,
) -> npt.NDArray[np.float64]:
    """The least scale that gradients are judged against, 0 for all other rows (see the module's docstring)."""
    role = partition.texts(table, "role")
    floor = np.zeros(len(largest))
    ops = partition.texts(table, "op")
    sources = (gradients.backward & role.among(lambda text: text == "input")) | gradients.of_parameters
    judged = (gradients.backward & role.among(lambda text: text == "output")) | gradients.of_parameters
    if judged.any():
        around, coming_in = np.zeros(len(ops.texts) + 1), np.zeros(len(ops.texts) + 1)
        np.maximum.at(around, ops.codes[sources], largest[sources])
        floor[judged] = around[ops.codes[judged]] * GRADIENT_FLOOR
        taken = sources & gradients.backward & (elements > 0)
        np.maximum.at(coming_in, ops.codes[taken], elements[taken])
        summed = judged & gradients.backward & (elements > 0)
        floor[summed] *= np.sqrt(np.fmax(1.0, coming_in[ops.codes[summed]] / elements[summed]))
    rows = np.flatnonzero(gradients.after)
    if len(rows):
        # `Tensor.lerp_.8.forward.input.1` and `Tensor.lerp_.9.forward.input.1` are one place, lists are one as well.
        names = table[NPU_NAME].take(pa.array(rows)).combine_chunks()
        place = pc.replace_substring_regex(names, r"\.\d+\.forward\.(input|output)\.?([^.]*).*$", r".\1.\2")
        codes = place.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        around = np.zeros(int(codes.max()) + 1)
        np.maximum.at(around, codes, largest[rows])
        floor[rows] = around[codes] * OPTIMIZER_FLOOR
    return floor
