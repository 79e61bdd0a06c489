"""`--info`: will recording work here? Each check is done, not guessed."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from msprobe_launch import __version__
from msprobe_launch.config import ProbeConfig
from msprobe_launch.errors import ProbeError, UnreadableInput
from msprobe_launch.launch import pth
from msprobe_launch.launch.injection import worker_environment
from msprobe_launch.launch.memory import MemoryGroup
from msprobe_launch.launch.msrun_options import INSTALL, numpy_breaks
from msprobe_launch.launch.rundir import made_for_now
from msprobe_launch.launch.text import size, wrapped
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, load

OLDEST_PYTHON = (3, 10)
# What a child may take; importing torch from a cold network file system has been seen to take minutes.
CHILD_SECONDS = 300

# What the child does as a rank: the smallest training there is.
_TRAINS = {
    "torch": """
import torch
print(torch.__version__, flush=True)
torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
""",
    "mindspore": """
import mindspore
print(mindspore.__version__, flush=True)
cell = mindspore.nn.Dense(1, 1)
train = mindspore.value_and_grad(lambda x: cell(x).sum(), None, cell.trainable_params())
train(mindspore.ops.ones((1, 1), mindspore.float32))
""",
}
# How the backends number a rank. Without a cluster to join: that takes a scheduler, and seconds.
_NUMBERS = {"torch": {"RANK": "0", "WORLD_SIZE": "1"}, "mindspore": {"MS_NODE_ID": "0", "MS_WORKER_NUM": "1"}}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer. `works` is False where recording will not work, None where it only informs; `remedy`
    is the next thing to do or to type.
    """

    what: str
    found: str
    works: bool | None = None
    remedy: str = ""

    def lines(self, columns: int) -> list[str]:
        """The check as text, folded at blanks to `columns`; a path is never cut, so that it can be copied."""
        mark = {True: "ok", False: "NO", None: "--"}[self.works]
        head = f"{mark}  {self.what:<14}  "
        lines = wrapped(self.found, columns, head)
        return lines + (wrapped(self.remedy, columns, " " * 4 + "-> ") if self.remedy else [])


def checks(config: ProbeConfig | ProbeError, backend: str) -> Iterator[Check]:
    """All checks, for a run with this configuration (or the error that it is) under this backend."""
    yield Check("msprobe-launch", __version__)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    remedy = "" if sys.version_info >= OLDEST_PYTHON else f"Use Python {oldest} or later."
    yield Check("python", f"{platform.python_version()} at {sys.executable}", not remedy, remedy)
    found = {package: _version(package) for package in ("torch", "mindspore", "numpy")}
    needed = _needed(backend, found)
    for package, version in found.items():
        if version is None:
            is_needed = package in needed
            install = INSTALL if package == "mindspore" else f"pip install {package}"
            remedy = f"{install}, or run msprobe-launch from the training's environment" if is_needed else ""
            yield Check(package, "not installed in this environment", False if is_needed else None, remedy)
        elif package != "torch":
            yield Check(package, version)
    broken = numpy_breaks(found["mindspore"], found["numpy"])
    if broken:
        yield Check("numpy", broken, False if "mindspore" in needed else None, "pip install 'numpy<2'")
    if isinstance(config, ProbeError):
        yield Check("configuration", config.what, False, config.hint)
    else:
        yield from _in_the_run_directory(config.run_dir)
    try:
        with tempfile.TemporaryDirectory(prefix="msprobe-info-") as name:
            # Under another launcher the ranks may have an environment of their own: what is here is tried all the same.
            tried = [framework for framework in _TRAINS if found[framework] is not None and _tries(framework, backend)]
            if broken:
                tried = [framework for framework in tried if framework != "mindspore"]
            for number, framework in enumerate(tried or [None]):
                folder = Path(name, str(number))
                folder.mkdir()
                yield from _injects(folder, framework, several=len(tried) > 1)
    except OSError as error:
        what = f"cannot be tried in {tempfile.gettempdir()}: {error.strerror}"
        yield Check("injection", what, False, "Set TMPDIR to a folder that can be written.")
    there = pth.place(sys.executable).exists()
    yield Check("install-pth", "installed" if there else "not installed (needed for python -I and -E only)")
    memory = MemoryGroup.read()
    yield Check("memory limit", "none to be seen" if memory.limit is None else size(memory.limit))


