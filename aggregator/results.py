"""One compare_result file, ours or msprobe's (1.2 to 26.2), csv or xlsx -> its partition and a RankComparison.

A file that is not whole is a RankFailure with its reason; nothing is taken from the half of a file, since a cut file
says nothing about what came after the cut.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from aggregator import cells, columns, divergence, merge
from aggregator.columns import TEXT_SUFFIX, Mode
from aggregator.model import RankComparison, RankFailure
from aggregator.sources import ResultFile
from msprobe_launch.errors import UnreadableInput, near_miss
from msprobe_launch.records.names import ItemName

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UTF8_MARK = b"\xef\xbb\xbf"

# Rows of a workbook that are turned into columns at once: bounds the Python objects alive while reading.
_XLSX_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A compare result as it stands in its file: all cells texts, columns in the file's order."""

    mode: Mode
    cells: pa.Table
    notes: tuple[str, ...] = ()


def read(path: Path) -> ResultTable:
    """Read one file. Raises UnreadableInput with the reason in words and numbers."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UnreadableInput(f"cannot be read: {error.strerror}") from error
    if size == 0:
        raise UnreadableInput("is empty (0 bytes)")
    table, notes = _read_xlsx(path) if path.suffix.lower() == ".xlsx" else _read_csv(path)
    mode = _mode(table.column_names)
    if table.num_rows == 0:
        raise UnreadableInput("holds a header and no row")
    return ResultTable(mode, table, notes)


# -- csv


def _read_csv(path: Path) -> tuple[pa.Table, tuple[str, ...]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UnreadableInput(f"cannot be read: {error.strerror}") from error
    if raw.startswith(_UTF16_MARKS):
        raise UnreadableInput(
            "is UTF-16 text, not UTF-8 (saved again by a spreadsheet?); "
            f"to use it: iconv -f UTF-16 -t UTF-8 {path.name} > new.csv"
        )
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableInput(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if b"\0" in raw:
        raise UnreadableInput(f"is not a text file: a NUL at byte {raw.index(0)}")
    if raw.count(b'"') % 2:
        raise UnreadableInput("is cut inside a quoted cell: a quotation mark is never closed")
    ends_in_newline = raw.endswith((b"\n", b"\r"))
    header = _csv_header(raw)

    wrong: list[pacsv.InvalidRow] = []

    def remember(row: pacsv.InvalidRow) -> str:
        wrong.append(row)
        return "skip"

    try:
        table = pacsv.read_csv(
            pa.BufferReader(raw),
            # One thread: row numbers are known then, and other ranks use the other cores.
            read_options=pacsv.ReadOptions(use_threads=False, block_size=1 << 24),
            parse_options=pacsv.ParseOptions(newlines_in_values=True, invalid_row_handler=remember),
            # Without this `N/A`, `nan` and empty cells would come back as nulls or as NaN.
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False, null_values=[]
            ),
        )
    except pa.ArrowInvalid as error:
        raise UnreadableInput(f"is not a csv table: {error}") from error
    if wrong:
        raise UnreadableInput(_wrong_rows(wrong, table.num_rows, cut=not ends_in_newline))
    notes = () if ends_in_newline else ("has no line end after its last row; its last cell may be cut",)
    return table, notes


def _csv_header(raw: bytes) -> list[str]:
    """Column names of the first line; checked here since Arrow accepts anything as names."""
    import csv
    import io

    start = len(_UTF8_MARK) if raw.startswith(_UTF8_MARK) else 0
    end = raw.find(b"\n")
    line = raw[start : end if end >= 0 else len(raw)].decode("utf-8")
    names = next(csv.reader(io.StringIO(line)), [])
    _mode(names)  # raises before anything is parsed
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UnreadableInput(f"has a column twice: {', '.join(doubled)}")
    return names


def _wrong_rows(wrong: list[Any], good: int, *, cut: bool) -> str:
    first = wrong[0]
    counts = f"{first.actual_columns} of {first.expected_columns} cells"
    if cut and len(wrong) == 1 and first.actual_columns < first.expected_columns:
        return f"is cut within row {good + 1}: {counts}, no line end ({good} whole rows before it)"
    number = f"row {first.number - 1} has" if first.number else "a row has"
    more = f" (and {len(wrong) - 1} more such rows)" if len(wrong) > 1 else ""
    return f"is no table: {number} {counts}{more}"


# -- xlsx


def _read_xlsx(path: Path) -> tuple[pa.Table, tuple[str, ...]]:
    import python_calamine

    if not zipfile.is_zipfile(path):
        raise UnreadableInput("is no xlsx workbook: not a zip archive, or cut before its end")
    try:
        book = python_calamine.CalamineWorkbook.from_path(str(path))
        sheets = [book.get_sheet_by_name(name) for name in book.sheet_names]
        parts: list[pa.Table] = []
        for sheet in sheets:
            parts.extend(_sheet_tables(sheet, parts[0].column_names if parts else None))
    except (python_calamine.CalamineError, OSError, ValueError) as error:
        raise UnreadableInput(f"is no xlsx workbook: {error}") from error
    if not parts:
        raise UnreadableInput("is a workbook without any row")
    notes = (f"its {len(sheets)} sheets were read as one table",) if len(sheets) > 1 else ()
    return pa.concat_tables(parts), notes


def _sheet_tables(sheet: Any, expected: list[str] | None) -> Iterator[pa.Table]:
    """A sheet as tables of bounded height, the first one perhaps empty. Raises UnreadableInput on another header."""
    rows = iter(sheet.iter_rows())
    header = [_cell(value) for value in next(rows, [])]
    if not header:
        return
    if expected is not None and header != expected:
        raise UnreadableInput(f"sheet '{sheet.name}' has another header than the first sheet")
    _mode(header)
    chunk: list[list[Any]] = []
    yielded = False
    for row in rows:
        chunk.append(row)
        if len(chunk) == _XLSX_CHUNK:
            yield _chunk_table(header, chunk)
            chunk, yielded = [], True
    if chunk or not yielded:
        yield _chunk_table(header, chunk)


def _chunk_table(header: list[str], rows: list[list[Any]]) -> pa.Table:
    arrays = [pa.array([_cell(row[i]) for row in rows], pa.string()) for i in range(len(header))]
    return pa.Table.from_arrays(arrays, names=header)


def _cell(value: Any) -> str:
    """A cell's text as a csv of the same table would have it."""
    return value if isinstance(value, str) else repr(value)


