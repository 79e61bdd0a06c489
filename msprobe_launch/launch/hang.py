"""Has no rank ended a step for too long? Then ask all where they are, and say who waits and who did not come."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_launch.launch.text import rank_list
from msprobe_launch.launch.tree import stat_of
from msprobe_launch.records.layout import RunLayout

# Ranks look for a question once a second.
ANSWER_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Where:
    """One rank's answer. `collectives` counts those it has begun in its step."""

    rank: int
    step: int | None
    collective: str
    collectives: int
    at: str
    last_op: str = ""


class HangWatch:
    """Of one attempt on one node. `look` is called now and then, with the ranks that run and their pids."""

    def __init__(self, layout: RunLayout, timeout: float) -> None:
        self._layout = layout
        self._timeout = timeout
        self._pulses: dict[int, str] = {}
        self._since = time.monotonic()
        self._asked = 0
        self._told = False

    def look(self, running: Mapping[int, int]) -> list[str]:
        """Lines to say now, mostly none. Waits some seconds for answers where it asks."""
        pulses = {rank: self._pulse(rank) for rank in running}
        if pulses != self._pulses or not any(pulse not in ("", "over") for pulse in pulses.values()):
            went_on, self._told = self._told, False
            self._pulses, self._since = pulses, time.monotonic()
            return ["the ranks go on"] if went_on else []
        if self._told or time.monotonic() - self._since < self._timeout:
            return []
        self._told = True
        answers = self._ask(running)
        folder = self._layout.hang_answer(self._asked - 1, 0).parent
        head = f"no rank of this node has ended a step for {self._timeout:g} s, stacks are in {folder}"
        return [head, *describe(answers, running)]

    def _pulse(self, rank: int) -> str:
        try:
            return self._layout.pulse(rank).read_text()
        except OSError:
            return ""

    def _ask(self, running: Iterable[int]) -> list[Where]:
        question = self._layout.hang_question(self._asked)
        with contextlib.suppress(OSError):
            question.parent.mkdir(parents=True, exist_ok=True)
            question.touch()
        paths = {rank: self._layout.hang_answer(self._asked, rank) for rank in running}
        self._asked += 1
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(path.exists() for path in paths.values()):
            time.sleep(0.1)
        return [where for path in paths.values() if (where := _read(path)) is not None]


def _read(path: Path) -> Where | None:
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        return Where(**raw)
    except (OSError, ValueError, TypeError):
        return None


def describe(answers: Sequence[Where], running: Mapping[int, int]) -> list[str]:
    """Who waits in which collective, who is elsewhere, who gave no answer."""
    waiting: dict[tuple[str, int, int | None, str], list[int]] = {}
    elsewhere: dict[tuple[int | None, str], list[int]] = {}
    for where in answers:
        if where.collective:
            key = (where.collective, where.collectives, where.step, where.at)
            waiting.setdefault(key, []).append(where.rank)
        else:
            elsewhere.setdefault((where.step, where.at), []).append(where.rank)
    lines = []
    for (name, number, step, at), ranks in waiting.items():
        lines.append(f"{rank_list(sorted(ranks))} wait in {name} (collective {number} of step {step}) at {at}")
    come = " did not come:" if waiting else ":"
    for (step, at), ranks in elsewhere.items():
        lines.append(f"{rank_list(sorted(ranks))}{come} in step {step} at {at}")
    for rank in sorted(set(running) - {where.rank for where in answers}):
        lines.append(f"rank {rank} did not answer: {_state(running[rank])}")
    if len(waiting) == 1 and not elsewhere and len(answers) == len(running):
        lines.append(
            "all ranks of this node wait in one place: another node's ranks did not come, or the network is gone"
        )
    return lines


def _state(pid: int) -> str:
    stat = stat_of(pid) if os.path.isdir("/proc/self") else None
    states = {"D": "it waits in the kernel (disk, device)", "T": "it is stopped (SIGSTOP, debugger)", "Z": "it is dead"}
    return states.get("" if stat is None else stat.state, "it holds the interpreter lock, or has not got that far")
