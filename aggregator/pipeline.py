"""From the folders a person named to a `Report`: find, compare or read each rank, merge each step, analyse.

Work on one (step, rank), and on one merged step, is a function that an Executor runs; results are sorted before
anything is concluded from them, so that the order in which they arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from aggregator import (
    alone,
    compare,
    divergence,
    match,
    merge,
    merge_config,
    merging,
    noise,
    places,
    pool,
    read,
    results,
    selection,
    sources,
    verdict,
)
from aggregator.alone import RankStatistics
from aggregator.analyse import attendance, opposite, opsets, overall, replicas
from aggregator.analyse.attendance import MissingRank, RankNote
from aggregator.columns import Mode
from aggregator.layouts import compare as layout_compare
from aggregator.layouts import plan as layout_plan
from aggregator.merge_config import MergeConfig
from aggregator.model import Divergence, RankComparison, RankFailure, rank_order
from aggregator.report.base import Report, Task
from aggregator.report.table import Format
from aggregator.request import Request
from aggregator.sources import LeftOut, ResultSet, Run
from msprobe_launch.errors import UnreadableInput
from msprobe_launch.records.layout import RankFolder

Executors = Callable[[int, int], Executor]
"""(number of jobs, bytes that the largest adds to a bare worker) -> an executor for them, used in a `with`."""


def aggregate(request: Request, executors: Executors) -> Report:
    """Do all of it. Raises ProbeError where the request cannot be met at all."""
    found = sources.find(request.inputs, attempt=request.attempt)
    if isinstance(found, ResultSet):
        selection.check_results(request, found)
        found = selection.result_files(request.picked, found)
        with executors(len(found.files), _largest(found.files)) as executor:
            return _from_results(request, found, executor)
    run = selection.dumps(request.picked, found)
    bench = request.bench or selection.bench_of(run)
    trusted = selection.trusted_runs(bench, request.policy)
    selection.check_trusted(request, trusted)
    with executors(len(run.dumps), _largest(run.dumps)) as executor:
        if not trusted:
            return _from_run(request, run, executor)
        if request.layout is not None:
            return _from_layout(request, request.layout, found, trusted[0], bench, executor)
        return _from_pairs(request, found, trusted, bench, executor)


def _largest(inputs: Sequence[sources.ResultFile] | Sequence[sources.RankDump]) -> int:
    """Bytes of memory that the largest input needs, roughly."""
    most = 0
    for entry in inputs:
        path = entry.path if isinstance(entry, sources.ResultFile) else entry.folder.dump
        # Measured peaks: 10 times a pair's dump.json or a csv, 40 times a workbook, which is compressed.
        factor = 40 if path.suffix == ".xlsx" else 10
        try:
            most = max(most, path.stat().st_size * factor)
        except OSError:
            continue
    return most


# -- the three tasks


def _from_results(request: Request, found: ResultSet, executor: Executor) -> Report:
    output = places.make(request, found.roots[0])
    jobs = [
        partial(results.load, file, places.partition(output, file.step, file.rank), tolerance=request.tolerance)
        for file in found.files
    ]
    compared, failures = _sorted(pool.run(executor, jobs), RankComparison)
    seen = {(file.step, file.rank) for file in found.files}
    missing = attendance.gaps(found.steps, seen, asked=request.picked.ranks)
    return _compared_report(
        request,
        Task.RESULTS,
        output,
        compared,
        failures,
        executor,
        missing=missing,
        left_out=found.left_out,
        expected=len({rank for _, rank in seen} | {entry.rank for entry in missing}),
    )


def _from_pairs(
    request: Request, whole: Run, trusted: Sequence[Run], bench_paths: tuple[Path, ...], executor: Executor
) -> Report:
    """`whole` is the run with what was not picked; `trusted` the bench, and perhaps a second trusted run."""
    run = selection.dumps(request.picked, whole)
    output = places.make(request, run.roots[0])
    pairs, unpaired, notes = sources.pair(whole, trusted[0], request.picked)
    second = {}
    if len(trusted) > 1:
        second = {(p.step, p.rank): p.bench for p in sources.pair(whole, trusted[1], request.picked)[0]}
    if alone_in := [p for p in pairs if len(trusted) > 1 and (p.step, p.rank) not in second]:
        notes += (f"{len(alone_in)} ranks of steps are not in the second trusted run and are judged without it",)
    filled, empty = _without_empty(run, pairs)
    jobs = [
        partial(
            compare.compare_rank,
            pair.target,
            pair.bench,
            second=second.get((pair.step, pair.rank)),
            **_how(request, output, pair.step, pair.rank),
        )
        for pair in filled
    ]
    return _of_dumps(
        request,
        run,
        trusted[0],
        bench_paths,
        executor,
        output,
        [*pool.run(executor, jobs), *unpaired, *empty],
        missing=attendance.missing(run, request.picked.ranks),
        expected=attendance.expected(run),
        notes=notes,
    )


def _from_layout(
    request: Request, layout: Path | str, whole: Run, bench: Run, bench_paths: tuple[Path, ...], executor: Executor
) -> Report:
    """As `_from_pairs`, ranks of either side put together first."""
    run = selection.dumps(request.picked, whole)
    planned = layout_plan.plan(whole, bench, layout, request.picked)
    output = places.make(request, run.roots[0])
    jobs = [
        partial(layout_compare.compare_unit, entry.unit, **_how(request, output, entry.step, entry.rank))
        for entry in planned.planned
    ]
    return _of_dumps(
        request,
        run,
        bench,
        bench_paths,
        executor,
        output,
        [*pool.run(executor, jobs), *planned.failures],
        missing=(),
        expected=planned.expected,
        notes=planned.notes,
    )


class _How(TypedDict):
    """What every comparison of dumps is told; see `compare.compare_rank`."""

    step: int | None
    rank: int | None
    partition: Path
    results: Path
    time: str
    formats: tuple[str, ...]
    tolerance: float | None
    matching: match.Options
    policy: noise.Policy | None


def _how(request: Request, output: Path, step: int | None, rank: int | None) -> _How:
    return _How(
        step=step,
        rank=rank,
        partition=places.partition(output, step, rank),
        results=places.step_folder(output, step),
        time=request.time,
        # csv is what the field's compare writes by default; xlsx costs tenfold, so only where no csv is wanted.
        formats=("xlsx" if Format.XLSX in request.formats and Format.CSV not in request.formats else "csv",),
        tolerance=request.tolerance,
        matching=request.matching,
        policy=request.policy,
    )


def _of_dumps(
    request: Request,
    run: Run,
    bench: Run,
    bench_paths: tuple[Path, ...],
    executor: Executor,
    output: Path,
    arrived: Iterable[Any],
    *,
    missing: tuple[MissingRank, ...],
    expected: int | None,
    notes: tuple[str, ...],
) -> Report:
    """The report of comparisons and failures that have arrived."""
    compared, failures = _sorted(arrived, RankComparison)
    places.check_room(failures, output)
    return _compared_report(
        request,
        Task.COMPARED,
        output,
        compared,
        failures,
        executor,
        missing=missing,
        missing_steps=attendance.missing_steps(run, request.picked.steps),
        expected=expected,
        bench=bench_paths,
        notes=run.notes + tuple(f"bench: {note}" for note in bench.notes) + notes,
        rank_notes=attendance.roster_notes(run),
    )


def _from_run(request: Request, run: Run, executor: Executor) -> Report:
    output = places.make(request, run.roots[0])
    jobs = [partial(alone.describe, dump, places.partition(output, dump.step, dump.rank)) for dump in run.dumps]
    described, failures = _sorted(_empty_as_failures(run, pool.run(executor, jobs)), RankStatistics)
    places.check_room(failures, output)
    notes = list(run.notes)
    files: list[Path] = []
    differing: list[opsets.OpDifference] = []
    parameters: list[replicas.ParameterDifference] = []
    for step, group in _by_step(described):
        differing += opsets.differences(step, [(entry.rank, entry.partition) for entry in group])
    chosen = [(step, group, _alone_metrics(request.config, group)) for step, group in _by_step(described)]
    merges = [
        partial(
            merging.merge_step,
            Mode.STATISTICS,
            merging.tables(group),
            metrics,
            request.config,
            places.step_folder(output, step),
            request.time,
            request.formats,
        )
        for step, group, metrics in chosen
        if metrics
    ]
    for merged in merging.run(executor, merges):
        files += merged.files
        notes += merged.notes
    for step, group, metrics in chosen:
        if "NPU max" in metrics and len(group) > 1:
            found = replicas.differences(step, merge.plan(Mode.STATISTICS, merging.tables(group)))
            parameters += [found] if found is not None else []
    firsts = [entry.first for entry in described if entry.first is not None]
    big = 1 << 62
    return Report(
        task=Task.ALONE,
        inputs=request.inputs,
        bench=(),
        output=output,
        time=request.time,
        mode=Mode.STATISTICS,
        alone=described,
        failures=failures,
        missing=attendance.missing(run, request.picked.ranks),
        missing_steps=attendance.missing_steps(run, request.picked.steps),
        expected=attendance.expected(run),
        allow_missing=request.allow_missing,
        first_nonfinite=min(
            firsts,
            key=lambda f: (big if f.step is None else f.step, f.position, big if f.rank is None else f.rank),
            default=None,
        ),
        op_differences=tuple(differing),
        parameter_differences=tuple(parameters),
        rank_notes=attendance.roster_notes(run) + attendance.reader_notes(described),
        notes=tuple(dict.fromkeys(notes)),
        files=tuple(files),
    )


def _compared_report(
    request: Request,
    task: Task,
    output: Path,
    compared: tuple[RankComparison, ...],
    failures: tuple[RankFailure, ...],
    executor: Executor,
    *,
    missing: tuple[MissingRank, ...],
    missing_steps: tuple[int, ...] = (),
    expected: int | None,
    bench: tuple[Path, ...] = (),
    left_out: tuple[LeftOut, ...] = (),
    notes: tuple[str, ...] = (),
    rank_notes: tuple[RankNote, ...] = (),
) -> Report:
    """Merge every step of what was compared, and conclude."""
    mode, compared, odd = merging.of_one_mode(compared)
    jobs = [
        partial(
            merging.merge_step,
            mode,
            merging.tables(group),
            metrics,
            request.config,
            places.step_folder(output, step),
            request.time,
            formats,
        )
        for step, group in _by_step(compared)
        for metrics in (merge_config.chosen(request.config, mode),)
        # The workbook takes as long as all other files together: two processes share a step.
        for formats in (request.formats & {Format.XLSX}, request.formats - {Format.XLSX})
        if formats
    ]
    merged = merging.run(executor, jobs)
    found = overall.first(compared, divergence_at)
    opposite_of = opposite.look(compared)
    said = list(notes)
    rows, lone = sum(entry.rows for entry in compared), sum(opposite_of.alone.values())
    if 2 * lone > rows:
        said.append(
            f"{lone:,} of {rows:,} rows have no bench row: are these the same model, recorded with the same level?"
        )
    if opposite_of.both_nan:
        are = "item is" if opposite_of.both_nan == 1 else "items are"
        said.append(f"{opposite_of.both_nan:,} {are} NaN on both sides, which counts as equal")
    own_files = [path for step, _ in _by_step(compared) for path in places.compared_files(output, step, task)]
    return Report(
        task=task,
        inputs=request.inputs,
        bench=bench,
        output=output,
        time=request.time,
        mode=mode,
        tolerance=request.tolerance,
        verdict=(verdict.Policy.MSPROBE if request.policy is None else verdict.Policy.NOISE).value,
        compared=compared,
        failures=tuple(sorted([*failures, *odd], key=rank_order)),
        missing=missing,
        missing_steps=missing_steps,
        left_out=left_out,
        expected=expected,
        allow_missing=request.allow_missing,
        first=found.culprit,
        common=found.common,
        without_bench=opposite_of.alone,
        worst_ops=overall.worst_ops(compared),
        op_differences=tuple(
            entry
            for step, group in _by_step(compared)
            for entry in opsets.differences(step, [(one.rank, one.partition) for one in group])
        ),
        rank_notes=rank_notes + attendance.reader_notes(compared),
        notes=tuple(dict.fromkeys([*said, *(note for entry in merged for note in entry.notes)])),
        files=tuple(own_files) + tuple(path for entry in merged for path in entry.files),
    )


# -- dumps without a single item: neither used nor clean


def _without_empty(run: Run, pairs: Sequence[sources.Pair]) -> tuple[list[sources.Pair], list[RankFailure]]:
    """Pairs in which both sides hold items, and the others with the reason."""
    marks = {mark.rank: mark for mark in run.marks}
    filled: list[sources.Pair] = []
    empty: list[RankFailure] = []
    for pair in pairs:
        if _is_empty(pair.target):
            reason = attendance.why_empty(marks.get(-1 if pair.rank is None else pair.rank))
            empty.append(RankFailure(pair.step, pair.rank, pair.target.path, reason))
        elif _is_empty(pair.bench):
            reason = f"the bench's dump {pair.bench.path} holds 0 items"
            empty.append(RankFailure(pair.step, pair.rank, pair.target.path, reason))
        else:
            filled.append(pair)
    return filled, empty


# A dump.json with one item is hardly smaller than this, one without any far below.
_MAY_BE_EMPTY = 4096


def _is_empty(folder: RankFolder) -> bool:
    """True where a readable dump holds no item; what cannot be read is told by those who read it."""
    try:
        return folder.dump.stat().st_size < _MAY_BE_EMPTY and not read.read(folder).items.num_rows
    except (OSError, UnreadableInput):
        return False


def _empty_as_failures(run: Run, arrived: Iterable[Any]) -> list[Any]:
    marks = {mark.rank: mark for mark in run.marks}
    return [
        RankFailure(e.step, e.rank, e.source, attendance.why_empty(marks.get(-1 if e.rank is None else e.rank)))
        if isinstance(e, RankStatistics) and not e.rows
        else e
        for e in arrived
    ]


def divergence_at(comparison: RankComparison, row: int) -> Divergence | None:
    """The divergence of one row of a partition, as divergence.first would tell it if no row before it differed."""
    table = pq.read_table(comparison.partition)
    kept = table.column(divergence.EXCESS).slice(row).combine_chunks()
    before = pa.nulls(row, pa.float64())
    column = pa.chunked_array([before, kept] if not isinstance(kept, pa.ChunkedArray) else [before, *kept.chunks])
    table = table.set_column(table.column_names.index(divergence.EXCESS), divergence.EXCESS, column)
    return divergence.first(table, comparison.mode, step=comparison.step, rank=comparison.rank)


def _alone_metrics(config: MergeConfig, group: Sequence[RankStatistics]) -> tuple[str, ...]:
    """The columns that all ranks of a step have, or those of them that the configuration names."""
    have = [name for name in group[0].metrics if all(name in entry.metrics for entry in group)]
    if not config.compare_index:
        return tuple(have)
    return tuple(name for name in config.compare_index if name in have) or tuple(have)


# -- sorting


def _sorted(arrived: Iterable[Any], kind: type[Any]) -> tuple[tuple[Any, ...], tuple[RankFailure, ...]]:
    """Usable ones and failures, each by step and rank."""
    every = list(arrived)
    usable = sorted((entry for entry in every if isinstance(entry, kind)), key=_key)
    failures = sorted((entry for entry in every if isinstance(entry, RankFailure)), key=rank_order)
    return tuple(usable), tuple(failures)


def _key(entry: Any) -> tuple[int, int]:
    key: Callable[[Any], tuple[int, int]] = rank_order
    return key(entry)


def _by_step(entries: Sequence[Any]) -> list[tuple[int | None, tuple[Any, ...]]]:
    steps = dict.fromkeys(entry.step for entry in entries)
    return [(step, tuple(entry for entry in entries if entry.step == step)) for step in steps]
