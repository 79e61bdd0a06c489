"""The engine on the toy framework: real files, read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msprobe_launch.adapters.fake import Array, FakeAdapter, Toy
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.capture.session import Session
from msprobe_launch.config import DataMode, Level, NumberSet, ProbeConfig, StepOn
from msprobe_launch.records import journal, roster
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.model import CallRecord
from msprobe_launch.records.names import NameTemplate


def start(folder: Path, **options: Any) -> tuple[Toy, Session]:
    toy = Toy()
    config = ProbeConfig(**{"run_dir": folder, "level": Level.MIX, **options})
    session = Session(config, RankIdentity(0, 0, 1, "here", os.getpid()), FakeAdapter(toy))
    session.install()
    return toy, session


def step(toy: Toy, value: float = 1.0, *, training: bool = True) -> None:
    array = Array([value, -2.0])

    def model(x: Array) -> Array:
        return toy.layer("inner", lambda y: toy.scale(y, 3.0), x)

    toy.layer("net", model, array, training=training)
    if training:
        toy.optimizer_step()


def dump(folder: Path, number: int) -> dict[str, Any]:
    return json.loads(RunLayout(folder).rank_folder(number, 0).dump.read_text())["data"]


def test_a_step_becomes_dump_stack_and_construct(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    step(toy)
    session.finish(clean=True)
    folder = RunLayout(tmp_path).rank_folder(0, 0)
    whole = json.loads(folder.dump.read_text())
    assert {key: whole[key] for key in ("task", "level", "framework", "dump_data_dir")} == {
        "task": "statistics",
        "level": "mix",
        "framework": "toy",
        "dump_data_dir": None,
    }
    assert list(whole["data"]) == ["Toy.scale.0.forward", "Module.inner.Layer.forward.0", "Module.net.Layer.forward.0"]
    scale = whole["data"]["Toy.scale.0.forward"]
    assert scale["input_args"][1] == {"type": "float", "value": 3.0}
    output = scale["output"][0]
    assert (output["Max"], output["Min"], output["Mean"]) == (3.0, -6.0, -1.5)
    assert json.loads(folder.construct.read_text()) == {
        "Toy.scale.0.forward": "Module.inner.Layer.forward.0",
        "Module.inner.Layer.forward.0": "Module.net.Layer.forward.0",
        "Module.net.Layer.forward.0": None,
    }
    assert sorted(path.name for path in folder.path.iterdir()) == ["construct.json", "dump.json", "stack.json"]


def test_numbers_start_again_in_each_step(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    for _ in range(3):
        step(toy)
    session.finish(clean=True)
    assert RunLayout(tmp_path).steps() == [0, 1, 2]
    assert [list(dump(tmp_path, n)) for n in (0, 1, 2)].count(list(dump(tmp_path, 0))) == 3


def test_only_the_steps_asked_for_are_recorded_and_the_adapter_is_let_go(tmp_path: Path) -> None:
    toy, session = start(tmp_path, steps=NumberSet(((1, 1), (3, 3))))
    adapter = session.adapter
    armed = []
    for _ in range(6):
        step(toy)
        armed.append(adapter.armed)
    assert RunLayout(tmp_path).steps() == [1, 3]
    assert armed == [False, True, False, True, False, False]
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert (mark.steps, mark.finished, mark.calls) == ((1, 3), True, 6)


def test_a_rank_that_is_not_asked_for_says_so(tmp_path: Path) -> None:
    toy, _ = start(tmp_path, ranks=NumberSet(((1, 1),)))
    step(toy)
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert not mark.recording
    assert "not among the ranks" in mark.note
    assert RunLayout(tmp_path).steps() == []


def test_evaluation_between_steps_is_left_out_and_can_be_asked_for(tmp_path: Path) -> None:
    for name, evaluation, calls in (("a", False, 1), ("b", True, 2)):
        toy, session = start(tmp_path / name, eval=evaluation)
        step(toy)
        step(toy, training=False)
        step(toy)
        session.finish(clean=True)
        names = [op for op in dump(tmp_path / name, 0) if op.startswith("Module.net")]
        assert len(names) == calls


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"list": ("scale",)}, ["Toy.scale.0.forward"]),
        ({"list": ("Module.inner",)}, ["Toy.scale.0.forward", "Module.inner.Layer.forward.0"]),
        (
            {"scope": ("Module.inner.Layer.forward.0", "Module.inner.Layer.forward.0")},
            ["Toy.scale.0.forward", "Module.inner.Layer.forward.0"],
        ),
    ],
)
def test_filters(tmp_path: Path, options: dict[str, Any], expected: list[str]) -> None:
    toy, session = start(tmp_path, **options)
    step(toy)
    session.finish(clean=True)
    assert list(dump(tmp_path, 0)) == expected


def test_a_filter_that_matched_nothing_is_said(tmp_path: Path) -> None:
    toy, session = start(tmp_path, list=("scael", "Module.inner"))
    step(toy)
    session.finish(clean=True)
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert mark.unseen == {
        "filter 'scael' matched nothing. Did you mean 'scale'? "
        "There was: Module.inner.Layer, Module.net.Layer, Toy.scale.": 1
    }


def test_manual_steps(tmp_path: Path) -> None:
    toy, session = start(tmp_path, step_on=StepOn.MANUAL)
    step(toy)
    step(toy)
    session.end_step()
    step(toy)
    session.finish(clean=True)
    assert [len(dump(tmp_path, n)) for n in (0, 1)] == [6, 3]


def test_nan_and_infinity_are_written_bare(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    step(toy, float("nan"))
    step(toy, float("inf"))
    session.finish(clean=True)
    text = (
        RunLayout(tmp_path).rank_folder(0, 0).dump.read_text() + RunLayout(tmp_path).rank_folder(1, 0).dump.read_text()
    )
    assert '"Max": NaN' in text
    assert '"Max": Infinity' in text


def test_an_odd_value_costs_its_own_record_only(tmp_path: Path) -> None:
    class Odd:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("do not look at me")

    toy, session = start(tmp_path)
    toy.layer("net", lambda x: x, Array([1.0]))
    broken = CallRecord(session.open_call(NameTemplate.of_api("Toy", "odd")), [Odd()], None, None)  # type: ignore[arg-type,list-item]
    session.emit(broken)
    toy.optimizer_step()
    session.finish(clean=True)
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert sum(mark.lost.values()) == 1
    assert mark.partial_steps == (0,)
    assert list(dump(tmp_path, 0)) == ["Module.net.Layer.forward.0"]


def test_a_full_disk_loses_records_and_not_training(tmp_path: Path) -> None:
    """A file where the step's folder should be: every write fails, the toy goes on, the loss is counted."""
    (tmp_path / "step0").write_text("in the way")
    toy, session = start(tmp_path)
    step(toy)
    step(toy)
    session.finish(clean=True)
    assert RunLayout(tmp_path).steps() == [0, 1]
    assert len(dump(tmp_path, 1)) == 3
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert sum(mark.lost.values()) == 3
    assert mark.steps == (1,)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_session import start, step, Array
