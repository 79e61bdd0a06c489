"""MindSpore programs compute the same bits with the probe on, and are recorded. Real launches on the CPU."""

from __future__ import annotations

import ast
import itertools
import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "programs" / "mindspore_neutral.py"
LEVELS = ("L0", "L1", "mix")
MARK = 7_000_000.0  # of the script
# One of each kind, for the default suite.
QUICK = (
    "outputs",
    "lm_adam",
    "mint_layers",
    "train_one_step",
    "model_train",
    "custom_bprop",
    "inplace",
    "caught_exceptions",
    "second_order",
    "jit_function",
)
# What is compiled whole shows nothing but its boundary.
COMPILED_STEP = "jit_step"


def names(table: str) -> list[str]:
    """Keys of one of the script's tables, which cannot be imported without MindSpore."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == table:
            assert isinstance(node.value, ast.Dict)
            return [str(ast.literal_eval(key)) for key in node.value.keys if key is not None]
    raise AssertionError(f"no table {table}")


def hashes(folder: Path) -> dict[str, dict[str, str]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))}


def recorded(run_mindspore: Any, tmp_path: Path, level: str, *args: str, nproc: int = 1) -> tuple[Any, Path]:
    """Hashes by rank, and the run directory."""
    run_dir, out = tmp_path / f"run-{level}", tmp_path / f"out-{level}"
    command = ["-m", "msprobe_launch", "--backend", "msrun", "--nproc", str(nproc), "--run-dir", run_dir]
    done = run_mindspore([*command, "--probe-level", level, SCRIPT, out, *args], cwd=tmp_path, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return hashes(out), run_dir


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("step*"), key=lambda path: int(path.name[4:]))


def records(run_dir: Path, rank: int, table: list[str]) -> dict[str, Counter[str]]:
    """How many records of which kind each program has left, by the marks between them."""
    program: str | None = None
    found: dict[str, Counter[str]] = {}
    for step in steps(run_dir):
        data = json.loads((step / f"rank{rank}" / "dump.json").read_text())["data"]
        for name, record in data.items():
            first = (record.get("input_args") or [None])[0]
            top = first.get("Max") if isinstance(first, dict) else None
            if isinstance(top, float) and MARK <= top < MARK + len(table):
                program = table[int(top - MARK)]
            kind = next(kind for kind in ("parameters_grad", "backward", "forward") if f".{kind}" in name)
            found.setdefault(program or "", Counter())[f"{name.partition('.')[0]} {kind}"] += 1
    return found


def check_rank(run_dir: Path, rank: int) -> dict[str, Any]:
    """The rank's mark: it has recorded, to the end, and has lost nothing."""
    mark: dict[str, Any] = json.loads((run_dir / "roster" / f"rank{rank}.json").read_text())
    assert (mark["attached"], mark["framework"], mark["lost"]) == (True, "mindspore", {})
    assert mark["ended"] == "finished"
    return mark


def without_statistics(run_dir: Path) -> list[str]:
    """Names of records with a tensor that has elements and no statistics."""
    found = []
    for path in run_dir.glob("step*/rank*/dump.json"):
        for name, record in json.loads(path.read_text())["data"].items():
            groups = [items.values() if isinstance(items, dict) else items for items in record.values()]
            for item in itertools.chain.from_iterable(group for group in groups if not isinstance(group, bool)):
                if isinstance(item, dict) and item.get("Max", 0) is None and 0 not in item["shape"]:
                    found.append(f"{path.parent.parent.name} {name}")
    return found


def check_programs(run_dir: Path, level: str, programs: list[str]) -> None:
    """Every program has left what its level records, and no tensor without its statistics."""
    check_rank(run_dir, 0)
    found = records(run_dir, 0, names("PROGRAMS"))
    for name in programs:
        kinds = found[name]
        modules = kinds["Cell backward"] + kinds["Jit forward"] - (level != "L1")  # without the mark's own
        apis = sum(kinds[f"{prefix} backward"] for prefix in ("Functional", "Tensor", "Primitive", "Mint"))
        if level != "L1":
            assert modules >= 3 or name == "functional", (name, kinds)  # which has neither
            assert kinds["Cell parameters_grad"] >= 6 or name == COMPILED_STEP, (name, kinds)
        if level != "L0":
            assert apis > 3 or name == COMPILED_STEP, (name, kinds)
    assert without_statistics(run_dir) == []


