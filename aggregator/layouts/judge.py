"""What of two wholes can be compared, why the rest cannot, and what putting ranks together found by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator.items import ROLES
from aggregator.layouts.combine import Part, Vocabulary
from aggregator.layouts.decide import Decisions, Kind, Source
from aggregator.layouts.gather import Side
from aggregator.layouts.together import Whole
from msprobe_launch.records.names import OpName, Phase, Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

    Flags = npt.NDArray[np.bool_]
    Codes = npt.NDArray[np.int64]

_INPUT, _PARAMETERS, _OUTPUT, _GRADIENT = (
    ROLES.index(role) for role in (Role.INPUT, Role.PARAMETERS, Role.OUTPUT, Role.PARAMETERS_GRAD)
)

_PLAIN = r"^(?:<class|torch\.Size|torch\.ProcessGroup|slice)"
_OK, _BATCHES, _SIZE, _GROUP, _RANKS, _LACKING, _BIAS, _APART, _ELSEWHERE, _REDUCED = range(10)


@dataclass(frozen=True, slots=True)
class Judged:
    """For each row why it is not compared (0: it is), what was found (0: nothing), and both values as they are."""

    why: Codes
    whys: dict[int, str]
    finding_codes: Codes
    findings: tuple[str, ...]
    target: Part
    bench: Part
    sums: Flags
    target_sums: Flags
    bench_sums: Flags


def judge(
    target: Side,
    bench: Side,
    own: Decisions,
    other: Decisions,
    whole: Whole,
    theirs: Whole,
    bench_row: Codes,
    vocabulary: Vocabulary,
    elsewhere: Flags,
) -> Judged:
    """`elsewhere` are rows that are compared with another rank."""
    height = target.height
    dump = target.skeleton
    role = dump.items["role"].to_numpy()
    op = dump.items["op"].to_numpy()
    found = bench_row >= 0
    at = np.where(found, bench_row, 0)
    reference = theirs.part.take(bench_row)
    mine = whole.part
    why = np.zeros(height, np.int64)
    finding = np.zeros(height, np.int64)
    said: dict[str, int] = {"": 0}
    d, other_d = len(target.own), len(bench.own)
    batches = d != other_d
    tp, other_tp = target.layout.tp, bench.layout.tp

    # Arguments that are no tensors: sizes of a part, ranks and groups.
    dtypes = dump.items["dtype"].combine_chunks().cast(pa.string())
    plain = np.asarray(pc.match_substring_regex(dtypes, _PLAIN).to_numpy(zero_copy_only=False))
    plain = plain | (own.kinds == Kind.PLAIN)
    alike = _alike(mine, reference)
    groups = np.asarray(pc.starts_with(dump.ops["name"], "Distributed.").to_numpy())[op] & plain
    groups |= np.asarray(pc.equal(dtypes, "torch.ProcessGroup").to_numpy(zero_copy_only=False))
    why[found & plain & ~alike & groups] = _GROUP
    differ = (_plain_differ(target, vocabulary) | _plain_differ(bench, vocabulary)[at]) & plain
    hidden = vocabulary.codes(target.columns[0][0].hidden)
    other_hidden = np.where(found, vocabulary.codes(bench.columns[0][0].hidden)[at], -1)
    why[found & differ & (why == 0)] = _RANKS
    fits = _size_fits(mine, reference, {tp * d / (other_tp * other_d), tp / other_tp, d / other_d} - {1.0})
    # Sizes are integers; with other numbers of data parallel ranks a script also divides by them.
    counted = np.asarray(pc.equal(dtypes, "<class 'int'>").to_numpy(zero_copy_only=False))
    fits &= counted | (d != other_d)
    sized = found & plain & ~alike & (why == 0)
    is_size = np.asarray(pc.equal(dtypes, "torch.Size").to_numpy(zero_copy_only=False))
    why[sized & (fits | is_size)] = _SIZE
    # Bounds of a slice are places within a part.
    sliced = np.asarray(pc.equal(dtypes, "slice").to_numpy(zero_copy_only=False))
    if tp != other_tp or d != other_d:
        why[found & sliced & (hidden != other_hidden) & (why == 0)] = _SIZE

    why[found & elsewhere & (why == 0)] = _ELSEWHERE

    # Data parallel ranks with other batches.
    if batches:
        unlike_batches = whole.batches | (theirs.batches[at] & found)
        shapes = mine.shapes != reference.shapes
        parameter = (role == _PARAMETERS) | (role == _GRADIENT)
        guessed = own.of(lambda verdict: verdict.kind is Kind.SHARD and verdict.source is Source.SHAPES, bool)
        why[found & (why == 0) & ~plain & (unlike_batches | (shapes & ~parameter) | (guessed & ~parameter))] = _BATCHES
        mean = whole.mean | (theirs.mean[at] & found)
        why[mean & (why == _BATCHES)] = 0

    kinds, other_kinds = own.kinds, np.where(found, other.kinds[at], int(Kind.SINGLE))
    why[found & (why == 0) & ((kinds == Kind.LACKING) | (other_kinds == Kind.LACKING))] = _LACKING
    why[found & (why == 0) & ((kinds == Kind.REDUCED) | (other_kinds == Kind.REDUCED))] = _REDUCED
    # A bias that is added after the sum belongs to another call here.
    inverse = np.full(bench.height, -1, np.int64)
    inverse[bench_row[found]] = np.flatnonzero(found)
    theirs_sum = theirs.summands[at] & found
    sums = whole.summands | theirs_sum
    more = _takes_more(dump, bench.skeleton, bench_row, whole.summands)[op]
    less = _takes_more(bench.skeleton, dump, inverse, theirs.summands)[bench.skeleton.items["op"].to_numpy()][at]
    why[found & (why == 0) & ((whole.summands & more) | (theirs_sum & less))] = _BIAS
    sums = sums & (why == 0)

    # Findings of our own.
    for decisions, rows in ((own, np.arange(height)), (other, at)):
        problems = decisions.of(lambda verdict: verdict.problem if verdict.kind is Kind.APART else "", object)[rows]
        odd = found & (why == 0) & (problems != "")
        for row in np.flatnonzero(odd).tolist():
            finding[row] = said.setdefault(f"shapes do not add up: {problems[row]}", len(said))
        why[odd] = _APART
    unlike = whole.unlike & (why == 0)
    for row in np.flatnonzero(unlike & (found | (role == _PARAMETERS))).tolist():
        finding[row] = said.setdefault(_replicas_differ(target, row), len(said))
    odd_bench = found & theirs.unlike[at] & (why == 0) & (finding == 0)
    for row in np.flatnonzero(odd_bench).tolist():
        finding[row] = said.setdefault(f"bench: {_replicas_differ(bench, int(bench_row[row]))}", len(said))
    whys = {
        _BATCHES: f"not comparable: {d} data parallel ranks had other batches than the bench's {other_d}",
        _SIZE: "not compared: a size of this rank's part",
        _GROUP: "not compared: ranks and groups belong to the layout",
        _RANKS: "not compared: another value on each rank",
        _LACKING: "not compared: not all ranks of the group have it",
        _BIAS: "not comparable: parts of a sum, to which the other side has added its bias already",
        _APART: "not put together",
        _REDUCED: "not comparable: parts of a reduction that is no sum over tensor-parallel ranks",
        _ELSEWHERE: "not compared here: a shard of this rank; the whole is compared with the first rank",
    }
    return Judged(why, whys, finding, tuple(said), mine, theirs.part, sums, whole.summands, theirs.summands)


def _alike(a: Part, b: Part) -> Flags:
    out = np.ones(len(a.there), bool)
    for i in range(4):
        same = (a.numbers[i] == b.numbers[i]) | (np.isnan(a.numbers[i]) & np.isnan(b.numbers[i]))
        out &= same & (a.texts[i] == b.texts[i])
    return np.asarray(out & (a.shapes == b.shapes))


def _plain_differ(side: Side, vocabulary: Vocabulary) -> Flags:
    """Rows that are another value on another rank."""
    first = side.columns[0][0]
    parts = [Part.of(column, vocabulary) for row in side.own for column in row]
    hidden = [vocabulary.codes(column.hidden) for row in side.own for column in row]
    out = np.zeros(len(first.there), bool)
    for part, more in zip(parts[1:], hidden[1:], strict=True):
        out |= ~_alike(parts[0], part) | (hidden[0] != more)
    return out


def _size_fits(a: Part, b: Part, ratios: set[float]) -> Flags:
    """Rows whose one number is to the other side's as the sizes of the layouts are."""
    out = np.zeros(len(a.there), bool)
    x, y = a.numbers[0], b.numbers[0]
    for ratio in ratios:
        with np.errstate(all="ignore"):
            out |= np.isclose(x * ratio, y, rtol=1e-12, atol=0.0) | np.isclose(x, y * ratio, rtol=1e-12, atol=0.0)
    return np.asarray(out & np.isfinite(x) & np.isfinite(y) & (x != 0))


