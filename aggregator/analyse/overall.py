"""Over all ranks: the first divergence, and the ops that differ most.

The first divergence is the earliest in (step, call order, rank), outputs of collectives last. Ranks that make other
calls are lined up by the calls they share (`merge.plan`), so that one that logs more is not later for it. One case is
turned round: where *all* ranks (three or more) first differ at the same item, that difference points to the job
(device, version, data) and not to a rank. If it also did not spread, that is if most of what was compared after it
agrees again, while a later item singles out less than half of the ranks by a wide margin, then that later item is the
culprit and the common one is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import merge
from aggregator.merge import MergePlan, RankTable
from aggregator.model import Divergence, RankComparison, rank_order

# A rank stands out where its excess is this many times that of every rank that is not out: far beyond how
# run-to-run noise of one op differs between ranks, far below any defect that a single rank has alone.
STANDS_OUT = 10.0

EXCESS = "excess"


@dataclass(frozen=True, slots=True)
class OpCount:
    """How often and how far an op differs over all ranks and steps. `excess` is in tolerances, inf for NaN or shape."""

    op: str
    findings: int
    excess: float
    ranks: int


@dataclass(frozen=True, slots=True)
class First:
    """`culprit` is the overall first divergence; `common` the one all ranks share, where it was put second."""

    culprit: Divergence | None
    common: Divergence | None = None


def order(divergence: Divergence) -> tuple[int, bool, int, int, int]:
    """Sort key: step, received or not, call order of its own rank, rank, row; unknown steps and ranks last."""
    big = 1 << 62
    step = big if divergence.step is None else divergence.step
    return step, _received(divergence), divergence.position, _rank(divergence), divergence.row


def _rank(divergence: Divergence) -> int:
    return 1 << 62 if divergence.rank is None else divergence.rank


def _received(divergence: Divergence) -> bool:
    """What a collective gave has come from another rank, whose own first divergence (what went in) was before it,
    wherever the two stand in the call orders of their ranks."""
    return divergence.item.startswith("Distributed.") and ".output." in divergence.item


def first(
    compared: Sequence[RankComparison], divergence_at: Callable[[RankComparison, int], Divergence | None]
) -> First:
    """The overall first divergence. `divergence_at(comparison, row)` describes a row of a partition."""
    found = [entry.first for entry in compared if entry.first is not None]
    if not found:
        return First(None)
    earliest = min(found, key=order)
    same_step = sorted((entry for entry in compared if entry.step == earliest.step), key=rank_order)
    apart = {entry.first.item for entry in same_step if entry.first is not None}
    shared = len(apart) == 1 and all(entry.first is not None for entry in same_step)
    if len(apart) == 1 and (not shared or len(same_step) < 3):
        return First(earliest)
    plan = merge.plan(same_step[0].mode, [RankTable(entry.rank, entry.partition) for entry in same_step])
    if not shared:
        firsts = [entry.first for entry in same_step if entry.first is not None]
        return First(min(firsts, key=lambda one: (_received(one), _merged_row(plan, one), _rank(one))))
    outlier = _outlier(plan, same_step, earliest)
    if outlier is None:
        return First(earliest)
    described = divergence_at(*outlier)
    return First(earliest) if described is None else First(described, common=earliest)


def _outlier(
    plan: MergePlan, compared: Sequence[RankComparison], common: Divergence
) -> tuple[RankComparison, int] | None:
    """The earliest item after `common` that singles out less than half of the ranks, as (comparison, row)."""
    start = _merged_row(plan, common) + 1
    # Some ten blocks of a merge: the matrices of numbers here are all there is.
    height = max(merge.LEAST_ROWS, 10 * merge.CELLS_PER_BLOCK // len(plan.ranks))
    for top in range(start, plan.height, height):
        # In merged rows, so that ranks with other items line up; ranks and columns are both in numeric order.
        excess = np.stack(
            [_aligned(rank, rows[top : top + height]) for rank, rows in zip(plan.ranks, plan.rows, strict=True)], axis=1
        )
        candidates = np.flatnonzero(_singles_out(excess))
        if len(candidates):
            row = int(candidates[0])
            rank = int(np.argmax(np.where(excess[row] > 1, excess[row], -1.0)))
            between = _aligned(plan.ranks[rank], plan.rows[rank][start : top + row])
            between = between[~np.isnan(between)]
            if len(between) and np.count_nonzero(between > 1) * 2 >= len(between):
                return None  # it spread: what follows is its consequence
            return compared[rank], int(plan.rows[rank][top + row])
    return None


def _singles_out(excess: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Rows in which less than half of the ranks (columns) are out, and far beyond all others."""
    out = excess > 1
    rest = np.where(out | np.isnan(excess), 0.0, excess).max(axis=1)
    least = np.where(out, excess, np.inf).min(axis=1)
    count = out.sum(axis=1)
    found: npt.NDArray[np.bool_] = (count > 0) & (2 * count < excess.shape[1]) & (least >= STANDS_OUT * rest)
    return found


def _aligned(rank: RankTable, rows: merge.Rows) -> npt.NDArray[np.float64]:
    """A rank's excess in merged rows, NaN where it lacks the item."""
    present = rows[rows >= 0]
    if not len(present):
        return np.full(len(rows), np.nan)
    first, last = int(present.min()), int(present.max())
    own = merge.numbers(rank.partition, EXCESS, slice(first, last + 1))
    return np.where(rows >= 0, own[np.maximum(rows - first, 0)], np.nan)


def _merged_row(plan: MergePlan, divergence: Divergence) -> int:
    return int(pc.index(plan.names, divergence.item).as_py())


def worst_ops(compared: Sequence[RankComparison], limit: int = 5) -> tuple[OpCount, ...]:
    """Ops by their largest excess, then by how many items differ. Reads the findings of one rank at a time."""
    total: pa.Table | None = None
    for entry in sorted(compared, key=rank_order):
        if not entry.findings:
            continue
        table = pq.read_table(entry.partition, columns=["op", EXCESS], filters=pc.field(EXCESS) > 1)
        table = table.set_column(0, "op", table.column("op").cast(pa.string()))
        grouped = table.group_by("op").aggregate([(EXCESS, "max"), (EXCESS, "count")])
        own = pa.table(
            {
                "op": grouped.column("op"),
                "excess": grouped.column(f"{EXCESS}_max"),
                "findings": grouped.column(f"{EXCESS}_count"),
                "rank": pa.repeat(pa.scalar(-1 if entry.rank is None else entry.rank, pa.int64()), grouped.num_rows),
            }
        )
        # Folded (op, rank) by (op, rank) so that many steps of many ranks stay one small table.
        both = own if total is None else pa.concat_tables([total, own.select(total.column_names)])
        total = (
            both.group_by(["op", "rank"])
            .aggregate([("excess", "max"), ("findings", "sum")])
            .rename_columns(["op", "rank", "excess", "findings"])
        )
    if total is None:
        return ()
    by_op = total.group_by("op").aggregate([("excess", "max"), ("findings", "sum"), ("rank", "count_distinct")])
    ordered = by_op.sort_by([("excess_max", "descending"), ("findings_sum", "descending"), ("op", "ascending")])
    return tuple(
        OpCount(row["op"], row["findings_sum"], row["excess_max"], row["rank_count_distinct"])
        for row in ordered.slice(0, limit).to_pylist()
    )
