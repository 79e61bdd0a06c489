"""Programs run under the MindSpore adapter, each in a process of its own, by the interpreter that has MindSpore."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_launch.config import ProbeConfig

PROGRAMS = Path(__file__).resolve().parents[2] / "programs"

Record = Callable[..., "Recorded"]


class Recorded:
    """What a program left: `steps[n]` is the data of step n's dump.json, `mark` the roster mark."""

    def __init__(self, run_dir: Path, stdout: str, stderr: str) -> None:
        self.run_dir = run_dir
        self.stdout = stdout
        self.stderr = stderr
        self.steps: list[dict[str, Any]] = []
        while (path := run_dir / f"step{len(self.steps)}" / "rank0" / "dump.json").exists():
            self.steps.append(json.loads(path.read_text())["data"])
        self.mark = json.loads((run_dir / "roster" / "rank0.json").read_text())

    def construct(self, step: int = 0) -> dict[str, str | None]:
        return json.loads((self.run_dir / f"step{step}" / "rank0" / "construct.json").read_text())

    def stacks(self, step: int = 0) -> dict[str, list[str]]:
        """Op -> frames."""
        raw = json.loads((self.run_dir / f"step{step}" / "rank0" / "stack.json").read_text())
        return {op: frames for ops, frames in raw.values() for op in ops}


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory, run_mindspore: Any) -> Record:
    """`record(code, level="mix", **settings)` runs a program's text under the adapter and gives what was recorded."""

    def run(code: str, level: str = "mix", returncode: int = 0, **settings: Any) -> Recorded:
        folder = tmp_path_factory.mktemp("recorded")
        script = folder / "program.py"
        script.write_text(code)
        config = ProbeConfig.from_json(
            json.dumps({**ProbeConfig(run_dir=folder / "run").as_dict(), "level": level, **settings})
        )
        done = run_mindspore([PROGRAMS / "attached_ms.py", config.to_json(), script], cwd=folder)
        assert done.returncode == returncode, done.stderr[-3000:]
        return Recorded(folder / "run", done.stdout, done.stderr)

    return run
