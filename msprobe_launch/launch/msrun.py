"""Backend msrun: MindSpore's dynamic cluster as the installed msrun starts it, by a spawn of our own.

msrun's parser and its reading of core bindings are the installed ones (`msrun_options`). The processes are ours: the
scheduler is a process of its own that never sees the user's script, workers run the interpreter that runs us, end by
SIGTERM before SIGKILL, and their exit codes are their own. `--probe-msrun exec` starts the installed msrun instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msprobe_launch.bootstrap import variables
from msprobe_launch.errors import UsageError
from msprobe_launch.launch.base import LaunchPlan, RunOutcome
from msprobe_launch.launch.choice import PROGRAMS
from msprobe_launch.launch.cluster import Address, Job, Process, local_ip, resolve, run_job
from msprobe_launch.launch.command import SHUTDOWN_SECONDS, CommandLauncher
from msprobe_launch.launch.commandline import refusing
from msprobe_launch.launch.injection import worker_environment
from msprobe_launch.launch.msrun_options import Binding, bindings, installed_parser, parse, refuse_numpy
from msprobe_launch.launch.settings import Msrun
from msprobe_launch.launch.supervision import Supervision
from msprobe_launch.logs import get_logger
from msprobe_launch.records.layout import RunLayout

# What the scheduler does instead of the script. It blocks in `init` until all workers have left the cluster.
_SCHEDULER = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import mindspore
mindspore.set_device("CPU")
from mindspore.communication import init
init()
"""
DEFAULT_PORT = 8118  # msrun's; nodes of one job cannot ask each other for a free one
# msrun starts one process where a simulation asks for more than this.
_MOST_SIMULATED = 128
# Left by whoever started us, these would number a worker that MindSpore is to number.
_NUMBERS = ("MS_NODE_ID", "RANK_ID", "DEVICE_ID", "MS_ROLE")


@dataclass(frozen=True, slots=True)
class _Asked:
    """msrun's options, checked. `ranks` are those of this node's workers, None where MindSpore will number them.

    `port` is None where any free one will do.
    """

    args: argparse.Namespace
    environ: dict[str, str]
    world_size: int
    ranks: tuple[int | None, ...]
    address: str
    port: int | None
    simulated: bool
    tailed: frozenset[int] | None

    @property
    def several_nodes(self) -> bool:
        return not self.simulated and len(self.ranks) < self.world_size

    @property
    def is_numbered(self) -> bool:
        return None not in self.ranks


