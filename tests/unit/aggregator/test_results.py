"""One compare result: which cells it holds, and why a bad one is not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xlsxwriter

from aggregator import results
from aggregator.columns import Mode
from aggregator.model import RankComparison, RankFailure
from aggregator.sources import ResultFile
from msprobe_launch.errors import UnreadableInput

Row = Callable[..., dict[str, str]]
Write = Callable[..., Path]

OLD_HEADER = [name for name in Mode.STATISTICS.header if "Requires_grad" not in name and name != "NPU_Stack_Info"]


def _xlsx(path: Path, sheets: Sequence[Sequence[Mapping[str, str]]]) -> Path:
    book = xlsxwriter.Workbook(str(path))
    for i, rows in enumerate(sheets, 1):
        sheet = book.add_worksheet(f"part_{i}")
        sheet.write_row(0, 0, Mode.STATISTICS.header)
        for j, cells in enumerate(rows, 1):
            sheet.write_row(j, 0, [cells[name] for name in Mode.STATISTICS.header])
    book.close()
    return path


def test_cells_that_are_no_numbers_stay_as_they_are(tmp_path: Path, make_row: Row, result_csv: Write) -> None:
    words = ["N/A", "nan", "Nan", "None", " inf", "unsupported", "", "NULL", "1e999"]
    path = result_csv(
        tmp_path / "a.csv", [make_row(f"Torch.a.{i}.forward.output.0") | {"Max diff": w} for i, w in enumerate(words)]
    )
    table = results.partition_table(results.read(path))
    assert table["Max diff"].null_count == len(words)
    assert table["Max diff:text"].to_pylist() == [word.strip() for word in words]


def test_numbers_and_percentages(tmp_path: Path, make_row: Row, result_csv: Write) -> None:
    cells = make_row("Torch.a.0.forward.input.0") | {"Max diff": "-1e-07", "NormRelativeErr": "0.1000014308062116%"}
    table = results.partition_table(results.read(result_csv(tmp_path / "a.csv", [cells])))
    assert table["Max diff"].to_pylist() == [-1e-07]
    assert table["NormRelativeErr"].to_pylist() == [0.1000014308062116]
    assert table["NormRelativeErr:text"].null_count == 1
    assert table["op"].to_pylist() == ["Torch.a.0.forward"]
    assert table["role"].to_pylist() == ["input"]


def test_old_header_is_accepted(tmp_path: Path, make_row: Row, result_csv: Write) -> None:
    cells = make_row("Torch.a.0.forward.output.0", Result="", Err_message="")
    path = result_csv(tmp_path / "a.csv", [cells], header=OLD_HEADER)
    found = results.load(ResultFile(path, None, 0, 1), tmp_path / "p.parquet")
    assert isinstance(found, RankComparison)
    assert found.results == {"": 1}
    assert pq.read_table(found.partition)["NPU Requires_grad"].to_pylist() == ["N/A"]


def test_utf8_mark_is_no_part_of_the_header(tmp_path: Path, make_row: Row, result_csv: Write) -> None:
    path = result_csv(tmp_path / "a.csv", [make_row("Torch.a.0.forward.output.0")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert results.read(path).cells.column_names[0] == "NPU Name"


def test_all_sheets_of_a_workbook_are_one_table(tmp_path: Path, make_row: Row) -> None:
    rows = [make_row(f"Torch.a.{i}.forward.output.0") for i in range(5)]
    read = results.read(_xlsx(tmp_path / "a.xlsx", [rows[:3], rows[3:]]))
    assert read.cells["NPU Name"].to_pylist() == [cells["NPU Name"] for cells in rows]
    assert read.notes == ("its 2 sheets were read as one table",)


def _spoil(path: Path, how: str) -> None:
    raw = path.read_bytes()
    lines = raw.split(b"\n")
    if how == "empty":
        path.write_bytes(b"")
    elif how == "header only":
        path.write_bytes(lines[0] + b"\n")
    elif how == "cut within a row":
        path.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:60])
    elif how == "cut in a quoted cell":
        path.write_bytes(raw + b'"Torch.b')
    elif how == "a row too long":
        path.write_bytes(raw + lines[1] + b",more\n")
    elif how == "utf-16":
        path.write_bytes(raw.decode().encode("utf-16"))
    elif how == "latin-1":
        path.write_bytes(raw.replace(b"Torch", b"T\xf6rch"))
    elif how == "binary":
        path.write_bytes(raw.replace(b"Torch", b"To\0ch"))
    elif how == "another table":
        path.write_bytes(b"a,b,c\n1,2,3\n")
    elif how == "a column is missing":
        path.write_bytes(raw.replace(b"L2norm diff", b"L2norm dif"))
    elif how == "a column twice":
        path.write_bytes(raw.replace(b"NPU min", b"NPU max", 1))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("empty", r"is empty \(0 bytes\)"),
        ("header only", "header and no row"),
        ("cut within a row", r"cut within row 3: \d+ of 28 cells, no line end \(2 whole rows before it\)"),
        ("cut in a quoted cell", "quotation mark is never closed"),
        ("a row too long", "row 5 has 29 of 28 cells"),
        ("utf-16", "UTF-16.*iconv -f UTF-16 -t UTF-8"),
        ("latin-1", "not UTF-8 text: .* at byte"),
        ("binary", "a NUL at byte"),
        ("another table", "no header of a compare result; it begins with: 'a, b, c'"),
        ("a column is missing", "lacks the column 'L2norm diff'.*Did you mean 'L2norm dif'"),
        ("a column twice", "column twice|lacks the column 'NPU min'"),
    ],
)
def test_a_bad_file_is_a_failure_with_its_reason(
    tmp_path: Path, make_row: Row, result_csv: Write, how: str, reason: str
) -> None:
    path = result_csv(tmp_path / "a.csv", [make_row(f"Torch.a.{i}.forward.output.0") for i in range(4)])
    _spoil(path, how)
    with pytest.raises(UnreadableInput, match=reason):
        results.read(path)
    assert isinstance(results.load(ResultFile(path, 0, 3, 1), tmp_path / "p.parquet"), RankFailure)


def test_an_xlsx_that_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.xlsx"
    path.write_text("NPU Name,Bench Name")
    with pytest.raises(UnreadableInput, match="not a zip archive"):
        results.read(path)


def test_a_file_of_which_nothing_matches_is_a_failure(tmp_path: Path, make_row: Row, result_csv: Write) -> None:
    rows = [make_row(f"Torch.a.{i}.forward.output.0", bench=None) for i in range(4)]
    found = results.load(ResultFile(result_csv(tmp_path / "a.csv", rows), 0, 3, 1), tmp_path / "p.parquet")
    assert isinstance(found, RankFailure)
    assert "none of its 4 rows has a bench row" in found.reason


@pytest.mark.parametrize("pair", ["stat_L1", "nan_stat", "tensor_L1"])
def test_csv_and_xlsx_of_msprobe_hold_the_same(shared: Path, pair: str) -> None:
    one, other = (
        results.partition_table(results.read(next((shared / "interop/compare" / f"{pair}_{kind}").glob("*rank1*"))))
        for kind in ("csv", "xlsx")
    )
    assert one.column_names == other.column_names
    for name in one.column_names:
        if name + ":text" in one.column_names:
            # msprobe's workbooks hold numbers at 16 digits.
            np.testing.assert_allclose(one[name].to_numpy(), other[name].to_numpy(), rtol=1e-15, atol=0)
        else:
            assert one[name].to_pylist() == other[name].to_pylist(), name
