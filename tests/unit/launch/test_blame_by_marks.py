"""Ranks that another launcher started: who began it is told by their marks alone."""

from __future__ import annotations

from pathlib import Path

from msprobe_launch.launch import roster
from msprobe_launch.launch.base import RunOutcome, Worker
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark

PEER = "RuntimeError: [gloo] Connection reset by peer\nat a.py:3 in f\n2026-11-30T00:00:00+00:00\n"


def mark(rank: int, **said: object) -> RankMark:
    given = {"attached": True, "recording": True, "host": "here", "pid": 10 + rank, "world_size": 2, "local_rank": rank}
    return RankMark(rank=rank, **{**given, **said})  # type: ignore[arg-type]


def worker(rank: int) -> Worker:
    return Worker(rank, rank, 2, 0, 10 + rank)


def outcome(run_dir: Path) -> RunOutcome:
    return RunOutcome(run_dir, (worker(0), worker(1)), None, failed=True, exit_code=1)


def test_a_rank_without_a_word_stands_before_one_that_lost_its_peer(tmp_path: Path) -> None:
    marks = [mark(0, exception=PEER), mark(1, partial_steps=(2,))]
    first = roster.culprit(outcome(tmp_path), marks)
    assert first is not None
    assert first.rank == 1
    told = roster._with_roles(marks, outcome(tmp_path).workers)
    assert [(m.role, m.reason) for m in told] == [
        ("victim", "it lost a peer"),
        ("culprit", "it ended without a word, and others miss a peer"),
    ]
    lines = roster.failure_lines(outcome(tmp_path), told, first)
    assert any(line.startswith("rank 0: failed, a victim: it lost a peer") for line in lines)
    assert "failed first: ended without a farewell in step 2" in lines[-1]


def test_an_exception_of_its_own_says_more_than_silence(tmp_path: Path) -> None:
    marks = [mark(0, exception=PEER.replace("RuntimeError: [gloo] Connection reset by peer", "ValueError: x")), mark(1)]
    first = roster.culprit(outcome(tmp_path), marks)
    assert first is not None
    assert first.rank == 0


def test_ranks_without_a_word_alone_are_no_failure(tmp_path: Path) -> None:
    assert roster.culprit(outcome(tmp_path), [mark(0), mark(1)]) is None


def test_the_command_to_type_next(tmp_path: Path) -> None:
    ended = outcome(tmp_path / "my run")
    assert roster.next_lines(ended, [mark(0, calls=3)]) == [f"next: msprobe-aggregate '{tmp_path}/my run'"]
    assert roster.next_lines(ended, [mark(0)]) == []
    RunLayout(tmp_path / "my run").rank_folder(4, 0).path.mkdir(parents=True)
    restarted = RunOutcome(tmp_path / "my run", (Worker(0, 0, 1, 1, 5),), None, failed=True, exit_code=1)
    assert restarted.attempt == 1
    assert roster.next_lines(restarted, [mark(0)]) == [
        f"attempt 0 recorded steps 4. next: msprobe-aggregate '{tmp_path}/my run' --attempt 0"
    ]
