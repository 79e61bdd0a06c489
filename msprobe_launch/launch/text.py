"""How ranks, signals and sizes are written in our lines, and how a page of them is shown."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence

from msprobe_launch.records.numbers import spans


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 5` or `ranks 0-2, 7`, of ascending numbers."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def size(number: float) -> str:
    """Bytes as `3.2 GB`; decimal units, as `ls -h --si` and disk quotas have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def wrapped(text: str, columns: int, head: str) -> list[str]:
    """`head` and `text`, folded at blanks; what follows the first line stands under the text. No word is cut."""
    return textwrap.wrap(
        text,
        max(columns, len(head) + 20),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def show(lines: Iterable[str]) -> None:
    """Print to stdout, whatever it can encode, line by line; a reader who goes early (`| head`) is no error."""
    try:
        for line in lines:
            encoding = sys.stdout.encoding or "utf-8"
            # A path may hold bytes that are no text, and the terminal may be ASCII.
            text = line.encode(encoding, "backslashreplace").decode(encoding)
            print(text, flush=True)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
