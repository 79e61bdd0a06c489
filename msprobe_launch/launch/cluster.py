"""The processes of one node of a job with a scheduler: started, watched, ended; nothing of them is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from msprobe_launch.errors import LaunchError, RunDirectoryError, UnreadableInput, UsageError
from msprobe_launch.launch.base import RunOutcome, Worker
from msprobe_launch.launch.console import ConsoleTail
from msprobe_launch.launch.rundir import discard, make_fresh, sign
from msprobe_launch.launch.supervision import Supervision
from msprobe_launch.launch.text import signal_name
from msprobe_launch.logs import get_logger
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark, load

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOOK_SECONDS = 0.05
# Between two looks into the roster for ranks that MindSpore has numbered meanwhile.
NUMBER_SECONDS = 1.0
# The scheduler has nothing to save.
SCHEDULER_GRACE_SECONDS = 2.0
# A worker that waits in C++ never comes to handle Ctrl-C in Python.
INTERRUPT_SECONDS = 5.0
# Below what the kernel gives to outgoing connections, so that none of them takes the port before the scheduler has it.
_PORTS = range(12000, 32000)


# -- where the scheduler is


@dataclass(frozen=True, slots=True)
class Address:
    """Where the scheduler listens. `port` is None until a free one has been picked."""

    ip: str
    port: int | None

    @staticmethod
    def is_local(ip: str) -> bool:
        """True where `ip` is one of this machine's."""
        with _socket(ip, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((ip, 0))
            except OSError:
                return False
        return True


def resolve(host: str) -> str:
    """The address of a host, the first that its name has. Raises UsageError."""
    bare = host.strip().removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bare))
    try:
        return str(socket.getaddrinfo(bare, None, socket.AF_UNSPEC, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--master_addr {host}: this name has no address: {error}") from error


def local_ip(towards: str) -> str:
    """This machine's address as `towards` would see it. Nothing is sent. Raises UsageError."""
    with _socket(towards, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 1))
        except OSError as error:
            raise UsageError(f"--master_addr {towards} cannot be reached from here: {error.strerror}") from error
        return str(probe.getsockname()[0])


def _socket(ip: str, kind: socket.SocketKind) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, kind)


class _Seat:
    """The right to start the scheduler of one address: of two launchers on one machine the first has it.

    It is a name in the kernel's abstract space, which is free again when its owner ends, however that happens. The port
    itself cannot be held: it is the scheduler's.
    """

    def __init__(self, address: Address, holder: socket.socket) -> None:
        self.address = address
        self._holder = holder

    def close(self) -> None:
        self._holder.close()

    @classmethod
    def take(cls, address: Address) -> _Seat | None:
        """The seat, with a port of its own where none is asked for; None where another launcher has it.

        Raises UsageError where another program listens there, LaunchError where no port is free.
        """
        if address.port is not None:
            seat = cls._claim(address)
            if seat is not None and not _is_free(address):
                seat.close()
                raise UsageError(
                    f"--master_port {address.port}: another program listens on {address.ip}.",
                    hint="Name another port, or on one node none: a free one is found then.",
                )
            return seat
        for port in random.SystemRandom().sample(_PORTS, 200):
            candidate = Address(address.ip, port)
            seat = cls._claim(candidate) if _is_free(candidate) else None
            if seat is not None:
                return seat
        raise LaunchError(f"no free port was found on {address.ip}", hint="--master_port PORT")

    @classmethod
    def _claim(cls, address: Address) -> _Seat | None:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holder.bind(f"\0msprobe-launch/scheduler/{address.ip}/{address.port}")
        except OSError:
            holder.close()
            return None
        return cls(address, holder)


def _is_free(address: Address) -> bool:
    with _socket(address.ip, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.ip, address.port or 0))
        except OSError:
            return False
    return True


# -- what is started


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start. `rank` is None for the scheduler and where the framework will number the worker.

    `console` is what stands before its lines on the console, None where they are not shown.
    """

    command: tuple[str, ...]
    environ: dict[str, str]
    log: Path
    rank: int | None
    local_rank: int
    console: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """This node's part. `address` is None where there is no scheduler anywhere; `run_dir` None with the probe off.

    `grace` is the seconds between asking a worker to end and ending it, `patience` those in which nodes come together,
    negative for any time. `manifest` is complete. `workers` makes the processes once the scheduler's port is known.
    """

    run_dir: Path | None
    shares_run_dir: bool
    manifest: Manifest
    several_nodes: bool
    address: Address | None
    world_size: int
    grace: float
    patience: float
    scheduler: Callable[[Address], Process]
    workers: Callable[[Address | None], Iterator[Process]]


@dataclass(slots=True)
class _Running:
    """A worker that was started. `stopped` where we ended it."""

    process: Process
    popen: subprocess.Popen[bytes]
    rank: int | None
    stopped: bool = False

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    def send(self, number: int) -> None:
        """To the worker and what it has started; its group lives while it is not collected."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)


