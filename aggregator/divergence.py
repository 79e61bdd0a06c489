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
scale: 1/128 of the largest value that came in, for an output of a backward call; 1/128 of the largest gradient of its
module, for a parameter's gradient; and 2^-12 (which is u times 2^12) of the largest value in the same place of all
calls of the same API, for calls after the step's last backward call (clipping, optimizer, reductions of gradients).
Inputs and forward outputs before that have no such floor.

The excess is infinite, whatever the tolerance, where NaN or infinity stands on one side only or in another place,
where dtype or shape differ, where a value that is no tensor differs (floats among them are judged as float32), where an
integer or boolean tensor differs, where a checksum differs, and where an op lacks an item of that type on the bench's
side. It is null where nothing can be compared: unmatched ops, items without values.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import columns, placement
from aggregator.columns import BENCH_STATISTICS, NPU_NAME, NPU_STATISTICS, TEXT_SUFFIX, Mode
from aggregator.items import NO_CHECKSUM
from aggregator.metrics import DEVICE
from aggregator.model import Divergence

if TYPE_CHECKING:
    import numpy.typing as npt

EXCESS = "excess"

LAYOUT, OUR_REASON = "layout", "layout finding"
"""Columns that only `layouts.compare` writes: which ranks make a row and how, and what was found where its cells do not
show it."""

SIGNIFICAND_BITS: dict[str, int] = {
    "float64": 53,
    "float32": 24,
    "float16": 11,
    "bfloat16": 8,
    "complex128": 53,  # the statistics of complex tensors are those of the absolute values
    "complex64": 24,
    "float8_e4m3fn": 4,
    "float8_e4m3fnuz": 4,
    "float8_e5m2": 3,
    "float8_e5m2fnuz": 3,
}

WIDE_MULTIPLE = 2.0**11  # unit roundoffs for float32 and float64, see above
NARROW_MULTIPLE = 2.0  # for formats of 16 bits and fewer
SINGLE_ELEMENT = 2.0  # a maximum or minimum may be off by twice what a norm may
NARROW_ELEMENTS = 4.0  # times T: stored values of 16 bits are compared one by one, and each may be rounded elsewhere
NARROW_GRADIENTS = 16.0  # times T; see above
GRADIENT_FLOOR = 2.0**-7  # of the largest value around, for gradients that cancel
OPTIMIZER_FLOOR = 2.0**-12  # of the largest value in the same place of the same API, after the last backward call

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "+inf": math.inf}

_STATISTIC_CELLS = tuple(zip(("max", "min", "mean", "norm"), NPU_STATISTICS, BENCH_STATISTICS, strict=True))
"""(word, column of the target, column of the bench)."""


def tolerance_of(dtype: str) -> float | None:
    """T of a dtype as a dump spells it (`torch.float32`, `Float32`, `<class 'float'>`); None: must be equal."""
    name = canonical_dtype(dtype)
    if name == "<class 'float'>" or name == "float":
        name = "float32"  # a Python float in a training loop is mostly the item() of a float32 tensor
    bits = SIGNIFICAND_BITS.get(name)
    if bits is None:
        return None
    return (WIDE_MULTIPLE if bits >= 24 else NARROW_MULTIPLE) * 2.0**-bits


def canonical_dtype(dtype: str) -> str:
    """`float32` for `torch.float32`, `mindspore.float32` and `Float32`; other texts as they are."""
    bare = dtype.removeprefix("torch.").removeprefix("mindspore.")
    return bare.lower() if bare[:1].isupper() else bare


_INDICES = ("Int32", "torch.int64"), ("Int64", "torch.int32")


def same_dtype(dtype: str, other: str) -> bool:
    """True where two dtypes are one but for the framework's spelling, or 32- and 64-bit integers of two frameworks:
    MindSpore's functions ask for int32 ids and labels where PyTorch's ask for int64."""
    return canonical_dtype(dtype) == canonical_dtype(other) or (dtype, other) in _INDICES or (other, dtype) in _INDICES


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
    matched = _matched(table)
    certain = np.zeros(height, bool)
    if mode is Mode.STRUCTURE:
        pass
    elif mode is Mode.MD5:
        npu, bench = _same_codes(_texts(table, columns.CHECKSUMS[0]), _texts(table, columns.CHECKSUMS[1]))
        has_both = matched & ~_texts(table, columns.CHECKSUMS[0]).among(_no_checksum)
        has_both &= ~_texts(table, columns.CHECKSUMS[1]).among(_no_checksum)
        out[has_both] = 0.0
        certain |= has_both & (npu != bench)
    else:
        _of_statistics(table, tolerance, limits, matched, out, certain, apart)
    unread = _uninitialised(table)
    out[unread] = np.nan
    certain[unread] = False
    for name in ("Dtype", "Tensor Shape"):
        canonical = canonical_dtype if name == "Dtype" else str
        texts = _texts(table, f"NPU {name}"), _texts(table, f"Bench {name}")
        npu, bench = _same_codes(*texts, canonical)
        other = matched & (npu != bench)
        if name == "Dtype" and other.any():
            for pair in (*_INDICES, *(pair[::-1] for pair in _INDICES)):
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
    ops = _texts(table, "op").codes
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


