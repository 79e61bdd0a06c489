"""Dumps of the ranks that make one model -> the rows of one of them, and beside each row those of all others.

One dump at a time is read and reduced to the columns that putting together needs, so that memory grows by 60 bytes a
row and rank, not by whole dumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import read
from aggregator.items import ROLES, STATISTICS
from aggregator.layouts import pairing
from aggregator.layouts.pairing import APPLIED
from aggregator.layouts.spec import SideLayout
from msprobe_launch.errors import InputError
from msprobe_launch.records.layout import RankFolder
from msprobe_launch.records.names import OpName, Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

_GRADIENT = ROLES.index(Role.PARAMETERS_GRAD)


@dataclass(frozen=True, slots=True)
class Column:
    """What one place of the layout (data-parallel and tensor-parallel index) has for each row of the skeleton.

    `there` is False where it has no such row. `numbers` are max, min, mean and norm (NaN: none, or NaN itself where
    `is_number`). `texts`, `shapes`, `placements` and `hidden` (what a value holds beyond its cells, such as the bounds
    of a slice) are dictionary-encoded. `ranks` and `folders` are by stage.
    """

    ranks: tuple[int, ...]
    folders: tuple[Path, ...]
    there: npt.NDArray[np.bool_]
    numbers: tuple[npt.NDArray[np.float64], ...]
    is_number: tuple[npt.NDArray[np.bool_], ...]
    texts: tuple[pa.Array, ...]
    shapes: pa.Array
    placements: pa.Array
    hidden: pa.Array
    data_names: pa.Array


@dataclass(frozen=True, slots=True)
class Side:
    """One run's ranks that are put together. `columns[d][t]` by data-parallel and tensor-parallel index.

    `skeleton` has the ops and items of one rank of each stage, stage after stage; `first_ops` where each stage begins.
    `stage` is the stage of each item. The last `lent` rows of columns are of data parallel ranks that are not compared
    here: they lend what is divided among data parallel ranks, and nothing else.
    """

    layout: SideLayout
    skeleton: RankDump
    first_ops: tuple[int, ...]
    stage: npt.NDArray[np.int64]
    columns: tuple[tuple[Column, ...], ...]
    notes: tuple[str, ...] = ()
    lent: int = 0

    @property
    def height(self) -> int:
        return int(self.skeleton.items.num_rows)

    @property
    def own(self) -> tuple[tuple[Column, ...], ...]:
        """The columns of the ranks that are compared."""
        return self.columns[: len(self.columns) - self.lent]


def gather(
    layout: SideLayout, folders: dict[int, RankFolder], replicas: Sequence[int], lenders: Sequence[int] = ()
) -> Side:
    """Read the ranks of the given data-parallel indices. Raises UnreadableInput, with the rank's folder."""
    notes: list[str] = []
    stages = [_stage(layout, stage, folders, replicas, lenders, notes) for stage in range(layout.pp)]
    skeletons = [skeleton for skeleton, _ in stages]
    heights = [dump.items.num_rows for dump in skeletons]
    starts = np.cumsum([0, *(dump.ops.num_rows for dump in skeletons)])
    columns = tuple(
        tuple(_stacked([cells[d][t] for _, cells in stages]) for t in range(layout.tp))
        for d in range(len(replicas) + len(lenders))
    )
    return Side(
        layout,
        _concatenated(skeletons),
        tuple(starts[:-1].tolist()),
        np.repeat(np.arange(layout.pp), heights),
        columns,
        tuple(dict.fromkeys(notes)),
        len(lenders),
    )


def _stage(
    layout: SideLayout,
    stage: int,
    folders: dict[int, RankFolder],
    replicas: Sequence[int],
    lenders: Sequence[int],
    notes: list[str],
) -> tuple[RankDump, list[list[Column]]]:
    """The skeleton of one stage (the dump with most records), and the columns of its ranks."""
    ranks = [rank for d in replicas for rank in layout.grid[stage][d]]
    chosen = max(ranks, key=lambda rank: (_records(folders[rank]), -rank))
    skeleton = _read(folders[chosen])
    own = pairing.ops_of(skeleton)
    cells: list[list[Column]] = []
    for d in (*replicas, *lenders):
        row: list[Column] = []
        for rank in layout.grid[stage][d]:
            dump = skeleton if rank == chosen else _read(folders[rank])
            notes += [f"rank {rank}: {note}" for note in dump.notes]
            row.append(_column(rank, folders[rank], dump, skeleton, own, notes))
        cells.append(row)
    return skeleton, cells


