"""Compare a run with its bench while it runs: what `msprobe-launch --probe-bench` starts beside the ranks.

    python -m aggregator.follow RUN_DIR --bench BENCH [--stop-at N]

It looks at the run directory and compares each rank of each step once its dump.json is there, which is written last.
The results lie in RUN_DIR/aggregate/inrun, a file per rank and step as msprobe-aggregate writes them.

Standard input: a line of JSON per attempt, {"attempt": 0, "ranks": [0, 1]} (ranks [] for all that are there). Its end
says that the ranks have ended: what is complete is finished, then the follower ends. SIGTERM ends it at once.
Standard output: a line of JSON per thing worth saying, {"kind": ..., "text": ..., "ranks": [...]}; kinds are
`divergence`, `note`, `stop`, `progress` (with `compared` and `complete`, numbers of dumps) and `done`.

It never touches the ranks. Told to stop at N findings, it writes RUN_DIR/control.yaml, which they read between steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import select
import shlex
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from aggregator.stopping import Stop
from msprobe_launch.errors import ProbeError
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RankFolder, RunLayout
from msprobe_launch.records.numbers import spans
from msprobe_launch.records.roster import write_atomically

POLL_SECONDS = 0.5
NICENESS = 19
# Steps this far behind the newest one get no further ranks.
STALE_STEPS = 64
SUMMARY_VERSION = 1

Say = Callable[..., None]
"""say(kind, text, ranks=(), **more): one line on standard output."""


class Stopped(BaseException):
    """SIGTERM: what is under way is given up."""


@dataclass(slots=True)
class Attempt:
    """What was done of one attempt. `ranks` are those to follow, empty for all.

    `firsts` has the earliest divergence of each rank so far, `earliest` is that of all. `first` is what is told: the
    same until it is `settled`, once no rank is awaited in its step (see `overall.first`). `told` was said of it last.
    """

    number: int
    ranks: frozenset[int]
    layout: RunLayout
    output: Path
    done: set[tuple[int, int | None]] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    compared: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, int] = field(default_factory=lambda: {"compared": 0, "complete": 0, "findings": 0, "rows": 0})
    steps: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    first: Any = None
    firsts: dict[int | None, Any] = field(default_factory=dict)
    earliest: Any = None
    told: tuple[Any, ...] = ()
    settled: bool = False
    merged: set[int] = field(default_factory=set)


class Follower:
    """All that is known of a run under way. `stop_at` None never stops its recording."""

    def __init__(self, run: Path, bench: Path, stop_at: int | None, say: Say, stamp: str) -> None:
        self._run, self._bench_path, self._stop_at = run, bench, stop_at
        self._say, self._stamp = say, stamp
        self._bench: dict[tuple[int | None, int | None], RankFolder] = {}
        self._bench_steps: frozenset[int | None] = frozenset()
        self._attempts: dict[int, Attempt] = {}
        self._told: set[str] = set()
        self._stop: Stop | None = None

    def start(self) -> None:
        """Read what the bench holds. Raises ProbeError."""
        from aggregator import sources

        found = sources.find_run((self._bench_path,))
        self._bench = {(dump.step, dump.rank): dump.folder for dump in found.dumps}
        self._bench_steps = frozenset(found.steps)

    def attempt(self, number: int, ranks: Iterable[int]) -> None:
        """Ranks of an attempt have started."""
        known = self._attempts.get(number)
        if known is not None:
            known.ranks |= frozenset(ranks)
            return
        output = RunLayout(self._run).aggregate / "inrun"
        if number:
            output /= f"attempt{number}"
            self._once(f"attempt {number}", f"in-run: attempt {number} is compared from its beginning, into {output}")
        self._attempts[number] = Attempt(number, frozenset(ranks), RunLayout(self._run, number), output)

    # -- one look

    def look(self) -> bool:
        """Compare what has become complete since the last look. True where there was anything."""
        worked = False
        for attempt in list(self._attempts.values()):
            for step, folders in self._ready(attempt):
                worked = True
                self._compare_step(attempt, step, folders)
        if self._stop is not None:
            self._stop.look(self._attempts.values())
        return worked

    def _ready(self, attempt: Attempt) -> list[tuple[int, list[RankFolder]]]:
        found = []
        steps = attempt.layout.steps()
        newest = max(steps, default=0)
        for step in steps:
            if step in attempt.closed:
                continue
            folders = [
                folder
                for folder in attempt.layout.rank_folders(step)
                if folder.rank is None or not attempt.ranks or folder.rank in attempt.ranks
            ]
            ready = [f for f in folders if (step, f.rank) not in attempt.done and f.is_finished]
            if ready:
                found.append((step, ready))
            elif step < newest - STALE_STEPS:
                attempt.closed.add(step)
        return found

    def _compare_step(self, attempt: Attempt, step: int, folders: Sequence[RankFolder]) -> None:
        firsts = []
        for folder in folders:
            attempt.done.add((step, folder.rank))
            attempt.counts["complete"] += 1
            result = self._compare(attempt, step, folder)
            if result is not None:
                attempt.compared[step].append(result)
                attempt.steps.add(step)
                attempt.seen.add(-1 if folder.rank is None else folder.rank)
                attempt.counts["compared"] += 1
                attempt.counts["findings"] += result.findings
                attempt.counts["rows"] += result.rows
                firsts += [result] if result.first is not None else []
            self._progress()
        expected = self._expected(attempt)
        awaited = expected - {-1 if rank is None else rank for there, rank in attempt.done if there == step}
        if firsts:
            self._learn(attempt, firsts, sorted(rank for rank in awaited if rank >= 0))
        if attempt.first is not None and attempt.first.step == step and (not awaited or expected == {-2}):
            self._settle(attempt, step)
        if (
            self._stop is None
            and self._stop_at is not None
            and attempt.first is not None
            and attempt.counts["findings"] >= self._stop_at
        ):
            self._stop = Stop(self._run, self._stop_at, attempt, self._say)
            self._stop.begin()
        if expected <= {-1 if one.rank is None else one.rank for one in attempt.compared[step]}:
            self._merge(attempt, step)
        self._write_summary(attempt)

    def _compare(self, attempt: Attempt, step: int, folder: RankFolder) -> Any:
        """The comparison, or None where there is none, which is said once for each reason."""
        from aggregator import compare
        from aggregator.model import RankFailure
        from aggregator.sources import number_ranges

        bench = self._bench.get((step, folder.rank))
        who = "one process" if folder.rank is None else f"rank {folder.rank}"
        if step not in self._bench_steps:
            has = number_ranges(self._bench_steps)
            self._once("no step", f"in-run: the bench has no step {step} (it has {has}): such steps are not compared")
            return None
        if bench is None:
            has = number_ranges(rank for there, rank in self._bench if there == step)
            self._once(f"no {who}", f"in-run: the bench has no {who} in step {step} (it has {has}): not compared")
            return None
        results = attempt.output / f"step{step}"
        name = "rank" if folder.rank is None else f"rank{folder.rank}"
        partition = attempt.output / "partitions" / f"step{step}" / f"{name}.parquet"
        try:
            found = compare.compare_rank(
                folder, bench, step=step, rank=folder.rank, partition=partition, results=results, time=self._stamp
            )
        except Stopped:
            # Half a table would be read for a whole one.
            for path in (partition, *results.glob(f"*_{name}_{self._stamp}.csv")):
                path.unlink(missing_ok=True)
            raise
        if isinstance(found, RankFailure):
            reason = re.sub(r"\d+", "N", found.reason)
            self._once(f"failure {reason}", f"in-run: {who}, step {step} is not compared: {found.reason}")
            return None
        return found

    def _learn(self, attempt: Attempt, results: Sequence[Any], awaited: Sequence[int]) -> None:
        """Take in divergences; the earliest is said at once, though a rank that is awaited may have an earlier one."""
        from aggregator.analyse import overall

        for one in results:
            known = attempt.firsts.get(one.rank)
            if known is None or overall.order(one.first) < overall.order(known):
                attempt.firsts[one.rank] = one.first
        earliest = min(attempt.firsts.values(), key=overall.order)
        before = attempt.earliest
        if before is None or (earliest.step, earliest.item) != (before.step, before.item):
            attempt.first = attempt.earliest = earliest
            attempt.settled = False
            self._announce(attempt, awaited)

    def _settle(self, attempt: Attempt, step: int) -> None:
        """No rank is awaited in the step of the first divergence: say what has changed since it was told."""
        from aggregator import pipeline
        from aggregator.analyse import overall

        if attempt.settled:
            return
        attempt.settled = True
        culprit = overall.first(attempt.compared[step], pipeline.divergence_at).culprit
        if culprit is not None:
            attempt.first = culprit
        self._announce(attempt, ())

    def _announce(self, attempt: Attempt, awaited: Sequence[int]) -> None:
        first = attempt.first
        same = (own for own in attempt.firsts.items() if (own[1].step, own[1].item) == (first.step, first.item))
        ranks = sorted({rank for rank, _ in same if rank is not None} or {first.rank} - {None})
        key = (first.step, first.item, *ranks)
        if key == attempt.told:
            return
        again = ", corrected" if attempt.told else ""
        attempt.told = key
        which = "" if attempt.number == 0 else f" of attempt {attempt.number}"
        where = "one process" if not ranks else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        so_far = f" (not compared yet in this step: {_ranks(awaited)})" if awaited else ""
        self._say(
            "divergence",
            f"FIRST DIVERGENCE{which}{again}: {where}, step {first.step}: {first.item}: {first.reason}{so_far}; "
            f"next: {self._command(attempt)} --steps {first.step}",
            ranks,
        )

    def _command(self, attempt: Attempt) -> str:
        several = attempt.number or len(self._attempts) > 1
        return f"msprobe-aggregate {shlex.quote(str(self._run))}" + (f" --attempt {attempt.number}" if several else "")

    def _expected(self, attempt: Attempt) -> set[int]:
        """Ranks whose comparisons make a step complete; what can never be complete where not all are followed."""
        expected: set[int] = set()
        marks = dict(roster.marks(attempt.layout))
        for rank, mark in marks.items():
            if not isinstance(mark, roster.RankMark):
                return {-2}
            if mark.recording:
                expected.add(rank)
            if mark.world_size is not None and len(marks) < mark.world_size:
                return {-2}
        return expected or {-2}

    def _merge(self, attempt: Attempt, step: int) -> None:
        from aggregator import merging
        from aggregator.report.table import Format

        group = attempt.compared.pop(step)
        attempt.merged.add(step)
        try:
            merging.merge_compared(
                group, attempt.output / f"step{step}", self._stamp, frozenset({Format.CSV, Format.PARQUET})
            )
        except ProbeError as error:
            self._once("merge", f"in-run: the ranks of step {step} are not merged: {error}")

    # -- what is said

    def _once(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._say("note", text)

    def _progress(self) -> None:
        self._say("progress", "", compared=self._total("compared"), complete=self._total("complete"))

    def _total(self, what: str) -> int:
        return sum(attempt.counts[what] for attempt in self._attempts.values())

    def _write_summary(self, attempt: Attempt) -> None:
        """inrun-<host>.json: what msprobe-aggregate's summary.json would say so far, in short."""
        import dataclasses

        first = None if attempt.first is None else dataclasses.asdict(attempt.first)
        if first is not None and not math.isfinite(first["excess"]):
            first["excess"] = str(first["excess"])
        facts = {
            "format_version": SUMMARY_VERSION,
            "run": str(self._run),
            "bench": str(self._bench_path),
            "attempt": attempt.number,
            **attempt.counts,
            "steps": sorted(attempt.steps),
            "ranks": sorted(rank for rank in attempt.seen if rank >= 0),
            "first": first,
            "stop": None if self._stop is None else self._stop.facts(),
        }
        path = attempt.output / f"inrun-{socket.gethostname()}.json"
        write_atomically(path, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")

    def end(self) -> None:
        """Nothing more will come."""
        if self._stop is not None:
            self._stop.end()
        for attempt in self._attempts.values():
            if attempt.first is not None:
                self._announce(attempt, ())  # where it has changed and nobody knew that no rank was awaited
            # Other nodes of a shared directory merge nothing either where none has all ranks.
            if not attempt.ranks or attempt.ranks.issuperset(attempt.layout.roster_ranks()):
                for step in sorted(step for step, group in attempt.compared.items() if group):
                    self._merge(attempt, step)
            if attempt.counts["complete"]:
                self._write_summary(attempt)
        steps = {step for attempt in self._attempts.values() for step in attempt.steps}
        ranks = {rank for attempt in self._attempts.values() for rank in attempt.seen if rank >= 0}
        found, compared, complete = (self._total(what) for what in ("findings", "compared", "complete"))
        text = f"in-run: {compared:,} of {complete:,} dumps compared"
        if compared:
            text += f", steps {spans(steps)} of ranks {spans(ranks) or 'none'}: {found:,} findings"
            text += f" -> {RunLayout(self._run).aggregate / 'inrun'}"
        for attempt in self._attempts.values() if len(self._attempts) > 1 and found else ():
            text += f"; {attempt.counts['findings']:,} in attempt {attempt.number}: {self._command(attempt)}"
        for attempt in self._attempts.values():
            if unfinished := _unfinished(attempt):
                text += f"; not among them, since unfinished: {unfinished}"
        self._say("done", text, compared=compared, complete=complete, findings=found)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {spans(numbers)}"


def _unfinished(attempt: Attempt) -> str:
    """Steps that the ranks' end has cut, `step 2 of ranks 0-1`."""
    cut: dict[int, list[int]] = defaultdict(list)
    for step in attempt.layout.steps():
        for folder in attempt.layout.rank_folders(step):
            ours = folder.rank is not None and (not attempt.ranks or folder.rank in attempt.ranks)
            if folder.rank is not None and ours and folder.journal.exists():
                cut[step].append(folder.rank)
    return ", ".join(f"step {step} of {_ranks(ranks)}" for step, ranks in sorted(cut.items()))


# -- the process


class Inbox:
    """Lines of standard input, as they come."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rest = b""
        self.ended = False

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """What has come; waits so long for it."""
        if self.ended:
            return []
        if not select.select([self._number], [], [], seconds)[0]:
            return []
        data = os.read(self._number, 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]


def _say(kind: str, text: str, ranks: Sequence[int] = (), **more: Any) -> None:
    line = json.dumps({"kind": kind, "text": text, "ranks": list(ranks), **more})
    os.write(1, line.encode() + b"\n")  # one write: no line is ever half there


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def main(argv: Sequence[str] | None = None) -> int:
    """Follow a run until standard input ends; 0, or 2 where the bench cannot be used."""
    parser = argparse.ArgumentParser(prog="aggregator.follow", allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--stop-at", type=int, default=None)
    given = parser.parse_args(argv)
    os.nice(NICENESS - os.nice(0))
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follower = Follower(given.run, given.bench, given.stop_at, _say, time.strftime("%Y%m%d%H%M%S"))
    inbox = Inbox(0)
    try:
        import pyarrow as pa

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        follower.start()
        while True:
            for order in inbox.wait(POLL_SECONDS):
                follower.attempt(int(order["attempt"]), order["ranks"])
            if not follower.look() and inbox.ended:
                break
        follower.end()
    except ProbeError as error:
        _say("note", "in-run: nothing is compared: " + " ".join(str(error).split()))
        return error.exit_code
    except Stopped:
        return 128 + signal.SIGTERM
    except BrokenPipeError:
        return 1  # nobody listens any more
    return 0


if __name__ == "__main__":
    sys.exit(main())
