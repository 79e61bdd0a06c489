"""`--config merge.yaml`: which items and which metrics to merge, in msprobe's own two keys.

api:                      # optional here; without it all items
- Distributed             # {type}, {type}.{api}, {type}.{api}.{call} or {type}.{api}.{call}.{direction}
- Torch.matmul.0
compare_index:          # optional; without it the mode's metrics, then Requires_grad Consistent
- Max diff
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator import columns, inputs
from aggregator.columns import Mode
from msprobe_launch.errors import ConfigError, near_miss

KEYS = ("api", "compare_index")

MD5 = "MD5"
"""Our one sheet of md5 mode: the checksum where both sides agree, both where they do not."""


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Empty tuples mean all."""

    api: tuple[str, ...] = ()
    compare_index: tuple[str, ...] = ()


def load(path: Path) -> MergeConfig:
    """Read and check a configuration. Raises ConfigError with the near miss of an unknown key or metric."""
    import yaml

    raw = inputs.yaml_of(path, yaml.safe_load)
    if raw is None:
        return MergeConfig()
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}; it needs the keys {' and '.join(KEYS)}")
    for key in raw:
        if key not in KEYS:
            said = f"unknown key '{key}' in {path}.{near_miss(str(key), KEYS)}"
            raise ConfigError(said, hint=f"Known: {', '.join(KEYS)}")
    config = MergeConfig(_texts(path, raw, "api"), _texts(path, raw, "compare_index"))
    known = list(dict.fromkeys(name for mode in Mode for name in allowed(mode)))
    for name in config.compare_index:
        if name not in known:
            said = f"unknown metric '{name}' in {path}.{near_miss(name, known)}"
            raise ConfigError(said, hint=f"Known: {', '.join(known)}")
    return config


def _texts(path: Path, raw: dict[Any, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise ConfigError(f"'{key}' in {path} must be a list of texts, not {value!r}")
    # An api entry may be written with the dot that ends it, as msprobe's own pages do.
    return tuple(dict.fromkeys(entry.rstrip(".") if key == "api" else entry for entry in value))


def default_metrics(mode: Mode) -> tuple[str, ...]:
    """The sheets of a workbook without a `compare_index`, in order."""
    middle = (MD5,) if mode is Mode.MD5 else mode.metrics
    return (*middle, columns.GRAD_CONSISTENT)


def allowed(mode: Mode) -> tuple[str, ...]:
    """All names `compare_index` may hold for a mode: msprobe's, and each side's own statistics and the result."""
    return (*default_metrics(mode), *mode.statistics, columns.RESULT)


def chosen(config: MergeConfig, mode: Mode) -> tuple[str, ...]:
    """The metrics to merge, in the order of the configuration.

    Raises ConfigError where the configuration names none that the mode has.
    """
    if not config.compare_index:
        return default_metrics(mode)
    picked = tuple(name for name in config.compare_index if name in allowed(mode))
    if not picked:
        raise ConfigError(
            f"compare_index {list(config.compare_index)} holds no metric of {mode.value} mode",
            hint=f"This mode has: {', '.join(allowed(mode))}",
        )
    return picked