def _records(folder: RankFolder) -> int:
    """About how many records a dump has: enough to tell which of two has more."""
    for path in (folder.dump, folder.journal):
        try:
            return path.read_bytes().count(b'"output"')
        except OSError:
            continue
    return 0


def _read(folder: RankFolder) -> RankDump:
    try:
        return read.read(folder)
    except InputError as error:
        raise type(error)(f"{folder.path}: {error.what}", hint=error.hint) from error


def _column(
    rank: int, folder: RankFolder, dump: RankDump, skeleton: RankDump, own: pairing.Ops, notes: list[str]
) -> Column:
    if dump is skeleton:
        rows = np.arange(skeleton.items.num_rows)
    else:
        rows = _rows(dump, skeleton, own)
        lacking = dump.ops.num_rows - len(np.unique(dump.items["op"].to_numpy()[rows[rows >= 0]]))
        missing = np.unique(skeleton.items["op"].to_numpy()[rows < 0])
        if len(missing):
            first = skeleton.ops["name"][int(missing[0])].as_py()
            notes.append(f"rank {rank} lacks {len(missing)} ops that another rank of its group has, from {first}")
        if lacking > 0:
            notes.append(f"rank {rank} has {lacking} ops that other ranks of its group lack; they are not looked at")
    there = rows >= 0
    places = pa.array(rows, mask=~there)

    def taken(name: str) -> Any:
        found = dump.items[name].combine_chunks()
        return found if dump is skeleton else found.take(places)

    numbers = [taken(statistic.lower()) for statistic in STATISTICS]
    return Column(
        (rank,),
        (folder.tensors,),
        there,
        tuple(part.to_numpy(zero_copy_only=False).astype(np.float64) for part in numbers),
        tuple(part.is_valid().to_numpy(zero_copy_only=False) for part in numbers),
        tuple(taken(f"{statistic.lower()}:text") for statistic in STATISTICS),
        taken("shape"),
        taken("placement"),
        taken("value"),
        taken("data_name"),
    )


def _rows(dump: RankDump, skeleton: RankDump, own: pairing.Ops) -> npt.NDArray[np.int64]:
    """For each row of the skeleton the dump's row, or -1."""
    ops = pairing.ops_of(dump)
    twin = np.full(own.height, -1, np.int64)
    back = pairing.counterparts(ops, own)
    mine = np.flatnonzero(back >= 0)
    twin[back[mine]] = mine
    _, names = pairing.renamed(dump, skeleton, back)
    found = pc.index_in(skeleton.items["name"].combine_chunks(), value_set=names)
    rows: npt.NDArray[np.int64] = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return rows


def _concatenated(dumps: Sequence[RankDump]) -> RankDump:
    """Stage after stage as one dump."""
    if len(dumps) == 1:
        return dumps[0]
    items, ops, base = [], [], 0
    stacks: list[tuple[str, ...]] = []
    for dump in dumps:
        at = dump.items.schema.get_field_index("op")
        moved = pc.add(dump.items["op"], pa.scalar(base, pa.int32()))
        items.append(dump.items.set_column(at, "op", moved))
        at = dump.ops.schema.get_field_index("stack")
        stack = dump.ops["stack"].to_numpy()
        ops.append(dump.ops.set_column(at, "stack", pa.array(np.where(stack < 0, -1, stack + len(stacks)), pa.int32())))
        stacks += dump.stacks
        base += dump.ops.num_rows
    return replace(
        dumps[0],
        items=pa.concat_tables(items).unify_dictionaries().combine_chunks(),
        ops=pa.concat_tables(ops).combine_chunks(),
        stacks=tuple(stacks),
        has_checksums=any(dump.has_checksums for dump in dumps),
        partial=any(dump.partial for dump in dumps),
        notes=(),
    )


