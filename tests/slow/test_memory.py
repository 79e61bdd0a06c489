"""2,000 recorded steps with double backward and ever new shapes do not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


def test_resident_memory_stays_within_one_percent(run_cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = PROGRAMS / "memory.py"
    done = run_cli([PROGRAMS / "attached.py", tmp_path / "run", "mix", program, "2000"], timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    early, late = map(int, done.stdout.split())
    assert (tmp_path / "run" / "step1999" / "rank0" / "dump.json").exists()
    assert late < early * 1.01, f"{early} KiB after 200 steps, {late} KiB after 2,000"