def _uninitialised(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Rows whose values nobody has computed: what an allocation gives, and what an in-place fill finds."""
    ops = _texts(table, "op")
    found = ops.among(_ALLOCATES.search) & _texts(table, "role").among(lambda text: text == "output")
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
    ops = _texts(table, "op")
    whole = "int" in str(table["NPU Dtype"][row].as_py())
    shown = [name for name in table.column_names if not name.endswith(TEXT_SUFFIX) and name != columns.STACK]
    cells = {name: _cell(table, name, row, whole=whole) for name in shown}
    op_rows = np.flatnonzero(ops.codes == ops.codes[row])
    stack = _cell(table, columns.STACK, int(op_rows[0])) if columns.STACK in table.column_names else ""
    reason = _with_placement(_reason(cells, mode, float(values[row])), cells.get(placement.COLUMN, ""))
    return Divergence(
        step=step,
        rank=rank,
        row=row,
        position=int(ops.codes[row]),
        item=cells[NPU_NAME],
        bench_item=cells[columns.BENCH_NAME],
        reason="; ".join(part for part in (reason, cells.get(LAYOUT)) if part),
        excess=float(values[row]),
        npu_max=cells.get("NPU max", ""),
        bench_max=cells.get("Bench max", ""),
        npu_norm=cells.get("NPU l2norm", ""),
        bench_norm=cells.get("Bench l2norm", ""),
        parent=table["parent"][row].as_py() if "parent" in table.column_names else None,
        stack=_frames(stack),
    )


def sentence(found: Divergence) -> str:
    """One line that names the item, the module around it and what differs."""
    inside = f", inside {found.parent}" if found.parent else ""
    return f"{found.item}{inside}: {found.reason}"


# -- statistics mode


def _matched(table: pa.Table) -> npt.NDArray[np.bool_]:
    """True for rows that have a bench row."""
    lacking = pc.is_in(table[columns.BENCH_NAME], value_set=pa.array(["N/A", "", "nan", "None", None], pa.string()))
    return np.asarray(~lacking.to_numpy())


@dataclass(frozen=True, slots=True)
class _Coded:
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


def _texts(table: pa.Table, name: str) -> _Coded:

    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    codes = pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return _Coded(codes, [str(text) for text in column.dictionary.to_pylist()])


def _same_codes(a: _Coded, b: _Coded, canonical: Any = str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Both columns as numbers of one vocabulary, so that equal texts are equal numbers."""
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(canonical(text), len(places))

    return a.of(place, -1.0), b.of(place, -1.0)


def _says_nothing(text: str) -> bool:
    return text.strip() in ("N/A", "", "None", "nan")


def _no_checksum(text: str) -> bool:
    """None, or recorded without a checksum, which msprobe shows as that of no bytes."""
    return _says_nothing(text) or text == NO_CHECKSUM


@dataclass(frozen=True, slots=True)
class _Side:
    """max, min, mean, norm of one side: numbers (NaN: not a number or NaN itself), which are NaN, and the words."""

    numbers: tuple[npt.NDArray[np.float64], ...]
    is_number: tuple[npt.NDArray[np.bool_], ...]
    words: tuple[_Coded, ...]


def _side(table: pa.Table, names: tuple[str, ...]) -> _Side:

    numbers, is_number, words = [], [], []
    for name in names:
        plain = table[name].to_numpy().astype(np.float64)
        text = _texts(table, name + TEXT_SUFFIX)
        special = text.of(lambda word: _NON_FINITE.get(word.strip().lower(), 0.0), 0.0)
        is_special = text.among(lambda word: word.strip().lower() in _NON_FINITE)
        valid = table[name].is_valid().to_numpy()
        numbers.append(np.where(is_special & ~valid, special, np.where(valid, plain, np.nan)))
        is_number.append(valid | is_special)
        words.append(text)
    return _Side(tuple(numbers), tuple(is_number), tuple(words))


def _largest(npu: _Side, bench: _Side) -> npt.NDArray[np.float64]:
    found = np.zeros(len(npu.numbers[0]))
    for side in (npu, bench):
        for i in (0, 1):
            found = np.fmax(found, np.where(np.isfinite(side.numbers[i]), np.abs(side.numbers[i]), 0.0))
    return found


def largest_values(table: pa.Table) -> npt.NDArray[np.float64]:
    """Largest finite absolute value of each row's item on either side, 0 for none."""
    return _largest(_side(table, NPU_STATISTICS), _side(table, BENCH_STATISTICS))


def not_finite(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Rows whose maximum or minimum is NaN or infinite on the target's side and finite on the bench's."""
    npu, bench = _side(table, NPU_STATISTICS), _side(table, BENCH_STATISTICS)

    def odd(side: _Side) -> npt.NDArray[np.bool_]:
        return np.logical_or(*(side.is_number[i] & ~np.isfinite(side.numbers[i]) for i in (0, 1)))

    return odd(npu) & ~(odd(bench) & _matched(table))


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

    npu, bench = _side(table, NPU_STATISTICS), _side(table, BENCH_STATISTICS)
    dtype = _texts(table, "NPU Dtype")
    allowed = dtype.of(lambda text: tolerance_of(text) or 0.0, 0.0)
    exact = allowed == 0.0
    gradients = _gradients(table)
    allowed = _widened(table, allowed, npu.is_number[0], gradients)
    single = SINGLE_ELEMENT
    if tolerance is not None:
        allowed, single = np.full(len(allowed), tolerance), 1.0
    if limits is not None:
        allowed = limits.allowed
    half = dtype.among(lambda text: canonical_dtype(text) == "float16")
    elements = _texts(table, "NPU Tensor Shape").of(_elements, math.nan)

    both = [a & b & matched for a, b in zip(npu.is_number, bench.is_number, strict=True)]
    largest = _largest(npu, bench)
    norms = [np.abs(side.numbers[3]) for side in (npu, bench)]
    norm = np.fmax(*(np.where(np.isfinite(value), value, 0.0) for value in norms))
    with np.errstate(all="ignore"):
        spread = np.where((elements > 0) & (norm > 0.0), norm / np.sqrt(elements), largest)
        # No mean is larger than the root mean square, but for tables whose statistics do not belong together.
        for side in (npu, bench):
            spread = np.fmax(spread, np.where(np.isfinite(side.numbers[2]), np.abs(side.numbers[2]), 0.0))
    floor = _floor(table, largest, gradients)
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
    npu: _Side,
    bench: _Side,
    matched: npt.NDArray[np.bool_],
    out: npt.NDArray[np.float64],
    certain: npt.NDArray[np.bool_],
) -> None:
    """What is no number: equal or not. A statistic that only one side recorded (None) says nothing."""

    for i in (0, 1):
        a, b = _same_codes(npu.words[i], bench.words[i])
        wordy = matched & ~npu.is_number[i] & ~bench.is_number[i]
        told = wordy & ~npu.words[i].among(_says_nothing) & ~bench.words[i].among(_says_nothing)
        devices = npu.words[i].among(_is_device) & bench.words[i].among(_is_device)
        out[wordy & (a == b)] = np.fmax(out[wordy & (a == b)], 0.0)
        certain |= told & (a != b) & ~devices


def _is_device(text: str) -> bool:
    return bool(DEVICE.match(text.strip()))


def _elements(shape: str) -> float:
    """Number of elements of a shape's text (`[2, 3]` -> 6, `[]` -> 1), NaN for `N/A`."""
    inside = shape.strip()[1:-1]
    if not re.fullmatch(r"[\d, ]*", inside):
        return math.nan
    return float(math.prod(int(part) for part in re.findall(r"\d+", inside)))


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Which rows belong to a backward call, are a parameter's gradient, or come after the last backward call."""

    backward: npt.NDArray[np.bool_]
    of_parameters: npt.NDArray[np.bool_]
    after: npt.NDArray[np.bool_]


def _gradients(table: pa.Table) -> _Gradients:
    backward = np.asarray(pc.match_substring_regex(table["op"], r"\.backward(?:\.\d+)?$").to_numpy())
    of_parameters = _texts(table, "role").among(lambda text: text == "parameters_grad")
    calls = np.flatnonzero(backward)
    after = np.arange(len(backward)) > (calls[-1] if len(calls) else len(backward))
    return _Gradients(backward, of_parameters, after & ~of_parameters)


def _widened(
    table: pa.Table, own: npt.NDArray[np.float64], is_number: npt.NDArray[np.bool_], gradients: _Gradients
) -> npt.NDArray[np.float64]:
    """T of each row, given that of its dtype (0 for what must be equal)."""
    keeps = _texts(table, "role").among(lambda text: text == "parameters")
    keeps |= _texts(table, "NPU Dtype").among(lambda text: text.startswith("<class") or text == "float")
    so_far = np.maximum.accumulate(np.where(is_number & ~keeps, own, 0.0))
    # Mean and norm of an integer tensor were computed in floating point all the same.
    float32 = WIDE_MULTIPLE * 2.0**-24
    allowed = np.where(own > 0.0, np.where(keeps, own, np.fmax(own, so_far)), float32)
    narrow = allowed > float32
    return np.where(
        narrow & ~keeps & (gradients.backward | gradients.of_parameters | gradients.after),
        allowed * NARROW_GRADIENTS,
        allowed,
    )


def _floor(table: pa.Table, largest: npt.NDArray[np.float64], gradients: _Gradients) -> npt.NDArray[np.float64]:
    """The least scale that gradients are judged against, 0 for all other rows (see the module's docstring)."""
    role = _texts(table, "role")
    floor = np.zeros(len(largest))
    ops = _texts(table, "op")
    sources = (gradients.backward & role.among(lambda text: text == "input")) | gradients.of_parameters
    judged = (gradients.backward & role.among(lambda text: text == "output")) | gradients.of_parameters
    if judged.any():
        around = np.zeros(len(ops.texts) + 1)
        np.maximum.at(around, ops.codes[sources], largest[sources])
        floor[judged] = around[ops.codes[judged]] * GRADIENT_FLOOR
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


# -- words for one row

_NOT_SHOWN = "differs by what the table does not show"


def _cell(table: pa.Table, name: str, row: int, *, whole: bool = False) -> str:
    """A cell's text; numbers as Python writes them, whole ones of an integer type without `.0`."""
    value = table[name][row].as_py()
    if value is None and name + TEXT_SUFFIX in table.column_names:
        value = table[name + TEXT_SUFFIX][row].as_py()
    if isinstance(value, float):
        return str(int(value)) if whole and value.is_integer() else repr(value)
    return "" if value is None else str(value).strip()


def _frames(cell: str) -> tuple[str, ...]:
    if not cell.startswith("["):
        return ()
    try:
        return tuple(str(frame) for frame in ast.literal_eval(cell))
    except (ValueError, SyntaxError):
        return (cell,)


def _reason(cells: dict[str, str], mode: Mode, found: float) -> str:
    """What differs, in words with both values (target first)."""
    if cells.get(OUR_REASON):
        return cells[OUR_REASON]
    dtypes = cells["NPU Dtype"], cells["Bench Dtype"]
    shapes = cells["NPU Tensor Shape"], cells["Bench Tensor Shape"]
    if cells[columns.BENCH_NAME] == "N/A":
        if cells.get("NPU max", "").lower() in _NON_FINITE:
            return f"max {cells['NPU max']}, and no counterpart in the bench"
        if cells.get("role") == "output":
            return "the bench has no such call, and what comes after it differs"
        return f"the bench's call has no item of this place and type ({dtypes[0]})"
    if not same_dtype(*dtypes):
        return f"dtype {dtypes[0]} against {dtypes[1]}"
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
        if a == b or _says_nothing(a) or _says_nothing(b):
            continue
        if x is None or y is None or not (math.isfinite(x) and math.isfinite(y)):
            return f"{'value' if x is None or y is None else name} {a} against {b}"
        scale = max(abs(x), abs(y)) if name == "norm" else max(top, abs(x), abs(y))
        weights[name] = abs(x - y) / scale if x != y else 0.0
        told[name] = f"{name} {_short(x)} against {_short(y)}, {_percent(x, y)} apart"
    if not weights:
        return f"{_NOT_SHOWN} (an argument that only the bench has, slice bounds, peer, memory format)"
    if math.isinf(found) and cells["NPU max"] == cells["NPU min"] == cells["NPU mean"]:
        return f"value {cells['NPU max']} against {cells['Bench max']}"
    worst = max(weights, key=lambda name: weights[name])
    # The norm sums up all elements, so it is the better witness where it tells nearly as much.
    if weights.get("norm", 0.0) > weights[worst] / 2:
        worst = "norm"
    return told[worst] + ("" if math.isinf(found) else f" ({found:.3g} times the tolerance)")


def _with_placement(reason: str, placed: str) -> str:
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
