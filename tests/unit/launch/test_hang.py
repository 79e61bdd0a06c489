"""From the ranks' answers to the lines that name who waits and who did not come."""

from __future__ import annotations

import os
from pathlib import Path

from msprobe_launch.launch.hang import HangWatch, Where, describe
from msprobe_launch.launch.status import StatusLine
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, save

RUNNING = dict.fromkeys(range(4), 0)


def test_who_waits_who_did_not_come_and_who_does_not_answer() -> None:
    answers = [
        Where(0, 3, "all_reduce", 5, "t.py:9 in f"),
        Where(2, 3, "all_reduce", 5, "t.py:9 in f"),
        Where(1, 3, "", 4, "d.py:2 in load"),
    ]
    assert describe(answers, RUNNING) == [
        "ranks 0, 2 wait in all_reduce (collective 5 of step 3) at t.py:9 in f",
        "rank 1 did not come: in step 3 at d.py:2 in load",
        "rank 3 did not answer: it holds the interpreter lock, or has not got that far",
    ]


def test_a_node_whose_ranks_all_wait_looks_elsewhere() -> None:
    answers = [Where(rank, 0, "barrier", 1, "t.py:1 in f") for rank in RUNNING]
    assert "another node's ranks did not come" in describe(answers, RUNNING)[-1]


def test_steps_that_go_on_are_no_hang_and_what_counts_no_steps_is_not_watched(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    watch = HangWatch(layout, timeout=0.0)
    layout.roster.mkdir()
    assert watch.look({0: os.getpid()}) == []  # has not told a step yet
    layout.pulse(0).write_text("0")
    assert watch.look({0: os.getpid()}) == []
    layout.pulse(0).write_text("1")
    assert watch.look({0: os.getpid()}) == []
    layout.hang_answer(0, 0).parent.mkdir(parents=True)
    layout.hang_answer(0, 0).write_text(
        '{"rank": 0, "step": 1, "last_op": "", "collective": "", "collectives": 0, "at": "x"}'
    )
    head, line = watch.look({0: os.getpid()})
    assert "no rank of this node has ended a step for 0 s" in head
    assert line == "rank 0: in step 1 at x"
    assert watch.look({0: os.getpid()}) == []  # said once
    layout.pulse(0).write_text("over")
    assert watch.look({0: os.getpid()}) == ["the ranks go on"]
    assert watch.look({0: os.getpid()}) == []


def test_the_status_line_counts_what_the_marks_say(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    line = StatusLine(layout, period=None)
    assert line.text([0, 1], now=0.0) == ""
    for rank in (0, 1):
        mark = RankMark(rank=rank, attached=True, steps=(0, rank + 1), calls=50, bytes=1_500_000, lost={"disk": rank})
        save(layout.roster_mark(rank), mark)
    text = line.text([0, 1, 2], now=1e9)
    assert text.startswith("step 1-2, 2 of 3 ranks record, ")
    assert text.endswith(" calls/s, 3.0 MB written, 1 calls lost")
