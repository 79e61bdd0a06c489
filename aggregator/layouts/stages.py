"""Pipeline stages as one model: what a stage's modules are called in the whole, and in which order the stages ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aggregator.layouts.gather import Side, taken
from aggregator.layouts.pairing import Ops, Section, plain_path
from aggregator.layouts.spec import StageNames
from msprobe_launch.records.names import OpName, Phase

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.int64]

Whole = Callable[[int, str], str]


def naming(side: Side, other: Side, notes: list[str]) -> Whole:
    """(op, module's path without wrappers) -> its path in the whole model."""
    names = side.layout.stages or _inferred(side, other, notes)
    if not names:
        return lambda _, path: path
    starts = np.array(side.first_ops)

    def whole(op: int, path: str) -> str:
        return names[int(np.searchsorted(starts, op, "right")) - 1].whole(path)

    return whole


def _inferred(side: Side, other: Side, notes: list[str]) -> tuple[StageNames, ...]:
    """Offsets of stages that each number their layers from 0, where the other side has as many in one list."""
    if side.layout.pp == 1:
        return ()
    bounds = [*side.first_ops, side.skeleton.ops.num_rows]
    ops: list[str] = side.skeleton.ops["name"].to_pylist()
    lists = [_lists(ops[a:b]) for a, b in pairwise(bounds)]
    whole = _lists(other.skeleton.ops["name"].to_pylist()) if other.layout.pp == 1 else {}
    entries: list[list[tuple[str, str, int | None]]] = [[] for _ in lists]
    for prefix in sorted(set.intersection(*(set(found) for found in lists))):
        own = [found[prefix] for found in lists]
        # Stages that keep the numbers of the whole model need nothing.
        if any(min(indices) != 0 for indices in own):
            continue
        counts = [max(indices) + 1 for indices in own]
        fitting = [name for name, indices in whole.items() if max(indices) + 1 == sum(counts)]
        chosen = prefix if prefix in fitting else fitting[0] if len(fitting) == 1 else None
        if chosen is None:
            if whole:
                notes.append(
                    f"stages have {'+'.join(map(str, counts))} modules in '{prefix or 'the stage itself'}', the other "
                    f"side has no list of {sum(counts)}: name them under 'stages' in the layout file"
                )
            continue
        for stage, first in enumerate(np.cumsum([0, *counts[:-1]]).tolist()):
            entries[stage].append((prefix, chosen, first))
        offsets = ", ".join(str(first) for _, _, first in (entry[-1] for entry in entries))
        notes.append(f"stages: '{prefix or 'stage'}.<i>' is '{chosen or 'model'}.<first + i>' with first {offsets}")
    return tuple(StageNames(tuple(entry)) for entry in entries) if any(entries) else ()


def _lists(ops: list[str]) -> dict[str, set[int]]:
    """Path of a list of modules -> the numbers of its children. The outermost list of each path."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in dict.fromkeys(ops):
        try:
            op = OpName.parse(name)
        except ValueError:
            continue
        if not op.is_module:
            continue
        parts = plain_path(op.name).split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is not None:
            found[".".join(parts[:place])].add(int(parts[place]))
    return found


def with_unique_names(side: Side, whole: Whole) -> Side:
    """The side with op names of the whole model, none of them twice: API calls of later stages count on."""
    if side.layout.pp == 1:
        return side
    own: list[str] = side.skeleton.ops["name"].to_pylist()
    bounds = [*side.first_ops, len(own)]
    base: dict[str, int] = defaultdict(int)
    names: list[str] = []
    for begin, end in pairwise(bounds):
        most: dict[str, int] = defaultdict(int)
        for place in range(begin, end):
            op = _parsed(own[place])
            if op is None:
                names.append(own[place])
            elif op.is_module:
                names.append(str(replace(op, name=whole(place, plain_path(op.name)))))
            else:
                call = op.call or 0
                most[op.stem] = max(most[op.stem], call + 1)
                names.append(str(replace(op, call=base[op.stem] + call)))
        for stem, count in most.items():
            base[stem] += count
    return with_names(side, own, names)


def with_names(side: Side, own: list[str], names: list[str]) -> Side:
    """The side with other op names (`own` are the ones it has), in its items and parents as well."""
    dump = side.skeleton
    places = dump.items["op"].to_numpy().tolist()
    items = [
        names[p] + text[len(own[p]) :] if text.startswith(own[p]) else text
        for p, text in zip(places, dump.items["name"].to_pylist(), strict=True)
    ]
    # A parent has the name that its own stage gave it.
    bounds = [*side.first_ops, len(own)]
    stage_of = np.searchsorted(np.array(bounds), np.arange(len(own)), "right").tolist()
    new = {(stage_of[p], name): names[p] for p, name in enumerate(own)}
    parents = [
        parent if parent is None else new.get((stage_of[p], parent), parent)
        for p, parent in enumerate(dump.ops["parent"].to_pylist())
    ]
    ops = dump.ops.set_column(dump.ops.schema.get_field_index("name"), "name", pa.array(names, pa.string()))
    ops = ops.set_column(ops.schema.get_field_index("parent"), "parent", pa.array(parents, pa.string()))
    table = dump.items.set_column(dump.items.schema.get_field_index("name"), "name", pa.array(items, pa.string()))
    return replace(side, skeleton=replace(dump, items=table, ops=ops))


def order(side: Side, ops: Ops, twin: Places, *, by_twin: bool) -> Places:
    """The ops in an order in which nothing stands before what it was computed from.

    `by_twin`: that of the other side, which is one stage; ops without a counterpart stand before the next one that has
    one. Otherwise forward from the first stage to the last and backward the other way, turn by turn.
    """
    height = ops.height
    stage = np.array(ops.part, np.int64)
    index = np.arange(height)
    if by_twin:
        position = twin.astype(np.float64)
        for number in range(side.layout.pp):
            rows = np.flatnonzero(stage == number)
            following = np.inf
            for row in rows[::-1].tolist():
                if twin[row] >= 0:
                    following = position[row]
                else:
                    position[row] = following - 0.5
        found: Places = np.lexsort((index, stage, position))
        return found
    turns = np.zeros(height)
    for number in range(side.layout.pp):
        rows = np.flatnonzero(stage == number)
        turn, before = 0, Phase.FORWARD
        for row in rows.tolist():
            op = ops.parsed[row]
            phase = Phase.BACKWARD if op is not None and op.phase is not Phase.FORWARD else Phase.FORWARD
            if ops.section[row] == Section.BODY and phase is not before:
                turn, before = turn + 1, phase
            turns[row] = turn
    backward = turns % 2 == 1
    return np.lexsort((index, np.where(backward, -stage, stage), turns, np.array(ops.section)))


def reordered(side: Side, ops: Places) -> Side:
    """The side with its ops in another order."""
    place_of = np.empty(len(ops), np.int64)
    place_of[ops] = np.arange(len(ops))
    dump = side.skeleton
    new = place_of[dump.items["op"].to_numpy()]
    rows = np.argsort(new, kind="stable")
    items = dump.items.take(pa.array(rows))
    items = items.set_column(items.schema.get_field_index("op"), "op", pa.array(new[rows].astype(np.int32)))
    return replace(
        side,
        skeleton=replace(dump, items=items.combine_chunks(), ops=dump.ops.take(pa.array(ops)).combine_chunks()),
        stage=side.stage[rows],
        columns=tuple(tuple(taken(column, rows) for column in row) for row in side.columns),
    )


def _parsed(name: str) -> OpName | None:
    try:
        return OpName.parse(name)
    except ValueError:
        return None
