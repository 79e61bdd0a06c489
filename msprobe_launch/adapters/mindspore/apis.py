"""API calls (L1): the functions of ops, mint, mint.nn.functional and Tensor's methods, each behind a wrapper.

Only the outermost call is recorded, as msprobe does. Every wrapper is entered in the graph compilers' own map as its
original: they must not see ours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from msprobe_launch.adapters.mindspore import classify, runtime
from msprobe_launch.adapters.mindspore.backward import BackwardWatch, Inputs
from msprobe_launch.adapters.mindspore.collectives import Collective, Collectives
from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import Tensor
from msprobe_launch.adapters.mindspore.values import MindSporeValues
from msprobe_launch.capture.plain import output_items
from msprobe_launch.records.model import CallRecord
from msprobe_launch.records.names import NameTemplate

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

_frame = sys._getframe


class ApiCalls:
    """Makes wrappers, and records what comes through them."""

    def __init__(
        self,
        session: Session,
        values: MindSporeValues,
        backward: BackwardWatch,
        switch: Switch,
        collectives: Collectives,
    ) -> None:
        self._session = session
        self._values = values
        self._backward = backward
        self._switch = switch
        self._collectives = collectives
        # By identity, the code kept alive: a code object's own hash reads all its constants, 1 us a time.
        self._custom: dict[str, NameTemplate] = {}
        self._callers: dict[int, tuple[bool, CodeType]] = {}

    def install(self) -> None:
        """Replace functions and methods, everywhere under their public names."""
        for name, function, modules in list(classify.communications()):
            wrapper = self._wrapper(NameTemplate.of_api("Distributed", name), function, Collective.of(function))
            for module in modules:
                setattr(module, name, wrapper)
        for prefix, name, function, modules in list(classify.functions()):
            wrapper = self._wrapper(NameTemplate.of_api(prefix, name), function)
            # So that the wrapper is found where it says it is: else it could not be pickled.
            wrapper.__module__, wrapper.__qualname__ = modules[0].__name__, name
            for module in modules:
                setattr(module, name, wrapper)
        for name, method in list(classify.methods()):
            setattr(Tensor, name, self._wrapper(NameTemplate.of_api("Tensor", name), method))

    def _wrapper(self, template: NameTemplate, function: Any, collective: Collective | None = None) -> Any:
        switch, observe = self._switch, self.observe

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not switch.on:
                return function(*args, **kwargs)
            return observe(template, function, args, kwargs, _frame(1), collective)

        functools.update_wrapper(wrapper, function, updated=("__dict__",) if hasattr(function, "__dict__") else ())
        runtime.seen_as(wrapper, function)
        return wrapper

    def observe_custom(self, prefix: str, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call and record a function that the script has registered (`adapters.custom`)."""
        key = f"{prefix}.{name}"
        template = self._custom.get(key)
        if template is None:
            template = self._custom[key] = NameTemplate.of_api(prefix, name)
        return self.observe(template, func, args, kwargs, _frame(2))

    def observe(
        self,
        template: NameTemplate,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        collective: Collective | None = None,
    ) -> Any:
        """Call `function`, and record the call unless MindSpore's own machinery made it."""
        session, switch = self._session, self._switch
        record = inputs = None
        if runtime.is_traced():
            session.guard.miss("API call inside a traced function")
            return function(*args, **kwargs)
        if not session.observes_this_thread():
            session.guard.miss("API call in another thread")
            return function(*args, **kwargs)
        if collective is None and self._is_machinery(frame):
            switch.enter_api()
            try:
                return function(*args, **kwargs)
            finally:
                switch.leave_api()
        switch.enter_api()
        try:
            try:
                record, inputs = self._before(template, args, kwargs, frame, collective)
            except Exception as error:  # noqa: BLE001 - a guest
                session.guard.lose("API input", error)
            try:
                self._values.raise_theirs()
                result = function(*args, **kwargs)
            except BaseException:
                if record is not None:
                    self._finish(record)  # what went in is on record
                raise
            if record is None:
                return result
            try:
                self._after(record, inputs, args, kwargs, result, collective)
            except Exception as error:  # noqa: BLE001 - a guest
                session.guard.lose("API output", error)
            self._values.raise_theirs()
            return result
        finally:
            switch.leave_api()

    def _is_machinery(self, frame: FrameType) -> bool:
        code = frame.f_code
        known = self._callers.get(id(code))
        if known is None:
            known = classify.is_machinery(frame.f_globals.get("__name__") or ""), code
            self._callers[id(code)] = known
        return known[0]

    def _before(
        self,
        template: NameTemplate,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        collective: Collective | None,
    ) -> tuple[CallRecord | None, Inputs | None]:
        session = self._session
        op = session.open_call(template)
        if op is None:
            return None, None
        gate = session.gate
        gradients = runtime.builds_graph()
        record = CallRecord(op, None, None, None, None, session.parent, session.stack_of(frame))
        record.recompute = bool(session.in_backward) and gradients
        if gate.inputs and gate.forward:
            if collective is not None:
                record.inputs, record.kwargs = self._collectives.inputs(collective, args, kwargs)
            else:
                describe = self._values.describe
                record.inputs = describe.items(args)
                record.kwargs = {key: describe(value) for key, value in kwargs.items()} if kwargs else None
        inputs = self._backward.inputs().collect(args, kwargs) if gradients and gate.backward else None
        return record, inputs

    def _after(
        self,
        record: CallRecord,
        inputs: Inputs | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        collective: Collective | None,
    ) -> None:
        gate = self._session.gate
        if collective is not None:
            finish = functools.partial(self._finish, record)
            if self._collectives.outputs(collective, record, args, kwargs, result, finish):
                return  # still under way
        elif gate.outputs and gate.forward:
            record.outputs = output_items(result, self._values.describe)
        if inputs is not None:
            self._backward.watch(record.op, record.parent, inputs, result)
        self._finish(record)

    def _finish(self, record: CallRecord) -> None:
        session = self._session
        if session.gate.forward and session.recording:
            session.emit(record)
        session.close_call(record.op)
