"""Cell calls (L0): `Cell.__call__` is replaced once, for all cells there are and will be.

Registered hooks would get no keyword arguments in graphs and break their compilation. Cells with a `__call__` of their
own call the one of the base. The wrapper also tells the session where outermost forwards begin, at every level.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_launch.adapters.mindspore import runtime
from msprobe_launch.adapters.mindspore.backward import BackwardWatch, Inputs
from msprobe_launch.adapters.mindspore.naming import CellInfo, CellNames
from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import Cell
from msprobe_launch.adapters.mindspore.steps import Scope
from msprobe_launch.adapters.mindspore.values import MindSporeValues
from msprobe_launch.capture.plain import output_items
from msprobe_launch.records.model import CallRecord, OpRef

if TYPE_CHECKING:
    from msprobe_launch.capture.session import ModuleCall, Session

_frame = sys._getframe


class CellCalls:
    """The wrapper around `Cell.__call__` and what it records."""

    def __init__(
        self,
        session: Session,
        values: MindSporeValues,
        backward: BackwardWatch,
        names: CellNames,
        switch: Switch,
        scope: Scope,
    ) -> None:
        self._session = session
        self._values = values
        self._backward = backward
        self._names = names
        self._switch = switch
        self._scope = scope
        self._original: Callable[..., Any] = Cell.__call__

    def install(self) -> None:
        """Replace `Cell.__call__`. Optimizers have got their own by now, above it."""
        original = self._original
        session, switch, observe = self._session, self._switch, self._observe

        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if switch.quiet or not session.listening:
                return original(self, *args, **kwargs)
            return observe(self, args, kwargs)

        Cell.__call__ = __call__
        stacks = session.writer.stacks
        stacks.plumbing = frozenset({original.__code__.co_filename})
        stacks.framework = (str(Path(original.__code__.co_filename).parent.parent) + os.sep,)

    def name_models(self, models: Sequence[Any]) -> None:
        """Several models: their index stands before their cells' names."""
        for index, model in enumerate(models):
            self._names.name_top(model, str(index))

    def _observe(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        if runtime.is_traced():
            session.guard.miss("cell call inside a traced function")
            return self._original(cell, *args, **kwargs)
        try:
            top = runtime.top_cell(cell)
            info = self._names.of(cell)
            gradients = info.trains or top or runtime.builds_graph()
            followed = session.observes_this_thread() or (gradients and session.follow_this_thread())
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("cell", error)
            return self._original(cell, *args, **kwargs)
        if not followed:
            session.guard.miss("cell call in another thread")
            return self._original(cell, *args, **kwargs)
        if session.modules or session.in_backward or self._scope.inside:
            return self._record(cell, info, top, args, kwargs)
        recorded = session.outermost_forward(gradients)
        try:
            if recorded:
                return self._record(cell, info, top, args, kwargs)
            return self._left_out(cell, info, args, kwargs)
        finally:
            session.forward_done()

    def _left_out(self, cell: Any, info: CellInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Nothing inside this forward matters to us, unless a `grad` shows that it trains after all."""
        scope, switch = self._scope, self._switch
        scope.skipped = info
        switch.enter_quiet()
        try:
            return self._original(cell, *args, **kwargs)
        finally:
            if scope.skipped is info:
                scope.skipped = None
                switch.leave_quiet()

    def _record(self, cell: Any, info: CellInfo, top: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, switch = self._session, self._switch
        state = call = None
        graph = runtime.in_graph_mode()
        switch.enter_quiet()
        try:
            state = self._before(cell, info, top, graph, args, kwargs)
            call = session.enter_module(state.op, _frame())
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("cell input", error)
        finally:
            switch.leave_quiet()
        cells = self._scope.cells
        cells.append((cell, info))
        try:
            self._values.raise_theirs()
            if graph:
                result = self._as_graph(cell, info, args, kwargs)
            else:
                result = self._original(cell, *args, **kwargs)
        except BaseException:
            del cells[-1:]
            self._end(state, call, _RAISED, args, kwargs)
            raise
        del cells[-1:]
        self._end(state, call, result, args, kwargs)
        self._values.raise_theirs()
        return result

    def _as_graph(self, cell: Any, info: CellInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Graph mode: the cell and all inside is compiled, and seen at its boundary only."""
        session, switch = self._session, self._switch
        session.guard.miss(f"inside of {info.template.counter}: not observable (graph mode)")
        self._scope.say_graphs(session.identity.rank)
        switch.enter_quiet()
        try:
            result = self._original(cell, *args, **kwargs)
        finally:
            switch.leave_quiet()
        # Its optimizer is inside the graph: the call is a step. `Model.train` says so too, and sees that it is known.
        if info.trains and not self._scope.cells[:-1] and not session.tracker.pending:
            session.optimizer_stepped(id(cell))
        return result

    def _before(
        self, cell: Any, info: CellInfo, top: bool, graph: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Before:
        session = self._session
        state = _Before()
        if not info.recorded and not graph:
            return state
        state.parent = session.parent
        op = session.open_call(info.template)
        if op is None:  # left out by a filter; it still encloses what runs inside
            segment = session.segment
            state.op = OpRef(info.template, segment.counters[info.template.counter] - 1, segment)
            return state
        state.op = op
        if not session.takes_modules:
            return state
        gate = session.gate
        gradients = top or runtime.builds_graph()
        record = state.record = CallRecord(op, None, None, None, None, state.parent)
        record.recompute = bool(session.in_backward) and gradients
        if gate.inputs and gate.forward:
            describe = self._values.describe
            record.inputs = describe.items(args)
            record.kwargs = {key: describe(value) for key, value in kwargs.items()} if kwargs else None
            if info.parameters:
                own = cell._params
                record.parameters = {name: describe(own[name]) for name in info.parameters if name in own}
        if gradients and gate.backward:
            state.inputs = self._backward.inputs()
            # A top cell's own inputs become part of the graph in its call.
            state.top = top
            if not top:
                state.inputs.collect(args, kwargs)
        return state

    def _end(
        self,
        state: _Before | None,
        call: ModuleCall | None,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """The call has returned `result`, or raised: then what went in is on record."""
        session = self._session
        if call is not None:
            session.leave_module(call)
        if state is None or state.op is None or not session.recording:
            return
        self._switch.enter_quiet()
        try:
            record = state.record
            if record is not None:
                record.stack = call.stack if call is not None else -1
                if result is not _RAISED:
                    self._after(state, record, result, args, kwargs)
                if session.gate.forward:
                    session.emit(record)
            session.close_call(state.op)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("cell output", error)
        finally:
            self._switch.leave_quiet()

    def _after(
        self, state: _Before, record: CallRecord, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        gate = self._session.gate
        if gate.outputs and gate.forward:
            record.outputs = output_items(result, self._values.describe)
        if state.inputs is not None:
            if state.top:
                state.inputs.collect(args, kwargs)
            self._backward.watch(record.op, state.parent, state.inputs, result)


_RAISED = object()


class _Before:
    """What was seen at the start of a cell's call. `op` is None where the cell is no op of its own."""

    __slots__ = ("inputs", "op", "parent", "record", "top")

    def __init__(self) -> None:
        self.op: OpRef | None = None
        self.parent: OpRef | None = None
        self.record: CallRecord | None = None
        self.inputs: Inputs | None = None
        self.top = False
