"""Launches that cannot start: one clear error, exit code 2, and the name of the run directory is free again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, save

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

Launch = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path, run_cli: Launch) -> Launch:
    (tmp_path / "script.py").write_text("import torch\ntorch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()\n")

    def start(*argv: str | Path, **env: str) -> CompletedProcess[str]:
        return run_cli(["-m", "msprobe_launch", "--run-dir", "runs/new", *argv], cwd=tmp_path, env=env)

    return start


REFUSED = {
    "a port that is no number": (["--master-port", "abc", "script.py"], "argument --master-port/--master_port: inv"),
    "a port that is too high": (["--master-port", "99999", "script.py"], "must be an integer between 0 and 65536."),
    "an empty script name": ([""], "the script's name is empty. Is it a variable that is not set?"),
    "an empty module name": (["-m", " "], "the script's name is empty."),
    "streams that do not exist": (["--redirects", "9", "script.py"], "torchrun's options: 9 does not match"),
    "an unknown rendezvous": (["--rdzv-backend", "nope", "script.py"], "backend 'nope' is not registered"),
    "fewer restarts than none": (["--max-restarts", "-1", "script.py"], "max_restarts must be >= 0"),
    "a name that is too long": (["--run-dir", "d" * 256, "script.py"], "File name too long"),
    "a program that is not there": (["--no-python", "--tee", "3", "./no"], "./no cannot be started: No such file"),
    "a program without the right": (["--no-python", "./script.py"], "./script.py cannot be started: Permission d"),
    "a command that is not there": (["--backend", "command", "--", "no-srun"], "no-srun cannot be started: No such"),
    "a backend that is not there": (["--backend", "torchrnu", "script.py"], "argument --backend: invalid choice"),
    "a value left out": (["--nproc"], "argument --nproc: expected one argument"),
}


@pytest.mark.parametrize(("argv", "expected"), REFUSED.values(), ids=REFUSED)
def test_one_error_exit_code_2_and_a_free_name(argv: list[str], expected: str, launch: Launch, tmp_path: Path) -> None:
    done = launch(*argv)
    assert done.returncode == 2
    assert expected in done.stderr
    lines = [line for line in done.stderr.splitlines() if "torch/distributed/run.py" not in line]
    assert len(lines) <= 2, done.stderr
    assert all(line.startswith("[msprobe] ") for line in lines)
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_a_bad_variable_of_torchruns(launch: Launch) -> None:
    done = launch("script.py", PET_STANDALONE="maybe")
    assert done.returncode == 2
    assert "[msprobe] one of torchrun's variables (PET_*): " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_retry_under_the_same_name_works(launch: Launch, tmp_path: Path) -> None:
    assert launch("--master-port", "99999", "script.py").returncode == 2
    # A launch that was killed before its ranks started has not tidied up.
    (RunLayout(tmp_path / "runs/new").logs / "none_1/attempt_0/0").mkdir(parents=True)
    done = launch("script.py")
    assert done.returncode == 0, done.stderr
    assert "recorded by 1 of 1 ranks" in done.stderr
    # Now it is a run.
    done = launch("script.py")
    assert done.returncode == 2
    assert "the run directory is not empty" in done.stderr


def test_what_somebody_else_has_there_stays(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "runs/new").mkdir(parents=True)
    os.chmod(tmp_path / "runs", 0o755)
    assert launch("--master-port", "99999", "script.py").returncode == 2
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs/new"]  # it was there before
    assert list((tmp_path / "runs/new").iterdir()) == []
    logs = RunLayout(tmp_path / "runs/new").logs
    logs.mkdir()
    (logs / "stderr.log").write_text("somebody's")
    done = launch("script.py")
    assert done.returncode == 2
    assert "it holds logs" in done.stderr
    assert (logs / "stderr.log").read_text() == "somebody's"


def test_a_bench_must_be_a_run(launch: Launch, tmp_path: Path) -> None:
    for name in ("runs/trusted", "msprobe/dump"):
        (tmp_path / name).mkdir(parents=True)
    save(RunLayout(tmp_path / "runs/trusted").manifest, Manifest(command=(), script="", backend="", started=""))
    (tmp_path / "runs/trusted/step0/rank0").mkdir(parents=True)
    (tmp_path / "runs/trusty").mkdir()
    (tmp_path / "msprobe/dump/step3/rank0").mkdir(parents=True)
    trusted = f"Did you mean '{tmp_path}/runs/trusted'?"
    for bench, hint in {
        "runs/trusty": trusted,
        "runs": trusted,
        "runs/trusted/step0": trusted,
        ".": "Name the --run-dir of a trusted run.",
        "runs/trustd": "Did you mean 'trusted'?",
    }.items():
        done = launch("--probe-bench", bench, "script.py")
        assert done.returncode == 2, bench
        assert "--probe-bench: " in done.stderr
        assert hint in done.stderr, bench
        assert not (tmp_path / "runs/new").exists()
    for bench in ("runs/trusted", "msprobe/dump"):
        assert launch("--dry-run", "--probe-bench", bench, "script.py").returncode == 0
