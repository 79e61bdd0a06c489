"""Gradients of parameters, both ways; those of one cell make one record.

As a backward has computed them on this rank (under data parallelism: before they are reduced), and as an optimizer is
given them (reduced, clipped, averaged): `<name>.applied`, where they can be others than those. In graph mode, where no
cell is seen, `<name>.value` is the parameter itself, before the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msprobe_launch.adapters.mindspore import runtime
from msprobe_launch.adapters.mindspore.naming import CellInfo, CellNames
from msprobe_launch.adapters.mindspore.runtime import Parameter, Tensor
from msprobe_launch.records.model import NO_STATISTICS, CallRecord, TensorValue, Value
from msprobe_launch.records.names import NameTemplate

if TYPE_CHECKING:
    from msprobe_launch.adapters.mindspore.quiet import Switch
    from msprobe_launch.adapters.mindspore.values import MindSporeValues
    from msprobe_launch.capture.session import Session


def _told(value: TensorValue) -> str:
    """What is recorded of a gradient, as text, where NaN is NaN. A checksum alone (xor) is text already."""
    return f"{value.statistics!r}{value.tail}{value.text if value.statistics == NO_STATISTICS else ''}"


class ParameterGradients:
    """Describes and records gradients of parameters."""

    def __init__(self, session: Session, values: MindSporeValues, names: CellNames, switch: Switch) -> None:
        self._session = session
        self._values = values
        self._names = names
        self._switch = switch
        self._local: dict[int, str] = {}  # by parameter, since the last optimizer's step

    def local(self, weights: Any, gradients: Any) -> None:
        """A backward has returned `gradients` of `weights`."""
        self._record(weights, gradients, applied=False)

    def applied(self, parameters: Any, gradients: Any) -> None:
        """An optimizer is about to apply `gradients`."""
        self._record(parameters, gradients, applied=True)
        self._local.clear()

    def _record(self, parameters: Any, gradients: Any, *, applied: bool) -> None:
        session = self._session
        if not session.takes_modules or not session.gate.backward:
            return
        try:
            self._switch.enter_quiet()
            try:
                if isinstance(parameters, Parameter):
                    parameters, gradients = (parameters,), (gradients,)
                self._by_cell(parameters, gradients, applied)
            finally:
                self._switch.leave_quiet()
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("parameter gradients", error)
        self._values.raise_theirs()

    def _by_cell(self, parameters: Any, gradients: Any, applied: bool) -> None:
        found: dict[int, tuple[NameTemplate, dict[str, Value], bool]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=False):
            if not isinstance(gradient, Tensor):
                continue
            template, name = self._named(parameter)
            if not self._session.gate.open:
                self._session.attend_to(template)
            value = self._values.describe(gradient)
            entry = found.setdefault(id(template), (template, {}, not applied))
            if not applied:
                entry[1][name] = value
                if isinstance(value, TensorValue):
                    self._local[id(parameter)] = _told(value)
                continue
            entry[1][f"{name}.applied"] = value
            if runtime.in_graph_mode():
                entry[1][f"{name}.value"] = self._values.describe(parameter)
            if self._changed(parameter, value):
                found[id(template)] = (template, entry[1], True)
        for template, named, wanted in found.values():
            if not wanted:
                continue
            op = self._session.open_call(template)
            if op is not None:
                self._session.emit(CallRecord(op, None, None, None, named, is_grad=True))

    def _changed(self, parameter: Any, value: Value) -> bool:
        """True where the applied gradient can be another value than the one that a backward gave here."""
        if self._session.identity.world_size > 1:
            return True
        if value is None:
            return False  # task structure
        return not isinstance(value, TensorValue) or self._local.get(id(parameter)) != _told(value)

    def _named(self, parameter: Any) -> tuple[NameTemplate, str]:
        owner: tuple[CellInfo, str] | None = self._names.owner(parameter)
        if owner is not None:
            return owner[0].gradients, owner[1]
        return self._names.loose(parameter)
