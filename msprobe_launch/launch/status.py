"""One live line per node while ranks record: on a terminal the last row, else a plain line now and then.

On a terminal the scrolling region is one row shorter for the time of the launch, as apt does it, so that the script's
lines and progress bars stay whole: they never meet our row.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from msprobe_launch.errors import UnreadableInput
from msprobe_launch.launch.text import size
from msprobe_launch.logs import get_logger
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, load

TERMINAL_SECONDS = 1.0
PLAIN_SECONDS = 60.0


class StatusLine:
    """Of one attempt on one node. `period` None stands for the default of the place, 0 for no line at all."""

    def __init__(self, layout: RunLayout, period: float | None) -> None:
        self._layout = layout
        self._terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        default = TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS
        self._period = default if period is None else period
        self._marks: dict[int, tuple[float, RankMark]] = {}
        self._next = time.monotonic() + self._period
        self._before = (time.monotonic(), 0)
        self._rows = 0

    def look(self, ranks: Iterable[int]) -> None:
        """Say how far the ranks are, where it is time to."""
        now = time.monotonic()
        if not self._period or now < self._next:
            return
        self._next = now + self._period
        text = self.text(ranks, now)
        if text and self._terminal:
            self._draw(text)
        elif text:
            get_logger().info(text)

    def text(self, ranks: Iterable[int], now: float) -> str:
        """The line, or an empty text while no rank has left a mark."""
        wanted = list(ranks)
        marks = [mark for rank in wanted if (mark := self._mark(rank)) is not None]
        recording = [mark for mark in marks if mark.attached and mark.recording]
        if not marks:
            return ""
        calls = sum(mark.calls for mark in recording)
        then, before = self._before
        self._before = (now, calls)
        rate = max(0, calls - before) / max(now - then, 1e-3)
        steps = [max((*mark.steps, *mark.partial_steps), default=None) for mark in recording]
        known = sorted({step for step in steps if step is not None})
        step = "no step yet" if not known else f"step {known[0]}" + (f"-{known[-1]}" if len(known) > 1 else "")
        lost = sum(count for mark in recording for count in mark.lost.values())
        written = size(sum(mark.bytes for mark in recording))
        return (
            f"{step}, {len(recording)} of {len(wanted)} ranks record, {rate:,.0f} calls/s,"
            f" {written} written, {f'{lost:,} calls lost' if lost else 'nothing lost'}"
        )

    def _mark(self, rank: int) -> RankMark | None:
        """The rank's mark, read again only where the file has changed."""
        path: Path = self._layout.roster_mark(rank)
        try:
            changed = path.stat().st_mtime
            known = self._marks.get(rank)
            if known is None or known[0] != changed:
                self._marks[rank] = known = (changed, load(path, RankMark))
            return known[1]
        except (OSError, UnreadableInput):
            return None

    # -- on a terminal

    def _draw(self, text: str) -> None:
        columns, rows = shutil.get_terminal_size()
        out = ""
        if rows != self._rows:
            # A line feed makes room below; then the region that scrolls ends above the last row.
            out += f"\n\x1b7\x1b[0;{rows - 1}r\x1b8\x1b[1A"
            self._rows = rows
        out += f"\x1b7\x1b[{rows};0f\x1b[2K[msprobe] {text}"[: columns + 16] + "\x1b8"
        self._write(out)

    def close(self) -> None:
        """Give the last row back."""
        if self._rows:
            self._write(f"\x1b7\x1b[0;{self._rows}r\x1b[{self._rows};0f\x1b[2K\x1b8")
            self._rows = 0

    @staticmethod
    def _write(text: str) -> None:
        # One write: what the ranks write at the same time comes before or after it, not in between.
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), text.encode())
