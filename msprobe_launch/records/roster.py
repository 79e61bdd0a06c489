"""The manifest of a run and the mark that each rank leaves, with their files.

A rank writes its own mark while it lives (`attached` and what it recorded so far); the launcher adds how the process
ended once it is dead, so a mark never has two writers at one time. Every write is to a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from msprobe_launch.errors import UnreadableInput
from msprobe_launch.records.layout import RunLayout

FORMAT_VERSION = 1

FILE_SYSTEM = "file system: "  # how a reason in a mark's `lost` begins where the file system refused a record
UNMATCHED = " matched nothing."  # in a mark's `unseen`: what follows `filter '<text>'`


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was started, written once per run by the first node. Times are ISO 8601 with UTC offset."""

    command: tuple[str, ...]
    script: str
    backend: str
    started: str
    world_size: int | None = None
    nnodes: str = "1"
    bench: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    host: str = ""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class RankMark:
    """Who a rank was, what it recorded, what it lost, and how it ended.

    `attached` is False in a mark that only the launcher wrote (the rank never reached us). `steps` lists the
    recorded steps that are complete on disk, `partial_steps` those of which something is missing. `lost` maps a
    reason to a number of calls. `unseen` maps what could not be observed to a number. `exit_code` is negative
    for a signal, as subprocess has it; `ended` says it in words. `role` is `culprit`, `victim` or empty, `reason` why;
    `hint` is what else is known of the end. `last_op` is the last call recorded, `peak_memory` in bytes as last seen.
    `exception` ended the rank, `thread_exception` one of its threads. `bytes` counts what was written; `forecast` says
    how much values of tensors were expected to take.
    """

    rank: int
    attached: bool
    host: str = ""
    pid: int = 0
    local_rank: int | None = None
    world_size: int | None = None
    attempt: int = 0
    framework: str = ""
    recording: bool = True
    started: str = ""
    steps: tuple[int, ...] = ()
    partial_steps: tuple[int, ...] = ()
    calls: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, int] = field(default_factory=dict)
    finished: bool = False
    note: str = ""
    bytes: int = 0
    forecast: str = ""
    exit_code: int | None = None
    ended: str = ""
    exception: str = ""
    thread_exception: str = ""
    last_op: str = ""
    peak_memory: int | None = None
    role: str = ""
    reason: str = ""
    hint: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def kept(self) -> int:
        """Calls that reached the disk: `calls` counts those too that the file system then refused."""
        refused = sum(count for reason, count in self.lost.items() if reason.startswith(FILE_SYSTEM))
        return max(0, self.calls - refused)


_T = TypeVar("_T", Manifest, RankMark)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part. Makes the parent folder.

    Raises OSError as the file system does; the temporary file is then removed.
    """
    # The pid keeps two writers on one shared file system from taking each other's temporary file.
    temporary = os.path.join(path.parent, f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            handle = FileIO(temporary, "w")
        except FileNotFoundError:
            os.makedirs(path.parent, exist_ok=True)
            handle = FileIO(temporary, "w")
        with handle:
            write_all(handle, text.encode())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_all(handle: FileIO, data: bytes) -> None:
    """Unbuffered write of everything: a raw write may be short when the disk fills up. Raises OSError."""
    view = memoryview(data)
    while view:
        done = handle.write(view)
        if not done:
            raise OSError("short write")
        view = view[done:]


def save(path: Path, value: Manifest | RankMark) -> None:
    """Write a manifest or mark as JSON. Raises OSError.

    On a full disk there is no room for a second file, but what a rank has lost must be told: a file that is there is
    then written over in its own blocks.
    """
    text = json.dumps(dataclasses.asdict(value), indent=1, ensure_ascii=False) + "\n"
    try:
        write_atomically(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _fits_and_is_written(path, text.encode()):
            raise


def _fits_and_is_written(path: Path, data: bytes) -> bool:
    """Write over a file where its blocks are enough; False, and the file as it was, where they are not."""
    try:
        with open(path, "r+b", buffering=0) as file:
            if len(data) > os.fstat(file.fileno()).st_blocks * 512:  # stat(2) counts in 512 bytes everywhere
                return False
            # One call: a reader finds the old text or the new one, at worst a tail that the next line cuts off.
            if os.pwrite(file.fileno(), data, 0) != len(data):
                return False
            file.truncate(len(data))
    except OSError:
        return False
    return True


def marks(layout: RunLayout) -> Iterator[tuple[int, RankMark | UnreadableInput]]:
    """Each rank of an attempt that left a mark, ascending, with the mark, or why that cannot be read."""
    for rank in layout.roster_ranks():
        try:
            yield rank, load(layout.roster_mark(rank), RankMark)
        except UnreadableInput as error:
            yield rank, error


def load(path: Path, kind: type[_T]) -> _T:
    """Read a manifest or mark. Unknown keys (of a newer version) are left out.

    Raises UnreadableInput with the reason where the file is missing, cut or not what it should be.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableInput(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UnreadableInput(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UnreadableInput(f"{path}: holds {type(raw).__name__}, not an object")
    names = {f.name for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in raw.items() if key in names}
    try:
        return kind(**values)
    except TypeError as error:
        raise UnreadableInput(f"{path}: not a {kind.__name__}: {error}") from error
