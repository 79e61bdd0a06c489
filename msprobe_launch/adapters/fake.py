"""A toy framework and its adapter: the protocol of `adapters.base`, whole and small.

The framework has arrays (lists of floats), layers that call functions, and an optimizer; it has no gradients. The
adapter shows the order of calls that the engine expects. It is used by the engine's own tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msprobe_launch.capture.plain import PlainDescriber
from msprobe_launch.records.codec import tensor_head
from msprobe_launch.records.model import CallRecord, Statistics, TensorValue, Value
from msprobe_launch.records.names import NameTemplate

if TYPE_CHECKING:
    from types import FrameType

    from msprobe_launch.capture.session import Session


class Array(list[float]):
    """The toy's tensor."""


class DeviceArray(Array):
    """An array whose numbers lie on a device: reading results there waits for it, and `transfers` counts that."""

    transfers: ClassVar[int] = 0

    @classmethod
    def bring_home(cls, results: list[Any]) -> list[Any]:
        """Results of any number of computations on the device, in one transfer."""
        cls.transfers += 1
        return results


class Toy:
    """The toy framework. `on_call` and `on_layer` are the places where an adapter hooks itself in."""

    def __init__(self) -> None:
        self.on_call: Callable[..., Any] = lambda _name, function, args: function(*args)
        self.on_layer: Callable[..., Any] = lambda _name, forward, args, _training: forward(*args)
        self.on_step: Callable[[], None] = lambda: None

    def scale(self, array: Array, factor: float) -> Array:
        """An API of the framework."""
        scaled: Array = self.on_call("scale", lambda a, f: type(a)(x * f for x in a), (array, factor))
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
    value_ending = ".json"

    def __init__(self, toy: Toy) -> None:
        self.versions = {"toy": "1"}
        self.armed = False
        self._replaced: list[tuple[Any, str, Any]] = []
        self._toy = toy
        self._fresh: list[TensorValue] = []
        self._on_device: list[tuple[TensorValue, Statistics]] = []
        self.describe = PlainDescriber(lambda _: None)
        self.describe.by_type[Array] = self._array
        self.describe.by_type[DeviceArray] = self._array

    def install(self, session: Session) -> None:
        self._session = session
        session.optimizer_made("optimizer")
        self._toy.on_call = self._call
        self._toy.on_layer = self._layer
        self._toy.on_step = lambda: session.optimizer_stepped("optimizer")

    def _array(self, array: Array) -> TensorValue:
        value = TensorValue(tensor_head("toy.Array", "float", [len(array)]))
        if array:
            # Reduced at once: the array may change a moment later. A device's results come home at the flush.
            statistics = (max(array), min(array), sum(array) / len(array), math.hypot(*array))
            if isinstance(array, DeviceArray):
                self._on_device.append((value, statistics))
            else:
                value.statistics = statistics
        if self._session.saving:
            self._save(value, array)
        self._fresh.append(value)
        return value

    def save_values(self) -> None:
        """They always may."""

    def _save(self, value: TensorValue, array: Array) -> None:
        try:
            path = self._session.value_file(8 * len(array))
            if path is not None:
                Path(path).write_text(json.dumps(array))
                value.saved = path
        except OSError as error:
            self._session.value_lost(error)

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], prefix: str = "Toy") -> Any:
        session = self._session
        op = session.open_call(NameTemplate.of_api(prefix, name)) if session.recording else None
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

    @property
    def settles_at_once(self) -> bool:
        return True

    def settle(self) -> list[TensorValue]:
        waiting, self._on_device = self._on_device, []
        if waiting:
            home = DeviceArray.bring_home([statistics for _, statistics in waiting])
            for (value, _), statistics in zip(waiting, home, strict=True):
                value.statistics = statistics
        fresh, self._fresh = self._fresh, []
        return fresh

    def watch_gradient(self, value: Any, put: Callable[[Value], None]) -> None:
        """No gradients."""

    def register_api(self, owner: Any, name: str, prefix: str) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))
        setattr(owner, name, lambda *args: self._call(name, original, args, prefix))

    def restore_apis(self) -> None:
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        self._replaced.clear()

    def name_models(self, models: Sequence[Any]) -> None:
        """Layers are given their names by the program."""

    def close_open_calls(self) -> None:
        """No gradients: nothing waits."""

    def close_step(self) -> None:
        """No work in flight either."""

    def forget_values(self) -> None:
        """Arrays are measured each time."""

    def waits_in(self, frame: FrameType | None, begun: Sequence[str]) -> str:
        """The toy has no collectives."""
        return ""

    def leave_child(self) -> None:
        self._toy.on_call = lambda _name, function, args: function(*args)
