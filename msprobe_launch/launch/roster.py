"""Accounts for every rank of this node: who recorded, who did not and why, how each ended, who failed first."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

from msprobe_launch.bootstrap import variables
from msprobe_launch.errors import UnreadableInput
from msprobe_launch.launch.base import LaunchPlan, RunOutcome, Worker
from msprobe_launch.launch.memory import MemoryGroup
from msprobe_launch.launch.text import rank_list, signal_name, size
from msprobe_launch.logs import get_logger
from msprobe_launch.records.journal import last_name
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.numbers import NumberSet, spans
from msprobe_launch.records.roster import FILE_SYSTEM, UNMATCHED, RankMark, load, save

Memory: TypeAlias = tuple[MemoryGroup, MemoryGroup]

# What a rank says when another one is gone. Such a rank is a victim where any other reason is at hand.
_PEER_IS_GONE = re.compile(
    r"connection (closed|reset|refused|was (closed|aborted))|broken pipe|timed? ?out|recvvalue failed|sendbytes failed"
    r"|remote process exited|peer (closed|failure)|store has been destroyed"
    # MindSpore names the collective in which it waited in vain.
    r"|launch kernel failed, name:\S*(reduce|gather|broadcast|scatter|alltoall|barrier|send|receive)",
    re.IGNORECASE,
)

_PYTHON = re.compile(r"python[\d.]*$")
_ISOLATING = re.compile(r"-[A-Za-z]*[IES]")

NO_MARK = (
    "no mark: injection did not reach it. Likely python -I, -E or -S, a wrapper that clears the environment, "
    "or one in Python that starts another Python. Start the script's interpreter itself, or through a shell"
)

NO_MARK_OF_COMMAND = (
    "no mark: its environment did not come from here (another host, a container, python -I or -E), or its run "
    "directory is another one. What works everywhere: msprobe-launch install-pth in the training's environment"
)
_NOBODY = (
    f"Either nothing numbers the processes ({', '.join(source[0] for source in variables.RANK_SOURCES)}; another one: "
    "--probe-rank-variable NAME), or nothing of ours reached them (another host, a container, python -I or -E: "
    "msprobe-launch install-pth)"
)
# How launchers are told to hand on PYTHONPATH and MSPROBE_RANK_CONFIG to other hosts.
_FORWARDING = {
    "srun": "leave --export=NONE out, or add PYTHONPATH,MSPROBE_RANK_CONFIG to --export",
    "mpirun": "-x PYTHONPATH -x MSPROBE_RANK_CONFIG (Open MPI), -genvall (MPICH, Intel MPI)",
    "mpiexec": "-x PYTHONPATH -x MSPROBE_RANK_CONFIG (Open MPI), -genvall (MPICH, Intel MPI)",
    "deepspeed": "put MSPROBE_RANK_CONFIG into ~/.deepspeed_env on several hosts",
    "docker": "docker run -e PYTHONPATH -e MSPROBE_RANK_CONFIG, with our package mounted at its path",
}


# -- completing the marks


def complete(outcome: RunOutcome, plan: LaunchPlan, memory: Memory | None = None) -> tuple[RankMark, ...]:
    """Add to each worker's mark how it ended; write one for a worker that left none. Marks of the last attempt.

    `memory` is the launcher's control group before and after.

    The ranks are dead by now, so the marks have one writer. A roster that cannot be written is a warning.
    """
    if outcome.run_dir is None:
        return ()
    last: tuple[RankMark, ...] = ()
    for attempt in sorted({worker.attempt for worker in outcome.workers}):
        layout = RunLayout(outcome.run_dir, attempt)
        workers = outcome.of(attempt)
        last = tuple(_completed(layout, worker, plan, memory) for worker in workers)
        last = _with_roles(last, workers)
        for mark in last:
            path = layout.roster_mark(mark.rank)
            try:
                save(path, mark)
            except OSError as error:
                get_logger().warning("%s cannot be written: %s", path, error)
    return last


def _completed(layout: RunLayout, worker: Worker, plan: LaunchPlan, memory: Memory | None) -> RankMark:
    path = layout.roster_mark(worker.rank)
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
    if mark.attached and not mark.finished:
        mark = _from_disk(mark, layout)
    return dataclasses.replace(
        mark,
        exit_code=worker.exit_code,
        ended=_ended(worker, mark),
        # A script may show an exception through sys.excepthook and go on; only one that ended the rank is its end.
        exception="" if worker.exit_code == 0 else mark.exception,
        peak_memory=worker.peak_memory,
        hint=_memory_hint(worker, memory),
    )


def _from_disk(mark: RankMark, layout: RunLayout) -> RankMark:
    """What a rank that was killed did not come to say: its last steps and its last op, from its files."""
    since = max((*mark.steps, *mark.partial_steps), default=0)
    steps, partial, last_op = set(mark.steps), set(mark.partial_steps), mark.last_op
    for step in layout.steps():
        folder = layout.rank_folder(step, mark.rank)
        if step < since or not folder.path.is_dir():
            continue
        (steps if folder.is_finished else partial).add(step)
        try:
            last_op = last_name(folder.dump if folder.is_finished else folder.journal) or last_op
        except (OSError, ValueError):
            continue
    partial -= steps
    return dataclasses.replace(mark, steps=tuple(sorted(steps)), partial_steps=tuple(sorted(partial)), last_op=last_op)


def _memory_hint(worker: Worker, memory: Memory | None) -> str:
    """What speaks for the kernel's memory killer where a rank was ended by SIGKILL and not by us."""
    if worker.exit_code != -signal.SIGKILL or worker.stopped or memory is None:
        return ""
    before, after = memory
    held = f"it held {size(worker.peak_memory)} at most" if worker.peak_memory else "its memory is not known"
    limit = "" if after.limit is None else f", the limit of this control group is {size(after.limit)}"
    if before.kills is not None and after.kills is not None and after.kills > before.kills:
        return f"the memory killer has ended {after.kills - before.kills} process(es) meanwhile: {held}{limit}"
    return f"out of memory? {held}{limit}; the kernel's log would say so: dmesg | grep -i 'killed process'"


