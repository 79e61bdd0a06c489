"""Jobs of two MindSpore workers: the case p10, and a scheduler that leaves nothing behind, whoever starts it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # a cluster takes 10 to 30 s to come up and to go

# As many do on one machine: never calls init(). msrun's scheduler runs the script as well, and trains.
WITHOUT_INIT = """
import os, sys
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
ms.set_device("CPU")
ms.set_context(mode=ms.PYNATIVE_MODE)
net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 1))
optimizer = nn.SGD(net.trainable_params(), 0.1)
step = ms.value_and_grad(lambda x: net(x).mean(), None, optimizer.parameters)
for _ in range(3):
    loss, gradients = step(Tensor(np.ones((2, 4), np.float32)))
    optimizer(gradients)
print("ran as", os.environ.get("MS_ROLE"), flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def msrun(python: Path, log: Path) -> list[Any]:
    """The installed msrun for two workers, as one types it."""
    options = ["--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"]
    return [python.parent / "msrun", *options, f"--log_dir={log}"]


def launched(how: str, python: Path, run_dir: Path, script: Path, *probe: str) -> list[Any]:
    """One of three ways to start two workers."""
    command: list[Any] = ["-m", "msprobe_launch", "--run-dir", run_dir, *probe]
    if how == "command":
        return [*command, "--backend", "command", "--", *msrun(python, run_dir.parent / "log"), script]
    # The installed msrun's own port is one for all: another test's job may have it.
    who = ["--probe-msrun", "exec", f"--master_port={free_port()}"] if how == "exec" else []
    return [*command, "--backend", "msrun", "--nproc", "2", *who, script]


def check_ranks(run_dir: Path, steps: int) -> None:
    """Two ranks, their three steps, and nothing of a third process."""
    assert sorted(path.name for path in (run_dir / "roster").iterdir()) == ["rank0.json", "rank1.json"]
    found = sorted(path.name for path in run_dir.glob("step*"))
    assert found == [f"step{number}" for number in range(steps)]
    files = ["construct.json", "dump.json", "stack.json"]
    for step in found:
        assert sorted(path.name for path in (run_dir / step).iterdir()) == ["rank0", "rank1"]
        for rank in (0, 1):
            assert sorted(path.name for path in (run_dir / step / f"rank{rank}").iterdir()) == files
    for rank in (0, 1):
        mark = json.loads((run_dir / "roster" / f"rank{rank}.json").read_text())
        assert (mark["attached"], mark["lost"], mark["partial_steps"]) == (True, {}, [])
        assert mark["steps"] == list(range(steps))


def test_p10(run_mindspore: Any, mindspore_python: Path, shared: Path, tmp_path: Path) -> None:
    script = shared / "cases" / "p10_ms.py"
    results = {}
    for how in ("bare", "L0", "own", "exec", "command"):
        out, run_dir = tmp_path / how, tmp_path / f"run-{how}"
        out.mkdir()
        level = ("--probe-level", "L0" if how == "L0" else "mix")
        command = (
            [*msrun(mindspore_python, tmp_path / "log-bare"), script]
            if how == "bare"
            else launched(how, mindspore_python, run_dir, script, *level)
        )
        done = run_mindspore(command, env={"OUT": str(out)}, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        results[how] = [path.read_text() for path in sorted(out.iterdir())]
        if how != "bare":
            check_ranks(run_dir, 3)
    assert len(results["bare"]) == 2
    assert all(found == results["bare"] for found in results.values()), results

    for step, rank in ((0, 0), (2, 1)):
        data = json.loads((tmp_path / "run-own" / f"step{step}" / f"rank{rank}" / "dump.json").read_text())["data"]
        first = data["Cell.a.Two.forward.0"]
        assert first["input_kwargs"] == {"scale": {"type": "float", "value": 0.5}}
        whole, rest = first["output"]
        assert whole["shape"] == rest["side"]["shape"] == [4, 6]
        assert list(rest) == ["side"]
        # `b` gets what `a` gave under both names, by way of an addition.
        assert data["Cell.b.Two.forward.0"]["input_kwargs"] == {}
        # A gradient for each of the two outputs, in their order.
        assert [item["shape"] for item in data["Cell.a.Two.backward.0"]["input"]] == [[4, 6], [4, 6]]
        reduced = [op for name, op in data.items() if name.startswith("Distributed.all_reduce.")]
        assert len(reduced) == 10  # parameters
        assert {tuple(op["input_kwargs"]["group"]["group_ranks"]) for op in reduced} == {(0, 1)}


@pytest.mark.parametrize("how", ["own", "exec", "command"])
def test_the_scheduler_leaves_nothing_in_a_ranks_folder(
    run_mindspore: Any, mindspore_python: Path, tmp_path: Path, how: str
) -> None:
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(WITHOUT_INIT)
    command = launched(how, mindspore_python, run_dir, script, "--probe-level", "mix")
    done = run_mindspore(command, cwd=tmp_path)
    logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    ran = [line.partition("ran as ")[2].strip() for line in logs.splitlines() if "ran as " in line]
    # msrun's scheduler is a third run of the script; ours never runs it.
    assert sorted(ran) == (["MS_WORKER"] * 2 if how == "own" else ["MS_SCHED", "MS_WORKER", "MS_WORKER"])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_ranks(run_dir, 3)
