"""What a person asked `msprobe-aggregate` for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aggregator import match, noise
from aggregator.merge_config import MergeConfig
from aggregator.report.table import Format
from aggregator.sources import ALL, Picked


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for. `time` is the name of the output folder.

    `policy` None judges by msprobe's rules and the tolerances of `divergence`. `layout` (a file, or
    `layouts.plan.AUTO`) puts ranks together before they are compared; None compares rank by rank.
    """

    inputs: tuple[Path, ...]
    time: str
    bench: tuple[Path, ...] = ()
    output: Path | None = None
    config: MergeConfig = field(default_factory=MergeConfig)
    tolerance: float | None = None
    matching: match.Options = match.PLAIN
    attempt: int | None = None
    picked: Picked = ALL
    formats: frozenset[Format] = frozenset(Format)
    allow_missing: bool = False
    policy: noise.Policy | None = None
    layout: Path | str | None = None
