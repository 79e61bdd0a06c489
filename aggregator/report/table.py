"""The merged tables as files: parquet, csv and msprobe's workbook. All three take the same blocks, as they come."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import cells, columns, merge
from aggregator.columns import TEXT_SUFFIX
from aggregator.merge import Block, MergePlan
from aggregator.report.workbook import Workbook


class Format(str, Enum):
    """What merged tables are written as."""

    CSV = "csv"
    XLSX = "xlsx"
    PARQUET = "parquet"


class BlockWriter(Protocol):
    """Takes the blocks of one metric from the first row to the last."""

    needs_text: bool

    def write(self, block: Block, shown: Sequence[pa.Array]) -> None:
        """`shown` are the block's cells as texts, a column per rank; empty where no writer needs texts."""
        ...

    def close(self) -> None: ...


def metric_file(metric: str) -> str:
    """A metric's file name without its suffix."""
    return metric.replace(" ", "_")


def workbook_name(stamp: str) -> str:
    """msprobe's name of a merged workbook."""
    return f"multi_ranks_compare_merge_{stamp}.xlsx"


def write_merged(
    plan: MergePlan, metrics: Sequence[str], folder: Path, stamp: str, formats: frozenset[Format]
) -> tuple[Path, ...]:
    """Write one step's merged tables below `folder` and return the files. Raises OSError.

    The workbook holds one sheet per metric; csv and parquet files, one per metric, lie in `folder/merged`.
    """
    written: list[Path] = []
    tables = folder / "merged"
    if formats & {Format.CSV, Format.PARQUET}:
        tables.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    book = Workbook(folder / workbook_name(stamp)) if Format.XLSX in formats else None
    try:
        for metric in metrics:
            writers: list[BlockWriter] = []
            if Format.PARQUET in formats:
                writers.append(_Parquet(tables / f"{metric_file(metric)}.parquet", written))
            if Format.CSV in formats:
                writers.append(_Csv(tables / f"{metric_file(metric)}.csv", written))
            if book is not None:
                writers.append(_Sheet(book, metric))
            _write_metric(plan, metric, writers)
    except BaseException:
        if book is not None:
            book.discard()
        raise
    if book is not None:
        book.close()
        written.insert(0, book.path)
    return tuple(written)


def _write_metric(plan: MergePlan, metric: str, writers: Sequence[BlockWriter]) -> None:
    needs_text = any(writer.needs_text for writer in writers)
    with contextlib.ExitStack() as closing:
        for writer in writers:
            closing.callback(writer.close)
        for block in merge.blocks(plan, metric):
            # Texts are half the cost of a table; parquet needs none.
            shown = [c.shown(percentage=block.percentage) for c in block.columns] if needs_text else []
            for writer in writers:
                writer.write(block, shown)


class _Parquet:
    """Per rank the number, and beside it the text where the cell is none."""

    needs_text = False

    def __init__(self, path: Path, written: list[Path]) -> None:
        self._path = path
        self._writer: Any = None
        written.append(path)

    def write(self, block: Block, shown: Sequence[pa.Array]) -> None:
        out: dict[str, pa.Array] = {columns.NPU_NAME: block.names}
        for column in block.columns:
            out[column.label] = column.numbers
            out[column.label + TEXT_SUFFIX] = column.texts
        table = pa.table(out)
        if self._writer is None:
            # Names repeat in every file and are long; zstd at its lowest level costs less time than it saves in writes.
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd", compression_level=1)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Csv:
    """The cells as msprobe's workbook shows them: UTF-8, no byte order mark, quotes only where a cell needs them."""

    needs_text = True

    def __init__(self, path: Path, written: list[Path]) -> None:
        self._stream = path.open("wb")
        self._begun = False
        written.append(path)

    def write(self, block: Block, shown: Sequence[pa.Array]) -> None:
        if not self._begun:
            labels = [column.label for column in block.columns]
            self._stream.write((",".join([columns.NPU_NAME, *labels]) + "\n").encode())
            self._begun = True
        line = [_csv_cells(column) for column in (block.names, *shown)]
        joined = pc.binary_join_element_wise(*line, ",") if len(line) > 1 else line[0]
        self._stream.write(cells.text_bytes(pc.binary_join_element_wise(joined, "\n", "")))

    def close(self) -> None:
        self._stream.close()


def _csv_cells(shown: pa.Array) -> pa.Array:
    """Arrow's own writer quotes every text; the field's csv files quote only what must be."""
    filled = pc.fill_null(shown, "")
    special = pc.match_substring_regex(filled, '[,"\r\n]')
    if not pc.any(special).as_py():
        return filled
    doubled = pc.replace_substring(filled, '"', '""')
    return pc.if_else(special, pc.binary_join_element_wise('"', doubled, '"', ""), filled)


class _Sheet:
    """One sheet of the workbook."""

    needs_text = True

    def __init__(self, book: Workbook, metric: str) -> None:
        self._book = book
        self._metric = metric
        self._begun = False

    def write(self, block: Block, shown: Sequence[pa.Array]) -> None:
        if not self._begun:
            self._book.begin_sheet(self._metric, [columns.NPU_NAME, *(c.label for c in block.columns)])
            self._begun = True
        # A percentage is a text in msprobe's workbooks, its sign included.
        numbers = [None if block.percentage else c.numbers for c in block.columns]
        self._book.write_rows([block.names, *shown], [None, *numbers])

    def close(self) -> None:
        if self._begun:
            self._book.end_sheet()