class MsrunLauncher:
    """Starts ranks as the installed msrun does."""

    name = "msrun"

    def parser(self) -> argparse.ArgumentParser:
        """The installed msrun's own parser, and one option more. Imports nothing of MindSpore."""
        parser = refusing(installed_parser(), "msrun")
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=float, default=SHUTDOWN_SECONDS)
        return parser

    def parse(self, plan: LaunchPlan) -> _Asked:
        """The options as msrun parses them, and what it would refuse later. Raises UsageError."""
        refuse_numpy()
        parser = self.parser()
        parser.set_defaults(master_port=None)
        script, *arguments = plan.target
        ends_options = ["--"] if script.startswith("-") else []
        parsed = parse(parser, [*plan.options, *ends_options, script])
        args = parsed.args
        args.task_script_args = arguments
        environ = parsed.environ
        if args.worker_num < 1 or args.local_worker_num < 1:
            raise UsageError(f"msrun's options: {args.worker_num} and {args.local_worker_num} workers; at least 1.")
        if args.local_worker_num > args.worker_num:
            raise UsageError(
                f"--local_worker_num {args.local_worker_num} is more than --worker_num {args.worker_num}.",
                hint=f"On one node: --nproc {args.worker_num}",
            )
        simulated = args.sim_level != -1 or bool(os.environ.get("MS_SIMULATION_LEVEL"))
        if simulated:
            return _simulation(plan, args, environ, _tailed(args))
        world_size, local = args.worker_num, args.local_worker_num
        ranks: tuple[int | None, ...] = tuple(range(local))
        if local < world_size:
            first = args.node_rank * local
            ranks = tuple(range(first, first + local)) if args.node_rank >= 0 else (None,) * local
            if first + local > world_size:
                raise UsageError(
                    f"--node_rank {args.node_rank} with --local_worker_num {local} would be ranks {first}-"
                    f"{first + local - 1}, but --worker_num is {world_size}."
                )
        port = args.master_port
        if port is None and local < world_size:
            port = DEFAULT_PORT
        if port is not None and not 1024 <= port <= 65535:
            raise UsageError(f"--master_port {port}: msrun takes 1024 to 65535.")
        environ["RANK_SIZE"] = environ["MS_WORKER_NUM"] = str(world_size)
        environ["MS_TOPO_TIMEOUT"] = str(args.cluster_time_out)
        if args.rank_table_file:
            environ["RANK_TABLE_FILE"] = args.rank_table_file
        _check_ranks(plan, ranks, world_size)
        return _Asked(args, environ, world_size, ranks, resolve(args.master_addr), port, False, _tailed(args))

    def environment(self, plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
        """What each rank's environment gets beside msrun's own variables."""
        if plan.config is None:
            return {}
        if plan.settings.msrun is Msrun.EXEC:
            return CommandLauncher().environment(plan, environ)
        hang = {} if plan.settings.hang_timeout is None else {variables.HANG: "1"}
        return {**worker_environment(plan.config, environ), variables.ATTEMPT: "0", **hang}

    def describe(self, plan: LaunchPlan) -> list[str]:
        """How many ranks would be started, with which command, and where the scheduler is."""
        asked = self.parse(plan)
        _check_script(plan)
        command = f"command: msrun {shlex.join([*plan.options, *plan.target])}"
        if plan.settings.msrun is Msrun.EXEC:
            return [command, f"msrun itself: {shlex.join(_real_command(plan, asked))}"]
        binds = _bindings(asked)
        lines = [command, f"each rank: {shlex.join(_program(plan))}"]
        numbers = ", ".join("?" if rank is None else str(rank) for rank in asked.ranks)
        lines.append(f"ranks: {numbers} of {asked.world_size} on this node")
        if not asked.is_numbered:
            lines.append("ranks: MindSpore numbers them in init(); --node_rank N would")
        if asked.simulated:
            lines.append("scheduler: none (simulation)")
        else:
            port = "a free port" if asked.port is None else f"port {asked.port}"
            where = "this node" if Address.is_local(asked.address) else "another node"
            lines.append(f"scheduler: {asked.address}, {port}, on {where}")
        lines += [f"bound: {shlex.join(b.prefix)}" for b in binds if b.prefix]
        if plan.config is not None and asked.several_nodes and plan.run_dir_is_default:
            lines.append("run directory: each node has its own; --run-dir DIR names one for all")
        return lines

    def launch(self, plan: LaunchPlan, supervision: Supervision) -> RunOutcome:
        asked = self.parse(plan)
        _check_script(plan)
        if plan.settings.msrun is Msrun.EXEC:
            return _launch_real(plan, asked, supervision)
        if asked.args.join is False and any(token.startswith("--join") for token in plan.options):
            get_logger().info("--join=False: the ranks are accounted for, so we wait for them all the same")
        processes = _Processes(self, plan, asked, _bindings(asked))
        nnodes = -(-asked.world_size // len(asked.ranks)) if asked.several_nodes else 1
        manifest = dataclasses.replace(plan.manifest, world_size=asked.world_size, nnodes=str(nnodes))
        job = Job(
            run_dir=None if plan.config is None else plan.config.run_dir,
            shares_run_dir=asked.several_nodes and not plan.run_dir_is_default,
            manifest=manifest,
            several_nodes=asked.several_nodes,
            address=None if asked.simulated else Address(asked.address, asked.port),
            world_size=asked.world_size,
            grace=float(asked.args.shutdown_timeout),
            patience=float(asked.args.cluster_time_out),
            scheduler=processes.scheduler,
            workers=processes.workers,
        )
        return run_job(job, supervision)


class _Processes:
    """The processes of this node, made once the scheduler's port is known."""

    def __init__(self, launcher: MsrunLauncher, plan: LaunchPlan, asked: _Asked, binds: list[Binding]) -> None:
        self._launcher = launcher
        self._plan = plan
        self._asked = asked
        self._binds = binds
        logs = asked.args.log_dir
        if not logs and plan.config is not None:
            folder = RunLayout(plan.config.run_dir).logs
            # Workers that have no number yet would have the names of another node's.
            logs = str(folder if asked.is_numbered else folder / f"{os.uname().nodename}-{os.getpid()}")
        self._logs = Path(logs)

    def scheduler(self, address: Address) -> Process:
        added = {**self._common(address), "MS_ROLE": "MS_SCHED", "RANK_ID": "0", **self._binds[0].environ}
        command = (*self._binds[0].prefix, sys.executable, "-c", _SCHEDULER)
        return Process(command, self._environ(added), self._logs / "scheduler.log", None, -1, None)

    def workers(self, address: Address | None) -> Iterator[Process]:
        args = self._asked.args
        name = args.worker_log_name or "worker"
        if "{ip}" in name:
            name = name.replace("{ip}", local_ip(self._asked.address))
        name = name.replace("{hostname}", os.uname().nodename)
        ours = self._launcher.environment(self._plan, os.environ)
        for local_rank, rank in enumerate(self._asked.ranks):
            bind = self._binds[local_rank + 1]
            added = {**self._common(address), "DEVICE_ID": str(local_rank), **bind.environ, **ours}
            source = "MS_NODE_ID"
            if self._asked.simulated:
                # No cluster: only RANK_ID says which rank is simulated.
                added["RANK_ID"] = str(rank)
                source = "RANK_ID"
            else:
                added["MS_ROLE"] = "MS_WORKER"
                if rank is not None:
                    added |= {"MS_NODE_ID": str(rank), "RANK_ID": str(rank)}
            if ours and rank is not None:
                added[variables.RANK_FROM] = source
            number = local_rank if rank is None or self._asked.simulated else rank
            tailed = self._asked.tailed
            prefix = f"[{os.uname().nodename} {'worker' if rank is None else 'rank'} {number}]: "
            yield Process(
                command=(*bind.prefix, *_program(self._plan)),
                environ=self._environ(added),
                log=self._logs / f"{name}_{number}.log",
                rank=rank,
                local_rank=local_rank,
                console=prefix if tailed is None or rank in tailed else None,
            )

    def _common(self, address: Address | None) -> dict[str, str]:
        where = {} if address is None else {"MS_SCHED_HOST": address.ip, "MS_SCHED_PORT": str(address.port)}
        return {**self._asked.environ, **where}

    @staticmethod
    def _environ(added: Mapping[str, str]) -> dict[str, str]:
        return {**{name: value for name, value in os.environ.items() if name not in _NUMBERS}, **added}


def _simulation(
    plan: LaunchPlan, args: argparse.Namespace, environ: dict[str, str], tailed: frozenset[int] | None
) -> _Asked:
    """A dry run of MindSpore's: no scheduler, and the processes do not talk to each other."""
    environ["MS_WORKER_NUM"] = environ["RANK_SIZE"] = str(args.worker_num)
    if args.sim_level != -1:
        environ["MS_SIMULATION_LEVEL"] = str(args.sim_level)
    elif os.environ.get("RANK_SIZE"):
        environ["RANK_SIZE"] = os.environ["RANK_SIZE"]
    if args.rank_table_file:
        environ["RANK_TABLE_FILE"] = args.rank_table_file
    alone = args.sim_rank_id
    if alone == -1:
        try:
            alone = int(os.environ.get("RANK_ID", "-1"))
        except ValueError as error:
            raise UsageError(f"RANK_ID={os.environ['RANK_ID']} is no rank to simulate.") from error
    if alone == -1 and args.local_worker_num > _MOST_SIMULATED:
        get_logger().info("simulation: %d processes are too many, rank 0 is simulated", args.local_worker_num)
        alone = 0
    ranks = (alone,) if alone != -1 else tuple(range(args.local_worker_num))
    world_size = max(args.worker_num, *(rank + 1 for rank in ranks))
    _check_ranks(plan, ranks, world_size)
    return _Asked(args, environ, world_size, ranks, "", None, True, tailed)


def _bindings(asked: _Asked) -> list[Binding]:
    return bindings(asked.args, len(asked.ranks), {**os.environ, **asked.environ})


def _tailed(args: argparse.Namespace) -> frozenset[int] | None:
    """The ranks whose lines the console shows, None for all."""
    if args.tail_worker_log == "-1":
        return None
    try:
        return frozenset(int(number) for number in args.tail_worker_log.split(","))
    except ValueError as error:
        raise UsageError(f"--tail_worker_log {args.tail_worker_log}: ranks such as 0,2, or -1 for all.") from error


def _program(plan: LaunchPlan) -> list[str]:
    """A worker's command: the interpreter that runs us where msrun takes `python` from PATH.

    Unbuffered, so that what a rank prints is in its log, and on the console, when it prints it.
    """
    first, *rest = plan.target
    if first == "pytest":
        beside = Path(sys.executable).with_name("pytest")
        return [str(beside) if beside.exists() else first, *rest]
    return [sys.executable, "-u", *(rest if first in PROGRAMS else plan.target)]


def _check_script(plan: LaunchPlan) -> None:
    """Raise UsageError where there is no script. Python would say so once per rank."""
    script = plan.target[0]
    if script not in PROGRAMS and not os.path.exists(script):
        raise UsageError(f"{script}: there is no such file, seen from {os.getcwd()}.")


def _check_ranks(plan: LaunchPlan, ranks: Iterable[int | None], world_size: int) -> None:
    if plan.config is None:
        return
    picked = plan.config.ranks
    if not any(rank in picked for rank in {*range(world_size), *(rank for rank in ranks if rank is not None)}):
        raise UsageError(f"--probe-ranks {picked} picks none of the ranks 0-{world_size - 1}.")


# -- the installed msrun


def _real_command(plan: LaunchPlan, asked: _Asked) -> list[str]:
    """The installed msrun's command line: it waits for its workers, and its logs are where ours would be."""
    beside = Path(sys.executable).with_name("msrun")
    program = str(beside) if beside.exists() else shutil.which("msrun")
    options = list(plan.options)
    # Ours; `cut` has spelled it out and left its value beside it or in it.
    for name in ("--shutdown-timeout", "--shutdown_timeout"):
        while (at := next((i for i, token in enumerate(options) if token.partition("=")[0] == name), -1)) >= 0:
            del options[at : at + (1 if "=" in options[at] else 2)]
    if not asked.args.log_dir and plan.config is not None:
        options += ["--log_dir", str(RunLayout(plan.config.run_dir).logs)]
    start = [program] if program else [sys.executable, "-m", "mindspore.parallel.cluster.run"]
    return [*start, *options, "--join=True", *plan.target]


def _launch_real(plan: LaunchPlan, asked: _Asked, supervision: Supervision) -> RunOutcome:
    options = (f"--shutdown-timeout={asked.args.shutdown_timeout}",)
    manifest = dataclasses.replace(plan.manifest, world_size=asked.world_size)
    command = dataclasses.replace(plan, options=options, target=tuple(_real_command(plan, asked)), manifest=manifest)
    return CommandLauncher().launch(command, supervision)
