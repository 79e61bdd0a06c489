"""Runs as data frames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import aggregator
from aggregator.frames import COLUMNS
from msprobe_launch.errors import NothingUsable, UsageError

TENSOR = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "requires_grad": False}


def write(folder: Path, value: float) -> None:
    folder.mkdir(parents=True)
    item = {**TENSOR, "Max": value, "Min": 0.0, "Mean": value / 2, "Norm": value}
    data = {
        "Torch.relu.0.forward": {
            "input_args": [item, {"type": "int", "value": 3}],
            "input_kwargs": {},
            "output": [item],
        }
    }
    whole = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (folder / "dump.json").write_text(json.dumps(whole))
    (folder / "construct.json").write_text(json.dumps({"Torch.relu.0.forward": "Module.a.B.forward.0"}))


def test_a_row_per_item_with_documented_types(tmp_path: Path) -> None:
    for step, rank in ((0, 0), (0, 1), (1, 0)):
        write(tmp_path / f"step{step}" / f"rank{rank}", 1.0 + step + 10 * rank)
    frame = aggregator.load(tmp_path)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == COLUMNS
    assert len(frame) == 9
    row = frame[(frame["step"] == 0) & (frame["rank"] == 1) & (frame["role"] == "output")].iloc[0]
    assert (row["item"], row["max"], row["parent"]) == ("Torch.relu.0.forward.output.0", 11.0, "Module.a.B.forward.0")
    assert set(aggregator.load(tmp_path, steps=[1])["step"]) == {1}
    assert set(aggregator.load(tmp_path, ranks=[1])["rank"]) == {1}


def test_a_rank_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "step0" / "rank0", 1.0)
    write(tmp_path / "step0" / "rank1", 1.0)
    (tmp_path / "step0" / "rank1" / "dump.json").write_text("{")
    frame = aggregator.load(tmp_path)
    assert set(frame["rank"]) == {0}
    assert frame.attrs["failures"][0].startswith("step 0 rank 1:")


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "step0" / "rank0", 1.0)
    with pytest.raises(NothingUsable, match="nothing to load"):
        aggregator.load(tmp_path, steps=[7])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tolerance": float("nan")}, "tolerance is nan, not a positive number"),
        ({"tolerance": -1}, "tolerance is -1, not a positive number"),
        ({"steps": 0}, "steps is 0, not a list of numbers"),
        ({"steps": "0"}, "steps is '0', not a list of numbers"),
        ({"ranks": []}, r"ranks is \[\], not a list of numbers"),
    ],
)
def test_what_would_compare_nothing_is_refused(tmp_path: Path, asked: dict[str, object], said: str) -> None:
    write(tmp_path / "step0/rank0", 1.0)
    with pytest.raises(UsageError, match=said):
        aggregator.compare_runs(tmp_path, tmp_path, **asked)


def test_two_runs_as_a_frame(shared):
    """Both sides of every item, the first divergences beside them."""
    dumps = shared / "interop" / "dumps"
    frame = aggregator.compare_runs(dumps / "target_stat_L0", dumps / "bench_stat_L0", steps=[0])
    assert frame["rank"].dtype == "Int64"
    assert set(frame["rank"]) == {0, 1}
    assert frame["excess"].dtype == "float64"
    found = frame[frame["excess"] > 1]
    assert found.iloc[0]["NPU Name"] == "Module.module.blocks.2.mlp.fc1.Linear.forward.0.parameters.weight"
    assert [first.rank for first in frame.attrs["first"]] == [1]
    assert frame.attrs["failures"] == []
