"""One rank of a run without a bench: its statistics as a partition, and what in them is not finite.

The partition has the target's half of a compare result (`NPU Name`, dtype, shape, `NPU max` ..., `NPU MD5` where
recorded) and the columns `op`, `role` and `parent`, so that the same merge serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import columns, merge, read
from aggregator.analyse import nonfinite
from aggregator.columns import TEXT_SUFFIX
from aggregator.model import RankFailure
from aggregator.sources import RankDump
from msprobe_launch.errors import UnreadableInput
from msprobe_launch.records.names import Role

_STATISTIC_OF = dict(zip(columns.NPU_STATISTICS, ("max", "min", "mean", "norm"), strict=True))


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first item of one (step, rank) that is not finite and was not asked for.

    `position` is the call order of its op (0 = first op of the step). `made_here` is True where all inputs of the op
    were finite, or where one that is not is a plain number, which the script wrote into this very call. The latter is
    told by `argument`, that item's name.
    """

    step: int | None
    rank: int | None
    position: int
    item: str
    op: str
    kind: str
    made_here: bool
    npu_max: str
    npu_min: str
    parent: str | None
    stack: tuple[str, ...]
    argument: str = ""


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """One rank of one step without a bench. `findings` counts its non-finite items, `asked_for` the intended ones."""

    step: int | None
    rank: int | None
    partition: Path
    source: Path
    rows: int
    ops: int
    metrics: tuple[str, ...]
    findings: int = 0
    asked_for: int = 0
    first: NonFinite | None = None
    partial: bool = False
    notes: tuple[str, ...] = ()


def describe(dump: RankDump, partition: Path) -> RankStatistics | RankFailure:
    """Read one rank's dump, write its partition, and say what is not finite in it."""
    try:
        found = read.read(dump.folder)
    except UnreadableInput as error:
        return RankFailure(dump.step, dump.rank, dump.folder.path, str(error))
    items = found.items
    scanned = nonfinite.scan(items)
    metrics: tuple[str, ...] = () if found.task == "structure" else columns.NPU_STATISTICS
    if found.has_checksums:
        metrics += (columns.CHECKSUMS[0],)
    try:
        partition.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            _table(found, metrics), partition, compression="zstd", compression_level=1, row_group_size=merge.ROW_GROUP
        )
    except OSError as error:
        return RankFailure(dump.step, dump.rank, dump.folder.path, f"its table cannot be written: {error}")
    rows = np.flatnonzero(scanned.findings)
    return RankStatistics(
        step=dump.step,
        rank=dump.rank,
        partition=partition,
        source=found.path,
        rows=items.num_rows,
        ops=found.ops.num_rows,
        metrics=metrics,
        findings=len(rows),
        asked_for=int(np.count_nonzero(scanned.asked_for)),
        first=_first(dump, found, scanned, int(rows[0])) if len(rows) else None,
        partial=found.partial,
        notes=found.notes,
    )


def _first(dump: RankDump, found: read.RankDump, scanned: nonfinite.Scan, row: int) -> NonFinite:
    items = found.items
    position = items.column("op")[row].as_py()
    op = found.ops.slice(position, 1).to_pylist()[0]
    op_rows = np.asarray(items.column("op").to_numpy()) == position
    inputs = op_rows & (np.asarray(items.column("role").to_numpy()) != read.ROLES.index(Role.OUTPUT))
    bad = scanned.nan | scanned.positive | scanned.negative
    is_output = not bool(inputs[row])
    given = np.flatnonzero(inputs & bad)
    literal = [int(at) for at in given if items.column("dtype")[int(at)].as_py() == nonfinite.PLAIN]
    # Tensors that are not finite came from an earlier call, whatever else this one was given.
    own = row in literal or (is_output and len(literal) == len(given))
    return NonFinite(
        step=dump.step,
        rank=dump.rank,
        position=position,
        item=items.column("name")[row].as_py(),
        op=op["name"],
        kind=scanned.words(row),
        made_here=own,
        npu_max=str(items.column("max")[row].as_py()),
        npu_min=str(items.column("min")[row].as_py()),
        parent=op["parent"],
        stack=found.stacks[op["stack"]] if op["stack"] >= 0 else (),
        argument=items.column("name")[literal[0]].as_py() if own and literal else "",
    )


def _table(found: read.RankDump, metrics: tuple[str, ...]) -> pa.Table:
    items = found.items
    op = items.column("op")
    out: dict[str, pa.Array] = {
        columns.NPU_NAME: items.column("name"),
        "NPU Dtype": items.column("dtype"),
        "NPU Tensor Shape": items.column("shape"),
        "NPU Requires_grad": items.column("grad"),
    }
    for name in metrics:
        if name in _STATISTIC_OF:
            out[name], out[name + TEXT_SUFFIX] = _cells(items, _STATISTIC_OF[name])
        else:
            out[name] = items.column("md5")
    out["op"] = found.ops.column("name").take(op)
    out["parent"] = found.ops.column("parent").take(op)
    roles = pa.array([role.value for role in read.ROLES])
    out["role"] = roles.take(items.column("role").combine_chunks())
    return pa.table(out)


def _cells(items: pa.Table, statistic: str) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """A statistic as a partition keeps it: what is no finite number is a text, spelt as msprobe does."""
    numbers = items.column(statistic)
    texts = items.column(f"{statistic}{TEXT_SUFFIX}").cast(pa.string())
    finite = pc.fill_null(pc.is_finite(numbers), False)
    if pc.all(pc.or_(finite, pc.is_null(numbers))).as_py():
        return numbers, texts
    spelt = pc.case_when(
        pc.make_struct(pc.is_nan(numbers), pc.greater(numbers, 0), pc.less(numbers, 0)), "Nan", "inf", "-inf"
    )
    texts = pc.if_else(pc.or_(finite, pc.is_null(numbers)), texts, spelt)
    return pc.if_else(finite, numbers, pa.scalar(None, pa.float64())), texts
