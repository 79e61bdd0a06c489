"""Real runs in several parallel layouts against one rank: no finding without a fault, and the op that has one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # two dozen launches of one to four ranks

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "layouts.py"

# Name -> (ranks, arguments of layouts.py, level, task, parts of a batch)
RUNS: dict[str, tuple[int, str, str, str, int]] = {
    "single": (1, "single", "mix", "statistics", 1),
    "single_parts": (1, "single", "mix", "statistics", 2),
    "single_l1": (1, "single", "L1", "statistics", 1),
    "single_values": (1, "single", "mix", "tensor", 1),
    "dtensor": (2, "dtensor", "mix", "statistics", 1),
    "sequence": (2, "sequence", "mix", "statistics", 1),
    "megatron": (2, "megatron", "mix", "statistics", 1),
    "megatron_l1": (2, "megatron column", "L1", "statistics", 1),
    "megatron_values": (2, "megatron", "mix", "tensor", 1),
    "column": (2, "megatron column", "mix", "statistics", 1),
    "row": (2, "megatron row", "mix", "statistics", 1),
    "replica": (2, "megatron replica", "mix", "statistics", 1),
    "dtensor_column": (2, "dtensor column", "mix", "statistics", 1),
    "pipeline": (2, "pipeline", "mix", "statistics", 2),
    "ddp4": (4, "ddp", "mix", "statistics", 1),
    "ddp2": (2, "ddp", "mix", "statistics", 1),
    "fsdp4": (4, "fsdp", "mix", "statistics", 1),
    "both": (4, "both", "mix", "statistics", 1),
    "single_ids": (1, "single ids", "mix", "statistics", 1),
    "ddp4_ids": (4, "ddp ids", "mix", "statistics", 1),
    "ddp2_ids": (2, "ddp ids", "mix", "statistics", 1),
    "ddp4_ids_l1": (4, "ddp ids", "L1", "statistics", 1),
    "ddp2_ids_l1": (2, "ddp ids", "L1", "statistics", 1),
    "both_ids": (4, "both ids", "mix", "statistics", 1),
    "dtensor_ids": (2, "dtensor ids", "mix", "statistics", 1),
}


@pytest.fixture(scope="module")
def recorded(run_cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("layouts")

    def run(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            ranks, arguments, level, task, parts = RUNS[name]
            command = ["-m", "msprobe_launch", "--nproc", str(ranks), "--run-dir", folder, "--probe-level", level]
            command += ["--probe-task", task, PROGRAM, *arguments.split()]
            done = run_cli(command, env={"STEPS": "2", "MICROBATCHES": str(parts)}, cwd=root, timeout=280)
            assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return run


@pytest.fixture
def aggregated(recorded: Any, run_cli: Any, tmp_path: Path) -> Any:
    """Compare two recorded runs by the command; (summary, stdout, the tables by step)."""

    def run(target: str, bench: str, layout: str = "auto", steps: str = "0-1") -> tuple[dict[str, Any], str, list[Any]]:
        out = tmp_path / f"{target}-{bench}"
        command = ["-m", "aggregator", recorded(target), "--bench", recorded(bench), "--layout", layout, "-o", out]
        done = run_cli([*command, "--format", "csv", "--steps", steps])
        assert done.returncode in (0, 1), done.stdout + done.stderr
        tables = [pq.read_table(path).to_pandas() for path in sorted(out.glob("partitions/step*/*.parquet"))]
        return json.loads((out / "summary.json").read_text()), done.stdout, tables

    return run


def paired(stdout: str) -> list[float]:
    flat = " ".join(stdout.split())
    return [
        int(a.replace(",", "")) / int(b.replace(",", ""))
        for a, b in re.findall(r"([\d,]+) of ([\d,]+) ops of the target are paired", flat)
    ]


@pytest.mark.parametrize(
    ("target", "bench", "least"),
    [
        ("dtensor", "single", 1.0),
        ("sequence", "single", 1.0),
        ("megatron", "single", 0.95),
        ("single", "megatron", 1.0),
        ("pipeline", "single_parts", 0.95),
        ("single_parts", "pipeline", 1.0),
        ("ddp4", "ddp2", 1.0),
        ("fsdp4", "ddp2", 0.95),
        ("fsdp4", "ddp4", 0.95),
        ("ddp4", "fsdp4", 0.95),
        ("both", "single", 0.95),
        ("both", "ddp2", 0.95),
        ("megatron_values", "single_values", 0.95),
        ("ddp4_ids", "ddp2_ids", 1.0),
        ("ddp4_ids_l1", "ddp2_ids_l1", 1.0),
        ("both_ids", "ddp2_ids", 0.95),
        ("dtensor_ids", "single_ids", 1.0),
    ],
)
def test_another_layout_of_the_same_training_is_no_finding(
    aggregated: Any, target: str, bench: str, least: float
) -> None:
    summary, stdout, tables = aggregated(target, bench)
    assert summary["totals"]["findings"] == 0, stdout
    assert all(share >= least for share in paired(stdout))
    assert paired(stdout)
    compared = sum(int(table["excess"].notna().sum()) for table in tables)
    # Data parallel: parameters and reduced gradients only.
    assert compared > (150 if "ddp" in bench + target or target in ("both", "fsdp4") else 900)


@pytest.mark.parametrize(
    ("target", "bench", "item"),
    [
        ("column", "single", r"Module\.layers\.1\.mlp\.fc1\.ColumnParallelLinear\.forward\.0\.output\.0"),
        ("row", "single", r"Module\.layers\.1\.mlp\.fc2\.RowParallelLinear\.forward\.0\.output\.0"),
        ("dtensor_column", "single", r"Module\.layers\.1\.mlp\.fc1\.Linear\.forward\.0\.output\.0"),
        ("replica", "single", r"Functional\.layer_norm\.2\.forward\.input\.weight"),
        # Without modules: the call that only this rank makes.
        ("megatron_l1", "single_l1", r"Tensor\.__add__\.\d+\.forward\.output\.0"),
    ],
)
def test_a_fault_on_one_rank_of_two_is_the_first_divergence(
    aggregated: Any, target: str, bench: str, item: str
) -> None:
    summary, stdout, tables = aggregated(target, bench, steps="0")
    assert re.fullmatch(item, summary["first"]["item"]), stdout
    assert "ranks 0-1" in summary["first"]["reason"]
    first = tables[0][tables[0]["excess"] > 1].iloc[0]
    assert first["NPU Name"] == summary["first"]["item"]


def test_parameters_and_reduced_gradients_of_data_parallel_runs_are_compared(aggregated: Any) -> None:
    _, _, tables = aggregated("ddp4", "ddp2")
    for table in tables:
        for wanted in (table["role"] == "parameters", table["NPU Name"].str.endswith(".applied")):
            assert wanted.sum() > 30
            assert table[wanted]["excess"].notna().all()
        loss = table[table["NPU Name"].str.contains("mse_loss.0.forward.output")].iloc[0]
        assert loss["excess"] < 1
        assert "other batches" in table[table["NPU Name"].str.contains("gelu.0.forward.input")].iloc[0]["layout"]


def test_a_layout_file_says_the_same_as_the_dumps(aggregated: Any, tmp_path: Path) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text("target:\n  pp: 2\n  stages:\n  - {blocks: layers.0}\n  - {blocks: layers.2}\nbench: {}\n")
    summary, stdout, tables = aggregated("pipeline", "single_parts", str(file))
    assert summary["totals"]["findings"] == 0, stdout
    assert "layout (layout.yaml): target tp 1, dp 1, pp 2" in " ".join(stdout.split())
    names = set(tables[0]["NPU Name"])
    assert "Module.layers.3.mlp.fc1.Linear.forward.1.output.0" in names
    assert not any("blocks" in name for name in names)
