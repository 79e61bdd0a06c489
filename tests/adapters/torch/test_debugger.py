"""PrecisionDebugger in scripts that msprobe's users have: only the import is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

# As for msprobe, but for the first import.
SCRIPT = """
import sys, types, torch
from torch import nn
from msprobe_launch import PrecisionDebugger, seed_all
seed_all(seed=7, mode=True)
first = torch.rand(1).item()
seed_all(7, deterministic=True)
assert first == torch.rand(1).item() and torch.are_deterministic_algorithms_enabled()
torch.use_deterministic_algorithms(False)
mine = types.ModuleType("mine")
mine.double = lambda x: x * 2
debugger = PrecisionDebugger(config_path=sys.argv[1])
assert PrecisionDebugger() is debugger and PrecisionDebugger(config_path=sys.argv[1]) is debugger
try:
    PrecisionDebugger(config_path=sys.argv[1], level="L1")
except Exception as error:
    print("SECOND", error)
PrecisionDebugger.register_custom_api(mine, "double")
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 3))                      # before start: not recorded
for i in range(3):
    PrecisionDebugger.start(model=net)
    y = net(mine.double(torch.ones(5, 3)))
    debugger.save({"y": y, "n": [1, None]}, "out")
    PrecisionDebugger.save(y.detach(), "plain", save_backward=False)
    if i == 1:
        debugger.forward_backward_dump_end()
    y.sum().backward()
    optimizer.step()
    debugger.stop()
    net(torch.ones(1, 3))                  # after stop: neither
    debugger.step()
debugger.restore_custom_api()
assert mine.double.__name__ == "<lambda>" and not hasattr(mine.double, "__wrapped__")
for call in (lambda: debugger.save(1, 2), lambda: debugger.set_init_step(-1), lambda: debugger.register_custom_api(mine, "x"),
             lambda: seed_all(seed="1"), lambda: seed_all(rm_dropout=True)):
    try:
        call()
    except Exception as error:
        print("WRONG", error)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, run_cli: Any) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "program.py").write_text(SCRIPT)
    config = {"task": "statistics", "level": "mix", "dump_path": str(folder / "dump"), "rank": [], "step": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    environ = {"RANK": "0", "WORLD_SIZE": "1"}
    done = run_cli([folder / "program.py", folder / "config.json"], env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "dump", done.stdout


def data(folder: Path, step: int, name: str = "dump.json") -> dict[str, Any]:
    return json.loads((folder / f"step{step}" / "rank0" / name).read_text())["data"]


def test_recording_is_from_start_to_stop_in_the_steps_asked_for(alone: tuple[Path, str]) -> None:
    folder, _ = alone
    assert sorted(path.name for path in folder.glob("step*")) == ["step0", "step1"]
    whole, forward = data(folder, 0), data(folder, 1)
    assert "Tensor.sum.0.forward" in whole  # after forward_backward_dump_end in the other
    assert [name for name in whole if ".forward" in name and "sum" not in name] == list(forward)
    assert "Module.0.Linear.forward.1" not in whole
    assert any("backward" in name for name in whole)


def test_a_function_of_the_script_is_recorded_by_its_name(alone: tuple[Path, str]) -> None:
    folder, _ = alone
    assert data(folder, 0)["mine.double.0.forward"]["output"][0]["Max"] == 2.0


def test_saved_variables_and_their_gradients(alone: tuple[Path, str]) -> None:
    saved = data(alone[0], 0, "debug.json")
    assert list(saved) == ["out.0.debug", "out_grad.0.debug", "plain.0.debug"]
    assert saved["out.0.debug"]["n"] == [{"type": "int", "value": 1}, None]
    assert (saved["out_grad.0.debug"]["y"]["Max"], saved["out_grad.0.debug"]["n"]) == (1.0, [None, None])


def test_wrong_arguments_are_said(alone: tuple[Path, str]) -> None:
    said = alone[1].splitlines()
    assert said[0] == (
        "SECOND PrecisionDebugger has been constructed in this process with other arguments: level='L1' (first: None)."
    )
    assert [line.split(":")[0] for line in said if line.startswith("WRONG")] == [
        "WRONG save",
        "WRONG set_init_step",
        "WRONG register_custom_api",
        "WRONG seed_all",
        "WRONG seed_all",
    ]


def test_under_the_launcher_its_settings_stand_and_the_script_steps(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    config = {"task": "statistics", "level": "mix", "dump_path": str(tmp_path / "unused"), "rank": [], "step": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = tmp_path / "run"
    command = ["-m", "msprobe_launch", "--nproc", "1", "--run-dir", run, "--probe-steps", "1"]
    done = run_cli([*command, tmp_path / "program.py", tmp_path / "config.json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in run.glob("step*")) == ["step1"]
    assert not (tmp_path / "unused").exists()
    recorded = data(run, 1)
    assert "mine.double.0.forward" in recorded
    assert not any(name.startswith("Module") for name in recorded)
    assert "level 'L1' instead of 'mix'" in done.stdout + done.stderr
    assert "recorded by 1 of 1 ranks, steps 1" in done.stderr


def test_importing_the_debugger_brings_no_framework(run_cli: Any) -> None:
    code = (
        "import sys; from msprobe_launch import PrecisionDebugger; print({*sys.modules} & {'torch', 'numpy', 'yaml'})"
    )
    assert run_cli(["-c", code]).stdout == "set()\n"
