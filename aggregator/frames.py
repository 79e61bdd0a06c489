"""Runs as pandas data frames, for notebooks.

import aggregator
frame = aggregator.load("runs/suspect", steps=[0])
frame[frame["op"].str.contains("layer_norm") & (frame["role"] == "output")]
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from aggregator import sources
from aggregator.read import ROLES, read
from msprobe_launch.errors import NothingUsable, UnreadableInput

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
    found = sources.find_run((Path(run),), attempt=attempt)
    wanted_steps = None if steps is None else set(steps)
    wanted_ranks = None if ranks is None else set(ranks)
    frames, failures = [], []
    for dump in found.dumps:
        if wanted_steps is not None and dump.step not in wanted_steps:
            continue
        if wanted_ranks is not None and dump.rank not in wanted_ranks:
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
