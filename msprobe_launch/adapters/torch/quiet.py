"""While we look at tensors nothing of the user's program may notice: no gradients, no modes, no subclass code."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunction, _set_grad_enabled
from torch.utils._python_dispatch import _disable_current_modes


class Quiet:
    """`enter` and `leave` bracket our own torch calls; they nest.

    Two methods instead of a context manager: this runs twice per recorded call (0.6 us against 1.4 us).
    """

    def __init__(self) -> None:
        self._entered: list[tuple[bool, Any, Any]] = []

    def enter(self) -> None:
        """Switch gradients, torch functions and dispatch modes off for this thread."""
        off = DisableTorchFunction()
        off.__enter__()
        modes = None
        if torch._C._len_torch_dispatch_stack():
            # A mode of the user's own (a FLOP counter) must not count our reductions.
            modes = _disable_current_modes()
            modes.__enter__()
        self._entered.append((torch.is_grad_enabled(), off, modes))
        _set_grad_enabled(False)

    @property
    def gradients(self) -> bool:
        """Whether gradients were on when we were entered."""
        return self._entered[-1][0]

    def leave(self) -> None:
        """Back to what was."""
        grad, off, modes = self._entered.pop()
        _set_grad_enabled(grad)
        if modes is not None:
            modes.__exit__(None, None, None)
        off.__exit__(None, None, None)


_FAKE = torch._C._TorchDispatchModeKey.FAKE
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL
_get_mode = torch._C._get_dispatch_mode
_tracing_state = torch._C._get_tracing_state


def is_traced() -> bool:
    """True where calls build a graph instead of computing: tracing, export, fake tensors.

    Our reductions would become part of that graph, and there are no numbers to record.
    """
    if _tracing_state() is not None:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return _get_mode(_FAKE) is not None or _get_mode(_PROXY) is not None or _get_mode(_FUNCTIONAL) is not None
