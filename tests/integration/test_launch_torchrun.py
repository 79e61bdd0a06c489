"""Whole launches with the installed torch: real ranks, small scripts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import msprobe_launch
from msprobe_launch.cli import EXIT_NOT_RECORDED
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark, load

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

Launch = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path, run_cli: Launch) -> Launch:
    """`msprobe-launch --run-dir <tmp_path>/run` with OUT=<tmp_path>/out, in tmp_path."""
    (tmp_path / "out").mkdir()

    def start(*argv: str | Path, run_dir: str = "run", **env: str) -> CompletedProcess[str]:
        return run_cli(
            ["-m", "msprobe_launch", "--run-dir", run_dir, *argv],
            env={"OUT": str(tmp_path / "out"), **env},
            cwd=tmp_path,
        )

    return start


def script(tmp_path: Path, code: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(code)
    return path


def mark(tmp_path: Path, rank: int, attempt: int = 0, run_dir: str = "run") -> RankMark:
    return load(RunLayout(tmp_path / run_dir, attempt).roster_mark(rank), RankMark)


def outputs(tmp_path: Path, pattern: str) -> list[object]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob(pattern))]


STEPS = """
import os, signal, sys, time, torch
rank = int(os.environ["RANK"])
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_script_owns_its_tokens_and_the_exit_code_is_the_failing_ranks(
    shared: Path, tmp_path: Path, launch: Launch
) -> None:
    case, tokens = shared / "cases" / "p02_args.py", ["--r=16", "--log", "x", "--", "--nnodes", "3", "-m", "foo"]
    done = launch("--nproc", "2", case, *tokens)
    assert done.returncode == 0
    assert outputs(tmp_path, "args_*.json") == [tokens, tokens]
    assert "[msprobe] ERROR: nothing was recorded: 2 of 2 ranks are missing" in done.stderr
    assert "[msprobe] missing: ranks 0-1: p02_args.py never imported torch or mindspore" in done.stderr

    done = launch("--nproc", "2", "--probe-strict", case, "--die", run_dir="died")
    assert done.returncode == 7
    died = mark(tmp_path, 1, run_dir="died")
    assert (died.exit_code, died.ended, died.exception) == (7, "exited 7", "")
    assert mark(tmp_path, 0, run_dir="died").exit_code in (0, -signal.SIGTERM)
    last = done.stderr.splitlines()[-1]
    assert last == f"[msprobe] rank 1 on {socket.gethostname()} failed first: exited 7 (pid {died.pid})"


def test_the_users_sitecustomize_runs_once_in_each_rank(shared: Path, tmp_path: Path, launch: Launch) -> None:
    case, site = shared / "cases" / "p03_site.py", shared / "cases" / "usersite"
    assert launch("--nproc", "2", case, PYTHONPATH=str(site)).returncode == 0
    expected = {
        "runs": 1,
        "pythonpath": str(site),
        "path0": str(case.resolve().parent),
        "site": str(site / "sitecustomize.py"),
        "argv": [str(case)],
    }
    assert outputs(tmp_path, "site_*.json") == [expected, expected]
    for rank in (0, 1):
        found = mark(tmp_path, rank)
        assert (found.attached, found.exit_code, found.ended) == (True, 0, "finished")
        assert found.calls > 0


def test_children_of_a_rank_record_nothing(shared: Path, tmp_path: Path, launch: Launch) -> None:
    import torch

    case = shared / "cases" / "p04_children.py"
    assert launch("--nproc", "2", "--probe-level", "L0", case).returncode == 0
    # The same training without a child: the batches are made beforehand.
    code = (
        case.read_text()
        .partition("    subprocess.run")[0]
        .replace("def main():", "def main():\n    batches = [D()[i] for i in range(8)]")
    )
    code += (
        "    for _ in range(2):\n"
        "        for i in (0, 4):\n"
        "            m(torch.stack(batches[i : i + 4])).sum().backward()\n"
        "    torch.save([p.grad for p in m.parameters()], f\"{os.environ['OUT']}/alone_{os.environ['RANK']}.pt\")\n"
        "main()\n"
    )
    alone = script(tmp_path, code)
    assert launch("--nproc", "2", "--probe-level", "L0", alone, run_dir="alone").returncode == 0
    for rank in (0, 1):
        ops = [recorded_ops(tmp_path / run, rank) for run in ("run", "alone")]
        assert ops[0] == ops[1]
        assert len(ops[0]) > 4
        # Two contexts with two batches each: four forwards of the rank's own model, no helper's.
        assert RunLayout(tmp_path / "run").steps() == [0, 1, 2, 3]
        grads = [torch.load(tmp_path / "out" / f"{name}_{rank}.pt") for name in ("grad", "alone")]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    layout = RunLayout(tmp_path / "run")
    assert layout.roster_ranks() == [0, 1]
    assert {folder.path.name for step in layout.steps() for folder in layout.rank_folders(step)} == {"rank0", "rank1"}


