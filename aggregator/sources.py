"""What is in the folders a person named: dumps of a run, or compare results. Looks at names, reads no table.

run directory      manifest.json, step<N>/rank<R>/..., attempt<K>/...
step folder        rank<R>/...
rank folder        dump.json, or dump.json itself
results            compare_result[_rank<R>[-rank<R>]]_<time>.csv|xlsx, also in step<N>/ folders
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aggregator.model import RankFailure
from msprobe_launch.errors import NothingUsable, RunDirectoryError, UnreadableInput, UsageError
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RankFolder, RunLayout, rank_folders, step_number
from msprobe_launch.records.numbers import EVERY, NumberSet, spans
from msprobe_launch.records.roster import Manifest, RankMark

# 26.2 and 8.1.1 write `rank0`, 1.2.2 `rank0-rank0` (target, bench), one process nothing or `rank`.
_RESULT = re.compile(
    r"^(?:debug_)?compare_result(?:_rank(?P<rank>\d*)(?:-rank\d*)?)?_(?P<stamp>\d+)\.(?P<kind>csv|xlsx)$"
)

# What the aggregator itself leaves beside compare results: not foreign, not input.
_OWN = re.compile(
    r"^(?:summary\.json|inrun-.*\.json|attempt\d+|merged|partitions|aggregate|\..*|multi_ranks_compare_merge_.*)$"
)


@dataclass(frozen=True, slots=True)
class RankDump:
    """One rank of one step of a run. `step` is None where a rank folder was given that lies in no step folder."""

    step: int | None
    rank: int | None
    folder: RankFolder


@dataclass(frozen=True, slots=True)
class Run:
    """The dumps of one attempt of a run, over all given roots (each node of a job may have its own run directory).

    `recorded` are the steps that the roster says are on disk; nothing where only a part of a run was named.
    """

    roots: tuple[Path, ...]
    dumps: tuple[RankDump, ...]
    manifest: Manifest | None = None
    marks: tuple[RankMark, ...] = ()
    notes: tuple[str, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    recorded: frozenset[int] = frozenset()

    @property
    def steps(self) -> tuple[int | None, ...]:
        """Steps on disk, ascending."""
        return tuple(sorted({dump.step for dump in self.dumps}, key=lambda s: (s is None, s or 0)))

    @property
    def is_one_rank(self) -> bool:
        """True where a rank folder or a dump.json was named, so that nobody asked for the others."""
        return len(self.dumps) == 1 and self.roots == (self.dumps[0].folder.path,)

    @property
    def world_size(self) -> int | None:
        """How many ranks the job had, as far as anything says so."""
        if self.manifest is not None and self.manifest.world_size:
            return self.manifest.world_size
        return max((mark.world_size or 0 for mark in self.marks), default=0) or None


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A compare result, by its name. `stamp` is the time in the name, a number that grows."""

    path: Path
    step: int | None
    rank: int | None
    stamp: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that was not read, and why. `stale` marks an older result of a rank that has a newer one."""

    path: Path
    reason: str
    stale: bool = False


@dataclass(frozen=True, slots=True)
class ResultSet:
    """Compare results to merge, the newest of each rank of each step."""

    roots: tuple[Path, ...]
    files: tuple[ResultFile, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def steps(self) -> tuple[int | None, ...]:
        return tuple(sorted({file.step for file in self.files}, key=lambda s: (s is None, s or 0)))


def find(paths: Sequence[Path], *, attempt: int | None = None) -> Run | ResultSet:
    """What the given paths hold together.

    Raises UsageError for a path that is not there or a mixture, NothingUsable where nothing of ours is found.
    """
    runs: list[Run] = []
    results: list[ResultSet] = []
    taken: dict[Path, Path] = {}
    twice: list[tuple[Path, str]] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder", hint=_beside(path))
        other = taken.setdefault(path.resolve(), path)
        if other is not path:
            twice.append((path, "given twice" if other == path else f"the same as {other}, which is read"))
            continue
        found = _run_at(path, attempt)
        if found is not None:
            runs.append(found)
        else:
            results.append(_results_at(path))
    if runs and results:
        raise UsageError(
            f"{runs[0].roots[0]} holds dumps and {results[0].roots[0]} compare results; they cannot be merged together",
            hint="Run msprobe-aggregate once for each.",
        )
    if runs:
        run = _joined_runs(runs)
        return replace(run, notes=run.notes + tuple(f"{path}: {why}" for path, why in twice))
    joined = _joined_results(results)
    return replace(joined, left_out=joined.left_out + tuple(LeftOut(path, why) for path, why in twice))


def find_run(paths: Sequence[Path], *, attempt: int | None = None) -> Run:
    """The dumps at the given paths; raises UsageError where these hold compare results instead."""
    found = find(paths, attempt=attempt)
    if isinstance(found, ResultSet):
        raise UsageError(f"{paths[0]} holds compare results, not the dumps of a run")
    return found


def _beside(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
    except OSError:
        return ""
    return f"Folders in {path.parent}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" if names else ""


# -- dumps


def _run_at(path: Path, attempt: int | None) -> Run | None:
    """The run at `path`, or None where nothing there looks like dumps."""
    if path.is_file():
        if path.name not in ("dump.json", "dump.json.partial", "debug.json"):
            return None
        path = path.parent
    if _has_dump(path):
        folder = RankFolder.at(path) or RankFolder(path, None)
        dump = RankDump(step_number(path.parent.resolve()), folder.rank, folder)
        return _with_roster(RunLayout(path.parent.parent), (path,), [dump], ())
    inside = rank_folders(path)
    if inside:
        step = step_number(path.resolve())
        dumps = [RankDump(step, folder.rank, folder) for folder in inside]
        return _with_roster(RunLayout(path.parent), (path,), dumps, ())
    layout = RunLayout(path)
    attempts = layout.attempts()
    if attempt is not None and attempt not in attempts:
        raise RunDirectoryError(f"{path} has no attempt {attempt}", hint=f"Attempts there: {attempts}")
    chosen = RunLayout(path, attempts[-1] if attempt is None else attempt)
    dumps = [RankDump(step, folder.rank, folder) for step in chosen.steps() for folder in chosen.rank_folders(step)]
    if not dumps and not layout.manifest.exists():
        return None
    notes: tuple[str, ...] = ()
    if len(attempts) > 1:
        others = ", ".join(str(a) for a in attempts if a != chosen.attempt)
        notes = (f"attempt {chosen.attempt} of {path.name} is read; left out: {others} (--attempt K takes another)",)
    run = _with_roster(chosen, (path,), dumps, notes)
    return replace(run, recorded=frozenset(step for mark in run.marks for step in mark.steps))


def _has_dump(path: Path) -> bool:
    folder = RankFolder(path, None)
    return any(candidate.exists() for candidate in (folder.dump, folder.journal, folder.debug))


def _with_roster(layout: RunLayout, roots: tuple[Path, ...], dumps: Iterable[RankDump], notes: tuple[str, ...]) -> Run:
    """Add what the roster and the manifest say; an unreadable one is a note, not the end."""
    said = list(notes)
    manifest = None
    if layout.manifest.is_file():
        try:
            manifest = roster.load(layout.manifest, Manifest)
        except UnreadableInput as error:
            said.append(str(error))
    marks: list[RankMark] = []
    for _, mark in roster.marks(layout):
        if isinstance(mark, RankMark):
            marks.append(mark)
        else:
            said.append(str(mark))
    return Run(roots, tuple(dumps), manifest, tuple(marks), tuple(said))


def _joined_runs(runs: Sequence[Run]) -> Run:
    """One run out of several folders, whose ranks must not overlap."""
    if len(runs) == 1:
        run = runs[0]
    else:
        owner: dict[tuple[int | None, int | None], Path] = {}
        for run in runs:
            for dump in run.dumps:
                other = owner.setdefault((dump.step, dump.rank), run.roots[0])
                if other != run.roots[0]:
                    raise UsageError(
                        f"step {dump.step} of rank {dump.rank} is both in {other} and in {run.roots[0]}",
                        hint=f"To compare them: msprobe-aggregate {run.roots[0]} --bench {other}",
                    )
        run = Run(
            tuple(root for run in runs for root in run.roots),
            tuple(dump for run in runs for dump in run.dumps),
            next((run.manifest for run in runs if run.manifest is not None), None),
            tuple(sorted({mark.rank: mark for run in runs for mark in run.marks}.values(), key=lambda m: m.rank)),
            tuple(note for run in runs for note in run.notes),
            recorded=frozenset(step for run in runs for step in run.recorded),
        )
    if not run.dumps:
        raise NothingUsable(_nothing_recorded(run), hint=_where_to_look(run.roots[0]))
    return run


def _where_to_look(root: Path) -> str:
    held = [attempt for attempt in RunLayout(root).attempts() if RunLayout(root, attempt).steps()]
    if held:
        return f"Attempt {held[-1]} has recorded steps: msprobe-aggregate {root} --attempt {held[-1]}"
    return "See the logs folder of the run for why its ranks ended."


def _nothing_recorded(run: Run) -> str:
    said = f"{run.roots[0]} is a run directory without a single recorded step"
    if not run.marks:
        return f"{said}, and no rank left a mark"
    attached = sum(mark.attached for mark in run.marks)
    why = next((mark.exception or mark.note or mark.ended for mark in run.marks), "")
    return f"{said}; {attached} of {run.world_size or len(run.marks)} ranks attached" + (f" ({why})" if why else "")


# -- compare results


def _results_at(path: Path) -> ResultSet:
    if path.is_file():
        match = _RESULT.match(path.name)
        if match is None:
            raise NothingUsable(f"{path} is neither a dump.json nor named like a compare result", hint=_EXPECTED)
        return ResultSet((path.parent,), (_result(path, match, None),))
    files: list[ResultFile] = []
    left_out: list[LeftOut] = []
    folders = [(path, step_number(path.resolve()))]
    for entry in sorted(path.iterdir()):
        step = step_number(entry) if entry.is_dir() else None
        if step is not None:
            folders.append((entry, step))
    for folder, step in folders:
        for entry in sorted(folder.iterdir()):
            match = _RESULT.match(entry.name) if entry.is_file() else None
            if match is not None:
                files.append(_result(entry, match, step))
            elif not _OWN.match(entry.name) and entry not in [f for f, _ in folders]:
                left_out.append(LeftOut(entry, "a folder" if entry.is_dir() else "not named like a compare result"))
    return ResultSet((path,), tuple(files), tuple(left_out))


def _result(path: Path, match: re.Match[str], step: int | None) -> ResultFile:
    return ResultFile(path, step, int(match["rank"]) if match["rank"] else None, int(match["stamp"]))


_EXPECTED = "Expected: a run directory (step<N>/rank<R>/dump.json) or files compare_result_rank<R>_<time>.csv or .xlsx."


def _joined_results(sets: Sequence[ResultSet]) -> ResultSet:
    """The newest file of each rank of each step over all folders; the others are left out with a note."""
    newest: dict[tuple[int | None, int | None], ResultFile] = {}
    left_out = [entry for found in sets for entry in found.left_out]
    # A csv and an xlsx of one time hold the same; csv is read faster.
    every = sorted((f for found in sets for f in found.files), key=lambda f: (-f.stamp, f.path.suffix, str(f.path)))
    for file in every:
        taken = newest.setdefault((file.step, file.rank), file)
        if taken is not file:
            age = "the same time as" if taken.stamp == file.stamp else "older than"
            left_out.append(LeftOut(file.path, f"{age} {taken.path.name}, which is taken", stale=True))
    if not newest:
        places = ", ".join(str(root) for found in sets for root in found.roots)
        seen = f"; {len(left_out)} other entries there, such as {left_out[0].path.name}" if left_out else ""
        raise NothingUsable(f"nothing to aggregate in {places}{seen}", hint=_EXPECTED)
    files = sorted(newest.values(), key=lambda f: (f.step is None, f.step or 0, f.rank is None, f.rank or 0))
    return ResultSet(
        tuple(root for found in sets for root in found.roots),
        tuple(files),
        tuple(sorted(left_out, key=lambda entry: str(entry.path))),
    )


# -- which dump is compared with which


@dataclass(frozen=True, slots=True)
class Picked:
    """The steps and ranks a person asked for; what has no number of its own is taken only where all are."""

    steps: NumberSet = EVERY
    ranks: NumberSet = EVERY

    def takes(self, step: int | None, rank: int | None) -> bool:
        return self.takes_step(step) and self._takes(self.ranks, rank)

    def takes_step(self, step: int | None) -> bool:
        return self._takes(self.steps, step)

    @staticmethod
    def _takes(numbers: NumberSet, number: int | None) -> bool:
        return number in numbers if number is not None else numbers == EVERY


ALL = Picked()


@dataclass(frozen=True, slots=True)
class Pair:
    """A rank of a step of the target, and its counterpart in the bench."""

    step: int | None
    rank: int | None
    target: RankFolder
    bench: RankFolder


def pair_steps(target: Run, bench: Run, picked: Picked = ALL) -> tuple[dict[int | None, int | None], list[str]]:
    """(the bench's step of each picked step of the target that has one, notes).

    Where each run has one step only, these belong together whatever their numbers.
    """
    notes: list[str] = []
    step_of = {step: step for step in target.steps if step in bench.steps}
    if len(target.steps) == len(bench.steps) == 1 and not step_of:
        step_of = {target.steps[0]: bench.steps[0]}
        if target.steps[0] is not None and bench.steps[0] is not None:
            notes.append(f"step {target.steps[0]} is compared with the bench's only step {bench.steps[0]}")
    extra = [step for step in bench.steps if step not in step_of.values() and picked.takes_step(step)]
    if extra:
        notes.append(f"steps only in the bench, not compared: {number_ranges(extra)}")
    return {step: other for step, other in step_of.items() if picked.takes_step(step)}, notes


def no_such_step(bench: Run, step: int | None) -> str:
    """Why a step of the target is not compared."""
    return f"the bench has no step {step} (it has {number_ranges(bench.steps)})"


def pair(
    target: Run, bench: Run, picked: Picked = ALL
) -> tuple[tuple[Pair, ...], tuple[RankFailure, ...], tuple[str, ...]]:
    """Pairs by (step, rank), the dumps of the target without a counterpart with the reason, and notes.

    Both runs are whole: `picked` says what of them is compared. Where each has one step only, these are a pair
    whatever their numbers; likewise where a step of each has one rank only.
    """
    step_of, notes = pair_steps(target, bench, picked)
    pairs: list[Pair] = []
    failures: list[RankFailure] = []
    for step in target.steps:
        if not picked.takes_step(step):
            continue
        own = [dump for dump in target.dumps if dump.step == step]
        wanted = [dump for dump in own if picked.takes(step, dump.rank)]
        if step not in step_of:
            failures += [RankFailure(step, d.rank, d.folder.path, no_such_step(bench, step)) for d in wanted]
            continue
        others = [dump for dump in bench.dumps if dump.step == step_of[step]]
        by_rank = {dump.rank: dump for dump in others}
        for dump in wanted:
            other = by_rank.get(dump.rank)
            if other is None and len(own) == len(others) == 1:
                other = others[0]
                notes.append(f"{dump.folder.path.name} is compared with the bench's only {other.folder.path.name}")
            if other is None:
                known = number_ranges(d.rank for d in others)
                reason = f"the bench has no rank {dump.rank} in this step (it has {known})"
                if len(own) != len(others) and len(others) > 1:
                    reason += "; runs of other parallel sizes: --layout"
                failures.append(RankFailure(step, dump.rank, dump.folder.path, reason))
            else:
                pairs.append(Pair(step, dump.rank, dump.folder, other.folder))
        mine = {d.rank for d in own} if len(own) > 1 or len(others) > 1 else set(by_rank)
        only_bench = [rank for rank in by_rank if rank is not None and rank not in mine and picked.takes(step, rank)]
        if only_bench and not target.is_one_rank:
            notes.append(f"step {step}: ranks only in the bench: {number_ranges(only_bench)}")
    return tuple(pairs), tuple(failures), tuple(dict.fromkeys(notes))


def number_ranges(values: Iterable[int | None]) -> str:
    """`0-3, 5`; `none` for nothing."""
    return spans(value for value in values if value is not None) or "none"
