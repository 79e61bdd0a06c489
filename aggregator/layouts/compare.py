"""One combined rank: the ranks that make one model on either side, put together and compared as one rank is.

The table is an ordinary partition (see `model`) with two columns more:

    layout           string   which ranks make the row and how, on both sides
    layout finding   string   what putting the ranks together found (replicas that differ, shapes that do not add up),
                              null for nothing

`Err_message` says the same. A row whose values cannot be put together keeps its names and shapes and has no metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import columns, compare, divergence, match, noise, stored, tensors
from aggregator.columns import Mode
from aggregator.items import ROLES
from aggregator.layouts import combine, decide, pairing, shards, stages
from aggregator.layouts.combine import MEAN, Part, Vocabulary
from aggregator.layouts.decide import Decisions, Kind, Source
from aggregator.layouts.gather import Side, gather, has_applied, with_applied
from aggregator.layouts.pairing import APPLIED
from aggregator.layouts.spec import Layout
from aggregator.model import RankComparison, RankFailure
from aggregator.sources import number_ranges
from aggregator.values import UnreadableValues, Values
from msprobe_launch.records.layout import RankFolder
from msprobe_launch.records.names import OpName, Phase, Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

    Flags = npt.NDArray[np.bool_]
    Codes = npt.NDArray[np.int64]

LAYOUT, FINDING = divergence.LAYOUT, divergence.OUR_REASON

_INPUT, _PARAMETERS, _OUTPUT, _GRADIENT = (
    ROLES.index(role) for role in (Role.INPUT, Role.PARAMETERS, Role.OUTPUT, Role.PARAMETERS_GRAD)
)

AGREES = 4.0  # tolerances up to which one rank's value is the bench's: other kernels, other order of sums


@dataclass(frozen=True, slots=True)
class Unit:
    """The ranks that become one: the layout, each side's folders by rank, and the data parallel indices."""

    layout: Layout
    target: dict[int, RankFolder]
    bench: dict[int, RankFolder]
    target_replicas: tuple[int, ...]
    bench_replicas: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The target's ranks."""
        grid = self.layout.target.grid
        return tuple(sorted(rank for stage in grid for d in self.target_replicas for rank in stage[d]))

    @property
    def path(self) -> Path:
        return self.target[self.ranks[0]].path


def compare_unit(
    unit: Unit,
    *,
    step: int | None,
    rank: int | None,
    partition: Path,
    results: Path | None = None,
    time: str = "",
    formats: Sequence[str] = ("csv",),
    tolerance: float | None = None,
    matching: match.Options = match.PLAIN,
    policy: noise.Policy | None = None,
) -> RankComparison | RankFailure:
    """Compare one combined rank and write its partition; arguments and files as in `compare.compare_rank`.

    Never raises because of its inputs or of a full disk: those are a RankFailure.
    """
    return compare.publish(
        lambda: _compared(unit, tolerance, matching, policy, step),
        unit.path,
        step=step,
        rank=rank,
        partition=partition,
        results=results,
        time=time,
        formats=formats,
    )


@dataclass(frozen=True, slots=True)
class _Whole:
    """One side put together: a part for each row, which of its ranks' columns a row shows, and what was noticed.

    `summands` are rows that are parts of a sum, `unlike` rows whose replicas differ, `mean` rows that are a mean over
    the data parallel ranks; `batches` rows that differ between the data parallel ranks because their data do.
    """

    part: Part
    shown: Codes
    summands: Flags
    unlike: Flags
    mean: Flags
    batches: Flags


