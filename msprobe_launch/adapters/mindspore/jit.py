"""Compiled functions: one record at the boundary, `Jit.<name>`, and nothing inside.

`jit` compiles the source (`ast`), follows the byte code (`bytecode`) or traces the calls (`trace`). In graph mode
`grad` is such a function too: its record has the name of what is differentiated.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspore.graph._utils.pijit_context import PIJitCaptureContext
from mindspore.graph.api import _JitExecutor

from msprobe_launch.adapters.mindspore import runtime
from msprobe_launch.adapters.mindspore.backward import BackwardWatch
from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import OPTIMIZERS, Cell
from msprobe_launch.adapters.mindspore.steps import Scope
from msprobe_launch.adapters.mindspore.values import MindSporeValues
from msprobe_launch.capture.plain import output_items
from msprobe_launch.records.model import CallRecord
from msprobe_launch.records.names import NameTemplate

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

_frame = sys._getframe


class JitCalls:
    """Watches the boundaries of compiled functions."""

    def __init__(
        self, session: Session, values: MindSporeValues, backward: BackwardWatch, switch: Switch, scope: Scope
    ) -> None:
        self._session = session
        self._values = values
        self._backward = backward
        self._switch = switch
        self._scope = scope
        self._templates: dict[str, NameTemplate] = {}

    def install(self) -> None:
        """Replace what runs a compiled function, in each of the three ways."""
        self._watch_source()
        self._watch_bytecode()
        self._watch_trace()

    def _watch_source(self) -> None:
        observe = self._observe
        original = _JitExecutor.__call__

        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return observe(self.fn, self.obj, functools.partial(original, self), args, kwargs)

        _JitExecutor.__call__ = __call__

    def _watch_bytecode(self) -> None:
        observe = self._observe
        original = PIJitCaptureContext._wrapper

        @functools.wraps(original)
        def _wrapper(self: Any) -> Any:
            run = _Bytecode(self, original(self))

            # MindSpore takes a function with this very code for one that is compiled already, and looks for the
            # context in the first place of its closure: `run`, which answers for it.
            def compiled(*args: Any, **kwargs: Any) -> Any:
                return run(args, kwargs)

            run.observe = observe
            return compiled

        PIJitCaptureContext._wrapper = _wrapper

    def _watch_trace(self) -> None:
        from mindspore.graph import api as graph_api
        from mindspore.graph import jit_trace

        observe = self._observe
        original = jit_trace._jit_trace

        @functools.wraps(original)
        def _jit_trace(config: Any) -> Any:
            wrap = original(config)

            @functools.wraps(wrap)
            def wrapped(function: Any) -> Any:
                compiled = wrap(function)
                if not isinstance(function, types.FunctionType) or not isinstance(compiled, types.FunctionType):
                    return compiled  # its `construct` has come through here by itself
                if compiled is function:
                    return compiled

                @functools.wraps(compiled)
                def boundary(*args: Any, **kwargs: Any) -> Any:
                    return observe(function, _owner(function, args), compiled, args, kwargs)

                return boundary

            return wrapped

        jit_trace._jit_trace = graph_api._jit_trace = _jit_trace

    def _observe(
        self, function: Any, owner: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        session, switch = self._session, self._switch
        if switch.quiet or not session.listening or runtime.is_traced() or not session.observes_this_thread():
            return run(*args, **kwargs)
        function, trains = _differentiated(function)
        name = _name_of(function)
        if name is None:  # MindSpore's own (an optimizer's update)
            return self._quietly(run, args, kwargs)
        if session.modules or session.in_backward or self._scope.inside:
            return self._record(name, owner, run, args, kwargs)
        steps = not trains and _holds_optimizer(function, owner)
        recorded = session.outermost_forward(trains or steps or runtime.builds_graph())
        try:
            if recorded:
                return self._record(name, owner, run, args, kwargs)
            return self._quietly(run, args, kwargs)
        finally:
            session.forward_done()
            if steps:
                session.optimizer_stepped(f"Jit.{name}")

    def _quietly(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._switch.enter_quiet()
        try:
            return run(*args, **kwargs)
        finally:
            self._switch.leave_quiet()

    def _record(
        self, name: str, owner: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        session, switch, values = self._session, self._switch, self._values
        record = inputs = None
        switch.enter_quiet()
        try:
            try:
                template = self._templates.get(name)
                if template is None:
                    template = self._templates[name] = NameTemplate.of_api("Jit", name)
                if runtime.in_graph_mode():
                    self._scope.say_graphs(session.identity.rank)
                session.guard.miss(f"inside of Jit.{name}: not observable (compiled)")
                given = args[1:] if owner is not None and args and args[0] is owner else args
                takes = session.recording and (session.takes_modules or session.takes_apis)
                op = session.open_call(template) if takes else None
                if op is not None:
                    gate = session.gate
                    record = CallRecord(op, None, None, None, None, session.parent, session.stack_of(_frame(2)))
                    gradients = runtime.builds_graph()
                    record.recompute = bool(session.in_backward) and gradients
                    if gate.inputs and gate.forward:
                        record.inputs = values.describe.items(given)
                        record.kwargs = {key: values.describe(value) for key, value in kwargs.items()} or None
                    if gradients and gate.backward:
                        inputs = self._backward.inputs().collect(given, kwargs)
            except Exception as error:  # noqa: BLE001 - a guest
                session.guard.lose("jit input", error)
            result = _RAISED
            try:
                values.raise_theirs()
                result = run(*args, **kwargs)
            finally:
                if record is not None:
                    self._end(record, inputs, result)
            values.raise_theirs()
            return result
        finally:
            switch.leave_quiet()

    def _end(self, record: CallRecord, inputs: Any, result: Any) -> None:
        session = self._session
        gate = session.gate
        try:
            if result is not _RAISED:
                if gate.outputs and gate.forward:
                    record.outputs = output_items(result, self._values.describe)
                if inputs is not None:
                    self._backward.watch(record.op, record.parent, inputs, result)
            if gate.forward and session.recording:
                session.emit(record)
            session.close_call(record.op)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("jit output", error)


_RAISED = object()


class _Bytecode:
    """A function compiled from its byte code. `fn` is asked by MindSpore, see `_watch_bytecode`."""

    __slots__ = ("_context", "_run", "observe")

    def __init__(self, context: Any, run: Callable[..., Any]) -> None:
        self._context = context
        self._run = run
        self.observe: Callable[..., Any] = lambda *_: None

    @property
    def fn(self) -> Any:
        return self._context.fn

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.observe(self.fn, _owner(self.fn, args), self._run, args, kwargs)


def _owner(function: Any, args: tuple[Any, ...]) -> Any:
    """The cell that a compiled method belongs to, which is its first argument."""
    return args[0] if args and isinstance(args[0], Cell) and hasattr(args[0], function.__name__) else None


def _differentiated(function: Any) -> tuple[Any, bool]:
    """Behind graph mode's `grad`: the function that is differentiated, and True."""
    if getattr(function, "__name__", "") != "after_grad":
        return function, False
    held = _held(function)
    inner = held.get("fn", held.get("fn_", function))
    if getattr(inner, "__name__", "") == "aux_fn":
        inner = _held(inner).get("fn", inner)
    return inner, True


def _held(function: Any) -> dict[str, Any]:
    """Variables that a function has of the scopes around it."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    out = {}
    for name, cell in zip(code.co_freevars if code is not None else (), closure, strict=False):
        try:
            out[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return out


def _name_of(function: Any) -> str | None:
    """Name of a compiled function in op names; None for MindSpore's own."""
    if isinstance(function, Cell):
        return type(function).__name__
    module = getattr(function, "__module__", None) or ""
    if module == "mindspore" or module.startswith("mindspore."):
        return None
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", "function"))
    return name.rpartition("<locals>.")[2].replace("<", "").replace(">", "")


def _holds_optimizer(function: Any, owner: Any) -> bool:
    """True where a compiled function is a whole training step: an optimizer is among what it can name."""
    if owner is not None and any(isinstance(child, OPTIMIZERS) for _, child in owner.cells_and_names()):
        return True
    code = getattr(function, "__code__", None)
    known = getattr(function, "__globals__", {})
    named = [known.get(name) for name in code.co_names] if code is not None else []
    return any(isinstance(value, OPTIMIZERS) for value in (*named, *_held(function).values()))
