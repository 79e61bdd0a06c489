"""CUDA graphs (and other devices' like them): nothing is recorded while one is captured.

Our reductions would become part of the graph and run at every replay, and bringing their results home would end the
capture with an error. A replay itself is one launch, of which Python sees nothing.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session


def install(session: Session) -> None:
    """Watch the graph classes of the devices that this torch knows."""
    for device, name in (("cuda", "CUDAGraph"), ("npu", "NPUGraph"), ("xpu", "XPUGraph")):
        kind = getattr(getattr(torch, device, None), name, None)
        if isinstance(kind, type) and hasattr(kind, "capture_begin") and hasattr(kind, "capture_end"):
            watch(kind, session)


def watch(kind: Any, session: Session) -> None:
    """Tell the session when a graph of this class is captured."""
    begin, end = kind.capture_begin, kind.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.graph_begins()
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            session.graph_ends()
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            session.graph_ends()

    kind.capture_begin, kind.capture_end = capture_begin, capture_end
