"""Backend torchrun: torch's own elastic agent, in this process, watched through three seams.

`torch.distributed.run.run` does all the work. For the time of the call it finds our `elastic_launch`, which gives the
launch configuration a log specification that adds to each worker's environment, and our agent class, which notes the
workers as they start and stop. Nothing of torch is copied, so its options mean what they mean to torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import Any

from msprobe_launch.bootstrap import variables
from msprobe_launch.errors import LaunchError, ProbeError, UsageError
from msprobe_launch.launch.base import LaunchPlan, RunOutcome, Worker
from msprobe_launch.launch.commandline import refusing
from msprobe_launch.launch.injection import worker_environment
from msprobe_launch.launch.rundir import discard, make_fresh, sign
from msprobe_launch.launch.supervision import Supervision
from msprobe_launch.logs import get_logger
from msprobe_launch.records.layout import RunLayout

# Where the nodes of one launch agree on its run directory and starting time.
STORE_KEY = "msprobe_launch/run"


class TorchrunLauncher:
    """Starts ranks as the installed torchrun does."""

    name = "torchrun"

    def parser(self) -> argparse.ArgumentParser:
        """The installed torchrun's own parser. Imports torch. PET_* variables are its defaults."""
        try:
            from torch.distributed.run import get_args_parser
        except ImportError as error:
            raise UsageError(
                f"the torchrun backend needs PyTorch, which this Python cannot import: {error}",
                hint="Install it here (pip install torch), or run msprobe-launch from the training's environment.",
            ) from error
        try:
            parser: argparse.ArgumentParser = get_args_parser()
        except ValueError as error:
            raise UsageError(f"one of torchrun's variables (PET_*): {error}") from error
        return refusing(parser)

    def parse(self, plan: LaunchPlan) -> argparse.Namespace:
        """The options as torchrun parses them, the script's arguments untouched. Raises UsageError."""
        script, *arguments = plan.target
        ends_options = ["--"] if script.startswith("-") else []
        args = self.parser().parse_args([*plan.options, *ends_options, script])
        args.training_script_args = arguments
        if args.run_path:
            raise UsageError(
                "--run-path runs the script inside a process that the agent has prepared, where it cannot be recorded.",
                hint="Leave it out: the script is then started by the Python interpreter, with the same arguments.",
            )
        return args

    def environment(self, plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
        """What each rank's environment gets beside torchrun's own variables."""
        if plan.config is None:
            return {}
        hang = {} if plan.settings.hang_timeout is None else {variables.HANG: "1"}
        return {**worker_environment(plan.config, environ), variables.ATTEMPT: "0", **hang}

    def describe(self, plan: LaunchPlan) -> list[str]:
        """How many ranks would be started, and with which command, by torchrun's own reading of its options."""
        args = self.parse(plan)
        from torch.distributed import run as torchrun

        several_nodes = _max_nodes(plan, args) > 1
        read = argparse.Namespace(**{**vars(args), "log_dir": os.devnull})  # it would make the folder
        threads = os.environ.get("OMP_NUM_THREADS")
        try:
            config, program, arguments = torchrun.config_from_args(read)
            _check_script(args)
        except Exception as error:  # whatever torch finds wrong
            raise _refusal(error, plan) from error
        finally:
            if threads is None:
                os.environ.pop("OMP_NUM_THREADS", None)
        lines = [
            f"command: torchrun {shlex.join([*plan.options, *plan.target])}",
            f"each rank: {shlex.join([program, *arguments])}",
            f"ranks: {config.nproc_per_node} on this node, nodes: {args.nnodes}, restarts: {config.max_restarts}",
        ]
        inherited = sorted(name for name in os.environ if name.startswith("PET_") and name[4:].lower() in vars(args))
        lines += [f"torchrun's option from the environment: {name}={os.environ[name]}" for name in inherited]
        if plan.config is not None and several_nodes and plan.run_dir_is_default:
            lines.append("run directory: its name is that of the first node")
        return lines

    def launch(self, plan: LaunchPlan, supervision: Supervision) -> RunOutcome:
        args = self.parse(plan)
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

        run = _Run(self, plan, supervision, several_nodes=_max_nodes(plan, args) > 1)
        run.prepare(args)
        signal: int | None = None
        failed = False
        failure: Exception | None = None
        try:
            with run.watched(args):
                record(torchrun.run)(args)
        except ChildFailedError:
            failed = True  # `run` has seen which workers, and more exactly
        except SignalException as stop:
            signal = int(stop.sigval)
        except KeyboardInterrupt:
            signal = SIGINT  # torch minds signals only while ranks run, not while nodes wait for each other
        except Exception as error:
            if run.workers and not isinstance(error, ProbeError):
                failure = error  # told by the caller once the roster is complete
            else:
                run.discard()
                raise _refusal(error, plan) from error
        run.discard()
        return RunOutcome(run.run_dir, tuple(run.workers), signal, failed, failure)


class _Run:
    """One launch as it goes: its run directory, and the workers of this node so far."""

    def __init__(
        self, launcher: TorchrunLauncher, plan: LaunchPlan, supervision: Supervision, *, several_nodes: bool
    ) -> None:
        self._launcher = launcher
        self._plan = plan
        self._supervision = supervision
        self._config = plan.config
        self._several_nodes = several_nodes
        self._nnodes = "1"
        self._started = ""
        self._world_size: int | None = None
        self.attempt: int | None = None
        self.workers: list[Worker] = []
        self._made: list[Path] = []

    @property
    def run_dir(self) -> Path | None:
        return None if self._config is None else self._config.run_dir

    def prepare(self, args: argparse.Namespace) -> None:
        """Make the run directory, as far as one node can before it has met the others."""
        self._nnodes = args.nnodes
        if self.run_dir is None or (self._several_nodes and self._plan.run_dir_is_default):
            return
        if not self._several_nodes:
            self._made = make_fresh(self.run_dir)
        if args.log_dir is None:
            args.log_dir = str(RunLayout(self.run_dir).logs)

    def discard(self) -> None:
        """Where no rank has started, leave the directory as it was, so that the next try may use its name."""
        # What several nodes share may be in use by another one, whose ranks run.
        if not self.workers and self.run_dir is not None and not self._several_nodes:
            discard(RunLayout(self.run_dir), self._made)

    @contextlib.contextmanager
    def watched(self, args: argparse.Namespace) -> Iterator[None]:
        """Stand in torch's seams for the time of the launch."""
        from torch.distributed import run as torchrun
        from torch.distributed.launcher import api

        launch, agent = torchrun.elastic_launch, api.LocalElasticAgent

        def elastic_launch(config: Any, entrypoint: Any) -> Any:
            _check_script(args)
            if config.log_line_prefix_template is None:
                config.log_line_prefix_template = line_prefix()
            if self._config is not None:
                config.logs_specs = _InjectingLogs(config.logs_specs, self)
            return launch(config=config, entrypoint=entrypoint)

        torchrun.elastic_launch, api.LocalElasticAgent = elastic_launch, _watching_agent(agent, self)
        try:
            yield
        finally:
            torchrun.elastic_launch, api.LocalElasticAgent = launch, agent

    def before_start(self, group: Any) -> None:
        """The nodes have met and the ranks have numbers: agree on the attempt's number and sign the run directory."""
        is_first = self.attempt is None
        next_attempt = 0 if self.attempt is None else self.attempt + 1
        self.attempt = next_attempt
        world_size = group.workers[0].world_size
        if self._config is None:
            return
        manifest = dataclasses.replace(self._plan.manifest, world_size=world_size, nnodes=self._nnodes)
        if self._several_nodes:
            proposal = _Proposal(
                next_attempt, self._started or manifest.started, str(self._config.run_dir), not is_first
            )
            agreed = _agree(group, proposal)
            self.attempt, self._started = agreed.attempt, agreed.started
            manifest = dataclasses.replace(manifest, started=agreed.started)
            if self._plan.run_dir_is_default and is_first:
                self._config = dataclasses.replace(self._config, run_dir=Path(agreed.run_dir))
        if is_first:
            _check_ranks(self._plan, world_size)
            manifest = dataclasses.replace(manifest, config=self._config.as_dict())
            sign(RunLayout(self._config.run_dir), manifest)
            self._supervision.run_dir = self.run_dir
        if self._world_size not in (None, world_size):
            text = f"attempt {self.attempt}: the world has {world_size} ranks now, before it had {self._world_size}"
            self._supervision.event("world size", text, (worker.global_rank for worker in group.workers))
        self._world_size = world_size

    def environment(self) -> dict[str, str]:
        """What each worker's environment gets from us."""
        plan = dataclasses.replace(self._plan, config=self._config)
        added = self._launcher.environment(plan, os.environ)
        return {**added, variables.ATTEMPT: str(self.attempt)} if added else {}

    def started(self, group: Any, processes: Any, shutdown_timeout: float) -> None:
        """Note the workers of one attempt, and be told when torch ends them."""
        attempt = self.attempt or 0
        first = len(self.workers)
        pids = processes.pids()
        self.workers += [
            Worker(worker.global_rank, worker.local_rank, worker.world_size, attempt, pids[worker.local_rank])
            for worker in group.workers
        ]
        self._supervision.started(self.workers[first:])
        close, closing = processes.close, iter([True])

        def watched_close(death_sig: Any = None, timeout: float | None = None) -> None:
            # torch itself uses --shutdown-timeout where it is told to stop, but not where a worker has failed.
            if timeout is None:
                timeout = shutdown_timeout
            # torch closes an attempt when all have ended or one has failed; whoever still lives then is stopped by us.
            is_first = next(closing, False)
            if is_first:
                self.workers[first:] = [dataclasses.replace(w, stopped=_lives(w.pid)) for w in self.workers[first:]]
            try:
                close(death_sig, timeout)
            finally:
                handlers = getattr(processes, "subprocess_handlers", {})
                self.workers[first:] = [
                    dataclasses.replace(w, exit_code=handlers[w.local_rank].proc.poll())
                    if w.local_rank in handlers
                    else w
                    for w in self.workers[first:]
                ]
                if is_first:
                    self.workers[first:] = self._supervision.ended(self.workers[first:])

        processes.close = watched_close


def _check_script(args: argparse.Namespace) -> None:
    """Raise UsageError where there is no script. Python would say so once per rank, after the nodes have met."""
    if not (args.module or args.no_python or os.path.exists(args.training_script)):
        raise UsageError(
            f"{args.training_script}: there is no such file, seen from {os.getcwd()}.",
            hint="For a module: -m NAME. For a program that is no Python script: --no-python NAME.",
        )


def _watching_agent(agent: type, run: _Run) -> type:
    class WatchingAgent(agent):  # type: ignore[misc]  # torch's agent, known at run time only
        def _start_workers(self, worker_group: Any) -> Any:
            run.before_start(worker_group)
            ids = super()._start_workers(worker_group)
            run.started(worker_group, self._pcontext, getattr(self, "_shutdown_timeout", 30))
            return ids

    return WatchingAgent


class _InjectingLogs:
    """torch's log specification with one addition: it is asked for each attempt, and may add to the environments."""

    def __init__(self, inner: Any, run: _Run) -> None:
        self._inner = inner
        self._run = run

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        destinations = self._inner.reify(envs)
        added = self._run.environment()
        for env in envs.values():
            env.update(added)
        return destinations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def line_prefix() -> str:
    """What stands before each line that --tee copies to the console; torch puts the global rank in.

    torch's own, `[default0]:`, tells neither nodes nor ranks of several nodes apart.
    """
    return f"[{socket.gethostname()} rank ${{rank}}]: "


def _max_nodes(plan: LaunchPlan, args: argparse.Namespace) -> int:
    """How many nodes the launch may have, where torch can read the numbers asked for. Raises UsageError."""
    from torch.distributed import run as torchrun

    try:
        _, most = torchrun.parse_min_max_nnodes(args.nnodes)
        local_world_size = torchrun.determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"torchrun's options: {error}") from error
    if most == 1:
        _check_ranks(plan, local_world_size)
    return int(most)


