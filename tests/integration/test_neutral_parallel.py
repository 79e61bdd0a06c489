"""Real launches on two ranks: parallel and compiled programs are bit-identical with the probe on."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_recording import GLOO_ABORT

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).resolve().parent.parent / "programs" / "parallel.py"
QUICK = ("ddp_static_graph", "fsdp1", "fsdp2_mixed", "sequence_parallel", "pipeline", "compiled_parts")


def names(table: str) -> list[str]:
    """Keys of one of the script's tables, which cannot be imported without torch."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == table:
            assert isinstance(node.value, ast.Dict)
            return [str(ast.literal_eval(key)) for key in node.value.keys if key is not None]
    raise AssertionError(f"no table {table}")


def run(run_cli: Any, tmp_path: Path, programs: list[str], level: str | None) -> dict[str, dict[str, str]]:
    """Hashes of programs by rank, under torchrun or (with a level) under msprobe-launch."""
    pytest.importorskip("torch")
    out = tmp_path / (level or "bare")
    if level is None:
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    else:
        run_dir = tmp_path / f"run-{level}"
        command = ["-m", "msprobe_launch", "--nproc", "2", "--run-dir", run_dir, "--probe-level", level]
    # One cache of compiled kernels: what hits it is the same graph.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = run_cli([*command, SCRIPT, out, *programs], timeout=1500, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name: json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))}


def check(run_cli: Any, tmp_path: Path, programs: list[str], levels: tuple[str, ...]) -> None:
    bare = run(run_cli, tmp_path, programs, None)
    assert sorted(bare) == ["rank0.json", "rank1.json"]
    for level in levels:
        probed = run(run_cli, tmp_path, programs, level)
        different = [(rank, name) for rank in bare for name in programs if bare[rank][name] != probed[rank][name]]
        assert different == [], level
        for rank in (0, 1):
            mark = json.loads((tmp_path / f"run-{level}" / "roster" / f"rank{rank}.json").read_text())
            assert (mark["lost"], mark["partial_steps"]) == ({}, [])
            assert mark["calls"] > 100


def test_parallel_programs_are_bit_identical(run_cli: Any, tmp_path: Path) -> None:
    check(run_cli, tmp_path, list(QUICK), ("mix",))


@pytest.mark.slow
def test_all_parallel_programs_at_all_levels_in_float32_and_bfloat16(run_cli: Any, tmp_path: Path) -> None:
    programs = [name + variant for name in names("PROGRAMS") for variant in ("", "_bf16")]
    check(run_cli, tmp_path, programs, ("L0", "L1", "mix"))


@pytest.mark.slow
def test_inductor_gives_the_same_kernels_and_results(run_cli: Any, tmp_path: Path) -> None:
    check(run_cli, tmp_path, names("SLOW"), ("L0", "L1", "mix"))


FUNCTIONAL = """
import sys, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Linear(3, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
seen = []
for step in range(2):
    optimizer.zero_grad()
    out = net(torch.full((2, 3), 1.0 + rank))
    total = functional.all_reduce(out.detach(), "sum", mesh)
    view = total.view(3, 2)
    again = torch.reshape(view, (6,))
    seen.append((total.completed, view.completed, again.completed))        # nobody has waited
    scaled = torch.mul(again, 2.0)                                         # this does
    seen.append(again.completed)
    lost = functional.all_reduce(torch.ones(5), "sum", mesh)
    lost = lost.view(5, 1)                                                 # and for this one nobody ever does
    whole = DTensor.from_local(out.detach(), mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    (out * scaled.reshape(2, 3)).sum().backward()
    gathered = torch.mul(whole, 1.0)
    optimizer.step()
print(seen, gathered.to_local().sum().item(), file=open(f"{sys.argv[1]}.{rank}", "w"))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "mode", ["statistics", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("md5", "xor")), "tensor"]
)
def test_results_of_functional_collectives_are_recorded_when_the_program_waits(
    run_cli: Any, tmp_path: Path, mode: str
) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(FUNCTIONAL)
    task = "tensor" if mode == "tensor" else "statistics"
    section = {} if task == "tensor" else {"summary_mode": mode}
    (tmp_path / "config.json").write_text(json.dumps({"task": task, task: section}))
    launch = ["-m", "msprobe_launch", "--nproc", "2", "--probe-config", tmp_path / "config.json", "--run-dir"]
    for kind, more in (("off", ["--probe-off"]), ("on", ["--probe-level", "mix"])):
        for attempt in range(3):  # see GLOO_ABORT
            run_dir = tmp_path / f"{kind}-{attempt}"
            done = run_cli([*launch, run_dir, *more, tmp_path / "program.py", tmp_path / kind], timeout=300)
            if GLOO_ABORT not in done.stderr:
                break
        assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        said = [Path(f"{tmp_path / kind}.{rank}").read_text() for kind in ("off", "on")]
        assert said[0].startswith("[(False, False, False), True, (False")
        assert said[1] == said[0]
        folder = run_dir / "step1" / f"rank{rank}"
        dump = json.loads((folder / "dump.json").read_text())["data"]
        whole = "torch.distributed._functional_collectives.AsyncCollectiveTensor"
        view, again = dump["Torch.reshape.0.forward"]["input_args"][0], dump["Torch.mul.0.forward"]["input_args"][0]
        product = dump["Torch.mul.0.forward"]["output"][0]
        assert (view["type"], again["type"], product["type"]) == (whole, whole, "torch.Tensor")
        never = dump["Tensor.view.1.forward"]["output"][0]
        assert (never["type"], never["shape"]) == (whole, [5, 1])
        shard = dump["Torch.mul.1.forward"]["input_args"][0]
        assert (shard["type"], shard["shape"]) == ("torch.distributed.tensor.DTensor", [4, 3])
        if mode in ("md5", "xor"):
            assert view["md5"] == again["md5"] != product["md5"]
            assert shard["md5"] == dump["Torch.mul.1.forward"]["output"][0]["md5"]
            assert never["md5"] is None
        if mode != "xor":
            assert 2 * view["Max"] == 2 * again["Max"] == product["Max"]
            assert shard["Norm"] == dump["Torch.mul.1.forward"]["output"][0]["Norm"] > 0
            assert never["Max"] is None
        if mode == "tensor":
            saved = torch.load(folder / "dump_tensor_data" / view["data_name"], weights_only=True)
            assert saved.max().item() == view["Max"]
            assert "data_name" not in never
        mark = json.loads((run_dir / "roster" / f"rank{rank}.json").read_text())
        assert mark["lost"] == {}
        # In each step: what went into `view`, and what came out of it.
        assert mark["unseen"] == {"result of a functional collective that was not waited for": 4}
        # How torch wraps a result is no operation of the program's, and would be shown memory that is being written.
        assert [op for op in dump if op.startswith("_c10d_functional")] == []
