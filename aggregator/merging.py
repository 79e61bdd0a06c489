"""The ranks of one step -> its merged tables, as a job that an executor runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from aggregator import merge, merge_config, places, pool
from aggregator.alone import RankStatistics
from aggregator.columns import Mode
from aggregator.merge import RankTable
from aggregator.merge_config import MergeConfig
from aggregator.model import RankComparison, RankFailure, rank_order
from aggregator.report.table import Format, write_merged


@dataclass(frozen=True, slots=True)
class MergedFiles:
    """What one merge job wrote and noticed."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def merge_step(
    mode: Mode,
    tables: tuple[RankTable, ...],
    metrics: tuple[str, ...],
    config: MergeConfig,
    folder: Path,
    time: str,
    formats: frozenset[Format],
) -> MergedFiles:
    """Merge one step into some of the formats. Raises RunDirectoryError where the disk refuses."""
    plan = merge.plan(mode, tables, config)
    try:
        return MergedFiles(write_merged(plan, metrics, folder, time, formats), plan.notes)
    except OSError as error:
        raise places.cannot_write(error, folder) from error


def run(executor: Executor, jobs: Sequence[Callable[[], MergedFiles]]) -> list[MergedFiles]:
    """Run merge jobs; they belong to no rank, so pool.run raises where one fails and gives no RankFailure."""
    return [entry for entry in pool.run(executor, jobs) if isinstance(entry, MergedFiles)]


def merge_compared(
    compared: Sequence[RankComparison], folder: Path, time: str, formats: frozenset[Format]
) -> tuple[Path, ...]:
    """Merge the ranks of one step into `folder`; the files. Raises RunDirectoryError where the disk refuses."""
    mode, usable, _ = of_one_mode(sorted(compared, key=rank_order))
    config = MergeConfig()
    metrics = merge_config.chosen(config, mode)
    if not usable:
        return ()
    return merge_step(mode, tables(usable), metrics, config, folder, time, formats).files


def of_one_mode(
    compared: Sequence[RankComparison],
) -> tuple[Mode, tuple[RankComparison, ...], tuple[RankFailure, ...]]:
    """The mode that most comparisons have; those of another one become failures, since no table can hold both."""
    if not compared:
        return Mode.STATISTICS, (), ()
    counts = Counter(entry.mode for entry in compared)
    mode = max(Mode, key=lambda m: counts[m])
    odd = tuple(
        RankFailure(e.step, e.rank, e.source, f"is in {e.mode.value} mode, the other ranks in {mode.value} mode")
        for e in compared
        if e.mode is not mode
    )
    return mode, tuple(entry for entry in compared if entry.mode is mode), odd


def tables(group: Sequence[RankComparison | RankStatistics]) -> tuple[RankTable, ...]:
    """What `merge` takes of each rank."""
    return tuple(RankTable(entry.rank, entry.partition) for entry in group)