# What torch raises where an option is at fault; anything else is the network's, or another node's.
_AT_FAULT = (ValueError, TypeError, AssertionError, LookupError, NotADirectoryError)


def _refusal(error: Exception, plan: LaunchPlan) -> ProbeError:
    """The error in words, where no rank was started."""
    if isinstance(error, ProbeError):
        return error
    if isinstance(error, (FileNotFoundError, PermissionError)) and error.filename == plan.target[0]:
        return UsageError(f"{plan.target[0]} cannot be started: {error.strerror}")
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(next(iter(str(cause).splitlines()), "") or type(cause).__name__)
        cause = cause.__cause__
    if isinstance(error, _AT_FAULT):
        return UsageError(f"torchrun's options: {texts[0]}")
    return LaunchError(
        f"torch's agent started no rank: {type(error).__name__}: {': '.join(dict.fromkeys(texts))}",
        hint="Are all nodes started, and does --rdzv-endpoint or --master-addr name one that they can reach?",
    )


def _check_ranks(plan: LaunchPlan, world_size: int) -> None:
    if world_size < 1:
        raise UsageError(f"--nproc-per-node asks for {world_size} ranks; at least 1 is needed.")
    if plan.config is not None and not any(rank in plan.config.ranks for rank in range(world_size)):
        raise UsageError(f"--probe-ranks {plan.config.ranks} picks none of the ranks 0-{world_size - 1}.")


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What one node brings to a rendezvous; `is_old` where it has been there before and has written already."""

    attempt: int
    started: str
    run_dir: str
    is_old: bool


def _agree(group: Any, proposal: _Proposal) -> _Proposal:
    """What all nodes of this rendezvous hold for true: the highest attempt, and the oldest node's run.

    torch's restart count stands still when nodes come and go, and differs between the nodes after a failure on one, so
    ours is counted apart. Every node writes its proposal and reads all. A c10d store is another one in each round; the
    static one is the same, where an old proposal of a peer does no harm beside our own. Where the store fails, each
    node goes by its own, and says so.
    """
    try:
        group.store.set(f"{STORE_KEY}/{group.group_rank}", json.dumps(dataclasses.asdict(proposal)))
        texts = [bytes(group.store.get(f"{STORE_KEY}/{node}")) for node in range(group.group_world_size)]
        proposals = [_Proposal(**json.loads(text)) for text in texts]
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        get_logger().warning("the nodes cannot agree on a run directory: %s", error)
        return proposal
    leader = next((one for one in proposals if one.is_old), proposals[0])
    return dataclasses.replace(leader, attempt=max(one.attempt for one in proposals))


def _lives(pid: int) -> bool:
    """True while our child `pid` runs; leaves its exit code for torch to collect."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
