"""Who should have recorded, who did, and what the roster says about each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aggregator.alone import RankStatistics
from aggregator.model import RankComparison
from aggregator.sources import Run, number_ranges
from msprobe_launch.records.numbers import EVERY, NumberSet
from msprobe_launch.records.roster import RankMark


@dataclass(frozen=True, slots=True)
class MissingRank:
    """A rank that should be in a step and left nothing there, with the roster's reason where there is one."""

    step: int | None
    rank: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankNote:
    """Something the roster or a reader says about one rank (calls lost, an exception, how it ended)."""

    rank: int | None
    text: str


def gaps(
    steps: Iterable[int | None],
    seen: set[tuple[int | None, int | None]],
    *,
    asked: NumberSet = EVERY,
    world_size: int | None = None,
) -> tuple[MissingRank, ...]:
    """Ranks asked for that left nothing in a step, out of the world, or of 0..the highest seen where nothing says.

    Of each range that goes beyond these the first rank beyond is missing too: it stands for the others.
    """
    ranks = {rank for _, rank in seen if rank is not None}
    if not ranks and world_size is None:
        return ()
    size = max([*ranks, (world_size or 0) - 1]) + 1
    wanted = {rank for rank in range(size) if rank in asked}
    beyond = {max(low, size): high for low, high in asked.ranges if high >= size}
    return tuple(
        MissingRank(step, rank, _not_there(rank, beyond[rank], size) if rank in beyond else "")
        for step in steps
        for rank in sorted({*wanted, *beyond})
        if (step, rank) not in seen
    )


def _not_there(low: int, high: int, size: int) -> str:
    asked = f"{low}" if low == high else f"{low}-{high}"
    return f"--ranks asks for {asked}, and the run has {number_ranges(range(size))}"


def missing(run: Run, asked: NumberSet = EVERY) -> tuple[MissingRank, ...]:
    """Ranks that should be in a step of the run and are not; those told not to record are not missing."""
    if run.is_one_rank or all(dump.rank is None for dump in run.dumps):
        return ()
    seen = {(dump.step, dump.rank) for dump in run.dumps}
    marks = {mark.rank: mark for mark in run.marks}
    return tuple(
        MissingRank(gap.step, gap.rank, gap.reason or _why(marks.get(gap.rank), has_roster=bool(marks)))
        for gap in gaps(run.steps, seen, asked=asked, world_size=run.world_size)
        if not _silent(marks.get(gap.rank))
    )


def missing_steps(run: Run, asked: NumberSet = EVERY) -> tuple[int, ...]:
    """Steps that the roster says were recorded and of which no rank's folder is there."""
    wanted = {step for step in run.recorded if step in asked}
    return tuple(sorted(wanted - {step for step in run.steps if step is not None}))


def expected(run: Run) -> int | None:
    """How many ranks should have recorded, None where the question makes no sense."""
    if run.is_one_rank or all(dump.rank is None for dump in run.dumps):
        return None
    size = run.world_size
    if size is None:
        size = max(dump.rank for dump in run.dumps if dump.rank is not None) + 1
    return size - sum(_silent(mark) for mark in run.marks)


def _silent(mark: RankMark | None) -> bool:
    return mark is not None and mark.attached and not mark.recording


def _why(mark: RankMark | None, *, has_roster: bool) -> str:
    if mark is None:
        return "it left no mark in the roster" if has_roster else ""
    if not mark.attached:
        return mark.note or mark.ended or "the probe never reached it"
    has = f"it recorded steps {number_ranges(mark.steps)}" if mark.steps else "it recorded no step"
    return "; ".join(text for text in (mark.ended, mark.exception, mark.note, has) if text)


def why_empty(mark: RankMark | None) -> str:
    """Why a dump holds no item, as far as the rank's mark tells."""
    said = "its dump holds 0 items"
    if mark is None:
        return said
    told = [*mark.unseen, *mark.lost] + [text for text in (mark.note, mark.exception) if text]
    return f"{said}: {'; '.join(told)}" if told else said


def roster_notes(run: Run) -> tuple[RankNote, ...]:
    """What the marks say that a reader of the results should know."""
    notes: list[RankNote] = []
    for mark in run.marks:
        if mark.attached and not mark.finished and not mark.ended and mark.exit_code is None:
            notes.append(RankNote(mark.rank, "has not ended according to the roster: the run may still be going on"))
        if mark.exception:
            notes.append(RankNote(mark.rank, f"raised {mark.exception}"))
        elif mark.exit_code not in (None, 0):
            notes.append(RankNote(mark.rank, mark.ended or f"ended with code {mark.exit_code}"))
        if mark.lost:
            notes.append(RankNote(mark.rank, f"calls lost: {_counts(mark.lost)}"))
        if mark.unseen:
            notes.append(RankNote(mark.rank, f"not observed: {_counts(mark.unseen)}"))
        if mark.attached and mark.note:
            notes.append(RankNote(mark.rank, mark.note))
    return tuple(notes)


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in sorted(numbers.items()))


def reader_notes(entries: Sequence[RankComparison | RankStatistics]) -> tuple[RankNote, ...]:
    """Notes of the readers, each once per rank, its steps named."""
    steps: dict[tuple[int | None, str], list[int | None]] = {}
    for entry in entries:
        for note in entry.notes:
            steps.setdefault((entry.rank, note), []).append(entry.step)
    return tuple(
        RankNote(rank, note if where == [None] else f"step {number_ranges(where)}: {note}")
        for (rank, note), where in steps.items()
    )
