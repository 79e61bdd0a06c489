"""msprobe's compare results merge to the same cells as its own merged workbooks, sheet by sheet.

What counts as the same cell, strictly:
- both empty; both the same truth value;
- both numbers that are the same at 16 significant digits, which is what msprobe's workbooks hold (its xlsx writer
  writes %.16G; its csv files and our tables hold all 17). A number written as text ('0', '1e-07') is that number:
  msprobe's merge writes a whole column as text as soon as one cell of it is one;
- percentages with the same number before the sign; zero with and without it ('0', '0.0%'), since msprobe's versions
  differ there;
- `NPU:a  Bench:b` with the same a and the same b, each as a number or else as a text;
- any other text letter by letter.
Row order is left aside: msprobe sorts names as text, we keep call order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import python_calamine

from aggregator import merge, merge_config, results
from aggregator.merge import RankTable
from aggregator.report.table import Format, workbook_name, write_merged

CASES = [
    ("compare/stat_L1_csv", "merge/merge_all.yaml", "merge/stat_all"),
    ("compare/stat_L1_xlsx", "merge/merge_all.yaml", "merge/stat_all"),
    ("compare/stat_L1_csv", "merge/merge_idx.yaml", "merge/stat_idx"),
    ("compare/stat_L1_xlsx", "merge/merge_idx.yaml", "merge/stat_idx"),
    ("compare/stat_L1_csv", "merge/merge_wide.yaml", "merge/stat_wide"),
    ("compare/stat_L1_xlsx", "merge/merge_wide.yaml", "merge/stat_wide"),
    ("compare/nan_stat_csv", "merge/merge_all.yaml", "merge/nan_stat"),
    ("compare/nan_stat_xlsx", "merge/merge_all.yaml", "merge/nan_stat"),
    ("compare/tensor_L1_csv", "merge/merge_all.yaml", "merge/tensor_all"),
    ("compare/tensor_L1_xlsx", "merge/merge_all.yaml", "merge/tensor_all"),
    ("compare/v1.2.2_stat_L1_xlsx", "merge/merge_all.yaml", "merge/v1.2.2_stat_all"),
    ("tiny_tensor/cmp_csv", "tiny_tensor/merge_tiny.yaml", "tiny_tensor/merged"),
    ("tiny_tensor/cmp_xlsx", "tiny_tensor/merge_tiny.yaml", "tiny_tensor/merged"),
]

Sheets = dict[str, dict[str, list[Any]]]


def _sheets(path: Path) -> Sheets:
    """Sheet -> item -> its cells by rank; the header stands under the item ''."""
    book = python_calamine.CalamineWorkbook.from_path(str(path))
    out: Sheets = {}
    for name in book.sheet_names:
        header, *rows = book.get_sheet_by_name(name).to_python()
        out[name] = {"": header, **{str(row[0]): row[1:] for row in rows}}
        assert len(out[name]) == len(rows) + 1, f"{path}: an item stands twice in sheet {name}"
    return out


def _normal(cell: Any) -> Any:
    """A form in which the same cells, as the head of this file defines them, are equal."""
    if isinstance(cell, bool):
        return cell
    if isinstance(cell, (int, float)):
        return _16_digits(float(cell))
    text = str(cell)
    match = re.fullmatch(r"NPU:(.*)  Bench:(.*)", text)
    if match:
        return ("NPU", _normal(match[1]), "Bench", _normal(match[2]))
    sign = "%" if text.endswith("%") else ""
    try:
        number = _16_digits(float(text.removesuffix("%")))
    except ValueError:
        return text
    if number != number or number in (float("inf"), float("-inf")):
        return text.strip()
    return number if number == 0 else (number, sign) if sign else number


def _16_digits(number: float) -> float:
    return float(f"{number:.16G}")


def _merge(source: Path, config: Path, out: Path) -> Path:
    ranks = []
    for path in sorted(source.iterdir()):
        match = re.search(r"_rank(\d+)", path.name)
        assert match is not None
        result = results.read(path)
        partition = out / f"{match[0]}.parquet"
        pq.write_table(results.partition_table(result), partition)
        ranks.append(RankTable(int(match[1]), partition))
        mode = result.mode
    chosen = merge_config.load(config)
    metrics = merge_config.chosen(chosen, mode)
    write_merged(merge.plan(mode, ranks, chosen), metrics, out, "1", frozenset(Format))
    return out / workbook_name("1")


@pytest.mark.parametrize(("source", "config", "expected"), CASES, ids=[f"{s}-{Path(c).stem}" for s, c, _ in CASES])
def test_same_cells_as_msprobes_workbook(shared: Path, tmp_path: Path, source: str, config: str, expected: str) -> None:
    interop = shared / "interop"
    ours = _sheets(_merge(interop / source, interop / config, tmp_path))
    (theirs_path,) = (interop / expected).glob("*.xlsx")
    theirs = _sheets(theirs_path)
    # 1.2.2 had no Requires_grad columns and so no such sheet.
    if "Requires_grad Consistent" not in theirs:
        ours.pop("Requires_grad Consistent", None)
    assert list(ours) == list(theirs), "sheets and their order"
    compared = 0
    for sheet, rows in theirs.items():
        assert set(ours[sheet]) == set(rows), sheet
        for item, cells in rows.items():
            assert [_normal(c) for c in ours[sheet][item]] == [_normal(c) for c in cells], (sheet, item)
            compared += len(cells)
    assert compared > 50


def test_rows_keep_call_order(shared: Path, tmp_path: Path) -> None:
    interop = shared / "interop"
    source = interop / "compare/stat_L1_csv"
    _merge(source, interop / "merge/merge_all.yaml", tmp_path)
    names = pq.read_table(tmp_path / "merged/Max_diff.parquet")["NPU Name"].to_pylist()
    first = next(source.glob("*rank0*"))
    in_file = [line.split(",")[0] for line in first.read_text().splitlines()]
    assert names == [name for name in in_file if name in set(names)]
