"""ProbeConfig: what a rank records, resolved once (defaults < file < environment < flags), then frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Level(str, Enum):
    """What is recorded: modules (L0), API calls (L1), both (mix)."""

    L0 = "L0"
    L1 = "L1"
    MIX = "mix"

    @property
    def modules(self) -> bool:
        return self is not Level.L1

    @property
    def apis(self) -> bool:
        return self is not Level.L0


class Task(str, Enum):
    """How much of each value is kept."""

    STATISTICS = "statistics"
    STRUCTURE = "structure"


class DataMode(str, Enum):
    """Which values of a call are kept. An empty set of modes, or ALL in it, keeps all."""

    ALL = "all"
    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    OUTPUT = "output"


class StepOn(str, Enum):
    """What ends a step. AUTO is the rule of `capture.steps`."""

    AUTO = "auto"
    FORWARD = "forward"
    OPTIMIZER = "optimizer"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class NumberSet:
    """Numbers picked by inclusive ranges, as in `0,2,5-8`. No range at all picks every number."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, number: int) -> bool:
        return not self.ranges or any(low <= number <= high for low, high in self.ranges)

    @property
    def last(self) -> int | None:
        """The largest number picked, or None where every number is."""
        return max(high for _, high in self.ranges) if self.ranges else None

    def __str__(self) -> str:
        return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in self.ranges)


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """The resolved configuration of one run.

    `flush_records` and `flush_seconds` bound what a SIGKILL can lose: a rank's journal reaches the kernel after that
    many records or that many seconds of recording, whichever comes first.
    """

    run_dir: Path
    level: Level = Level.L1
    task: Task = Task.STATISTICS
    steps: NumberSet = NumberSet()
    ranks: NumberSet = NumberSet()
    scope: tuple[str, ...] = ()
    list: tuple[str, ...] = ()
    data_mode: frozenset[DataMode] = frozenset({DataMode.ALL})
    step_on: StepOn = StepOn.AUTO
    eval: bool = False
    bench: Path | None = None
    flush_records: int = 500
    flush_seconds: float = 2.0
