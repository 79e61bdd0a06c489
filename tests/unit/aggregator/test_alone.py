"""A run without a bench: what is not finite, and which ranks are unlike the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from aggregator import alone, merge
from aggregator.alone import RankStatistics
from aggregator.analyse import opsets, replicas
from aggregator.columns import Mode
from aggregator.merge import RankTable
from aggregator.model import RankFailure
from aggregator.sources import RankDump
from msprobe_launch.records.layout import RankFolder

Tensor = Callable[..., dict[str, Any]]
WriteDump = Callable[..., Path]
INF = math.inf


def _op(inputs: list[Any], output: Any) -> dict[str, Any]:
    return {"input_args": inputs, "input_kwargs": {}, "output": [output]}


@pytest.fixture
def describe(tmp_path: Path, write_dump: WriteDump) -> Callable[..., RankStatistics]:
    def run(ops: Mapping[str, Any], rank: int = 0, parents: Mapping[str, str | None] | None = None) -> RankStatistics:
        folder = RankFolder(write_dump(tmp_path / f"step3/rank{rank}", ops, parents), rank)
        found = alone.describe(RankDump(3, rank, folder), tmp_path / f"rank{rank}.parquet")
        assert isinstance(found, RankStatistics)
        return found

    return run


def test_the_call_that_made_the_infinity(describe: Callable[..., RankStatistics], make_tensor: Tensor) -> None:
    found = describe(
        {
            "Torch.mul.0.forward": _op([make_tensor(2.0)], make_tensor(90.0)),
            "Torch.exp.0.forward": _op([make_tensor(90.0)], make_tensor(INF, 1.0)),
            "Torch.tanh.0.forward": _op([make_tensor(INF, 1.0)], make_tensor(1.0)),
        },
        parents={"Torch.exp.0.forward": "Module.gates.2.Gate.forward.0"},
    )
    assert found.findings == 2
    first = found.first
    assert first is not None
    assert (first.step, first.rank, first.item, first.kind) == (3, 0, "Torch.exp.0.forward.output.0", "+Inf")
    assert first.made_here
    assert first.position == 1
    assert first.parent == "Module.gates.2.Gate.forward.0"
    assert "train.py" in first.stack[0]


def test_masks_are_asked_for_and_nan_is_not(describe: Callable[..., RankStatistics], make_tensor: Tensor) -> None:
    mask = {"type": "float", "value": -INF}
    masked = make_tensor(1.0, -INF) | {"Mean": -INF, "Norm": INF}
    nan = make_tensor(math.nan)
    ops = {
        "Tensor.masked_fill.0.forward": _op([make_tensor(1.0), mask], masked),
        "Functional.softmax.0.forward": _op([masked], make_tensor(1.0)),
    }
    clean = describe(ops)
    assert (clean.findings, clean.asked_for, clean.first) == (0, 3, None)
    ops["Functional.softmax.1.forward"] = _op([masked], nan)
    found = describe(ops)
    assert found.findings == 1
    assert found.first is not None
    assert found.first.item == "Functional.softmax.1.forward.output.0"
    assert found.first.kind == "NaN"


def test_a_nan_that_the_script_passes_in(describe: Callable[..., RankStatistics], make_tensor: Tensor) -> None:
    given = {"type": "float", "value": math.nan}
    nan = make_tensor(math.nan)
    ops = {
        "Tensor.masked_fill.0.forward": _op([make_tensor(1.0), given], nan),
        "Torch.mul.0.forward": _op([nan], nan),
    }
    found = describe(ops)
    assert (found.findings, found.asked_for) == (4, 0)
    first = found.first
    assert first is not None
    assert (first.item, first.kind, first.made_here) == ("Tensor.masked_fill.0.forward.input.1", "NaN", True)
    assert first.argument == first.item


def test_what_a_call_makes_of_its_own_argument(describe: Callable[..., RankStatistics], make_tensor: Tensor) -> None:
    given = {"type": "float", "value": -INF}
    # The output also holds a +Inf, so that it is no mask.
    found = describe({"Tensor.mul.0.forward": _op([make_tensor(1.0), given], make_tensor(INF, -INF))})
    assert found.first is not None
    assert (found.first.item, found.first.made_here) == ("Tensor.mul.0.forward.output.0", True)
    assert found.first.argument == "Tensor.mul.0.forward.input.1"
    found = describe({"Tensor.mul.0.forward": _op([make_tensor(INF), given], make_tensor(INF, -INF))})
    assert found.first is not None
    assert (found.first.item, found.first.made_here) == ("Tensor.mul.0.forward.input.0", False)


def test_an_infinity_nobody_asked_for(describe: Callable[..., RankStatistics], make_tensor: Tensor) -> None:
    found = describe({"Torch.log.0.forward": _op([make_tensor(0.0)], make_tensor(-INF))})
    assert found.first is not None
    assert found.first.kind == "-Inf"
    assert found.first.made_here


def test_an_overflowed_norm_of_finite_values_is_no_finding(
    describe: Callable[..., RankStatistics], make_tensor: Tensor
) -> None:
    found = describe({"Torch.a.0.forward": _op([make_tensor(1.0)], make_tensor(60000.0) | {"Norm": INF})})
    assert found.findings == 0


def test_the_partition_keeps_numbers_and_words_apart(
    describe: Callable[..., RankStatistics], make_tensor: Tensor
) -> None:
    found = describe({"Torch.a.0.forward": _op([make_tensor(math.nan), None], make_tensor(INF))})
    table = pq.read_table(found.partition)
    assert table["NPU max"].null_count == 3
    assert table["NPU max:text"].to_pylist() == ["Nan", "None", "inf"]
    assert table["role"].to_pylist() == ["input", "input", "output"]


def test_a_dump_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    folder = RankFolder(tmp_path / "rank0", 0)
    folder.path.mkdir()
    folder.dump.write_text('{"task": "statistics", "data": {"a')
    found = alone.describe(RankDump(0, 0, folder), tmp_path / "p.parquet")
    assert isinstance(found, RankFailure)
    assert "is cut" in found.reason


def test_ranks_whose_ops_differ(describe: Callable[..., RankStatistics], make_tensor: Tensor) -> None:
    def ops(*names: str) -> dict[str, Any]:
        return {f"Torch.{name}.0.forward": _op([make_tensor(1.0)], make_tensor(1.0)) for name in names}

    ranks = [describe(ops(*names), rank) for rank, names in enumerate(("ab", "abc", "ab", "a", "ba"))]
    found = opsets.differences(3, [(entry.rank, entry.partition) for entry in reversed(ranks)])
    assert [(d.ranks, d.ops, d.usual, d.only_here, d.lacking, d.example) for d in found] == [
        ((1,), 3, 2, 1, 0, "Torch.c.0.forward"),
        ((3,), 1, 2, 0, 1, "Torch.b.0.forward"),
    ]


def test_parameters_that_differ(describe: Callable[..., RankStatistics], make_tensor: Tensor) -> None:
    def module(weight: float, data: float) -> dict[str, Any]:
        parameters = {"weight": make_tensor(weight), "bias": make_tensor(0.5)}
        op = _op([make_tensor(data)], make_tensor(data))
        return {"Module.b.Linear.forward.0": op | {"parameters": parameters}}

    def plan(*weights: float) -> merge.MergePlan:
        ranks = [describe(module(weight, rank), rank) for rank, weight in enumerate(weights)]
        return merge.plan(Mode.STATISTICS, [RankTable(entry.rank, entry.partition) for entry in ranks])

    assert replicas.differences(3, plan(1.0, 1.0, 1.0)) is None
    found = replicas.differences(3, plan(1.0, 1.0, 1.0 + 1e-9))
    assert found is not None
    assert (found.differing, found.compared, found.ranks) == (1, 2, (2,))
    assert found.item == "Module.b.Linear.forward.0.parameters.weight"
    assert replicas.differences(3, plan(1.0)) is None