def _stacked(parts: Sequence[Column]) -> Column:
    """Columns of the stages, one after the other."""
    if len(parts) == 1:
        return parts[0]

    def joined(arrays: Sequence[Any]) -> Any:
        table = pa.table({"x": pa.chunked_array(arrays)}).unify_dictionaries()
        return table["x"].combine_chunks()

    return Column(
        tuple(rank for part in parts for rank in part.ranks),
        tuple(folder for part in parts for folder in part.folders),
        np.concatenate([part.there for part in parts]),
        tuple(np.concatenate([part.numbers[i] for part in parts]) for i in range(4)),
        tuple(np.concatenate([part.is_number[i] for part in parts]) for i in range(4)),
        tuple(joined([part.texts[i] for part in parts]) for i in range(4)),
        joined([part.shapes for part in parts]),
        joined([part.placements for part in parts]),
        joined([part.hidden for part in parts]),
        joined([part.data_names for part in parts]),
    )


def has_applied(side: Side) -> bool:
    """True where gradients were recorded as the optimizer got them."""
    return bool(pc.any(pc.ends_with(side.skeleton.items["name"], APPLIED)).as_py())


def with_applied(side: Side) -> Side:
    """Add gradients as applied where the record leaves them out because they are those that were accumulated.

    A rank records them only where they can be others; the other run may have them, and then they need a counterpart.
    """
    dump = side.skeleton
    names = dump.items["name"].to_pylist()
    ops: list[str] = dump.ops["name"].to_pylist()
    op_of = dump.items["op"].to_numpy()
    last: dict[tuple[int, str], tuple[int, int]] = {}
    done: set[tuple[int, str]] = set()
    starts = np.array(side.first_ops)
    for row in np.flatnonzero(dump.items["role"].to_numpy() == _GRADIENT).tolist():
        op = int(op_of[row])
        try:
            parsed = OpName.parse(ops[op])
        except ValueError:
            continue
        key = int(np.searchsorted(starts, op, "right")), parsed.stem
        if names[row].endswith(APPLIED):
            done.add(key)
        elif parsed.call is not None and (key not in last or last[key][0] <= parsed.call):
            last[key] = parsed.call, op
    wanted = [(op, call) for key, (call, op) in last.items() if key not in done]
    if not wanted or side.layout.pp > 1:
        return side
    rows, new_names, new_ops, new_op_names = [], [], [], []
    for op, call in wanted:
        name = f"{ops[op].rpartition('.')[0]}.{call + 1}"
        new_op_names.append(name)
        for row in np.flatnonzero(op_of == op).tolist():
            rows.append(row)
            new_names.append(f"{name}{names[row][len(ops[op]) :]}{APPLIED}")
            new_ops.append(len(ops) + len(new_op_names) - 1)
    chosen = pa.array(rows)
    extra = dump.items.take(chosen)
    extra = extra.set_column(extra.schema.get_field_index("name"), "name", pa.array(new_names, pa.string()))
    extra = extra.set_column(extra.schema.get_field_index("op"), "op", pa.array(new_ops, pa.int32()))
    more = dump.ops.take(pa.array([op for op, _ in wanted]))
    more = more.set_column(more.schema.get_field_index("name"), "name", pa.array(new_op_names, pa.string()))
    skeleton = replace(
        dump,
        items=pa.concat_tables([dump.items, extra]).unify_dictionaries().combine_chunks(),
        ops=pa.concat_tables([dump.ops, more]).combine_chunks(),
    )
    order = np.concatenate([np.arange(len(names)), np.array(rows, np.int64)])
    return replace(
        side,
        skeleton=skeleton,
        stage=side.stage[order],
        columns=tuple(tuple(taken(column, order) for column in row) for row in side.columns),
    )


def taken(column: Column, rows: npt.NDArray[np.int64]) -> Column:
    """Some rows of a column, in the order given."""
    places = pa.array(rows)
    return replace(
        column,
        there=column.there[rows],
        numbers=tuple(part[rows] for part in column.numbers),
        is_number=tuple(part[rows] for part in column.is_number),
        texts=tuple(part.take(places) for part in column.texts),
        shapes=column.shapes.take(places),
        placements=column.placements.take(places),
        hidden=column.hidden.take(places),
        data_names=column.data_names.take(places),
    )
