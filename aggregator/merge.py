"""Merge the ranks of one step: per metric a table with a row per item and a column per rank.

The rows are joined outer by item name and keep call order. Nothing here holds more than one metric, and of that no
more than `CELLS_PER_BLOCK` cells at a time: a block is a range of rows over all ranks, which the writers of
`report.table` take one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import cells, columns, merge_config, resolve
from aggregator.columns import TEXT_SUFFIX, Mode
from aggregator.merge_config import MergeConfig
from msprobe_launch.errors import NothingUsable, near_miss

# 2 MB of numbers; as many texts again in the worst case, some 100 bytes each while they are put together.
CELLS_PER_BLOCK = 300_000

# With very many ranks a block still has this many rows, a fourth of a partition's row group: opening 1,024 files for a
# few hundred rows each would take longer than all the rest.
LEAST_ROWS = 4096

ROW_GROUP = 16_384
"""Rows of a row group in the partitions we write: what a block does not touch is then not read."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankTable:
    """One rank's partition as a column of the merged tables."""

    rank: int | None
    partition: Path

    @property
    def label(self) -> str:
        return "rank" if self.rank is None else f"rank{self.rank}"


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Which row of which partition becomes which row of the merged tables.

    `names` are the items in merged order. `rows[i]` gives for each of them the row in the partition of `ranks[i]`, or
    -1 where the rank lacks the item; ranks with the same items share one array.
    """

    mode: Mode
    ranks: tuple[RankTable, ...]
    names: pa.Array
    rows: tuple[Rows, ...]
    notes: tuple[str, ...] = ()

    @property
    def height(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Column:
    """One rank's cells of a block: null number and null text is an empty cell (the rank lacks the item)."""

    label: str
    numbers: pa.Array
    texts: pa.Array

    def shown(self, *, percentage: bool) -> pa.Array:
        """The cells as texts."""
        return cells.join(self.numbers, self.texts, percentage=percentage)


@dataclass(frozen=True, slots=True)
class Block:
    """A range of rows of one merged metric over all ranks."""

    metric: str
    start: int
    names: pa.Array
    columns: tuple[Column, ...]
    percentage: bool


def plan(mode: Mode, ranks: Sequence[RankTable], config: MergeConfig | None = None) -> MergePlan:
    """Join the ranks' items. Ranks are taken in numeric order, so the order they are given in does not matter.

    Raises NothingUsable where the configuration's `api` leaves no item.
    """
    config = config or MergeConfig()
    ordered = sorted(ranks, key=lambda r: (r.rank is None, r.rank or 0, r.partition.name))
    names: pa.Array = pa.array([], pa.string())
    notes: list[str] = []
    # Ranks with the same items are one case: (their names, their row numbers) by content.
    cases: list[pa.Array] = []
    case_of: list[int] = []
    for rank in ordered:
        items = _read(rank.partition, [columns.NPU_NAME])[columns.NPU_NAME]
        found = next((i for i, known in enumerate(cases) if known.equals(items)), None)
        if found is None:
            distinct = pc.count_distinct(items).as_py()
            if distinct < len(items):
                notes.append(f"{rank.label}: {len(items) - distinct} rows repeat an item's name; the first one is kept")
            names = _join(names, items)
            cases.append(items)
            found = len(cases) - 1
        case_of.append(found)
    names, more = _filtered(names, config)
    by_case = [_positions(names, items) for items in cases]
    return MergePlan(mode, tuple(ordered), names, tuple(by_case[i] for i in case_of), tuple(notes) + more)


def _join(known: pa.Array, items: pa.Array) -> pa.Array:
    """Outer join of two orders: an item that is new stands behind the item it follows in its own rank."""
    items = pc.unique(items)
    if len(known) == 0:
        return items
    if known.equals(items):
        return known
    place = pc.fill_null(pc.index_in(items, value_set=known), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    is_new = place < 0
    # The last known item before each new one; np.maximum would jump back where two ranks order items differently.
    last_known = np.maximum.accumulate(np.where(is_new, -1, np.arange(len(items))))
    anchor = np.where(last_known < 0, -1, place[np.maximum(last_known, 0)])
    fresh = np.flatnonzero(is_new)
    # Known items have 0 behind their own place; new ones their order within their rank.
    anchors = np.concatenate([np.arange(len(known)), anchor[fresh]])
    behind = np.concatenate([np.zeros(len(known), np.int64), fresh + 1])
    order = np.lexsort((behind, anchors))
    both = pa.concat_arrays([known.cast(pa.string()), items.filter(pa.array(is_new))])
    return both.take(pa.array(order))


def _positions(names: pa.Array, items: pa.Array) -> Rows:
    """Row in `items` of each of `names`, -1 where there is none."""
    found = pc.index_in(names, value_set=items)
    return np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False), dtype=np.int64)


def _filtered(names: pa.Array, config: MergeConfig) -> tuple[pa.Array, tuple[str, ...]]:
    if not config.api:
        return names, ()
    keep = pa.array(np.zeros(len(names), dtype=bool))
    notes: list[str] = []
    for entry in config.api:
        hit = pc.match_substring(names, entry + ".")
        if not pc.any(hit).as_py():
            notes.append(f"api '{entry}': no item has it in its name.{_near_api(entry, names)}")
        keep = pc.or_(keep, hit)
    kept = names.filter(keep)
    if len(kept) == 0:
        raise NothingUsable("; ".join(notes), hint="Check `api` in the merge configuration, or leave it out.")
    return kept, tuple(notes)


