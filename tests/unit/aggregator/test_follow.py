"""The comparison beside a running job: what is complete is compared once, and said once. On hand-made runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aggregator.follow import Follower
from aggregator.stopping import ORDERED_BY_US
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout

STAMP = "20260101000000"


@pytest.fixture
def put(write_dump: Callable[..., Path], make_tensor: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """Write a rank of a step: three calls, the second of which has this output."""

    def write(run: str, step: int, rank: int, value: float = 1.0, *, complete: bool = True, attempt: int = 0) -> Path:
        one, other = make_tensor(1.0), make_tensor(value)
        names = [f"Functional.f{i}.0.forward" for i in range(3)]
        ops = {name: {"input_args": [one], "input_kwargs": {}, "output": [one]} for name in names}
        ops[names[1]]["output"] = [other]
        ops["Module.a.Block.forward.0"] = {"input_args": [one], "input_kwargs": {}, "output": [other]}
        folder = RunLayout(tmp_path / run, attempt).rank_folder(step, rank)
        write_dump(folder.path, ops, dict.fromkeys(names, "Module.a.Block.forward.0"))
        if not complete:
            folder.dump.rename(folder.journal)
        return folder.path

    return write


@pytest.fixture
def follow(tmp_path: Path) -> Callable[..., Any]:
    """A follower of run `t` against `b`, and the list of what it says."""

    def make(stop_at: int | None = None, task: str = "statistics") -> tuple[Follower, list[tuple[str, str]]]:
        config = {"task": task, "control_seconds": 1.0}
        layout = RunLayout(tmp_path / "t")
        layout.root.mkdir(exist_ok=True)
        roster.save(layout.manifest, roster.Manifest((), "t.py", "torchrun", "now", 2, config=config))
        for rank in (0, 1):
            roster.save(layout.roster_mark(rank), roster.RankMark(rank, True, world_size=2))
        said: list[tuple[str, str]] = []
        follower = Follower(
            tmp_path / "t",
            tmp_path / "b",
            stop_at,
            lambda kind, text, *_, **__: said.append((kind, text)) if kind != "progress" else None,
            STAMP,
        )
        follower.start()
        follower.attempt(0, (0, 1))
        return follower, said

    return make


def texts(said: list[tuple[str, str]], kind: str) -> list[str]:
    return [text for kind_, text in said if kind_ == kind]


def test_what_is_complete_is_compared_once_and_merged(put: Any, follow: Any, tmp_path: Path) -> None:
    for step in (0, 1):
        for rank in (0, 1):
            put("b", step, rank)
    put("t", 0, 0)
    put("t", 0, 1, complete=False)
    follower, said = follow()
    assert follower.look()
    assert not follower.look()
    out = tmp_path / "t/aggregate/inrun"
    assert [path.name for path in (out / "step0").iterdir()] == [f"compare_result_rank0_{STAMP}.csv"]
    put("t", 0, 1)
    (tmp_path / "t/step0/rank1/dump.json.partial").unlink()
    assert follower.look()
    assert {path.name for path in (out / "step0").iterdir()} == {
        f"compare_result_rank0_{STAMP}.csv",
        f"compare_result_rank1_{STAMP}.csv",
        "merged",
    }
    assert (out / "step0/merged/Max_diff.csv").is_file()
    assert said == []
    follower.end()
    assert said == [("done", f"in-run: 2 of 2 dumps compared, steps 0 of ranks 0-1: 0 findings -> {out}")]
    summary = json.loads(next(out.glob("inrun-*.json")).read_text())
    assert (summary["compared"], summary["findings"], summary["first"], summary["ranks"]) == (2, 0, None, [0, 1])


def test_the_first_divergence_is_one_line_with_the_next_command(put: Any, follow: Any, tmp_path: Path) -> None:
    for step in (0, 1, 2):
        for rank in (0, 1):
            put("b", step, rank)
            put("t", step, rank, 1.0 + 0.01 * (step > 0) * (rank > 0))
    follower, said = follow()
    while follower.look():
        pass
    (line,) = texts(said, "divergence")
    item = "Functional.f1.0.forward.output.0"
    assert line.startswith(f"FIRST DIVERGENCE: rank 1, step 1: {item}: norm 1.01 against 1, 1 % apart")
    assert line.endswith(f"next: msprobe-aggregate {tmp_path / 't'} --steps 1")
    # A restart is said once, and has a first divergence of its own.
    put("t", 0, 0, 2.0, attempt=1)
    for _ in range(2):
        follower.attempt(1, (0, 1))
    follower.look()
    assert texts(said, "divergence")[1].startswith("FIRST DIVERGENCE of attempt 1: rank 0, step 0: ")
    assert texts(said, "note") == [
        f"in-run: attempt 1 is compared from its beginning, into {tmp_path / 't/aggregate/inrun/attempt1'}"
    ]
    assert (tmp_path / f"t/aggregate/inrun/attempt1/step0/compare_result_rank0_{STAMP}.csv").is_file()


def test_what_the_bench_lacks_and_what_is_unreadable_is_said_once(put: Any, follow: Any, tmp_path: Path) -> None:
    put("b", 0, 0)
    for step in range(4):
        for rank in (0, 1):
            path = put("t", step, rank)
    follower, said = follow()
    (tmp_path / "t/step0/rank0/dump.json").write_text("{")
    follower.look()
    assert [text.split(":")[1].strip() for text in texts(said, "note")] == [
        "rank 0, step 0 is not compared",
        "the bench has no rank 1 in step 0 (it has 0)",
        "the bench has no step 1 (it has 0)",
    ]
    assert path.exists()
    follower.end()
    assert texts(said, "done") == ["in-run: 0 of 8 dumps compared"]


def test_after_n_findings_values_are_ordered_and_recording_stops(put: Any, follow: Any, tmp_path: Path) -> None:
    for step in range(8):
        for rank in (0, 1):
            put("b", step, rank)
    for rank in (0, 1):
        put("t", 0, rank)
        put("t", 1, rank, 1.5)
    follower, said = follow(stop_at=3)
    follower.look()
    control = tmp_path / "t/control.yaml"
    lines = control.read_text().splitlines()
    # A module that holds others would take all of them along.
    names = ", ".join(f"Functional.f{i}.0.forward" for i in range(3))
    assert lines[0] == ORDERED_BY_US
    assert lines[3] == f"tensor_list: {names}"
    first, last = (int(number) for number in lines[2].removeprefix("steps: ").split("-"))
    assert 1 < first < last
    assert "4 findings (--probe-stop-at-divergence 3): recording stops, training goes on" in texts(said, "stop")[0]
    # The values of one rank are not enough.
    for rank in (0, 1):
        put("t", first, rank, 1.5)
        assert "record: off" not in control.read_text()
        follower.look()
        (tmp_path / f"t/step{first}/rank{rank}/dump_tensor_data").mkdir()
    follower.look()
    assert control.read_text().splitlines()[2:] == ["record: off"]
    assert texts(said, "stop")[1].startswith(f"in-run: recording has stopped; the values of step {first} are in ")
    follower.end()
    summary = json.loads(next((tmp_path / "t/aggregate/inrun").glob("inrun-*.json")).read_text())["stop"]
    assert (summary["after"], summary["state"], summary["step_with_values"]) == (4, "stopped", first)


def test_a_rank_that_comes_later_may_have_been_first(put: Any, follow: Any, tmp_path: Path) -> None:
    """Rank 1 took a wrong value in at its module's end; rank 0, which made it, ends its step later."""
    for rank in (0, 1):
        put("b", 0, rank)
    one, other = put("t", 0, 1, 1.5), tmp_path / "t/step0/rank1/dump.json"
    dump = json.loads(other.read_text())
    dump["data"]["Functional.f1.0.forward"]["output"] = dump["data"]["Functional.f0.0.forward"]["output"]
    other.write_text(json.dumps(dump))
    follower, said = follow()
    follower.look()
    put("t", 0, 0, 1.5)
    put("t", 1, 0, complete=False)
    follower.look()
    follower.end()
    first, corrected = texts(said, "divergence")
    assert first.startswith("FIRST DIVERGENCE: rank 1, step 0: Module.a.Block.forward.0.output.0: ")
    assert "(not compared yet in this step: rank 0)" in first
    assert corrected.startswith("FIRST DIVERGENCE, corrected: rank 0, step 0: Functional.f1.0.forward.output.0: ")
    assert texts(said, "done")[0].endswith("; not among them, since unfinished: step 1 of rank 0")
    summary = json.loads(next((one.parents[1] / "aggregate/inrun").glob("inrun-*.json")).read_text())
    assert summary["first"]["rank"] == 0


