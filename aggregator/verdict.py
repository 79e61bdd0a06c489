"""`Result` and `Err_message`: msprobe's rules, word for word, each with its threshold and its reason.

The rules were read off what msprobe 26.2 answers to planted differences (docs/compatibility.md); they are blind to much
(a weight off by 0.1 %, a flipped sign), which is why the first divergence is found elsewhere (`divergence`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntFlag
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import numpy.typing as npt

PASS, WARNING, ERROR = "pass", "warning", "error"


class Fault(IntFlag):
    """What can be wrong with a row, in the order in which the messages stand."""

    NON_FINITE = 1
    OUTPUT_NORM = 2
    OUTPUT_RATIO = 4
    GRAD = 8
    SCALAR = 16
    CHECKSUM = 32
    DTYPE = 64
    SHAPE = 128
    UNMATCHED = 256
    NORM_GROWTH = 512
    COSINE_DROP = 1024
    VALUE = 2048
    NOISE_MADE = 4096
    NOISE_PASSED = 8192


class Policy(str, Enum):
    """Whose rules make the two columns (`--verdict`)."""

    MSPROBE = "msprobe"
    NOISE = "noise"


_BOTH = (Policy.MSPROBE, Policy.NOISE)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `threshold` is in the unit that `why` states, None where the rule has no number; `policies` know it."""

    fault: Fault
    result: str
    message: str
    why: str
    threshold: float | None = None
    policies: tuple[Policy, ...] = (Policy.MSPROBE,)


INPUT_NORM_LIMIT = 0.1  # ratio; above it an op's input is already wrong, and its output is not to blame
OUTPUT_NORM_LIMIT = 0.5  # ratio; see Fault.OUTPUT_NORM
NORM_GROWTH_LIMIT = 10.0  # output over input; see Fault.NORM_GROWTH
INPUT_RATIO_LIMIT = 0.9  # share of elements; below it an op's input is already wrong
OUTPUT_RATIO_LIMIT = 0.1  # share of elements; see Fault.OUTPUT_RATIO (the message says 0.6, the tool tests this)
INPUT_COSINE_LIMIT = 0.9  # below it an op's input points elsewhere already
COSINE_DROP_LIMIT = 0.1  # input minus output; see Fault.COSINE_DROP
ZERO_INPUT = 0.01  # stands for an input ratio of exactly 0, of which ten times would be 0 as well