def _why_unreached(worker: Worker, plan: LaunchPlan) -> str:
    if plan.manifest.backend == "command":
        return _why_unreached_by_command(plan)
    for at, token in enumerate(plan.target):
        if not _PYTHON.match(token.rpartition("/")[2]):
            continue
        for flag in plan.target[at + 1 :]:
            if not flag.startswith("-") or flag.startswith(("--", "-c", "-m")):
                break
            if _ISOLATING.match(flag):
                remedy = f"Leave {flag} out, or: msprobe-launch install-pth"
                return f"no mark: {token} {flag} ignores PYTHONPATH, which brings the probe. {remedy}"
    if worker.exit_code is not None and worker.exit_code < 0:
        return f"no mark: {_ended(worker)} before it imported a framework"
    return NO_MARK


def _why_unreached_by_command(plan: LaunchPlan) -> str:
    program = os.path.basename(plan.target[0])
    remedy = _FORWARDING.get(program.rpartition(".")[0] or program, "")
    return f"{NO_MARK_OF_COMMAND}{f'. {program}: {remedy}' if remedy else ''}"


def _ended(worker: Worker, mark: RankMark | None = None) -> str:
    """How a process ended, in words; of a process that another launcher started, as far as its mark tells."""
    if worker.stopped:
        return "stopped by launcher"
    if worker.exit_code is None:
        if mark is not None and mark.exception:
            return "failed"
        return "finished" if mark is not None and mark.finished else "ended without a farewell"
    if worker.exit_code == 0:
        return "finished"
    if worker.exit_code < 0:
        return f"killed by {signal_name(-worker.exit_code)}"
    return f"exited {worker.exit_code}"


# -- who failed first


class Blame(IntEnum):
    """What an end says about who began it, most telling first."""

    SIGNAL = 0  # ended by a signal: it has had no time to be a victim
    OWN = 1  # an exception or an exit code of its own
    ABORT = 2  # SIGABRT: watchdogs of communication libraries abort victims too
    SILENT = 3  # it left no word at all, and another one misses a peer
    PEER = 4  # it misses a peer


_REASONS = {
    Blame.SIGNAL: "ended by a signal, without a word about a lost peer",
    Blame.OWN: "its failure is not about a lost peer",
    Blame.ABORT: "it aborted, and no rank of this node failed before by itself",
    Blame.SILENT: "it ended without a word, and others miss a peer",
    Blame.PEER: "it lost a peer, and no rank of this node failed by itself",
}


