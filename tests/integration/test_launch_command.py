"""Ranks that another launcher starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from msprobe_launch.launch import pth
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark, load

sys.path[:0] = [str(Path(__file__).parent)]
from launching import started  # noqa: E402

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

Launch = Callable[..., "CompletedProcess[str]"]

STEPS = """
import os, sys, torch
model = torch.nn.Linear(3, 2)
for _ in range(2):
    model(torch.ones(1, 3)).sum().backward()
"""
# Stands for srun: two tasks with what SLURM sets; `--same` gives both one number.
SRUN = """#!/bin/sh
second=1
while [ "${1#-}" != "$1" ]; do
    [ "$1" = --same ] && second=0
    shift
done
SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=$second SLURM_NTASKS=2 SLURM_LOCALID=1 "$@" & other=$!
wait $first; code=$?
wait $other || code=$?
exit $code
"""


@pytest.fixture
def launch(tmp_path: Path, run_cli: Launch) -> Launch:
    (tmp_path / "steps.py").write_text(STEPS)
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)

    def start(*argv: str | Path, before: tuple[str, ...] = (), **env: str) -> CompletedProcess[str]:
        tokens = ["-m", "msprobe_launch", "--run-dir", "run", *before, "--backend", "command", "--", *argv]
        return run_cli(tokens, cwd=tmp_path, env=env)

    return start


def mark(tmp_path: Path, rank: int) -> RankMark:
    return load(RunLayout(tmp_path / "run").roster_mark(rank), RankMark)


def test_srun_numbers_the_ranks_and_a_batch_scripts_own_number_is_nobodys(launch: Launch, tmp_path: Path) -> None:
    # In a batch script these are set for the launcher itself.
    done = launch("./srun", "-n2", sys.executable, "steps.py", SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_LOCALID="0")
    assert done.returncode == 0
    assert "recorded by 2 of 2 ranks, steps 0-1," in done.stderr
    found = [mark(tmp_path, rank) for rank in (0, 1)]
    assert [(m.rank, m.local_rank, m.world_size, m.ended) for m in found] == [
        (0, 0, 2, "finished"),
        (1, 1, 2, "finished"),
    ]
    manifest = load(RunLayout(tmp_path / "run").manifest, Manifest)
    assert manifest.backend == "command"


def test_two_processes_of_one_number_are_both_reported(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS + "import time; time.sleep(3)\n")
    done = launch("./srun", "--same", sys.executable, "steps.py", before=("--probe-strict",))
    assert done.returncode == 70
    (claim,) = RunLayout(tmp_path / "run").claims()
    first, second, host = mark(tmp_path, 0).pid, load(claim, RankMark).pid, socket.gethostname()
    line = (
        f"rank 0 is claimed by two: process {first} on {host} (recorded) and process {second} on {host} (not recorded)"
    )
    assert line in done.stderr
    assert "missing: rank 1: no mark: its environment did not come from here" in done.stderr
    assert "srun: leave --export=NONE out" in done.stderr


def test_the_exit_code_is_the_commands_and_the_exception_is_told(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS + "if os.environ['SLURM_PROCID'] == '1':\n    raise ValueError('no')\n")
    done = launch("./srun", sys.executable, "steps.py")
    assert done.returncode == 1
    place = f"[msprobe]   at {tmp_path}/steps.py:7 in <module>"
    assert done.stderr.splitlines()[-2:] == ["[msprobe] ValueError: no", place]


def test_a_python_script_without_a_launcher_keeps_the_numbers_it_was_given(launch: Launch, tmp_path: Path) -> None:
    done = launch(sys.executable, "steps.py", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 0
    assert "recorded by 1 of 2 ranks" in done.stderr
    assert mark(tmp_path, 1).calls > 0


def test_a_variable_named_by_the_user_numbers_the_ranks(launch: Launch, tmp_path: Path) -> None:
    code = f"for i in 0 1; do TASK=$i {sys.executable} steps.py; done"
    done = launch("sh", "-c", code, before=("--probe-rank-variable", "TASK"))
    assert "recorded by 2 of 2 ranks" in done.stderr


def test_nobody_numbered_is_an_error_with_its_reasons(launch: Launch) -> None:
    done = launch("sh", "-c", f"{sys.executable} steps.py", before=("--probe-strict",))
    assert done.returncode == 70
    assert "no process left a mark. Either nothing numbers the processes (RANK, OMPI_COMM_WORLD_RANK," in done.stderr


def test_a_signal_goes_through_the_command_to_its_ranks(tmp_path: Path) -> None:
    code = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(3))\n"
    code += "open('ready' + os.environ['RANK'], 'w').close()\ntime.sleep(60)\n"
    (tmp_path / "wait.py").write_text(code)
    command = f"trap 'exit 4' TERM; RANK=0 {sys.executable} wait.py & RANK=1 setsid {sys.executable} wait.py & wait"
    argv = ("--run-dir", "run", "--backend", "command", "--shutdown-timeout", "2", "--", "sh", "-c", command)
    with started(tmp_path, *argv) as launch:
        launch.await_(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        launch.process.send_signal(signal.SIGTERM)
        code_, _, err = launch.finish()
        assert code_ == 128 + signal.SIGTERM
        assert err.splitlines()[-1] == "[msprobe] stopped by SIGTERM"
        assert launch.gone_within(10)


@pytest.mark.slow
def test_install_pth_reaches_an_isolated_python_and_goes_again(tmp_path: Path, run_cli: Launch) -> None:
    """In a virtual environment of its own, which sees this one's packages."""
    import venv

    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = pth.place(str(python)).parent
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    (tmp_path / "steps.py").write_text(STEPS)
    launch = ["-m", "msprobe_launch", "--nproc", "1", "--no-python", "--probe-strict", "--run-dir"]
    isolated = [python, "-I", "steps.py"]
    done = run_cli([*launch, "before", *isolated], cwd=tmp_path)
    assert done.returncode == 70
    assert "Leave -I out, or: msprobe-launch install-pth" in done.stderr
    done = run_cli(["-m", "msprobe_launch", "install-pth", "--python", python], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_cli([*launch, "after", *isolated], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "recorded by 1 of 1 ranks" in done.stderr
    # Both ways at once record once.
    done = run_cli([*launch, "both", python, "steps.py"], cwd=tmp_path)
    assert "recorded by 1 of 1 ranks" in done.stderr
    assert not RunLayout(tmp_path / "both").claims()
    done = run_cli(["-m", "msprobe_launch", "uninstall-pth", "--python", python], cwd=tmp_path)
    assert done.returncode == 0
    assert not pth.place(str(python)).exists()


# -- real launchers


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@pytest.mark.slow
@needs("accelerate")
def test_accelerate_launch(launch: Launch, tmp_path: Path) -> None:
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    script = tmp_path / "accelerated.py"
    script.write_text(
        "from accelerate import Accelerator\nimport torch\n"
        "a = Accelerator(cpu=True)\nm = a.prepare(torch.nn.Linear(3, 2))\n"
        "for _ in range(2):\n    a.backward(m(torch.ones(1, 3)).sum())\nassert a.num_processes == 2\n"
    )
    module = [sys.executable, "-m", "accelerate.commands.launch", *options, "--dynamo_backend", "no"]
    done = launch(*module, script)
    assert done.returncode == 0, done.stderr
    assert "recorded by 2 of 2 ranks" in done.stderr


@pytest.mark.slow
@needs("deepspeed")
def test_deepspeed(launch: Launch) -> None:
    bin_folder = Path(sys.executable).parent
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    done = launch(bin_folder / "deepspeed", "--num_gpus", "2", "--no_local_rank", "steps.py", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "recorded by 2 of 2 ranks" in done.stderr


@pytest.mark.slow
@needs("mpi4py")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun (Debian's openmpi-bin) is not installed")
def test_mpirun_with_mpi4py(launch: Launch, tmp_path: Path) -> None:
    code = "from mpi4py import MPI\nassert MPI.COMM_WORLD.size == 2\n"
    (tmp_path / "steps.py").write_text(code + STEPS)
    done = launch("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "steps.py")
    assert done.returncode == 0, done.stderr
    assert "recorded by 2 of 2 ranks" in done.stderr