def _near_api(entry: str, names: pa.Array) -> str:
    parts = entry.count(".") + 1
    pattern = r"^(?P<head>[^.]+" + r"\.[^.]+" * (parts - 1) + ")"
    heads = pc.struct_field(pc.extract_regex(names, pattern), "head")
    return near_miss(entry, [head for head in pc.unique(heads).to_pylist() if head])


# -- the cells


def blocks(plan: MergePlan, metric: str, *, rows_per_block: int | None = None) -> Iterator[Block]:
    """The merged table of one metric in ranges of rows, top to bottom; one empty block where there are no rows."""
    height = rows_per_block or max(LEAST_ROWS, CELLS_PER_BLOCK // max(1, len(plan.ranks)))
    percentage = plan.mode.is_percentage(metric)
    for start in range(0, max(1, plan.height), height):
        names = plan.names.slice(start, height)
        yield Block(
            metric,
            start,
            names,
            tuple(
                _column(plan.mode, rank, metric, rows[start : start + height])
                for rank, rows in zip(plan.ranks, plan.rows, strict=True)
            ),
            percentage,
        )


def _column(mode: Mode, rank: RankTable, metric: str, rows: Rows) -> Column:
    """One rank's cells of one metric, in merged rows, with the N/A rule applied."""
    present = rows[rows >= 0]
    first = int(present.min()) if len(present) else 0
    # The part of the partition that these rows lie in: nothing else of it is worked on.
    part = slice(first, int(present.max()) + 1 if len(present) else 0)
    if metric == merge_config.MD5:
        numbers, texts = _checksums(rank.partition, part)
    elif metric in mode.metrics:
        numbers, texts = _metric(mode, rank.partition, metric, part)
    elif metric in mode.numeric:
        both = _read(rank.partition, [metric, metric + TEXT_SUFFIX], part)
        numbers, texts = both[metric], both[metric + TEXT_SUFFIX]
    else:
        texts = _read(rank.partition, [metric], part)[metric]
        numbers = pa.nulls(len(texts), pa.float64())
    if len(present) == len(rows) == len(numbers) and bool(np.all(np.diff(rows) == 1)):
        return Column(rank.label, numbers, texts)
    index = pa.array(rows - first, mask=rows < 0)
    return Column(rank.label, numbers.take(index), texts.take(index))


def _metric(mode: Mode, partition: Path, metric: str, part: slice) -> tuple[pa.Array, pa.Array]:
    own = _read(partition, [metric, metric + TEXT_SUFFIX], part)
    numbers, texts = own[metric], own[metric + TEXT_SUFFIX]
    mask = resolve.needs_resolution(texts)
    if not pc.any(mask).as_py():
        return numbers, texts
    # Few rows of most partitions need their maxima, so these are cut out before they become texts.
    npu, bench = mode.statistics[0], mode.statistics[4]
    read = _read(partition, [npu, npu + TEXT_SUFFIX, bench, bench + TEXT_SUFFIX], part)
    maxima = {name: column.filter(mask) for name, column in read.items()}
    shown_npu = cells.join(maxima[npu], maxima[npu + TEXT_SUFFIX])
    shown_bench = cells.join(maxima[bench], maxima[bench + TEXT_SUFFIX])
    return numbers, resolve.resolve(texts, mask, shown_npu, shown_bench)


def _checksums(partition: Path, part: slice) -> tuple[pa.Array, pa.Array]:
    npu_name, bench_name = columns.CHECKSUMS
    both = _read(partition, [npu_name, bench_name], part)
    npu, bench = both[npu_name], both[bench_name]
    differ = pc.binary_join_element_wise("NPU:", npu, "  Bench:", bench, "")
    return pa.nulls(len(npu), pa.float64()), pc.if_else(pc.equal(npu, bench), npu, differ)


def numbers(partition: Path, name: str, part: slice = slice(None)) -> npt.NDArray[np.float64]:
    """A numeric column of a partition, or a range of its rows; NaN for null."""
    column = _read(partition, [name], part)[name]
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _read(partition: Path, names: list[str], part: slice = slice(None)) -> dict[str, pa.Array]:
    """Columns of a partition, or a range of rows of them, of which no other row group is read.

    Booleans become the texts `True` and `False`, dictionary columns plain ones.
    """
    with pq.ParquetFile(partition, memory_map=True) as file:
        start, stop, _ = part.indices(file.metadata.num_rows)
        groups: list[int] = []
        first_row = end = 0
        for i in range(file.metadata.num_row_groups):
            begin, end = end, end + file.metadata.row_group(i).num_rows
            if begin < stop and start < end:
                if not groups:
                    first_row = begin
                groups.append(i)
        table = file.read_row_groups(groups, columns=names)
    out: dict[str, pa.Array] = {}
    for name in names:
        column = cells.combined(table.column(name)).slice(start - first_row, max(0, stop - start))
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_boolean(column.type):
            column = pc.if_else(column, "True", "False")
        out[name] = column
    return out