# -- what the columns are


def _mode(header: list[str]) -> Mode:
    """The mode a header belongs to. Raises UnreadableInput where it is no compare result's."""
    names = set(header)
    needed: tuple[str, ...]
    if columns.CHECKSUMS[0] in names:
        mode, needed = Mode.MD5, columns.CHECKSUMS
    elif columns.TENSOR_METRICS[0] in names:
        mode, needed = Mode.TENSOR, columns.TENSOR_METRICS + Mode.TENSOR.statistics
    elif columns.DIFFERENCES[0] in names:
        mode, needed = Mode.STATISTICS, Mode.STATISTICS.metrics + Mode.STATISTICS.statistics
    else:
        shown = ", ".join(header[:3])[:80]
        raise UnreadableInput(f"has no header of a compare result; it begins with: {shown!r}")
    for name in (columns.NPU_NAME, columns.BENCH_NAME, *needed):
        if name not in names:
            raise UnreadableInput(f"lacks the column '{name}' of {mode.value} mode.{near_miss(name, header)}")
    return mode


def partition_table(result: ResultTable) -> pa.Table:
    """The file's cells as a partition (see columns.py and model.py), without `excess`, which compare's rule adds.

    Columns that old versions lack are filled with `N/A`; columns no mode knows are left out.
    """
    height = result.cells.num_rows
    out: dict[str, pa.Array] = {}
    for name in result.mode.header:
        if name in result.cells.column_names:
            column = cells.combined(result.cells.column(name))
        else:
            filler = "" if name in (columns.RESULT, columns.ERR_MESSAGE) else "N/A"
            column = pa.repeat(pa.scalar(filler), height)
        if name in result.mode.numeric:
            out[name], out[name + TEXT_SUFFIX] = cells.split(column)
        else:
            out[name] = column
    out["op"], out["role"] = _ops_and_roles(out[columns.NPU_NAME])
    out["parent"] = pa.nulls(height, pa.string())
    return pa.table(out)


def load(file: ResultFile, partition: Path, *, tolerance: float | None = None) -> RankComparison | RankFailure:
    """Read one compare result, write its partition, and count what is in it.

    `tolerance` replaces the one that each item's dtype gives (see divergence.py).
    """
    try:
        result = read(file.path)
    except UnreadableInput as error:
        return RankFailure(file.step, file.rank, file.path, str(error))
    table = divergence.with_excess(partition_table(result), result.mode, tolerance=tolerance)
    matched = int(pc.sum(matched_mask(table)).as_py() or 0)
    if matched == 0:
        example = table.column(columns.NPU_NAME)[0].as_py()
        reason = f"none of its {table.num_rows} rows has a bench row (the first is {example}): two different models?"
        return RankFailure(file.step, file.rank, file.path, reason)
    try:
        partition.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, partition, compression="zstd", compression_level=1, row_group_size=merge.ROW_GROUP)
    except OSError as error:
        return RankFailure(file.step, file.rank, file.path, f"its table cannot be written: {error}")
    words = pc.value_counts(cells.combined(table.column(columns.RESULT))).to_pylist()
    return RankComparison(
        step=file.step,
        rank=file.rank,
        mode=result.mode,
        partition=partition,
        source=file.path,
        rows=table.num_rows,
        matched=matched,
        results={entry["values"]: entry["counts"] for entry in words},
        findings=divergence.findings(table),
        first=divergence.first(table, result.mode, step=file.step, rank=file.rank),
        notes=result.notes,
    )


def matched_mask(table: pa.Table) -> pa.Array:
    """True for rows that have a bench row."""
    bench = pc.utf8_trim_whitespace(cells.combined(table.column(columns.BENCH_NAME)))
    return pc.invert(pc.is_in(bench, value_set=pa.array(["N/A", "", "nan", "None"])))


def _ops_and_roles(names: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Op and role of every item; a name of no known shape is its own op, with an empty role."""
    ops: list[str] = []
    roles: list[str] = []
    for name in names.to_pylist():
        try:
            item = ItemName.parse(name)
        except ValueError:
            ops.append(name)
            roles.append("")
        else:
            ops.append(item.op)
            roles.append(item.role.value)
    return pa.array(ops, pa.string()), pa.array(roles, pa.string())
