"""Which call of one dump is which call of another, where ranks divide the work in different ways.

Call numbers do not tell: a parallel layer calls `add` once more for its bias, a pipeline stage counts from 0. So a call
is known by where it stands:

    module      its path in the whole model (without wrappers, without its class, with the stage's names translated),
                direction and number
    API         its function, the module around it and that module's call, and its number among those
    backward    as its forward call

Where the numbers of calls in one place differ, or nothing says which module is around (level L1), calls are aligned:
of all alignments that keep the order the one with most calls whose values can have been parts of one another. What runs
before the first value that needs a gradient (setting up) and after the last backward call (optimizer) is kept apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from aggregator.items import ROLES
from aggregator.match import WRAPPER
from aggregator.spelling import API_PREFIXES, OPERATORS
from msprobe_launch.records.names import OpName, Phase, Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

    Places = npt.NDArray[np.int64]

APPLIED = ".applied"
"""Ends the names of gradients as the optimizer got them."""

MOST_CELLS = 4_000_000  # of one alignment table; beyond it calls are paired by number

_OUTPUT, _GRADIENT = ROLES.index(Role.OUTPUT), ROLES.index(Role.PARAMETERS_GRAD)


class Section(IntEnum):
    """Part of a step."""

    SETUP = 0
    BODY = 1
    TAIL = 2


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of a dump, known by where they stand. All lists have an entry per op, in call order.

    `part` is the pipeline stage, within which numbers are counted. `groups` has the ops that may be one by the key of
    where they stand. `shapes(op)` are the (place, dtype, shape) of its items.
    """

    names: list[str]
    parsed: list[OpName | None]
    section: Places
    part: list[int]
    groups: dict[Any, list[int]]
    shapes: Callable[[int], tuple[tuple[str, str, tuple[int, ...] | str], ...]] = field(repr=False)

    @property
    def height(self) -> int:
        return len(self.names)


def plain_path(path: str) -> str:
    """A module's path without what wrappers add."""
    return WRAPPER.sub("", f".{path}.").strip(".")


def ops_of(
    dump: RankDump,
    whole: Callable[[int, str], str] = lambda _, path: path,
    *,
    parts: Sequence[int] = (),
    microbatches: int = 1,
) -> Ops:
    """Look at a dump's ops. `whole(op, path)` is a module's path in the whole model.

    `parts` are the first ops of the stages that the dump is made of (() for one), whose API calls are put into the
    order in which `microbatches` parts of a batch run through them.
    """
    names: list[str] = dump.ops["name"].to_pylist()
    parents: list[str | None] = dump.ops["parent"].to_pylist()
    parsed = [_parsed(name) for name in names]
    bounds = [*(parts or (0,)), len(names)]
    section = np.concatenate([_sections(dump, parsed, a, b) for a, b in pairwise(bounds)])
    applied = _applied(dump)
    groups: dict[Any, list[int]] = defaultdict(list)
    known: dict[tuple[int, str], Any] = {}
    stage: list[int] = []
    part = 0
    for place, op in enumerate(parsed):
        while place >= bounds[part + 1]:
            part += 1
        stage.append(part)
        if op is None:
            groups["other", names[place]].append(place)
        elif op.is_module:
            number: Any = "applied" if place in applied else op.call
            groups["module", whole(place, plain_path(op.name)), op.phase, number].append(place)
        elif op.phase is Phase.FORWARD:
            parent = parents[place]
            around = None
            if parent is not None:
                around = known.get((part, parent))
                if around is None:
                    around = known[part, parent] = _around(parent, partial(whole, place))
            key = ("api", int(section[place]), _function(op), around)
            groups[key].append(place)
    if len(bounds) > 2 and microbatches > 1:
        for key, found in groups.items():
            if key[0] == "api" and key[3] is None:
                groups[key] = _interleaved(found, bounds, microbatches)
    return Ops(names, parsed, section, stage, dict(groups), _looks(dump))


def _interleaved(found: list[int], bounds: list[int], microbatches: int) -> list[int]:
    """Calls of several stages in the order of microbatches, where each stage calls as often for each."""
    by_stage: list[list[int]] = [[p for p in found if a <= p < b] for a, b in pairwise(bounds)]
    if any(len(calls) % microbatches for calls in by_stage):
        return found
    out: list[int] = []
    for m in range(microbatches):
        for calls in by_stage:
            each = len(calls) // microbatches
            out += calls[m * each : (m + 1) * each]
    return out


