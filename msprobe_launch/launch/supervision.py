"""What goes on beside the backend while ranks run: the guardian, signals passed on, and a thread that looks around."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from msprobe_launch.launch.base import Worker
from msprobe_launch.launch.follow import Follower, FollowPlan
from msprobe_launch.launch.hang import HangWatch
from msprobe_launch.launch.settings import LaunchSettings
from msprobe_launch.launch.status import StatusLine
from msprobe_launch.launch.text import rank_list, signal_name
from msprobe_launch.launch.tree import Guardian, Tree, become_subreaper, send, stat_of
from msprobe_launch.logs import get_logger
from msprobe_launch.records.layout import RunLayout

TICK_SECONDS = 0.5
# Ranks of one job finish within moments of each other; one that is this much earlier than the others is worth a line.
EARLY_SECONDS = 5.0
# Leftovers of a failed rank have had their signal from the backend, or their parent is gone: little grace is due.
LEFTOVER_GRACE_SECONDS = 2.0
# torchrun leaves these to their default action, which ends the launcher and leaves the ranks running.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(slots=True)
class _Watched:
    """One living worker as the watching thread knows it. `ended` is monotonic seconds."""

    worker: Worker
    start: int
    peak: int = 0
    ended: float | None = None
    exit_code: int | None = None


class Supervision:
    """One launch's company, as a context manager. Its methods may be called from the main thread at any time."""

    def __init__(self, settings: LaunchSettings | None = None, follow: FollowPlan | None = None) -> None:
        self._settings = settings or LaunchSettings()
        self._follow = follow
        self._follower: Follower | None = None
        self.run_dir: Path | None = None
        self._hang: HangWatch | None = None
        self._status: StatusLine | None = None
        self._watched: list[_Watched] = []
        self._gone: list[_Watched] = []
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._told_early: set[int] = set()
        self._zombie: int | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For the time of the launch. On leaving it, the guardian is sent away and signals are as before."""
        become_subreaper()
        self._guardian = Guardian()
        self._tree = Tree(os.getpid(), but=() if self._guardian.pid is None else (self._guardian.pid,))
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        thread = threading.Thread(target=self._look_around, name="msprobe-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if self._follower is not None:
                self._follower.kill()
            self._stop.set()
            thread.join()
            if self._follower is not None:
                with contextlib.suppress(OSError):
                    self._follower.poll()
            if self._status is not None:
                self._status.close()
            self._say()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._guardian.dismiss()

    # -- what the backend tells

    def started(self, workers: Sequence[Worker]) -> None:
        """The workers of one attempt run."""
        watched = []
        for worker in workers:
            stat = stat_of(worker.pid)
            if stat is not None:
                watched.append(_Watched(worker, stat.start))
        self._told_early = set()
        if self.run_dir is not None and workers:
            layout = RunLayout(self.run_dir, workers[0].attempt)
            if self._settings.hang_timeout is not None:
                self._hang = HangWatch(layout, self._settings.hang_timeout)
            self._status = StatusLine(layout, self._settings.status)
            self._follow_ranks(self.run_dir, workers)
        self._watched = watched

    def _follow_ranks(self, run_dir: Path, workers: Sequence[Worker]) -> None:
        if self._follow is None:
            return
        if self._follower is None:
            self._follower = Follower(self._follow, run_dir, self.event)
            # It is none of the ranks' leftovers.
            own = (self._guardian.pid, self._follower.pid)
            self._tree = Tree(os.getpid(), but=[pid for pid in own if pid is not None])
        self._follower.attempt(workers[0].attempt, (worker.rank for worker in workers))

    def end_following(self, *, hurry: bool) -> list[str]:
        """The ranks have ended: what the in-run comparison has to say at the end, which is waited for."""
        return [] if self._follower is None else self._follower.end(hurry=hurry)

    def ended(self, workers: Sequence[Worker], *, whole_tree: bool = False) -> list[Worker]:
        """The workers of one attempt have ended: what was seen of them is added. Their leftovers end now.

        Leftovers are what is in the sessions of workers that did not end well, or with `whole_tree` everything.
        """
        by_pid = {watched.worker.pid: watched for watched in self._watched}
        self._watched = []
        if any(worker.stopped or worker.exit_code for worker in workers):
            self._tree.look()
            sessions = None if whole_tree else {worker.pid for worker in workers}
            self._tree.end(LEFTOVER_GRACE_SECONDS, sessions)
        return [
            dataclasses.replace(worker, peak_memory=by_pid[worker.pid].peak or None, ended_at=by_pid[worker.pid].ended)
            if worker.pid in by_pid
            else worker
            for worker in workers
        ]

    def event(self, kind: str, text: str, ranks: Iterable[int] = ()) -> None:
        """Something worth knowing happened: one line on the console and one in the run directory."""
        get_logger().info(text)
        if self.run_dir is None:
            return
        now = datetime.now(timezone.utc).astimezone().isoformat(timespec="milliseconds")
        line = {"time": now, "host": socket.gethostname(), "event": kind, "ranks": [*ranks], "text": text}
        try:
            with RunLayout(self.run_dir).events.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError:
            pass  # the console has it

    # -- signals

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between two of its instructions: no output from here, the thread does that."""
        reached: list[int] = []
        deaf: list[int] = []
        for watched in self._watched:
            if watched.ended is None:
                got = _deliver(watched.worker.pid, watched.start, number)
                (reached if got else deaf).append(watched.worker.rank)
        text = f"{signal_name(number)} passed on to {_names(reached) if reached else 'nobody'}"
        if deaf:
            text += f"; {_names(deaf)} would not survive it (no handler)"
        self._said.put(text)

    # -- the thread

    def _look_around(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001  # looking around must not end a launch
                get_logger().warning("the launcher's watch failed, the training goes on: %r", error)
                return

    def _tick(self) -> None:
        self._say()
        if self._follower is not None:
            self._follower.poll()
        now = time.monotonic()
        for watched in self._watched:
            if watched.ended is None:
                watched.peak = max(watched.peak, peak_memory(watched.worker.pid))
                watched.exit_code = exit_code_of(watched.worker.pid)
                if watched.exit_code is not None or not _runs(watched):
                    watched.ended = now
        self._tell_early(now)
        self._reap()
        running = {watched.worker.rank: watched.worker.pid for watched in self._watched if watched.ended is None}
        if -1 in running and self.run_dir is not None:
            # Another launcher's ranks: those that have left a mark.
            running = dict.fromkeys(RunLayout(self.run_dir).roster_ranks(), 0)
        if running and self._status is not None:
            self._status.look(running)
        if running and self._hang is not None:
            self._tell_hang(self._hang.look(running), running)

    def _tell_hang(self, lines: Sequence[str], running: Iterable[int]) -> None:
        for line in lines:
            self.event("hang", line, running)
        if len(lines) > 1 and self._settings.hang_kill:
            self.event("hang", "the job is ended (--probe-hang-kill)", running)
            os.kill(os.getpid(), signal.SIGTERM)

    def _tell_early(self, now: float) -> None:
        early = [
            watched.worker.rank
            for watched in self._watched
            if watched.ended is not None and now - watched.ended > EARLY_SECONDS
        ]
        early = [rank for rank in early if rank not in self._told_early]
        others = sorted(watched.worker.rank for watched in self._watched if watched.ended is None)
        if early and others:
            self._told_early.update(early)
            self.event("early end", f"{rank_list(sorted(early))} ended while {rank_list(others)} still run", early)

    def _reap(self) -> None:
        """Bury orphans that became our children. Who waits for a child of his own does so at once, so a dead one that
        is still there at the second look is nobody's.
        """
        own = {watched.worker.pid for watched in self._watched} | {self._guardian.pid}
        own |= {None if self._follower is None else self._follower.pid}
        seen, self._zombie = self._zombie, None
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None or dead.si_pid in own:
                return
            if seen is None:
                self._zombie = dead.si_pid
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(dead.si_pid, os.WNOHANG)

    def _say(self) -> None:
        while not self._said.empty():
            self.event("signal", self._said.get())


def _names(ranks: Sequence[int]) -> str:
    return "the command" if ranks[0] < 0 else rank_list(sorted(ranks))


def _runs(watched: _Watched) -> bool:
    stat = stat_of(watched.worker.pid)
    return stat is not None and stat.start == watched.start and stat.is_alive


def exit_code_of(pid: int) -> int | None:
    """A child's exit code, negative for a signal, left for the backend to collect; None while it runs or is gone."""
    try:
        dead = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if dead is None:
        return None
    return dead.si_status if dead.si_code == os.CLD_EXITED else -dead.si_status


def peak_memory(pid: int) -> int:
    """Bytes that a process has held in memory at most; 0 where that cannot be read."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def handles(pid: int, number: int) -> bool:
    """True where a process catches or ignores a signal, so that it lives on."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigCgt:", "SigIgn:"))]
    except (OSError, ValueError):
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)


def _deliver(pid: int, start: int, number: int) -> bool:
    """Send a signal to a worker that handles it; else to those below it (a shell wrapper has none) that do."""
    if handles(pid, number):
        return send(pid, start, number)
    below = Tree(pid)
    below.look()
    stats = {child: stat_of(child) for child in below.members}
    children = [child for child, stat in stats.items() if stat is not None and stat.parent == pid]
    reached = False
    for child in children:
        reached |= _deliver(child, below.members[child], number)
    return reached
