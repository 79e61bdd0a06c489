"""Cells of a table: texts of a file <-> the pair of number and text that a partition keeps (see columns.py).

Everything here works on whole Arrow columns; no value passes through Python one by one.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# What counts as a plain number: decimal digits, an exponent, one percent sign. `inf`, `Nan` and `1_000` do not.
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?$"

# Arrow writes 1e-7 where Python, and so every msprobe file, has 1e-07: the same number, another text.
_SHORT_EXPONENT = r"([eE][+-])(\d)$"


def split(cells: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Texts of a file's column -> (float64, null where no number; string, null where a number).

    A `%` sign is dropped (the number stays a percentage); blanks around a cell are no part of it.
    """
    trimmed = pc.utf8_trim_whitespace(cells)
    is_number = pc.match_substring_regex(trimmed, _NUMBER)
    null = pa.scalar(None, pa.string())
    digits = pc.utf8_rtrim(pc.if_else(is_number, trimmed, null), "%")
    numbers = pc.cast(digits, pa.float64())
    # 1e999 reads as infinity: a text then, as every infinity is.
    finite = pc.fill_null(pc.is_finite(numbers), False)
    return (
        pc.if_else(finite, numbers, pa.scalar(None, pa.float64())),
        pc.if_else(finite, null, trimmed),
    )


def number_text(numbers: pa.Array) -> pa.Array:
    """Shortest text that reads back as the same float64, an integral one without `.0` (`0`, `0.1`, `1e-7`)."""
    return numbers.cast(pa.string())


def python_exponents(texts: pa.Array) -> pa.Array:
    """`1e-7` -> `1e-07`, as Python writes numbers inside a text. Costs more than all the rest of a column's way."""
    # \\1 is followed by a literal 0.
    return pc.replace_substring_regex(texts, _SHORT_EXPONENT, r"\10\2")


def join(numbers: pa.Array, texts: pa.Array, *, percentage: bool = False) -> pa.Array:
    """The cells as a file shows them; null where there is neither number nor text.

    A percentage carries its sign except for 0, as in the field's files.
    """
    shown = number_text(numbers)
    if percentage:
        signed = pc.binary_join_element_wise(shown, "%", "")
        shown = pc.if_else(pc.equal(numbers, 0.0), shown, signed)
    return pc.coalesce(shown, pc.utf8_trim_whitespace(texts))


def text_bytes(texts: pa.Array) -> memoryview:
    """The texts end to end as UTF-8, without a copy. `texts` must have no null.

    Without nulls the data buffer of a string array is exactly that.
    """
    assert texts.null_count == 0
    if len(texts) == 0:
        return memoryview(b"")
    wide = pa.types.is_large_string(texts.type)
    offsets = memoryview(texts.buffers()[1]).cast("q" if wide else "i")
    first, last = offsets[texts.offset], offsets[texts.offset + len(texts)]
    return memoryview(texts.buffers()[2])[first:last]


def combined(column: Any) -> pa.Array:
    """One Array of a ChunkedArray (a partition's column is small enough to be one)."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return column
