"""Which dumps, results and trusted runs a request means; what does not fit together is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from aggregator import noise, sources
from aggregator.request import Request
from aggregator.sources import ResultSet, Run
from msprobe_launch.errors import NothingUsable, RunDirectoryError, UsageError


def trusted_runs(paths: Sequence[Path], policy: noise.Policy | None) -> list[Run]:
    """The bench, and a second one where the paths hold the same ranks twice. Raises UsageError.

    Paths that hold other ranks (one run directory per node) are one run together.
    """
    if policy is None or len(paths) < 2:
        try:
            return [sources.find_run(paths)] if paths else []
        except UsageError as error:
            if " is both in " not in error.what:
                raise
            raise UsageError(
                error.what, hint="Two trusted runs are for --verdict noise, which takes what they differ by for noise."
            ) from error
    groups: list[list[Path]] = []
    held: list[set[tuple[int | None, int | None]]] = []
    for path in paths:
        own = {(dump.step, dump.rank) for dump in sources.find_run((path,)).dumps}
        if any(path.resolve() == other.resolve() for group in groups for other in group):
            raise UsageError(f"--bench {path} is given twice", hint="Name another run, or leave it out.")
        place = next((i for i, there in enumerate(held) if not own & there), len(groups))
        if place == len(groups):
            groups.append([])
            held.append(set())
        groups[place].append(path)
        held[place] |= own
    if len(groups) > 2:
        raise UsageError(f"--bench names {len(groups)} runs of the same ranks; two are used", hint="Leave out one.")
    return [sources.find_run(group) for group in groups]


def bench_of(run: Run) -> tuple[Path, ...]:
    """The bench that the manifest remembers, () for none. Raises RunDirectoryError where it is gone."""
    if run.manifest is None or not run.manifest.bench:
        return ()
    remembered = Path(run.manifest.bench)
    for candidate in (remembered, run.roots[0].parent / remembered):
        if candidate.exists():
            return (candidate,)
    raise RunDirectoryError(
        f"the bench that {run.roots[0]} was recorded against is not there: {remembered}",
        hint=f"Name it: msprobe-aggregate {run.roots[0]} --bench RUN_DIR",
    )


def dumps(request: Request, run: Run) -> Run:
    steps = {dump.step for dump in run.dumps if dump.step is not None}
    _check_asked("steps", request.steps, steps)
    _check_asked("ranks", request.ranks, {d.rank for d in run.dumps} | {mark.rank for mark in run.marks})
    dumps = tuple(
        dump
        for dump in run.dumps
        if (not request.steps or dump.step in request.steps) and (not request.ranks or dump.rank in request.ranks)
    )
    if not dumps:
        raise NothingUsable("no step and rank of the run is left after --steps and --ranks")
    return dataclasses.replace(run, dumps=dumps)


def result_files(request: Request, found: ResultSet) -> ResultSet:
    _check_asked("steps", request.steps, {file.step for file in found.files})
    _check_asked("ranks", request.ranks, {file.rank for file in found.files})
    files = tuple(
        file
        for file in found.files
        if (not request.steps or file.step in request.steps) and (not request.ranks or file.rank in request.ranks)
    )
    if not files:
        raise NothingUsable("no compare result is left after --steps and --ranks")
    return dataclasses.replace(found, files=files)


def _check_asked(what: str, asked: frozenset[int], there: Iterable[int | None]) -> None:
    known = {number for number in there if number is not None}
    absent = asked - known
    if absent and not asked & known:
        raise UsageError(
            f"--{what}: {sources.number_ranges(absent)} are not there",
            hint=f"There are: {sources.number_ranges(known)}",
        )


def check_layout(request: Request, trusted: Sequence[Run]) -> None:
    """Raises UsageError where ranks cannot be put together as asked."""
    if request.layout is None:
        return
    if not trusted:
        raise UsageError("--layout puts ranks together for a comparison, and there is no bench", hint="--bench RUN_DIR")
    if len(trusted) > 1:
        raise UsageError("--layout takes one trusted run; --bench names two", hint="Leave out one.")
    if request.ranks:
        raise UsageError("--layout needs all ranks of a group; --ranks leaves some out", hint="Leave out --ranks.")
