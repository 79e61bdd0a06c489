"""--probe-bench on real launches: compared while it runs, whatever becomes of the process that compares."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from msprobe_launch.launch.follow import HURRY_SECONDS

sys.path.insert(0, str(Path(__file__).resolve().parent))
from launching import started

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # eight launches of two ranks

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "inrun.py"
STEPS = 40
ITEM = "Tensor.__mul__.0.forward.input.1"


@pytest.fixture(scope="module")
def bench(run_cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("inrun")
    done = run_cli(
        ["-m", "msprobe_launch", "--nproc", "2", "--run-dir", root / "bench", PROGRAM, str(STEPS), "0", "-1"], cwd=root
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "bench"


def ours(err: str) -> list[str]:
    return [line.removeprefix("[msprobe] ") for line in err.splitlines() if line.startswith("[msprobe] ")]


def follower(launch: Any) -> int | None:
    for pid in launch.tree():
        if b"aggregator.follow" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return None


def test_a_fault_is_told_while_the_job_runs_and_recording_stops(tmp_path: Path, bench: Path) -> None:
    options = ("--nproc", "2", "--run-dir", "t", "--probe-bench", bench, "--probe-stop-at-divergence", "3")
    with started(tmp_path, *options, PROGRAM, str(STEPS), "0.3", "3") as launch:
        launch.await_(lambda: "FIRST DIVERGENCE" in launch.err.read_text())
        pid = follower(launch)
        assert pid is not None
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        code, out, err = launch.finish()
    assert code == 0
    assert "rank 0 trained 40 steps" in out
    assert "rank 1 trained 40 steps" in out
    said = ours(err)
    run = tmp_path / "t"
    assert f"FIRST DIVERGENCE: rank 1, step 3: {ITEM}: norm 1.01 against 1, 1 % apart" in said[0]
    assert said[0].endswith(f"next: msprobe-aggregate {run} --steps 3")
    assert "(--probe-stop-at-divergence 3): recording stops, training goes on" in said[1]
    kept = re.search(r"the values of step (\d+) are in", said[2])
    assert kept is not None
    for rank in (0, 1):
        names = {path.name.split(".forward")[0] for path in (run / f"step{kept[1]}/rank{rank}").rglob("*forward*.pt")}
        assert names == {"Functional.relu.0", "Tensor.__mul__.0", "Functional.linear.1"}
    assert len(list(run.glob("step*"))) < STEPS
    dumps = len(list(run.glob("step*/rank*/dump.json")))
    assert any(
        re.match(rf"in-run: {dumps} of {dumps} dumps compared, steps 0-.* of ranks 0-1: ", line) for line in said
    )
    assert len(list(run.glob("aggregate/inrun/step*/compare_result_rank*.csv"))) == dumps
    assert [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()] == [
        "divergence", "stop", "stop",
    ]  # fmt: skip


def test_restarts_and_what_the_bench_lacks(tmp_path: Path, run_cli: Any, bench: Path) -> None:
    short = tmp_path / "short"
    for step in (0, 1):
        for rank in (0, 1):
            if (step, rank) != (1, 1):
                source, folder = bench / f"step{step}/rank{rank}", short / f"step{step}/rank{rank}"
                folder.mkdir(parents=True)
                for path in source.iterdir():
                    (folder / path.name).write_bytes(path.read_bytes())
    line = ["-m", "msprobe_launch", "--nproc", "2", "--max-restarts", "1", "--run-dir", "t", "--probe-bench", short]
    done = run_cli([*line, PROGRAM, "5", "0.1", "-1", "3"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = ours(done.stderr)
    assert sorted(line for line in said if line.startswith("in-run: ") and " dumps compared" not in line) == [
        f"in-run: attempt 1 is compared from its beginning, into {tmp_path / 't/aggregate/inrun/attempt1'}",
        "in-run: the bench has no rank 1 in step 1 (it has 0): not compared",
        "in-run: the bench has no step 2 (it has 0-1): such steps are not compared",
    ]
    assert any(re.match(r"in-run: 6 of 1[0-9] dumps compared, steps 0-1 of ranks 0-1: 0 findings", s) for s in said)


def test_a_comparison_that_dies_does_not_touch_the_training(tmp_path: Path, bench: Path) -> None:
    with started(
        tmp_path, "--nproc", "2", "--run-dir", "t", "--probe-bench", bench, PROGRAM, "20", "0.2", "-1"
    ) as launch:
        launch.await_(lambda: list((tmp_path / "t").glob("aggregate/inrun/step*")))
        pid = follower(launch)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        code, out, err = launch.finish()
    said = ours(err)
    assert (code, out.count("trained 20 steps")) == (0, 2)
    assert said.count("in-run: the comparison ended with code -9; training goes on") == 1
    assert any(
        re.fullmatch(rf"in-run: \d+ dumps were compared; the rest: msprobe-aggregate {tmp_path}/t", s) for s in said
    )


def test_a_comparison_that_cannot_begin(tmp_path: Path, run_cli: Any, bench: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/pyarrow.py").write_text("raise ImportError('not for this Python')\n")
    line = ["-m", "msprobe_launch", "--nproc", "1", "--run-dir", "t", "--probe-bench", bench]
    done = run_cli([*line, PROGRAM, "2", "0", "-1"], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "bad")})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ended with code 1 (ImportError: not for this Python); training goes on" in done.stderr


def test_the_end_of_a_launch_is_not_held_up(tmp_path: Path, bench: Path) -> None:
    """SIGTERM to the launcher, and a comparison that does not move: nothing is left of the tree in short time."""
    with started(
        tmp_path, "--nproc", "1", "--run-dir", "t", "--probe-bench", bench, PROGRAM, "400", "0.1", "-1"
    ) as launch:
        launch.await_(lambda: list((tmp_path / "t").glob("aggregate/inrun/step*")))
        pid = follower(launch)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        os.kill(launch.process.pid, signal.SIGTERM)
        code, _, err = launch.finish()
        assert launch.gone_within(5.0)
    assert code == 128 + signal.SIGTERM
    assert any(f"in the {HURRY_SECONDS:g} s that the launcher waits at its end" in line for line in ours(err))
