"""Accounts for every rank of this node: who recorded, who did not and why, how each ended, who failed first."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from msprobe_launch.config import NumberSet
from msprobe_launch.errors import UnreadableInput
from msprobe_launch.launch.base import LaunchPlan, RunOutcome, Worker
from msprobe_launch.launch.text import rank_list, signal_name, spans
from msprobe_launch.logs import get_logger
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, load, save

# What a rank says when another one is gone. Such a rank is a victim where any other reason is at hand.
_PEER_IS_GONE = re.compile(
    r"connection (closed|reset|refused|was (closed|aborted))|broken pipe|timed? ?out|recvvalue failed|sendbytes failed"
    r"|remote process exited|peer (closed|failure)|store has been destroyed",
    re.IGNORECASE,
)

_PYTHON = re.compile(r"python[\d.]*$")
_ISOLATING = re.compile(r"-[A-Za-z]*[IES]")

NO_MARK = (
    "no mark: injection did not reach it. Likely python -I, -E or -S, a wrapper that clears the environment, "
    "or one in Python that starts another Python. Start the script's interpreter itself, or through a shell"
)


# -- completing the marks


def complete(outcome: RunOutcome, plan: LaunchPlan) -> tuple[RankMark, ...]:
    """Add to each worker's mark how it ended; write one for a worker that left none. Marks of the last attempt.

    The ranks are dead by now, so the marks have one writer. A roster that cannot be written is a warning.
    """
    if outcome.run_dir is None:
        return ()
    last = []
    for worker in outcome.workers:
        path = RunLayout(outcome.run_dir, worker.attempt).roster_mark(worker.rank)
        mark = _completed(path, worker, plan)
        try:
            save(path, mark)
        except OSError as error:
            get_logger().warning("%s cannot be written: %s", path, error)
        if worker.attempt == outcome.attempt:
            last.append(mark)
    return tuple(sorted(last, key=lambda mark: mark.rank))


def _completed(path: Path, worker: Worker, plan: LaunchPlan) -> RankMark:
    try:
        mark = load(path, RankMark)
    except UnreadableInput as error:
        mark = RankMark(
            rank=worker.rank,
            attached=False,
            host=socket.gethostname(),
            pid=worker.pid,
            local_rank=worker.local_rank,
            world_size=worker.world_size,
            attempt=worker.attempt,
            recording=False,
            note=f"its mark cannot be read: {error.what}" if path.exists() else _why_unreached(worker, plan),
        )
    return dataclasses.replace(
        mark,
        exit_code=worker.exit_code,
        ended=_ended(worker),
        # A script may show an exception through sys.excepthook and go on; only one that ended the rank is its end.
        exception="" if worker.exit_code == 0 else mark.exception,
    )


def _why_unreached(worker: Worker, plan: LaunchPlan) -> str:
    for at, token in enumerate(plan.target):
        if not _PYTHON.match(token.rpartition("/")[2]):
            continue
        for flag in plan.target[at + 1 :]:
            if not flag.startswith("-") or flag.startswith(("--", "-c", "-m")):
                break
            if _ISOLATING.match(flag):
                return f"no mark: {token} {flag} ignores PYTHONPATH, which brings the probe. Leave {flag} out"
    if worker.exit_code is not None and worker.exit_code < 0:
        return f"no mark: {_ended(worker)} before it imported a framework"
    return NO_MARK


def _ended(worker: Worker) -> str:
    """How a process ended, in words."""
    if worker.stopped:
        return "stopped by launcher"
    if worker.exit_code is None:
        return "unknown"
    if worker.exit_code == 0:
        return "finished"
    if worker.exit_code < 0:
        return f"killed by {signal_name(-worker.exit_code)}"
    return f"exited {worker.exit_code}"


# -- who failed first


def culprit(outcome: RunOutcome, marks: Iterable[RankMark]) -> Worker | None:
    """The worker of the last attempt that failed by itself and first, or None.

    Of several, one killed by a signal comes first (it has had no time to be a victim), then one with an exception of
    its own, the earliest first, then those that miss a peer.
    """
    by_rank = {mark.rank: mark for mark in marks}

    def order(worker: Worker) -> tuple[bool, bool, str, int]:
        mark = by_rank.get(worker.rank)
        lines = mark.exception.splitlines() if mark is not None else []
        missing_peer = bool(lines) and _PEER_IS_GONE.search(lines[0]) is not None
        killed = worker.exit_code is not None and worker.exit_code < 0
        return missing_peer, not killed, _time_of(lines), worker.rank

    failed = [worker for worker in outcome.last if worker.exit_code and not worker.stopped]
    return min(failed, key=order, default=None)


def _time_of(lines: Sequence[str]) -> str:
    """The time in an exception's text (`bootstrap.exceptions`), which sorts as text within one host; else last."""
    return next((line for line in lines[1:3] if line[:1].isdigit()), "~")