def recorded_ops(run_dir: Path, rank: int) -> list[tuple[int, str]]:
    layout = RunLayout(run_dir)
    folders = [(step, layout.rank_folder(step, rank)) for step in layout.steps()]
    return [(step, op) for step, folder in folders for op in json.loads(folder.dump.read_text())["data"]]


def test_a_shell_wrapper_is_no_obstacle(tmp_path: Path, launch: Launch) -> None:
    path = script(tmp_path, STEPS + "step()\n")
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f"export PYTHONPATH=lib:$PYTHONPATH\n{sys.executable} -c 'print(1)'\n{sys.executable} {path}\n")
    done = launch("--nproc", "2", "--no-python", "bash", wrapper)
    assert done.returncode == 0
    assert "recorded by 2 of 2 ranks, steps 0," in done.stderr


def test_a_rank_out_of_reach_is_counted_missing(tmp_path: Path, launch: Launch) -> None:
    path = script(tmp_path, STEPS + "step()\n")
    done = launch("--nproc", "2", "--no-python", "--probe-strict", sys.executable, "-I", path)
    assert done.returncode == EXIT_NOT_RECORDED
    assert "nothing was recorded: 2 of 2 ranks are missing" in done.stderr
    assert f"missing: ranks 0-1: no mark: {sys.executable} -I ignores PYTHONPATH" in done.stderr
    found = mark(tmp_path, 1)
    assert (found.attached, found.exit_code, found.world_size, found.local_rank) == (False, 0, 2, 1)
    assert found.pid > 0


def test_a_killed_rank_is_the_culprit_and_its_steps_are_there(tmp_path: Path, launch: Launch) -> None:
    code = (
        "for i in range(4):\n    step()\n    if rank == 1 and i == 2:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 0:\n    time.sleep(60)\n"
    )
    done = launch("--nproc", "2", script(tmp_path, STEPS + code))
    assert done.returncode == 128 + signal.SIGKILL
    killed, stopped = mark(tmp_path, 1), mark(tmp_path, 0)
    assert (killed.exit_code, killed.ended, killed.exception) == (-9, "killed by SIGKILL", "")
    assert stopped.ended == "stopped by launcher"
    layout = RunLayout(tmp_path / "run")
    assert [layout.rank_folder(step, 1).is_finished for step in (0, 1)] == [True, True]
    assert (killed.role, stopped.role) == ("culprit", "")
    assert killed.steps[:2] == (0, 1)
    assert killed.last_op
    assert killed.peak_memory > 10_000_000
    lines = done.stderr.splitlines()
    assert lines[-4:-2] == [
        "[msprobe] rank 0: stopped by launcher",
        f"[msprobe] rank 1 recorded last: {killed.last_op}",
    ]
    assert lines[-2].startswith(f"[msprobe] rank 1 on {socket.gethostname()} failed first: killed by SIGKILL")
    assert lines[-1] == f"[msprobe] {killed.hint}"
    assert "out of memory? it held" in killed.hint or "the memory killer has ended" in killed.hint


