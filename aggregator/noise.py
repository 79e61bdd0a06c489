"""--verdict noise: a difference is a finding where rounding, or what two trusted runs differ by, does not explain it.

Between two runs that compute the same in another order every operation rounds elsewhere. The threshold of an item is
what these roundings can add up to on the way to it. With u the unit roundoff of a format (bfloat16 2^-8, float16 2^-11,
float32 2^-24, float64 2^-53: round to nearest, p bits) and n the length of the sums that an operation forms,

    own error of an operation    e^2 = u_stored^2 + n u_summed^2

The result is rounded once to the format it is stored in, and the errors of a sum of n terms grow as sqrt(n) u, since
they are as often up as down (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 2.8; Higham and
Mary 2019: |error| <= lambda sqrt(n) u with probability of at least 1 - 2 exp(-lambda^2 / 2)). Sums of 16-bit numbers
are formed in float32. In backward, kernels split the sums over all tokens of a batch and keep parts in the stored
format; as a tree of log2(n) levels, which adds log2(n) u_stored^2 for formats of 16 bits and fewer. What only moves
data (`view`, `transpose`, `cat`, `embedding`) rounds nothing.

Errors of operations that follow each other add up as independent ones do:

    E^2 = sum of e^2 over the operations of the step so far,  at most 2^10 max(e^2)
          + step x (max u_stored^2 + sum of n u_summed^2 over the whole step)

The bound is a path of 2^10 operations; errors on branches that do not meet do not add up. The second line is what
earlier steps have left in the parameters, which are rounded once a step, and whose updates carry errors of sums. The
threshold of maximum and minimum is lambda E with lambda = 4 (missed by 2 exp(-8) = 0.07 % of what rounds as badly as
assumed), that of norm and mean, in which errors of elements partly cancel, half of it. Scales are those of
`divergence`.

One thing is no rounding and is noise all the same: an optimizer that divides a gradient by its own size (Adam) turns
the sign of a gradient that is nothing but rounding into a whole learning rate. In steps after the first, parameters and
other floating inputs of a forward call are therefore judged against at least 1/8 of the largest among them, to which
they are added or by which they are multiplied.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aggregator import columns, divergence, partition, verdict
from aggregator.coded import Coded
from aggregator.columns import Mode
from aggregator.divergence import EXCESS, Limits
from aggregator.dtypes import SIGNIFICAND_BITS, canonical_dtype
from aggregator.thresholds import CONFIDENCE, DEFAULT, SPREAD_FACTOR, OpThreshold, Thresholds
from msprobe_launch.errors import NothingUsable, near_miss
from msprobe_launch.records.names import OpName, Phase

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float64]

SUMMED_BITS = 24  # formats of 16 bits and fewer are summed in float32
LONGEST_PATH = 2.0**10
BASE_LENGTH = 64.0
INPUT_FLOOR = 2.0**-3

CONSTANTS: tuple[tuple[str, str, str], ...] = (
    ("u of float64", "2^-53", "unit roundoff: half a unit in the last place of a significand of 53 bits, at 1"),
    ("u of float32, complex64", "2^-24", "24 bits"),
    ("u of float16", "2^-11", "11 bits"),
    ("u of bfloat16", "2^-8", "8 bits"),
    ("u of float8", "2^-4, 2^-3", "4 bits (e4m3), 3 bits (e5m2)"),
    ("n", "from shapes", "length of the sums an operation forms; their errors grow as sqrt(n) u (Higham 2002, 2.8)"),
    (
        "confidence (lambda)",
        f"{CONFIDENCE:g}",
        "errors of lambda standard deviations: a bound that 2 exp(-lambda^2 / 2) = 0.07 % pass (Higham and Mary 2019)",
    ),
    ("of norm and mean", f"{CONFIDENCE / 2:g}", "half of it: errors of elements partly cancel in a sum"),
    (
        "longest path",
        f"{LONGEST_PATH:g}",
        "operations whose errors add up; more than that lie side by side and not behind each other",
    ),
    (
        "before the step",
        f"n = {BASE_LENGTH:g}",
        "parameters and data were computed as well, by initialisation, by a loader, by calls that a filter left out",
    ),
    (
        "floor of inputs",
        "1/8",
        "after the first step, of the largest floating input of the call: Adam makes a whole update of a gradient that "
        "is nothing but rounding",
    ),
    (
        "spread factor",
        f"{SPREAD_FACTOR:g}",
        "with two trusted runs: times the largest difference between them in the same operation, in thresholds; of "
        "eight normal differences the largest is passed four times over by 13 in 100,000",
    ),
)
"""(name, value, reason) of every number of this policy, for docs/verdicts.md."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How `--verdict noise` judges. Travels to workers."""

    thresholds: Thresholds = DEFAULT


