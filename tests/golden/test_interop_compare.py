"""Every dump pair in ../shared/interop compares to msprobe's own compare result, cell by cell, as written.

msprobe 26.2 wrote the csv files; all cells must be the same texts. Its xlsx of 1.2.2 lacks columns and rules that came
later; docs/compatibility.md lists how, and nothing else may differ.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from aggregator import compare
from aggregator.model import RankComparison
from msprobe_launch.records.layout import RankFolder

PAIRS = [
    ("target_stat_L0", "bench_stat_L0", "stat_L0_csv", 0),
    ("target_stat_L1", "bench_stat_L1", "stat_L1_csv", 0),
    ("target_stat_mix", "bench_stat_mix", "stat_mix_csv", 0),
    ("target_md5_L1", "bench_md5_L1", "md5_L1_csv", 0),
    ("target_nan_stat_L1", "bench_stat_L1", "nan_stat_csv", 1),
]
TIME = "20260101000000"


def compared(shared: Path, out: Path, target: str, bench: str, step: int, rank: int, kind: str) -> RankComparison:
    dumps = shared / "interop" / "dumps"
    sides = [RankFolder(dumps / name / f"step{step}" / f"rank{rank}", rank) for name in (target, bench)]
    found = compare.compare_rank(
        *sides, step=step, rank=rank, partition=out / "p.parquet", results=out, time=TIME, formats=(kind,)
    )
    assert isinstance(found, RankComparison), found.reason
    return found


def read_csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def read_xlsx(path: Path) -> list[list[object]]:
    import python_calamine

    return list(python_calamine.CalamineWorkbook.from_path(str(path)).get_sheet_by_index(0).to_python())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("target", "bench", "folder", "step"), PAIRS, ids=[pair[2] for pair in PAIRS])
def test_csv(shared, tmp_path, target, bench, folder, step, rank):
    compared(shared, tmp_path, target, bench, step, rank, "csv")
    ours = read_csv(tmp_path / f"compare_result_rank{rank}_{TIME}.csv")
    (path,) = (shared / "interop" / "compare" / folder).glob(f"compare_result_rank{rank}_*.csv")
    theirs = read_csv(path)
    assert ours[0] == theirs[0]
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    different = [
        (mine[0], column, a, b)
        for mine, other in zip(ours, theirs, strict=True)
        for column, a, b in zip(theirs[0], mine, other, strict=True)
        if a != b
    ]
    assert different == []
    # The file itself, quotes and line ends included, is what a csv of theirs is.
    assert (tmp_path / f"compare_result_rank{rank}_{TIME}.csv").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("target", "bench", "folder", "step"),
    [
        ("target_stat_L1", "bench_stat_L1", "stat_L1_xlsx", 0),
        ("target_nan_stat_L1", "bench_stat_L1", "nan_stat_xlsx", 1),
    ],
    ids=["stat_L1_xlsx", "nan_stat_xlsx"],
)
def test_xlsx(shared, tmp_path, target, bench, folder, step, rank):
    compared(shared, tmp_path, target, bench, step, rank, "xlsx")
    ours = read_xlsx(tmp_path / f"compare_result_rank{rank}_{TIME}.xlsx")
    (path,) = (shared / "interop" / "compare" / folder).glob(f"compare_result_rank{rank}_*.xlsx")
    theirs = read_xlsx(path)
    assert len(ours) == len(theirs)
    different = [
        (mine[0], column, a, b)
        for mine, other in zip(ours, theirs, strict=True)
        for column, a, b in zip(theirs[0], mine, other, strict=True)
        if a != b or type(a) is not type(b)
    ]
    assert different == []


# What 26.2 changed against 1.2.2, seen in the same dumps (docs/compatibility.md).
NOT_IN_OLD = {"NPU Requires_grad", "Bench Requires_grad", "Requires_grad Consistent"}
# Other rules; and 1.2.2 knows another form of stack.json, so that it found no stack here.
NOT_COMPARED = {"Result", "Err_message", "NPU_Stack_Info"}


@pytest.mark.parametrize("rank", [0, 1])
def test_xlsx_of_msprobe_1_2_2(shared, tmp_path, rank):
    """Same rows, and no number differs; where 1.2.2 has a word for what 26.2 has a number for, it is one of these."""
    compared(shared, tmp_path, "target_stat_L1", "bench_stat_L1", 0, rank, "csv")
    ours = read_csv(tmp_path / f"compare_result_rank{rank}_{TIME}.csv")
    (path,) = (shared / "interop" / "compare" / "v1.2.2_stat_L1_xlsx").glob(f"compare_result_rank{rank}-*.xlsx")
    theirs = read_xlsx(path)
    assert [name for name in ours[0] if name not in NOT_IN_OLD] == theirs[0]
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    odd = [
        (mine[0], column, new, str(old))
        for mine, other in zip(ours[1:], theirs[1:], strict=True)
        for row in [dict(zip(ours[0], mine, strict=True))]
        for column, old in zip(theirs[0], other, strict=True)
        for new in [row[column]]
        if column not in NOT_COMPARED and not same_as_old(column, new.strip(), str(old).strip(), row)
    ]
    assert odd == []


def same_as_old(column: str, new: str, old: str, row: dict[str, str]) -> bool:
    if new == old or same_number(new, old):
        return True
    if column.endswith(("Dtype", "Shape")):
        return (new, old) in {("N/A", "None"), ("int", "<class 'int'>")}
    if column.endswith(" diff"):
        # No numbers, or equal infinities, of which 1.2.2 took the difference.
        return new == "0" and (old == "N/A" or (old == "Nan" and "inf" in "".join(row.values())))
    if column.endswith("RelativeErr"):
        # As above; and 1.2.2 has no relative error where the bench is 0.
        return (new, old) in {("0", "N/A"), ("inf", "N/A"), ("0", "Nan"), ("0", "0.0%")}
    return False


def same_number(a: str, b: str) -> bool:
    """Equal to 1e-6, both with a percent sign or both without."""
    try:
        x, y = float(a.removesuffix("%")), float(b.removesuffix("%"))
    except ValueError:
        return False
    return a.endswith("%") == b.endswith("%") and abs(x - y) <= 1e-6 * max(abs(x), abs(y))


# -- our own findings in the same pairs


def first_item(shared, tmp_path, target, bench, step, rank):
    found = compared(shared, tmp_path, target, bench, step, rank, "csv").first
    return (None, None) if found is None else (found.item, found.parent)


def test_the_altered_weight_is_the_first_finding_on_its_rank(shared, tmp_path):
    """blocks[2].mlp.fc1.weight was multiplied by 1.001 on rank 1; no level finds anything before it."""
    fc1 = "Module.module.blocks.2.mlp.fc1.Linear.forward.0"
    weight = "Functional.linear.10.forward.input.1"
    assert first_item(shared, tmp_path, "target_stat_L1", "bench_stat_L1", 0, 1) == (weight, None)
    assert first_item(shared, tmp_path, "target_md5_L1", "bench_md5_L1", 0, 1) == (weight, None)
    assert first_item(shared, tmp_path, "target_stat_mix", "bench_stat_mix", 0, 1) == (weight, fc1)
    assert first_item(shared, tmp_path, "target_stat_L0", "bench_stat_L0", 0, 1) == (
        f"{fc1}.parameters.weight",
        "Module.module.blocks.2.mlp.MLP.forward.0",
    )


def test_the_other_rank_differs_only_once_the_gradients_are_reduced(shared, tmp_path):
    item, _ = first_item(shared, tmp_path, "target_stat_L1", "bench_stat_L1", 0, 0)
    assert item.startswith("Torch._foreach_norm.0.forward.input.0.")
    assert first_item(shared, tmp_path, "target_stat_L0", "bench_stat_L0", 0, 0) == (None, None)


def test_the_first_nan_is_the_op_that_made_it(shared, tmp_path):
    found = compared(shared, tmp_path, "target_nan_stat_L1", "bench_stat_L1", 1, 0, "csv")
    assert found.first.item == "Torch.log.0.forward.output.0"
    assert (found.rows, found.matched) == (2198, 2184)


def test_nan_in_the_bench_only_is_found(shared, tmp_path):
    found = compared(shared, tmp_path, "bench_stat_L1", "target_nan_stat_L1", 1, 0, "csv")
    assert set(found.results) == {"pass"}
    assert found.first.item == "Tensor.__add__.6.forward.input.1"
    assert "Torch.log.0.forward" in found.bench_only


def test_every_argument_type_compared_with_itself(shared, tmp_path):
    for name in ("args_stat", "args_md5"):
        found = compared(shared, tmp_path, name, name, 0, 0, "csv")
        assert set(found.results) == {"pass"}
        assert found.findings == 0
        assert found.matched == found.rows