def _compared(
    unit: Unit, tolerance: float | None, options: match.Options, policy: noise.Policy | None, step: int | None
) -> compare.Compared:
    notes: list[str] = []
    target = gather(unit.layout.target, unit.target, unit.target_replicas)
    bench = gather(unit.layout.bench, unit.bench, unit.bench_replicas)
    notes += [f"target: {note}" for note in target.notes] + [f"bench: {note}" for note in bench.notes]
    if has_applied(target) or has_applied(bench):
        target, bench = with_applied(target), with_applied(bench)
    target, bench, names, own_names, setting_up = _named(target, bench, notes)
    mode = _mode(target, bench, notes)
    seen = replace(target.skeleton, items=_with(target.skeleton.items, "name", names[1]), ops=_with(
        target.skeleton.ops, "name", pa.array(names[0], pa.string())
    ))  # fmt: skip
    matching = match.match(seen, bench.skeleton, options)
    back = dict(zip(names[0], own_names, strict=True))
    alone = tuple(
        replace(entry, op=back.get(entry.op, entry.op)) if entry.side == "target" else entry
        for entry in matching.lonely
    )
    notes += matching.notes
    bench_row = matching.bench_row
    own = decide.decide(target, bench, bench_row, unit.layout.rules)
    inverse = np.full(bench.height, -1, np.int64)
    inverse[bench_row[bench_row >= 0]] = np.flatnonzero(bench_row >= 0)
    other = decide.decide(bench, target, inverse, unit.layout.rules)
    vocabulary = Vocabulary()
    mine = [[Part.of(column, vocabulary) for column in row] for row in target.columns]
    theirs = [[Part.of(column, vocabulary) for column in row] for row in bench.columns]
    parts_of_bench = _together(bench, other, theirs, None, vocabulary)
    reference = parts_of_bench.part.take(bench_row)
    whole = _together(target, own, mine, reference, vocabulary)
    if unit.layout.bench.tp > 1:
        # Now that the target is known, the bench's own replicas can be told from parts of a sum.
        parts_of_bench = _together(bench, other, theirs, whole.part.take(inverse), vocabulary)
    judged = _judge(unit, target, bench, own, other, whole, parts_of_bench, bench_row, vocabulary)
    comparable = np.where(judged.why == 0, bench_row, -1)
    left = _dump(target, judged.target, vocabulary, names[0] if target.layout.pp > 1 else None)
    right = _dump(bench, judged.bench, vocabulary, None)
    values = None
    if mode is Mode.TENSOR:
        values = _values(target, bench, own, other, whole, parts_of_bench, comparable, judged)
    table, differs = compare.table_of(left, right, replace(matching, bench_row=comparable), mode, values)
    differs &= ~_with_summands(target, whole.summands)
    differs |= judged.finding_codes > 0
    apart = None
    if values is not None:
        noise_only = _cancelled(target, judged)
        apart = (np.where(noise_only, np.nan, values.off), np.where(noise_only, np.nan, values.worst))
    # Judged while rows that are not compared still have no bench row; then their names are filled in.
    if policy is not None:
        table = noise.judged(table, mode, policy, step=step, differs=differs, apart=apart)
    else:
        excess = divergence.excess(table, mode, tolerance=tolerance, differs=differs, apart=apart)
        table = table.append_column(divergence.EXCESS, pa.array(excess, mask=np.isnan(excess)))
    table = _without_blame(table, target, bench_row, odd=judged.target)
    table = _filled(table, right, bench_row, comparable)
    table = _told(table, unit, target, bench, own, other, bench_row, judged)
    paired = bench_row >= 0
    notes += _counted(target, paired, judged, bench, setting_up)
    return compare.Compared(
        table=table,
        mode=mode,
        matching=replace(matching, lonely=alone),
        unmatched=int((~paired).sum()),
        partial=target.skeleton.partial or bench.skeleton.partial,
        notes=tuple(dict.fromkeys(notes)),
        differs=differs,
        apart=apart,
    )


# -- names and order


def _named(
    target: Side, bench: Side, notes: list[str]
) -> tuple[Side, Side, tuple[list[str], pa.Array], list[str], Flags]:
    """Both sides in order; the target's ops and items by the bench's names; the names that are shown of its ops, and
    which of these only set up."""
    whole, other_whole = stages.naming(target, bench, notes), stages.naming(bench, target, notes)
    parts = [side.first_ops if side.layout.pp > 1 else () for side in (target, bench)]
    ops = pairing.ops_of(target.skeleton, whole, parts=parts[0], microbatches=target.layout.microbatches)
    other = pairing.ops_of(bench.skeleton, other_whole, parts=parts[1], microbatches=bench.layout.microbatches)
    twin = pairing.counterparts(ops, other)
    bench = stages.with_unique_names(bench, other_whole)
    target = stages.with_unique_names(target, whole)
    if bench.layout.pp > 1:
        back = np.full(other.height, -1, np.int64)
        back[twin[twin >= 0]] = np.flatnonzero(twin >= 0)
        moved = stages.order(bench, other, back, by_twin=target.layout.pp == 1)
        bench = stages.reordered(bench, moved)
        place_of = np.empty(len(moved), np.int64)
        place_of[moved] = np.arange(len(moved))
        twin = np.where(twin >= 0, place_of[np.where(twin >= 0, twin, 0)], -1)
    setting_up = ops.section == pairing.Section.SETUP
    if target.layout.pp > 1:
        moved = stages.order(target, ops, twin, by_twin=bench.layout.pp == 1)
        target, twin, setting_up = stages.reordered(target, moved), twin[moved], setting_up[moved]
    names = pairing.renamed(target.skeleton, bench.skeleton, twin)
    return target, bench, names, target.skeleton.ops["name"].to_pylist(), setting_up