def _takes_more(dump: RankDump, other: RankDump, other_row: Codes, summands: Flags) -> Flags:
    """For each op of a side: it gives parts of a sum, and the other side's call takes an input more."""
    out = np.zeros(dump.ops.num_rows, bool)
    op, other_op = dump.items["op"].to_numpy(), other.items["op"].to_numpy()
    rows = np.flatnonzero((other_row >= 0) & summands)
    if not len(rows):
        return out
    free = other.items["role"].to_numpy() == _INPUT
    free[other_row[other_row >= 0]] = False
    more = np.zeros(other.ops.num_rows, bool)
    more[other_op[free]] = True
    out[op[rows]] = more[other_op[other_row[rows]]]
    return out


def with_summands(side: Side, summands: Flags) -> Flags:
    """Rows of ops that give parts of a sum: an argument that is missing there is added after the sum."""
    op = side.skeleton.items["op"].to_numpy()
    ops = np.zeros(side.skeleton.ops.num_rows, bool)
    ops[op[summands]] = True
    return np.asarray(ops[op])


def _replicas_differ(side: Side, row: int) -> str:
    """The ranks and the norms (or values) of replicas that are no replicas."""
    stage = int(side.stage[row])
    told = []
    for group in side.own:
        for column in group:
            norm = float(column.numbers[3][row])
            text = f"norm {norm:.7g}" if not math.isnan(norm) else f"max {float(column.numbers[0][row]):.7g}"
            told.append(f"rank {column.ranks[stage]} {text}")
    return f"replicas differ: {', '.join(told[:8])}{' ...' if len(told) > 8 else ''}"


