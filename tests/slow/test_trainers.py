"""Real trainers (`pip install msprobe-launch[trainers]`) on two ranks: neutral, and with sensible steps and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parent.parent / "programs" / "trainers.py"

# program: (package it needs, a module that must be among the ops, microbatches a step)
TRAINERS = {
    "llama": ("transformers", "model.layers.1.self_attn.q_proj.Linear", 2),
    "bert": ("transformers", "bert.encoder.layer.1.attention.self.query.Linear", 1),
    "experts": ("transformers", "model.layers.1.mlp.MixtralSparseMoeBlock", 1),
    "accelerate": ("accelerate", "model.layers.1.self_attn.q_proj.Linear", 2),
    "lightning": ("lightning", "model.layers.1.self_attn.q_proj.Linear", 1),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_computes_what_it_computes_without_us(run_cli: Any, tmp_path: Path, name: str) -> None:
    package, module, microbatches = TRAINERS[name]
    pytest.importorskip(package)
    found = {}
    for kind in ("off", "L0", "mix"):
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        if kind != "off":
            run_dir = tmp_path / "run" / kind
            command = ["-m", "msprobe_launch", "--nproc", "2", "--run-dir", run_dir, "--probe-level", kind]
        done = run_cli([*command, SCRIPT, tmp_path / kind, name], timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        found[kind] = [path.read_text() for path in sorted((tmp_path / kind).glob("rank*.json"))]
    assert len(found["off"]) == 2
    assert found["L0"] == found["mix"] == found["off"]
    for rank in (0, 1):
        mark = json.loads((tmp_path / "run" / "mix" / "roster" / f"rank{rank}.json").read_text())
        assert (mark["steps"], mark["partial_steps"], mark["lost"]) == ([0, 1, 2, 3], [], {})
        dumps = [tmp_path / "run" / "mix" / f"step{step}" / f"rank{rank}" / "dump.json" for step in (1, 2)]
        first, second = (list(json.loads(dump.read_text())["data"]) for dump in dumps)
        calls = [op for op in first if f".{module}.forward." in op]
        recomputed = 2 if name == "experts" else 1
        assert len(calls) == microbatches * recomputed
        # What a step is made of does not change from one to the next, but for the tokens an expert gets.
        modules = [[op for op in ops if ".backward." in op and op.startswith("Module.")] for ops in (first, second)]
        assert name == "experts" or modules[0] == modules[1]
