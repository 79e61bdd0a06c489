"""Is this call recorded? Pure: names in, yes or no out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from msprobe_launch.config import DataMode, ProbeConfig, Task
from msprobe_launch.errors import near_miss
from msprobe_launch.records.names import OpName, Phase, regex_of

MAX_THERE = 5000  # names kept to say what was there; a program has a bounded number of them


class Entry:
    """One text of `list`, `scope` or `tensor_list`: a full op name, an expression, or a part of a name."""

    def __init__(self, text: str) -> None:
        self.text = text
        pattern = regex_of(text)
        self.backward = False
        self.matches: Callable[[str], bool]
        if pattern is not None:
            self.matches = lambda name, search=re.compile(pattern).search: search(name) is not None  # type: ignore[misc]
            return
        try:
            op = OpName.parse(text)
        except ValueError:
            self.matches = lambda name: text in name
        else:
            # Module.fc.Linear.forward.1 is not a part of Module.fc.Linear.forward.10.
            self.matches = lambda name: name == text
            self.backward = op.phase is Phase.BACKWARD


class Gate:
    """The filters of one configuration. `open` is True where every call passes, which the hot path asks first.

    A call passes by its forward name, and its backward record with it. A filter that names a backward op is about that
    record alone: then every call is watched (`watches_all`), and `keeps` decides when a record is there.
    """

    def __init__(self, config: ProbeConfig) -> None:
        modes = config.data_mode
        every = not modes or DataMode.ALL in modes
        sides = {DataMode.INPUT, DataMode.OUTPUT} & modes
        directions = {DataMode.FORWARD, DataMode.BACKWARD} & modes
        values = config.task is not Task.STRUCTURE
        self.forward = every or not directions or DataMode.FORWARD in modes
        self.backward = every or not directions or DataMode.BACKWARD in modes
        self.names_only = not values
        self.inputs = values and (every or not sides or DataMode.INPUT in modes)
        self.outputs = values and (every or not sides or DataMode.OUTPUT in modes)
        self._list = [Entry(text) for text in config.list]
        self._scope = [Entry(text) for text in config.scope]
        self._saved = [Entry(text) for text in config.tensor_list]
        self._ordered = False  # what is saved was asked for while the job ran, perhaps for a step that never comes
        self._inside = False
        self.open = not (config.list or config.scope or config.tensor_list)
        self.watches_all = any(entry.backward for entry in (*self._list, *self._scope))
        self._admitted: set[str] = set()  # forward names of this step, where all calls are watched
        self._seen: set[str] = set()  # which filters have let something through
        self._there: dict[str, None] = {}

    def save(self, texts: Iterable[str], *, ordered: bool) -> None:
        """Save the values of other ops from now on. `ordered`: a running job was told to (control.yaml)."""
        self._saved, self._ordered = [Entry(text) for text in texts], ordered
        self.open = not (self._list or self._scope or self._saved)

    def new_step(self) -> None:
        """A scope starts anew in each step."""
        self._inside = False
        self._admitted.clear()

    def enters(self, name: str, enclosing: Iterable[str]) -> bool:
        """At the start of call `name`, inside the module calls `enclosing` (outermost first)."""
        if len(self._there) < MAX_THERE:
            self._there[name] = None
        if self._scope and not self._inside and name == self._scope[0].text:
            self._inside = True
            self._seen.add(name)
        admitted = self._admits(name, enclosing)
        if self.watches_all:
            if admitted:
                self._admitted.add(name)
            return True
        return admitted

    def leaves(self, name: str) -> None:
        """At the end of call `name`: a scope includes all of its last call."""
        if self._scope and self._inside and name == self._scope[-1].text:
            self._inside = False
            self._seen.add(name)

    def _admits(self, name: str, enclosing: Iterable[str]) -> bool:
        if self._scope and not self._inside:
            return False
        if not self._list:
            return True
        return self._listed(self._list, (name, *enclosing))

    def _listed(self, entries: Iterable[Entry], names: Iterable[str]) -> bool:
        for entry in entries:
            if any(entry.matches(name) for name in names):
                self._seen.add(entry.text)
                return True
        return False

    def keeps(self, name: str, forward: str, backward: bool) -> bool:
        """Where all calls are watched: is this record, of the call with this forward name, to be written?"""
        if not backward:
            return name in self._admitted
        if len(self._there) < MAX_THERE:
            self._there[name] = None
        first, last = (self._scope[0].text, self._scope[-1].text) if self._scope else ("", "")
        if name == first:
            self._inside = True
            self._seen.add(name)
        kept = forward in self._admitted or ((not self._scope or self._inside) and self._keeps_listed(name))
        if name == last and self._inside:
            self._inside = False
            self._seen.add(name)
        return kept

    def _keeps_listed(self, name: str) -> bool:
        return not self._list or self._listed([entry for entry in self._list if entry.backward], (name,))

    def saves(self, names: Iterable[str]) -> bool:
        """True where `tensor_list` picks one of a call's forward and backward names or an enclosing module's."""
        return self._listed(self._saved, names)

    def unmatched(self) -> list[str]:
        """A line for each filter text that never let anything through, with what was there."""
        saved = [] if self._ordered else self._saved
        texts = [entry.text for entry in (*self._list, *self._scope, *saved) if entry.text not in self._seen]
        return [f"filter '{text}' matched nothing.{self._said_of(text)}" for text in texts]

    def _said_of(self, text: str) -> str:
        if not self._there:
            return " No call was seen at all."
        ops = [OpName.parse(name) for name in self._there]
        stems = sorted({op.stem for op in ops})
        names = {word for op in ops for word in op.words}
        shown = ", ".join(stems[:5]) + (f" and {len(stems) - 5} more" if len(stems) > 5 else "")
        return f"{near_miss(text, {*names, *stems, *self._there})} There was: {shown}."
