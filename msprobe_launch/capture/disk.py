"""File operations of a rank, in their order, on a thread of its own: a slow file system must not hold up training.

While the disk keeps up, the rank waits for it (some ms a step at most), so that a crash a moment later loses nothing
of what was handed over. Once it does not, nothing waits for it any more until it has caught up; what it has not written
yet is bounded. Where the bound is reached, `when_full` decides: what comes next is dropped and
counted, or the rank waits. A system call gives the interpreter lock away, so the thread costs training next to nothing.
It is a raw thread, which `threading.enumerate()` does not name.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable

from msprobe_launch.capture.guard import Guard
from msprobe_launch.config import WhenFull

_POLL = 0.01  # seconds between looks at the queue of a rank that waits for room
_PATIENCE = 0.05  # seconds that a rank gives a disk which has kept up so far


class Disk:
    """A queue of jobs and the thread that does them. A job must not raise; what it raises all the same is counted.

    `limit` is in bytes.
    """

    def __init__(self, limit: int, when_full: WhenFull, guard: Guard) -> None:
        self._limit = limit
        self._when_full = when_full
        self._guard = guard
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int]] = queue.SimpleQueue()
        # Bytes and jobs, only ever added to: those that came, under the lock, and those that are done, by the thread.
        # A signal handler of the program's may submit in the middle of a submission.
        self._lock = threading.RLock()
        self._submitted = self._open = 0
        self._finished = self._done = 0
        self._behind = False
        self._running = False

    @property
    def waiting(self) -> int:
        """Bytes that wait to be written, or are being written."""
        return self._submitted - self._finished

    def has_room(self) -> bool:
        """False where what comes next is to be dropped. May wait, if that is what was asked for."""
        while self.waiting > self._limit:
            if self._when_full is WhenFull.DROP:
                return False
            time.sleep(_POLL)
        return True

    def submit(self, job: Callable[[], None], size: int = 0) -> None:
        """Do `job`, which writes `size` bytes, after all that were submitted before."""
        with self._lock:
            self._submitted += size
            self._open += 1
            if not self._running:
                try:
                    _thread.start_new_thread(self._work, ())
                except RuntimeError:  # the interpreter shuts down (Python 3.12 and later), or there are too many
                    self._do(job, size)
                    return
                self._running = True
            self._jobs.put((job, size))

    def catch_up(self) -> None:
        """Give the disk a moment to do what was submitted, unless it is known to be slow."""
        if not self._behind and not self.drain(_PATIENCE):
            self._behind = self._open > self._done

    def drain(self, seconds: float) -> bool:
        """Wait until all is done; False where that takes longer."""
        if not self._running:
            return True
        done = _thread.allocate_lock()
        done.acquire()
        self.submit(done.release)
        return done.acquire(timeout=seconds)

    def forget(self) -> None:
        """In a forked child: there is no thread, and what waits is the parent's."""
        self._lock = threading.RLock()
        self._jobs = queue.SimpleQueue()
        self._submitted = self._finished = self._open = self._done = 0
        self._running = False

    def _work(self) -> None:
        while True:
            self._do(*self._jobs.get())

    def _do(self, job: Callable[[], None], size: int) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a guest
            self._guard.lose("write", error, 0)
        self._finished += size
        self._done += 1
        if self._done == self._open:
            self._behind = False