def _blame(worker: Worker, mark: RankMark | None) -> Blame:
    lines = mark.exception.splitlines() if mark is not None else []
    if lines and _PEER_IS_GONE.search(lines[0]):
        return Blame.PEER
    if worker.exit_code == -signal.SIGABRT:
        return Blame.ABORT
    if worker.exit_code is None and not lines:
        return Blame.SILENT
    return Blame.SIGNAL if worker.exit_code is not None and worker.exit_code < 0 else Blame.OWN


def culprit(outcome: RunOutcome, marks: Iterable[RankMark]) -> Worker | None:
    """The worker of the last attempt that failed by itself and first, or None.

    Of several with the same `Blame` the earliest exception counts, then the lower rank.
    """
    return _first(outcome.last, {mark.rank: mark for mark in marks})


def _first(workers: Iterable[Worker], by_rank: Mapping[int, RankMark]) -> Worker | None:
    def order(worker: Worker) -> tuple[Blame, str, int]:
        mark = by_rank.get(worker.rank)
        lines = mark.exception.splitlines() if mark is not None else []
        return _blame(worker, mark), _time_of(lines), worker.rank

    def has_failed(worker: Worker) -> bool:
        mark = by_rank.get(worker.rank)
        return bool(worker.exit_code) or (worker.exit_code is None and mark is not None and bool(mark.exception))

    def is_silent(worker: Worker) -> bool:
        mark = by_rank.get(worker.rank)
        return worker.exit_code is None and mark is not None and mark.attached and not mark.finished

    workers = [worker for worker in workers if not worker.stopped]
    failed = [worker for worker in workers if has_failed(worker)]
    if failed and all(_blame(worker, by_rank.get(worker.rank)) is Blame.PEER for worker in failed):
        # Another launcher's ranks, whose exit codes we do not know: the peer they lost has died without a word.
        failed += [worker for worker in workers if is_silent(worker) and worker not in failed]
    return min(failed, key=order, default=None)


def _with_roles(marks: Sequence[RankMark], workers: Sequence[Worker]) -> tuple[RankMark, ...]:
    """Say of each failed rank whether it began it, and why we think so."""
    by_rank = {mark.rank: mark for mark in marks}
    first = _first(workers, by_rank)
    if first is None:
        return tuple(marks)
    told = []
    for worker, mark in zip(workers, marks, strict=True):
        if worker is first:
            mark = dataclasses.replace(mark, role="culprit", reason=_REASONS[_blame(worker, mark)])
        elif (worker.exit_code or (worker.exit_code is None and mark.exception)) and not worker.stopped:
            peer = _blame(worker, mark) is Blame.PEER
            reason = "it lost a peer" if peer else f"it failed after rank {first.rank}, or with less to say for itself"
            mark = dataclasses.replace(mark, role="victim", reason=reason)
        told.append(mark)
    return tuple(told)


def _time_of(lines: Sequence[str]) -> str:
    """The time in an exception's text (`bootstrap.exceptions`), which sorts as text within one host; else last."""
    return next((line for line in lines[1:3] if line[:1].isdigit()), "~")


# -- what is said at the end


