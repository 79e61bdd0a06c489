"""The command lines that torchrun's documentation publishes, run with only the name replaced.

They are read from the installed torch's own documentation, so a release that changes them is tested as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
run = pytest.importorskip("torch.distributed.run")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OURS = [sys.executable, "-m", "msprobe_launch"]

# What a script sees of its launcher, in one piece per rank. Rank 1 fails in the first attempts that may fail.
SCRIPT = """
import json, os, sys, torch
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS", "PYTHONPATH")
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
seen = {name: os.environ.get(name) for name in names}
fails = min(2, int(seen["TORCHELASTIC_MAX_RESTARTS"])) > int(seen["TORCHELASTIC_RESTART_COUNT"])
if not (fails and seen["RANK"] == "0"):  # it may be stopped before it comes to this
    os.write(1, (json.dumps([sys.argv[1:], seen]) + "\\n").encode())
if fails and seen["RANK"] == "1":
    sys.exit(9)
if fails:
    import time
    time.sleep(600)
"""
ARGUMENTS = ["--arg1", "--nnodes=7", "--", "-m", "last one"]


def published() -> dict[str, list[str]]:
    """Title of the section -> tokens after `torchrun`, up to the script's name."""
    blocks = re.findall(r"^([^\n]+)\n\++\n(.*?)^    torchrun\n(.*?)YOUR_TRAINING_SCRIPT\.py", run.__doc__, re.M | re.S)
    return {title.split(" (")[0]: shlex.split(options) for title, _, options in blocks}


def filled(options: list[str]) -> list[str]:
    """The placeholders as a user would fill them for one node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"$NUM_TRAINERS": "2", "$NUM_NODES": "1", "$JOB_ID": "job7", "$HOST_NODE_ADDR": f"localhost:{port}"}
    for name, value in values.items():
        options = [option.replace(name, value) for option in options]
    assert "$" not in " ".join(options)
    return options


def start(program: list[str], options: list[str], folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    argv = [*program, *options, "train.py", *ARGUMENTS]
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Exit code, the ranks' lines in some order that is always the same, stderr."""
    out, err = process.communicate(timeout=200)
    return process.returncode, sorted(out.splitlines()), err


def test_the_documentation_is_read() -> None:
    lines = published()
    assert lines["Single-node multi-worker"] == [
        "--standalone",
        "--nnodes=1",
        "--nproc-per-node=$NUM_TRAINERS",
    ]
    assert {"Stacked single-node multi-worker", "Fault tolerant", "Elastic"} <= set(lines)


# A lone node of an elastic job waits 30 s for others, with either launcher.
SLOW = {"Elastic": pytest.mark.slow, "Fault tolerant": pytest.mark.slow}


@pytest.mark.parametrize("title", [pytest.param(name, marks=SLOW.get(name, ())) for name in published()])
def test_a_published_line_does_the_same_with_the_name_replaced(title: str, tmp_path: Path) -> None:
    options = published()[title]
    theirs = ended(start(TORCHRUN, filled(options), tmp_path / "theirs"))
    ours = ended(start(OURS, filled(options), tmp_path / "ours"))
    assert theirs[0] == ours[0] == 0, ours[2]
    assert ours[1] == theirs[1]
    restarts = 2 if "--max-restarts=3" in options else 0
    assert len(ours[1]) == 2 + restarts
    assert "recorded by 2 of 2 ranks, steps 0," in ours[2]
    assert ("restarted 2 times" in ours[2]) == bool(restarts)


def test_several_jobs_on_one_node_at_once(tmp_path: Path) -> None:
    options = published()["Stacked single-node multi-worker"]
    jobs = [start(OURS, filled(options), tmp_path / name) for name in ("first", "second")]
    for job in jobs:
        code, lines, err = ended(job)
        assert (code, len(lines)) == (0, 2), err
        assert "recorded by 2 of 2 ranks" in err
