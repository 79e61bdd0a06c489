"""What every backend takes and gives: a plan of what to start, and how each worker of this node ended."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msprobe_launch.config import ProbeConfig
from msprobe_launch.launch.settings import LaunchSettings
from msprobe_launch.records.roster import Manifest

if TYPE_CHECKING:
    from msprobe_launch.launch.supervision import Supervision


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What to start.

    `options` are the backend's own tokens, `target` the script and everything after it, untouched. `config` is None
    where the probe is off: the same launch with nothing injected. `run_dir_is_default` says that the user left its
    name to us. `manifest` lacks the world size, which the backend knows when it starts.
    """

    options: tuple[str, ...]
    target: tuple[str, ...]
    config: ProbeConfig | None
    run_dir_is_default: bool
    manifest: Manifest
    settings: LaunchSettings = field(default_factory=LaunchSettings)


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of this node in one attempt. Filled while it runs; what is not known yet is None.

    `exit_code` is negative for a signal, as subprocess has it. `stopped` is True where the launcher ended it, so that
    its exit code says nothing about the worker. `peak_memory` is in bytes, as last seen while it ran; `ended_at` is the
    monotonic time at which its end was noticed.
    """

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    pid: int
    exit_code: int | None = None
    stopped: bool = False
    peak_memory: int | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a launch ended.

    `workers` holds all attempts of this node, `run_dir` the directory in use (None with the probe off). `signal` is
    the number of the signal that told the launcher to stop; `failed` that the backend calls the job failed; `failure`
    what else broke in the launcher itself. `exit_code` is that of the command where another launcher ran the ranks.
    """

    run_dir: Path | None
    workers: tuple[Worker, ...] = ()
    signal: int | None = None
    failed: bool = False
    failure: Exception | None = None
    exit_code: int | None = None

    @property
    def attempt(self) -> int:
        """The last attempt."""
        return max((worker.attempt for worker in self.workers), default=0)

    @property
    def last(self) -> tuple[Worker, ...]:
        """The workers of the last attempt, ranks ascending."""
        return self.of(self.attempt)

    def of(self, attempt: int) -> tuple[Worker, ...]:
        """The workers of one attempt, ranks ascending."""
        return tuple(sorted((w for w in self.workers if w.attempt == attempt), key=lambda w: w.rank))


class Launcher(Protocol):
    """One way to start ranks."""

    name: str

    def parser(self) -> argparse.ArgumentParser:
        """The backend's own parser: which options it has and which of them take values. May import a framework."""

    def environment(self, plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
        """What is added to the environment of what is started."""

    def describe(self, plan: LaunchPlan) -> list[str]:
        """What would be started, in lines, every option checked as `launch` would. Starts and writes nothing.

        Raises ProbeError where `launch` would refuse the plan.
        """

    def launch(self, plan: LaunchPlan, supervision: Supervision) -> RunOutcome:
        """Start the plan, tell `supervision` of it, wait, leave nothing behind.

        Raises ProbeError where it cannot be started as asked.
        """
