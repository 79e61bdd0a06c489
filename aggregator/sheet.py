"""A partition -> compare_result csv or xlsx in msprobe's columns and spelling.

A csv's cells are put together as whole Arrow columns, whose joined text *is* the file; no value passes through Python
one by one (70,000 rows, 28 columns: 0.5 s).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator.columns import (
    BENCH_STATISTICS,
    DIFFERENCES,
    GRAD_CONSISTENT,
    NPU_STATISTICS,
    RELATIVE_ERRORS,
    TEXT_SUFFIX,
    Mode,
)

if TYPE_CHECKING:
    import numpy.typing as npt

INTEGERS = "integers"
"""Column of ours: bit i is set where the i-th column of NPU_STATISTICS + BENCH_STATISTICS is written as an integer."""

# Arrow writes these as Python's repr does, but for the `.0` of integral ones; outside, exponents are spelled otherwise.
_PLAIN_LEAST, _PLAIN_MOST = 1e-4, 1e10

# Rows above this number do not fit a worksheet; msprobe splits there too.
SHEET_ROWS = 1_048_500


def write_csv(table: pa.Table, mode: Mode, path: Path, *, with_stack: bool = True) -> None:
    """Write a partition as csv, UTF-8 without BOM. Raises OSError."""
    with path.open("wb") as file:
        file.write((",".join(_header(mode, with_stack)) + "\n").encode())
        for start in range(0, table.num_rows, _CSV_ROWS):
            file.write(_csv_bytes(table.slice(start, _CSV_ROWS).combine_chunks(), mode, with_stack))


_CSV_ROWS = 16_384  # rows turned into text at once: 10 MB with stacks


def write_xlsx(table: pa.Table, mode: Mode, path: Path, *, with_stack: bool = True) -> None:
    """Write a partition as a workbook: metrics as text, as msprobe has them, statistics as numbers. Raises OSError."""
    import xlsxwriter

    header = _header(mode, with_stack)
    many = table.num_rows > SHEET_ROWS
    book = xlsxwriter.Workbook(
        str(path),
        {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False},
    )
    try:
        for part, start in enumerate(range(0, max(table.num_rows, 1), SHEET_ROWS)):
            sheet = book.add_worksheet(f"part_{part}" if many else "Sheet1")
            sheet.write_row(0, 0, header)
            rows = table.slice(start, SHEET_ROWS)
            for chunk_start in range(0, rows.num_rows, _CSV_ROWS):
                chunk = rows.slice(chunk_start, _CSV_ROWS).combine_chunks()
                texts = cells(chunk, mode)
                columns = [_xlsx_column(chunk, name, texts[name], mode) for name in header]
                for i, row in enumerate(zip(*columns, strict=True), chunk_start + 1):
                    for j, value in enumerate(row):
                        if isinstance(value, str):
                            sheet.write_string(i, j, value)
                        elif isinstance(value, bool):
                            sheet.write_boolean(i, j, value)
                        else:
                            sheet.write_number(i, j, value)
    finally:
        book.close()


def _xlsx_column(chunk: pa.Table, name: str, texts: pa.Array, mode: Mode) -> list[Any]:
    """Cells of a workbook: texts, but numbers and truth values in the statistics, and no blank before an infinity."""
    words: list[str] = texts.to_pylist()
    if name == GRAD_CONSISTENT:
        return [word == "True" for word in words]
    if name not in mode.statistics and (mode is not Mode.TENSOR or name not in mode.metrics):
        return list(words)
    numbers = chunk[name].to_pylist()
    dtypes = chunk["NPU Dtype"].to_pylist()
    return [_xlsx_cell(*cell) for cell in zip(numbers, words, dtypes, strict=True)]


# Bare names of Python types: keywords that name ranks, which msprobe writes as texts throughout.
_BARE_TYPES = frozenset({"int", "float", "bool", "str"})


def _xlsx_cell(number: float | None, word: str, dtype: str) -> Any:
    if number is not None and dtype not in _BARE_TYPES:
        return number
    if dtype == "<class 'bool'>" and word in ("True", "False"):
        return word == "True"
    return word.strip() if word.strip() in ("inf", "-inf") else word


def _header(mode: Mode, with_stack: bool) -> list[str]:
    return [name for name in mode.header if with_stack or name != "NPU_Stack_Info"]


def _csv_bytes(chunk: pa.Table, mode: Mode, with_stack: bool) -> bytes:
    if not chunk.num_rows:
        return b""
    texts = cells(chunk, mode, _quoted)
    parts = [texts[name] for name in _header(mode, with_stack)]
    parts[-1] = pc.binary_join_element_wise(parts[-1], "\n", "")
    # Large strings: a chunk with long stacks may pass 2 GB of text.
    joined = pc.binary_join_element_wise(
        *(part.cast(pa.large_string()) for part in parts), pa.scalar(",", pa.large_string())
    )
    length = int(pc.sum(pc.binary_length(joined)).as_py())
    text: bytes = joined.buffers()[2].slice(0, length).to_pybytes()
    return text


def _quoted(texts: pa.Array) -> pa.Array:
    """Cells as csv wants them: in quotes where they hold a comma, a quote or a line end."""
    # Most columns repeat few texts, or are null; names, which do not, are too short for this to cost much.
    coded = texts.dictionary_encode()
    words = coded.dictionary
    needs = pc.match_substring_regex(words, r'[,"\r\n]')
    if not pc.any(needs).as_py():
        return texts
    wrapped = pc.binary_join_element_wise('"', pc.replace_substring(words, '"', '""'), '"', "")
    return pc.if_else(needs, wrapped, words).take(coded.indices)


def _plain(texts: pa.Array) -> pa.Array:
    return texts


def cells(table: pa.Table, mode: Mode, spelled: Callable[[pa.Array], pa.Array] = _plain) -> dict[str, pa.Array]:
    """All cells of a partition as the texts that a csv of msprobe shows. Chunks must have been combined.

    `spelled` is applied to texts; numbers need no quotes.
    """
    height = table.num_rows
    integers = table[INTEGERS].to_numpy() if INTEGERS in table.column_names else np.zeros(height, np.uint8)
    statistics = NPU_STATISTICS + BENCH_STATISTICS
    out: dict[str, pa.Array] = {}
    for name in mode.header:
        if name not in mode.numeric:
            column = _one(table[name]) if name in table.column_names else pa.repeat("", height)
            out[name] = spelled(column.fill_null(""))
            continue
        if name in statistics:
            is_integer = (integers >> statistics.index(name)) & 1 == 1
        elif mode is Mode.STATISTICS:
            is_integer = _equal_as_written(table, name, integers)
        else:
            is_integer = np.zeros(height, bool)
        numbers = number_texts(_one(table[name]), is_integer)
        if mode.is_percentage(name):
            with_sign = pc.binary_join_element_wise(numbers, "%", "")
            numbers = pc.if_else(pa.array(is_integer), numbers, with_sign)
        # A text beside a number holds the digits of a large integer.
        out[name] = pc.coalesce(spelled(_one(table[name + TEXT_SUFFIX])), numbers, "")
    return out


def _equal_as_written(table: pa.Table, name: str, integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """True where a metric is 0 because both cells show the same text: msprobe writes `0` there, else `0.0`."""
    i = (DIFFERENCES if name in DIFFERENCES else RELATIVE_ERRORS).index(name)
    numbers = table[name].to_numpy()
    zero = (numbers == 0.0) & ~np.signbit(numbers)
    same_kind = ((integers >> i) & 1) == ((integers >> (i + 4)) & 1)
    a = _one(table[NPU_STATISTICS[i] + TEXT_SUFFIX]).fill_null("")
    b = _one(table[BENCH_STATISTICS[i] + TEXT_SUFFIX]).fill_null("")
    # Of two zeros with other signs the difference is 0.0 or -0.0.
    signs = [
        np.signbit(_one(table[names[i]]).to_numpy(zero_copy_only=False)) for names in (NPU_STATISTICS, BENCH_STATISTICS)
    ]
    same_text = pc.equal(a, b).to_numpy(zero_copy_only=False)
    found: npt.NDArray[np.bool_] = zero & same_kind & (signs[0] == signs[1]) & same_text
    return found


def number_texts(numbers: pa.Array, is_integer: npt.NDArray[np.bool_]) -> pa.Array:
    """Numbers as Python's repr writes them, those of `is_integer` without `.0`; null stays null."""
    values = numbers.to_numpy(zero_copy_only=False)
    shown = numbers.cast(pa.string())
    integral = values == np.rint(values)
    bare = pa.array(integral & ~is_integer)
    shown = pc.if_else(bare, pc.binary_join_element_wise(shown, ".0", ""), shown)
    size = np.abs(values)
    with_exponent = (values != 0.0) & ((size < _PLAIN_LEAST) | (size >= _PLAIN_MOST))
    if not with_exponent.any():
        return shown
    # Arrow writes an exponent of one digit where Python writes two ...
    short = (size >= 1e-10) & (size < 1e-6)
    shown = _replaced(shown, short, lambda texts: pc.replace_substring_regex(texts, r"(e-)(\d)$", r"\10\2"))
    # ... and sets in at other sizes; and large integers have all their digits.
    other = ((size >= 1e-6) & (size < _PLAIN_LEAST)) | ((size >= _PLAIN_MOST) & (size < 1e16))
    odd = other | (with_exponent & integral)
    spelled = [
        str(int(value)) if whole else repr(value)
        for value, whole in zip(values[odd].tolist(), is_integer[odd].tolist(), strict=True)
    ]
    return _replaced(shown, odd, lambda _: pa.array(spelled, pa.string()))


def _replaced(texts: pa.Array, where: npt.NDArray[np.bool_], replacement: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """The texts, those of `where` put through a function: regular expressions over all rows would cost most."""
    if not where.any():
        return texts
    mask = pa.array(where)
    return pc.replace_with_mask(texts, mask, replacement(texts.filter(mask)))


def _one(column: Any) -> pa.Array:

    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
