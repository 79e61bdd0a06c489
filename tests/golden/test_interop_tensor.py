"""Tensor mode: the stored values of ../shared/interop/tiny_tensor compare to msprobe 26.2's csv and xlsx."""

from __future__ import annotations

import csv
import shutil

import pytest

from aggregator import compare
from aggregator.columns import Mode
from aggregator.model import RankComparison
from msprobe_launch.records.layout import RankFolder

TIME = "20260101000000"


def compared(shared, out, rank, kind="csv", target="target"):
    root = shared / "interop" / "tiny_tensor"
    sides = [RankFolder(root / side / "step0" / f"rank{rank}", rank) for side in (target, "bench")]
    found = compare.compare_rank(
        *sides, step=0, rank=rank, partition=out / "p.parquet", results=out, time=TIME, formats=(kind,)
    )
    assert isinstance(found, RankComparison), found.reason
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_csv(shared, tmp_path, rank):
    assert compared(shared, tmp_path, rank).mode is Mode.TENSOR
    (theirs,) = (shared / "interop/tiny_tensor/cmp_csv").glob(f"compare_result_rank{rank}_*.csv")
    ours = tmp_path / f"compare_result_rank{rank}_{TIME}.csv"
    rows = [list(csv.reader(path.read_text(encoding="utf-8").splitlines())) for path in (ours, theirs)]
    assert rows[0] == rows[1]
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_xlsx(shared, tmp_path, rank):
    import python_calamine

    compared(shared, tmp_path, rank, "xlsx")
    (theirs,) = (shared / "interop/tiny_tensor/cmp_xlsx").glob(f"compare_result_rank{rank}_*.xlsx")
    ours = tmp_path / f"compare_result_rank{rank}_{TIME}.xlsx"
    rows = [
        [[(type(cell), cell) for cell in row] for row in sheet.to_python()]
        for path in (ours, theirs)
        for sheet in [python_calamine.CalamineWorkbook.from_path(str(path)).get_sheet_by_index(0)]
    ]
    assert rows[0] == rows[1]


def test_the_altered_weight_is_the_first_finding(shared, tmp_path):
    """program.py multiplies the layer norm's weight by 1 + eps on rank 1."""
    assert compared(shared, tmp_path, 1).first.item == "Functional.layer_norm.0.forward.input.2"
    assert compared(shared, tmp_path, 0).first.item.startswith("Distributed.all_reduce.")


def test_values_that_are_gone_are_said(shared, tmp_path):
    root = tmp_path / "interop" / "tiny_tensor"
    shutil.copytree(shared / "interop" / "tiny_tensor", root)
    folder = root / "target/step0/rank0/dump_tensor_data"
    (folder / "Functional.linear.0.forward.input.0.pt").unlink()
    found = compared(tmp_path, tmp_path, 0)
    assert any("1 items were not compared" in note and "input.0.pt is missing" in note for note in found.notes)
    lines = (tmp_path / f"compare_result_rank0_{TIME}.csv").read_text().splitlines()
    assert "unsupported,unsupported,unsupported" in next(row for row in lines if "linear.0.forward.input.0" in row)


def test_against_statistics_alone(shared, tmp_path):
    """Only one side has values: statistics mode, with a note."""
    root = tmp_path / "interop" / "tiny_tensor"
    shutil.copytree(shared / "interop" / "tiny_tensor", root)
    dump = root / "target/step0/rank0/dump.json"
    dump.write_text(dump.read_text().replace('"task": "tensor"', '"task": "statistics"'))
    found = compared(tmp_path, tmp_path, 0)
    assert found.mode is Mode.STATISTICS
    assert any("only the bench has stored tensor values" in note for note in found.notes)
