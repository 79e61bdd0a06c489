"""--layout auto: the layout from what the dumps of one step say.

    pipeline stages     ranks that send to each other (send, recv, isend, irecv, batch_isend_irecv): whoever receives
                        before it sends comes later
    tensor parallel     ranks of the first stage whose first values are the same (`_FirstValues`): they work on one
                        batch
    data parallel       the others

Raises UsageError, with the layout file to write, where this gives no regular layout.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import read
from aggregator.dtypes import SIGNIFICAND_BITS, canonical_dtype
from aggregator.items import ROLES
from aggregator.layouts.spec import Layout, SideLayout
from aggregator.read import RankDump
from aggregator.sources import number_ranges
from msprobe_launch.errors import UsageError
from msprobe_launch.records.layout import RankFolder
from msprobe_launch.records.names import OpName, Phase, Role

_SENDS, _RECEIVES = ("send", "isend"), ("recv", "irecv")

_STATISTICS = ("max", "min", "mean", "norm")

_INPUT, _OUTPUT = ROLES.index(Role.INPUT), ROLES.index(Role.OUTPUT)


@dataclass(slots=True)
class _Rank:
    """What one rank's dump tells: its first values, and whom it sends to in the forward part of the step."""

    first: tuple[object, ...] = ()
    sends: set[int] = field(default_factory=set)
    receives: set[int] = field(default_factory=set)


def layout(target: dict[int, RankFolder], bench: dict[int, RankFolder]) -> Layout:
    """The layout of both runs."""
    return Layout(_side("target", target), _side("bench", bench), source="from the dumps")


def _side(name: str, folders: dict[int, RankFolder]) -> SideLayout:
    ranks = sorted(folders)
    if len(ranks) <= 1:
        return SideLayout((((ranks[0] if ranks else 0,),),))
    seen = {rank: _look(read.read(folders[rank])) for rank in ranks}
    chains = _chains(ranks, seen)
    lengths = {len(chain) for chain in chains}
    if len(lengths) != 1:
        raise _irregular(name, ranks, f"its pipelines have {sorted(lengths)} stages")
    groups: dict[tuple[object, ...], list[list[int]]] = defaultdict(list)
    for chain in chains:
        groups[seen[chain[0]].first].append(chain)
    sizes = {len(group) for group in groups.values()}
    if len(sizes) != 1:
        told = ", ".join(number_ranges(chain[0] for chain in group) for group in groups.values())
        raise _irregular(name, ranks, f"ranks that begin with the same values are {told}")
    ordered = sorted(groups.values(), key=lambda group: group[0][0])
    pp = lengths.pop()
    return SideLayout(tuple(tuple(tuple(chain[stage] for chain in group) for group in ordered) for stage in range(pp)))


def _irregular(name: str, ranks: list[int], why: str) -> UsageError:
    return UsageError(
        f"--layout auto: the {name}'s {len(ranks)} ranks show no regular layout: {why}",
        hint="Write it down, with sizes whose product is the number of ranks, and pass --layout FILE:\n"
        f"  {name}: {{tp: {len(ranks)}, dp: 1, pp: 1}}",
    )


def _look(dump: RankDump) -> _Rank:
    out = _Rank()
    names: list[str] = dump.ops["name"].to_pylist()
    parsed = [_parsed(name) for name in names]
    last = next((i for i, op in enumerate(parsed) if op is not None and op.phase is Phase.BACKWARD), len(names))
    part = dump.items.select(["name", "op", "role", "dtype", "grad", "value", *_STATISTICS])
    # What runs before the first value that needs a gradient sets up: parameters, not the batch.
    learns = pc.and_(pc.equal(dump.items["role"], _OUTPUT), pc.equal(dump.items["grad"].cast(pa.string()), "True"))
    begin = pc.min(dump.items["op"].filter(learns)).as_py() or 0
    first = _FirstValues()
    for row in part.slice(0, _until(part, last)).to_pylist():
        op = parsed[row["op"]]
        if op is not None and op.prefix == "Distributed":
            _peers(out, op.name.rsplit(".", 1)[-1], row)
        elif op is not None:
            first.see(row, begun=row["op"] >= begin)
    out.first = tuple(first.values)
    return out


class _FirstValues:
    """Statistics of the tensors that come in, up to the first floating one: the batch, or what became of it.

    Parameters do not count, every data parallel rank has the same: as an argument, a parameter is a tensor that needs a
    gradient and was put out by no call.
    """

    def __init__(self) -> None:
        self.values: list[tuple[object, ...]] = []
        self._made: set[tuple[object, ...]] = set()
        self._complete = False

    def see(self, row: dict[str, Any], *, begun: bool) -> None:
        value = tuple(row[name] for name in _STATISTICS)
        if self._complete or row["dtype"].startswith("<class") or row["norm"] is None:
            return
        if row["role"] == _OUTPUT:
            self._made.add(value)
        elif row["role"] == _INPUT and begun and (str(row["grad"]) != "True" or value in self._made):
            self.values.append((row["dtype"], *value))
            self._complete = canonical_dtype(row["dtype"]) in SIGNIFICAND_BITS


def _until(part: pa.Table, op: int) -> int:
    return int(np.searchsorted(part["op"].to_numpy(), op))


def _peers(out: _Rank, api: str, row: dict[str, object]) -> None:
    """Whom a point-to-point call names."""
    name = str(row["name"])
    peer = row["max"]
    if api == "batch_isend_irecv" and row["value"]:
        said = json.loads(str(row["value"]))
        if isinstance(said.get("peer"), int):
            (out.sends if "send" in str(said.get("op")) else out.receives).add(said["peer"])
        return
    if not isinstance(peer, float) or not name.endswith((".input.1", ".dst", ".src", ".group_dst", ".group_src")):
        return
    if api in _SENDS:
        out.sends.add(int(peer))
    elif api in _RECEIVES:
        out.receives.add(int(peer))


def _chains(ranks: list[int], seen: dict[int, _Rank]) -> list[list[int]]:
    """Pipelines, first stage first; a rank that sends to nobody is one of its own."""
    follows = {rank: sorted(peer for peer in seen[rank].sends if peer in seen) for rank in ranks}
    for rank in ranks:
        for peer in seen[rank].receives:
            # Not the gradient of what was sent, which is awaited before the first backward call.
            if peer in follows and peer not in seen[rank].sends and rank not in follows[peer]:
                follows[peer].append(rank)
    later = {peer for peers in follows.values() for peer in peers}
    chains = []
    for rank in ranks:
        if rank in later:
            continue
        chain = [rank]
        while follows[chain[-1]]:
            following = follows[chain[-1]][0]
            if following in chain:
                break
            chain.append(following)
        chains.append(chain)
    return chains or [[rank] for rank in ranks]


def _parsed(name: str) -> OpName | None:
    try:
        return OpName.parse(name)
    except ValueError:
        return None
