"""The xlsx writer: what it writes is XML, and reads back as it went in."""

from __future__ import annotations

import gc
import hashlib
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest
import python_calamine

from aggregator.report.workbook import Workbook

TEXTS = ["a & b", "<x> \"y\" 'z'", " blank ", "tab\there", "line\nbreak", "\x01bell", "Größe 数", "=1+1", ""]


def test_texts_numbers_booleans_and_gaps(tmp_path: Path) -> None:
    book = Workbook(tmp_path / "a.xlsx")
    book.begin_sheet("Max diff & <more>", ["NPU Name", "rank0", "rank1"])
    count = len(TEXTS)
    numbers = pa.array([None, 1.5, None, -1e-300, 0.0, *[None] * (count - 5)], pa.float64())
    shown = pa.array(["True", "1.5", None, "-1e-300", "0", "False", *["N/A"] * (count - 6)])
    book.write_rows([pa.array(TEXTS), shown, pa.nulls(count, pa.string())], [None, numbers, None])
    book.end_sheet()
    book.close()
    read = python_calamine.CalamineWorkbook.from_path(str(tmp_path / "a.xlsx"))
    assert read.sheet_names == ["Max diff & <more>"]
    rows = read.get_sheet_by_index(0).to_python()
    assert rows[0] == ["NPU Name", "rank0", "rank1"]
    assert [row[0] for row in rows[1:]] == [text.replace("\x01", "?") for text in TEXTS]
    assert [row[1] for row in rows[1:6]] == [True, 1.5, "", -1e-300, 0.0]
    assert rows[6][1] is False
    with zipfile.ZipFile(tmp_path / "a.xlsx") as archive:
        for name in archive.namelist():
            ElementTree.fromstring(archive.read(name))


def test_a_sheet_that_is_full_goes_on_in_another(tmp_path: Path) -> None:
    book = Workbook(tmp_path / "a.xlsx", max_rows=4)
    book.begin_sheet("Five Thousandths Err Ratio", ["NPU Name"])
    for start in (0, 3, 6):
        book.write_rows([pa.array([str(i) for i in range(start, start + 3)])], [None])
    book.end_sheet()
    book.close()
    read = python_calamine.CalamineWorkbook.from_path(str(tmp_path / "a.xlsx"))
    assert len(read.sheet_names) == 3
    assert len(set(read.sheet_names)) == 3
    assert all(len(name) <= 31 for name in read.sheet_names)
    rows = [row[0] for i in range(3) for row in read.get_sheet_by_index(i).to_python()[1:]]
    assert rows == [str(i) for i in range(9)]


def test_more_columns_than_a_sheet_holds(tmp_path: Path) -> None:
    book = Workbook(tmp_path / "a.xlsx")
    with pytest.raises(ValueError, match="16384 columns, not 16385"):
        book.begin_sheet("x", ["c"] * 16_385)
    book.close()


def test_nothing_stands_under_the_name_before_it_is_whole(tmp_path: Path) -> None:
    book = Workbook(tmp_path / "a.xlsx")
    book.begin_sheet("x", ["c"])
    assert not (tmp_path / "a.xlsx").exists()
    book.close()
    assert (tmp_path / "a.xlsx").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.xlsx"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("height", [10, 200_000])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, height: int) -> None:
    """Both where it fails while rows are written and where it fails at the end."""
    (tmp_path / ".a.xlsx.tmp").symlink_to("/dev/full")
    # Texts that do not compress, so that the buffer of the file runs over.
    texts = pa.array([hashlib.sha256(str(i).encode()).hexdigest() for i in range(height)])
    with pytest.raises(OSError, match="No space left on device"):
        _one_column(tmp_path / "a.xlsx", texts)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def _one_column(path: Path, texts: pa.Array) -> None:
    book = Workbook(path)
    try:
        book.begin_sheet("x", ["NPU Name"])
        book.write_rows([texts], [None])
        book.end_sheet()
    except BaseException:
        book.discard()
        raise
    book.close()
