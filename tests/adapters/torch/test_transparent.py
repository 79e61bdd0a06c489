"""What a program can see of us, question by question: `tests/programs/transparent.py` answers the same with us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "transparent.py"


def answers(stdout: str) -> dict[str, str]:
    return {" ".join(line.split()[:2]): line for line in stdout.splitlines()}


@pytest.fixture(scope="module")
def bare(run_cli: Any) -> dict[str, str]:
    pytest.importorskip("torch")
    done = run_cli([PROGRAM])
    assert done.returncode == 0, done.stderr[-3000:]
    return answers(done.stdout)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_program_sees_the_same_with_and_without_us(record: Any, bare: dict[str, str], level: str) -> None:
    recorded = record(PROGRAM.read_text(), level)
    told = answers(recorded.stdout)
    assert {key: told.get(key) for key in bare} == bare
    assert list(told) == list(bare)  # nothing of ours on stdout
    assert len(bare) > 30
    assert recorded.mark["lost"] == {}
    assert recorded.mark["calls"] > 200
