"""A writer of large plain xlsx workbooks: Arrow columns in, no Python object per cell.

Merged tables of 8 ranks x 70,000 items x 9 metrics are 5.7 million cells. xlsxwriter with constant_memory wrote
126,000 of them per second and core where this one writes 1,000,000 (the rows' XML is put together by Arrow's string
kernels), so 6 s instead of 45. It knows sheets, numbers, booleans and texts, a frozen header and nothing else, and
follows ECMA-376 part 1: cells and rows need no `r` attribute; texts are inline strings, so no table of shared strings.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from xml.sax.saxutils import escape, quoteattr

import pyarrow as pa
import pyarrow.compute as pc

from aggregator import cells

# Excel holds 1,048,576 rows; msprobe starts another sheet above this many.
MAX_ROWS = 1_048_500
MAX_COLUMNS = 16_384
_MAX_SHEET_NAME = 31

# Level 1 shrinks these sheets about tenfold; level 6 takes three times as long for a fifth less.
_COMPRESSION = 1

# Characters that XML 1.0 cannot hold, even escaped.
_NOT_XML = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x{fffe}\x{ffff}]"

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"

_STYLES = (
    f'{_HEAD}<styleSheet xmlns="{_MAIN}"><fonts count="2"><font><sz val="11"/><name val="Calibri"/></font>'
    '<font><b/><sz val="11"/><name val="Calibri"/></font></fonts>'
    '<fills count="2"><fill><patternFill patternType="none"/></fill><fill><patternFill patternType="gray125"/></fill>'
    '</fills><borders count="1"><border/></borders><cellStyleXfs count="1"><xf/></cellStyleXfs>'
    '<cellXfs count="2"><xf/><xf fontId="1" applyFont="1"/></cellXfs>'
    # Readers warn where no style is called Normal.
    '<cellStyles count="1"><cellStyle name="Normal" xfId="0" builtinId="0"/></cellStyles></styleSheet>'
)


class Workbook:
    """Writes sheets one after the other into `path`; the file appears under its name only when it is whole.

    Use: `begin_sheet`, `write_rows` any number of times, `end_sheet`, ..., `close`; `discard` instead after any error.
    Raises OSError as the disk does.
    """

    def __init__(self, path: Path, *, max_rows: int = MAX_ROWS) -> None:
        self.path = path
        self._max_rows = max_rows
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = self._temporary.open("wb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION)
        self._sheets: list[str] = []
        self._stream: IO[bytes] | None = None
        self._title = ""
        self._header: Sequence[str] = ()
        self._part = 1
        self._rows = 0

    def begin_sheet(self, title: str, header: Sequence[str]) -> None:
        """Open a sheet. Raises ValueError above 16,384 columns, which no workbook can hold."""
        if len(header) > MAX_COLUMNS:
            raise ValueError(f"a sheet holds {MAX_COLUMNS} columns, not {len(header)}")
        self._title, self._header, self._part = title, header, 1
        self._open(title)

    def write_rows(self, texts: Sequence[pa.Array], numbers: Sequence[pa.Array | None]) -> None:
        """Append rows. `texts` are the cells as shown, null for an empty cell; where `numbers` has a number the cell
        is a number, where the text is True or False a boolean, else a text."""
        height = len(texts[0])
        start = 0
        while start < height:
            if self._rows == self._max_rows:
                self._close_stream()
                self._part += 1
                self._open(f"{self._title} part_{self._part}"[-_MAX_SHEET_NAME:])
            count = min(height - start, self._max_rows - self._rows)
            self._write(
                [text.slice(start, count) for text in texts],
                [None if n is None else n.slice(start, count) for n in numbers],
            )
            self._rows += count
            start += count

    def end_sheet(self) -> None:
        self._close_stream()

    def close(self) -> None:
        """Write what binds the sheets together and give the file its name; nothing is left of it after an error."""
        try:
            self._close_stream()
            if not self._sheets:
                self.begin_sheet("empty", [])
                self._close_stream()
            for name, text in self._binding().items():
                self._zip.writestr(name, text)
            self._zip.close()
            self._file.close()
            self._temporary.replace(self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Give up: the temporary file is removed, whatever state the archive is in. Never raises."""
        with contextlib.suppress(Exception):
            if self._stream is not None:
                self._stream.close()
        # An archive without a file has nothing left to write when it is collected, on a disk that is still full.
        self._zip.fp = None
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    # -- inside

    def _open(self, title: str) -> None:
        self._sheets.append(title[:_MAX_SHEET_NAME])
        self._rows = 0
        # force_zip64: a sheet's size is not known before it is written.
        self._stream = self._zip.open(f"xl/worksheets/sheet{len(self._sheets)}.xml", "w", force_zip64=True)
        header = "".join(f'<c s="1" t="inlineStr"><is><t>{escape(name)}</t></is></c>' for name in self._header)
        self._stream.write(
            (
                f'{_HEAD}<worksheet xmlns="{_MAIN}"><sheetViews><sheetView workbookViewId="0">'
                '<pane xSplit="1" ySplit="1" topLeftCell="B2" activePane="bottomRight" state="frozen"/></sheetView>'
                '</sheetViews><cols><col min="1" max="1" width="60" customWidth="1"/>'
                f'<col min="2" max="{max(2, len(self._header))}" width="22" customWidth="1"/></cols>'
                f"<sheetData><row>{header}</row>"
            ).encode()
        )

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.write(b"</sheetData></worksheet>")
            self._stream.close()
            self._stream = None

    def _write(self, texts: list[pa.Array], numbers: list[pa.Array | None]) -> None:
        assert self._stream is not None, "begin_sheet comes first"
        xml = [_cell_xml(text, number) for text, number in zip(texts, numbers, strict=True)]
        self._stream.write(cells.text_bytes(pc.binary_join_element_wise("<row>", *xml, "</row>", "")))

    def _binding(self) -> dict[str, str]:
        count = range(1, len(self._sheets) + 1)
        sheets = "".join(
            f'<sheet name={quoteattr(title)} sheetId="{i}" r:id="rId{i}"/>'
            for i, title in zip(count, self._sheets, strict=True)
        )
        relations = "".join(
            f'<Relationship Id="rId{i}" Type="{_OFFICE}/worksheet" Target="worksheets/sheet{i}.xml"/>' for i in count
        )
        parts = "".join(
            f'<Override PartName="/xl/worksheets/sheet{i}.xml" ContentType="{_TYPE}.worksheet+xml"/>' for i in count
        )
        return {
            "[Content_Types].xml": (
                f'{_HEAD}<Types xmlns="{_PACKAGE}/content-types">'
                '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
                '<Default Extension="xml" ContentType="application/xml"/>'
                f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPE}.sheet.main+xml"/>'
                f'<Override PartName="/xl/styles.xml" ContentType="{_TYPE}.styles+xml"/>{parts}</Types>'
            ),
            "_rels/.rels": (
                f'{_HEAD}<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="rId1" '
                f'Type="{_OFFICE}/officeDocument" Target="xl/workbook.xml"/></Relationships>'
            ),
            "xl/workbook.xml": (
                f'{_HEAD}<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>{sheets}</sheets></workbook>'
            ),
            "xl/_rels/workbook.xml.rels": (
                f'{_HEAD}<Relationships xmlns="{_PACKAGE}/relationships">{relations}'
                f'<Relationship Id="rId{len(self._sheets) + 1}" Type="{_OFFICE}/styles" Target="styles.xml"/>'
                "</Relationships>"
            ),
            "xl/styles.xml": _STYLES,
        }


