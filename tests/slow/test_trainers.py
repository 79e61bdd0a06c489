"""Real trainers (the extra `trainers`, see CONTRIBUTING.md) on two ranks: neutral, with sensible steps and names."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parent.parent / "programs" / "trainers.py"
STEPS = [0, 1, 2, 3]
LAYERS = 2


@dataclass(frozen=True)
class Program:
    """What must be found of one program in each step."""

    package: str  # it needs this one
    query: str  # path of the last layer's first projection, below the trainer's wrapper
    attention: str  # class of what holds it
    functions: dict[str, int]  # API calls in one forward without recomputation
    microbatches: int = 1
    prefix: str = "module."  # of all paths: DistributedDataParallel's
    recomputed: bool = False
    around: tuple[str, ...] = ()  # modules between the wrapper and the model
    inline: tuple[str, ...] = ()  # modules made in each forward


LLAMA = {"linear": 7 * LAYERS + 1, "scaled_dot_product_attention": LAYERS, "silu": LAYERS, "cross_entropy": 1}
BERT = {"linear": 6 * LAYERS + 2, "scaled_dot_product_attention": LAYERS, "gelu": LAYERS, "cross_entropy": 1}
MIXTRAL = {"scaled_dot_product_attention": LAYERS, "softmax": LAYERS, "cross_entropy": 1}
LLAMA_QUERY = "model.layers.1.self_attn.q_proj"

PROGRAMS = {
    "llama": Program("transformers", LLAMA_QUERY, "LlamaAttention", LLAMA, microbatches=2),
    "bert": Program(
        "transformers",
        "bert.encoder.layer.1.attention.self.query",
        "BertSelfAttention",
        BERT,
        inline=("CrossEntropyLoss.CrossEntropyLoss",),
    ),
    "experts": Program("transformers", LLAMA_QUERY, "MixtralAttention", MIXTRAL, recomputed=True),
    "accelerate": Program("accelerate", LLAMA_QUERY, "LlamaAttention", LLAMA, microbatches=2),
    "lightning": Program(
        "lightning",
        LLAMA_QUERY,
        "LlamaAttention",
        LLAMA,
        prefix="module.net.",
        around=("module.Module",),
    ),
}
MODULE = re.compile(r"Module\.(.+)\.(forward|backward|parameters_grad)\.\d+")
FUNCTION = re.compile(r"Functional\.(\w+)\.\d+\.(forward|backward)")


def counts(dump: dict[str, Any], pattern: re.Pattern[str]) -> dict[str, Counter[str]]:
    """Direction -> how often each name stands in a dump."""
    found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter(), "parameters_grad": Counter()}
    for op in dump:
        if match := pattern.fullmatch(op):
            found[match[2]][match[1]] += 1
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_computes_what_it_computes_without_us(run_cli: Any, tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    pytest.importorskip(program.package)
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
    model = json.loads((tmp_path / "mix" / "model.json").read_text())
    for level in ("L0", "mix"):
        run = tmp_path / "run" / level
        for rank in (0, 1):
            mark = json.loads((run / "roster" / f"rank{rank}.json").read_text())
            assert (mark["steps"], mark["partial_steps"], mark["lost"], mark["unseen"]) == (STEPS, [], {}, {})
            for step in STEPS:
                folder = run / f"step{step}" / f"rank{rank}"
                dump = json.loads((folder / "dump.json").read_text())["data"]
                check_modules(program, model, dump)
                parents = json.loads((folder / "construct.json").read_text())
                query = f"Module.{program.prefix}{program.query}.Linear"
                attention = f"Module.{program.prefix}{program.query.rpartition('.')[0]}.{program.attention}"
                assert parents[f"{query}.forward.0"] == f"{attention}.forward.0"
                assert parents[f"{query}.backward.0"] == f"{attention}.backward.0"
                if level == "mix":
                    check_functions(program, dump, parents)
                else:
                    assert all(op.startswith("Module.") for op in dump)


def check_modules(program: Program, model: list[list[Any]], dump: dict[str, Any]) -> None:
    """Every module of the model under its own name, as often as it runs, with all gradients of its parameters."""
    found = counts(dump, MODULE)
    names = {".".join(filter(None, (program.prefix + path, kind))).replace("..", ".") for path, kind, _ in model}
    assert set(found["forward"]) <= names | {*program.inline, *program.around}
    for inline in program.inline:
        assert found["forward"][inline] == found["backward"][inline] == program.microbatches
    for path, kind, parameters in model:
        name = f"{program.prefix}{path}.{kind}"
        if not parameters:
            continue
        repeated = 2 if program.recomputed and "layers." in path else 1
        assert found["forward"][name] == program.microbatches * repeated, name
        gradients = [value for op, value in dump.items() if op.startswith(f"Module.{name}.parameters_grad.")]
        for parameter in parameters:
            local = [value for value in gradients if parameter in value]
            applied = [value for value in gradients if f"{parameter}.applied" in value]
            assert (len(local), len(applied)) == (program.microbatches, 1), (name, parameter)
        assert found["backward"][name] == program.microbatches, name
    again = [op for op, value in dump.items() if value.get("is_recompute")]
    assert bool(again) is program.recomputed


def check_functions(program: Program, dump: dict[str, Any], parents: dict[str, str]) -> None:
    found = counts(dump, FUNCTION)
    for function, once in program.functions.items():
        repeated = 2 if program.recomputed and function != "cross_entropy" else 1
        assert found["forward"][function] == program.microbatches * once * repeated, function
        assert found["backward"][function] == program.microbatches * once, function
    attention = [op for op in dump if op.startswith("Functional.scaled_dot_product_attention.")]
    assert all(f".{program.attention}." in parents[op] for op in attention)