def _parsed(name: str) -> OpName | None:
    try:
        return OpName.parse(name)
    except ValueError:
        return None


def _function(op: OpName) -> str:
    return OPERATORS.get(op.name, op.name) if op.prefix in API_PREFIXES else op.stem


def _around(parent: str, whole: Callable[[str], str]) -> Any:
    op = _parsed(parent)
    return parent if op is None else (whole(plain_path(op.name)), op.phase, op.call)


def _applied(dump: RankDump) -> set[int]:
    """Ops that are gradients as applied."""
    names = dump.items["name"].to_pylist()
    rows = np.flatnonzero(dump.items["role"].to_numpy() == _GRADIENT)
    ops = dump.items["op"].to_numpy()
    return {int(ops[row]) for row in rows.tolist() if names[row].endswith(APPLIED)}


def _sections(dump: RankDump, parsed: list[OpName | None], begin: int, end: int) -> Places:
    """SETUP, BODY or TAIL for the ops from `begin` to `end`."""
    out = np.full(end - begin, int(Section.BODY), np.int64)
    ops = dump.items["op"].to_numpy()
    learns = dump.items["grad"].combine_chunks().cast(pa.string()).to_numpy(zero_copy_only=False) == "True"
    learns &= dump.items["role"].to_numpy() == _OUTPUT
    first = ops[learns & (ops >= begin) & (ops < end)]
    if len(first):
        out[: int(first.min()) - begin] = Section.SETUP
    # A gradient record stands where it was taken, which may be after the last backward call.
    backward = [i for i in range(begin, end) if (op := parsed[i]) is not None and op.phase is Phase.BACKWARD]
    if backward:
        out[backward[-1] + 1 - begin :] = Section.TAIL
    return out


def _looks(dump: RankDump) -> Callable[[int], tuple[tuple[str, str, tuple[int, ...] | str], ...]]:
    """For an op its items' places, dtypes and shapes, read where they are asked for."""
    ops = dump.items["op"].to_numpy()
    starts = np.searchsorted(ops, np.arange(dump.ops.num_rows + 1))
    columns = [dump.items[name] for name in ("name", "dtype", "shape")]

    def look(op: int) -> tuple[tuple[str, str, tuple[int, ...] | str], ...]:
        begin, length = int(starts[op]), int(starts[op + 1] - starts[op])
        cut = len(dump.ops["name"][op].as_py())
        rows = zip(*(column.slice(begin, length).to_pylist() for column in columns), strict=True)
        return tuple((name[cut:], dtype, shape_of(shape)) for name, dtype, shape in rows)

    return look


def shape_of(text: str) -> tuple[int, ...] | str:
    """`[2, 3]` -> (2, 3); other texts as they are."""
    inside = text.strip()[1:-1]
    if not text.startswith("["):
        return text
    try:
        return tuple(int(part) for part in inside.split(",")) if inside.strip() else ()
    except ValueError:
        return text


def counterparts(target: Ops, bench: Ops) -> Places:
    """For each op of the target its counterpart's place in the bench, or -1. No place occurs twice."""
    out = np.full(target.height, -1, np.int64)
    for key, own in target.groups.items():
        other = bench.groups.get(key)
        if other is None:
            continue
        if len(own) == len(other):
            out[own] = other
        elif key[0] == "api" and key[1] != Section.SETUP:
            for a, b in _aligned(own, other, target, bench):
                out[a] = b
        else:
            # Setting up differs from layout to layout: what is not called as often is not the same.
            if key[0] != "api":
                count = min(len(own), len(other))
                out[own[:count]] = other[:count]
    _backward(target, bench, out)
    return out


