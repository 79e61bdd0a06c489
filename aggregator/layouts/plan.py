"""Which ranks become one: the units of a comparison of two runs, step by step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aggregator import sources
from aggregator.layouts import infer, spec
from aggregator.layouts.compare import Unit
from aggregator.layouts.spec import Layout, SideLayout
from aggregator.model import RankFailure
from aggregator.sources import ALL, Picked, Run, number_ranges
from msprobe_launch.records.layout import RankFolder

AUTO = "auto"
"""What --layout says for: as far as the dumps tell."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One combined rank of one step, called by the lowest of its ranks."""

    step: int | None
    rank: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare, what cannot be, and what to say. `expected` is the number of combined ranks of a step."""

    planned: tuple[Planned, ...]
    failures: tuple[RankFailure, ...]
    notes: tuple[str, ...]
    expected: int


def plan(target: Run, bench: Run, layout: str | os.PathLike[str], picked: Picked = ALL) -> Plan:
    """The units of all picked steps. `layout` is a layout file, or AUTO.

    Raises ConfigError for a wrong file, UsageError where AUTO finds no layout.
    """
    steps, notes = sources.pair_steps(target, bench, picked)
    if layout == AUTO:
        found = infer.layout(*_first_dumps(target, bench, steps))
    else:
        found = spec.load(Path(layout)).of(_ranks(target, "target"), _ranks(bench, "bench"))
    notes.append(
        f"layout ({found.source}): target {found.target.words} on {len(found.target.ranks)} ranks, bench "
        f"{found.bench.words} on {len(found.bench.ranks)}"
    )
    pairs = _replicas(found)
    planned: list[Planned] = []
    failures: list[RankFailure] = []
    for step in filter(picked.takes_step, target.steps):
        mine, theirs = _folders(target, step), _folders(bench, steps.get(step))
        for own, other in pairs:
            wanted = _of(found.target, own)
            lacking = [rank for rank in wanted if rank not in mine]
            there = next((mine[rank].path for rank in wanted if rank in mine), target.roots[0])
            others = [rank for rank in _of(found.bench, other) if rank not in theirs]
            if step not in steps:
                failures.append(RankFailure(step, wanted[0], there, sources.no_such_step(bench, step)))
            elif lacking or others:
                side, which = ("target", lacking) if lacking else ("bench", others)
                failures.append(
                    RankFailure(
                        step,
                        wanted[0],
                        there,
                        f"ranks {number_ranges(wanted)} make one, and the {side} has no dump of rank "
                        f"{number_ranges(which)} in this step",
                    )
                )
            else:
                planned.append(Planned(step, wanted[0], Unit(found, mine, theirs, own, other)))
    if len(pairs) == 1 and found.target.dp != found.bench.dp:
        notes.append(
            f"data parallel {found.target.dp} against {found.bench.dp}: each rank saw another part of the batch, so "
            "only what all ranks of a run agree on can be compared (parameters, gradients after they were reduced), "
            "and losses as the mean over the ranks"
        )
    return Plan(tuple(planned), tuple(failures), tuple(notes), len(pairs))


def _replicas(layout: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Which data parallel indices of both sides belong together: each with its own, or all with all."""
    if layout.target.dp == layout.bench.dp:
        return [((d,), (d,)) for d in range(layout.target.dp)]
    return [(tuple(range(layout.target.dp)), tuple(range(layout.bench.dp)))]


def _of(side: SideLayout, replicas: Sequence[int]) -> list[int]:
    return sorted(rank for stage in side.grid for d in replicas for rank in stage[d])


def _ranks(run: Run, side: str) -> list[int]:
    ranks = {dump.rank for dump in run.dumps if dump.rank is not None}
    if run.world_size and run.manifest is not None:
        ranks |= set(range(run.world_size))
    if not ranks:
        if len(run.dumps) == len(run.steps):
            return [0]  # one process, no numbers
        raise spec.no_ranks(side)
    return sorted(ranks)


def _folders(run: Run, step: int | None) -> dict[int, RankFolder]:
    dumps = [dump for dump in run.dumps if dump.step == step]
    if len(dumps) == 1 and dumps[0].rank is None:
        return {0: dumps[0].folder}
    return {dump.rank: dump.folder for dump in dumps if dump.rank is not None}


def _first_dumps(
    target: Run, bench: Run, steps: dict[int | None, int | None]
) -> tuple[dict[int, RankFolder], dict[int, RankFolder]]:
    step = next(iter(steps), target.steps[0])
    return _folders(target, step), _folders(bench, steps.get(step, step))