toy, session = start(Path({folder!r}), flush_records=4)
step(toy)
def model(x):
    for i in range(10):
        x = toy.scale(x, float(i))
    os.kill(os.getpid(), signal.SIGKILL)
toy.layer("net", model, Array([1.0]))
"""


def test_sigkill_in_a_step_leaves_the_finished_steps_and_a_readable_part(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(dump(tmp_path, 0)) == 3
    folder = RunLayout(tmp_path).rank_folder(1, 0)
    assert not folder.dump.exists()
    assert not folder.is_finished
    text, dropped = journal.complete_text(folder.journal.read_text())
    assert dropped == 0
    assert list(json.loads(text)["data"]) == [f"Toy.scale.{i}.forward" for i in range(8)]
    context = journal.read_context(folder.context_journal)
    assert context.ops["Toy.scale.7.forward"][0] == "Module.net.Layer.forward.0"


def test_an_exception_of_the_program_leaves_a_partial_step(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    step(toy)

    def broken(x: Array) -> Array:
        toy.scale(x, 2.0)
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        toy.layer("net", broken, Array([1.0]))
    assert session.modules == []
    session.finish(clean=False)
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert (mark.steps, mark.partial_steps, mark.finished) == ((0,), (1,), False)
    assert RunLayout(tmp_path).rank_folder(1, 0).journal.exists()


def test_data_mode_forward_input_keeps_inputs_only(tmp_path: Path) -> None:
    from msprobe_launch.capture.gate import Gate

    gate = Gate(ProbeConfig(run_dir=tmp_path, data_mode=frozenset({DataMode.FORWARD, DataMode.INPUT})))
    assert (gate.forward, gate.backward, gate.inputs, gate.outputs) == (True, False, True, False)


def test_what_an_earlier_process_of_the_rank_recorded_is_kept(tmp_path: Path) -> None:
    for value in (1.0, 9.0):
        toy, session = start(tmp_path)
        step(toy, value)
        session.finish(clean=True)
    assert dump(tmp_path, 0)["Module.net.Layer.forward.0"]["input_args"][0]["Max"] == 1.0
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert mark.steps == ()
    assert sum(mark.lost.values()) == 3


def test_a_rank_that_hangs_has_written_what_came_before(tmp_path: Path) -> None:
    """Nothing more arrives after three calls; the idle flusher writes them."""
    import time

    toy, session = start(tmp_path, flush_seconds=0.1)
    toy.layer("net", lambda x: toy.scale(toy.scale(x, 2.0), 3.0), Array([1.0]))
    journal_of = RunLayout(tmp_path).rank_folder(0, 0).journal
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (journal_of.exists() and journal_of.read_text().count("\n") >= 4):
        time.sleep(0.05)
    text, _ = journal.complete_text(journal_of.read_text())
    assert len(json.loads(text)["data"]) == 3
    step(toy)
    session.finish(clean=True)
    assert len(dump(tmp_path, 0)) == 6
