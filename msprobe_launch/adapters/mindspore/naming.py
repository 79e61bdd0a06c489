"""Names of cells, found without a handle on the model.

A cell's name is its path from the topmost cell that holds it. MindSpore has no event for "put into", so every cell is
noted when it is made, and who holds whom is looked up when an unknown one is called. The first topmost cell that is
called gives bare paths (`Cell.blocks.0.fc1.Dense`), further ones (a loss, a second network) put their class name in
front. A name is free again when its cell dies.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

from msprobe_launch.adapters.mindspore.runtime import OPTIMIZERS, Cell
from msprobe_launch.records.names import NameTemplate


class CellInfo:
    """What is known of one cell object: its names, its own parameters, and what a call of it means."""

    __slots__ = ("cell", "gradients", "parameters", "primitives", "recorded", "template", "trains")

    def __init__(self, cell: Any, template: NameTemplate, recorded: bool) -> None:
        self.cell = weakref.ref(cell)
        self.template = template
        self.recorded = recorded  # False for the frame of the step: a topmost cell that only holds others
        self.gradients = template.parameters_grad()
        # A ParameterTuple registers its parameters with the cell too: they belong to the cells below.
        below = {id(one) for child in _below(cell) for one in child._params.values()} if cell._params else ()
        self.parameters = [name for name, one in cell._params.items() if one is not None and id(one) not in below]
        self.primitives: dict[int, NameTemplate] = {}  # of its primitives, by identity
        self.trains = any(isinstance(child, OPTIMIZERS) for _, child in cell.cells_and_names())


class CellNames:
    """Cell object -> CellInfo, by identity. Cells that die leave nothing behind that could mislead."""

    def __init__(self) -> None:
        self._infos: dict[int, CellInfo] = {}
        self._cells: dict[int, weakref.ref[Any]] = {}  # all that were made since `install`
        self._tops: list[tuple[weakref.ref[Any], str]] = []
        self._owners: dict[int, tuple[weakref.ref[Any], CellInfo, str]] = {}  # of parameters
        self._loose: dict[str, NameTemplate] = {}
        self._room = 1000

    def install(self) -> None:
        """Note every cell that is made from now on, and those there are (a script that starts us late)."""
        original = Cell.__init__
        cells = self._cells
        if Cell.total_instance_count:
            for one in gc.get_objects():
                if issubclass(type(one), Cell):
                    cells[id(one)] = weakref.ref(one)

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            cells[id(self)] = weakref.ref(self)

        Cell.__init__ = __init__

    def of(self, cell: Any) -> CellInfo:
        """The info of a cell, scanning its topmost holder where it is not known yet."""
        info = self._infos.get(id(cell))
        if info is not None and info.cell() is cell:
            return info
        self._scan(self._topmost(cell))
        info = self._infos.get(id(cell))
        if info is None or info.cell() is not cell:
            # Its holder keeps it out of sight (a plain list): it is a top of its own.
            self._scan(cell)
            info = self._infos[id(cell)]
        return info

    def owner(self, parameter: Any) -> tuple[CellInfo, str] | None:
        """The cell that holds a parameter, and its name there; None where no cell does."""
        entry = self._owners.get(id(parameter))
        if entry is None or entry[0]() is not parameter:
            self._scan_all()
            entry = self._owners.get(id(parameter))
            if entry is None or entry[0]() is not parameter:
                return None
        return entry[1], entry[2]

    def loose(self, parameter: Any) -> tuple[NameTemplate, str]:
        """The same for a parameter that no cell holds: it has a name of its own."""
        name = str(parameter.name)
        template = self._loose.get(name)
        if template is None:
            template = NameTemplate.of_module("Cell", name, "Parameter").parameters_grad()
            self._loose[name] = template
        return template, "data"

    def name_top(self, cell: Any, prefix: str) -> None:
        """`cell` is a topmost one, and `prefix` stands before the names in it."""
        self._tops.append((weakref.ref(cell), prefix))
        self._scan(cell)

    def _holders(self) -> dict[int, Any]:
        """Child's identity -> holder, of all cells alive."""
        holders: dict[int, Any] = {}
        for reference in list(self._cells.values()):
            cell = reference()
            if cell is None or isinstance(cell, OPTIMIZERS):
                continue
            for child in cell._cells.values():
                if child is not None and child is not cell:
                    holders.setdefault(id(child), cell)
        return holders

    def _topmost(self, cell: Any) -> Any:
        holders, seen = self._holders(), {id(cell)}
        while True:
            holder = holders.get(id(cell))
            if holder is None or id(holder) in seen:
                return cell
            seen.add(id(holder))
            cell = holder

    def _scan_all(self) -> None:
        """Name what was never called: parameters of a model that only a compiled function runs."""
        holders = self._holders()
        for reference in list(self._cells.values()):
            cell = reference()
            if cell is None or id(cell) in holders or isinstance(cell, OPTIMIZERS):
                continue
            if any(child._params for _, child in cell.cells_and_names()):
                self._scan(cell)

    def _scan(self, top: Any) -> None:
        if len(self._infos) + len(self._cells) >= self._room:
            self._forget_gone()
        prefix = self._prefix(top)
        for path, cell in top.cells_and_names():
            known = self._infos.get(id(cell))
            if (known is not None and known.cell() is cell) or isinstance(cell, OPTIMIZERS):
                continue  # shared: the first name stays
            name = ".".join(part for part in (prefix, path) if part)
            template = NameTemplate.of_module("Cell", name, type(cell).__name__)
            info = CellInfo(cell, template, True)
            info.recorded = not (cell is top and cell._cells and not info.parameters)
            self._infos[id(cell)] = info
            for name in info.parameters:
                parameter = cell._params[name]
                owner = self._owners.get(id(parameter))
                if owner is None or owner[0]() is not parameter:
                    self._owners[id(parameter)] = (weakref.ref(parameter), info, name)

    def _forget_gone(self) -> None:
        self._infos = {key: info for key, info in self._infos.items() if info.cell() is not None}
        self._owners = {key: entry for key, entry in self._owners.items() if entry[0]() is not None}
        for key in [key for key, reference in self._cells.items() if reference() is None]:
            del self._cells[key]
        self._room = 2 * (len(self._infos) + len(self._cells)) + 1000

    def _prefix(self, top: Any) -> str:
        # A cell made for one call (`nn.Softmax()` inside `construct`) leaves its name to its successor.
        self._tops = [entry for entry in self._tops if entry[0]() is not None]
        for known, prefix in self._tops:
            if known() is top:
                return prefix
        name = type(top).__name__
        taken = {prefix for _, prefix in self._tops}
        prefix, number = ("" if not self._tops else name), 1
        while prefix in taken:
            prefix = f"{name}_{number}"
            number += 1
        self._tops.append((weakref.ref(top), prefix))
        return prefix


def _below(cell: Any) -> list[Any]:
    return [child for _, child in cell.cells_and_names() if child is not cell]
