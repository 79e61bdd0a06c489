"""msprobe-aggregate as a person starts it, on real files: the messy folder p09, msprobe's own dumps and results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import python_calamine

Run = Callable[..., "subprocess.CompletedProcess[str]"]

AGGREGATE = ("-m", "aggregator")


@pytest.fixture(scope="module")
def messy(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of case p09: 12 ranks of compare results after a bad night."""
    folder = tmp_path_factory.mktemp("p09")
    subprocess.run([sys.executable, "p09_make.py", str(folder)], cwd=shared / "cases", check=True)
    return folder


def test_p09(messy: Path, run_cli: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_cli([*AGGREGATE, messy, "-o", out])
    assert done.returncode == 3, done.stderr
    text = done.stdout
    assert "7 of 12 ranks" in text
    assert "ranks    0-2, 4, 8, 10-11" in text
    assert "FIRST DIVERGENCE: rank 8\n  Functional.linear.17.forward.output.0\n" in text
    assert "rank 3 left nothing" in text
    for rank, reason in ((5, "is cut within row 21"), (6, "is empty"), (7, "holds a header"), (9, "is UTF-16")):
        assert f"rank {rank}: {reason}" in text
    assert "compare_result_rank1-rank1_20250101000000.csv: older than" in text
    assert "notes.txt: not named like a compare result" in text
    facts = json.loads((out / "summary.json").read_text())
    assert (facts["first"]["rank"], facts["first"]["item"]) == (8, "Functional.linear.17.forward.output.0")
    assert sorted(entry["rank"] for entry in facts["failures"]) == [5, 6, 7, 9]

    (book_path,) = out.glob("multi_ranks_compare_merge_*.xlsx")
    header, *rows = python_calamine.CalamineWorkbook.from_path(str(book_path)).get_sheet_by_name("Max diff").to_python()
    assert header == ["NPU Name", *(f"rank{rank}" for rank in (0, 1, 2, 4, 8, 10, 11))]
    assert [row[0] for row in rows] == [f"Functional.linear.{i}.forward.output.0" for i in range(40)]
    assert rows[5][1] == "NPU:True  Bench:True"
    assert str(rows[6][1]).startswith("NPU:")
    assert str(rows[6][1]).endswith("  Bench:N/A")
    assert str(rows[7][1]).startswith("NPU:nan  Bench:")
    table = pq.read_table(out / "merged/Max_diff.parquet")
    assert str(table.schema.field("rank8").type) == "double"
    assert table["rank8"].null_count == 3


@pytest.mark.parametrize("width", ["60", "100"])
def test_p09_narrow_and_in_ascii(messy: Path, run_cli: Run, tmp_path: Path, width: str) -> None:
    env = {"COLUMNS": width, "PYTHONIOENCODING": "ascii", "FORCE_COLOR": "", "NO_COLOR": "1"}
    done = run_cli([*AGGREGATE, messy, "-o", tmp_path], env=env)
    assert done.returncode == 3, done.stderr
    done.stdout.encode("ascii")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= int(width)


def test_the_altered_weight_is_named(shared: Path, run_cli: Run, tmp_path: Path) -> None:
    dumps = shared / "interop/dumps"
    done = run_cli([*AGGREGATE, dumps / "target_stat_mix", "--bench", dumps / "bench_stat_mix", "-o", tmp_path])
    assert done.returncode == 1, done.stderr
    assert "FIRST DIVERGENCE: rank 1, step 0\n  Functional.linear.10.forward.input.1\n" in done.stdout
    assert "Module.module.blocks.2.mlp.fc1.Linear.forward.0" in done.stdout
    assert "2 of 2 ranks x 1 step x 2,459 items" in done.stdout
    assert sorted(path.name.split("_2")[0] for path in (tmp_path / "step0").iterdir()) == [
        "compare_result_rank0", "compare_result_rank1", "merged", "multi_ranks_compare_merge",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "folder", ["stat_L1_csv", "stat_L1_xlsx", "v1.2.2_stat_L1_xlsx", "tensor_L1_csv", "md5_L1_csv"]
)
def test_msprobes_results_name_the_same_weight(shared: Path, run_cli: Run, tmp_path: Path, folder: str) -> None:
    done = run_cli([*AGGREGATE, shared / "interop/compare" / folder, "-o", tmp_path])
    assert done.returncode == 1, done.stderr
    assert "FIRST DIVERGENCE: rank 1\n  Functional.linear.10.forward.input.1\n" in done.stdout


def test_a_nan_without_a_bench(shared: Path, run_cli: Run, tmp_path: Path) -> None:
    done = run_cli([*AGGREGATE, shared / "interop/dumps/target_nan_stat_L1", "-o", tmp_path])
    assert done.returncode == 1, done.stderr
    assert "FIRST NON-FINITE VALUE: rank 0, step 1\n  Torch.log.0.forward.output.0\n" in done.stdout
    assert "all inputs of this call are finite" in done.stdout


def test_a_mode_that_does_not_fit_is_a_reason(shared: Path, run_cli: Run, tmp_path: Path) -> None:
    """Names that differ by a wrapper's prefix are matched; a pair without anything in common is exit code 4."""
    for rank in (0, 1):
        folder = tmp_path / f"t/step0/rank{rank}"
        folder.mkdir(parents=True)
        for name in ("dump.json", "stack.json", "construct.json"):
            text = (shared / f"interop/dumps/bench_stat_L0/step0/rank{rank}" / name).read_text()
            (folder / name).write_text(text.replace("Module.module.", "Module."))
    bench = shared / "interop/dumps/bench_stat_L0"
    done = run_cli([*AGGREGATE, tmp_path / "t", "--bench", bench, "-o", tmp_path / "o"])
    assert done.returncode == 0, done.stdout + done.stderr
    other = shared / "interop/dumps/groups_bench"
    done = run_cli([*AGGREGATE, tmp_path / "t", "--bench", other, "-o", tmp_path / "o2"])
    assert done.returncode == 4, done.stdout + done.stderr
    assert "NOT USED: 2" in done.stdout


def test_nothing_there(run_cli: Run, tmp_path: Path) -> None:
    done = run_cli([*AGGREGATE, tmp_path])
    assert done.returncode == 4
    assert done.stdout == ""
    assert "nothing to aggregate" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written(shared: Path, run_cli: Run, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    source = tmp_path / "results"
    shutil.copytree(shared / "interop/compare/stat_L0_csv", source)
    source.chmod(0o555)
    done = run_cli([*AGGREGATE, source])
    source.chmod(0o755)
    assert done.returncode == 2
    assert "-o FOLDER" in done.stderr


def test_a_closed_pipe_is_no_traceback(messy: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m aggregator {messy} -o {tmp_path} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("msprobe-aggregate")
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