def recorded_lines(outcome: RunOutcome, marks: Sequence[RankMark], asked: NumberSet) -> list[str]:
    """`recorded by 7 of 8 ranks, steps 0-4, 12,345 calls -> RUN_DIR`, then who is missing and why."""
    expected = [mark for mark in marks if mark.rank in asked]
    attached = [mark for mark in expected if mark.attached and mark.recording]
    refused = [mark for mark in attached if mark.calls and not mark.kept]
    silent = [mark for mark in attached if not mark.calls]
    if silent and len(silent) < len(attached):
        left = _left_files(outcome)
        silent = [mark for mark in silent if mark.rank not in left]
    else:
        silent = []  # none or all, which is another matter
    recorded = [mark for mark in attached if mark not in refused and mark not in silent]
    missing = [mark for mark in expected if mark not in attached]
    calls = sum(mark.kept for mark in recorded)
    lines = []
    if calls:
        steps = sorted({step for mark in recorded for step in mark.steps})
        which = f"steps {spans(steps)}" if steps else "no complete step"
        selected = f" (ranks {asked} asked for)" if asked.ranges else ""
        lines.append(
            f"recorded by {len(recorded)} of {len(expected)} ranks{selected}, {which}, {calls:,} calls"
            f" -> {RunLayout(outcome.run_dir or Path(), outcome.attempt).base}"
        )
    elif refused:
        lines.append(f"ERROR: nothing was recorded: the files of {len(refused)} of {len(expected)} ranks were refused")
    elif recorded:
        lines.append(
            f"ERROR: nothing was recorded: {len(recorded)} of {len(expected)} ranks attached,"
            " but no call came in the steps and scope asked for"
        )
    elif expected:
        lines.append(f"ERROR: nothing was recorded: {len(expected)} of {len(expected)} ranks are missing")
    elif marks:
        lines.append(f"ERROR: nothing was recorded: no rank of {spans(m.rank for m in marks)} is in {asked}")
    elif outcome.exit_code is not None:
        lines.append(f"ERROR: nothing was recorded: no process left a mark. {_NOBODY}")
    else:
        lines.append("ERROR: nothing was recorded: no worker was started")
    reasons: dict[str, list[int]] = {}
    for mark in missing:
        reasons.setdefault(mark.note or mark.ended, []).append(mark.rank)
    for mark in silent:
        why = mark.note or "it attached, but no call came in the steps and scope asked for"
        reasons.setdefault(why, []).append(mark.rank)
    for mark in refused:
        why = next(reason for reason in mark.lost if reason.startswith(FILE_SYSTEM))
        reasons.setdefault(f"nothing of it could be written: {why}", []).append(mark.rank)
    lines += [f"missing: {rank_list(sorted(ranks))}: {reason}" for reason, ranks in reasons.items()]
    lines += _partial_lines(attached)
    lines += _claim_lines(outcome, marks)
    lost: dict[str, int] = {}
    for mark in attached:
        for reason, count in mark.lost.items():
            lost[reason] = lost.get(reason, 0) + count
    lines += [f"lost: {count:,} calls: {reason}" for reason, count in lost.items() if count]
    partial = sorted({step for mark in attached for step in mark.partial_steps})
    if partial and any(lost.values()):
        lines.append(f"steps with losses: {spans(partial)}")
    return lines + _stopped_lines(recorded) + _unmatched_lines(recorded)


def _left_files(outcome: RunOutcome) -> set[int]:
    """Ranks that have left records on the disk, whatever their marks say: one that was killed could not update it."""
    if outcome.run_dir is None:
        return set()
    layout = RunLayout(outcome.run_dir, outcome.attempt)
    folders = (folder for step in layout.steps() for folder in layout.rank_folders(step))
    return {
        folder.rank for folder in folders if folder.rank is not None and (folder.is_finished or folder.journal.exists())
    }


def next_lines(outcome: RunOutcome, marks: Sequence[RankMark]) -> list[str]:
    """The command to type next, where anything was recorded, by an earlier attempt if not by the last."""
    if outcome.run_dir is None:
        return []
    run_dir = shlex.quote(str(outcome.run_dir))
    if any(mark.kept for mark in marks):
        return [f"next: msprobe-aggregate {run_dir}"]
    for attempt in reversed(range(outcome.attempt)):
        steps = RunLayout(outcome.run_dir, attempt).steps()
        if steps:
            what = f"attempt {attempt} recorded steps {spans(steps)}"
            return [f"{what}. next: msprobe-aggregate {run_dir} --attempt {attempt}"]
    return []


def _partial_lines(recorded: Sequence[RankMark]) -> list[str]:
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for mark in recorded:
        if mark.partial_steps:
            by_steps.setdefault(mark.partial_steps, []).append(mark.rank)
    return [
        f"partial: {rank_list(sorted(ranks))} did not record all of step{'s' if len(steps) > 1 else ''} {spans(steps)}"
        for steps, ranks in by_steps.items()
    ]


def _stopped_lines(recorded: Sequence[RankMark]) -> list[str]:
    """Who has stopped recording before the program's end, and why (`--probe-max-bytes`)."""
    stopped: dict[str, list[int]] = {}
    for mark in recorded:
        if mark.note:
            stopped.setdefault(mark.note, []).append(mark.rank)
    return [f"{rank_list(sorted(ranks))}: {note}" for note, ranks in stopped.items()]


