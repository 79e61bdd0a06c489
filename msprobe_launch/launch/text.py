"""How ranks, signals and sizes are written in our lines."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 5` or `ranks 0-2, 7`, of ascending numbers."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers as `0-2, 7`."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)


def size(number: float) -> str:
    """Bytes as `3.2 GB`; decimal units, as `ls -h --si` and disk quotas have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