def test_programs_are_bit_identical_with_the_probe_on(run_mindspore: Any, tmp_path: Path) -> None:
    done = run_mindspore([SCRIPT, tmp_path / "bare", *QUICK])
    assert done.returncode == 0, done.stderr[-3000:]
    probed, run_dir = recorded(run_mindspore, tmp_path, "mix", *QUICK)
    assert probed == hashes(tmp_path / "bare")
    assert list(probed["rank0.json"]) == list(QUICK)
    check_programs(run_dir, "mix", list(QUICK))


@pytest.fixture(scope="module")
def bare(run_mindspore: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hashes of all programs without us, twice: a program that differs from itself would say nothing."""

    def run(*args: str) -> dict[str, dict[str, str]]:
        found = []
        for _ in range(2):
            out = tmp_path_factory.mktemp("bare")
            done = run_mindspore([SCRIPT, out, *args], timeout=1500)
            assert done.returncode == 0, done.stderr[-3000:]
            found.append(hashes(out))
        assert found[0] == found[1]
        return found[0]

    return {"PROGRAMS": run(), "GRAPH": run("--graph")}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_all_programs_are_bit_identical(run_mindspore: Any, tmp_path: Path, bare: Any, level: str) -> None:
    probed, run_dir = recorded(run_mindspore, tmp_path, level)
    assert probed == bare["PROGRAMS"]
    programs = names("PROGRAMS")
    assert len(programs) >= 40
    assert list(probed["rank0.json"]) == programs
    check_programs(run_dir, level, programs)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_programs_in_graph_mode_are_bit_identical(run_mindspore: Any, tmp_path: Path, bare: Any, level: str) -> None:
    probed, run_dir = recorded(run_mindspore, tmp_path, level, "--graph")
    assert probed == bare["GRAPH"]
    assert list(probed["rank0.json"]) == names("GRAPH")
    mark = check_rank(run_dir, 0)
    # What cannot be seen is said.
    assert any("graph" in what.lower() or "compiled" in what for what in mark["unseen"]), mark["unseen"]
    for name, kinds in records(run_dir, 0, names("GRAPH")).items():
        # The compiled function, or the cell that holds the whole step; the mark is one such function.
        assert kinds["Jit forward"] > 3 or kinds["Cell forward"] >= 3 or level == "L1", (name, kinds)
        assert kinds["Jit forward"] > 0, (name, kinds)
    if level != "L1":
        assert sum(records(run_dir, 0, names("GRAPH")).values(), Counter())["Cell parameters_grad"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "levels"), [(2, LEVELS), (4, ("mix",))])
def test_data_parallel_programs_are_bit_identical(
    run_mindspore: Any, mindspore_python: Path, tmp_path: Path, workers: int, levels: tuple[str, ...]
) -> None:
    """Against the installed msrun, on as many workers."""
    msrun = [mindspore_python.parent / "msrun", f"--worker_num={workers}", f"--local_worker_num={workers}"]
    options = [f"--master_port={free_port()}", f"--log_dir={tmp_path / 'log'}", "--join=True"]
    done = run_mindspore([*msrun, *options, SCRIPT, tmp_path / "bare", "--parallel"], cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    expected = hashes(tmp_path / "bare")
    assert list(expected) == [f"rank{rank}.json" for rank in range(workers)]
    assert list(expected["rank0.json"]) == names("PARALLEL")
    for level in levels:
        probed, run_dir = recorded(run_mindspore, tmp_path, level, "--parallel", nproc=workers)
        assert probed == expected, level
        for step in steps(run_dir):
            assert sorted(path.name for path in step.iterdir()) == [f"rank{rank}" for rank in range(workers)]
        for rank in range(workers):
            check_rank(run_dir, rank)
            found = records(run_dir, rank, names("PARALLEL"))
            assert list(found) == names("PARALLEL")
            if level != "L0":
                assert found["dp_by_hand"]["Distributed forward"] > 10, found["dp_by_hand"]
