"""Where a report's files go."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from aggregator.model import RankFailure
from aggregator.report.base import Task
from aggregator.request import Request
from msprobe_launch.errors import RunDirectoryError, UsageError
from msprobe_launch.records.layout import step_number


def make(request: Request, root: Path) -> Path:
    """The output folder, made. Raises RunDirectoryError with the next command where it cannot be written."""
    base = root if root.is_dir() else root.parent
    if request.output is not None:
        _check_empty(request.output)
    output = request.output or _fresh(base / "aggregate" / request.time)
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError:
        shown = str(output).encode("utf-8", "backslashreplace").decode()
        raise RunDirectoryError(
            f"{shown} is no UTF-8, which tables cannot be written to", hint="Write elsewhere with -o FOLDER."
        ) from None
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        given = " ".join(str(path) for path in request.inputs)
        raise RunDirectoryError(
            f"{output} cannot be written: {error.strerror}",
            hint=f"Write elsewhere: msprobe-aggregate {given} -o FOLDER",
        ) from error
    return output


def _check_empty(folder: Path) -> None:
    """Raises UsageError where a report would be mixed with what lies there already."""
    try:
        there = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return  # not there yet, or told by who makes it
    if not there:
        return
    a_step = any(step_number(Path(name)) is not None for name in there)
    if "manifest.json" in there or (a_step and "summary.json" not in there):
        what = "is a run directory"
    elif "summary.json" in there:
        what = "holds a report already"
    else:
        what = f"is not empty ({len(there)} entries, such as {there[0]})"
    raise UsageError(
        f"-o {folder} {what}; a report goes into a folder of its own",
        hint=f"Name a new one, such as -o {folder}/report, or leave out -o to write to DIR/aggregate/<time>.",
    )


def _fresh(folder: Path) -> Path:
    """The folder, with a number behind it where an aggregation of the same second has it already."""
    number, found = 2, folder
    while found.exists():
        found = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return found


def check_room(failures: Iterable[RankFailure], output: Path) -> None:
    """Raises RunDirectoryError where a rank's table found no room: that is no fault of the input."""
    for number in (errno.ENOSPC, errno.EDQUOT):
        if any(os.strerror(number) in entry.reason for entry in failures):
            raise cannot_write(OSError(number, os.strerror(number)), output)


def cannot_write(error: OSError, folder: Path) -> RunDirectoryError:
    """What to raise where a file of the report was refused."""
    return RunDirectoryError(
        f"{error.filename or folder} cannot be written: {error.strerror or error}",
        hint="Write elsewhere with -o FOLDER.",
    )


def step_folder(output: Path, step: int | None) -> Path:
    """Where a step's files go."""
    return output if step is None else output / f"step{step}"


def partition(output: Path, step: int | None, rank: int | None) -> Path:
    """Where a rank's partition goes (see `model`)."""
    name = "rank.parquet" if rank is None else f"rank{rank}.parquet"
    return step_folder(output / "partitions", step) / name


def compared_files(output: Path, step: int | None, task: Task) -> list[Path]:
    """The compare results of a step that this command itself wrote, by rank."""
    if task is not Task.COMPARED:
        return []
    return sorted(step_folder(output, step).glob("compare_result*"), key=lambda path: (len(path.name), path.name))
