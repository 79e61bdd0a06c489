"""--verdict noise on real runs: another number of threads is no finding, and planted faults are found all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aggregator import compare, noise
from aggregator.model import RankComparison
from msprobe_launch.records.layout import RankFolder

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # nine launches

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
DTYPES = ("float32", "bfloat16")
FAULTS = {
    "mask": ("Tensor.__add__.",),
    "scale": ("Functional.linear.7.forward.input.1", "Module.blocks.1.fc2."),  # as an argument, as a parameter
    "bias": ("Functional.linear.6.",),
}

# Step of planted.py -> (what the first finding's item begins with, ranks that have the fault).
PLANTED = {
    0: ("", ()),
    1: ("Torch.matmul.2.forward.input.0", (0, 1)),  # a product in bf16
    2: ("Functional.linear.7.forward.input.1", (0, 1)),  # a weight off by 0.1 %
    3: ("Torch.triu.1.forward.input.1", (0, 1)),
    4: ("Tensor.__add__.3.forward.input.0", (0, 1)),
    5: ("Functional.linear.6.forward.", (0, 1)),
    6: ("Functional.layer_norm.2.forward.input.", (0, 1)),  # epsilon 1e-5 for 1e-6
    7: ("Torch.div.0.forward.input.1", (0, 1)),
    9: ("", ()),
}


@pytest.fixture(scope="module")
def launch(run_cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("noise")

    def run(name: str, program: str, *arguments: str, ranks: int = 1, level: str = "mix", threads: str = "1") -> Path:
        if not (root / name).exists():
            line = ["-m", "msprobe_launch", "--nproc", str(ranks), "--probe-level", level, "--run-dir", root / name]
            done = run_cli(
                [*line, PROGRAMS / program, *arguments], env={"PLANTED_THREADS": threads}, cwd=root, timeout=280
            )
            assert done.returncode == 0, done.stderr[-3000:]
        return root / name

    return run


def judged(
    run: Path, bench: Path, step: int, out: Path, *, rank: int = 0, second: Path | None = None
) -> RankComparison:
    def folder(side: Path) -> RankFolder:
        return RankFolder(side / f"step{step}" / f"rank{rank}", rank)

    found = compare.compare_rank(
        folder(run),
        folder(bench),
        step=step,
        rank=rank,
        partition=out / "p.parquet",
        policy=noise.Policy(),
        second=None if second is None else folder(second),
    )
    assert isinstance(found, RankComparison), found.reason
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_number_of_threads_is_no_finding(launch: Any, tmp_path: Path, dtype: str) -> None:
    one, two = launch(f"{dtype}-1", "noise.py", dtype, "1"), launch(f"{dtype}-2", "noise.py", dtype, "2")
    differ = 0
    for step in range(3):
        found = judged(two, one, step, tmp_path)
        assert (found.findings, found.results) == (0, {"pass": found.rows})
        dumps = [json.loads((side / f"step{step}/rank0/dump.json").read_text())["data"] for side in (one, two)]
        differ += sum(dumps[0][op] != dumps[1].get(op) for op in dumps[0])
    assert differ > 100  # there was noise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stands_out_of_the_noise(launch: Any, tmp_path: Path, dtype: str, fault: str) -> None:
    trusted = [launch(f"{dtype}-{threads}", "noise.py", dtype, threads) for threads in ("1", "2")]
    wrong = launch(f"{dtype}-{fault}", "noise.py", dtype, "1", fault)
    for second in (None, trusted[1]):
        found = judged(wrong, trusted[0], 0, tmp_path, second=second)
        assert found.first is not None
        assert found.first.item.startswith(FAULTS[fault])


def test_planted_faults_by_noise(launch: Any, tmp_path: Path) -> None:
    bench = launch("bench", "planted.py", "none", ranks=2, level="L1")
    target = launch("target", "planted.py", "all", ranks=2, level="L1")
    threads = launch("threads", "planted.py", "none", ranks=2, level="L1", threads="2")
    for step, (item, ranks) in PLANTED.items():
        for rank in (0, 1):
            assert judged(threads, bench, step, tmp_path, rank=rank).findings == 0
            for second in (None, threads):
                first = judged(target, bench, step, tmp_path, rank=rank, second=second).first
                assert (first is not None) == (rank in ranks)
                assert first is None or first.item.startswith(item)
