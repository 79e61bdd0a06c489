"""The command's own face: help, version, errors, dry run. No worker is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_launch import __version__
from msprobe_launch.cli import main


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
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSPROBE_LAUNCH_STEPS", "0-3")
    Path("probe.yaml").write_text("level: mix\n")
    argv = ["--dry-run", "--nproc", "2", "--probe-config", "probe.yaml", "--run-dir", "r", "t.py", "a b"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "torchrun --nproc-per-node 2 t.py 'a b'" in out
    assert "PYTHONPATH=" in out
    assert "level = mix  ('level' in probe.yaml)" in out
    assert "steps = 0-3  (MSPROBE_LAUNCH_STEPS)" in out
    assert f"run_dir = {tmp_path / 'r'}  (--run-dir)" in out
    assert "task = statistics  (default)" in out
    assert not Path("r").exists()