def counted(target: Side, paired: Flags, judged: Judged, bench: Side, setting_up: Flags) -> list[str]:
    """How much of the target has a counterpart, and what could not be compared."""
    dump = target.skeleton
    op = dump.items["op"].to_numpy()
    ops = np.unique(op)
    has = np.zeros(dump.ops.num_rows, bool)
    has[op[paired]] = True
    theirs = {_stem(name) for name in bench.skeleton.ops["name"].to_pylist()}
    known = np.array([_stem(name) in theirs for name in dump.ops["name"].to_pylist()], bool)
    of_layout, before = ops[~has[ops] & ~known[ops] & ~setting_up[ops]], ops[~has[ops] & setting_up[ops]]
    told = f"{int(has[ops].sum()):,} of {len(ops) - len(of_layout) - len(before):,} ops of the target are paired"
    if len(of_layout):
        told += f"; {len(of_layout):,} more are of kinds that the bench never calls (the layout's own)"
    if len(before):
        told += f"; {len(before):,} more set up, before the first value that is trained"
    notes = [told]
    for code, text in judged.whys.items():
        count = int((judged.why == code).sum())
        if count:
            notes.append(f"{count:,} items {text}")
    count = int(judged.sums.sum())
    if count:
        notes.append(f"{count:,} items are parts of a sum: of max, min and norm nothing follows for the whole")
    return notes


def _stem(name: str) -> str:
    try:
        op = OpName.parse(name)
    except ValueError:
        return name
    if op.is_module:
        return "module"
    return f"{op.name.rsplit('.', 1)[-1]} {op.phase is Phase.BACKWARD}"