def _mode(target: Side, bench: Side, notes: list[str]) -> Mode:
    left, right = target.skeleton, bench.skeleton
    if left.has_checksums or right.has_checksums:
        notes.append("checksums of parts do not make that of the whole: compared by statistics")
        left, right = replace(left, has_checksums=False), replace(right, has_checksums=False)
    mode, said = compare.mode_of(replace(left, notes=()), replace(right, notes=()))
    notes += said
    return mode


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


# -- putting together


def _together(
    side: Side, decisions: Decisions, parts: list[list[Part]], reference: Part | None, vocabulary: Vocabulary
) -> _Whole:
    """One side's parts as one. `reference` is the other side's value of each row, where it is known."""
    dump = side.skeleton
    allowed = combine.tolerances(dump.items["dtype"].combine_chunks())
    height = side.height
    per_replica = [_of_group(side, decisions, group, reference, allowed, vocabulary) for group in parts]
    whole, shown, summands, unlike = per_replica[0]
    mean, batches = np.zeros(height, bool), np.zeros(height, bool)
    if len(per_replica) > 1:
        values = [entry[0] for entry in per_replica]
        counts = combine.elements(values[0].shapes, vocabulary)
        far = np.max([combine.apart(values[0], value, allowed, counts) for value in values[1:]], axis=0)
        dims = decisions.of(lambda verdict: -1 if verdict.dp_dim is None else verdict.dp_dim, np.int64)
        shared = dims >= 0
        role = dump.items["role"].to_numpy()
        differ = (far > 1.0) & ~shared
        ours = (role == _PARAMETERS) | ((role == _GRADIENT) & _ends(dump, APPLIED))
        unlike = np.logical_or.reduce([unlike, differ & ours, *(entry[3] for entry in per_replica[1:])])
        mean = differ & _is_loss(dump) & (counts == 1)
        batches = differ & ~ours & ~mean
        present = np.stack([value.there for value in values]).argmax(axis=0)
        whole = combine.merged(combine.choose(values, present), combine.joined(values, dims, vocabulary), shared)
        whole = combine.merged(whole, combine.summed(values, counts, vocabulary, mean=True), mean)
        if reference is not None and (differ & ours).any():
            furthest = np.argmax([combine.apart(value, reference, allowed, counts) for value in values], axis=0)
            whole = combine.merged(whole, combine.choose(values, furthest), differ & ours)
    return _Whole(whole, shown, summands, unlike, mean, batches)


def _of_group(
    side: Side,
    decisions: Decisions,
    parts: list[Part],
    reference: Part | None,
    allowed: npt.NDArray[np.float64],
    vocabulary: Vocabulary,
) -> tuple[Part, Codes, Flags, Flags]:
    """A tensor-parallel group as one: (its value, the column shown, parts of a sum, replicas that differ)."""
    height = side.height
    shown = np.zeros(height, np.int64)
    nobody = np.zeros(height, bool)
    if len(parts) == 1:
        return parts[0], shown, nobody, nobody
    dump = side.skeleton
    kinds = decisions.kinds
    counts = combine.elements(parts[0].shapes, vocabulary)
    same = kinds == Kind.SAME
    far = np.max([combine.apart(parts[0], part, allowed, counts) for part in parts[1:]], axis=0)
    differ = same & (far > 1.0)
    summands = kinds == Kind.PARTIAL
    unlike = nobody
    if differ.any():
        told = decisions.of(lambda verdict: verdict.source in (Source.FILE, Source.PLACEMENTS), bool)
        role = dump.items["role"].to_numpy()
        local = (role == _OUTPUT) | ((role == _GRADIENT) & ~_ends(dump, APPLIED))
        right = nobody.copy()
        adds_up = nobody.copy()
        if reference is not None:
            distances = np.stack([combine.apart(part, reference, allowed, counts) for part in parts])
            right = reference.there & (distances.min(axis=0) <= AGREES)
            adds_up = reference.there & _means_add_up(parts, reference, allowed, counts)
            shown = np.where(differ, distances.argmax(axis=0), shown)
        # Where what a call takes in is divided, what it gives may be a part of a sum on each rank.
        op = dump.items["op"].to_numpy()
        divided = np.zeros(dump.ops.num_rows, bool)
        divided[op[((kinds == Kind.SHARD) | summands) & ((role == _INPUT) | (role == _PARAMETERS))]] = True
        summands = summands | (differ & ~told & ~right & ((local & divided[op]) | (adds_up & (role != _PARAMETERS))))
        # Accumulated on this rank and not yet reduced: nobody promised that these agree.
        waiting = (role == _GRADIENT) & ~_ends(dump, APPLIED) & ~right
        summands = summands | (differ & ~told & waiting)
        unlike = differ & ~summands
    # Something that is not finite on any rank is shown.
    odd = np.stack([part.is_number[0] & ~np.isfinite(part.numbers[0]) for part in parts])
    shown = np.where(odd.any(axis=0) & (kinds != Kind.SHARD), odd.argmax(axis=0), shown)
    absent = ~np.stack([part.there for part in parts])
    shown = np.where(absent[shown, np.arange(height)], (~absent).argmax(axis=0), shown)
    chosen = combine.choose(parts, shown)
    return combine.mixed(decisions, parts, chosen, vocabulary, summands), shown, summands, unlike


