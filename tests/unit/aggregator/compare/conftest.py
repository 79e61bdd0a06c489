"""Pairs of hand-made dumps, compared by the real `compare_rank` through real files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aggregator import compare
from aggregator.model import RankComparison, RankFailure
from msprobe_launch.records.layout import RankFolder

Ops = Mapping[str, Any]


def value(high: Any, low: Any = ..., mean: Any = ..., norm: Any = ..., **more: Any) -> dict[str, Any]:
    """A recorded tensor; statistics that are not given are the maximum."""
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2, 3],
        "Max": high,
        "Min": high if low is ... else low,
        "Mean": high if mean is ... else mean,
        "Norm": high if norm is ... else norm,
        "requires_grad": False,
    } | more


def call(*inputs: Any, out: Any = ..., keywords: Ops | None = None, parameters: Ops | None = None) -> dict[str, Any]:
    """A forward record."""
    record: dict[str, Any] = {"input_args": list(inputs), "input_kwargs": dict(keywords or {})}
    record["output"] = [] if out is ... else out if isinstance(out, list) else [out]
    if parameters is not None:
        record["parameters"] = dict(parameters)
    return record


def write_folder(folder: Path, ops: Ops, *, task: str = "statistics", construct: Ops | None = None) -> RankFolder:
    """A rank folder with these records, one stack for all."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {"task": task, "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps({**head, "data": ops}, indent=1), encoding="utf-8")
    stacks = {"0": [list(ops), ["File /job/model.py, line 3, in forward, \n y = f(x)"]]}
    (folder / "stack.json").write_text(json.dumps(stacks), encoding="utf-8")
    (folder / "construct.json").write_text(json.dumps(dict(construct or {})), encoding="utf-8")
    return RankFolder(folder, 0)


@dataclass(frozen=True)
class Compared:
    """What came out: the summary, the partition, and the csv's cells by item."""

    result: RankComparison
    table: pa.Table
    rows: dict[str, dict[str, str]]

    def excess(self, item: str) -> float | None:
        names = self.table["NPU Name"].to_pylist()
        return self.table["excess"][names.index(item)].as_py()


@pytest.fixture
def make_value() -> Callable[..., dict[str, Any]]:
    return value


@pytest.fixture
def make_call() -> Callable[..., dict[str, Any]]:
    return call


@pytest.fixture
def make_folder() -> Callable[..., RankFolder]:
    return write_folder


@pytest.fixture
def compare_ops(tmp_path: Path) -> Callable[..., Compared]:
    """Compare two mappings of op -> record; `construct` and `task` are the target's and the bench's."""

    def run(target: Ops, bench: Ops, *, tolerance: float | None = None, **folder: Any) -> Compared:
        sides = [write_folder(tmp_path / name, ops, **folder) for name, ops in (("t", target), ("b", bench))]
        result = compare.compare_rank(
            *sides,
            step=0,
            rank=3,
            partition=tmp_path / "out" / "rank3.parquet",
            results=tmp_path / "out",
            time="20260101000000",
            tolerance=tolerance,
        )
        assert not isinstance(result, RankFailure), result.reason
        with (tmp_path / "out" / "compare_result_rank3_20260101000000.csv").open(newline="", encoding="utf-8") as file:
            rows = {row["NPU Name"]: row for row in csv.DictReader(file)}
        return Compared(result, pq.read_table(result.partition), rows)

    return run
