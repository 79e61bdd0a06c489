"""Real launches: neutrality on two ranks, collectives, the cases, a killed rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

# What the C++ runtime prints when torch's gloo threads outlive their process group, now and then, also without us
# (seen under --probe-off): such a run says nothing of the probe and is made again, once.
GLOO_ABORT = "terminate called without an active exception"

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture(autouse=True)
def _needs_torch() -> None:
    pytest.importorskip("torch")


@pytest.fixture
def launch(run_cli: Any, tmp_path: Path) -> Any:
    """`launch(script, *args, probe=[...])` -> (finished process, run directory)."""

    def run(script: Path, *args: object, probe: tuple[str, ...] = (), nproc: int = 2, env: Any = None) -> Any:
        run_dir = tmp_path / "run"
        command = ["-m", "msprobe_launch", "--nproc", str(nproc), "--run-dir", str(run_dir), *probe]
        return run_cli([*command, str(script), *map(str, args)], env=env, cwd=tmp_path, timeout=280), run_dir

    return run


def hashes(folder: Path) -> dict[str, dict[str, str]]:
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))}
    assert len(found) == 2
    return found


@pytest.fixture(scope="module")
def bare(run_cli: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Hashes of all programs under plain torchrun."""
    out = tmp_path_factory.mktemp("bare")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = run_cli([*command, PROGRAMS / "neutral.py", out], timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return hashes(out)


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_training_is_bit_identical_with_the_probe_on(launch: Any, tmp_path: Path, bare: Any, level: str) -> None:
    done, run_dir = launch(PROGRAMS / "neutral.py", tmp_path / "out", probe=("--probe-level", level))
    assert done.returncode == 0, done.stderr[-3000:]
    probed = hashes(tmp_path / "out")
    different = [(rank, name) for rank in bare for name in bare[rank] if bare[rank][name] != probed[rank][name]]
    assert different == []
    assert len(bare["rank0.json"]) >= 20
    for rank in (0, 1):
        mark = json.loads((run_dir / "roster" / f"rank{rank}.json").read_text())
        assert mark["lost"] == {}
        assert mark["partial_steps"] == []
        assert mark["calls"] > 1000
        assert (run_dir / "step0" / f"rank{rank}" / "dump.json").exists()


@pytest.mark.parametrize("levels", [("mix+eval",), pytest.param(("L0", "mix"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["p05_inplace", "p06_recompute", "p11_eval_paths"])
def test_cases_give_the_hash_they_give_without_us(
    launch: Any, run_cli: Any, shared: Path, tmp_path: Path, case: str, levels: tuple[str, ...]
) -> None:
    script = shared / "cases" / f"{case}.py"
    results = {}
    for level in ("off", *levels):
        out = tmp_path / level
        out.mkdir()
        name, _, evaluation = level.partition("+")
        probe = ["--probe-off"] if level == "off" else ["--probe-level", name]
        probe += ["--probe-eval"] if evaluation else []
        run_dir = tmp_path / f"run-{level}"
        env = {"OUT": str(out), "PYTHONWARNINGS": "ignore"}
        command = ["-m", "msprobe_launch", "--nproc", "2", "--run-dir"]
        done = run_cli([*command, run_dir, *probe, script], env=env, timeout=200)
        if GLOO_ABORT in done.stderr:
            run_dir = tmp_path / f"again-{level}"
            done = run_cli([*command, run_dir, *probe, script], env=env, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        results[level] = [path.read_text() for path in sorted(out.iterdir())]
        if level != "off":
            assert (run_dir / "step1" / "rank1" / "dump.json").exists()
        if case == "p11_eval_paths":
            assert done.stdout.count("0.0") == 2
    assert len(results["off"]) == 2
    assert all(found == results["off"] for found in results.values())


def outputs(op: dict[str, Any]) -> Any:
    first = op["output"][0]
    return [item["Max"] for item in first] if isinstance(first, list) else first["Max"]


def test_collectives_are_recorded_with_groups_and_what_they_delivered(launch: Any) -> None:
    done, run_dir = launch(PROGRAMS / "collectives.py", probe=("--probe-level", "L1"))
    assert done.returncode == 0, done.stderr[-3000:]
    # Counted word by word: the ranks' unbuffered prints may run into each other.
    assert (done.stdout.count("WAIT"), done.stdout.count("True")) == (2, 2)
    ops = json.loads((run_dir / "step0" / "rank1" / "dump.json").read_text())["data"]
    all_reduce = [ops[f"Distributed.all_reduce.{i}.forward"] for i in range(4)]
    assert [op["input_args"][0]["Max"] for op in all_reduce] == [2.0] * 4
    assert [outputs(op) for op in all_reduce] == [3.0, 2.0, 3.0, 3.0]  # asynchronous ones when they are done
    kwargs = all_reduce[1]["input_kwargs"]
    assert kwargs["op"] == {"type": "torch.distributed.ReduceOp", "value": "RedOpType.MAX"}
    assert kwargs["group"] == {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "77849d8c"}
    assert outputs(ops["Distributed.broadcast.0.forward"]) == 2.0
    gathered = ops["Distributed.all_gather.0.forward"]
    assert gathered["input_args"][0] is None  # a receive buffer holds nothing yet
    assert outputs(gathered) == [1.0, 2.0]
    assert outputs(ops["Distributed.reduce_scatter.0.forward"]) == 3.0
    assert ops["Distributed.recv.0.forward"]["input_args"] == [None]
    assert outputs(ops["Distributed.recv.0.forward"]) == 1.0
    batch = ops["Distributed.batch_isend_irecv.0.forward"]["output"][0]
    assert [(item["op"], item["tensor"]["Max"], item["peer"]) for item in batch] == [
        ("isend", 2.0, 0),
        ("irecv", 1.0, 0),
    ]
    assert "Distributed.barrier.0.forward" in ops
    assert not any(name.startswith("Tensor.resize_") for name in ops)  # the insides of all_gather_object


KILL = """
import os, signal, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    opt.zero_grad()
    loss = net(torch.ones(2, 4)).sum()
    if step == 3 and dist.get_rank() == 1:
        for _ in range(200):
            net(torch.ones(2, 4))
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    dist.all_reduce(net[0].weight.grad)
    opt.step()
"""


def test_a_killed_rank_leaves_finished_steps_and_a_partial_one(launch: Any, run_cli: Any, tmp_path: Path) -> None:
    script = tmp_path / "kill.py"
    script.write_text(KILL)
    done, run_dir = launch(script, probe=("--probe-level", "mix"))
    assert done.returncode == 128 + 9
    assert "rank 1" in done.stderr.splitlines()[-1] + done.stderr.splitlines()[-2]
    for step in range(3):
        data = json.loads((run_dir / f"step{step}" / "rank1" / "dump.json").read_text())["data"]
        assert "Module.2.Linear.backward.0" in data
    assert not (run_dir / "step3" / "rank1" / "dump.json").exists()
    assert (run_dir / "step3" / "rank1" / "dump.json.partial").exists()
    report = run_cli(["-m", "aggregator", run_dir, "-o", tmp_path / "report"])
    assert report.returncode == 3, report.stdout + report.stderr
    assert "partial" in report.stdout