def _means_add_up(
    parts: list[Part], reference: Part, allowed: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]
) -> Flags:
    """Rows whose means add up to the other side's: what parts of a sum do."""
    with np.errstate(all="ignore"):
        total = np.sum([part.numbers[MEAN] for part in parts], axis=0)
        spread = np.max([np.abs(part.numbers[3]) for part in (*parts, reference)], axis=0) / np.sqrt(counts)
        close: Flags = np.abs(total - reference.numbers[MEAN]) <= AGREES * allowed * spread
    return close


def _ends(dump: RankDump, ending: str) -> Flags:
    return np.asarray(pc.ends_with(dump.items["name"], ending).to_numpy())


_LOSSES = r"(?i)loss|cross_?entropy|criterion"


def _is_loss(dump: RankDump) -> Flags:
    """Outputs of forward calls whose name says that they are losses."""
    names = np.asarray(pc.match_substring_regex(dump.ops["name"], _LOSSES).to_numpy())
    forward = np.asarray(pc.match_substring_regex(dump.ops["name"], r"\.forward(?:\.\d+)?$").to_numpy())
    op = dump.items["op"].to_numpy()
    return np.asarray((names & forward)[op] & (dump.items["role"].to_numpy() == _OUTPUT))


# -- what can be compared, and what was found


_PLAIN = r"^(?:<class|torch\.Size|torch\.ProcessGroup|slice)"
_OK, _BATCHES, _SIZE, _GROUP, _RANKS, _LACKING, _BIAS, _APART, _CHECKSUM = range(9)


@dataclass(frozen=True, slots=True)
class _Judged:
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


def _judge(
    unit: Unit,
    target: Side,
    bench: Side,
    own: Decisions,
    other: Decisions,
    whole: _Whole,
    theirs: _Whole,
    bench_row: Codes,
    vocabulary: Vocabulary,
) -> _Judged:
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
    d, other_d = len(target.columns), len(bench.columns)
    batches = d != other_d
    tp, other_tp = unit.layout.target.tp, unit.layout.bench.tp

    # Arguments that are no tensors: sizes of a part, ranks and groups.
    dtypes = dump.items["dtype"].combine_chunks().cast(pa.string())
    plain = np.asarray(pc.match_substring_regex(dtypes, _PLAIN).to_numpy(zero_copy_only=False))
    plain = plain | (own.kinds == Kind.PLAIN)
    alike = _alike(mine, reference)
    groups = np.asarray(pc.starts_with(dump.ops["name"], "Distributed.").to_numpy())[op] & plain
    groups |= np.asarray(pc.equal(dtypes, "torch.ProcessGroup").to_numpy(zero_copy_only=False))
    why[found & plain & ~alike & groups] = _GROUP
    differ = _plain_differ(target, vocabulary) & plain
    why[found & differ & (why == 0)] = _RANKS
    fits = _size_fits(mine, reference, {tp * d / (other_tp * other_d), tp / other_tp, d / other_d} - {1.0})
    sized = found & plain & ~alike & (why == 0)
    is_size = np.asarray(pc.equal(dtypes, "torch.Size").to_numpy(zero_copy_only=False))
    why[sized & (fits | is_size)] = _SIZE

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
    }
    return _Judged(why, whys, finding, tuple(said), mine, theirs.part, sums, whole.summands, theirs.summands)


