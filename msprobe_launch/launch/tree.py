"""The processes of one launch: everything that descends from the launcher, and the guardian that outlives it.

The launcher is made a subreaper, so that a process whose parent has ended becomes the launcher's child and a daemon of
a rank still belongs to the tree. The guardian is this file run as a program, in a session of its own: it keeps a list
of the tree, and when the launcher dies without a farewell (`kill -9`), it ends what is on the list. A process is known
by its number and its starting time, so that a number used again is never taken for it. Linux only; standard library
only, and little of it, because the guardian starts with every launch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# After the launcher's death: first SIGTERM, so that a rank may save something, then SIGKILL. Ten seconds are promised.
GRACE_SECONDS = 3.0
GIVE_UP_SECONDS = 30.0
# Between two looks at the tree. A look costs about 1 us per process of the machine; at most 2 % of a core is spent.
LOOK_SECONDS = 0.25
LOOK_SHARE = 0.02
# Looks between two that trust no number seen before.
LOOKS_BEFORE_FORGETTING = 100
FAREWELL = b"."

_PR_SET_CHILD_SUBREAPER = 36


class Stat:
    """What /proc/PID/stat says: state letter, numbers of the parent and the session, starting time in clock ticks."""

    __slots__ = ("parent", "session", "start", "state")

    def __init__(self, state: str, parent: int, session: int, start: int) -> None:
        self.state = state
        self.parent = parent
        self.session = session
        self.start = start

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"


def stat_of(pid: int) -> Stat | None:
    """The process's present state, or None where there is none of this number."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None
    # The command stands in parentheses and may hold any character.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def become_subreaper() -> bool:
    """Orphans of this process's tree become its children. False where the kernel cannot."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def send(pid: int, start: int, number: int) -> bool:
    """Send a signal to the process of this number that started at `start`, and to no other. False where it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone, or a kernel before 5.3
        stat = stat_of(pid)
        if stat is None or stat.start != start or not stat.is_alive:
            return False
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            return True
        return False
    try:
        stat = stat_of(pid)
        if stat is None or stat.start != start or not stat.is_alive:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


class Tree:
    """The descendants of `root`, as far as they have been seen. `but` are descendants that do not count."""

    def __init__(self, root: int, but: Iterable[int] = ()) -> None:
        self.root = root
        self.members: dict[int, int] = {}  # number -> starting time
        self._but = frozenset(but)
        self._strangers: set[int] = set()
        self._looks = 0

    def look(self) -> None:
        """Take in who has come; forget who has gone. Only numbers not seen before are read."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._looks += 1
        if self._looks % LOOKS_BEFORE_FORGETTING == 0:
            self._strangers.clear()
            self.members = {pid: start for pid, start in self.members.items() if self._is_there(pid)}
        self._strangers &= present
        for pid in self.members.keys() - present:
            del self.members[pid]
        fresh: dict[int, Stat] = {}
        for pid in present.difference(self._strangers, self.members, self._but, (self.root,)):
            stat = stat_of(pid)
            if stat is not None:
                fresh[pid] = stat
        while True:
            found = [pid for pid, stat in fresh.items() if stat.parent == self.root or self._is_there(stat.parent)]
            if not found:
                break
            for pid in found:
                self.members[pid] = fresh.pop(pid).start
        # Whose parent has gone meanwhile has another one by now, perhaps the root: it is looked at again.
        self._strangers |= {pid for pid, stat in fresh.items() if stat_of(stat.parent) is not None}

    def living(self, sessions: Iterable[int] | None = None) -> dict[int, int]:
        """Members that run, by a fresh look at each; with `sessions`, those that belong to one of them."""
        found = {}
        for pid, start in self.members.items():
            stat = stat_of(pid)
            if stat is None or stat.start != start or not stat.is_alive:
                continue
            if sessions is None or stat.session in sessions:
                found[pid] = start
        return found

    def _is_there(self, pid: int) -> bool:
        start = self.members.get(pid)
        stat = stat_of(pid) if start is not None else None
        return stat is not None and stat.start == start and stat.is_alive

    def end(self, grace: float, sessions: Iterable[int] | None = None) -> int:
        """End the living (see there): SIGTERM, after `grace` seconds SIGKILL, until none is left. How many it were."""
        self.look()
        ended: set[int] = set()
        begin = time.monotonic()
        while time.monotonic() < begin + grace + GIVE_UP_SECONDS:
            living = self.living(sessions)
            if not living:
                break
            asks = time.monotonic() < begin + grace
            for pid, start in living.items():
                if not asks or pid not in ended:
                    send(pid, start, signal.SIGTERM if asks else signal.SIGKILL)
            ended |= living.keys()
            time.sleep(0.02)
            self.look()
        return len(ended)


# -- the guardian


class Guardian:
    """The launcher's end of the pipe to its guardian. Without one (no /proc, no room) a launch works all the same."""

    def __init__(self) -> None:
        import subprocess

        self.pid: int | None = None
        self._pipe: int | None = None
        if not os.path.isdir("/proc/self"):
            return
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(read)],
                pass_fds=(read,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(write)
        else:
            self._process, self.pid, self._pipe = process, process.pid, write
        finally:
            os.close(read)

    def dismiss(self) -> None:
        """The launcher ends in good order: nothing is to be ended after it. A second call does nothing."""
        if self._pipe is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._pipe, FAREWELL)
        os.close(self._pipe)
        self._pipe = None
        self._process.wait()


def guard(root: int, pipe: int) -> None:
    """Wait for the launcher's farewell or its death; at its death end its tree."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    tree = Tree(root, but=(os.getpid(),))
    pause = LOOK_SECONDS
    while True:
        ready, _, _ = select.select([pipe], [], [], pause)
        if ready:
            break
        begin = time.process_time()
        tree.look()
        pause = max(LOOK_SECONDS, (time.process_time() - begin) / LOOK_SHARE)
    if os.read(pipe, 1) != FAREWELL:
        tree.root = -1  # its number is free now
        tree.end(GRACE_SECONDS)


if __name__ == "__main__":
    guard(int(sys.argv[1]), int(sys.argv[2]))
