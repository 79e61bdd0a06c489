"""The run directory: made for one run, never written over, its manifest by whichever node comes first."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import socket
import warnings
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from msprobe_launch.errors import ConfigError, RunDirectoryError, UnreadableInput
from msprobe_launch.logs import get_logger
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, load, save

DEFAULT_PARENT = "msprobe_runs"

# A manifest is written in milliseconds; a lock held for longer is a file system that does not really lock.
LOCK_TIMEOUT_SECONDS = 20.0


def default_run_dir(script: str, now: datetime) -> Path:
    """`msprobe_runs/<time>-<script>` under the working directory; numbered where that is taken."""
    # A name has at most 255 bytes in most file systems; time and number need some, and a character is not to be cut.
    stem = (Path(script).stem or "run").encode()[:200].decode(errors="ignore")
    base = Path.cwd() / DEFAULT_PARENT / f"{now:%Y%m%d-%H%M%S}-{stem}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def is_run(path: Path) -> bool:
    """True for a run of ours, and for a folder of dumps by step as msprobe writes it."""
    layout = RunLayout(path)
    return layout.manifest.is_file() or bool(layout.steps())


def check_bench(path: Path, source: str) -> None:
    """Raise ConfigError, with the run that may have been meant, where `path` is none. `source` says who named it."""
    if is_run(path):
        return
    what = (
        f"{source}: {path} is not a run directory: it holds neither {RunLayout(path).manifest.name} nor step folders."
    )
    inside = sorted((folder for folder in _folders(path) if is_run(folder)), key=lambda run: run.stat().st_mtime)
    around = next((folder for folder in path.parents if is_run(folder)), None)
    beside = {folder.name: folder for folder in _folders(path.parent) if is_run(folder)}
    close = difflib.get_close_matches(path.name, list(beside), n=1)
    meant = inside[-1:] or [run for run in (around, *(beside[name] for name in close)) if run is not None]
    raise ConfigError(what, hint=f"Did you mean '{meant[0]}'?" if meant else "Name the --run-dir of a trusted run.")


def _folders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []


def check_free(path: Path) -> None:
    """Raise RunDirectoryError where `path` cannot become a run directory, as far as can be seen without making it.

    `logs` without a word in it and the manifest's lock are what a launch leaves that failed before its ranks started:
    no run.
    """
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise _unusable(path, error) from error
    layout = RunLayout(path)
    of_no_run = {layout.manifest_lock.name} | (set() if _holds_data(layout.logs) else {layout.logs.name})
    taken = next((name for name in names if name not in of_no_run), None)
    if taken is not None:
        raise _taken(path, f"it holds {taken}")


def make_fresh(path: Path) -> list[Path]:
    """Make an empty run directory; the directories that were made for it, innermost first.

    Raises RunDirectoryError where there is anything in it or it cannot be made.
    """
    check_free(path)
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return missing


@contextlib.contextmanager
def made_for_now(path: Path) -> Iterator[Path]:
    """A run directory that is there for the time of the block. Raises RunDirectoryError as `make_fresh` does."""
    made = make_fresh(path)
    try:
        yield path
    finally:
        _remove_empty(made)


def discard(layout: RunLayout, made: Iterable[Path]) -> None:
    """Undo what a launch has made (`make_fresh`, `sign`, the backend's logs), none of whose ranks has started.

    Logs in which something is written stay. Never raises: this is the way out of a failure.
    """
    if layout.roster_ranks():
        return
    with contextlib.suppress(OSError):
        layout.manifest.unlink(missing_ok=True)
        layout.manifest_lock.unlink(missing_ok=True)
        if not _holds_data(layout.logs):
            shutil.rmtree(layout.logs)
    _remove_empty(made)


def _holds_data(folder: Path) -> bool:
    """True where there is anything but folders and empty files."""
    if not folder.is_dir():
        return folder.exists()
    return any(os.path.getsize(os.path.join(base, name)) for base, _, names in os.walk(folder) for name in names)


def _remove_empty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _unusable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path}: the run directory cannot be made: {error.strerror}",
        hint="Name one that can be written: --run-dir DIR",
    )


def sign(layout: RunLayout, manifest: Manifest) -> None:
    """Write the manifest, or find that another node of this very launch has done so.

    Nodes of one launch agree on `started`, to the microsecond. Raises RunDirectoryError where the directory belongs
    to another run or cannot be written.
    """
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        with _locked(layout):
            if layout.manifest.exists():
                _check_ours(layout, manifest)
                return
            # `logs` is made by the backend before its nodes have met; anything else is another run's.
            own = {layout.manifest_lock.name, layout.logs.name, layout.manifest.name}
            for entry in layout.root.iterdir():
                if entry.name not in own and not entry.name.startswith(f".{layout.manifest.name}."):
                    raise _taken(layout.root, f"it holds {entry.name}")
            if not _create(layout.manifest, manifest):
                _check_ours(layout, manifest)
    except (OSError, UnreadableInput) as error:
        raise RunDirectoryError(
            f"{layout.root}: the manifest cannot be written: {error}", hint="Name another directory: --run-dir DIR"
        ) from error


def _check_ours(layout: RunLayout, manifest: Manifest) -> None:
    """Raise RunDirectoryError where the manifest that is there belongs to another launch."""
    there = load(layout.manifest, Manifest)
    if there.started != manifest.started:
        raise _taken(layout.root, f"it holds a run started {there.started}")


def _create(path: Path, manifest: Manifest) -> bool:
    """Write the manifest whole, if nobody has; False where somebody has. Right also where the lock is no lock.

    A hard link is made or refused by the file system in one step. Where there are none, the lock has to do.
    """
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    save(draft, manifest)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:
        os.replace(draft, path)
        return True
    finally:
        draft.unlink(missing_ok=True)
    return True


def _taken(path: Path, why: str) -> RunDirectoryError:
    # Only what is certainly a run may be offered for deletion: `--run-dir .` names somebody's project.
    is_run = RunLayout(path).manifest.exists()
    return RunDirectoryError(
        f"{path}: the run directory is not empty: {why}. A run is never written over.",
        hint="Name another one with --run-dir DIR" + (f", or delete it: rm -r '{path}'" if is_run else ""),
    )


@contextlib.contextmanager
def _locked(layout: RunLayout) -> Iterator[None]:
    """Hold the manifest's lock; go on without it, and say so, where the file system cannot lock."""
    import filelock

    lock = filelock.FileLock(layout.manifest_lock, timeout=LOCK_TIMEOUT_SECONDS)
    try:
        with warnings.catch_warnings():
            # Where there is no flock, filelock makes do with a file's existence, and warns: that will do for us.
            warnings.simplefilter("ignore", UserWarning)
            lock.acquire()
    except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError
        get_logger().warning("%s cannot be locked (%s), going on without", layout.manifest_lock, error)
    try:
        yield
    finally:
        lock.release()
