"""The PyTorch adapter: puts its parts together and answers the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from msprobe_launch.adapters.torch import steps
from msprobe_launch.adapters.torch.api import ApiCalls
from msprobe_launch.adapters.torch.backward import BackwardWatch
from msprobe_launch.adapters.torch.modules import ModuleCalls
from msprobe_launch.adapters.torch.quiet import Quiet
from msprobe_launch.adapters.torch.values import TorchValues

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session
    from msprobe_launch.records.model import TensorValue


class TorchAdapter:
    """See `adapters.base.FrameworkAdapter`."""

    framework = "pytorch"

    def __init__(self) -> None:
        self.versions = {"torch": torch.__version__}

    def install(self, session: Session) -> None:
        self._session = session
        quiet = Quiet()
        self._values = TorchValues(session.config.task)
        self._backward = BackwardWatch(session, self._values, quiet)
        self._modules = ModuleCalls(session, self._values, self._backward, quiet)
        self._apis = ApiCalls(session, self._values, self._backward, quiet)
        steps.install(session, self._before_optimizer, self._after_optimizer)
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

    def settle(self) -> list[TensorValue]:
        return self._values.settle()

    def close_open_calls(self) -> None:
        self._backward.close()
        self._modules.close()

    def close_step(self) -> None:
        self._apis.close()

    def forget_values(self) -> None:
        self._values.forget()

    def leave_child(self) -> None:
        self._apis.disarm()


def create_adapter() -> TorchAdapter:
    """Entry point named in `msprobe_launch.adapters.ADAPTERS`."""
    return TorchAdapter()