def _needed(backend: str, found: Mapping[str, str | None]) -> tuple[str, ...]:
    """The frameworks that this backend cannot do without."""
    if backend == "command":
        return ()
    if backend != "auto":
        return ("mindspore",) if backend == "msrun" else ("torch",)
    there = tuple(framework for framework in _TRAINS if found[framework] is not None)
    return there if len(there) == 1 else () if there else ("torch",)


def _tries(framework: str, backend: str) -> bool:
    return backend in ("auto", "command") or (framework == "mindspore") == (backend == "msrun")


def verdict(found: Sequence[Check]) -> Check:
    """The last line: whether recording works, or what stands in its way."""
    broken = [check.what for check in found if check.works is False]
    if broken:
        return Check("recording", f"will not work here: {', '.join(broken)}", False)
    return Check("recording", "works here", True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _in_the_run_directory(path: Path) -> Iterator[Check]:
    """Make it, write and lock there, and leave it as it was."""
    try:
        with made_for_now(path), tempfile.TemporaryDirectory(dir=path, prefix=".msprobe-info-") as name:
            folder = Path(name)
            (folder / "written").write_text("written")
            yield Check("run directory", f"{path} can be written, {size(_free(folder))} are free", True)
            yield _locks(folder)
    except ProbeError as error:
        yield Check("run directory", error.what, False, error.hint)
    except OSError as error:
        yield Check("run directory", f"{path} cannot be written: {error.strerror}", False, "--run-dir DIR")


def _free(path: Path) -> int:
    numbers = os.statvfs(path)
    return numbers.f_bavail * numbers.f_frsize


def _locks(folder: Path) -> Check:
    import filelock

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it falls back to a file's existence
            with filelock.FileLock(folder / "lock", timeout=5):
                return Check("file locks", "work there")
    except (OSError, NotImplementedError) as error:
        return Check("file locks", f"do not work there ({error}); nodes agree without them")


def _injects(folder: Path, framework: str | None, *, several: bool) -> Iterator[Check]:
    """Start a child as a backend starts a rank, and look at what it recorded. `several` frameworks are tried."""
    # torchrun's variable, and torchrun's alone.
    python = sys.executable if framework == "mindspore" else os.environ.get("PYTHON_EXEC", sys.executable)
    config = ProbeConfig(run_dir=folder)
    try:
        env = {**os.environ, **worker_environment(config, os.environ), **_NUMBERS[framework or "torch"]}
    except ProbeError as error:
        yield Check("injection", error.what, False, error.hint)
        return
    script = folder / "script.py"
    script.write_text("" if framework is None else _TRAINS[framework])
    try:
        done = subprocess.run(
            [python, "-u", script], env=env, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it did not end within {CHILD_SECONDS} s"
        remedy = "Set PYTHON_EXEC to a Python interpreter, or unset it." if "PYTHON_EXEC" in os.environ else ""
        yield Check("injection", f"a child process of {python} cannot be run: {reason}", False, remedy)
        return
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if framework is not None:
        version = next(iter(done.stdout.split()), "")
        if done.returncode:
            what = f"a child process cannot use it: {said[-1].strip() if said else f'exit code {done.returncode}'}"
            yield Check(framework, what, False, f"{shlex.quote(python)} -c 'import {framework}' shows the whole error.")
        else:
            yield Check(framework, version, True)
    works = framework is not None and done.returncode == 0
    yield _reached(folder, python, said, with_framework=works, of=f" of {framework}" if several else "")


def _reached(folder: Path, python: str, said: Sequence[str], *, with_framework: bool, of: str) -> Check:
    mark: RankMark | None = None
    with contextlib.suppress(UnreadableInput):
        mark = load(RunLayout(folder).roster_mark(0), RankMark)
    if mark is None:
        ours = next((line for line in said if line.startswith("[msprobe]")), "")
        why = ours or f"{python} passes by sitecustomize on PYTHONPATH (python -I, -E or -S, or a wrapper)"
        return Check("injection", f"does not reach a child process: {why}", False, "msprobe-launch install-pth")
    if not with_framework:
        return Check("injection", "reaches a child process", True)
    if not (mark.attached and mark.calls):
        why = mark.note or "no call was seen"
        return Check("injection", f"reaches a child process, which does not record: {why}", False)
    return Check("injection", f"a child process recorded {mark.calls} calls{of}", True)
