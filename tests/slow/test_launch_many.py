"""Many ranks on one machine: every one of them is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark, load

pytestmark = [pytest.mark.slow, pytest.mark.torch]
pytest.importorskip("torch")

RANKS = 64
SCRIPT = """
import os, sys, torch
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "41":
    raise ValueError("rank 41 is the culprit")
if sys.argv[1:] == ["fail"]:
    import time
    time.sleep(600)
"""


def test_64_ranks_record_and_of_64_the_one_that_fails_is_named(
    tmp_path: Path, run_cli: Callable[..., CompletedProcess[str]]
) -> None:
    (tmp_path / "rank.py").write_text(SCRIPT)
    launch = ["-m", "msprobe_launch", "--nproc", str(RANKS), "--shutdown-timeout", "60", "--run-dir"]
    done = run_cli([*launch, "good", "rank.py"], cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    assert f"recorded by {RANKS} of {RANKS} ranks, steps 0, {4 * RANKS} calls" in done.stderr
    layout = RunLayout(tmp_path / "good")
    assert load(layout.manifest, Manifest).world_size == RANKS
    marks = [load(layout.roster_mark(rank), RankMark) for rank in range(RANKS)]
    assert layout.roster_ranks() == list(range(RANKS))
    assert {(mark.ended, mark.exit_code, mark.calls, mark.role) for mark in marks} == {("finished", 0, 4, "")}
    assert len({mark.pid for mark in marks}) == RANKS

    done = run_cli([*launch, "bad", "rank.py", "fail"], cwd=tmp_path, timeout=900)
    assert done.returncode == 1
    assert "failed first: exited 1" in done.stderr.splitlines()[-3]
    assert done.stderr.splitlines()[-2] == "[msprobe] ValueError: rank 41 is the culprit"
    layout = RunLayout(tmp_path / "bad")
    marks = [load(layout.roster_mark(rank), RankMark) for rank in range(RANKS)]
    assert [mark.rank for mark in marks if mark.role == "culprit"] == [41]
    # The failure may come before the last have started: then they are stopped before they have said a word.
    assert {mark.ended for mark in marks if mark.rank != 41} == {"stopped by launcher"}
