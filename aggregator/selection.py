"""Which dumps, results and trusted runs a request means; what does not fit together is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from aggregator import noise, sources
from aggregator.request import Request
from aggregator.sources import Picked, RankDump, ResultFile, ResultSet, Run
from msprobe_launch.errors import NothingUsable, RunDirectoryError, UsageError
from msprobe_launch.records.numbers import EVERY


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


def dumps(picked: Picked, run: Run) -> Run:
    """The run with the picked dumps only. Raises UsageError, NothingUsable where none is left."""
    ranks = {dump.rank for dump in run.dumps} | {mark.rank for mark in run.marks}
    kept = _kept(picked, run.dumps, ranks, "step and rank of the run")
    return dataclasses.replace(run, dumps=kept)


def result_files(picked: Picked, found: ResultSet) -> ResultSet:
    """The picked results only. Raises UsageError, NothingUsable where none is left."""
    kept = _kept(picked, found.files, {file.rank for file in found.files}, "compare result")
    return dataclasses.replace(found, files=kept)


_Entry = TypeVar("_Entry", RankDump, ResultFile)


def _kept(picked: Picked, entries: Sequence[_Entry], ranks: Iterable[int | None], what: str) -> tuple[_Entry, ...]:
    for flag, asked, there in (("steps", picked.steps, {e.step for e in entries}), ("ranks", picked.ranks, ranks)):
        known = {number for number in there if number is not None}
        if asked != EVERY and not any(number in asked for number in known):
            raise UsageError(f"--{flag}: {asked} are not there", hint=f"There are: {sources.number_ranges(known)}")
    kept = tuple(entry for entry in entries if picked.takes(entry.step, entry.rank))
    if not kept:
        raise NothingUsable(f"no {what} is left after --steps and --ranks")
    return kept


def check_results(request: Request, found: ResultSet) -> None:
    """Raises UsageError where a request for compare results says what only dumps can be told."""
    held = f"{found.roots[0]} holds compare results"
    if request.bench:
        raise UsageError(f"{held}, which have their bench in them", hint="Leave out --bench.")
    if flags := _comparing(request):
        raise UsageError(f"{', '.join(flags)} works on dumps; {held}, whose pairs and Result stay as they are")


def check_trusted(request: Request, trusted: Sequence[Run]) -> None:
    """Raises UsageError where the request says how to compare dumps and there is no bench, or not the one it takes."""
    flags = (["--tolerance"] if request.tolerance is not None else []) + _comparing(request)
    if flags and not trusted:
        raise UsageError(f"{', '.join(flags)}: there is no bench to compare with", hint="Name it: --bench RUN_DIR")
    if request.layout is None:
        return
    if len(trusted) > 1:
        raise UsageError("--layout takes one trusted run; --bench names two", hint="Leave out one.")
    if request.picked.ranks != EVERY:
        raise UsageError("--layout needs all ranks of a group; --ranks leaves some out", hint="Leave out --ranks.")


def _comparing(request: Request) -> list[str]:
    """Flags in the request that say which items of two dumps belong together, and when they are the same."""
    mappings = request.matching.mappings
    given = {
        "--verdict noise": request.policy is not None,
        "--layout": request.layout is not None,
        "--fuzzy-match": request.matching.fuzzy,
        "--data-mapping": bool(mappings.data),
        "--cell-mapping": bool(mappings.cell),
        "--api-mapping": bool(mappings.api),
        "--layer-mapping": bool(mappings.layer),
    }
    return [flag for flag, is_given in given.items() if is_given]
