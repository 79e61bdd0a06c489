"""Arguments that only one side's call has: one left out (a bias, an `eps` that fell back), or one more (another `eps`).

An argument that is None says nothing. Two recorders hand over the arguments of one call in other ways (msprobe as
written, we without those that have their default), so nothing is said unless both dumps lie in run directories of ours,
or neither does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import coded, read
from aggregator.items import ROLES
from msprobe_launch.records.names import Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

_INPUT = ROLES.index(Role.INPUT)


@dataclass(frozen=True, slots=True)
class OneSided:
    """Rows of the target that stand for such an argument, and what to say of each (null elsewhere)."""

    rows: npt.NDArray[np.bool_]
    reasons: pa.Array
    note: str = ""


def one_sided(target: RankDump, bench: RankDump, bench_row: npt.NDArray[np.int64]) -> OneSided:
    """Of calls that have a counterpart. `bench_row`: the bench's row of each row of the target, -1 for none.

    A missing one is told on the last input of the target's call, one too many on its own row. Calls that have some of
    both are passed over: they name their arguments otherwise.
    """
    items, other = target.items, bench.items
    lacking, extra = _left_over(items, other, bench_row)
    op = items["op"].to_numpy()
    is_input = items["role"].to_numpy() == _INPUT
    reasons: dict[int, str] = {}
    for place in sorted(lacking.keys() - extra.keys()):
        for row in np.flatnonzero((op == place) & is_input)[-1:].tolist():
            reasons[row] = f"the bench's call also has {_arguments(other, lacking[place])}"
    for place in sorted(extra.keys() - lacking.keys()):
        # How long a list is shows in what comes out.
        for row in (row for row in extra[place] if "." not in _argument(items, row)):
            reasons[row] = f"the bench's call has no {_arguments(items, [row])}"
    if reasons and not read.one_recorder(target, bench):
        note = f"{len(reasons)} times one side's call has an argument more, which says nothing: two recorders made "
        note += "these dumps, and one of them leaves out what has its default"
        return OneSided(np.zeros(len(op), bool), pa.nulls(len(op), pa.string()), note)
    rows = np.zeros(len(op), bool)
    rows[list(reasons)] = True
    return OneSided(rows, pa.array([reasons.get(row) for row in range(len(op))], pa.string()))


def _left_over(
    items: pa.Table, other: pa.Table, bench_row: npt.NDArray[np.int64]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """By op of the target that has a counterpart: the bench's inputs without a row of the target, and the target's
    inputs without one of the bench."""
    found = bench_row >= 0
    op, bench_op = items["op"].to_numpy(), other["op"].to_numpy()
    counterpart = np.full(int(bench_op.max()) + 1 if len(bench_op) else 0, -1, np.int64)
    counterpart[bench_op[bench_row[found]]] = op[found]
    free = _inputs(other)
    free[bench_row[found]] = False
    lacking, extra = defaultdict(list), defaultdict(list)
    for row in np.flatnonzero(free).tolist():
        lacking[int(counterpart[bench_op[row]])].append(row)
    lacking.pop(-1, None)
    paired = np.isin(op, counterpart)
    for row in np.flatnonzero(_inputs(items) & ~found & paired).tolist():
        extra[int(op[row])].append(row)
    return lacking, extra


def _inputs(items: pa.Table) -> npt.NDArray[np.bool_]:
    """Inputs that are not None."""
    dtype = coded.one(items["dtype"].combine_chunks()).cast(pa.string())
    says_something: npt.NDArray[np.bool_] = pc.not_equal(dtype, "N/A").to_numpy(zero_copy_only=False).copy()
    says_something &= items["role"].to_numpy() == _INPUT
    return says_something


def _argument(items: pa.Table, row: int) -> str:
    name: str = items["name"][row].as_py()
    return name.rsplit(".input.", 1)[-1]


def _arguments(items: pa.Table, rows: list[int]) -> str:
    return ("argument " if len(rows) == 1 else "arguments ") + ", ".join(_argument(items, row) for row in rows)
