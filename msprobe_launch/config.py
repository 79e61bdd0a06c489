"""ProbeConfig: what a rank records, resolved once (defaults < file < environment < flags), then frozen.

`config_sources` resolves it in the launcher. This module is also what a rank imports to read the result back, so it
needs the standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from msprobe_launch.records.numbers import EVERY, NumberSet


class Level(str, Enum):
    """What is recorded: modules (L0), API calls (L1), both (mix), or only what the script saves (debug).

    L2 records nothing itself: it has the framework dump the kernels of a device, where the framework can.
    """

    L0 = "L0"
    L1 = "L1"
    L2 = "L2"
    MIX = "mix"
    DEBUG = "debug"

    @property
    def modules(self) -> bool:
        return self in (Level.L0, Level.MIX)

    @property
    def apis(self) -> bool:
        return self in (Level.L1, Level.MIX)


class Task(str, Enum):
    """How much of each value is kept: its statistics, those and the values themselves, or nothing but the call."""

    STATISTICS = "statistics"
    TENSOR = "tensor"
    STRUCTURE = "structure"


class SummaryMode(str, Enum):
    """What stands for a tensor in task statistics: its statistics, those and a CRC-32, or the XOR of its words."""

    STATISTICS = "statistics"
    MD5 = "md5"
    XOR = "xor"


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


class WhenFull(str, Enum):
    """What becomes of records while more than `buffer_bytes` wait to be written: dropped, or the rank waits."""

    DROP = "drop"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """The resolved configuration of one run.

    `flush_records` and `flush_seconds` bound what a SIGKILL can lose: a rank's journal is handed on to be written after
    that many records or that many seconds of recording, whichever comes first. `buffer_bytes` may wait to be written on
    a slow file system; `when_full` says what happens then. `max_bytes` bounds the files of the whole
    run, an equal part for each rank that records. `stop` is the last step recorded. `control_seconds` is how often
    RUN_DIR/control.yaml is looked at, between steps.
    """

    run_dir: Path
    level: Level = Level.L1
    task: Task = Task.STATISTICS
    steps: NumberSet = EVERY
    ranks: NumberSet = EVERY
    scope: tuple[str, ...] = ()
    list: tuple[str, ...] = ()
    data_mode: frozenset[DataMode] = frozenset({DataMode.ALL})
    step_on: StepOn = StepOn.AUTO
    eval: bool = False
    bench: Path | None = None
    summary_mode: SummaryMode = SummaryMode.STATISTICS
    tensor_list: tuple[str, ...] = ()
    max_bytes: int | None = None
    every: int = 1
    start: int = 0
    stop: int | None = None
    flush_records: int = 500
    flush_seconds: float = 2.0
    control_seconds: float = 1.0
    buffer_bytes: int = 64_000_000
    when_full: WhenFull = WhenFull.DROP

    def selects(self, step: int) -> bool:
        """True where `step` is to be recorded: one of `steps`, in start..stop, every K-th from start on."""
        return (
            step >= self.start
            and (self.stop is None or step <= self.stop)
            and not (step - self.start) % self.every
            and step in self.steps
        )

    @property
    def last_step(self) -> int | None:
        """No step after this one is recorded; None where there is no such bound."""
        bounds = [bound for bound in (self.steps.last, self.stop) if bound is not None]
        return min(bounds) if bounds else None

    @property
    def saves_values(self) -> bool:
        """True where values of tensors are written, of all ops or of some."""
        return self.task is Task.TENSOR or bool(self.tensor_list)

    def to_json(self) -> str:
        """One line of JSON, which `from_json` reads back to an equal configuration."""
        return json.dumps(self.as_dict(), ensure_ascii=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the manifest and for the environment variable that ranks read."""
        return {
            "run_dir": str(self.run_dir),
            "level": self.level.value,
            "task": self.task.value,
            "steps": str(self.steps),
            "ranks": str(self.ranks),
            "scope": [*self.scope],
            "list": [*self.list],
            "data_mode": sorted(mode.value for mode in self.data_mode),
            "step_on": self.step_on.value,
            "eval": self.eval,
            "bench": None if self.bench is None else str(self.bench),
            "summary_mode": self.summary_mode.value,
            "tensor_list": [*self.tensor_list],
            "max_bytes": self.max_bytes,
            "every": self.every,
            "start": self.start,
            "stop": self.stop,
            "flush_records": self.flush_records,
            "flush_seconds": self.flush_seconds,
            "control_seconds": self.control_seconds,
            "buffer_bytes": self.buffer_bytes,
            "when_full": self.when_full.value,
        }

    @classmethod
    def from_json(cls, text: str) -> ProbeConfig:
        """Read what `to_json` wrote. Raises ValueError, KeyError or TypeError where the text is anything else."""
        raw = json.loads(text)
        return cls(
            run_dir=Path(raw["run_dir"]),
            level=Level(raw["level"]),
            task=Task(raw["task"]),
            steps=NumberSet.parse(raw["steps"]),
            ranks=NumberSet.parse(raw["ranks"]),
            scope=tuple(raw["scope"]),
            list=tuple(raw["list"]),
            data_mode=frozenset(map(DataMode, raw["data_mode"])),
            step_on=StepOn(raw["step_on"]),
            eval=raw["eval"],
            bench=None if raw["bench"] is None else Path(raw["bench"]),
            summary_mode=SummaryMode(raw["summary_mode"]),
            tensor_list=tuple(raw["tensor_list"]),
            max_bytes=raw["max_bytes"],
            every=raw["every"],
            start=raw["start"],
            stop=raw["stop"],
            flush_records=raw["flush_records"],
            flush_seconds=raw["flush_seconds"],
            control_seconds=raw["control_seconds"],
            buffer_bytes=raw["buffer_bytes"],
            when_full=WhenFull(raw["when_full"]),
        )