def _alike(a: Part, b: Part) -> Flags:
    out = np.ones(len(a.there), bool)
    for i in range(4):
        same = (a.numbers[i] == b.numbers[i]) | (np.isnan(a.numbers[i]) & np.isnan(b.numbers[i]))
        out &= same & (a.texts[i] == b.texts[i])
    return np.asarray(out & (a.shapes == b.shapes))


def _plain_differ(side: Side, vocabulary: Vocabulary) -> Flags:
    """Rows that are another value on another rank."""
    first = side.columns[0][0]
    parts = [Part.of(column, vocabulary) for row in side.columns for column in row]
    out = np.zeros(len(first.there), bool)
    for part in parts[1:]:
        out |= ~_alike(parts[0], part)
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


def _with_summands(side: Side, summands: Flags) -> Flags:
    """Rows of ops that give parts of a sum: an argument that is missing there is added after the sum."""
    op = side.skeleton.items["op"].to_numpy()
    ops = np.zeros(side.skeleton.ops.num_rows, bool)
    ops[op[summands]] = True
    return np.asarray(ops[op])


def _replicas_differ(side: Side, row: int) -> str:
    """The ranks and the norms (or values) of replicas that are no replicas."""
    stage = int(side.stage[row])
    told = []
    for group in side.columns:
        for column in group:
            norm = float(column.numbers[3][row])
            text = f"norm {norm:.7g}" if not math.isnan(norm) else f"max {float(column.numbers[0][row]):.7g}"
            told.append(f"rank {column.ranks[stage]} {text}")
    return f"replicas differ: {', '.join(told[:8])}{' ...' if len(told) > 8 else ''}"


def _counted(target: Side, paired: Flags, judged: _Judged, bench: Side, setting_up: Flags) -> list[str]:
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


# -- tables


def _dump(side: Side, part: Part, vocabulary: Vocabulary, names: Sequence[str] | None) -> RankDump:
    """The side as the dump of one rank that held the whole. `names` are its ops' names in the other side's words."""
    dump = side.skeleton
    items = dump.items
    for i, name in enumerate(("max", "min", "mean", "norm")):
        items = _with(items, name, pa.array(part.numbers[i], mask=~part.is_number[i]))
        items = _with(items, f"{name}:text", vocabulary.column(part.texts[i]))
    items = _with(items, "shape", vocabulary.column(part.shapes))
    dump = replace(dump, items=items.combine_chunks(), has_checksums=False)
    if names is None:
        return dump
    # Of several stages: each numbers its calls from 0, so the bench's names are shown where there are some.
    own: list[str] = dump.ops["name"].to_pylist()
    shown = [new if pairing.is_matched(new) else old for new, old in zip(names, own, strict=True)]
    return stages.with_names(replace(side, skeleton=dump), own, shown).skeleton


def _without_blame(table: pa.Table, target: Side, bench_row: Codes, *, odd: Part) -> pa.Table:
    """A call that the bench lacks is to blame for what follows only where not all ranks make it.

    The others belong to the layout: they stand before every divided layer.
    """
    values = table[divergence.EXCESS].to_numpy().copy()
    finite = ~(odd.is_number[0] & ~np.isfinite(odd.numbers[0]))
    there = np.logical_and.reduce([column.there for row in target.columns for column in row])
    alone = np.isposinf(values) & (bench_row < 0) & finite & there
    if not alone.any():
        return table
    values[alone] = np.nan
    return _with(table, divergence.EXCESS, pa.array(values, mask=np.isnan(values)))


def _filled(table: pa.Table, right: RankDump, bench_row: Codes, comparable: Codes) -> pa.Table:
    """Names, dtypes and shapes of the bench also where a row is not compared."""
    rows = (bench_row >= 0) & (comparable < 0)
    if not rows.any():
        return table
    places = pa.array(bench_row, mask=bench_row < 0)
    for name, source in (
        (columns.BENCH_NAME, "name"),
        ("Bench Dtype", "dtype"),
        ("Bench Tensor Shape", "shape"),
        ("Bench Requires_grad", "grad"),
    ):
        theirs = right.items[source].combine_chunks().take(places).cast(pa.string())
        shown = table[name].combine_chunks() if isinstance(table[name], pa.ChunkedArray) else table[name]
        table = _with(table, name, pc.if_else(pa.array(rows), theirs, shown))
    return table


