"""The PyTorch adapter: puts its parts together and answers the session."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from msprobe_launch.adapters.custom import CustomApis
from msprobe_launch.adapters.torch import collectives, graphs, steps
from msprobe_launch.adapters.torch.api import ApiCalls
from msprobe_launch.adapters.torch.backward import BackwardWatch
from msprobe_launch.adapters.torch.modules import ModuleCalls
from msprobe_launch.adapters.torch.quiet import Quiet
from msprobe_launch.adapters.torch.values import TorchValues
from msprobe_launch.config import Level, Task
from msprobe_launch.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

    from msprobe_launch.capture.session import Session
    from msprobe_launch.records.model import TensorValue, Value


class TorchAdapter:
    """See `adapters.base.FrameworkAdapter`."""

    framework = "pytorch"
    value_ending = ".pt"

    def __init__(self) -> None:
        self.versions = {"torch": torch.__version__}

    def install(self, session: Session) -> None:
        if session.config.level is Level.L2:
            raise ConfigError("level L2 (kernels) is MindSpore's, on Ascend. PyTorch has L0, L1, mix and debug.")
        self._session = session
        quiet = self._quiet = Quiet()
        self._values = TorchValues(session)
        self._backward = BackwardWatch(session, self._values, quiet)
        self._modules = ModuleCalls(session, self._values, self._backward, quiet)
        self._apis = ApiCalls(session, self._values, self._backward, quiet)
        self._custom = CustomApis(session, self._apis.observe)
        graphs.install(session)
        steps.install(session, self._before_optimizer, self._after_optimizer, self._apis.hidden)
        self._modules.install()
        self._apis.install()
        if session.config.level.apis:
            # Until the first module is called, a program might be one that calls none.
            self._apis.arm()

    def _before_optimizer(self, has_closure: bool) -> None:
        # An optimizer's arithmetic is not recorded: seeing its hundreds of calls would cost for nothing.
        # A closure runs the model, which is.
        if not has_closure:
            self._apis.disarm()

    def _after_optimizer(self) -> None:
        if self._session.recording or self._session.watches_calls:
            self.arm()

    def arm(self) -> None:
        if self._session.config.level.apis:
            self._apis.arm()

    def disarm(self) -> None:
        if not self._session.watches_calls:
            self._apis.disarm()

    @property
    def settles_at_once(self) -> bool:
        return self._values.settles_at_once

    def settle(self) -> list[TensorValue]:
        return self._values.settle()

    def describe(self, value: Any) -> Value:
        self._quiet.enter()
        try:
            return self._values.describe(value)
        finally:
            self._quiet.leave()

    def save_values(self) -> None:
        self._values.save_values()
        self._backward.take_values()

    def watch_gradient(self, value: Any, put: Callable[[Value], None]) -> None:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return
        session = self._session

        def seen(gradient: torch.Tensor) -> None:
            try:
                session.saving = session.config.task is Task.TENSOR
                put(self.describe(gradient))
            except Exception as error:  # noqa: BLE001 - a guest
                session.guard.lose("saved gradient", error)

        # A tensor's hook that returns nothing leaves the gradient as it is.
        value.register_hook(seen)

    def register_api(self, owner: Any, name: str, prefix: str) -> None:
        self._custom.register(owner, name, prefix)

    def restore_apis(self) -> None:
        self._custom.restore()

    def name_models(self, models: Sequence[Any]) -> None:
        self._modules.name_models(models)

    def close_open_calls(self) -> None:
        self._backward.close()
        self._modules.close()

    def close_step(self) -> None:
        self._apis.close()

    def forget_values(self) -> None:
        self._values.forget()

    def waits_in(self, frame: FrameType | None, begun: Sequence[str]) -> str:
        return collectives.waited_for(frame)

    def leave_child(self) -> None:
        self._apis.disarm()


def known_rank() -> tuple[int, int] | None:
    """See `msprobe_launch.adapters.known_rank`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def seed(number: int, deterministic: bool) -> None:
    """See `msprobe_launch.adapters.seed`. Seeds all devices that torch knows."""
    random.seed(number)
    os.environ["PYTHONHASHSEED"] = str(number)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(number)
    torch.manual_seed(number)
    if deterministic:
        # cuBLAS and Ascend's collectives read these when they are first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def create_adapter() -> TorchAdapter:
    """Entry point named in `msprobe_launch.adapters.ADAPTERS`."""
    return TorchAdapter()