def _cell_xml(text: pa.Array, number: pa.Array | None) -> pa.Array:
    """One column's `<c>` elements, without nulls."""
    shown = pc.fill_null(text, "")
    plain = _text_xml(shown)
    plain = pc.if_else(pc.is_valid(text), plain, "<c/>")
    if number is None or number.null_count == len(number):
        return plain
    as_number = pc.binary_join_element_wise("<c><v>", shown, "</v></c>", "")
    if number.null_count == 0:
        return as_number
    return pc.if_else(pc.is_valid(number), as_number, plain)


def _text_xml(text: pa.Array) -> pa.Array:
    escaped = text
    # Scanning for a character is far cheaper than replacing it, and few columns hold any of these.
    if pc.any(pc.match_substring_regex(text, r"[&<>]")).as_py():
        for raw, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            escaped = pc.replace_substring(escaped, raw, safe)
    if pc.any(pc.match_substring_regex(escaped, _NOT_XML)).as_py():
        escaped = pc.replace_substring_regex(escaped, _NOT_XML, "?")
    inline = pc.binary_join_element_wise('<c t="inlineStr"><is><t xml:space="preserve">', escaped, "</t></is></c>", "")
    is_true, is_false = pc.equal(text, "True"), pc.equal(text, "False")
    inline = pc.if_else(is_true, '<c t="b"><v>1</v></c>', inline)
    return pc.if_else(is_false, '<c t="b"><v>0</v></c>', inline)
