"""msprobe-launch: record what every rank of a distributed training computes, without an edit."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would cost the first milliseconds of every rank
if TYPE_CHECKING:
    from typing import Any

    from msprobe_launch.debugger import PrecisionDebugger, seed_all

__version__ = "0.1.0"
__all__ = ["PrecisionDebugger", "__version__", "seed_all"]


def __getattr__(name: str) -> Any:
    """What scripts import, loaded when they do: the commands and the ranks never need it."""
    if name in ("PrecisionDebugger", "seed_all"):
        from msprobe_launch import debugger

        return getattr(debugger, name)
    raise AttributeError(f"module 'msprobe_launch' has no attribute '{name}'")
