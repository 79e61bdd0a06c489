"""msprobe-aggregate: compare each rank with a trusted run, merge the ranks, name the first culprit.

Needs no training framework; runs on a login node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aggregator.frames import compare_runs as compare_runs
    from aggregator.frames import load as load

__all__ = ["compare_runs", "load"]


def __getattr__(name: str) -> Any:
    # Late: the command's --help must not pay for pandas.
    if name in __all__:
        from aggregator import frames

        return getattr(frames, name)
    raise AttributeError(name)
