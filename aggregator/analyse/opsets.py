"""Ranks whose ops differ from those of most ranks in the same step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import cells


@dataclass(frozen=True, slots=True)
class OpDifference:
    """Some ranks of a step recorded other ops than most. Pipeline stages do so by design; a lone rank does not.

    `ops` is how many they recorded, `usual` how many most ranks did; `only_here` and `lacking` count the differing
    ones, `example` is the first of them.
    """

    step: int | None
    ranks: tuple[int | None, ...]
    ops: int
    usual: int
    only_here: int
    lacking: int
    example: str


def differences(step: int | None, partitions: Iterable[tuple[int | None, Path]]) -> tuple[OpDifference, ...]:
    """Compare the ranks' ops with those of the largest group of like ranks (ties: the group with the lowest rank).

    Holds the ops of two ranks at a time.
    """
    groups: dict[bytes, list[tuple[int | None, Path]]] = {}
    for rank, partition in sorted(partitions, key=lambda entry: (entry[0] is None, entry[0] or 0)):
        groups.setdefault(_digest(_ops(partition)), []).append((rank, partition))
    if len(groups) < 2:
        return ()
    usual_key = max(groups, key=lambda key: len(groups[key]))  # max keeps the first of equals: the lowest rank's
    usual = _ops(groups[usual_key][0][1])
    found = [
        _difference(step, [rank for rank, _ in members], _ops(members[0][1]), usual)
        for key, members in groups.items()
        if key != usual_key
    ]
    return tuple(entry for entry in found if entry.only_here or entry.lacking)


def _difference(step: int | None, ranks: Sequence[int | None], own: pa.Array, usual: pa.Array) -> OpDifference:
    only_here = own.filter(pc.invert(pc.is_in(own, value_set=usual)))
    lacking = usual.filter(pc.invert(pc.is_in(usual, value_set=own)))
    example = next((a.as_py() for a in (*only_here[:1], *lacking[:1])), "")
    return OpDifference(step, tuple(ranks), len(own), len(usual), len(only_here), len(lacking), example)


def _ops(partition: Path) -> pa.Array:
    column = cells.combined(pq.read_table(partition, columns=["op"], memory_map=True).column("op"))
    return pc.unique(column.cast(pa.string()))


def _digest(ops: pa.Array) -> bytes:
    # Sorted: two streams may run in another order without being other ops.
    ordered = ops.take(pc.sort_indices(ops))
    return hashlib.blake2b(cells.text_bytes(pc.binary_join_element_wise(ordered, "\n", "")), digest_size=16).digest()
