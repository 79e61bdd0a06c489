"""Is this call recorded? Pure: names in, yes or no out."""

from __future__ import annotations

from collections.abc import Iterable

from msprobe_launch.config import DataMode, ProbeConfig


class Gate:
    """The filters of one configuration. `open` is True where every call passes, which the hot path asks first."""

    def __init__(self, config: ProbeConfig) -> None:
        modes = config.data_mode
        every = not modes or DataMode.ALL in modes
        sides = {DataMode.INPUT, DataMode.OUTPUT} & modes
        directions = {DataMode.FORWARD, DataMode.BACKWARD} & modes
        self.forward = every or not directions or DataMode.FORWARD in modes
        self.backward = every or not directions or DataMode.BACKWARD in modes
        self.inputs = every or not sides or DataMode.INPUT in modes
        self.outputs = every or not sides or DataMode.OUTPUT in modes
        self._list = config.list
        self._scope = config.scope
        self._inside = False
        self.open = not config.list and not config.scope
        self.seen: set[str] = set()  # which filters have let something through

    def new_step(self) -> None:
        """A scope starts anew in each step."""
        self._inside = False

    def enters(self, name: str, enclosing: Iterable[str]) -> bool:
        """At the start of call `name`, inside the module calls `enclosing` (outermost first)."""
        if self._scope and not self._inside and name == self._scope[0]:
            self._inside = True
            self.seen.add(name)
        return self.admits(name, enclosing)

    def leaves(self, name: str) -> None:
        """At the end of call `name`: a scope includes all of its last call."""
        if self._scope and self._inside and name == self._scope[-1]:
            self._inside = False
            self.seen.add(name)

    def admits(self, name: str, enclosing: Iterable[str]) -> bool:
        """True where the scope is open and a list entry is part of the name or of an enclosing module's."""
        if self._scope and not self._inside:
            return False
        if not self._list:
            return True
        for entry in self._list:
            if entry in name or any(entry in outer for outer in enclosing):
                self.seen.add(entry)
                return True
        return False

    def unmatched(self) -> list[str]:
        """Filter texts that never let anything through."""
        return [text for text in (*self._list, *self._scope) if text not in self.seen]