def _backward(target: Ops, bench: Ops, out: Places) -> None:
    """Backward calls of APIs follow their forward calls."""
    there: dict[Any, int] = {}
    for place, op in enumerate(bench.parsed):
        if op is not None and not op.is_module and op.phase is Phase.BACKWARD:
            there.setdefault((bench.part[place], op.stem, op.call), place)
    forwards: dict[Any, int] = {}
    for place, op in enumerate(target.parsed):
        if op is None or op.is_module:
            continue
        if op.phase is Phase.FORWARD:
            forwards[target.part[place], op.stem, op.call] = place
        elif op.phase is Phase.BACKWARD:
            forward = forwards.get((target.part[place], op.stem, op.call))
            if forward is None or out[forward] < 0:
                continue
            at = int(out[forward])
            twin = bench.parsed[at]
            found = there.pop((bench.part[at], twin.stem, twin.call), None) if twin is not None else None
            if found is not None:
                out[place] = found


# -- alignment


def _aligned(own: list[int], other: list[int], target: Ops, bench: Ops) -> list[tuple[int, int]]:
    """Pairs that keep the order, as many as there can be; among these the ones whose shapes agree most."""
    if len(own) * len(other) > MOST_CELLS:
        return list(zip(own, other, strict=False))
    kinds: dict[Any, int] = {}
    codes = [
        [kinds.setdefault(side.shapes(op), len(kinds)) for op in ops] for side, ops in ((target, own), (bench, other))
    ]
    looks = list(kinds)
    fits = np.array([[_alike(a, b) for b in looks] for a in looks])
    gains = fits[np.ix_(codes[0], codes[1])]
    score = np.zeros((len(own) + 1, len(other) + 1))
    for i in range(1, len(own) + 1):
        here = np.maximum(score[i - 1, 1:], score[i - 1, :-1] + gains[i - 1])
        score[i, 1:] = np.maximum.accumulate(here)
    pairs: list[tuple[int, int]] = []
    i, j = len(own), len(other)
    while i and j:
        if score[i, j] == score[i - 1, j]:
            i -= 1
        elif score[i, j] == score[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((own[i], other[j]))
    return pairs[::-1]


def _alike(a: Any, b: Any) -> float:
    """0 where two calls cannot be one; else 1 and up to half more for shapes that are equal."""
    mine, theirs = ({name: (dtype, shape) for name, dtype, shape in side} for side in (a, b))
    shared = [n for n in mine if n in theirs]
    if not shared or (set(mine) ^ set(theirs)) & {n for n in (*mine, *theirs) if ".output" in n}:
        return 0.0
    equal = 0
    for name in shared:
        (dtype, shape), (other_dtype, other_shape) = mine[name], theirs[name]
        if dtype.startswith("<") != other_dtype.startswith("<"):
            return 0.0
        if not isinstance(shape, tuple) or not isinstance(other_shape, tuple):
            equal += shape == other_shape
            continue
        if len(shape) != len(other_shape) or sum(x != y for x, y in zip(shape, other_shape, strict=True)) > 1:
            return 0.0
        equal += shape == other_shape
    return 1.0 + 0.5 * equal / max(len(mine), len(theirs))


# -- names


def renamed(target: RankDump, bench: RankDump, twin: Places) -> tuple[list[str], pa.Array]:
    """The target's op names and item names with those of their counterparts in the bench.

    Ops without one get a number that nobody has, so that no name stands twice.
    """
    own, other = target.ops["name"].to_pylist(), bench.ops["name"].to_pylist()
    ops = [other[twin[i]] if twin[i] >= 0 else _lonely(name, i) for i, name in enumerate(own)]
    if ops == own:
        return ops, target.items["name"].combine_chunks()
    places = target.items["op"].to_numpy().tolist()
    names = target.items["name"].to_pylist()
    new = [
        ops[place] + name[len(own[place]) :] if name.startswith(own[place]) else name
        for place, name in zip(places, names, strict=True)
    ]
    return ops, pa.array(new, pa.string())


_NOBODYS = 10_000_000


def _lonely(name: str, place: int) -> str:
    op = _parsed(name)
    if op is None or op.call is None:
        return name
    # Backward calls keep the number that their forward calls lost; nothing matches either of them.
    return str(OpName(op.prefix, op.name, op.class_name, _NOBODYS + place, op.phase))


def is_matched(name: str) -> bool:
    """True for a name of `renamed` that a counterpart has."""
    op = _parsed(name)
    return op is None or op.call is None or op.call < _NOBODYS
