"""The MindSpore adapter: puts its parts together and answers the session."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mindspore import __version__, set_deterministic, set_seed
from mindspore.communication import GlobalComm, get_group_size, get_rank

from msprobe_launch.adapters.custom import CustomApis
from msprobe_launch.adapters.mindspore import apis, collectives
from msprobe_launch.adapters.mindspore.apis import ApiCalls
from msprobe_launch.adapters.mindspore.backward import BackwardWatch
from msprobe_launch.adapters.mindspore.cells import CellCalls
from msprobe_launch.adapters.mindspore.collectives import Collectives
from msprobe_launch.adapters.mindspore.gradients import ParameterGradients
from msprobe_launch.adapters.mindspore.jit import JitCalls
from msprobe_launch.adapters.mindspore.kernels import KernelDumps
from msprobe_launch.adapters.mindspore.naming import CellNames
from msprobe_launch.adapters.mindspore.primitives import PrimitiveCalls
from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import InOrder, Tensor
from msprobe_launch.adapters.mindspore.steps import Scope, Steps
from msprobe_launch.adapters.mindspore.values import MindSporeValues
from msprobe_launch.config import Level, Task

if TYPE_CHECKING:
    from types import FrameType

    from msprobe_launch.capture.session import Session
    from msprobe_launch.records.model import TensorValue, Value


class MindSporeAdapter:
    """See `adapters.base.FrameworkAdapter`."""

    framework = "mindspore"
    value_ending = ".npy"

    def __init__(self) -> None:
        self.versions = {"mindspore": __version__}

    def install(self, session: Session) -> None:
        self._session = session
        self._kernels = KernelDumps(session) if session.config.level is Level.L2 else None
        switch = self._switch = Switch()
        self._in_order = InOrder()
        scope = Scope()
        names = CellNames()
        self._values = MindSporeValues(session, switch)
        self._backward = BackwardWatch(session, self._values, switch)
        gradients = ParameterGradients(session, self._values, names, switch)
        self._cells = CellCalls(session, self._values, self._backward, names, switch, scope)
        self._collectives = Collectives(session, self._values)
        apis = ApiCalls(session, self._values, self._backward, switch, self._collectives)
        self._custom = CustomApis(session, apis.observe_custom)
        names.install()
        JitCalls(session, self._values, self._backward, switch, scope).install()
        self._apis, self._primitives = apis, PrimitiveCalls(apis, switch, scope)
        self._wrapped = False
        if session.config.level.apis:
            self._wrap_apis()
        Steps(session, switch, scope, gradients.local, gradients.applied).install()
        self._cells.install()

    def _wrap_apis(self) -> None:
        if not self._wrapped:
            self._wrapped = True
            self._collectives.install()
            self._apis.install()
            self._primitives.install()

    def arm(self) -> None:
        if self._session.config.level.apis:
            self._wrap_apis()  # a level that control.yaml has raised
        self._switch.arm(self._session.config.level.apis)
        self._in_order.enter()
        if self._kernels is not None:
            self._kernels.begin()

    def disarm(self) -> None:
        self._switch.arm(False)
        self._in_order.leave()

    @property
    def settles_at_once(self) -> bool:
        return self._values.settles_at_once

    def settle(self) -> list[TensorValue]:
        return self._values.settle()

    def describe(self, value: Any) -> Value:
        self._switch.enter_quiet()
        try:
            described = self._values.describe(value)
        finally:
            self._switch.leave_quiet()
        self._values.raise_theirs()
        return described

    def save_values(self) -> None:
        self._values.save_values()

    def watch_gradient(self, value: Any, put: Callable[[Value], None]) -> None:
        node = value._grad_node if isinstance(value, Tensor) else None
        if node is None:
            return
        session, values, number = self._session, self._values, value._output_index

        def seen(_: Any, incoming: Any) -> None:
            try:
                session.saving = session.config.task is Task.TENSOR
                put(values.describe(incoming[number]))
            except Exception as error:  # noqa: BLE001 - a guest
                session.guard.lose("saved gradient", error)
            values.raise_theirs()

        node.register_hook(seen)

    def register_api(self, owner: Any, name: str, prefix: str) -> None:
        self._custom.register(owner, name, prefix)

    def restore_apis(self) -> None:
        self._custom.restore()

    def name_models(self, models: Sequence[Any]) -> None:
        self._cells.name_models(models)

    def close_open_calls(self) -> None:
        self._backward.close()

    def close_step(self) -> None:
        self._collectives.close()
        if self._kernels is not None:
            self._kernels.end()

    def forget_values(self) -> None:
        """Nothing is remembered about tensors."""

    def waits_in(self, frame: FrameType | None, begun: Sequence[str]) -> str:
        # They have no file of their own. A rank waits in the call, which stands below our observer's frame with what it
        # observes, or, as MindSpore may run ahead, where the result is first looked at.
        while frame is not None:
            of = frame.f_code.co_filename
            if of == collectives.__file__ or (of == apis.__file__ and frame.f_locals.get("collective") is not None):
                return begun[0] if len(begun) == 1 else "a collective"
            frame = frame.f_back
        return ""

    def leave_child(self) -> None:
        self._switch.arm(False)


def known_rank() -> tuple[int, int] | None:
    """See `msprobe_launch.adapters.known_rank`. Before `init` MindSpore would answer from stale variables."""
    if GlobalComm.INITED:
        return int(get_rank()), int(get_group_size())
    return None


def seed(number: int, deterministic: bool) -> None:
    """See `msprobe_launch.adapters.seed`."""
    import numpy as np

    random.seed(number)
    os.environ["PYTHONHASHSEED"] = str(number)
    np.random.seed(number)
    set_seed(number)
    if deterministic:
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        set_deterministic(True)


def create_adapter() -> MindSporeAdapter:
    """Entry point named in `msprobe_launch.adapters.ADAPTERS`."""
    return MindSporeAdapter()
