"""Accounting for ranks: marks completed, missing ranks explained, the culprit named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from msprobe_launch.config import NumberSet, ProbeConfig
from msprobe_launch.launch import roster
from msprobe_launch.launch.base import LaunchPlan, RunOutcome, Worker
from msprobe_launch.launch.memory import MemoryGroup
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark, load, save

ALL = NumberSet()
PEER_GONE = "RuntimeError: Connection closed by peer [127.0.0.1]:1234\nat t.py:9 in main\n2026-01-01T10:00:00.100+00:00"


def plan(run_dir: Path, *target: str) -> LaunchPlan:
    manifest = Manifest(command=(), script="t.py", backend="torchrun", started="")
    return LaunchPlan((), target or ("t.py",), ProbeConfig(run_dir=run_dir), False, manifest)


def worker(rank: int, exit_code: int | None = 0, *, stopped: bool = False, attempt: int = 0) -> Worker:
    return Worker(rank, rank, 4, attempt, 100 + rank, exit_code, stopped)


def mark(rank: int, exception: str = "", **more: object) -> RankMark:
    values = {"attached": True, "steps": (0, 1), "calls": 10, "exception": exception, **more}
    return RankMark(rank=rank, **values)  # type: ignore[arg-type]


def test_marks_are_completed_and_missing_ones_written(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    for rank in range(3):
        save(layout.roster_mark(rank), mark(rank, exception="ValueError: shown and handled"))
    workers = (worker(0), worker(1, -9), worker(2, -15, stopped=True), worker(3, 7))
    marks = roster.complete(RunOutcome(tmp_path, workers), plan(tmp_path))
    assert [(m.exit_code, m.ended, m.attached) for m in marks] == [
        (0, "finished", True),
        (-9, "killed by SIGKILL", True),
        (-15, "stopped by launcher", True),
        (7, "exited 7", False),
    ]
    assert [load(layout.roster_mark(m.rank), RankMark) for m in marks] == list(marks)
    assert marks[0].exception == ""
    assert (marks[3].pid, marks[3].world_size, marks[3].note) == (103, 4, roster.NO_MARK)


def test_each_attempt_has_its_own_roster_and_the_last_one_counts(tmp_path: Path) -> None:
    outcome = RunOutcome(tmp_path, (worker(0, 1), worker(0, 0, attempt=1)))
    marks = roster.complete(outcome, plan(tmp_path))
    assert [(m.attempt, m.exit_code) for m in marks] == [(1, 0)]
    assert load(RunLayout(tmp_path).roster_mark(0), RankMark).exit_code == 1
    assert load(RunLayout(tmp_path, 1).roster_mark(0), RankMark).exit_code == 0


@pytest.mark.parametrize(
    ("target", "exit_code", "reason"),
    [
        (["python", "-I", "t.py"], 0, "python -I ignores PYTHONPATH"),
        (["/usr/bin/python3.11", "-u", "-sE", "t.py"], 0, "/usr/bin/python3.11 -sE ignores PYTHONPATH"),
        (["python", "t.py", "-I"], 0, "injection did not reach it"),
        (["python", "-c", "-I"], 0, "injection did not reach it"),
        (["bash", "w.sh"], -9, "killed by SIGKILL before it imported a framework"),
    ],
)
def test_why_a_rank_left_no_mark(tmp_path: Path, target: list[str], exit_code: int, reason: str) -> None:
    (found,) = roster.complete(RunOutcome(tmp_path, (worker(0, exit_code),)), plan(tmp_path, *target))
    assert reason in found.note


def test_a_cut_mark_is_said_to_be_one(tmp_path: Path) -> None:
    path = RunLayout(tmp_path).roster_mark(0)
    path.parent.mkdir()
    path.write_text('{"rank": 0, "att')
    (found,) = roster.complete(RunOutcome(tmp_path, (worker(0),)), plan(tmp_path))
    assert "its mark cannot be read" in found.note
    assert found.ended == "finished"


def culprit(workers: list[Worker], marks: list[RankMark]) -> int | None:
    first = roster.culprit(RunOutcome(Path(), tuple(workers)), marks)
    return None if first is None else first.rank


def test_a_stopped_rank_and_one_that_misses_its_peer_are_not_the_culprit() -> None:
    own = "ValueError: bad\nat t.py:3 in f\n2026-01-01T10:00:00.200+00:00"
    workers = [worker(0, 1), worker(1, -15, stopped=True), worker(2, 1), worker(3, 0)]
    assert culprit(workers, [mark(0, PEER_GONE), mark(2, own)]) == 2
    in_vain = PEER_GONE.replace("Connection closed by peer", "Launch kernel failed, name:Default/AllReduce-op0")
    assert culprit(workers, [mark(0, in_vain), mark(2, own)]) == 2


def test_a_rank_killed_by_a_signal_comes_before_exceptions() -> None:
    workers = [worker(0, 1), worker(1, -9)]
    assert culprit(workers, [mark(0, "ValueError: x"), mark(1)]) == 1


def test_of_two_exceptions_the_earlier_counts_and_then_the_lower_rank() -> None:
    early, late = (
        "E: a\nat t.py:1 in f\n2026-01-01T10:00:00.1+00:00",
        "E: a\nat t.py:1 in f\n2026-01-01T10:00:00.2+00:00",
    )
    assert culprit([worker(0, 1), worker(1, 1)], [mark(0, late), mark(1, early)]) == 1
    assert culprit([worker(1, 7), worker(0, 7)], []) == 0


def test_an_abort_is_no_culprit_beside_a_failure_of_its_own_but_is_one_beside_lost_peers() -> None:
    own = "ValueError: bad\nat t.py:3 in f\n2026-01-01T10:00:00.200+00:00"
    assert culprit([worker(0, -6), worker(1, 1)], [mark(0), mark(1, own)]) == 1
    assert culprit([worker(0, 1), worker(1, -6)], [mark(0, PEER_GONE), mark(1)]) == 1


def test_marks_say_who_began_and_why(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    save(layout.roster_mark(0), mark(0, PEER_GONE))
    save(layout.roster_mark(1), mark(1, "ValueError: bad\nat t.py:3 in f\n2026-01-01T10:00:00.200+00:00"))
    workers = (worker(0, 1), worker(1, 1), worker(2, -15, stopped=True))
    marks = roster.complete(RunOutcome(tmp_path, workers), plan(tmp_path))
    assert [(m.role, m.reason) for m in marks] == [
        ("victim", "it lost a peer"),
        ("culprit", "its failure is not about a lost peer"),
        ("", ""),
    ]


def test_a_killed_ranks_last_step_and_op_are_read_from_its_files(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    save(layout.roster_mark(0), mark(0, steps=(0,), last_op="old"))
    for step, name in ((0, "dump.json"), (1, "dump.json"), (2, "dump.json.partial")):
        folder = layout.rank_folder(step, 0)
        folder.path.mkdir(parents=True)
        (folder.path / name).write_text(
            f'{{"data": {{\n "Op.a{step}.0.forward": {{}},\n "Op.b{step}.0.forward": {{}},\n "O'
        )
    memory = (MemoryGroup(4_000_000_000, 1), MemoryGroup(4_000_000_000, 2))
    killed = dataclasses.replace(worker(0, -9), peak_memory=3_100_000_000)
    (found,) = roster.complete(RunOutcome(tmp_path, (killed,)), plan(tmp_path), memory)
    assert (found.steps, found.partial_steps, found.last_op) == ((0, 1), (2,), "Op.b2.0.forward")
    assert found.hint == (
        "the memory killer has ended 1 process(es) meanwhile: it held 3.1 GB at most,"
        " the limit of this control group is 4.0 GB"
    )
    lines = roster.failure_lines(RunOutcome(tmp_path, (killed,)), [found], killed)
    assert lines[-1] == found.hint
    assert "rank 0 recorded last: Op.b2.0.forward" in lines


def test_on_a_node_of_victims_the_cause_is_looked_for_elsewhere() -> None:
    lines = roster.failure_lines(RunOutcome(Path("/r"), (worker(0, 1),)), [mark(0, PEER_GONE)], worker(0, 1))
    assert "the first failure is another node's" in lines[-3]


def test_a_rank_that_ended_well_before_the_failure_is_named() -> None:
    workers = (dataclasses.replace(worker(0, 0), ended_at=1.0), dataclasses.replace(worker(1, 1), ended_at=20.0))
    lines = roster.failure_lines(RunOutcome(Path("/r"), workers), [], workers[1])
    assert lines[0] == "rank 0 had ended well before: did it do fewer steps than the others?"


def test_no_culprit_where_nobody_failed_by_itself() -> None:
    assert culprit([worker(0), worker(1, -15, stopped=True)], []) is None


def test_the_line_of_a_whole_run() -> None:
    marks = [mark(rank, steps=(0, 1, 2, 5), calls=1000) for rank in range(8)]
    lines = roster.recorded_lines(RunOutcome(Path("/runs/a")), marks, ALL)
    assert lines == ["recorded by 8 of 8 ranks, steps 0-2, 5, 8,000 calls -> /runs/a"]
    assert roster.is_complete(marks, ALL)


def test_missing_ranks_are_grouped_by_reason_and_losses_summed() -> None:
    gone = [mark(rank, attached=False, note="t.py never imported torch") for rank in (1, 2)]
    marks = [mark(0, lost={"disk full": 3}), *gone, mark(3, lost={"disk full": 4})]
    lines = roster.recorded_lines(RunOutcome(Path("/r")), marks, ALL)
    assert lines[0].startswith("recorded by 2 of 4 ranks, steps 0-1, 20 calls")
    assert lines[1:] == ["missing: ranks 1-2: t.py never imported torch", "lost: 7 calls: disk full"]
    assert not roster.is_complete(marks, ALL)


def test_a_rank_without_a_call_has_not_recorded(tmp_path: Path) -> None:
    marks = [mark(0), mark(1, calls=0, steps=()), mark(2, calls=0, steps=())]
    journal = RunLayout(tmp_path).rank_folder(0, 2).journal  # of a rank that was killed before its mark was written
    journal.parent.mkdir(parents=True)
    journal.touch()
    lines = roster.recorded_lines(RunOutcome(tmp_path), marks, ALL)
    assert lines[0].startswith("recorded by 2 of 3 ranks, steps 0-1, 10 calls")
    assert lines[1:] == ["missing: rank 1: it attached, but no call came in the steps and scope asked for"]


def test_ranks_not_asked_for_are_not_missing() -> None:
    marks = [mark(0), mark(1, recording=False, calls=0)]
    (line,) = roster.recorded_lines(RunOutcome(Path("/r")), marks, NumberSet.parse("0"))
    assert line.startswith("recorded by 1 of 1 ranks (ranks 0 asked for), steps 0-1, 10 calls")


@pytest.mark.parametrize(
    ("marks", "asked", "reason"),
    [
        ([mark(0, calls=0)], "", "1 of 1 ranks attached, but no call came"),
        ([mark(0, attached=False, note="n")], "", "1 of 1 ranks are missing"),
        ([mark(0)], "4", "no rank of 0 is in 4"),
        ([], "", "no worker was started"),
    ],
)
def test_nothing_recorded_is_an_error_with_its_reason(marks: list[RankMark], asked: str, reason: str) -> None:
    line = roster.recorded_lines(RunOutcome(Path("/r")), marks, NumberSet.parse(asked))[0]
    assert line.startswith("ERROR: nothing was recorded: ")
    assert reason in line


def test_the_last_lines_name_the_culprit() -> None:
    text = "ValueError: bad shape\nat /src/t.py:12 in forward\n2026-01-01T10:00:00.2+00:00\nTraceback ..."
    workers = (worker(0, -15, stopped=True), worker(1, -15, stopped=True), worker(2, 1), worker(3, 1))
    marks = [mark(2, text, partial_steps=(3,)), mark(3, PEER_GONE)]
    lines = roster.failure_lines(RunOutcome(Path("/r"), workers), marks, workers[2])
    assert lines[:2] == ["ranks 0-1: stopped by launcher", "rank 3: exited 1"]
    assert lines[2].startswith("rank 2 on ")
    assert lines[2].endswith(" failed first: exited 1 in step 3 (pid 102)")
    assert lines[3:] == ["ValueError: bad shape", "  at /src/t.py:12 in forward"]
