"""What was recorded reaches the disk also when nothing more comes: a rank that hangs in a collective, or in a debugger.

A record that arrives flushes what is older than `flush_seconds`; where none arrives, this thread does. It is a raw
thread, so that `threading.enumerate()` and `threading.active_count()` say what they say without us, and it does nothing
but look at the clock until there is something old to write.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable


class IdleFlusher:
    """Calls `flush_if_old`, which must not raise, every `seconds` / 2 from a thread of its own until `stop`."""

    def __init__(self, flush_if_old: Callable[[], None], seconds: float) -> None:
        self._flush_if_old = flush_if_old
        self._pause = max(seconds / 2, 0.05)
        self._on = False

    def start(self) -> None:
        """Begin to watch; a second call does nothing. A forked child has no such thread."""
        if not self._on:
            self._on = True
            _thread.start_new_thread(self._watch, ())

    def stop(self) -> None:
        """End at the next look at the clock."""
        self._on = False

    def _watch(self) -> None:
        while self._on:
            time.sleep(self._pause)
            if self._on:
                self._flush_if_old()
