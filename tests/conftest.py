"""Fixtures of all tests. `../shared` holds the team's samples and cases; tests that need it skip without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs MindSpore is marked so."""
    for item in items:
        if "mindspore_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.mindspore)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of samples beside the repository, or a skip."""
    path = REPOSITORY.parent / "shared"
    if not (path / "interop").is_dir():
        pytest.skip("../shared (samples of msprobe's files and the cases) is not there")
    return path


@pytest.fixture(scope="session")
def run_cli() -> Run:
    """Run a Python command line such as `["-m", "msprobe_launch", "--help"]` with this interpreter, output captured."""

    def run(
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(os.fspath, argv)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def mindspore_python() -> Path:
    """The interpreter that has MindSpore, or a skip. It is not this one, whose numpy is too new."""
    path = Path(os.environ.get("MSPROBE_TEST_MINDSPORE_PYTHON") or REPOSITORY / ".venv-mindspore/bin/python")
    if not path.exists():
        pytest.skip(f"{path} (MindSpore, scripts/setup) is not there")
    return path


@pytest.fixture(scope="session")
def run_mindspore(mindspore_python: Path) -> Run:
    """As `run_cli`, with the interpreter that has MindSpore; its folder is first on PATH, as in its environment."""

    def run(
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        path = f"{mindspore_python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return subprocess.run(
            [str(mindspore_python), *map(os.fspath, argv)],
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )

    return run
