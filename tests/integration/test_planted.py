"""Faults planted in a real two-rank training: the first finding names the op, on every rank that has the fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aggregator import compare
from aggregator.model import RankComparison
from msprobe_launch.records.layout import RankFolder

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # three launches of two ranks

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "planted.py"

# Step of planted.py -> (what the first finding's item begins with, ranks that have the fault).
EXPECTED = {
    0: ("", ()),
    1: ("Torch.matmul.2.forward.input.0", (0, 1)),  # bf16: the product of the second block
    2: ("Functional.linear.7.forward.input.1", (0, 1)),  # weight: fc2 of the second block
    3: ("Torch.triu.1.forward.input.1", (0, 1)),  # mask
    4: ("Tensor.__add__.3.forward.input.0", (0, 1)),  # residual: second sum of the second block
    5: ("Functional.linear.6.forward.", (0, 1)),  # bias: fc1 of the second block
    6: ("Functional.layer_norm.2.forward.input.", (0, 1)),  # epsilon: first norm of the second block
    7: ("Torch.div.0.forward.input.1", (0, 1)),  # normalisation: the loss
    8: ("Torch.add.0.forward.", (1,)),  # shard: rank 1 of two tensor-parallel ones adds its bias twice
    9: ("", ()),
}


@pytest.fixture(scope="module")
def runs(run_cli: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("planted")
    for name, faults, threads in (("bench", "none", "1"), ("target", "all", "1"), ("threads", "none", "2")):
        command = ["-m", "msprobe_launch", "--nproc", "2", "--run-dir", root / name, PROGRAM, faults]
        done = run_cli(command, env={"PLANTED_THREADS": threads}, cwd=root, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
    return {name: root / name for name in ("bench", "target", "threads")}


def compared(runs: dict[str, Path], name: str, step: int, rank: int, out: Path) -> RankComparison:
    sides = [RankFolder(runs[side] / f"step{step}" / f"rank{rank}", rank) for side in (name, "bench")]
    found = compare.compare_rank(*sides, step=step, rank=rank, partition=out / "p.parquet")
    assert isinstance(found, RankComparison), found.reason
    return found


@pytest.mark.parametrize("step", EXPECTED)
def test_the_first_finding_names_the_fault(runs: dict[str, Path], tmp_path: Path, step: int) -> None:
    item, ranks = EXPECTED[step]
    for rank in (0, 1):
        found = compared(runs, "target", step, rank, tmp_path)
        if rank in ranks:
            assert found.first is not None
            assert found.first.item.startswith(item)
        elif not ranks:
            assert found.first is None
        else:
            # The other shard's part comes in with the sum over both, and nothing before it is off.
            assert found.first is not None
            assert found.first.item == "Distributed.all_reduce.0.forward.output.0"


def test_another_number_of_threads_is_no_finding(runs: dict[str, Path], tmp_path: Path) -> None:
    for step in EXPECTED:
        for rank in (0, 1):
            found = compared(runs, "threads", step, rank, tmp_path)
            assert (found.findings, found.matched) == (0, found.rows)
