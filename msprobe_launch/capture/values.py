"""Saved values of tensors: a record's items get the names of their files, and the files get those names."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from msprobe_launch.records.codec import quote, tensor_text
from msprobe_launch.records.layout import value_file_name
from msprobe_launch.records.model import CallRecord, PlainValue, TensorValue, Value


class ValueFiles:
    """The folder of one step's values. `ending` is the framework's (`.pt`).

    The first item with a value takes its file, further ones get links to it: a tensor that is one op's output and the
    next one's input is on the disk once.
    """

    def __init__(self, folder: Path, ending: str) -> None:
        self.folder = folder
        self.lost = 0  # values that could not be kept
        self._ending = ending
        self._made = False
        self._count = 0

    def fresh(self) -> str:
        """Path for a value that has no name yet. Makes the folder; raises OSError."""
        if not self._made:
            os.makedirs(self.folder, exist_ok=True)
            self._made = True
        self._count += 1
        return os.path.join(self.folder, f".{os.getpid()}.{self._count}.tmp")

    def named(self, name: str, record: CallRecord) -> CallRecord:
        """The record with `data_name` in each item whose value was saved."""
        if record.is_grad:
            parameters = self._items(record.parameters, name)
            return CallRecord(record.op, None, None, None, parameters, is_grad=True)
        return CallRecord(
            record.op,
            self._list(record.inputs, f"{name}.input"),
            self._items(record.kwargs, f"{name}.kwargs"),
            self._list(record.outputs, f"{name}.output"),
            self._items(record.parameters, f"{name}.parameters"),
            record.parent,
            record.stack,
            record.recompute,
        )

    def item(self, value: Value, name: str) -> Value:
        """The same for one value."""
        if isinstance(value, TensorValue):
            if value.saved is None:
                return value
            try:
                file = self._place(value, name)
            except OSError:
                self.lost += 1
                return value
            return PlainValue(f'{tensor_text(value)[:-1]}, "data_name": {quote(file)}}}')
        if isinstance(value, list):
            return self._list(value, name)
        if isinstance(value, dict):
            return self._items(value, name)
        return value

    def _list(self, values: list[Value] | None, name: str) -> list[Value]:
        return [self.item(value, f"{name}.{index}") for index, value in enumerate(values or ())]

    def _items(self, values: dict[str, Value] | None, name: str) -> dict[str, Value]:
        return {key: self.item(value, f"{name}.{key}") for key, value in (values or {}).items()}

    def _place(self, value: TensorValue, name: str) -> str:
        file = value_file_name(name, self._ending)
        target, source = os.path.join(self.folder, file), value.saved or ""
        if os.path.basename(source).startswith("."):
            os.makedirs(self.folder, exist_ok=True)  # a held stretch may have become a step of its own
            os.replace(source, target)
            value.saved = target
        elif source != target:
            try:
                os.link(source, target)
            except FileExistsError:
                pass  # written before: debug.json is written again as it grows
            except OSError:  # a file system without links, or too many of them
                shutil.copyfile(source, target)
        return file

    def finish(self) -> None:
        """Remove what never got a name: values of calls that a filter left out in the end."""
        if self._made:
            with contextlib.suppress(OSError):
                for entry in os.scandir(self.folder):
                    if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                        os.unlink(entry.path)
