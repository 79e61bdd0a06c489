"""A toy framework and its adapter: the protocol of `adapters.base`, whole and small.

The framework has arrays (lists of floats), layers that call functions, and an optimizer; it has no gradients. The
adapter shows the order of calls that the engine expects. It is used by the engine's own tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msprobe_launch.capture.plain import PlainDescriber
from msprobe_launch.records.codec import tensor_head
from msprobe_launch.records.model import CallRecord, TensorValue, Value
from msprobe_launch.records.names import NameTemplate

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session


class Array(list[float]):
    """The toy's tensor."""


class Toy:
    """The toy framework. `on_call` and `on_layer` are the places where an adapter hooks itself in."""

    def __init__(self) -> None:
        self.on_call: Callable[..., Any] = lambda _name, function, args: function(*args)
        self.on_layer: Callable[..., Any] = lambda _name, forward, args, _training: forward(*args)
        self.on_step: Callable[[], None] = lambda: None

    def scale(self, array: Array, factor: float) -> Array:
        """An API of the framework."""
        scaled: Array = self.on_call("scale", lambda a, f: Array(x * f for x in a), (array, factor))
        return scaled

    def layer(self, name: str, forward: Callable[..., Any], *args: Any, training: bool = True) -> Any:
        """Call a layer; layers may call layers."""
        return self.on_layer(name, forward, args, training)

    def optimizer_step(self) -> None:
        """The optimizer has updated the parameters."""
        self.on_step()


class FakeAdapter:
    """See `adapters.base.FrameworkAdapter`."""

    framework = "toy"

    def __init__(self, toy: Toy) -> None:
        self.versions = {"toy": "1"}
        self.armed = False
        self._toy = toy
        self._fresh: list[TensorValue] = []
        self.describe = PlainDescriber(lambda _: None)
        self.describe.by_type[Array] = self._array

    def install(self, session: Session) -> None:
        self._session = session
        session.optimizer_made("optimizer")
        self._toy.on_call = self._call
        self._toy.on_layer = self._layer
        self._toy.on_step = lambda: session.optimizer_stepped("optimizer")

    def _array(self, array: Array) -> TensorValue:
        value = TensorValue(tensor_head("toy.Array", "float", [len(array)]))
        if array:
            value.statistics = (max(array), min(array), sum(array) / len(array), math.hypot(*array))
        self._fresh.append(value)
        return value

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        session = self._session
        op = session.open_call(NameTemplate.of_api("Toy", name)) if session.recording else None
        inputs: list[Value] = self.describe.items(args) if op is not None else []
        result = function(*args)
        if op is not None:
            session.emit(CallRecord(op, inputs, None, [self.describe(result)], None, session.parent))
            session.close_call(op)
        return result

    def _layer(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], training: bool) -> Any:
        session = self._session
        if not session.modules:
            if not session.listening:
                return forward(*args)
            recorded = session.outermost_forward(training)
            try:
                return self._record(name, forward, args) if recorded else forward(*args)
            finally:
                session.forward_done()
        return self._record(name, forward, args)

    def _record(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        session = self._session
        op = session.open_call(NameTemplate.of_module("Module", name, "Layer"))
        parent, inputs = session.parent, self.describe.items(args)
        call = session.enter_module(op)
        try:
            result = forward(*args)
        finally:
            session.leave_module(call)
        if op is not None and session.recording:
            session.emit(CallRecord(op, inputs, None, [self.describe(result)], None, parent))
            session.close_call(op)
        return result

    def arm(self) -> None:
        self.armed = True

    def disarm(self) -> None:
        self.armed = False

    def settle(self) -> list[TensorValue]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def close_open_calls(self) -> None:
        """No gradients: nothing waits."""

    def close_step(self) -> None:
        """No work in flight either."""

    def forget_values(self) -> None:
        """Arrays are measured each time."""

    def leave_child(self) -> None:
        self._toy.on_call = lambda _name, function, args: function(*args)
