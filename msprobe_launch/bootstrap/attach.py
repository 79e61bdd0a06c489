"""From an imported framework to a recording rank, and the roster mark of a rank that does not get that far.

Called through `activate.RankProcess`, which turns whatever these functions raise into one line on stderr.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msprobe_launch.bootstrap.activate import RankProcess
from msprobe_launch.bootstrap.exceptions import describe
from msprobe_launch.config import ProbeConfig
from msprobe_launch.errors import UnreadableInput
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, load, save


def attach(process: RankProcess, framework: str) -> None:
    """Claim the rank, then build its Session. What fails is said on stderr and in the roster; nothing is raised."""
    config = ProbeConfig.from_json(process.config)
    _chain_thread_hook(process)
    mark = _blank(process, note=f"{framework} was imported, recording did not start")
    path = _path(process, config)
    owner = _claim(path, mark)
    if owner is not None:
        where = "" if owner.host == mark.host else f" on {owner.host}"
        _say(process, f"not recorded: process {owner.pid}{where} already records this rank")
        return
    try:
        from msprobe_launch import adapters
        from msprobe_launch.capture.identity import RankIdentity
        from msprobe_launch.logs import configure

        configure(f"msprobe rank {process.rank}")

        identity = RankIdentity(
            rank=process.rank,
            local_rank=process.local_rank,
            world_size=process.world_size,
            host=mark.host,
            pid=process.pid,
            attempt=process.attempt,
        )
        process.session = adapters.start(framework, config, identity)
        if process.answers_hang:
            from msprobe_launch.bootstrap import hang

            hang.start(process)
    except Exception as error:  # noqa: BLE001  # whatever is wrong with us, the user's training is not
        place = describe(error).splitlines()[1]
        _say(process, f"not recorded, the training goes on: {type(error).__name__}: {error} ({place})")
        note = f"recording could not start: {type(error).__name__}: {error} ({place})"
        save(path, dataclasses.replace(mark, note=note))


def attach_later(process: RankProcess, framework: str) -> None:
    """Attach as soon as the framework has numbered this process, if ever."""
    from msprobe_launch.bootstrap import numbering

    numbering.wait(process, framework)


def attach_numbered(process: RankProcess, framework: str) -> None:
    """Attach with the rank that the framework knows by now."""
    from msprobe_launch import adapters

    known = adapters.known_rank(framework)
    if known is not None:
        process.rank, process.world_size = known
        attach(process, framework)


def keep_exception(process: RankProcess, exception: BaseException) -> None:
    """Put the exception that is about to end the rank into its mark. Raises OSError as the file system does."""
    process.exception = describe(exception)
    path = _path(process, ProbeConfig.from_json(process.config))
    mark = _read(path, process)
    if mark is not None:
        save(path, dataclasses.replace(mark, exception=process.exception))


def keep_thread_exception(process: RankProcess, exception: BaseException) -> None:
    """Put the exception that has ended a thread into the rank's mark. Raises OSError as the file system does."""
    process.thread_exception = describe(exception)
    path = _path(process, ProbeConfig.from_json(process.config))
    mark = _read(path, process)
    if mark is not None:
        save(path, dataclasses.replace(mark, thread_exception=process.thread_exception))


def _chain_thread_hook(process: RankProcess) -> None:
    """Be told of exceptions that end threads, then tell whoever was to be told before us."""
    threading: Any = sys.modules.get("threading")
    if threading is None:
        return  # the framework runs no threads of Python's
    previous = threading.excepthook

    def excepthook(arguments: Any) -> Any:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            process.on_thread_exception(arguments.exc_value)
        return previous(arguments)

    threading.excepthook = excepthook


def leave(process: RankProcess, exception: BaseException | None) -> None:
    """Last words: a rank without a mark says why it has none, and an exception is in the mark whoever wrote it last."""
    path = _path(process, ProbeConfig.from_json(process.config))
    text = process.exception or (describe(exception) if exception is not None else "")
    mark = _read(path, process)
    if mark is None:
        if path.exists():
            return  # another process of this rank, which records
        mark = _blank(process, note=_why_unseen(process))
    elif (mark.exception, mark.thread_exception) == (text, process.thread_exception):
        return
    save(path, dataclasses.replace(mark, exception=text, thread_exception=process.thread_exception))


def _why_unseen(process: RankProcess) -> str:
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else "this process"
    loaded = [name for name in process.frameworks if name in sys.modules]
    if loaded and not process.seen:
        return f"{program or 'this process'} imported {loaded[0]} through an import hook that passes ours by"
    return f"{program or 'this process'} never imported {' or '.join(process.frameworks)}"


def _path(process: RankProcess, config: ProbeConfig) -> Path:
    return RunLayout(config.run_dir, process.attempt).roster_mark(process.rank)


def _blank(process: RankProcess, note: str) -> RankMark:
    return RankMark(
        rank=process.rank,
        attached=False,
        host=socket.gethostname(),
        pid=process.pid,
        local_rank=process.local_rank,
        world_size=process.world_size,
        attempt=process.attempt,
        recording=False,
        started=datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds"),
        note=note,
    )


def _read(path: Path, process: RankProcess) -> RankMark | None:
    """This process's own mark, or None."""
    try:
        mark = load(path, RankMark)
    except UnreadableInput:
        return None
    return mark if mark.pid == process.pid and mark.host == socket.gethostname() else None


def _claim(path: Path, mark: RankMark) -> RankMark | None:
    """Take the rank by creating its mark; the mark of another living process of this rank is returned instead.

    A hard link is made whole or not at all, so of two processes of a wrapper script that import a framework at one time
    only one records. Raises OSError where the roster cannot be written.
    """
    draft = path.with_name(f".{path.name}.{mark.pid}.claim")
    save(draft, mark)
    try:
        os.link(draft, path)
    except FileExistsError:
        there = load(path, RankMark)
        is_other = (there.pid, there.host) != (mark.pid, mark.host)
        # Of a process on another host nobody here can say that it is gone.
        if is_other and (there.host != mark.host or _alive(there.pid)):
            os.replace(draft, path.with_name(f"{path.stem}.claim-{mark.host}-{mark.pid}.json"))
            return there
        os.replace(draft, path)
    except OSError:
        os.replace(draft, path)  # a file system without hard links
    else:
        draft.unlink()
    return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _say(process: RankProcess, text: str) -> None:
    process.has_warned = True
    sys.stderr.write(f"[{process.name}] {text}\n")
