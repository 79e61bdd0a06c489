"""Runs as pandas data frames, for notebooks.

import aggregator
frame = aggregator.load("runs/suspect", steps=[0])
frame[frame["op"].str.contains("layer_norm") & (frame["role"] == "output")]
"""

from __future__ import annotations

import math
import operator
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pandas as pd

from aggregator import compare, match, noise, sources
from aggregator.layouts import compare as layout_compare
from aggregator.layouts import plan as layout_plan
from aggregator.model import RankComparison, RankFailure
from aggregator.read import ROLES, read
from msprobe_launch.errors import NothingUsable, UnreadableInput, UsageError
from msprobe_launch.records.numbers import EVERY, NumberSet

COLUMNS = {
    "step": "Int64",
    "rank": "Int64",
    "op": "category",
    "item": "string",
    "role": "category",
    "dtype": "category",
    "shape": "category",
    "max": "float64",
    "min": "float64",
    "mean": "float64",
    "norm": "float64",
    "parent": "category",
}
"""Columns and pandas dtypes of `load`. Statistics are NaN where there are none or the value is no number."""


def load(
    run: str | os.PathLike[str],
    *,
    steps: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None,
    attempt: int | None = None,
) -> pd.DataFrame:
    """Every recorded item of a run: a row per step, rank and item in call order, columns as COLUMNS says.

    `run` is whatever `msprobe-aggregate` takes as a run (run directory, step folder, rank folder, dump.json). A rank
    that cannot be read is left out; the reasons are in `frame.attrs["failures"]`. Raises NothingUsable where no rank
    can be read, UsageError where `run` is no run.
    """
    picked = _picked(steps, ranks)
    found = sources.find_run((Path(run),), attempt=attempt)
    frames, failures = [], []
    for dump in found.dumps:
        if not picked.takes(dump.step, dump.rank):
            continue
        try:
            frames.append(_frame(dump))
        except UnreadableInput as error:
            failures.append(f"step {dump.step} rank {dump.rank}: {error}")
    if not frames:
        reasons = "\n".join(failures) or "no recorded rank matches the steps and ranks asked for"
        raise NothingUsable(f"{os.fspath(run)}: nothing to load: {reasons}")
    whole: pd.DataFrame = pd.concat(frames, ignore_index=True).astype(COLUMNS)
    whole.attrs["failures"] = failures
    return whole


def _picked(steps: Iterable[int] | None, ranks: Iterable[int] | None) -> sources.Picked:
    return sources.Picked(_numbers("steps", steps), _numbers("ranks", ranks))


def _numbers(what: str, given: Iterable[int] | None) -> NumberSet:
    if given is None:
        return EVERY
    try:
        numbers = [operator.index(number) for number in given]
    except TypeError:
        numbers = []
    if not numbers:
        raise UsageError(f"{what} is {given!r}, not a list of numbers such as [0, 1]; None takes all")
    return NumberSet(tuple((number, number) for number in numbers))


def _frame(dump: sources.RankDump) -> pd.DataFrame:
    recorded = read(dump.folder)
    items = recorded.items.select(["name", "op", "role", "dtype", "shape", "max", "min", "mean", "norm"]).to_pandas()
    ops = recorded.ops.select(["name", "parent"]).to_pandas()
    position = items.pop("op")
    frame: pd.DataFrame = items.rename(columns={"name": "item"})
    frame["role"] = [ROLES[number].value for number in frame["role"]]
    frame.insert(0, "op", ops["name"].to_numpy()[position])
    frame["parent"] = ops["parent"].to_numpy()[position]
    frame.insert(0, "rank", dump.rank)
    frame.insert(0, "step", dump.step)
    return frame


def compare_runs(
    target: str | os.PathLike[str],
    bench: str | os.PathLike[str],
    *,
    steps: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None,
    tolerance: float | None = None,
    matching: match.Options = match.PLAIN,
    policy: noise.Policy | None = None,
    layout: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """Every item of `target` beside its counterpart in `bench`: a row per step, rank and item in call order.

    Columns: `step`, `rank` (Int64), then those of a partition (`aggregator.model`: msprobe's columns, `op`, `role`,
    `parent`, `excess`). A column of numbers is float64, NaN where the cell is a word, which then stands in
    `<column>:text`; `excess` above 1 is a finding. Ranks that cannot be compared are in `frame.attrs["failures"]`,
    the first divergence of each rank in `frame.attrs["first"]`, notes in `frame.attrs["notes"]`. Raises NothingUsable
    where no rank can be compared, UsageError for a `tolerance` that is no positive number. With `policy`
    (`noise.Policy()`) excess, `Result` and `Err_message` are those of `--verdict noise`. With `layout` (a layout file,
    or "auto") ranks are put together first; a combined rank has the number of its lowest.
    """
    picked = _picked(steps, ranks)
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise UsageError(f"tolerance is {tolerance!r}, not a positive number such as 0.001")
    runs = sources.find_run((Path(target),)), sources.find_run((Path(bench),))
    jobs: list[tuple[int | None, int | None, Callable[..., RankComparison | RankFailure]]]
    if layout is None:
        pairs, unpaired, notes = sources.pair(*runs, picked)
        jobs = [(pair.step, pair.rank, partial(compare.compare_rank, pair.target, pair.bench)) for pair in pairs]
    else:
        planned = layout_plan.plan(*runs, layout, picked)
        unpaired, notes = planned.failures, planned.notes
        jobs = [(one.step, one.rank, partial(layout_compare.compare_unit, one.unit)) for one in planned.planned]
    frames: list[pd.DataFrame] = []
    failures = [f"step {entry.step} rank {entry.rank}: {entry.reason}" for entry in unpaired]
    firsts, told = [], list(notes)
    with tempfile.TemporaryDirectory(prefix="msprobe-compare-") as place:
        partition = Path(place) / "partition.parquet"
        for step, rank, job in jobs:
            if not picked.takes(step, rank):
                continue
            found = job(
                step=step, rank=rank, partition=partition, tolerance=tolerance, matching=matching, policy=policy
            )
            if isinstance(found, RankFailure):
                failures.append(f"step {found.step} rank {found.rank}: {found.reason}")
                continue
            frame = pd.read_parquet(partition)
            frame.insert(0, "rank", pd.Series([rank] * len(frame), dtype="Int64"))
            frame.insert(0, "step", pd.Series([step] * len(frame), dtype="Int64"))
            frames.append(frame)
            told += found.notes
            if found.first is not None:
                firsts.append(found.first)
    if not frames:
        reasons = "\n".join(failures) or "no recorded rank matches the steps and ranks asked for"
        raise NothingUsable(f"{os.fspath(target)} against {os.fspath(bench)}: nothing was compared: {reasons}")
    whole = pd.concat(frames, ignore_index=True)
    whole.attrs.update(failures=failures, first=firsts, notes=list(dict.fromkeys(told)))
    return whole
