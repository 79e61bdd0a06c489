"""The layout file: how the ranks of both runs divide the model, and how single values are divided.

    target: {tp: 2, dp: 1, pp: 1, order: tp-dp-pp}     sizes (1 where left out); order: fastest-changing first
    bench: {tp: 1}
    rules:                                             the first pattern that fits an item's name decides
      "*.fc1.*.parameters.*": {shard: 0}
      "*.router.*": replicated
      "*.partial_logits.*": partial

A side with pipeline stages may say what its stages call their modules, one entry per stage:

    target:
      pp: 2
      microbatches: 4                                  only needed at level L1, where no module numbers them
      stages:
      - {blocks: layers.0}                             blocks.<i> of stage 0 is layers.<0 + i>
      - {blocks: layers.2, out: head}                  blocks.<i> of stage 1 is layers.<2 + i>, out is head

The left side "" is the stage itself: {"": layers.2} where a stage is a bare nn.Sequential.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from aggregator import inputs
from msprobe_launch.errors import ConfigError, UsageError, near_miss

AXES = ("tp", "dp", "pp")
SIDES = ("target", "bench")
_SIDE_KEYS = (*AXES, "order", "stages", "microbatches")
_TOP_KEYS = (*SIDES, "rules")


class Division(str, Enum):
    """How a value is divided among the ranks of a tensor-parallel group."""

    SHARD = "shard"
    REPLICATED = "replicated"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Rule:
    """Items whose names fit `pattern` (`*` and `?` stand for any texts and characters) are divided so.

    `dim` counts from 0, or from the end below 0; it belongs to SHARD. `line` is where the file says it.
    """

    pattern: str
    division: Division
    dim: int = 0
    line: int = 0

    @property
    def words(self) -> str:
        return f"{self.division.value} {self.dim}" if self.division is Division.SHARD else self.division.value


@dataclass(frozen=True, slots=True)
class StageNames:
    """What a stage calls its modules: (its own name, name in the whole model, index of its first layer or None)."""

    entries: tuple[tuple[str, str, int | None], ...] = ()

    def whole(self, path: str) -> str:
        """A module's path in the whole model. The longest left side that fits decides."""
        for own, other, first in self.entries:
            rest = path if not own else path[len(own) + 1 :] if path.startswith(f"{own}.") else None
            if path == own and own and first is None:
                return other
            if rest is None:
                continue
            if first is None:
                if own:
                    return f"{other}.{rest}" if other else rest
                continue
            head, _, tail = rest.partition(".")
            if head.isdigit():
                return ".".join(part for part in (other, str(first + int(head)), tail) if part)
        return path


@dataclass(frozen=True, slots=True)
class SideLayout:
    """The ranks of one run: `grid[stage][dp][tp]` is a rank's number."""

    grid: tuple[tuple[tuple[int, ...], ...], ...]
    stages: tuple[StageNames, ...] = ()
    microbatches: int = 1

    @property
    def pp(self) -> int:
        return len(self.grid)

    @property
    def dp(self) -> int:
        return len(self.grid[0])

    @property
    def tp(self) -> int:
        return len(self.grid[0][0])

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for stage in self.grid for group in stage for rank in group))

    @property
    def words(self) -> str:
        return f"tp {self.tp}, dp {self.dp}, pp {self.pp}"

    def names(self, stage: int) -> StageNames:
        return self.stages[stage] if self.stages else StageNames()


