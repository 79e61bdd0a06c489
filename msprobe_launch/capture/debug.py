"""debug.json: variables that the script saves by name, with their gradients (`PrecisionDebugger.save`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msprobe_launch.capture.plain import MAX_DEPTH
from msprobe_launch.capture.values import ValueFiles
from msprobe_launch.config import Level, ProbeConfig
from msprobe_launch.records import journal
from msprobe_launch.records.codec import quote, value_text
from msprobe_launch.records.layout import RankFolder
from msprobe_launch.records.model import Value
from msprobe_launch.records.names import debug_name
from msprobe_launch.records.roster import write_atomically

if TYPE_CHECKING:
    from msprobe_launch.adapters.base import FrameworkAdapter


class DebugLog:
    """What was saved in the open step. A gradient takes the place that was kept for it when it comes."""

    def __init__(self) -> None:
        self.data: dict[str, Value] = {}
        self._counts: dict[str, int] = {}
        self._written_at = 0.0

    def save(self, name: str, variable: Any, gradients: bool, adapter: FrameworkAdapter) -> None:
        """Describe `variable` as it is now. `gradients` keeps places for its tensors' gradients."""
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        self.data[debug_name(name, number)] = adapter.describe(variable)
        if not gradients:
            return
        key = debug_name(f"{name}_grad", number)
        data = self.data

        def put(value: Value) -> None:
            data[key] = value

        data[key] = self._places(variable, put, adapter)

    def _places(self, variable: Any, put: Callable[[Value], None], adapter: FrameworkAdapter, depth: int = 0) -> Value:
        if isinstance(variable, dict):
            out: dict[str, Value] = {}
            if depth < MAX_DEPTH:
                for key, item in variable.items():

                    def into(value: Value, key: str = str(key)) -> None:
                        out[key] = value

                    out[str(key)] = self._places(item, into, adapter, depth + 1)
            return out
        if type(variable) in (list, tuple):
            items: list[Value] = []
            if depth < MAX_DEPTH:
                for index, item in enumerate(variable):

                    def at(value: Value, index: int = index) -> None:
                        items[index] = value

                    items.append(self._places(item, at, adapter, depth + 1))
            return items
        adapter.watch_gradient(variable, put)
        return None

    def due(self, seconds: float) -> bool:
        """True where the last write is that long ago: a crash must not lose all that was saved."""
        return time.monotonic() >= self._written_at + seconds

    def write(self, folder: RankFolder, config: ProbeConfig, framework: str, values: ValueFiles | None) -> None:
        """Write debug.json. The caller has brought statistics home. Raises OSError."""
        self._written_at = time.monotonic()
        if not self.data:
            return
        data_dir = str(folder.tensors) if values is not None else None
        named = {key: values.item(value, key) if values is not None else value for key, value in self.data.items()}
        lines = journal.RECORD_END.join(f" {quote(key)}: {value_text(value)}" for key, value in named.items())
        head = journal.header(config.task.value, Level.DEBUG.value, framework, data_dir)
        write_atomically(folder.debug, head + lines + journal.CLOSE)
