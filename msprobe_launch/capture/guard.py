"""No error of ours reaches the user's program; each is counted, and said once per cause and rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from msprobe_launch.logs import get_logger
from msprobe_launch.records.roster import FILE_SYSTEM


class Guard:
    """Counts what was lost and why. `on_error` (set by the writer) receives one text per cause and step."""

    def __init__(self) -> None:
        self.lost: dict[str, int] = {}
        self.unseen: dict[str, int] = {}
        self.on_error: Callable[[str], None] | None = None
        self._said: set[str] = set()
        self._logged: set[str] = set()

    def lose(self, where: str, error: BaseException, calls: int = 1) -> None:
        """Count `calls` calls that could not be recorded because of `error` in our own code at `where`."""
        full = f"{where}: {type(error).__name__}: {error}"[:300]
        reason, cause = full, f"{where}: {type(error).__name__}"
        if isinstance(error, OSError) and error.strerror:
            # A full disk hits every file of every step: one cause, one warning, one line in the roster.
            reason = cause = f"{FILE_SYSTEM}{error.strerror}"
        self.lost[reason] = self.lost.get(reason, 0) + calls
        if cause not in self._said:
            self._said.add(cause)
            get_logger().warning("could not record (%s); training goes on, losses are counted in the roster", full)
        if cause not in self._logged and self.on_error is not None:
            self._logged.add(cause)
            self.on_error(f"{full}\n{''.join(traceback.format_exception(error))}")

    def miss(self, what: str, calls: int = 1) -> None:
        """Count calls that happened where we cannot or must not look (another thread, a traced function)."""
        self.unseen[what] = self.unseen.get(what, 0) + calls

    def new_step(self) -> None:
        """Errors are logged again in the next step's folder; the console has heard of them."""
        self._logged.clear()
