"""Mapping files: what of the target stands opposite what of the bench, in msprobe's forms.

--data-mapping    items:   {Torch.a.0.forward.input.0: Functional.b.0.forward.input.0}
--cell-mapping    modules: {fc2.Dense: fc2.Linear}
--api-mapping     APIs:    - {ms_api: Functional.abs, pt_api: Torch.abs, ms_args: [0], pt_args: [0],
                              ms_output: [0], pt_output: [0]}
                           or {Functional.abs: Torch.abs}
--layer-mapping   names inside modules of a class: {TopLayer: {network: module}, Attention: {qkv_proj: query_key_value}}

Left is the target and right the bench; where one of them is a dump of MindSpore, left is that one, as in msprobe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregator import inputs
from msprobe_launch.errors import ConfigError, near_miss

API_KEYS = ("ms_api", "pt_api", "ms_args", "pt_args", "ms_output", "pt_output")
TOP_LAYER = "TopLayer"


@dataclass(frozen=True, slots=True)
class ApiPair:
    """An API of either side, and which of their inputs and outputs belong together (() for all)."""

    left: str
    right: str
    inputs: tuple[tuple[int, int], ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()

    def swapped(self) -> ApiPair:
        return ApiPair(
            self.right, self.left, tuple((b, a) for a, b in self.inputs), tuple((b, a) for a, b in self.outputs)
        )


@dataclass(frozen=True, slots=True)
class Mappings:
    """All mapping files of a comparison. Empty: none was given."""

    data: Mapping[str, str] = field(default_factory=dict)
    cell: Mapping[str, str] = field(default_factory=dict)
    api: tuple[ApiPair, ...] = ()
    layer: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.data or self.cell or self.api or self.layer)

    def swapped(self) -> Mappings:
        """Right for left. What layer mappings say of a class stays: both frameworks' classes may be named."""
        return Mappings(
            {b: a for a, b in self.data.items()},
            {b: a for a, b in self.cell.items()},
            tuple(pair.swapped() for pair in self.api),
            {kind: {b: a for a, b in names.items()} for kind, names in self.layer.items()},
        )


def load(
    data: Path | None = None, cell: Path | None = None, api: Path | None = None, layer: Path | None = None
) -> Mappings:
    """Read the files that were given. Raises ConfigError with file, line or key, and the near miss."""
    return Mappings(
        _pairs(data) if data else {},
        {_bare(a): _bare(b) for a, b in _pairs(cell).items()} if cell else {},
        _apis(api) if api else (),
        _layers(layer) if layer else {},
    )


class _Lines(dict[Any, Any]):
    """A mapping of a file that knows the line of each key."""

    def __init__(self, entries: Mapping[Any, Any], lines: Mapping[Any, int]) -> None:
        super().__init__(entries)
        self.lines = lines

    def at(self, path: Path, key: Any) -> str:
        return f"{path}, line {self.lines[key]}"


def _yaml(path: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Keeps the lines of keys, and refuses one that stands twice: yaml would silently take the last."""

    def mapping(loader: Any, node: Any) -> Any:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str | int | float | bool | None):
                raise ConfigError(f"{path}, line {line}: a {type(key).__name__} cannot be a name")
            if key in seen:
                raise ConfigError(f"{path}, line {line}: '{key}' stands there twice (first in line {seen[key]})")
            seen[key] = line
        return _Lines(yaml.SafeLoader.construct_mapping(loader, node, deep=True), seen)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return inputs.yaml_of(path, lambda text: yaml.load(text, Loader))


def _pairs(path: Path) -> dict[str, str]:
    return _texts(path, _yaml(path), "")


def _texts(path: Path, raw: Any, where: str) -> dict[str, str]:
    """A mapping of texts to texts, no right side named twice."""
    inside = f", under '{where}'" if where else ""
    if raw is None:
        return {}
    if not isinstance(raw, _Lines):
        raise ConfigError(
            f"{path}{inside}: holds {type(raw).__name__}; it needs a mapping of target names to bench names"
        )
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for key, value in raw.items():
        left, right, place = str(key), str(value), raw.at(path, key)
        if value is None or isinstance(value, (dict, list)):
            raise ConfigError(f"{place}{inside}: '{left}' needs one name on its right, not {value!r}")
        if right in taken:
            raise ConfigError(f"{place}{inside}: '{right}' is given to both '{taken[right]}' and '{left}'")
        found[left] = right
        taken[right] = left
    return found


def _bare(name: str) -> str:
    return name.removeprefix("Cell.").removeprefix("Module.")


def _apis(path: Path) -> tuple[ApiPair, ...]:
    raw = _yaml(path)
    if isinstance(raw, dict):
        return tuple(ApiPair(a, b) for a, b in _texts(path, raw, "").items())
    if not isinstance(raw, list):
        raise ConfigError(f"{path}: holds {type(raw).__name__}; it needs a list of entries with {', '.join(API_KEYS)}")
    out = []
    for number, entry in enumerate(raw, 1):
        where = f"{path}, entry {number}"
        if not isinstance(entry, _Lines):
            raise ConfigError(f"{where}: is {entry!r}; it needs the keys {', '.join(API_KEYS)}")
        for key in entry:
            if key not in API_KEYS and not str(key).startswith(("ms_parameters", "pt_parameters")):
                raise ConfigError(f"{entry.at(path, key)}: unknown key '{key}'.{near_miss(str(key), API_KEYS)}")
        where += f", line {min(entry.lines.values(), default=1)}"
        for key in ("ms_api", "pt_api"):
            if not isinstance(entry.get(key), str):
                raise ConfigError(f"{where}: '{key}' is missing, or no name")
        out.append(
            ApiPair(entry["ms_api"], entry["pt_api"], _places(path, entry, "args"), _places(path, entry, "output"))
        )
    return tuple(out)


def _places(path: Path, entry: _Lines, what: str) -> tuple[tuple[int, int], ...]:
    keys = [f"{side}_{what}" for side in ("ms", "pt")]
    sides = [[] if entry.get(key) is None else entry[key] for key in keys]
    for key, places in zip(keys, sides, strict=True):
        if not isinstance(places, list) or not all(type(place) is int for place in places):
            raise ConfigError(f"{entry.at(path, key)}: '{key}' must be a list of places such as [0, 1], not {places!r}")
        if len(set(places)) < len(places):
            raise ConfigError(f"{entry.at(path, key)}: '{key}' names a place twice: {places}")
    if len(sides[0]) != len(sides[1]):
        at = entry.at(path, next(key for key in keys if key in entry))
        raise ConfigError(
            f"{at}: '{keys[0]}' names {len(sides[0])} places and '{keys[1]}' {len(sides[1])}; they belong in pairs"
        )
    return tuple(zip(*sides, strict=True))


def _layers(path: Path) -> dict[str, dict[str, str]]:
    raw = _yaml(path)
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}; it needs a mapping of class names")
    return {str(kind): _texts(path, names, str(kind)) for kind, names in (raw or {}).items()}