def run_job(job: Job, supervision: Supervision) -> RunOutcome:
    """Start this node's processes and wait for their end. Raises ProbeError where they cannot be started as asked."""
    seat = None
    address = job.address
    if address is not None and Address.is_local(address.ip):
        seat = _Seat.take(address)
        if seat is None and not job.several_nodes:
            raise UsageError(
                f"--master_port {address.port}: another msprobe-launch has its scheduler there.",
                hint="Leave --master_port out: a free port is found then.",
            )
        address = address if seat is None else seat.address
    run = _Run(job, supervision, address)
    try:
        with run.minding_signals():
            return run.go(hosts_scheduler=seat is not None)
    finally:
        run.leave_nothing()
        if seat is not None:
            seat.close()


@dataclass(slots=True)
class _Run:
    """One launch as it goes."""

    job: Job
    supervision: Supervision
    address: Address | None
    signals: list[int] = field(default_factory=list)
    workers: list[_Running] = field(default_factory=list)
    scheduler: subprocess.Popen[bytes] | None = None
    tail: ConsoleTail | None = None
    made: list[Path] = field(default_factory=list)

    @contextlib.contextmanager
    def minding_signals(self) -> Iterator[None]:
        """Signals that end a launch are noted. SIGHUP stays ignored where it was: that is what nohup is for."""

        def note(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        before = {n: signal.signal(n, note) for n in ENDING if not (is_nohup and n == signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def go(self, *, hosts_scheduler: bool) -> RunOutcome:
        processes = list(self.job.workers(self.address))  # what is wrong with them is said before anything is made
        self._prepare_run_dir(processes)
        try:
            if hosts_scheduler and self.address is not None:
                process = self.job.scheduler(self.address)
                self.scheduler = _start(process)
            for process in processes:
                self.workers.append(_Running(process, _start(process), process.rank))
        except OSError as error:
            self.leave_nothing()
            if self.job.run_dir is not None and not self.job.shares_run_dir:
                discard(RunLayout(self.job.run_dir), self.made)
            raise UsageError(f"{error.filename or process.command[0]} cannot be used: {error.strerror}") from error
        self.tail = ConsoleTail(
            {w.process.log: w.process.console for w in self.workers if w.process.console is not None}
        )
        self.supervision.started([self._worker(running) for running in self.workers])
        first = self._wait_for_workers()
        scheduler_failed = self._end_scheduler(well=first is None and not self.signals)
        if self.tail is not None:
            self.tail.close()
            self.tail = None
        self._number()
        ended = self.supervision.ended([self._worker(running) for running in self.workers])
        workers = tuple(worker for worker in ended if worker.rank >= 0)
        nameless = [worker for worker in ended if worker.rank < 0]
        self._tell_nameless(nameless)
        return RunOutcome(
            self.job.run_dir,
            workers,
            self.signals[0] if self.signals else None,
            failed=first is not None or scheduler_failed,
            exit_code=next((w.exit_code for w in nameless if w.exit_code and not w.stopped), None),
        )

    # -- the run directory

    def _prepare_run_dir(self, processes: Sequence[Process]) -> None:
        run_dir = self.job.run_dir
        if run_dir is None:
            return
        layout = RunLayout(run_dir)
        if not self.job.shares_run_dir:
            self.made = make_fresh(run_dir)
            sign(layout, self.job.manifest)
        else:
            self._sign_with_others(layout, {process.rank for process in processes})
        self.supervision.run_dir = run_dir

    def _sign_with_others(self, layout: RunLayout, own: Set[int | None]) -> None:
        """Sign a directory that several nodes share. They cannot ask each other when they started.

        A manifest that is there is this launch's if it tells of the same job, is not older than the time in which its
        nodes come together, and no rank of it has ended or is one of ours.
        """
        for is_last in (False, True):
            manifest = self.job.manifest
            with contextlib.suppress(UnreadableInput):
                there = load(layout.manifest, Manifest)
                if self._is_same_launch(layout, there, own):
                    manifest = dataclasses.replace(manifest, started=there.started)
            try:
                sign(layout, manifest)
                return
            except RunDirectoryError:
                # Another node may have signed between our look and our try.
                if is_last:
                    raise

    def _is_same_launch(self, layout: RunLayout, there: Manifest, own: Set[int | None]) -> bool:
        ours = self.job.manifest
        same = all(
            getattr(there, name) == getattr(ours, name) for name in ("backend", "script", "world_size", "nnodes")
        )
        try:
            age = (datetime.now(timezone.utc) - datetime.fromisoformat(there.started)).total_seconds()
        except (ValueError, TypeError):
            return False
        if not same or (self.job.patience >= 0 and age > self.job.patience):
            return False
        marks = [(rank, mark) for rank, mark in roster.marks(layout) if isinstance(mark, RankMark)]
        return not any(rank in own or mark.ended for rank, mark in marks)

    # -- waiting

    def _wait_for_workers(self) -> _Running | None:
        """Until all workers have ended; the first that failed by itself. Where one fails, the others are stopped."""
        failed: _Running | None = None
        stopping: int | None = None
        since = 0.0
        told_scheduler = False
        look_for_numbers = time.monotonic()
        while True:
            living = [running for running in self.workers if running.lives]
            if failed is None and stopping is None:
                failed = next((running for running in self.workers if running.popen.returncode), None)
            if not living:
                return failed
            now = time.monotonic()
            number = self._stop_signal(stopping, failed, now - since)
            if number is not None:
                if stopping is None:
                    since = now
                stopping = number
                for running in living:
                    running.stopped = True
                    running.send(number)
            if not told_scheduler and self.scheduler is not None and self.scheduler.poll():
                told_scheduler = True
                text = f"the scheduler ended while ranks run ({_code(self.scheduler.returncode)})"
                self.supervision.event("scheduler", text)
            if now - look_for_numbers > NUMBER_SECONDS:
                look_for_numbers = now
                if self._number():
                    self.supervision.started([self._worker(running) for running in self.workers])
            time.sleep(LOOK_SECONDS)

    def _stop_signal(self, stopping: int | None, failed: _Running | None, seconds: float) -> int | None:
        """What to send now, if anything, `seconds` after the first was sent."""
        if stopping is None:
            if self.signals:
                return self.signals[0]
            return None if failed is None else signal.SIGTERM
        if stopping == signal.SIGKILL:
            return None
        if seconds > self.job.grace or len(self.signals) > 1:
            return signal.SIGKILL
        if stopping == signal.SIGINT and seconds > INTERRUPT_SECONDS:
            return signal.SIGTERM
        return None

    def _end_scheduler(self, *, well: bool) -> bool:
        """See the scheduler off; True where it failed by itself.

        Where all went well on several nodes, it goes when the last of them has left. On one node all have left: it
        would find that out within five seconds.
        """
        if self.scheduler is None:
            return False
        if well and self.job.several_nodes:
            told = time.monotonic() + INTERRUPT_SECONDS
            while self.scheduler.poll() is None and not self.signals:
                if told and time.monotonic() > told:
                    told = 0.0
                    get_logger().info("the ranks of this node have ended, the scheduler waits for the other nodes")
                time.sleep(LOOK_SECONDS)
        code = self.scheduler.poll()
        if code is None:
            self._stop_scheduler()
            return False
        if code and well:
            get_logger().error("the scheduler failed: %s", _code(code))
        return bool(code)

    def _stop_scheduler(self) -> None:
        if self.scheduler is not None and self.scheduler.poll() is None:
            self.scheduler.terminate()
            try:
                self.scheduler.wait(SCHEDULER_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.scheduler.kill()
                self.scheduler.wait()

    def leave_nothing(self) -> None:
        """End whatever still runs. After a launch that went its way nothing does."""
        for running in self.workers:
            running.send(signal.SIGKILL)
            running.popen.wait()
        self._stop_scheduler()
        if self.tail is not None:
            self.tail.close()
            self.tail = None

    # -- who is who

    def _worker(self, running: _Running) -> Worker:
        rank = -1 if running.rank is None else running.rank
        code = running.popen.poll()
        local_rank, pid = running.process.local_rank, running.popen.pid
        return Worker(rank, local_rank, self.job.world_size, 0, pid, code, running.stopped)

    def _tell_nameless(self, workers: list[Worker]) -> None:
        """What the roster cannot tell, as these have no rank there."""
        for worker in workers:
            what = f"worker {worker.local_rank} of this node (pid {worker.pid})"
            if worker.exit_code and not worker.stopped:
                self.supervision.event("failed", f"{what} failed: {_code(worker.exit_code)}")
            if self.job.run_dir is not None:
                self.supervision.event("no rank", f"{what} never got a rank: it did not come past init()")

    def _number(self) -> bool:
        """Learn from the roster which ranks the framework has made of our workers. True where all are known now."""
        unknown = {running.popen.pid: running for running in self.workers if running.rank is None}
        if not unknown or self.job.run_dir is None:
            return False
        layout = RunLayout(self.job.run_dir)
        for rank, mark in roster.marks(layout):
            if isinstance(mark, RankMark) and mark.pid in unknown and mark.host == socket.gethostname():
                unknown.pop(mark.pid).rank = rank
        return not unknown


def _start(process: Process) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, all it prints in its log. Raises OSError."""
    process.log.parent.mkdir(parents=True, exist_ok=True)
    with process.log.open("wb") as log:
        return subprocess.Popen(
            process.command, env=process.environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal_name(-code)
