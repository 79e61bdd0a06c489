"""One rank end to end: files written, failures as values, step and rank carried through."""

from __future__ import annotations

import csv

import pyarrow.parquet as pq
import pytest

from aggregator import columns, compare
from aggregator.columns import TEXT_SUFFIX, Mode
from aggregator.model import RankFailure
from msprobe_launch.records import journal

OP = "Functional.linear.0.forward"


@pytest.fixture
def pair(tmp_path, make_folder, make_value, make_call):
    items = [make_value(2.0), {"type": "str", "value": 'a "quoted", text\nof two lines'}, None]
    target = make_folder(tmp_path / "t", {OP: make_call(*items, out=make_value(1.5))})
    return target, make_folder(tmp_path / "b", {OP: make_call(*items, out=make_value(1.0))})


def run(pair, tmp_path, **more):
    return compare.compare_rank(*pair, step=4, rank=1, partition=tmp_path / "deep" / "er" / "rank1.parquet", **more)


@pytest.mark.parametrize("same", [True, False])
def test_checksums_without_statistics_are_compared_as_checksums(compare_ops, make_call, same):
    """Summary mode xor."""

    def ops(checksum):
        tensor = {
            "type": "torch.Tensor",
            "dtype": "torch.float32",
            "shape": [2],
            "requires_grad": False,
            "md5": checksum,
        }
        return {"Torch.a.0.forward": make_call(tensor, out=tensor)}

    found = compare_ops(ops("0x01"), ops("0x01" if same else "0x02")).result
    assert (found.mode, found.findings) == (Mode.MD5, 0 if same else 2)


def test_checksums_alone_against_statistics_are_refused(tmp_path, make_folder, make_call, make_value):
    alone = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "requires_grad": False, "md5": "0x01"}
    sides = [
        make_folder(tmp_path / name, {"Torch.a.0.forward": make_call(value, {"type": "float", "value": 1.0})})
        for name, value in (("t", alone), ("b", make_value(1.0)))
    ]
    found = compare.compare_rank(*sides, step=0, rank=0, partition=tmp_path / "p.parquet")
    assert isinstance(found, RankFailure)
    assert "the target's dump holds checksums only (summary mode xor), and the other one has none" in found.reason


def test_the_partition_has_the_agreed_columns(pair, tmp_path):
    found = run(pair, tmp_path)
    table = pq.read_table(found.partition)
    expected = set(Mode.STATISTICS.header) | {name + TEXT_SUFFIX for name in Mode.STATISTICS.numeric}
    assert set(table.column_names) == expected | {"op", "role", "excess", "parent", "integers", "finding"}
    for name in Mode.STATISTICS.numeric:
        assert str(table.schema.field(name).type) == "double"
        assert str(table.schema.field(name + TEXT_SUFFIX).type) == "string"
        number, text = table[name].to_pylist(), table[name + TEXT_SUFFIX].to_pylist()
        assert all((n is None) != (t is None) for n, t in zip(number, text, strict=True))
    assert table["op"].to_pylist() == [OP] * 4
    assert table["role"].to_pylist() == ["input"] * 3 + ["output"]
    assert (found.step, found.rank, found.rows, found.matched) == (4, 1, 4, 4)
    assert found.results == {"pass": 3, "warning": 1}
    assert found.source == pair[0].path


def test_a_csv_reads_back_whatever_its_texts(pair, tmp_path):
    run(pair, tmp_path, results=tmp_path / "step4", time="20260101000000")
    with (tmp_path / "step4" / "compare_result_rank1_20260101000000.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == Mode.STATISTICS.header
    assert {len(row) for row in rows} == {len(rows[0])}
    cells = dict(zip(rows[0], rows[2], strict=True))
    assert cells["NPU max"] == 'a "quoted", text\nof two lines'
    assert [row[-1][:6] for row in rows[1:]] == ["['File", "N/A", "N/A", "N/A"]


def test_an_xlsx_holds_metrics_as_text_and_statistics_as_numbers(pair, tmp_path):
    import python_calamine

    run(pair, tmp_path, results=tmp_path, time="1", formats=("xlsx", "csv"))
    assert (tmp_path / "compare_result_rank1_1.csv").exists()
    book = python_calamine.CalamineWorkbook.from_path(str(tmp_path / "compare_result_rank1_1.xlsx"))
    header, *rows = book.get_sheet_by_index(0).to_python()
    assert book.sheet_names == ["Sheet1"]
    output = dict(zip(header, rows[3], strict=True))
    assert (output["Max diff"], output["MaxRelativeErr"], output["NPU max"]) == ("0.5", "50.0%", 1.5)
    assert rows[0][header.index("Max diff")] == "0"


def test_a_large_workbook_is_split_as_msprobe_splits_it(pair, tmp_path, monkeypatch):
    import python_calamine

    from aggregator import sheet

    monkeypatch.setattr(sheet, "SHEET_ROWS", 3)
    run(pair, tmp_path, results=tmp_path, time="1", formats=("xlsx",))
    book = python_calamine.CalamineWorkbook.from_path(str(tmp_path / "compare_result_rank1_1.xlsx"))
    assert book.sheet_names == ["part_0", "part_1"]
    assert [len(book.get_sheet_by_name(name).to_python()) for name in book.sheet_names] == [4, 2]


def test_without_a_rank_the_file_has_none_in_its_name(pair, tmp_path):
    compare.compare_rank(*pair, step=0, rank=None, partition=tmp_path / "p", results=tmp_path, time="1")
    assert (tmp_path / "compare_result_1.csv").exists()


@pytest.mark.parametrize("side", [0, 1])
def test_a_bad_file_is_a_failure_that_names_its_side(pair, tmp_path, side):
    pair[side].dump.write_text('{"task": "statistics", "data": {')
    found = run(pair, tmp_path)
    assert isinstance(found, RankFailure)
    assert (found.step, found.rank, found.source) == (4, 1, pair[0].path)
    assert found.reason.startswith(f"{('target', 'bench')[side]} {pair[side].path}: dump.json is cut")
    assert "32 bytes" in found.reason


def test_a_full_disk_or_a_file_in_the_way_is_a_failure(pair, tmp_path):
    (tmp_path / "file").write_text("")
    found = compare.compare_rank(*pair, step=0, rank=0, partition=tmp_path / "file" / "p.parquet")
    assert isinstance(found, RankFailure)
    assert "file" in found.reason


def test_an_unfinished_step_is_compared_and_marked(pair, tmp_path, make_value, make_call):
    import json

    target = pair[0]
    target.dump.unlink()
    record = json.dumps(make_call(make_value(2.0)))
    target.journal.write_text(journal.header("statistics", "mix", "pytorch") + f'"{OP}": {record},\n"torn')
    found = run(pair, tmp_path)
    assert found.partial
    assert (found.rows, found.matched) == (1, 1)
    assert found.notes[0] == (
        "target: dump.json.partial: the step was never finished; 5 bytes after its last whole record left out"
    )


def test_modules_and_apis_get_their_stack_on_the_first_row_only(compare_ops, make_value, make_call):
    found = compare_ops(*({f"Torch.f.{i}.forward": make_call(make_value(1.0), None) for i in range(2)},) * 2)
    cells = [row[columns.STACK] for row in found.rows.values()]
    assert cells == ["['File /job/model.py, line 3, in forward, \\n y = f(x)']", "N/A"] * 2


def test_nothing_of_a_framework_is_imported(run_cli):
    code = (
        "import sys, aggregator.compare; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'mindspore')])"
    )
    assert run_cli(["-c", code]).stdout.strip() == "[]"