# -- what an operation sums over

_MOVES = frozenset(
    """
    view view_as reshape reshape_as transpose permute t T mT swapaxes movedim flatten unflatten squeeze unsqueeze expand
    expand_as broadcast_to repeat repeat_interleave tile chunk split split_with_sizes unbind unfold narrow select
    index_select gather take take_along_dim cat concat concatenate stack hstack vstack roll flip contiguous clone detach
    copy_ to cpu cuda npu type_as __getitem__ __setitem__ index_put index_put_ masked_fill masked_fill_ masked_select
    where triu tril diagonal pad embedding relu relu_ abs neg __neg__ max min amax amin maximum minimum clamp clamp_min
    clamp_max max_pool1d max_pool2d max_pool3d argmax argmin topk sort zero_ fill_ zeros ones full empty arange
    zeros_like ones_like full_like empty_like item tolist requires_grad_ backward one_hot broadcast send recv isend
    irecv all_gather all_gather_into_tensor _all_gather_base all_to_all all_to_all_single scatter wait_tensor identity
    dropout
    """.lower().split()
)
"""APIs and module classes, in lower case, that round nothing: they move, choose or compare. `dropout` scales by a
number that both sides scale by."""

_MATRIX = re.compile(
    r"^(?:linear|dense|matmul|mm|bmm|mv|dot|addmm|baddbmm|einsum|bilinear|__r?matmul__|batchmatmul|tensordot|"
    r"(?:column|row)?parallel_?linear|columnparallellinear|rowparallellinear|conv1d)$"
)
_CONVOLUTION = re.compile(r"^(?:lazy)?conv(?:_?transpose)?[123]d(?:_?transpose)?$|^conv[123]dtranspose$")
_ATTENTION = re.compile(r"attention")
_ALONG_LAST = re.compile(
    r"^(?:log_?)?softmax$|^softmin$|layer_?norm|rms_?norm|^normalize$|cross_?entropy|nll_?loss|logsumexp|^glu$|cumsum"
)
_ALONG_CHANNEL = re.compile(r"batch_?norm|instance_?norm|group_?norm")

_BACKWARD_PLACES = 2  # a product has two backward products: over all tokens, and over the outputs


@dataclass(frozen=True, slots=True)
class _Op:
    """What an op's name says."""

    kind: str  # API, or class of a module, in lower case
    backward: bool
    module: bool
    number: int | None