@dataclass(frozen=True, slots=True)
class Layout:
    """Both runs, and the rules for single values. `source` says where it comes from."""

    target: SideLayout
    bench: SideLayout
    rules: tuple[Rule, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class SideSizes:
    """One side as the file has it, before anybody knows the number of ranks."""

    sizes: Mapping[str, int]
    order: tuple[str, ...] = AXES
    stages: tuple[StageNames, ...] = ()
    microbatches: int = 1
    line: int = 0


@dataclass(frozen=True, slots=True)
class LayoutFile:
    """What `load` read."""

    path: Path
    target: SideSizes
    bench: SideSizes
    rules: tuple[Rule, ...]

    def of(self, target_ranks: Iterable[int], bench_ranks: Iterable[int]) -> Layout:
        """The layout of runs with these ranks. Raises ConfigError where the sizes do not multiply to them."""
        return Layout(
            self._side("target", self.target, sorted(target_ranks)),
            self._side("bench", self.bench, sorted(bench_ranks)),
            self.rules,
            self.path.name,
        )

    def _side(self, name: str, side: SideSizes, ranks: list[int]) -> SideLayout:
        tp, dp, pp = (side.sizes[axis] for axis in AXES)
        where = f"{self.path}, line {side.line}" if side.line else f"{self.path}"
        if tp * dp * pp != len(ranks):
            raise ConfigError(
                f"{where}: '{name}': tp {tp} x dp {dp} x pp {pp} = {tp * dp * pp}, but the {name} has {len(ranks)} "
                f"{'rank' if len(ranks) == 1 else 'ranks'}",
                hint="Give every size that is not 1; their product is the number of ranks.",
            )
        if side.stages and len(side.stages) != pp:
            raise ConfigError(f"{where}: '{name}': {len(side.stages)} entries under 'stages', but pp is {pp}")
        stride: dict[str, int] = {}
        step = 1
        for axis in side.order:
            stride[axis] = step
            step *= side.sizes[axis]
        grid = tuple(
            tuple(
                tuple(ranks[p * stride["pp"] + d * stride["dp"] + t * stride["tp"]] for t in range(tp))
                for d in range(dp)
            )
            for p in range(pp)
        )
        return SideLayout(grid, side.stages, side.microbatches)


def load(path: Path) -> LayoutFile:
    """Read a layout file. Raises ConfigError with file, line, key and the near miss."""
    root = _nodes(path)
    if not isinstance(root.value, dict):
        raise ConfigError(f"{path}: holds {_kind(root)}; it needs a mapping with {', '.join(_TOP_KEYS)}")
    _known(path, root, _TOP_KEYS, "")
    for side in SIDES:
        if side not in root.value:
            raise ConfigError(
                f"{path}: '{side}' is missing", hint="Both sides' sizes are needed, such as: bench: {tp: 1}"
            )
    return LayoutFile(
        path,
        _side(path, "target", root.value["target"]),
        _side(path, "bench", root.value["bench"]),
        _rules(path, root.value["rules"]) if "rules" in root.value else (),
    )


# -- one part of the file


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of the file and the line it begins in."""

    value: Any
    line: int


def _nodes(path: Path) -> _Node:
    """The file as nested `_Node`s: dictionaries of text to node, lists of nodes, scalars."""
    import yaml

    scalars = yaml.SafeLoader("")

    def made(node: Any) -> _Node:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            found: dict[str, _Node] = {}
            for key, value in node.value:
                name = str(key.value)
                if name in found:
                    raise ConfigError(f"{path}, line {key.start_mark.line + 1}: '{name}' stands there twice")
                part = made(value)
                found[name] = _Node(part.value, key.start_mark.line + 1)
            return _Node(found, line)
        if isinstance(node, yaml.SequenceNode):
            return _Node([made(part) for part in node.value], line)
        return _Node(scalars.construct_object(node), line)

    root = inputs.yaml_of(path, lambda text: yaml.compose(text, yaml.SafeLoader))
    return made(root) if root is not None else _Node({}, 1)


def _kind(node: _Node) -> str:
    return type(node.value).__name__


def _known(path: Path, node: _Node, keys: tuple[str, ...], where: str) -> None:
    for key, part in node.value.items():
        if key not in keys:
            inside = f" under '{where}'" if where else ""
            raise ConfigError(
                f"{path}, line {part.line}: unknown key '{key}'{inside}.{near_miss(key, keys)} Known: {', '.join(keys)}"
            )


def _side(path: Path, name: str, node: _Node) -> SideSizes:
    where = f"{path}, line {node.line}"
    if node.value is None:
        return SideSizes(dict.fromkeys(AXES, 1), line=node.line)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{where}: '{name}' needs sizes such as {{tp: 2, dp: 1, pp: 1}}, not {node.value!r}")
    _known(path, node, _SIDE_KEYS, name)
    sizes = {axis: _size(path, f"{name}.{axis}", node.value.get(axis)) for axis in AXES}
    order: tuple[str, ...] = AXES
    if "order" in node.value:
        order = _order(path, name, node.value["order"])
    stages: tuple[StageNames, ...] = ()
    if "stages" in node.value:
        part = node.value["stages"]
        if not isinstance(part.value, list):
            raise ConfigError(f"{path}, line {part.line}: '{name}.stages' needs a list, one entry per stage")
        stages = tuple(_stage(path, f"{name}.stages", entry) for entry in part.value)
    return SideSizes(
        sizes, order, stages, _size(path, f"{name}.microbatches", node.value.get("microbatches")), node.line
    )


def _size(path: Path, key: str, node: _Node | None) -> int:
    if node is None:
        return 1
    if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < 1:
        raise ConfigError(f"{path}, line {node.line}: '{key}' needs a whole number of at least 1, not {node.value!r}")
    return node.value


def _order(path: Path, name: str, node: _Node) -> tuple[str, ...]:
    raw = [part.value for part in node.value] if isinstance(node.value, list) else str(node.value).split("-")
    if sorted(map(str, raw)) != sorted(AXES):
        raise ConfigError(
            f"{path}, line {node.line}: '{name}.order' needs each of {', '.join(AXES)} once, the one that changes "
            f"fastest first, such as tp-dp-pp, not {'-'.join(map(str, raw))!r}"
        )
    return tuple(map(str, raw))


def _stage(path: Path, key: str, node: _Node) -> StageNames:
    if node.value is None:
        return StageNames()
    if not isinstance(node.value, dict):
        raise ConfigError(f"{path}, line {node.line}: '{key}' needs entries such as {{blocks: layers.2}}")
    entries = []
    for own, part in node.value.items():
        if not isinstance(part.value, str):
            raise ConfigError(f"{path}, line {part.line}: '{key}': '{own}' needs a module's name, not {part.value!r}")
        head, dot, last = part.value.rpartition(".")
        numbered = last.isdigit()
        entries.append((own, (head if dot else "") if numbered else part.value, int(last) if numbered else None))
    # The longest first: what is said of a part of a module goes before what is said of the whole.
    return StageNames(tuple(sorted(entries, key=lambda entry: (-len(entry[0]), entry[0]))))


def _rules(path: Path, node: _Node) -> tuple[Rule, ...]:
    if not isinstance(node.value, dict):
        raise ConfigError(f"{path}, line {node.line}: 'rules' needs a mapping of name patterns, not {node.value!r}")
    return tuple(_rule(path, pattern, part) for pattern, part in node.value.items())


_FORMS = "{shard: DIM}, replicated or partial"


def _rule(path: Path, pattern: str, node: _Node) -> Rule:
    where = f"{path}, line {node.line}: rule '{pattern}'"
    if isinstance(node.value, str):
        words = [division.value for division in Division]
        if node.value not in words or node.value == Division.SHARD.value:
            raise ConfigError(f"{where}: unknown '{node.value}'.{near_miss(node.value, words)} Known: {_FORMS}")
        return Rule(pattern, Division(node.value), line=node.line)
    if not isinstance(node.value, dict) or len(node.value) != 1:
        raise ConfigError(f"{where}: needs {_FORMS}")
    ((key, part),) = node.value.items()
    if key != Division.SHARD.value:
        raise ConfigError(f"{where}: unknown key '{key}'.{near_miss(key, [Division.SHARD.value])} Known: {_FORMS}")
    if isinstance(part.value, bool) or not isinstance(part.value, int):
        raise ConfigError(f"{where}: 'shard' needs the number of a dimension, not {part.value!r}")
    return Rule(pattern, Division.SHARD, part.value, node.line)


def no_ranks(side: str) -> UsageError:
    """The error of a run whose dumps have no rank numbers."""
    return UsageError(
        f"--layout: the {side}'s dumps have no rank numbers",
        hint="Name a run directory or a step<N> folder with rank<R> folders.",
    )
