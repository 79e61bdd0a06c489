"""`--info`: will recording work here? Each check is done, not guessed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from msprobe_launch import __version__
from msprobe_launch.config import ProbeConfig
from msprobe_launch.errors import ProbeError, UnreadableInput
from msprobe_launch.launch import pth
from msprobe_launch.launch.injection import worker_environment
from msprobe_launch.launch.memory import MemoryGroup
from msprobe_launch.launch.text import size
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, load


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer; `works` is False where recording will not work, None where it only informs."""

    what: str
    found: str
    works: bool | None = None

    def __str__(self) -> str:
        mark = {True: "ok", False: "NO", None: "--"}[self.works]
        return f"{mark}  {self.what:<22} {self.found}"


def checks(run_dir: Path) -> Iterator[Check]:
    """All checks, `run_dir` being where a run would be recorded."""
    yield Check("msprobe-launch", __version__)
    yield Check("python", f"{platform.python_version()} at {sys.executable}", sys.version_info >= (3, 10))
    for package, needed in (("torch", True), ("mindspore", None), ("numpy", None)):
        try:
            yield Check(package, metadata.version(package), needed)
        except metadata.PackageNotFoundError:
            yield Check(package, "not installed in this environment", False if needed else None)
    parent = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".msprobe-info-") as folder:
            yield Check("run directory", f"{run_dir}: {size(_free(parent))} free", True)
            yield _locks(Path(folder))
            yield _injects(Path(folder))
    except OSError as error:
        yield Check("run directory", f"{parent} cannot be written: {error.strerror}", False)
    there = pth.place(sys.executable).exists()
    yield Check("install-pth", "installed" if there else "not installed (needed for python -I and -E only)")
    memory = MemoryGroup.read()
    yield Check("memory limit", "none to be seen" if memory.limit is None else size(memory.limit))


def _free(path: Path) -> int:
    numbers = os.statvfs(path)
    return numbers.f_bavail * numbers.f_frsize


def _locks(folder: Path) -> Check:
    import filelock

    try:
        with filelock.FileLock(folder / "lock", timeout=5):
            return Check("file locks", "work there", None)
    except (OSError, NotImplementedError) as error:
        return Check("file locks", f"do not work there ({error}); nodes agree without them", None)


def _injects(folder: Path) -> Check:
    """Start a child as a rank is started, and look for its mark."""
    try:
        added = worker_environment(ProbeConfig(run_dir=folder), os.environ)
    except ProbeError as error:
        return Check("injection", error.what, False)
    env = {**os.environ, **added, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", ""], env=env, capture_output=True, text=True, timeout=60, check=False)
    try:
        load(RunLayout(folder).roster_mark(0), RankMark)
    except UnreadableInput as error:
        return Check("injection", f"a child process was not reached: {done.stderr.strip() or error.what}", False)
    return Check("injection", "reaches a child process", True)