def _unmatched_lines(recorded: Sequence[RankMark]) -> list[str]:
    """Filters that let nothing through on any rank. What was there may differ by rank: the first one's is shown."""
    found: dict[str, list[str]] = {}
    for mark in recorded:
        for text in mark.unseen:
            head, matched_nothing, _ = text.partition(UNMATCHED)
            if matched_nothing:
                found.setdefault(head, []).append(text)
    return [f"ERROR: {texts[0]}" for texts in found.values() if len(texts) == len(recorded)]


def _claim_lines(outcome: RunOutcome, marks: Sequence[RankMark]) -> list[str]:
    """Two processes with one rank's number: both are named, because nobody can say which is the right one."""
    lines = []
    owners = {mark.rank: mark for mark in marks}
    for claim in claims(outcome):
        owner = owners.get(claim.rank)
        first = "another" if owner is None else f"process {owner.pid} on {owner.host} (recorded)"
        second = f"process {claim.pid} on {claim.host} (not recorded)"
        lines.append(f"rank {claim.rank} is claimed by two: {first} and {second}. Their launcher numbers both alike")
    return lines


def claims(outcome: RunOutcome) -> list[RankMark]:
    """Marks of processes that came second to a rank of the last attempt."""
    if outcome.run_dir is None:
        return []
    found = []
    for path in RunLayout(outcome.run_dir, outcome.attempt).claims():
        with contextlib.suppress(UnreadableInput):
            found.append(load(path, RankMark))
    return found


def failure_lines(outcome: RunOutcome, marks: Sequence[RankMark], first: Worker) -> list[str]:
    """Who was stopped, who failed as well, and as the last lines the culprit with its exception."""
    by_rank = {mark.rank: mark for mark in marks}
    lines = []
    groups: dict[str, list[int]] = {}
    for worker in outcome.last:
        mark = by_rank.get(worker.rank)
        if worker is not first and (worker.stopped or worker.exit_code or (mark is not None and mark.role)):
            victim = f", a victim: {mark.reason}" if mark is not None and mark.role == "victim" else ""
            groups.setdefault(f"{_ended(worker, mark)}{victim}", []).append(worker.rank)
    lines += [f"{rank_list(sorted(ranks))}: {ended}" for ended, ranks in groups.items()]
    lines += _early_lines(outcome, first)
    mark = by_rank.get(first.rank)
    step = ""
    if mark is not None and mark.partial_steps:
        step = f" in step {max(mark.partial_steps)}"
    elif mark is not None and mark.steps:
        step = f" after step {max(mark.steps)}"
    if mark is not None and mark.last_op:
        lines.append(f"rank {first.rank} recorded last: {mark.last_op}")
    failed = "failed first"
    if len(outcome.last) < first.world_size and _blame(first, mark) is Blame.PEER:
        failed = "failed first on this node, for a lost peer: the first failure is another node's"
    host = socket.gethostname()
    lines.append(f"rank {first.rank} on {host} {failed}: {_ended(first, mark)}{step} (pid {first.pid})")
    if mark is None:
        return lines
    if mark.exception:
        lines += _what_and_where(mark.exception)
    elif mark.thread_exception:
        what, *rest = _what_and_where(mark.thread_exception)
        lines += [f"in a thread: {what}", *rest]
    if mark.hint:
        lines.append(mark.hint)
    return lines


def _what_and_where(exception: str) -> list[str]:
    what, *rest = exception.splitlines()
    return [what, *(f"  {line}" for line in rest[:1] if line.startswith("at "))]


def _early_lines(outcome: RunOutcome, first: Worker) -> list[str]:
    """Ranks that had ended well before the failure: who waits for them waits for ever."""
    early = [
        worker.rank
        for worker in outcome.last
        if worker.exit_code == 0
        and worker.ended_at is not None
        and (first.ended_at is None or worker.ended_at < first.ended_at - 1)
    ]
    return [f"{rank_list(early)} had ended well before: did it do fewer steps than the others?"] if early else []


def is_complete(marks: Sequence[RankMark], asked: NumberSet) -> bool:
    """True where every rank that was asked for recorded something."""
    expected = [mark for mark in marks if mark.rank in asked]
    return bool(expected) and all(mark.attached and mark.recording and mark.kept for mark in expected)