RULES: tuple[Rule, ...] = (
    Rule(
        Fault.NON_FINITE,
        ERROR,
        "error: There is nan/inf/-inf in the maximum or minimum value of NPU.",
        "a NaN or infinity that the bench has in neither its maximum nor its minimum came from the target itself",
        policies=_BOTH,
    ),
    Rule(
        Fault.OUTPUT_NORM,
        ERROR,
        "error: The NormRelativeErr of output is greater than 0.5.",
        "the norm of an output is off by more than this ratio while no input or parameter is off by 0.1",
        OUTPUT_NORM_LIMIT,
    ),
    Rule(
        Fault.OUTPUT_RATIO,
        ERROR,
        "error: The input/parameters of One Thousandth Err Ratio > 0.9 while the output < 0.6.",
        "tensor mode: in one of an op's outputs fewer than this share of the elements are right to a thousandth, while "
        "in every input and parameter more than 0.9 are; stands on the op's first output",
        OUTPUT_RATIO_LIMIT,
    ),
    Rule(
        Fault.GRAD,
        ERROR,
        "error: The Required_Grad of NPU and Bench are inconsistent",
        "requires_grad differs, so the two runs do not train the same tensors",
        policies=_BOTH,
    ),
    Rule(
        Fault.SCALAR,
        ERROR,
        "error: The scalar parameters of NPU and Bench are inconsistent.",
        "an argument that is no tensor differs, so the two calls are not the same call",
        policies=_BOTH,
    ),
    Rule(
        Fault.CHECKSUM,
        ERROR,
        "error: The CRC-32 value of NPU differs from that of the bench.",
        "the bytes differ (checksum mode)",
        policies=_BOTH,
    ),
    Rule(
        Fault.DTYPE,
        ERROR,
        "error: The dtype of NPU and Bench are inconsistent.",
        "the dtype differs",
        policies=_BOTH,
    ),
    Rule(
        Fault.SHAPE,
        ERROR,
        "error: The shape of NPU and Bench are inconsistent.",
        "the shape differs",
        policies=_BOTH,
    ),
    Rule(
        Fault.UNMATCHED,
        WARNING,
        "warning: The parameter of NPU does not match the bench.",
        "the bench has no such item (checksum mode; the other modes let it pass)",
    ),
    Rule(
        Fault.NORM_GROWTH,
        WARNING,
        "warning: The norm relative error of output is 10 times that of input.",
        "an op's largest output error is more than this many times its largest input or parameter error",
        NORM_GROWTH_LIMIT,
    ),
    Rule(
        Fault.COSINE_DROP,
        WARNING,
        "warning: The input/parameters of Cosine > 0.9, and input/parameters - output > 0.1",
        "tensor mode: an op's smallest output cosine is lower by more than this than its smallest input or parameter "
        "cosine, which is above 0.9; stands on the op's first output",
        COSINE_DROP_LIMIT,
    ),
    Rule(
        Fault.VALUE,
        ERROR,
        "error: The values differ where no rounding could make them differ.",
        "integers, booleans and texts are exact; NaN and infinity on the bench's side only; an argument or a call that "
        "one side lacks",
        policies=(Policy.NOISE,),
    ),
    Rule(
        Fault.NOISE_MADE,
        ERROR,
        "error: The output differs by more than noise while no input or parameter does.",
        "the difference was made in this very call: what went in agrees as far as rounding allows",
        1.0,
        (Policy.NOISE,),
    ),
    Rule(
        Fault.NOISE_PASSED,
        WARNING,
        "warning: The value differs by more than noise.",
        "an input or a parameter, or an output whose inputs differ already: the difference came from before",
        1.0,
        (Policy.NOISE,),
    ),
)

SKIPPED_APIS = frozenset(
    {
        "__setitem__",
        "empty",
        "empty_like",
        "empty_strided",
        "empty_with_format",
        "new_empty",
        "new_empty_strided",
        "numpy",
        "to",
    }
)
"""No rule looks at these: their values are uninitialised memory, or they only move data."""

BUFFER_APIS = frozenset({"_all_gather_base", "_reduce_scatter_base", "all_to_all_single", "batch_isend_irecv"})
"""Collectives among whose inputs are receive buffers, which hold anything: rules that look at inputs skip them."""


def as_markdown(noise: Sequence[tuple[str, str, str]]) -> str:
    """docs/verdicts.md, which `scripts/verdicts` writes: every rule with its threshold and its reason.

    `noise` are the numbers of `--verdict noise`: name, value, reason.
    """
    lines = [
        "# Result and Err_message",
        "",
        "Made by `scripts/verdicts` from the rules in `aggregator/verdict.py` and the numbers in",
        "`aggregator/noise.py`; change them there.",
        "",
        "`Result` is `error` where a rule of that kind is broken, else `warning`, else `pass`; `Err_message` lists the",
        "messages in the order of the table.",
        "",
        "## `--verdict msprobe`",
        "",
        "The default. Rules, words and thresholds are those of MindStudio Probe 26.2, as observed",
        "([compatibility.md](compatibility.md)). They are blind to much, which is why our own findings",
        "([compare.md](compare.md)) are made elsewhere and stand beside them.",
        "",
        *_rules(Policy.MSPROBE),
        "",
        "An op's input or parameter above these limits is already wrong, so its output is not judged by the rule:",
        "",
        f"- relative error of the norm at least {INPUT_NORM_LIMIT:g} (statistics)",
        f"- One Thousandth Err Ratio at most {INPUT_RATIO_LIMIT:g} (tensor)",
        f"- cosine at most {INPUT_COSINE_LIMIT:g} (tensor)",
        "",
        f"An input error of exactly 0 counts as {ZERO_INPUT:g} where an output is held against ten times its input.",
        "",
        "No rule looks at these, whose values are uninitialised memory or only moved: "
        + ", ".join(f"`{name}`" for name in sorted(SKIPPED_APIS))
        + ".",
        "",
        "Collectives whose inputs are receive buffers are judged by none of the rules that look at inputs: "
        + ", ".join(f"`{name}`" for name in sorted(BUFFER_APIS))
        + ".",
        "",
        "## `--verdict noise`",
        "",
        "Thresholds are in multiples of what noise explains, the `excess` of our own findings, which follow this",
        "policy as well. How it is computed: [compare.md](compare.md#noise).",
        "",
        *_rules(Policy.NOISE),
        "",
        "| number | value | why |",
        "| --- | --- | --- |",
        *(f"| {name} | {value} | {why} |" for name, value, why in noise),
        "",
    ]
    return "\n".join(lines)


