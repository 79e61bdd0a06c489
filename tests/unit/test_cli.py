"""The command's own face: help, version, errors, dry run. No worker is started."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from msprobe_launch import __version__
from msprobe_launch.bootstrap import variables
from msprobe_launch.cli import main
from msprobe_launch.config import Level, ProbeConfig
from msprobe_launch.launch.injection import SITE
from msprobe_launch.launch.settings import FIELDS


def test_help_fits_60_columns_and_has_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert out.isascii()
    assert "msprobe-launch --nproc 8 --probe-level mix train.py" in out
    for option in ("--run-dir", "--nproc", "--backend", "--probe-bench", "--probe-off", "--probe-strict"):
        assert option in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"msprobe-launch {__version__}\n"


def test_no_arguments_show_the_help_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: msprobe-launch" in captured.err


pytest_torch = pytest.mark.torch


@pytest_torch
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--probe-setps", "1", "t.py"], "unknown option --probe-setps. Did you mean '--probe-steps'?"),
        (["--nproc", "2"], "no script was named."),
        (["--nproc", "2", "--nproc_per_node=4", "t.py"], "Leave out one of them."),
        (["--probe-level", "L7", "t.py"], "--probe-level: unknown value 'L7'."),
        (["--probe-steps", "", "t.py"], "--probe-steps: must not be empty; where it is left out, all are meant."),
        (["--probe-stop-at-divergence", "5", "t.py"], "--probe-stop-at-divergence needs --probe-bench RUN_DIR"),
        (["--probe-stop-at-divergence", "", "t.py"], "--probe-stop-at-divergence: must not be empty."),
        (["--probe-stop-at-divergence", "0", "t.py"], "--probe-stop-at-divergence: '0' is no whole number of at least"),
        (["--probe-config", "no.json", "t.py"], "no.json: cannot be read: No such file or directory"),
        (["--run-path", "--run-dir", "new", "/t.py"], "--run-path runs the script inside a process"),
        (["--nnodes", "two", "--run-dir", "new", "t.py"], "torchrun's options: invalid literal"),
        (["--nproc", "many", "--run-dir", "new", "t.py"], "Unsupported nproc_per_node value: many"),
        (["--probe-ranks", "5", "--run-dir", "new", "t.py"], "--probe-ranks 5 picks none of the ranks 0-0."),
    ],
)
def test_usage_errors_exit_2_with_the_reason(
    argv: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert not Path("new").exists()


@pytest_torch
def test_an_unknown_variable_names_the_near_miss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MSPROBE_LAUNCH_LEVLE", "mix")
    assert main(["t.py"]) == 2
    expected = "unknown variable MSPROBE_LAUNCH_LEVLE. Did you mean 'MSPROBE_LAUNCH_LEVEL'?"
    assert expected in capsys.readouterr().err


@pytest_torch
def test_dry_run_shows_command_environment_and_where_each_setting_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every setting has exactly one line, whichever of the four places it came from."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSPROBE_LAUNCH_STEPS", "0-3")
    monkeypatch.setenv("MSPROBE_LAUNCH_LEVEL", "L0")  # beaten by the flag
    monkeypatch.setenv("MSPROBE_LAUNCH_STRICT", "1")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("t.py").touch()
    Path("probe.yaml").write_text("task: structure\nstep: [7]\nstructure:\n  list: [linear]\n")
    argv = ["--dry-run", "--nproc", "2", "--probe-config", "probe.yaml", "--run-dir", "r", "--probe-level", "mix"]
    argv += ["--probe-hang-timeout", "30", "t.py", "a b"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "backend: torchrun",
        "command: torchrun --nproc-per-node 2 t.py 'a b'",
        f"each rank: {sys.executable} -u t.py 'a b'",
        "ranks: 2 on this node, nodes: 1:1, restarts: 2",
        "torchrun's option from the environment: PET_MAX_RESTARTS=2",
    ]
    environment = dict(
        shlex.split(line)[0].split("=", 1)
        for line in lines[lines.index("recording:") - 1 : 5 : -1]
        if line.startswith("  ")
    )
    assert environment["PYTHONPATH"] == str(SITE)
    assert (environment[variables.ATTEMPT], environment[variables.HANG]) == ("0", "1")
    assert ProbeConfig.from_json(environment[variables.CONFIG]).level is Level.MIX
    shown = {}
    for line in lines[lines.index("recording:") :]:
        if match := re.fullmatch(r"  (\w+) = (.*)  \((.*)\)", line):
            assert match[1] not in shown
            shown[match[1]] = (match[2], match[3])
    assert shown.pop("level") == ("mix", "--probe-level")
    assert shown.pop("steps") == ("0-3", "MSPROBE_LAUNCH_STEPS")
    assert shown.pop("task") == ("structure", "'task' in probe.yaml")
    assert shown.pop("list") == ("linear", "'list' in 'structure' of probe.yaml")
    assert shown.pop("run_dir") == (str(tmp_path / "r"), "--run-dir")
    assert shown.pop("strict") == ("True", "MSPROBE_LAUNCH_STRICT")
    assert shown.pop("hang_timeout") == ("30.0", "--probe-hang-timeout")
    rest = {*ProbeConfig(run_dir=tmp_path).as_dict(), *FIELDS}
    rest -= {"level", "steps", "task", "list", "run_dir", "strict", "hang_timeout"}
    assert set(shown) == rest
    assert {source for _, source in shown.values()} == {"default"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probe.yaml", "t.py"]
    assert "OMP_NUM_THREADS" not in os.environ


@pytest_torch
def test_dry_run_of_another_launcher_and_of_the_control_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--backend", "command", "--", "sh", "-c", "python t.py"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("backend: command\ncommand: sh -c 'python t.py'\nranks: those that the command numbers\n")
    assert f"  {variables.CONFIG}=" in out
    Path("t.py").touch()
    assert main(["--dry-run", "--probe-off", "t.py"]) == 0
    out = capsys.readouterr().out
    assert "probe off (--probe-off): nothing is injected" in out
    assert variables.CONFIG not in out
    assert [path.name for path in tmp_path.iterdir()] == ["t.py"]


@pytest_torch
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["no-such.py"], "no-such.py: there is no such file, seen from "),
        (["--nproc", "many", "t.py"], "Unsupported nproc_per_node value: many"),
        (["--redirects", "9", "t.py"], "torchrun's options: 9 does not match"),
        (["--backend", "command", "no-such-launcher"], "there is no such command"),
        (["--run-dir", "taken", "t.py"], "the run directory is not empty: it holds file"),
        (["--probe-ranks", "5", "t.py"], "--probe-ranks 5 picks none of the ranks 0-0."),
    ],
)
def test_dry_run_refuses_what_a_launch_would(
    argv: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert main(["--dry-run", *argv]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""