# -- what is said at the end


def recorded_lines(outcome: RunOutcome, marks: Sequence[RankMark], asked: NumberSet) -> list[str]:
    """`recorded by 7 of 8 ranks, steps 0-4, 12,345 calls -> RUN_DIR`, then who is missing and why."""
    expected = [mark for mark in marks if mark.rank in asked]
    recorded = [mark for mark in expected if mark.attached and mark.recording]
    missing = [mark for mark in expected if not (mark.attached and mark.recording)]
    calls = sum(mark.calls for mark in recorded)
    lines = []
    if calls:
        steps = sorted({step for mark in recorded for step in mark.steps})
        which = f"steps {spans(steps)}" if steps else "no complete step"
        selected = f" (ranks {asked} asked for)" if asked.ranges else ""
        lines.append(
            f"recorded by {len(recorded)} of {len(expected)} ranks{selected}, {which}, {calls:,} calls"
            f" -> {RunLayout(outcome.run_dir or Path(), outcome.attempt).base}"
        )
    elif recorded:
        lines.append(
            f"ERROR: nothing was recorded: {len(recorded)} of {len(expected)} ranks attached,"
            " but no call came in the steps and scope asked for"
        )
    elif expected:
        lines.append(f"ERROR: nothing was recorded: {len(expected)} of {len(expected)} ranks are missing")
    elif marks:
        lines.append(f"ERROR: nothing was recorded: no rank of {spans(m.rank for m in marks)} is in {asked}")
    else:
        lines.append("ERROR: nothing was recorded: no worker was started")
    reasons: dict[str, list[int]] = {}
    for mark in missing:
        reasons.setdefault(mark.note or mark.ended, []).append(mark.rank)
    lines += [f"missing: {rank_list(sorted(ranks))}: {reason}" for reason, ranks in reasons.items()]
    lost: dict[str, int] = {}
    for mark in recorded:
        for reason, count in mark.lost.items():
            lost[reason] = lost.get(reason, 0) + count
    lines += [f"lost: {count:,} calls: {reason}" for reason, count in lost.items()]
    return lines


def failure_lines(outcome: RunOutcome, marks: Sequence[RankMark], first: Worker) -> list[str]:
    """Who was stopped, who failed as well, and as the last lines the culprit with its exception."""
    by_rank = {mark.rank: mark for mark in marks}
    lines = []
    groups: dict[str, list[int]] = {}
    for worker in outcome.last:
        if worker is not first and (worker.stopped or worker.exit_code):
            groups.setdefault(_ended(worker), []).append(worker.rank)
    lines += [f"{rank_list(sorted(ranks))}: {ended}" for ended, ranks in groups.items()]
    mark = by_rank.get(first.rank)
    step = ""
    if mark is not None and mark.partial_steps:
        step = f" in step {max(mark.partial_steps)}"
    elif mark is not None and mark.steps:
        step = f" after step {max(mark.steps)}"
    host = socket.gethostname()
    lines.append(f"rank {first.rank} on {host} failed first: {_ended(first)}{step} (pid {first.pid})")
    if mark is not None and mark.exception:
        what, *rest = mark.exception.splitlines()
        lines.append(what)
        lines += [f"  {line}" for line in rest[:1] if line.startswith("at ")]
    return lines


def is_complete(marks: Sequence[RankMark], asked: NumberSet) -> bool:
    """True where every rank that was asked for recorded something."""
    expected = [mark for mark in marks if mark.rank in asked]
    return bool(expected) and all(mark.attached and mark.recording and mark.calls for mark in expected)
