"""How each row is divided among the ranks of its group: by the layout file, by its placements, by its shapes.

Rows that look alike (same shapes on all ranks and on the other side, same placements, same rule) are decided once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator.layouts.gather import Side
from aggregator.layouts.pairing import shape_of
from aggregator.layouts.spec import Division, Rule
from aggregator.sources import number_ranges
from msprobe_launch.errors import near_miss

if TYPE_CHECKING:
    import numpy.typing as npt


class Kind(IntEnum):
    """What the ranks of a tensor-parallel group hold of one value."""

    SINGLE = 0  # there is one rank
    SAME = 1  # the whole value, each of them (or parts of a sum: their values tell, see `combine`)
    SHARD = 2  # a slice along one dimension
    PARTIAL = 3  # a summand
    BESIDE = 4  # whatever it is, the other side has as many ranks that hold the like: part against part
    PLAIN = 5  # no tensor
    LACKING = 6  # nothing on some of them
    APART = 7  # nothing that adds up
    REDUCED = 8  # parts of a reduction that statistics do not give: a norm, a maximum, a sum over data


class Source(IntEnum):
    """What says so."""

    NOTHING = 0
    FILE = 1
    PLACEMENTS = 2
    SHAPES = 3


SOURCE_WORDS = {
    Source.NOTHING: "",
    Source.FILE: "layout file",
    Source.PLACEMENTS: "placements",
    Source.SHAPES: "by shape",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How rows that look alike are divided. `dp_dim` is the dimension that data parallel ranks share, None for none.

    `problem` says what does not add up.
    """

    kind: Kind
    dim: int = 0
    source: Source = Source.NOTHING
    dp_dim: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Decisions:
    """A verdict for each row: `codes[row]` is its place in `verdicts`."""

    codes: npt.NDArray[np.int64]
    verdicts: tuple[Verdict, ...]

    def of(self, function: Any, dtype: Any) -> npt.NDArray[Any]:
        """A value for each row's verdict."""
        return np.array([function(verdict) for verdict in self.verdicts], dtype)[self.codes]

    @property
    def kinds(self) -> npt.NDArray[np.int64]:
        return self.of(lambda verdict: int(verdict.kind), np.int64)


Shape = tuple[int, ...] | str | None


def decide(side: Side, other: Side, other_row: npt.NDArray[np.int64], rules: tuple[Rule, ...]) -> Decisions:
    """How each row of `side` is divided. `other_row[row]` is its counterpart in `other`, or -1."""
    height = side.height
    group = side.columns[0]
    vocabulary: dict[str, int] = {}
    parts: list[npt.NDArray[np.int64]] = [_rule_codes(side, other, other_row, rules), side.stage]
    parts += [_coded(column.shapes, vocabulary) for column in group]
    parts += [_coded(column.placements, vocabulary) for column in group]
    dtypes = side.skeleton.items["dtype"].combine_chunks().cast(pa.string())
    parts.append(pc.starts_with(dtypes, "<class").to_numpy(zero_copy_only=False).astype(np.int64))
    found = other_row >= 0
    for column in other.columns[0]:
        codes = _coded(column.shapes, vocabulary)
        parts.append(np.where(found, codes[np.where(found, other_row, 0)], -1) if len(codes) else np.full(height, -1))
    texts: list[str | None] = [*vocabulary, None]
    matrix = np.column_stack(parts)
    unique, place = np.unique(matrix, axis=0, return_inverse=True)
    own = len(group)
    verdicts = []
    for line in unique.tolist():
        rule = rules[line[0]] if line[0] >= 0 else None
        shapes = [_shape(texts[code]) for code in line[2 : 2 + own]]
        placements = [texts[code] for code in line[2 + own : 2 + 2 * own]]
        plain = bool(line[2 + 2 * own])
        others = [_shape(texts[code]) for code in line[3 + 2 * own :]]
        verdicts.append(_decided(side, line[1], rule, shapes, placements, plain, others))
    return Decisions(place.reshape(-1).astype(np.int64), tuple(verdicts))


def _coded(column: Any, vocabulary: dict[str, int]) -> npt.NDArray[np.int64]:
    """Codes of a dictionary-encoded column in a shared vocabulary, -1 for null."""
    places = np.array([*(vocabulary.setdefault(text, len(vocabulary)) for text in column.dictionary.to_pylist()), -1])
    found: npt.NDArray[np.int64] = places[
        pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    ]
    return found


def _shape(text: str | None) -> Shape:
    return None if text is None else shape_of(text)


def _rule_codes(
    side: Side, other: Side, other_row: npt.NDArray[np.int64], rules: tuple[Rule, ...]
) -> npt.NDArray[np.int64]:
    """The first rule that fits a row's name, or that of its counterpart; -1 for none."""
    out = np.full(side.height, -1, np.int64)
    if not rules:
        return out
    names = side.skeleton.items["name"]
    others = other.skeleton.items["name"].combine_chunks().take(pa.array(other_row, mask=other_row < 0))
    for number in reversed(range(len(rules))):
        pattern = _expression(rules[number].pattern)
        for column in (names, others):
            hits = pc.fill_null(pc.match_substring_regex(column, pattern), False)
            out[np.asarray(hits.to_numpy(zero_copy_only=False) if isinstance(hits, pa.Array) else hits.to_numpy())] = (
                number
            )
    return out