def _rules(policy: Policy) -> list[str]:
    lines = ["| result | message | threshold | why |", "| --- | --- | --- | --- |"]
    for rule in RULES:
        if policy in rule.policies:
            threshold = "" if rule.threshold is None else f"{rule.threshold:g}"
            message = rule.message.removeprefix(f"{rule.result}: ")
            lines.append(f"| {rule.result} | {message} | {threshold} | {rule.why} |")
    return lines


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rules look at, row by row. `op` numbers the ops in row order; `is_input` covers keyword inputs."""

    op: npt.NDArray[np.int64]
    api: pa.Array
    matched: npt.NDArray[np.bool_]
    is_input: npt.NDArray[np.bool_]
    is_parameter: npt.NDArray[np.bool_]
    is_output: npt.NDArray[np.bool_]
    same_grad: npt.NDArray[np.bool_]
    same_dtype: npt.NDArray[np.bool_]
    same_shape: npt.NDArray[np.bool_]


def of_statistics(
    rows: Rows,
    norm_ratio: npt.NDArray[np.float64],
    non_finite: npt.NDArray[np.bool_],
    scalar_differs: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Faults by the rules of statistics mode.

    `norm_ratio`: relative error of the norm as a ratio (NaN for none). `non_finite`: the target's maximum or minimum
    is NaN or infinite and neither of the bench's is. `scalar_differs`: a value of a plain Python type that differs.
    """

    skipped, buffers = _skips(rows)
    faults = _of_items(rows, non_finite, scalar_differs)
    finite = np.isfinite(norm_ratio)
    going_in = _largest(rows.op, norm_ratio, (rows.is_input | rows.is_parameter) & finite)
    coming_out = _largest(rows.op, norm_ratio, rows.is_output & finite)
    faults[rows.is_output & (norm_ratio > OUTPUT_NORM_LIMIT) & (going_in[rows.op] < INPUT_NORM_LIMIT) & ~buffers] |= (
        Fault.OUTPUT_NORM
    )
    reference = np.where(going_in == 0.0, ZERO_INPUT, going_in)
    grown = coming_out > NORM_GROWTH_LIMIT * reference
    heads = _first_outputs(rows)
    faults[heads[grown[rows.op[heads]] & ~buffers[heads]]] |= Fault.NORM_GROWTH
    return _spared(faults, rows, skipped, buffers)