def test_the_last_lines_are_the_culprits_exception(shared: Path, tmp_path: Path, launch: Launch) -> None:
    case = shared / "cases" / "p01_rootcause.py"
    done = launch("--nproc", "4", case)
    assert done.returncode == 1
    culprit, what, place = done.stderr.splitlines()[-3:]
    assert culprit.startswith(f"[msprobe] rank 2 on {socket.gethostname()} failed first: exited 1 in step 3 (pid ")
    assert what.startswith("[msprobe] RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert place.startswith(f"[msprobe]   at {case}:8 in forward")
    assert [mark(tmp_path, rank).attached for rank in range(4)] == [True] * 4
    # The record's traceback is the script's and torch's; our hooks are in it no more than on the console's last lines.
    assert "site-packages/torch/nn" in mark(tmp_path, 2).exception
    assert str(Path(msprobe_launch.__file__).parent) not in mark(tmp_path, 2).exception


def test_a_restart_gets_a_folder_of_its_own(tmp_path: Path, launch: Launch) -> None:
    code = "step()\nif rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    sys.exit(3)\nstep()\n"
    done = launch("--nproc", "2", "--max-restarts", "1", script(tmp_path, STEPS + code))
    assert done.returncode == 0
    assert mark(tmp_path, 1).exit_code == 3
    assert [mark(tmp_path, rank, attempt=1).exit_code for rank in (0, 1)] == [0, 0]
    assert RunLayout(tmp_path / "run").attempts() == [0, 1]
    calls = sum(mark(tmp_path, rank, attempt=1).calls for rank in (0, 1))
    folder = tmp_path / "run" / "attempt1"
    assert f"recorded by 2 of 2 ranks, steps 0-1, {calls} calls -> {folder}" in done.stderr
    assert "restarted once, earlier attempts are kept beside it" in done.stderr


def test_a_run_directory_is_never_written_over(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("kept")
    done = launch(script(tmp_path, "print('started')"))
    assert done.returncode == 2
    assert "the run directory is not empty: it holds manifest.json" in done.stderr
    assert "--run-dir DIR" in done.stderr
    assert "rm -r" in done.stderr
    assert done.stdout == ""
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["manifest.json"]


def test_the_control_run_has_nothing_of_ours(tmp_path: Path, launch: Launch) -> None:
    code = (
        "import json, os, sys\nprint(json.dumps([sys.path, [k for k in os.environ if 'MSPROBE_RANK' in k],"
        " sys.excepthook is sys.__excepthook__]))\n"
    )
    done = launch("--probe-off", script(tmp_path, code))
    path, variables, plain_hook = json.loads(done.stdout)
    assert not [entry for entry in path if "msprobe_launch" in entry]
    assert (variables, plain_hook) == ([], True)
    assert not (tmp_path / "run").exists()
    assert "probe off" in done.stderr


def test_the_manifest_tells_what_was_started(tmp_path: Path, launch: Launch) -> None:
    import torch

    (tmp_path / "good" / "step0").mkdir(parents=True)
    path = script(tmp_path, STEPS + "step()\n")
    assert launch("--nproc=1", "--probe-bench", "good", "--probe-level=mix", path, "a b").returncode == 0
    manifest = load(RunLayout(tmp_path / "run").manifest, Manifest)
    assert manifest.command[:1] == ("msprobe-launch",)
    assert manifest.command[-2:] == (str(path), "a b")
    assert (manifest.script, manifest.backend, manifest.world_size) == (str(path), "torchrun", 1)
    assert (manifest.bench, manifest.config["level"]) == (str(tmp_path / "good"), "mix")
    assert manifest.versions["torch"] == torch.__version__
    assert set(manifest.versions) == {"python", "torch", "numpy", "msprobe_launch"}


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stderr
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)


def test_a_signal_to_the_launcher_stops_the_ranks_and_is_its_exit_code(tmp_path: Path) -> None:
    path = script(tmp_path, STEPS + "step()\nstep()\nopen('ready', 'w').close()\ntime.sleep(60)\n")
    argv = [sys.executable, "-m", "msprobe_launch", "--run-dir", "run", path]
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_for(tmp_path / "ready", process)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr.splitlines()[-1] == "[msprobe] stopped by SIGTERM"
    found = mark(tmp_path, 0)
    assert (found.attached, found.ended) == (True, "stopped by launcher")
    assert not Path(f"/proc/{found.pid}").exists()


def test_two_nodes_agree_on_one_run_directory(tmp_path: Path) -> None:
    path = script(tmp_path, STEPS + "step()\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    argv = [sys.executable, "-m", "msprobe_launch", "--nnodes", "2", "--nproc", "1"]
    argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = [subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [node.communicate(timeout=100)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    (run_dir,) = (tmp_path / "msprobe_runs").iterdir()
    manifest = load(RunLayout(run_dir).manifest, Manifest)
    assert (manifest.world_size, manifest.nnodes) == (2, "2")
    assert RunLayout(run_dir).roster_ranks() == [0, 1]
    assert all("recorded by 1 of 1 ranks" in error and str(run_dir) in error for error in errors)
