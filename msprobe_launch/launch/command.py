"""Backend command: another launcher (srun, mpirun, accelerate, deepspeed, a script) starts the ranks.

The probe's variables travel in the command's environment. Who is a rank, and which one, each process finds out from
the variables of its launcher (`bootstrap.variables.RANK_SOURCES`). How the ranks ended is known from their marks only.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from msprobe_launch.bootstrap import variables
from msprobe_launch.errors import UsageError
from msprobe_launch.launch.base import LaunchPlan, RunOutcome, Worker
from msprobe_launch.launch.commandline import refusing
from msprobe_launch.launch.injection import worker_environment
from msprobe_launch.launch.rundir import discard, make_fresh, sign
from msprobe_launch.launch.supervision import Supervision
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark

SHUTDOWN_SECONDS = 30  # as torchrun's --shutdown-timeout
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_PYTHON = re.compile(r"python[\d.]*$")
_LAUNCHER_MODULES = ("torch.distributed", "accelerate", "deepspeed", "mindspore", "torchrun", "horovod")


class CommandLauncher:
    """Starts a command that starts the ranks."""

    name = "command"

    def parser(self) -> argparse.ArgumentParser:
        parser = refusing(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=float, default=SHUTDOWN_SECONDS)
        return parser

    def environment(self, plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
        """What is added to the command's environment."""
        if plan.config is None:
            return {}
        added = worker_environment(plan.config, environ)
        if plan.settings.rank_variable:
            added[variables.RANK_FROM] = plan.settings.rank_variable
        elif not is_rank_itself(plan.target):
            # A batch script's own SLURM_PROCID, say, numbers none of the processes that its launchers start.
            there = [source for source in variables.RANK_SOURCES if source[0] in environ]
            if there:
                added[variables.INHERITED] = ",".join(variables.numbers(environ, source) for source in there)
        if plan.settings.hang_timeout is not None:
            added[variables.HANG] = "1"
        return added

    def describe(self, plan: LaunchPlan) -> list[str]:
        """The command, as it is started here."""
        self._timeout(plan)
        if shutil.which(plan.target[0]) is None:
            raise UsageError(f"{plan.target[0]} cannot be started: there is no such command.")
        return [f"command: {shlex.join(plan.target)}", "ranks: those that the command numbers"]

    def _timeout(self, plan: LaunchPlan) -> float:
        return float(self.parser().parse_args(plan.options).shutdown_timeout)

    def launch(self, plan: LaunchPlan, supervision: Supervision) -> RunOutcome:
        timeout = self._timeout(plan)
        added = self.environment(plan, os.environ)
        run_dir = None if plan.config is None else plan.config.run_dir
        made: list[Path] = []
        if run_dir is not None:
            made = make_fresh(run_dir)
            sign(RunLayout(run_dir), plan.manifest)
            supervision.run_dir = run_dir
        stopped_by: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            stopped_by.append(number)
            raise _Stop

        before = {number: signal.signal(number, stop) for number in ENDING}
        try:
            try:
                process = subprocess.Popen(plan.target, env={**os.environ, **added}, start_new_session=True)
            except OSError as error:
                if run_dir is not None:
                    discard(RunLayout(run_dir), made)
                raise UsageError(f"{plan.target[0]} cannot be started: {error.strerror}") from error
            supervision.started([Worker(-1, 0, 0, 0, process.pid)])
            code = _wait(process, stopped_by, timeout)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        ended = Worker(-1, 0, 0, 0, process.pid, code, stopped=bool(stopped_by))
        # A launcher inside the command may have given its ranks sessions of their own.
        (command,) = supervision.ended([ended], whole_tree=bool(stopped_by))
        workers = () if run_dir is None else _workers(run_dir)
        return RunOutcome(run_dir, workers, next(iter(stopped_by), None), failed=code != 0, exit_code=command.exit_code)


class _Stop(Exception):
    """A signal has told the launcher to stop."""


def _wait(process: subprocess.Popen[bytes], stopped_by: list[int], timeout: float) -> int:
    """The command's exit code; where we are told to stop, the command gets the signal and then `timeout` seconds."""
    while True:
        try:
            return process.wait(timeout if stopped_by else None)
        except _Stop:
            os.killpg(process.pid, stopped_by[-1])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stopped_by.append(signal.SIGKILL)


def is_rank_itself(target: tuple[str, ...]) -> bool:
    """True where the command is a Python script, and no launcher written in Python: its variables number itself."""
    if not _PYTHON.match(os.path.basename(target[0])):
        return False
    module = next((target[at + 1] for at, token in enumerate(target[:-1]) if token == "-m"), "")
    return not module.startswith(_LAUNCHER_MODULES)


def _workers(run_dir: Path) -> tuple[Worker, ...]:
    """The ranks that left marks, and those that the marks' world size says are missing."""
    found: list[Worker] = []
    for attempt in RunLayout(run_dir).attempts():
        layout = RunLayout(run_dir, attempt)
        marks = [
            mark if isinstance(mark, RankMark) else RankMark(rank=rank, attached=False, attempt=attempt)
            for rank, mark in roster.marks(layout)
        ]
        world_size = max((mark.world_size or 0 for mark in marks), default=0)
        by_rank = {mark.rank: mark for mark in marks}
        for rank in sorted({*by_rank, *range(world_size)}):
            mark = by_rank.get(rank)
            local_rank = -1 if mark is None or mark.local_rank is None else mark.local_rank
            found.append(Worker(rank, local_rank, world_size, attempt, 0 if mark is None else mark.pid))
    return tuple(found)
