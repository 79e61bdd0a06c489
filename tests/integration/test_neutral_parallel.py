"""Real launches on two ranks: parallel and compiled programs are bit-identical with the probe on."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

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
