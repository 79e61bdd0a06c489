"""Filters, step rules, control.yaml, the byte limit and saved variables, on the toy framework: real files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from msprobe_launch.adapters.fake import Array, DeviceArray, FakeAdapter, Toy
from msprobe_launch.capture import earlier
from msprobe_launch.capture.control import Orders, parse
from msprobe_launch.capture.gate import Gate
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.capture.session import Session
from msprobe_launch.config import Level, NumberSet, ProbeConfig, Task
from msprobe_launch.errors import ConfigError
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout


def start(folder: Path, **options: Any) -> tuple[Toy, Session]:
    toy = Toy()
    config = ProbeConfig(**{"run_dir": folder, "level": Level.MIX, "control_seconds": 0.0, **options})
    session = Session(config, RankIdentity(0, 0, 1, "here", os.getpid()), FakeAdapter(toy))
    session.install()
    return toy, session


def step(toy: Toy, array: Array | None = None) -> None:
    def model(x: Array) -> Array:
        return toy.layer("inner", lambda y: toy.scale(y, 3.0), x)

    toy.layer("net", model, array if array is not None else Array([1.0, -2.0]))
    toy.optimizer_step()


def names(folder: Path, number: int) -> list[str]:
    return list(json.loads(RunLayout(folder).rank_folder(number, 0).dump.read_text())["data"])


def mark(folder: Path) -> roster.RankMark:
    return roster.load(RunLayout(folder).roster_mark(0), roster.RankMark)


# -- names


def gate(folder: Path, **options: Any) -> Gate:
    return Gate(ProbeConfig(run_dir=folder, level=Level.MIX, **options))


def test_a_full_name_is_not_a_part_of_another(tmp_path: Path) -> None:
    found = gate(tmp_path, list=("Module.fc.Linear.forward.1",))
    assert found.enters("Module.fc.Linear.forward.1", [])
    assert not found.enters("Module.fc.Linear.forward.10", [])


def test_an_expression_in_msprobes_form(tmp_path: Path) -> None:
    found = gate(tmp_path, list=("name-regex(conv\\dd)",))
    assert found.enters("Functional.conv2d.0.forward", [])
    assert not found.enters("Functional.convxd.0.forward", [])


def test_a_backward_name_picks_the_backward_record_alone(tmp_path: Path) -> None:
    found = gate(tmp_path, list=("Functional.linear.0.backward",))
    forward, backward = "Functional.linear.0.forward", "Functional.linear.0.backward"
    assert found.enters(forward, [])  # watched, so that its backward is seen
    assert not found.keeps(forward, forward, False)
    assert found.keeps(backward, forward, True)
    assert not found.keeps("Functional.relu.0.backward", "Functional.relu.0.forward", True)


def test_a_scope_may_run_from_a_forward_to_a_backward(tmp_path: Path) -> None:
    found = gate(tmp_path, scope=("Functional.b.0.forward", "Functional.b.0.backward"))
    kept = []
    for op in "abc":
        name = f"Functional.{op}.0.forward"
        found.enters(name, [])
        kept += [name] if found.keeps(name, name, False) else []
        found.leaves(name)
    for op in "cba":
        forward, name = f"Functional.{op}.0.forward", f"Functional.{op}.0.backward"
        kept += [name] if found.keeps(name, forward, True) else []
    assert [name[11:] for name in kept] == ["b.0.forward", "c.0.forward", "c.0.backward", "b.0.backward"]
    assert found.unmatched() == []


def test_steps_that_never_came_are_said(tmp_path: Path) -> None:
    toy, session = start(tmp_path, steps=NumberSet.parse("7-9"))
    step(toy)
    step(toy)
    session.finish(clean=True)
    assert mark(tmp_path).unseen == {"filter 'steps 7-9' matched nothing. The program ended in step 1.": 1}


# -- steps by rule, and orders to a running job


def test_every_start_and_stop(tmp_path: Path) -> None:
    toy, session = start(tmp_path, every=3, start=1, stop=7)
    for _ in range(12):
        step(toy)
    session.finish(clean=True)
    assert RunLayout(tmp_path).steps() == [1, 4, 7]
    assert mark(tmp_path).finished


def test_a_running_job_is_switched_off_on_and_to_another_level(tmp_path: Path) -> None:
    toy, session = start(tmp_path, steps=NumberSet.parse("0"))
    control = RunLayout(tmp_path).control
    step(toy)
    step(toy)
    control.write_text("record: on\nlevel: L0\n")
    step(toy)
    step(toy)
    control.write_text("record: off   # enough\n")
    step(toy)
    step(toy)
    control.unlink()
    step(toy)
    session.finish(clean=True)
    # The file is looked at where a step begins.
    assert RunLayout(tmp_path).steps() == [0, 2, 3]
    header = json.loads(RunLayout(tmp_path).rank_folder(2, 0).dump.read_text())
    assert header["level"] == "L0"
    assert mark(tmp_path).steps == (0, 2, 3)


def test_a_running_job_is_told_to_save_values(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    control = RunLayout(tmp_path).control
    step(toy)
    control.write_text("steps: 2-3\ntensor_list: Toy.scale.0.forward, Toy.nowhere\n")
    step(toy)
    step(toy)
    control.write_text("record: on\n")
    step(toy)
    step(toy)
    session.finish(clean=True)
    assert RunLayout(tmp_path).steps() == [0, 2, 3, 4]
    saved = {n: RunLayout(tmp_path).rank_folder(n, 0).tensors for n in (0, 2, 3, 4)}
    assert [n for n, folder in saved.items() if folder.is_dir()] == [2]
    assert sorted(path.name for path in saved[2].iterdir()) == [
        "Toy.scale.0.forward.input.0.json",
        "Toy.scale.0.forward.output.0.json",
    ]
    # Orders may be for a step that never comes: that they matched nothing is no error of the run.
    assert not any("nowhere" in reason for reason in mark(tmp_path).unseen)


def test_wrong_orders_change_nothing_and_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy, session = start(tmp_path)
    RunLayout(tmp_path).control.write_text("recrod: off\n")
    step(toy)
    session.finish(clean=True)
    assert RunLayout(tmp_path).steps() == [0]
    assert any("Did you mean 'record'?" in reason for reason in mark(tmp_path).unseen)
    assert mark(tmp_path).lost == {}


def test_orders_are_read_without_a_yaml_package() -> None:
    found = parse("---\nrecord: auto\nsteps: [5000, '5002-5004']\nevery: 2\n", "control.yaml")
    assert found == Orders(None, None, NumberSet.parse("5000,5002-5004"), 2)
    for text, reason in (
        ("record: perhaps", "Known: on, off, auto"),
        ("level: L7", "unknown level 'L7'"),
        ("every: 0", "at least 1"),
        ("on", "no line such as 'record: on'"),
        ("steps: 9-1", "runs backwards"),
        ("tensor_list: name-regex(x)", "is no name or part of a name"),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse(text, "control.yaml")


# -- values and their limit


def test_values_are_named_after_their_items(tmp_path: Path) -> None:
    toy, session = start(tmp_path, task=Task.TENSOR)
    step(toy)
    session.finish(clean=True)
    folder = RunLayout(tmp_path).rank_folder(0, 0)
    files = {path.name: json.loads(path.read_text()) for path in folder.tensors.iterdir()}
    assert files["Toy.scale.0.forward.input.0.json"] == [1.0, -2.0]
    assert files["Toy.scale.0.forward.output.0.json"] == [3.0, -6.0]
    assert "GB" in mark(tmp_path).forecast
    assert mark(tmp_path).bytes > 1200 * len(files)


def test_the_byte_limit_stops_recording_and_is_reported(tmp_path: Path) -> None:
    toy, session = start(tmp_path, task=Task.TENSOR, max_bytes=20_000, flush_records=1)
    for _ in range(10):
        step(toy)
    assert not session.listening
    session.finish(clean=True)
    found = mark(tmp_path)
    assert found.note.startswith("stopped in step 2: this rank's share of --probe-max-bytes 20,000 is used up")
    assert (found.steps, found.partial_steps) == ((0, 1), (2,))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.json*") if "roster" not in path.parts)
    assert size < 20_000


def test_the_byte_limit_holds_for_steps_that_are_smaller_than_a_flush(tmp_path: Path) -> None:
    toy, session = start(tmp_path, max_bytes=20_000)
    for _ in range(100):
        step(toy)
    session.finish(clean=True)
    found = mark(tmp_path)
    assert "--probe-max-bytes 20,000 is used up" in found.note
    assert 5 < len(found.steps) < 50
    assert found.partial_steps == ()
    size = sum(path.stat().st_size for path in tmp_path.rglob("step*/rank0/*.json"))
    assert found.bytes == pytest.approx(size, rel=0.1)
    assert 20_000 <= size < 24_000


def test_values_that_cannot_be_written_lose_themselves_only(tmp_path: Path) -> None:
    toy, session = start(tmp_path, task=Task.TENSOR)
    folder = RunLayout(tmp_path).rank_folder(0, 0)
    folder.path.mkdir(parents=True)
    folder.tensors.write_text("in the way")
    step(toy)
    session.finish(clean=True)
    assert len(names(tmp_path, 0)) == 3
    found = mark(tmp_path)
    assert found.partial_steps == (0,)
    assert found.unseen["tensor whose values could not be written"] > 3


def test_a_device_is_waited_for_once_a_step(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    before = DeviceArray.transfers
    step(toy, DeviceArray([1.0, 2.0]))
    assert DeviceArray.transfers == before
    session.finish(clean=True)
    assert DeviceArray.transfers == before + 1
    data = json.loads(RunLayout(tmp_path).rank_folder(0, 0).dump.read_text())["data"]
    assert data["Toy.scale.0.forward"]["output"][0]["Max"] == 6.0


def test_nothing_is_recorded_while_a_graph_is_captured(tmp_path: Path) -> None:
    toy, session = start(tmp_path)

    def model(x: Array) -> Array:
        toy.scale(x, 2.0)
        session.graph_begins()
        toy.scale(x, 3.0)
        session.graph_ends()
        return toy.scale(x, 4.0)

    toy.layer("net", model, DeviceArray([1.0]))
    session.finish(clean=True)
    assert names(tmp_path, 0) == ["Toy.scale.0.forward", "Toy.scale.1.forward", "Module.net.Layer.forward.0"]
    assert mark(tmp_path).unseen == {"captured graph of a device: nothing inside is recorded": 1}


# -- the script in control


def test_the_script_says_where_recording_starts_stops_and_steps(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    session.manual.take()
    step(toy)  # not started yet
    for _ in range(2):
        session.manual.start()
        toy.scale(Array([1.0]), 2.0)  # outside all layers: recorded, the script wants it
        step(toy)
        session.manual.stop()
        step(toy)
        session.manual.step()
    session.finish(clean=True)
    assert RunLayout(tmp_path).steps() == [0, 1]
    for number in (0, 1):
        assert names(tmp_path, number) == [
            "Toy.scale.0.forward",
            "Toy.scale.1.forward",
            "Module.inner.Layer.forward.0",
            "Module.net.Layer.forward.0",
        ]


def test_saved_variables_are_counted_by_name_and_step(tmp_path: Path) -> None:
    _, session = start(tmp_path, level=Level.DEBUG, task=Task.TENSOR)
    session.manual.take()
    session.manual.start()
    for number in (1.0, 2.0):
        session.manual.save("x", {"a": Array([number]), "n": [3, None]}, True)
    session.manual.step()
    session.manual.save("x", Array([5.0]), False)
    session.finish(clean=True)
    folder = RunLayout(tmp_path).rank_folder(0, 0)
    found = json.loads(folder.debug.read_text())
    assert found["level"] == "debug"
    assert list(found["data"]) == ["x.0.debug", "x_grad.0.debug", "x.1.debug", "x_grad.1.debug"]
    assert found["data"]["x.1.debug"]["a"]["data_name"] == "x.1.debug.a.json"
    assert found["data"]["x_grad.1.debug"] == {"a": None, "n": [None, None]}
    assert json.loads((folder.tensors / "x.1.debug.a.json").read_text()) == [2.0]
    assert not folder.dump.exists()
    assert mark(tmp_path).steps == (0, 1)


def test_a_run_into_a_used_folder_sets_the_earlier_one_aside(tmp_path: Path) -> None:
    toy, session = start(tmp_path)
    step(toy)
    session.finish(clean=True)
    earlier.set_aside(tmp_path, 1)
    assert names(tmp_path, 0)
    earlier.set_aside(tmp_path, 0)
    assert RunLayout(tmp_path).rank_folders(0) == []
    assert len(list(tmp_path.glob("earlier/*/step0/rank0/dump.json"))) == 1