def _told(
    table: pa.Table,
    unit: Unit,
    target: Side,
    bench: Side,
    own: Decisions,
    other: Decisions,
    bench_row: Codes,
    judged: _Judged,
) -> pa.Table:
    """The layout and finding columns, and the same in Err_message."""
    found = bench_row >= 0
    at = np.where(found, bench_row, 0)
    mine = _words(target, own, judged.target_sums)
    theirs = _words(bench, other, judged.bench_sums).take(pa.array(at))
    single = unit.layout.bench.tp == 1 and len(bench.columns) == 1
    shown = mine
    if not single:
        shown = pc.if_else(pa.array(found), pc.binary_join_element_wise(mine, theirs, "; bench "), mine)
    reasons = pa.array([judged.whys.get(code) for code in range(max(judged.whys) + 1)], pa.string())
    why = reasons.take(pa.array(judged.why, mask=judged.why == 0))
    findings = pa.array([None, *judged.findings[1:]], pa.string()).take(pa.array(judged.finding_codes))
    layout = pc.if_else(why.is_valid(), pc.binary_join_element_wise(shown, pc.fill_null(why, ""), "; "), shown)
    with_finding = pc.binary_join_element_wise(layout, pc.fill_null(findings, ""), "; ")
    message = _added(table[columns.ERR_MESSAGE], pc.if_else(findings.is_valid(), with_finding, layout))
    table = _with(table, columns.ERR_MESSAGE, message)
    return table.append_column(LAYOUT, layout).append_column(FINDING, findings)


