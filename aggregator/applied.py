"""Gradients that one run changed before its optimizer took them (scaled, clipped, reduced) and the other did not.

A rank records a gradient as applied (`<parameter>.applied`) where it can be another than the accumulated one, so a side
without that record applied what it had accumulated. What changed is told within one run, where no noise is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aggregator import divergence, read
from aggregator.items import ROLES
from msprobe_launch.records.names import Role

if TYPE_CHECKING:
    import pyarrow as pa

    from aggregator.read import RankDump

_GRADIENT = ROLES.index(Role.PARAMETERS_GRAD)
_NAME = re.compile(r"^(?P<module>.*)\.parameters_grad\.(?P<call>\d+)\.(?P<parameter>.*?)(?P<applied>\.applied)?$")


@dataclass(slots=True)
class _Gradient:
    """Rows of one parameter's last gradient: as accumulated and as applied, -1 for none."""

    accumulated: int = -1
    applied: int = -1


def changed_on_one_side(target: RankDump, bench: RankDump) -> dict[int, str]:
    """Row of the target -> what to say of it. Nothing where two recorders made the dumps: msprobe has none of this."""
    if not read.one_recorder(target, bench):
        return {}
    own, other = _gradients(target.items), _gradients(bench.items)
    found: dict[int, str] = {}
    for key, mine in own.items():
        theirs = other.get(key)
        if theirs is None or mine.accumulated < 0 or theirs.accumulated < 0:
            continue
        if mine.applied >= 0 > theirs.applied:
            if said := _change(target.items, mine):
                found[mine.applied] = f"changed before the optimizer took it ({said}), and not so in the bench"
        elif theirs.applied >= 0 > mine.applied and (said := _change(bench.items, theirs)):
            found[mine.accumulated] = (
                f"the bench changed it before its optimizer took it ({said}), and this run did not"
            )
    return found


def _gradients(items: pa.Table) -> dict[tuple[str, str], _Gradient]:
    """By module and parameter."""
    found: dict[tuple[str, str], _Gradient] = {}
    for row in np.flatnonzero(items["role"].to_numpy() == _GRADIENT).tolist():
        match = _NAME.match(items["name"][row].as_py())
        if match is None:
            continue
        gradient = found.setdefault((match["module"], match["parameter"]), _Gradient())
        # Rows are in call order, so that the last one stays.
        if match["applied"]:
            gradient.applied = row
        else:
            gradient.accumulated = row
    return found


def _change(items: pa.Table, gradient: _Gradient) -> str:
    """Both norms where the gradient was changed by more than rounding, '' where it was not."""
    allowed = divergence.tolerance_of(items["dtype"][gradient.applied].as_py()) or 0.0
    before, after = (
        [items[name][row].as_py() for name in ("max", "min", "norm")]
        for row in (gradient.accumulated, gradient.applied)
    )
    for a, b in zip(before, after, strict=True):
        if a is None or b is None or not np.isfinite([a, b]).all():
            continue
        if abs(a - b) > allowed * max(abs(a), abs(b)):
            return f"norm {before[2]:.7g} to {after[2]:.7g}" if None not in (before[2], after[2]) else f"{a} to {b}"
    return ""
