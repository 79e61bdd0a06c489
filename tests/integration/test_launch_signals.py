"""Signals to a launcher that really runs, and its death."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from msprobe_launch.records.layout import RunLayout

sys.path[:0] = [str(Path(__file__).parent)]
from launching import Started, eventually, started  # noqa: E402

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

# A rank that notes the signals it gets and ends at none of them, with a child and a daemon that ignore SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
def note(number, frame):
    with open(f"got{rank}", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    signal.signal(getattr(signal, name), note)
if rank == "0":
    signal.signal(signal.SIGUSR2, note)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
if os.fork() == 0:
    os.setsid()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    os._exit(0)
os.wait()
open(f"ready{rank}", "w").close()
while True:
    time.sleep(600)
"""


def stubborn(tmp_path: Path) -> Path:
    path = tmp_path / "stubborn.py"
    path.write_text(STUBBORN)
    return path


def ready(launch: Started, tmp_path: Path) -> bool:
    launch.await_(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
    return True


def got(tmp_path: Path, rank: int) -> list[str]:
    path = tmp_path / f"got{rank}"
    return path.read_text().split() if path.exists() else []


def test_user_signals_are_passed_on_and_a_killed_launcher_leaves_nobody(tmp_path: Path) -> None:
    with started(tmp_path, "--nproc", "2", "--run-dir", "run", stubborn(tmp_path)) as launch:
        assert ready(launch, tmp_path)
        before = launch.tree()
        assert len(before) == 8  # launcher, guardian, and of each rank: itself, its child, its daemon
        launch.process.send_signal(signal.SIGUSR1)
        assert eventually(lambda: got(tmp_path, 0) == got(tmp_path, 1) == ["SIGUSR1"], 10)
        events = RunLayout(tmp_path / "run").events
        # Sent before that line is written, the next one would be told first.
        assert eventually(lambda: events.exists() and len(events.read_text().splitlines()) == 1, 10)
        # Only rank 0 handles this one; it would end rank 1.
        launch.process.send_signal(signal.SIGUSR2)
        assert eventually(lambda: got(tmp_path, 0) == ["SIGUSR1", "SIGUSR2"], 10)
        assert eventually(lambda: len(events.read_text().splitlines()) == 2, 10)
        texts = [json.loads(line)["text"] for line in events.read_text().splitlines()]
        assert texts == [
            "SIGUSR1 passed on to ranks 0-1",
            "SIGUSR2 passed on to rank 0; rank 1 would not survive it (no handler)",
        ]
        assert launch.tree() == before
        launch.process.kill()
        assert launch.gone_within(10)
        # It is asked before it is ended.
        assert got(tmp_path, 1) == ["SIGUSR1", "SIGTERM"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_that_ends_the_launch_reaches_the_ranks_and_then_the_grace_is_over(tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    argv = ("--nproc", "2", "--run-dir", "run", "--shutdown-timeout", "1", stubborn(tmp_path))
    with started(tmp_path, *argv) as launch:
        assert ready(launch, tmp_path)
        launch.process.send_signal(number)
        code, _, err = launch.finish()
        assert code == 128 + number
        assert err.splitlines()[-1] == f"[msprobe] stopped by {name}"
        assert got(tmp_path, 0)[0] == got(tmp_path, 1)[0] == name
        # The daemons have left their ranks' sessions on purpose, as under torchrun.
        assert eventually(lambda: len(launch.tree()) == 2, 10)


def test_the_signals_that_end_a_launch_are_torchruns_option(tmp_path: Path) -> None:
    argv = ("--nproc", "2", "--run-dir", "run", "--shutdown-timeout", "1", "--signals-to-handle", "SIGTERM,SIGUSR1")
    with started(tmp_path, *argv, stubborn(tmp_path)) as launch:
        assert ready(launch, tmp_path)
        launch.process.send_signal(signal.SIGUSR1)
        code, _, err = launch.finish()
        assert code == 128 + signal.SIGUSR1
        assert err.splitlines()[-1] == "[msprobe] stopped by SIGUSR1"
        assert got(tmp_path, 0)[0] == "SIGUSR1"


# Rank 1 fails and leaves a child behind; rank 0 does not want to end.
FAILS = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
if os.environ["RANK"] == "1":
    os._exit(5)
signal.signal(signal.SIGTERM, lambda *a: None)
while True:
    time.sleep(600)
"""


def test_a_failed_job_leaves_nobody_in_its_sessions_and_the_grace_is_the_option(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    with started(tmp_path, "--nproc", "2", "--run-dir", "run", "--shutdown-timeout", "1", path) as launch:
        code, _, err = launch.finish()
        assert code == 5
        assert "[msprobe] rank 0: stopped by launcher" in err
        assert launch.gone_within(10)


def test_an_interrupt_while_nodes_wait_for_each_other_is_one_line_and_no_obstacle(tmp_path: Path) -> None:
    """Nobody comes: the launcher waits at the rendezvous, where torch minds no signals."""
    (tmp_path / "script.py").write_text("import torch\ntorch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()\n")
    argv = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--run-dir", "run")
    with started(tmp_path, *argv, "script.py") as launch:
        launch.await_(RunLayout(tmp_path / "run").logs.exists)
        time.sleep(1)  # into the waiting itself
        launch.process.send_signal(signal.SIGINT)
        code, _, err = launch.finish()
        assert code == 128 + signal.SIGINT
        assert err.splitlines()[-1] == "[msprobe] stopped by SIGINT"
        assert "Traceback" not in err
        assert launch.gone_within(10)
    with started(tmp_path, "--run-dir", "run", "script.py") as launch:
        code, _, err = launch.finish()
        assert code == 0, err
        assert "recorded by 1 of 1 ranks" in err
