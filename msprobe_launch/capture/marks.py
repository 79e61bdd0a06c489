"""The rank's mark in the roster: what it has recorded so far, for the launcher and the aggregator."""

from __future__ import annotations

import time
from datetime import datetime

from msprobe_launch.capture.budget import Budget
from msprobe_launch.capture.guard import Guard
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.capture.writer import Writer
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout

INTERVAL = 1.0  # seconds between updates at the ends of steps; a tiny step must not pay a rename each time


class Marks:
    """Writes `roster/rank<R>.json` anew each time. Never raises: a mark that cannot be written is counted."""

    def __init__(
        self, layout: RunLayout, identity: RankIdentity, framework: str, writer: Writer, guard: Guard, budget: Budget
    ) -> None:
        self.note = ""
        self._layout = layout
        self._identity = identity
        self._framework = framework
        self._writer = writer
        self._guard = guard
        self._budget = budget
        self._steps: list[int] = []
        self._partial: list[int] = []
        self._started = datetime.now().astimezone().isoformat(timespec="seconds")
        self._due_at = 0.0

    def step_ended(self, step: int, *, complete: bool) -> None:
        """A step has files. One that has been named before keeps what was said of it."""
        if step not in self._steps and step not in self._partial:
            (self._steps if complete else self._partial).append(step)

    def due(self) -> bool:
        """True where the last update at the end of a step is longer ago than INTERVAL; begins the next interval."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + INTERVAL
        return True

    def save(self, *, finished: bool = False, note: str = "", recording: bool = True) -> None:
        """Write the mark. `note` stands in for the one that is kept, this once."""
        identity = self._identity
        writer = self._writer
        mark = roster.RankMark(
            rank=identity.rank,
            attached=True,
            host=identity.host,
            pid=identity.pid,
            local_rank=identity.local_rank,
            world_size=identity.world_size,
            attempt=identity.attempt,
            framework=self._framework,
            recording=recording,
            started=self._started,
            steps=tuple(self._steps),
            partial_steps=tuple(self._partial),
            calls=writer.calls,
            lost=dict(self._guard.lost),
            unseen=dict(self._guard.unseen),
            finished=finished,
            note=note or self.note,
            bytes=writer.bytes + self._budget.values,
            forecast=self._budget.forecast,
            last_op=writer.last_op,
        )
        try:
            path = self._layout.roster_mark(identity.rank)
            if not identity.is_known:
                path = path.with_name(f"proc{identity.pid}.json")
            roster.save(path, mark)
        except OSError as error:
            self._guard.lose("roster", error, 0)