def of_tensors(
    rows: Rows,
    one_thousandth: npt.NDArray[np.float64],
    cosine: npt.NDArray[np.float64],
    non_finite: npt.NDArray[np.bool_],
    scalar_differs: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Faults by the rules of tensor mode: those of items, and two on an op's values (NaN where there is no number)."""
    skipped, buffers = _skips(rows)
    faults = _of_items(rows, non_finite, scalar_differs)
    going_in = rows.is_input | rows.is_parameter
    heads = _first_outputs(rows)
    heads = heads[~buffers[heads]]
    op = rows.op[heads]
    # Inputs without a number count as right, outputs without one too.
    right_in = _smallest(rows.op, one_thousandth, going_in)[op]
    right_out = _smallest(rows.op, one_thousandth, rows.is_output)[op]
    faults[heads[(right_in > INPUT_RATIO_LIMIT) & (right_out < OUTPUT_RATIO_LIMIT)]] |= Fault.OUTPUT_RATIO
    along_in = _smallest(rows.op, cosine, going_in)[op]
    along_out = _smallest(rows.op, cosine, rows.is_output)[op]
    dropped = (along_in > INPUT_COSINE_LIMIT) & (along_in - along_out > COSINE_DROP_LIMIT)
    faults[heads[dropped]] |= Fault.COSINE_DROP
    return _spared(faults, rows, skipped, buffers)


def of_checksums(
    rows: Rows, differs: npt.NDArray[np.bool_], has_checksum: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Faults by the rules of checksum mode; `has_checksum` is the target's side."""

    skipped, buffers = _skips(rows)
    faults = np.zeros(len(rows.op), np.int64)
    faults[rows.matched & differs] |= Fault.CHECKSUM
    faults[~rows.matched & has_checksum] |= Fault.UNMATCHED
    return _spared(faults, rows, skipped, buffers)


def words(faults: npt.NDArray[np.int64]) -> tuple[pa.Array, pa.Array]:
    """(`Result`, `Err_message`) as string columns."""

    kinds, place = np.unique(faults, return_inverse=True)
    results, messages = [], []
    for kind in kinds:
        broken = [rule for rule in RULES if kind & rule.fault]
        results.append(ERROR if any(rule.result == ERROR for rule in broken) else WARNING if broken else PASS)
        messages.append(json.dumps([rule.message for rule in broken]))
    indices = pa.array(place.astype(np.int32).reshape(-1))
    return (
        pa.DictionaryArray.from_arrays(indices, pa.array(results, pa.string())).cast(pa.string()),
        pa.DictionaryArray.from_arrays(indices, pa.array(messages, pa.string())).cast(pa.string()),
    )


def _skips(rows: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:

    def among(names: frozenset[str]) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = pc.is_in(rows.api, value_set=pa.array(sorted(names))).to_numpy(
            zero_copy_only=False
        )
        return found

    return among(SKIPPED_APIS), among(BUFFER_APIS)


def _spared(
    faults: npt.NDArray[np.int64], rows: Rows, skipped: npt.NDArray[np.bool_], buffers: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    faults[skipped | (buffers & (rows.is_input | rows.is_parameter))] = 0
    return faults


def _of_items(
    rows: Rows, non_finite: npt.NDArray[np.bool_], scalar_differs: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Faults that one item shows by itself."""
    faults = np.zeros(len(rows.op), np.int64)
    faults[non_finite] |= Fault.NON_FINITE
    faults[rows.matched & ~rows.same_grad] |= Fault.GRAD
    faults[rows.matched & ~rows.same_dtype] |= Fault.DTYPE
    faults[rows.matched & ~rows.same_shape] |= Fault.SHAPE
    faults[rows.matched & scalar_differs & ~rows.is_output] |= Fault.SCALAR
    return faults


def _first_outputs(rows: Rows) -> npt.NDArray[np.int64]:
    """The row of each op's first output."""
    outputs = np.flatnonzero(rows.is_output)
    _, first = np.unique(rows.op[outputs], return_index=True)
    found: npt.NDArray[np.int64] = outputs[first]
    return found


def _smallest(
    op: npt.NDArray[np.int64], values: npt.NDArray[np.float64], where: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """The smallest value of each op among the chosen rows that have one, 1 where there is none."""
    out = np.ones(int(op.max()) + 1 if len(op) else 0)
    chosen = where & ~np.isnan(values)
    np.minimum.at(out, op[chosen], values[chosen])
    return out


def _largest(
    op: npt.NDArray[np.int64], values: npt.NDArray[np.float64], where: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """The largest value of each op among the chosen rows, 0 where there is none."""

    out = np.zeros(int(op.max()) + 1 if len(op) else 0)
    np.maximum.at(out, op[where], values[where])
    return out