def test_what_has_been_settled_stays(put: Any, follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `overall.first` names another item than the earliest, findings of later steps do not turn it back."""
    from aggregator.analyse import overall

    for step in (0, 1):
        for rank in (0, 1):
            put("b", step, rank)
    real = overall.first

    def later(compared: Any, divergence_at: Any) -> Any:
        culprit = divergence_at(compared[1], compared[1].rows - 1)  # the module's output
        return overall.First(culprit, real(compared, divergence_at).culprit)

    monkeypatch.setattr(overall, "first", later)
    follower, said = follow()
    for step in (0, 1):
        for rank in (0, 1):
            put("t", step, rank, 1.5)
        follower.look()
    follower.end()
    assert [text.split(": ")[2] for text in texts(said, "divergence")] == [
        "Functional.f1.0.forward.output.0",
        "Module.a.Block.forward.0.output.0",
    ]


def test_a_rank_that_is_behind_is_waited_for(put: Any, follow: Any, tmp_path: Path) -> None:
    """It has recorded nothing yet when the orders are given."""
    for step in range(8):
        put("b", step, 0)
    put("t", 1, 0, 1.5)
    follower, _ = follow(stop_at=1)
    follower.look()
    control = tmp_path / "t/control.yaml"
    first = int(control.read_text().splitlines()[2].removeprefix("steps: ").split("-")[0])
    for rank in (0, 1):
        put("t", first, rank, 1.5)
        (tmp_path / f"t/step{first}/rank{rank}/dump_tensor_data").mkdir()
        follower.look()
        assert ("record: off" in control.read_text()) is (rank == 1)


@pytest.mark.parametrize(
    ("task", "said_of_it"), [("tensor", "values of all its ops in "), ("structure", "no values (task structure)")]
)
def test_other_tasks_stop_at_once(put: Any, follow: Any, tmp_path: Path, task: str, said_of_it: str) -> None:
    put("b", 0, 0)
    put("t", 0, 0, 2.0)
    follower, said = follow(stop_at=1, task=task)
    follower.look()
    assert said_of_it in texts(said, "stop")[0]
    assert (tmp_path / "t/control.yaml").read_text().splitlines()[2:] == ["record: off"]


def test_orders_of_a_person_stay(put: Any, follow: Any, tmp_path: Path) -> None:
    put("b", 0, 0)
    put("t", 0, 0, 2.0)
    follower, said = follow(stop_at=1)
    (tmp_path / "t/control.yaml").write_text("every: 2\n")
    follower.look()
    assert (tmp_path / "t/control.yaml").read_text() == "every: 2\n"
    assert "has orders of its own and stays as it is" in texts(said, "stop")[0]


def test_the_process_ends_with_its_input(put: Any, follow: Any, tmp_path: Path) -> None:
    put("b", 0, 0)
    put("t", 0, 0)
    command = [sys.executable, "-m", "aggregator.follow", tmp_path / "t", "--bench", tmp_path / "b"]
    told = '{"attempt": 0, "ranks": [0]}\n'
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, check=True)
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert kinds == ["progress", "done"]
    done = subprocess.run([*command[:-1], tmp_path], input="", capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stdout.splitlines()
    assert done.returncode == 4
    assert json.loads(line)["text"].startswith("in-run: nothing is compared: ")