def _op_of(text: str) -> _Op:
    try:
        op = OpName.parse(text)
    except ValueError:
        return _Op(text.lower(), False, False, None)
    kind = op.class_name or op.name.rsplit(".", 1)[-1]
    return _Op(kind.lower(), op.phase is Phase.BACKWARD, op.is_module, op.call)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Per op: of its floating tensors. Counts are 0 where there is none."""

    first_last: Numbers  # last dimension of the first input
    first_lead: Numbers  # elements of the first input over its last dimension
    most_in: Numbers  # elements of the largest input
    least_out: Numbers  # elements of the smallest output
    filter: Numbers  # elements of the second tensor that comes in, over its first dimension
    channel: Numbers  # elements of the first input over its second dimension
    longest: Numbers  # largest dimension of any input or parameter


def _dimensions(shape: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", shape)) if shape.startswith(("[", "(")) else ()


def reduction_lengths(table: pa.Table) -> tuple[Numbers, npt.NDArray[np.int64], list[str]]:
    """(length of each op's sums, 0 for an op that rounds nothing; the op of each row; names of ops)."""
    ops = partition.texts(table, "op")
    shapes = _shapes(table, ops.codes, len(ops.texts))
    parents = set(table["parent"].drop_null().unique().to_pylist()) if "parent" in table.column_names else set()
    out = np.ones(len(ops.texts))
    for place, text in enumerate(ops.texts):
        out[place] = _length(_op_of(text), shapes, place, text in parents)
    return out, ops.codes, ops.texts


def _length(op: _Op, of: _Shapes, place: int, has_children: bool) -> float:
    kind = op.kind
    if kind in _MOVES and not op.backward:
        return 0.0
    if op.module and has_children:
        return 0.0  # what is inside counts
    ratio = of.most_in[place] / of.least_out[place] if of.least_out[place] else 1.0
    last, lead = of.first_last[place], of.first_lead[place]
    if _MATRIX.match(kind):
        length = max(last, lead, ratio) if op.backward else last
    elif _CONVOLUTION.match(kind):
        length = max(of.filter[place], of.channel[place] if op.backward else 0.0)
    elif _ATTENTION.search(kind):
        length = last + of.longest[place]
    elif _ALONG_LAST.search(kind):
        length = max(last, ratio)
    elif _ALONG_CHANNEL.search(kind):
        length = max(of.channel[place], ratio)
    elif op.module and not op.backward:
        length = max(of.longest[place], ratio)  # what it computes inside was not recorded
    elif op.module:
        length = max(last, lead, ratio)
    else:
        length = ratio
    return float(max(length, 1.0))


def _shapes(table: pa.Table, op: npt.NDArray[np.int64], count: int) -> _Shapes:
    texts = partition.texts(table, "NPU Tensor Shape")
    every = [_dimensions(text) for text in texts.texts]
    elements = np.array([*(math.prod(shape) for shape in every), 0], float)[texts.codes]
    last = np.array([*(shape[-1] if shape else 1 for shape in every), 1], float)[texts.codes]
    first = np.array([*(shape[0] if shape else 1 for shape in every), 1], float)[texts.codes]
    second = np.array([*(shape[1] if len(shape) > 1 else 1 for shape in every), 1], float)[texts.codes]
    longest = np.array([*(max(shape, default=1) for shape in every), 1], float)[texts.codes]
    role = partition.texts(table, "role")
    floating = _is_floating(table) & (elements > 0)
    coming_in = floating & role.among(lambda text: text in ("input", "parameters"))
    going_out = floating & role.among(lambda text: text == "output")
    rows = np.flatnonzero(coming_in)
    heads, at = np.unique(op[rows], return_index=True)
    firsts = rows[at]
    later = np.setdiff1d(rows, firsts, assume_unique=True)
    seconds, at = np.unique(op[later], return_index=True)

    def spread(places: npt.NDArray[np.int64], values: Numbers) -> Numbers:
        made = np.zeros(count)
        made[places] = values
        return made

    least = np.full(count, np.inf)
    np.minimum.at(least, op[going_out], elements[going_out])
    return _Shapes(
        first_last=spread(heads, last[firsts]),
        first_lead=spread(heads, elements[firsts] / np.fmax(last[firsts], 1.0)),
        most_in=_largest(op, elements, coming_in, count),
        least_out=np.where(np.isfinite(least), least, 0.0),
        filter=spread(seconds, (elements / np.fmax(first, 1.0))[later[at]]),
        channel=spread(heads, elements[firsts] / np.fmax(second[firsts], 1.0)),
        longest=_largest(op, longest, coming_in, count),
    )


def _largest(op: npt.NDArray[np.int64], values: Numbers, where: npt.NDArray[np.bool_], count: int) -> Numbers:
    out = np.zeros(count)
    np.maximum.at(out, op[where], values[where])
    return out


# -- thresholds


def roundoff(dtype: str) -> float:
    """Unit roundoff of a floating dtype as a dump spells it, 0 for any other."""
    bits = SIGNIFICAND_BITS.get(canonical_dtype(dtype))
    return 0.0 if bits is None else 2.0**-bits


def _is_floating(table: pa.Table) -> npt.NDArray[np.bool_]:
    return partition.texts(table, "NPU Dtype").of(roundoff, 0.0) > 0.0


def limits(table: pa.Table, step: int | None, thresholds: Thresholds = DEFAULT) -> Limits:
    """What each row of a partition may be off by, and the least scale of inputs (see the module's docstring)."""
    lengths, op, names = reduction_lengths(table)
    count = len(names)
    set_for = [thresholds.of(name) for name in names]
    own = partition.texts(table, "NPU Dtype").of(roundoff, 0.0)
    # A cast that only the target has is a divergence, and excuses nothing after it.
    stored = _largest(op, own, (own > 0.0) & partition.matched(table), count)
    backward = np.array([*(_op_of(name).backward for name in names)], bool)
    for place, entry in enumerate(set_for):
        if entry is None:
            continue
        lengths[place] = entry.reduction_length or lengths[place]
        stored[place] = entry.unit_roundoff or stored[place]
    single = 2.0**-SUMMED_BITS
    summed = np.where(stored > single, single, stored)
    levels = np.where(backward & (stored > single), np.log2(np.fmax(lengths, 1.0)), 0.0)
    error = np.where(lengths > 0.0, (1.0 + levels) * stored**2 + lengths * summed**2, 0.0)

    # Ops in the order in which they ended: codes are numbered by first appearance.
    base = np.maximum.accumulate(stored) ** 2 if count else stored
    total = np.minimum(np.cumsum(error), LONGEST_PATH * np.maximum.accumulate(error)) + _before(base)
    if step:
        carried = step * (stored.max(initial=0.0) ** 2 + float(np.sum(lengths * summed**2)))
        total += min(carried, LONGEST_PATH * error.max(initial=0.0))
    allowed = np.sqrt(total)[op] * thresholds.confidence / 2.0

    fixed = _plain(table)
    allowed[fixed] = divergence.WIDE_MULTIPLE * single
    kept = partition.texts(table, "role").among(lambda text: text == "parameters") & ~fixed
    if not step:
        allowed[kept] = np.sqrt(_before(own[kept] ** 2)) * thresholds.confidence / 2.0
    allowed[~_is_floating(table) & ~fixed] = divergence.WIDE_MULTIPLE * single
    for place, entry in enumerate(set_for):
        if entry is not None:
            rows = op == place
            allowed[rows] = _set(entry, allowed[rows])
    return Limits(allowed, _input_floor(table, op, count, step))


def _before(squares: Numbers) -> Numbers:
    """The squared error that values have before the step: a sum, and one rounding."""
    single = 2.0 ** (-2 * SUMMED_BITS)
    return squares + BASE_LENGTH * np.fmin(squares, single)


def _plain(table: pa.Table) -> npt.NDArray[np.bool_]:
    return partition.texts(table, "NPU Dtype").among(lambda text: text.startswith("<class") or text == "float")


def _set(entry: OpThreshold, allowed: Numbers) -> Numbers:
    if entry.tolerance is not None:
        return np.full(len(allowed), entry.tolerance)
    return allowed * (entry.factor or 1.0)


def _input_floor(table: pa.Table, op: npt.NDArray[np.int64], count: int, step: int | None) -> Numbers:
    """After the first step: 1/8 of the largest floating tensor that goes into the same forward call."""
    out = np.zeros(len(op))
    if not step:
        return out
    role = partition.texts(table, "role")
    backward = partition.gradients(table).backward
    rows = role.among(lambda text: text in ("input", "parameters")) & ~backward & _is_floating(table)
    size = partition.largest_values(table)
    out[rows] = (_largest(op, size, rows, count) * INPUT_FLOOR)[op[rows]]
    return out


# -- judging


def judged(
    table: pa.Table,
    mode: Mode,
    policy: Policy,
    *,
    step: int | None,
    differs: npt.NDArray[np.bool_] | None = None,
    apart: tuple[Numbers, Numbers] | None = None,
    spread: pa.Table | None = None,
) -> pa.Table:
    """The partition with its `excess`, `Result` and `Err_message` by this policy.

    `spread` is the partition, so judged, of the bench against a second trusted run: what differs there is noise.
    """
    values = divergence.excess(table, mode, differs=differs, apart=apart, limits=limits(table, step, policy.thresholds))
    if spread is not None:
        values = within_spread(table, values, spread, policy.thresholds.spread_factor)
    if any(entry.ignore for entry in policy.thresholds.ops):
        values = _ignoring(table, values, policy.thresholds)
    made = table
    for name, column in (
        (EXCESS, pa.array(values, mask=np.isnan(values))),
        *zip((columns.RESULT, columns.ERR_MESSAGE), verdict.words(_faults(table, mode, values)), strict=True),
    ):
        at = made.column_names.index(name) if name in made.column_names else -1
        made = made.append_column(name, column) if at < 0 else made.set_column(at, name, column)
    return made


def notes_on(table: pa.Table, thresholds: Thresholds) -> list[str]:
    """What a file of thresholds does to a partition that a person should know of.

    Raises NothingUsable where it leaves nothing to judge.
    """
    if not thresholds.ops:
        return []
    notes = []
    ops = partition.texts(table, "op")
    if unused := thresholds.unused(ops.texts):
        near = near_miss(unused[0], ops.texts)
        notes.append(f"thresholds: no op falls to {len(unused)} of the patterns, from '{unused[0]}'.{near}")
    if ignored := int(_ignored(ops, thresholds).sum()):
        if ignored == table.num_rows:
            raise NothingUsable(f"the thresholds ignore all {ignored} items", hint="Leave out some 'ignore: true'.")
        notes.append(f"thresholds: {ignored} of {table.num_rows} items are ignored")
    return notes


def _ignored(ops: Coded, thresholds: Thresholds) -> npt.NDArray[np.bool_]:
    def ignored(text: str) -> bool:
        entry = thresholds.of(text)
        return entry is not None and entry.ignore

    return ops.among(ignored)


def _ignoring(table: pa.Table, values: Numbers, thresholds: Thresholds) -> Numbers:
    return np.where(_ignored(partition.texts(table, "op"), thresholds), np.nan, values)


def within_spread(table: pa.Table, values: Numbers, spread: pa.Table, factor: float) -> Numbers:
    """Excess of a comparison with a bench, given that of the bench against a second trusted run.

    An item's excess is divided by `factor` times the largest excess that the trusted runs have in the same op, where
    that is more than 1. Where they differ beyond all measure (another value, NaN on one side), nothing is judged.
    """
    ops = partition.texts(spread, "op")
    between = np.nan_to_num(spread[EXCESS].to_numpy(), nan=0.0, posinf=math.inf)
    by_op = np.zeros(len(ops.texts) + 1)
    np.maximum.at(by_op, ops.codes, between)
    names = pa.concat_arrays(spread[columns.NPU_NAME].chunks) if spread.num_rows else pa.array([], pa.string())
    places = table[columns.BENCH_NAME].combine_chunks()
    at = pa.compute.index_in(places, value_set=names)
    known = at.is_valid().to_numpy(zero_copy_only=False)
    rows = pa.compute.fill_null(at, 0).to_numpy(zero_copy_only=False)
    if not known.any():
        return values
    noise = np.where(known, by_op[ops.codes[rows]], 0.0)
    with np.errstate(invalid="ignore"):
        scaled = values / np.fmax(1.0, factor * noise)
    return np.where(np.isinf(noise), np.nan, scaled)


def unjudged(spread: pa.Table) -> int:
    """Items in which two trusted runs differ beyond all measure."""
    return int(np.isinf(np.nan_to_num(spread[EXCESS].to_numpy(), nan=0.0, posinf=math.inf)).sum())


def _faults(table: pa.Table, mode: Mode, values: Numbers) -> npt.NDArray[np.int64]:
    """Faults of `verdict.RULES` that this policy knows."""
    Fault = verdict.Fault
    faults = np.zeros(table.num_rows, np.int64)
    if not table.num_rows:
        return faults
    over = np.nan_to_num(values, nan=0.0, posinf=math.inf) > 1.0
    ops, role = partition.texts(table, "op"), partition.texts(table, "role")
    output = role.among(lambda text: text in ("output", "parameters_grad"))
    given = np.zeros(len(ops.texts) + 1, bool)
    np.logical_or.at(given, ops.codes[~output], over[~output])
    made_here = output & ~given[ops.codes]
    same = {
        name: np.equal(*partition.same_codes(
            partition.texts(table, f"NPU {name}"), partition.texts(table, f"Bench {name}"),
            canonical_dtype if name == "Dtype" else str,
        ))
        for name in ("Dtype", "Tensor Shape", "Requires_grad")
    }  # fmt: skip
    matched = partition.matched(table)
    known = matched & ~np.isnan(values)
    faults[known & over & ~same["Dtype"]] |= Fault.DTYPE
    faults[known & over & ~same["Tensor Shape"]] |= Fault.SHAPE
    faults[matched & ~same["Requires_grad"]] |= Fault.GRAD
    told = (faults & (Fault.DTYPE | Fault.SHAPE)) != 0
    certain = over & np.isinf(values) & ~told
    if mode is Mode.MD5:
        faults[certain & matched] |= Fault.CHECKSUM
        return faults
    odd = partition.not_finite(table) if mode is not Mode.STRUCTURE else np.zeros(len(over), bool)
    scalar = _plain(table)
    faults[certain & odd] |= Fault.NON_FINITE
    faults[certain & ~odd & scalar] |= Fault.SCALAR
    faults[certain & ~odd & ~scalar] |= Fault.VALUE
    faults[over & np.isfinite(values) & made_here] |= Fault.NOISE_MADE
    faults[over & np.isfinite(values) & ~made_here] |= Fault.NOISE_PASSED
    return faults
