"""--thresholds FILE: what `--verdict noise` tolerates, as YAML, for all ops or by pattern.

    confidence: 4            # of noise.CONSTANTS
    spread_factor: 4
    ops:                     # the first pattern that fits an op decides; * and ? as in file names
      Functional.softmax.*: {factor: 10}
      "Module.*.attn.*": {tolerance: 0.001}
      Torch.matmul.*: {reduction_length: 4096, unit_roundoff: 0.00048828125}
      Functional.dropout.*: {ignore: true}

Independent of tables: what is set here is applied by `noise`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aggregator import inputs
from msprobe_launch.errors import ConfigError, near_miss

CONFIDENCE = 4.0  # see noise.CONSTANTS
SPREAD_FACTOR = 4.0  # see noise.CONSTANTS


@dataclass(frozen=True, slots=True)
class OpThreshold:
    """What is set for the ops that fit `pattern`. None: as it would be.

    `factor` multiplies the thresholds, `tolerance` replaces them (a ratio, for all statistics alike);
    `reduction_length` and `unit_roundoff` replace what is read off shapes and dtypes; `ignore` judges nothing.
    """

    pattern: str
    factor: float | None = None
    tolerance: float | None = None
    reduction_length: float | None = None
    unit_roundoff: float | None = None
    ignore: bool = False

    def fits(self, op: str) -> bool:
        """True where the pattern fits an op's whole name (case counts)."""
        return re.compile(fnmatch.translate(self.pattern)).match(op) is not None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """All of a file, or the defaults."""

    confidence: float = CONFIDENCE
    spread_factor: float = SPREAD_FACTOR
    ops: tuple[OpThreshold, ...] = ()

    def of(self, op: str) -> OpThreshold | None:
        """The first entry that fits the op."""
        return next((entry for entry in self.ops if entry.fits(op)), None)

    def unused(self, ops: Iterable[str]) -> tuple[str, ...]:
        """Patterns that decide none of these ops."""
        used = {id(self.of(op)) for op in ops}
        return tuple(entry.pattern for entry in self.ops if id(entry) not in used)


DEFAULT = Thresholds()


def load(path: Path) -> Thresholds:
    """Read a file. Raises ConfigError with line, key and near miss."""
    return _Reader(path).read()


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError("must be a positive number")
    return float(value)


def _length(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be a whole number of at least 1")
    return float(value)


def _at_least_one(value: Any) -> float:
    if _positive(value) < 1:
        raise ValueError("must be at least 1")
    return float(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


_TOP: dict[str, Callable[[Any], Any]] = {"confidence": _positive, "spread_factor": _at_least_one}
_OP: dict[str, Callable[[Any], Any]] = {
    "factor": _positive,
    "tolerance": _positive,
    "reduction_length": _length,
    "unit_roundoff": _positive,
    "ignore": _truth,
}


class _Reader:
    """Walks the YAML nodes, which know their lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Thresholds:
        import yaml

        root = inputs.yaml_of(self._path, lambda text: yaml.compose(text, yaml.SafeLoader))
        if root is None:
            return DEFAULT
        found = DEFAULT
        for key, node, value in self._entries(root, (*_TOP, "ops"), ""):
            if key == "ops":
                found = replace(found, ops=tuple(self._op(*entry) for entry in self._entries(value, None, "ops")))
            else:
                found = replace(found, **{key: self._value(_TOP[key], key, value, node)})
        return found

    def _op(self, pattern: str, node: Any, body: Any) -> OpThreshold:
        values = {key: self._value(_OP[key], key, value, at) for key, at, value in self._entries(body, _OP, pattern)}
        if not values:
            raise self._error(node, f"'{pattern}' sets nothing. Known keys: {', '.join(_OP)}")
        if values.get("ignore") and len(values) > 1:
            raise self._error(node, f"'{pattern}': ignore leaves nothing for the other keys to set")
        if "tolerance" in values and len(values) > 1:
            raise self._error(node, f"'{pattern}': tolerance replaces the threshold that the other keys would change")
        return OpThreshold(pattern, **values)

    def _entries(self, node: Any, known: Any, where: str) -> list[tuple[str, Any, Any]]:
        """(key, its node, the value's node) of a mapping. With `known`, others are refused."""
        import yaml

        inside = f" under '{where}'" if where else ""
        if not isinstance(node, yaml.MappingNode):
            expected = ", ".join(known) if known else "patterns of op names"
            raise self._error(node, f"a mapping is needed{inside}, with {expected}")
        lines: dict[str, int] = {}
        found = []
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            if known is not None and key not in known:
                raise self._error(
                    key_node, f"unknown key '{key}'{inside}.{near_miss(key, known)} Known: {', '.join(known)}"
                )
            if key in lines:
                raise self._error(key_node, f"'{key}' stands there twice{inside} (first in line {lines[key]})")
            lines[key] = key_node.start_mark.line + 1
            found.append((key, key_node, value_node))
        return found

    def _value(self, parse: Callable[[Any], Any], key: str, node: Any, at: Any) -> Any:
        import yaml

        raw = yaml.SafeLoader("").construct_object(node, deep=True)
        if isinstance(raw, str):  # YAML 1.1 takes 1e-4 for a text
            with contextlib.suppress(ValueError):
                raw = float(raw)
        try:
            return parse(raw)
        except ValueError as error:
            raise self._error(at, f"'{key}' {error}, not {raw!r}") from None

    def _error(self, node: Any, text: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {node.start_mark.line + 1}: {text}")
