"""One combined rank: the ranks that make one model on either side, put together and compared as one rank is.

The table is an ordinary partition (see `model`) with two columns more:

    layout           string   which ranks make the row and how, on both sides
    finding          string   what putting the ranks together found (replicas that differ, shapes that do not add up),
                              null for nothing

`Err_message` says the same. A row whose values cannot be put together keeps its names and shapes and has no metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aggregator import compare, divergence, match, noise, tabulate
from aggregator.columns import Mode
from aggregator.layouts import decide, judge, pairing, stages, tables, together, whole_values
from aggregator.layouts.combine import Part, Vocabulary
from aggregator.layouts.gather import Side, gather, has_applied, with_applied
from aggregator.layouts.spec import Layout
from aggregator.model import RankComparison, RankFailure
from msprobe_launch.errors import NothingUsable
from msprobe_launch.records.layout import RankFolder

if TYPE_CHECKING:
    import numpy.typing as npt

    Flags = npt.NDArray[np.bool_]


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


def _compared(
    unit: Unit, tolerance: float | None, options: match.Options, policy: noise.Policy | None, step: int | None
) -> compare.Compared:
    notes: list[str] = []
    target, bench, divided_alike = _gathered(unit)
    notes += [f"target: {note}" for note in target.notes] + [f"bench: {note}" for note in bench.notes]
    if has_applied(target) or has_applied(bench):
        target, bench = with_applied(target), with_applied(bench)
    target, bench, names, own_names, setting_up = _named(target, bench, notes)
    mode = _mode(target, bench, notes)
    matching = _matched(target, bench, names, own_names, options)
    notes += matching.notes
    bench_row = matching.bench_row
    own = decide.decide(target, bench, bench_row, unit.layout.rules)
    inverse = np.full(bench.height, -1, np.int64)
    inverse[bench_row[bench_row >= 0]] = np.flatnonzero(bench_row >= 0)
    other = decide.decide(bench, target, inverse, unit.layout.rules)
    notes += decide.unused(unit.layout.rules, target, bench)
    vocabulary = Vocabulary()
    mine = [[Part.of(column, vocabulary) for column in row] for row in target.columns]
    theirs = [[Part.of(column, vocabulary) for column in row] for row in bench.columns]
    parts_of_bench = together.together(bench, other, theirs, None, vocabulary)
    reference = parts_of_bench.part.take(bench_row)
    whole = together.together(target, own, mine, reference, vocabulary)
    if unit.layout.bench.tp > 1:
        # Now that the target is known, the bench's own replicas can be told from parts of a sum.
        parts_of_bench = together.together(bench, other, theirs, whole.part.take(inverse), vocabulary)
    elsewhere = np.zeros(target.height, bool)
    if not (divided_alike or target.lent or bench.lent):
        theirs_too = decide.among_replicas(bench)[0][np.maximum(bench_row, 0)]
        elsewhere = decide.among_replicas(target)[0] | (theirs_too & (bench_row >= 0))
    judged = judge.judge(target, bench, own, other, whole, parts_of_bench, bench_row, vocabulary, elsewhere)
    comparable = np.where(judged.why == 0, bench_row, -1)
    left = tables.as_dump(target, judged.target, vocabulary, names[0] if target.layout.pp > 1 else None)
    right = tables.as_dump(bench, judged.bench, vocabulary, None)
    values = None
    if mode is Mode.TENSOR:
        values = whole_values.metrics(target, bench, own, other, whole, parts_of_bench, comparable, judged)
    table, differs, said = tabulate.table_of(left, right, replace(matching, bench_row=comparable), mode, values)
    notes += said
    differs &= ~judge.with_summands(target, whole.summands)
    differs |= (judged.finding_codes > 0) & ~divergence.uninitialised(table)
    apart = None
    if values is not None:
        noise_only = whole_values.cancelled(target, judged)
        apart = (np.where(noise_only, np.nan, values.off), np.where(noise_only, np.nan, values.worst))
    # Judged while rows that are not compared still have no bench row; then their names are filled in.
    if policy is not None:
        notes += noise.notes_on(table, policy.thresholds)
        table = noise.judged(table, mode, policy, step=step, differs=differs, apart=apart)
    else:
        excess = divergence.excess(table, mode, tolerance=tolerance, differs=differs, apart=apart)
        table = table.append_column(divergence.EXCESS, pa.array(excess, mask=np.isnan(excess)))
    table = tables.without_blame(table, target, bench_row, odd=judged.target)
    table = tables.filled(table, right, bench_row, comparable)
    table = tables.told(table, target, bench, own, other, bench_row, judged)
    paired = bench_row >= 0
    notes += judge.counted(target, paired, judged, bench, setting_up)
    return compare.Compared(
        table=table,
        mode=mode,
        matching=matching,
        unmatched=int((~paired).sum()),
        partial=target.skeleton.partial or bench.skeleton.partial,
        notes=tuple(dict.fromkeys(notes)),
        differs=differs,
        apart=apart,
    )


def _gathered(unit: Unit) -> tuple[Side, Side, bool]:
    """Both sides, and whether data parallel ranks divide the same values in the same way (or are compared as one).

    Where they do not (FSDP against DDP on as many ranks), the first rank borrows the others' shards.
    """
    target = gather(unit.layout.target, unit.target, unit.target_replicas)
    bench = gather(unit.layout.bench, unit.bench, unit.bench_replicas)
    if len(target.columns) > 1 or decide.among_replicas(target)[1] == decide.among_replicas(bench)[1]:
        return target, bench, True
    if 0 in unit.target_replicas:
        others = [d for d in range(unit.layout.target.dp) if d not in unit.target_replicas]
        target = gather(unit.layout.target, unit.target, unit.target_replicas, others)
        bench = gather(unit.layout.bench, unit.bench, unit.bench_replicas, others)
    return target, bench, False


# -- names and order


def _matched(
    target: Side, bench: Side, names: tuple[list[str], pa.Array], own_names: list[str], options: match.Options
) -> match.Matching:
    """The items' counterparts, found by the bench's names; ops that have none by their own."""
    dump = target.skeleton
    items = tables.with_column(dump.items, "name", names[1])
    ops = tables.with_column(dump.ops, "name", pa.array(names[0], pa.string()))
    matching = match.match(replace(dump, items=items, ops=ops), bench.skeleton, options, paired=True)
    back = dict(zip(names[0], own_names, strict=True))
    alone = tuple(
        replace(entry, op=back.get(entry.op, entry.op)) if entry.side == "target" else entry
        for entry in matching.lonely
    )
    return replace(matching, lonely=alone)


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
    """What to compare by. Raises NothingUsable where there is nothing that parts have in common with a whole."""
    left, right = target.skeleton, bench.skeleton
    if (left.task == "structure") != (right.task == "structure"):
        raise NothingUsable(
            "one side holds names only (task structure) and the other one values",
            hint="Their names are compared rank by rank: leave out --layout.",
        )
    if left.has_checksums or right.has_checksums:
        notes.append("checksums of parts do not make that of the whole: compared by statistics")
        left, right = replace(left, has_checksums=False), replace(right, has_checksums=False)
    mode, said = compare.mode_of(replace(left, notes=()), replace(right, notes=()))
    for word, dump in (("target", left), ("bench", right)):
        if mode is Mode.STATISTICS and not compare.has_statistics(dump):
            raise NothingUsable(
                f"the {word}'s dumps hold no statistics, and checksums of parts do not make that of the whole",
                hint="Record with --probe-summary-mode statistics.",
            )
    notes += said
    return mode
