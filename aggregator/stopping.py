"""Stopping the recording of a run that is followed, after so many findings (`--probe-stop-at-divergence`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_launch.errors import ProbeError
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import write_atomically

if TYPE_CHECKING:
    from aggregator.follow import Attempt, Say

ORDERED_BY_US = "# Written by msprobe-launch --probe-stop-at-divergence."


class Stop:
    """After the N-th finding: the tensor values of N ops around the first one are kept, then recording ends.

    With task tensor they are on the disk. Otherwise the ranks are told to save them in a coming step, by its number, so
    that all ranks save the same one; it is as far away as they may take to read control.yaml.
    """

    def __init__(self, run: Path, limit: int, attempt: Attempt, say: Say) -> None:
        self._layout, self._limit, self._attempt, self._say = RunLayout(run), limit, attempt, say
        self._ops: tuple[str, ...] = ()
        self._window: tuple[int, int] | None = None
        self._kept: int | None = None
        self._state = "none"
        self._after = attempt.counts["findings"]

    def facts(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "after": self._after,
            "ops": list(self._ops),
            "state": self._state,
            "steps_ordered": None if self._window is None else list(self._window),
            "step_with_values": self._kept,
        }

    def begin(self) -> None:
        """Write the orders. Never raises for what the disk does."""
        first, config = self._attempt.first, self._config()
        self._ops = self._around(first)
        after = f"{self._after:,} findings (--probe-stop-at-divergence {self._limit})"
        if self._is_taken():
            self._state = "left alone"
            self._say(
                "stop",
                f"in-run: {after}, but {self._layout.control} has orders of its own and stays as it is; "
                "to stop recording, write there: record: off",
            )
            return
        if config.get("task") != "statistics":
            self._order("record: off")
            self._state = "stopped"
            kept = "no values (task structure)"
            if config.get("task") == "tensor":
                self._kept = first.step
                kept = f"values of all its ops in {self._attempt.layout.step(first.step)}"
            self._say("stop", f"in-run: {after}: recording stops, training goes on; {kept}")
            return
        start, last = self._coming_steps(float(config.get("control_seconds") or 1.0))
        self._window = (start, last)
        self._order(f"steps: {start}-{last}", f"tensor_list: {', '.join(self._ops)}")
        self._state = "waiting for values"
        self._say(
            "stop",
            f"in-run: {after}: recording stops, training goes on; values of {len(self._ops)} ops around the first "
            f"one are saved in step {start}, or the next that all ranks reach by {last}",
        )

    def look(self, attempts: Iterable[Attempt]) -> None:
        """Once a step with values is complete on all ranks, recording ends."""
        if self._window is None or self._state != "waiting for values":
            return
        for attempt in attempts:
            for step in attempt.layout.steps():
                if self._window[0] <= step <= self._window[1] and self._is_complete(attempt, step):
                    self._kept = step
                    self._state = "stopped"
                    self._order("record: off")
                    self._say(
                        "stop",
                        f"in-run: recording has stopped; the values of step {step} are in "
                        f"{attempt.layout.step(step)}/rank*/dump_tensor_data",
                    )
                    return

    def end(self) -> None:
        """The ranks have ended."""
        self.look((self._attempt,))
        if self._state == "waiting for values":
            self._state = "no values"
            self._say("stop", "in-run: the ranks ended before a step with values was complete on all of them")

    def _is_complete(self, attempt: Attempt, step: int) -> bool:
        there = {folder.rank: folder for folder in attempt.layout.rank_folders(step)}
        wanted = {None if rank < 0 else rank for rank in attempt.seen or self._attempt.seen}
        if None not in wanted:
            # Also those that are not as far: their first step may be still to come.
            wanted |= _recording(attempt.layout) & (attempt.ranks or frozenset(attempt.layout.roster_ranks()))
        return bool(wanted) and all(
            rank in there and there[rank].is_finished and there[rank].tensors.is_dir() for rank in wanted
        )

    def _around(self, first: Any) -> tuple[str, ...]:
        """The N ops of that rank and step around the first divergence, in call order."""
        import pyarrow.parquet as pq

        name = "rank" if first.rank is None else f"rank{first.rank}"
        path = self._attempt.output / "partitions" / f"step{first.step}" / f"{name}.parquet"
        table = pq.read_table(path, columns=["op", "parent"])
        ops = list(dict.fromkeys(table["op"].to_pylist()))
        own = ops[first.position]
        # The name of a module that holds others would take along all that runs inside it.
        holds = set(table["parent"].to_pylist()) - {own}
        ops = [op for op in ops if op not in holds]
        low = max(0, min(ops.index(own) - (self._limit - 1) // 2, len(ops) - self._limit))
        return tuple(ops[low : low + self._limit])

    def _config(self) -> Mapping[str, Any]:
        try:
            return roster.load(self._layout.manifest, roster.Manifest).config
        except ProbeError:
            return {}

    def _coming_steps(self, control_seconds: float) -> tuple[int, int]:
        """A step that no rank can have begun before it reads the orders, and the last one worth waiting for."""
        steps = self._attempt.layout.steps()
        newest = max(steps, default=0)
        times = []
        for step in steps[-16:]:
            for folder in self._attempt.layout.rank_folders(step)[:1]:
                if folder.dump.exists():
                    times.append((step, folder.dump.stat().st_mtime))
        seconds = 1.0
        if len(times) > 1 and times[-1][0] > times[0][0]:
            seconds = max(1e-4, (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0]))
        margin = math.ceil(2.0 * control_seconds / seconds) + 1
        return newest + margin, newest + 2 * margin

    def _is_taken(self) -> bool:
        try:
            return ORDERED_BY_US not in self._layout.control.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False

    def _order(self, *lines: str) -> None:
        text = "\n".join([ORDERED_BY_US, "# Without this file the job records as it was started.", *lines])
        try:
            write_atomically(self._layout.control, text + "\n")
        except OSError as error:
            self._say("note", f"in-run: {self._layout.control} cannot be written: {error.strerror}")


def _recording(layout: RunLayout) -> set[int]:
    """Ranks that record, by their marks."""
    return {rank for rank, mark in roster.marks(layout) if isinstance(mark, roster.RankMark) and mark.recording}
