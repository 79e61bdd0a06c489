"""The script in control: `PrecisionDebugger`'s calls as the session understands them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from msprobe_launch.capture.debug import DebugLog
from msprobe_launch.config import Task

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session


class ManualControl:
    """Start, stop, step and save. `taken` is True once the script has taken over from the automatic steps."""

    def __init__(self, session: Session) -> None:
        self.taken = False
        self.on = False  # between a start and its stop
        self._session = session
        self._debug = DebugLog()

    def take(self) -> None:
        """From now on the script says where recording starts, stops and steps."""
        if not self.taken and self._session.hand_over():
            self.taken = True

    def set_step(self, step: int) -> None:
        """Number the step under way, unless something of it is on disk."""
        session = self._session
        if session.opened or self._debug.data:
            session.guard.miss(f"step number {step}: the step under way has its number {session.step}")
            return
        session.step = step

    def start(self) -> None:
        """Record from here on, in the step that is under way."""
        session = self._session
        session.take_orders()
        if session.is_over or self.on or not session.selects(session.step):
            return
        self.on = True
        session.thread = threading.get_ident()
        if not session.takes_modules and not session.takes_apis:
            return  # level debug
        if not session.opened:
            session.open_step()
        session.resume()

    def stop(self) -> None:
        """Record no more until the next start."""
        session = self._session
        if session.is_over or not self.on:
            return
        self.on = False
        session.stop_short()
        self.write()

    def step(self) -> None:
        """The step ends here."""
        if not self._session.is_over:
            self.stop()
            self._session.end_this_step()

    def save(self, name: str, variable: Any, gradients: bool) -> None:
        """Put a variable into debug.json of the step under way, its gradients when they come."""
        session = self._session
        if session.is_over or not session.selects(session.step) or threading.get_ident() != session.thread:
            return
        session.saving = session.config.task is Task.TENSOR
        self._debug.save(name, variable, gradients, session.adapter)
        session.writer.calls += 1
        if self._debug.due(session.config.flush_seconds):
            self.write()

    def write(self, *, last: bool = False) -> None:
        """Write debug.json, where anything was saved. `last`: the step ends."""
        session = self._session
        if not self._debug.data:
            return
        session.settle()
        values = session.writer.values_of(session.step) if session.config.saves_values else None
        try:
            self._debug.write(session.folder(session.step), session.config, session.adapter.framework, values)
            written = True
        except OSError as error:
            session.guard.lose("debug.json", error, len(self._debug.data))
            written = False
        if last:
            self._debug = DebugLog()
            session.marks.step_ended(session.step, complete=written)
            session.writer.disk.submit(session.marks.save)