def unused(rules: tuple[Rule, ...], *sides: Side) -> list[str]:
    """A note on rules whose patterns fit no item of either side."""
    names = [side.skeleton.items["name"] for side in sides]
    lost = [
        rule
        for rule in rules
        if not any(pc.any(pc.match_substring_regex(column, _expression(rule.pattern))).as_py() for column in names)
    ]
    if not lost:
        return []
    near = near_miss(lost[0].pattern, sorted({name for column in names for name in column.to_pylist()}))
    return [f"layout: no item fits {len(lost)} of the rules, from '{lost[0].pattern}' (line {lost[0].line}).{near}"]


def _expression(pattern: str) -> str:
    """A pattern of fnmatch as Arrow's regular expressions have it (`*` and `?` only; anything else is itself)."""
    return "(?s)^" + re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + "$"


# -- rows that look alike


def _decided(
    side: Side,
    stage: int,
    rule: Rule | None,
    shapes: list[Shape],
    placements: list[str | None],
    plain: bool,
    others: list[Shape],
) -> Verdict:
    ranks = [column.ranks[stage] for column in side.columns[0]]
    if plain:
        return Verdict(Kind.PLAIN if len(shapes) > 1 else Kind.SINGLE)
    if any(shape is None for shape in shapes):
        return Verdict(Kind.LACKING)
    if not all(isinstance(shape, tuple) for shape in shapes):
        return Verdict(Kind.PLAIN if len(shapes) > 1 else Kind.SINGLE)
    known: list[tuple[int, ...]] = [shape for shape in shapes if isinstance(shape, tuple)]
    theirs = [shape for shape in others if isinstance(shape, tuple)]
    if rule is not None and len(known) > 1:
        return _by_rule(rule, known, theirs)
    placed = Verdict(Kind.SINGLE)
    if all(text is not None for text in placements):
        placed = _by_placements(side, stage, ranks[0], str(placements[0]))
    if len(known) == 1:
        return placed
    if theirs == known and not placed.problem:
        return Verdict(Kind.BESIDE, source=Source.SHAPES, dp_dim=placed.dp_dim)
    if placed.kind is Kind.SHARD and (problem := _does_not_add_up(known, placed.dim, None)):
        return Verdict(Kind.APART, source=Source.PLACEMENTS, problem=problem)
    if placed.problem or placed.kind is not Kind.SINGLE:
        return placed
    return replace(_by_shapes(known, theirs), dp_dim=placed.dp_dim)


def _by_rule(rule: Rule, shapes: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> Verdict:
    if rule.division is Division.REPLICATED:
        return Verdict(Kind.SAME, source=Source.FILE)
    if rule.division is Division.PARTIAL:
        return Verdict(Kind.PARTIAL, source=Source.FILE)
    rank = len(shapes[0])
    dim = rule.dim if rule.dim >= 0 else rank + rule.dim
    where = f"the layout file, line {rule.line}, divides '{rule.pattern}' along dimension {rule.dim}"
    if not 0 <= dim < rank:
        return Verdict(Kind.APART, source=Source.FILE, problem=f"{where}, but the shape is {list(shapes[0])}")
    problem = _does_not_add_up(shapes, dim, others[0] if len(others) == 1 else None)
    if problem:
        return Verdict(Kind.APART, source=Source.FILE, problem=f"{where}: {problem}")
    return Verdict(Kind.SHARD, dim, Source.FILE)


def _does_not_add_up(shapes: list[tuple[int, ...]], dim: int, whole: tuple[int, ...] | None) -> str:
    """Why shards of these shapes do not make one tensor (of the shape `whole`), '' where they do."""
    told = " and ".join(str(list(shape)) for shape in shapes)
    if any(len(shape) != len(shapes[0]) for shape in shapes) or any(
        shape[:dim] + shape[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :] for shape in shapes
    ):
        return f"{told} differ in other dimensions than {dim}"
    total = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
    if whole is not None and total != whole:
        return f"{told} make {list(total)}, expected {list(whole)}"
    return ""


def among_replicas(side: Side) -> tuple[npt.NDArray[np.bool_], frozenset[tuple[int, ...]]]:
    """Rows that a DTensor's placement divides among the data parallel ranks, and along which dimensions."""
    if side.layout.dp < 2:
        return np.zeros(side.height, bool), frozenset()
    column = side.columns[0][0].placements
    stages = [{row[0] for row in stage} for stage in side.layout.grid]
    found = [_shared_along(text, stages) for text in column.dictionary.to_pylist()]
    rows = np.array([*(bool(dims) for dims in found), False])[_coded_or_last(column)]
    used = set(pc.unique(column.indices).drop_null().to_pylist())
    return rows, frozenset(dims for place, dims in enumerate(found) if dims and place in used)


def _coded_or_last(column: Any) -> npt.NDArray[np.int64]:
    codes: npt.NDArray[np.int64] = pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _shared_along(text: str, stages: Sequence[set[int]]) -> tuple[int, ...]:
    mesh, placements = _mesh(text)
    if len(placements) != mesh.ndim:
        return ()
    lines = [set(np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis])[0].tolist()) for axis in range(mesh.ndim)]
    return tuple(
        int(placement["Shard"]["dim"])
        for line, placement in zip(lines, placements, strict=True)
        if "Shard" in placement and line in stages
    )


