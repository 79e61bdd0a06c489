"""What the launcher says at the end of filters that matched nothing, and of ranks that stopped recording."""

from __future__ import annotations

from pathlib import Path

from msprobe_launch.config import NumberSet
from msprobe_launch.launch import roster
from msprobe_launch.launch.base import RunOutcome
from msprobe_launch.records.roster import RankMark

SAID = "filter 'linaer' matched nothing. Did you mean 'linear'? There was: {}."


def lines(*marks: RankMark) -> list[str]:
    return roster.recorded_lines(RunOutcome(Path("run"), ()), marks, NumberSet())[1:]


def test_a_filter_that_matched_on_no_rank_is_an_error() -> None:
    marks = [RankMark(rank, True, calls=3, unseen={SAID.format(f"Functional.op{rank}"): 1}) for rank in range(3)]
    assert lines(*marks) == [f"ERROR: {SAID.format('Functional.op0')}"]


def test_a_filter_that_matched_on_one_rank_is_none() -> None:
    """Under pipeline parallelism a module is on one rank only."""
    assert lines(RankMark(0, True, calls=3, unseen={SAID.format("x"): 1}), RankMark(1, True, calls=3)) == []


def test_ranks_that_stopped_at_the_byte_limit_are_named_together() -> None:
    note = "stopped in step 2: its share is used up"
    assert lines(*(RankMark(rank, True, calls=3, note=note) for rank in range(3))) == [f"ranks 0-2: {note}"]