def _added(messages: pa.ChunkedArray, texts: pa.Array) -> pa.Array:
    """Err_message cells, which are texts of lists, with one text more in each."""
    known = messages.combine_chunks().cast(pa.string()).dictionary_encode()
    more = texts.dictionary_encode()
    codes = known.indices.to_numpy(zero_copy_only=False) * len(more.dictionary) + more.indices.to_numpy(
        zero_copy_only=False
    )
    unique, place = np.unique(codes, return_inverse=True)
    made = []
    for code in unique.tolist():
        cell = known.dictionary[code // len(more.dictionary)].as_py()
        text = json.dumps(more.dictionary[code % len(more.dictionary)].as_py())
        inside = cell.strip()[1:-1] if cell.strip().startswith("[") else ""
        made.append(f"[{inside}{', ' if inside else ''}{text}]")
    return pa.array(made, pa.string()).take(pa.array(place.reshape(-1)))


def _words(side: Side, decisions: Decisions, sums: Flags) -> pa.Array:
    """For each row which ranks were put together and how."""
    stages_ = side.layout.pp
    codes = (decisions.codes * stages_ + side.stage) * 2 + sums
    unique, place = np.unique(codes, return_inverse=True)
    texts = []
    for code in unique.tolist():
        verdict = decisions.verdicts[code // 2 // stages_]
        stage = code // 2 % stages_
        ranks = [column.ranks[stage] for row in side.columns for column in row]
        before = f"stage {stage}, " if stages_ > 1 else ""
        if code % 2 and verdict.kind is Kind.SAME:
            verdict = replace(verdict, kind=Kind.PARTIAL)
        text = before + decide.words(verdict, ranks)
        if verdict.dp_dim is not None and len(side.columns) > 1:
            text += f", data parallel shards joined along dimension {verdict.dp_dim}"
        texts.append(text)
    return pa.array(texts, pa.string()).take(pa.array(place.reshape(-1)))


# -- stored values


def _values(
    target: Side,
    bench: Side,
    own: Decisions,
    other: Decisions,
    whole: _Whole,
    theirs: _Whole,
    comparable: Codes,
    judged: _Judged,
) -> stored.StoredMetrics:
    """Metrics of the stored values, each side's parts joined or added on the way."""
    names = _file_names(target), _file_names(bench)
    rows = []
    # A mean over data parallel ranks is that of their single numbers, which the statistics hold.
    means = whole.mean | theirs.mean[np.maximum(comparable, 0)]
    for row in np.flatnonzero((comparable >= 0) & ~means).tolist():
        if names[0][0][0][row] is not None and names[1][0][0][int(comparable[row])] is not None:
            rows.append(row)

    def compared(row: int) -> tensors.TensorMetrics:
        at = int(comparable[row])
        opened: list[Values] = []
        for side, decisions, found, files, place in (
            (target, own, whole, names[0], row),
            (bench, other, theirs, names[1], at),
        ):
            word = "target" if side is target else "bench"
            try:
                opened.append(cast(Values, _opened(side, decisions, found, files, place)))
            except UnreadableValues as error:
                return tensors.TensorMetrics(tensors.NO_VALUES.cells, reason=f"{word}: {error}")
        metrics = tensors.compare_values(opened[0], opened[1])
        for values in opened:
            values.forget()
        guessed = any(
            verdict.kind is Kind.SHARD and verdict.source is Source.SHAPES
            for verdict in (own.verdicts[own.codes[row]], other.verdicts[other.codes[at]])
        )
        if guessed and metrics.off > 0 and _statistics_agree(target, judged, row, at):
            # The dimension was guessed; values of the same statistics in another order say that it is another one.
            return tensors.TensorMetrics(metrics.cells)
        return metrics

    return stored.collected(target.height, np.array(rows, np.int64), compared)


CANCELLED = 2.0**-12  # of the largest value around: a gradient below it is the rounding of sums that cancel


def _cancelled(target: Side, judged: _Judged) -> Flags:
    """Gradients that cancel to zero: summed in another order, element by element nothing agrees.

    What comes out of a backward call against what came in, a parameter's gradient against those of its module.
    """
    dump = target.skeleton
    op = dump.items["op"].to_numpy()
    role = dump.items["role"].to_numpy()
    backward = np.asarray(pc.match_substring_regex(dump.ops["name"], r"\.backward(?:\.\d+)?$").to_numpy())[op]
    with np.errstate(all="ignore"):
        largest = np.fmax(np.abs(judged.target.numbers[0]), np.abs(judged.target.numbers[1]))
    largest = np.where(np.isfinite(largest), largest, 0.0)
    source = (backward & (role == _INPUT)) | (role == _GRADIENT)
    around = np.zeros(dump.ops.num_rows)
    np.maximum.at(around, op[source], largest[source])
    return np.asarray(((backward & (role == _OUTPUT)) | (role == _GRADIENT)) & (largest < around[op] * CANCELLED))


def _statistics_agree(target: Side, judged: _Judged, row: int, at: int) -> bool:
    a, b = judged.target.take(np.array([row])), judged.bench.take(np.array([at]))
    allowed = combine.tolerances(target.skeleton.items["dtype"].slice(row, 1).combine_chunks())
    counts = np.array([np.nan])
    return bool(combine.apart(a, b, allowed, counts)[0] <= 1.0)


def _file_names(side: Side) -> list[list[list[str | None]]]:
    return [[column.data_names.to_pylist() for column in row] for row in side.columns]


def _opened(
    side: Side, decisions: Decisions, whole: _Whole, names: list[list[list[str | None]]], row: int
) -> shards.Whole:
    """One row's value on one side. Raises UnreadableValues."""
    verdict = decisions.verdicts[decisions.codes[row]]
    stage = int(side.stage[row])

    def paths(d: int) -> list[Path]:
        found = []
        for t, column in enumerate(side.columns[d]):
            name = names[d][t][row]
            if name is None:
                if "[0" in str(column.shapes[row].as_py()) or ", 0" in str(column.shapes[row].as_py()):
                    continue  # an empty shard has no file
                raise UnreadableValues(f"rank {column.ranks[stage]} has no values of it")
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise UnreadableValues(f"{name!r} is no name of a file")
            found.append(column.folders[stage] / name)
        return found

    files = paths(0)
    if whole.summands[row]:
        return shards.open_summed(files)
    if verdict.kind is Kind.SHARD:
        return shards.open_joined(files, verdict.dim)
    if verdict.kind is Kind.BESIDE:
        return shards.open_joined(files, None)
    if verdict.dp_dim is not None and len(side.columns) > 1:
        return shards.open_joined([paths(d)[0] for d in range(len(side.columns))], verdict.dp_dim)
    return shards.open_joined([files[min(int(whole.shown[row]), len(files) - 1)]], None)


def ranks_of(unit: Unit) -> str:
    """The target's ranks of a unit, for a person."""
    return number_ranges(unit.ranks)