@lru_cache(maxsize=4096)
def _mesh(text: str) -> tuple[npt.NDArray[np.int64], list[Any]]:
    mesh, placements, _ = json.loads(text)
    return np.array(mesh, np.int64), placements


def _by_placements(side: Side, stage: int, rank: int, text: str) -> Verdict:
    """What a DTensor's placements say of the tensor-parallel and the data-parallel ranks. SINGLE: nothing."""
    mesh, placements = _mesh(text)
    here = np.argwhere(mesh == rank)
    group = {column.ranks[stage] for column in side.columns[0]}
    replicas = {row[0] for row in side.layout.grid[stage]}
    together = len(side.columns) > 1
    kind, dim, dp_dim = Kind.SINGLE, 0, None
    if not len(here) or len(placements) != mesh.ndim:
        return Verdict(Kind.APART, source=Source.PLACEMENTS, problem=f"rank {rank} is not in its mesh {mesh.tolist()}")
    for axis, placement in enumerate(placements):
        index: list[Any] = here[0].tolist()
        index[axis] = slice(None)
        line = set(mesh[tuple(index)].tolist())
        if len(line) == 1:
            continue
        on_tp, on_dp = line == group, line == replicas
        if "Replicate" in placement:
            kind = Kind.SAME if on_tp and kind is Kind.SINGLE else kind
        elif on_tp and "Shard" in placement:
            kind, dim = Kind.SHARD, int(placement["Shard"]["dim"])
        elif on_tp:
            how = placement.get("Partial", {}).get("reduce_op", "")
            if how not in ("sum", ""):
                return Verdict(Kind.REDUCED, source=Source.PLACEMENTS)
            kind = Kind.PARTIAL
        elif on_dp and "Partial" in placement:
            return Verdict(Kind.REDUCED, source=Source.PLACEMENTS)
        elif on_dp and "Shard" in placement:
            # Where data parallel ranks are compared one by one, the other side's are divided alike.
            dp_dim = int(placement["Shard"]["dim"]) if together else None
        elif len(replicas) > 1 or len(group) > 1:
            return Verdict(
                Kind.APART,
                source=Source.PLACEMENTS,
                problem=f"divided among ranks {number_ranges(line)}, which are neither a tensor-parallel group "
                f"({number_ranges(group)}) nor one of data parallel ranks ({number_ranges(replicas)})",
            )
    return Verdict(kind, dim, Source.PLACEMENTS if kind is not Kind.SINGLE else Source.NOTHING, dp_dim)


def _by_shapes(shapes: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> Verdict:
    """What the shapes say: the same on both sides, or along one dimension as much in sum."""
    alike = all(shape == shapes[0] for shape in shapes)
    if not others:
        return Verdict(Kind.SAME) if alike else Verdict(Kind.APART)
    if alike and all(other == shapes[0] for other in others):
        return Verdict(Kind.SAME, source=Source.SHAPES)
    rank = len(shapes[0])
    if all(len(shape) == rank for shape in (*shapes, *others)):
        for dim in range(rank):
            if _does_not_add_up([*shapes, *others], dim, None):
                continue
            total = sum(shape[dim] for shape in shapes)
            if total == sum(other[dim] for other in others) or all(total == other[dim] for other in others):
                return Verdict(Kind.SHARD, dim, Source.SHAPES)
            if alike and shapes[0][dim] == sum(other[dim] for other in others):
                return Verdict(Kind.SAME, source=Source.SHAPES)
    told = " and ".join(str(list(shape)) for shape in shapes)
    expected = " and ".join(str(list(other)) for other in others)
    return Verdict(
        Kind.APART, source=Source.SHAPES, problem=f"{told} do not add up along any dimension, expected {expected}"
    )


def words(verdict: Verdict, ranks: Sequence[int]) -> str:
    """How the ranks of a group were put together, for a person."""
    who = f"ranks {number_ranges(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    source = SOURCE_WORDS[verdict.source]
    behind = f" ({source})" if source else ""
    how = {
        Kind.SHARD: f"joined along dimension {verdict.dim}{behind}",
        Kind.PARTIAL: f"parts of a sum{behind}",
        Kind.SAME: f"replicas{behind}",
        Kind.BESIDE: "part against part",
        Kind.APART: "not put together",
        Kind.LACKING: "not on all ranks",
        Kind.REDUCED: f"parts of a reduction{behind}",
    }.get(verdict.kind, "")
    return f"{who}: {how}" if how else who
