"""2,000 recorded steps with double backward and ever new shapes do not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


def resident(run_cli: Any, run_dir: Path, level: str) -> tuple[int, int]:
    """KiB after 200 steps and after 2,000."""
    done = run_cli([PROGRAMS / "attached.py", run_dir, level, PROGRAMS / "memory.py", "2000"], timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    early, late = map(int, done.stdout.split())
    print(f"{level}: {early} KiB after 200 steps, {late} KiB after 2,000: {late / early - 1:+.2%}")
    return early, late


def test_resident_memory_stays_within_one_percent(run_cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    early, late = resident(run_cli, tmp_path / "run", "mix")
    assert (tmp_path / "run" / "step1999" / "rank0" / "dump.json").exists()
    assert late < early * 1.01
    # Most of it is the program's own: its later batches are larger.
    bare_early, bare_late = resident(run_cli, tmp_path / "bare", "off")
    assert (late - early) - (bare_late - bare_early) < early * 0.004
