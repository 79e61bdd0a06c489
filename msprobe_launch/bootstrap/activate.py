"""The first milliseconds of a rank-to-be: hide our traces, then wait for a framework, an exception or the end."""

from __future__ import annotations

import atexit
import os
import sys

from msprobe_launch.bootstrap.importing import FRAMEWORKS, FrameworkFinder
from msprobe_launch.bootstrap.variables import ATTEMPT, CONFIG, HANG, OURS, PYTHONPATH_WAS_EMPTY, rank_source

TYPE_CHECKING = False  # `typing` would cost every rank several milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from msprobe_launch.capture.session import Session


class RankProcess:
    """This process as the launcher numbered it, before and after a framework is imported.

    The numbers are read once: a script may change RANK for a job of its own. A forked child inherits this object and
    is not the rank; `pid` tells the two apart. `rank` is -1 until the framework has numbered a process that nobody else
    numbers: nothing can be said of it before.
    """

    def __init__(
        self,
        config: str,
        rank: int,
        local_rank: int,
        world_size: int,
        attempt: int,
        frameworks: tuple[str, ...] = FRAMEWORKS,
    ) -> None:
        self.config = config
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.attempt = attempt
        self.frameworks = frameworks
        self.pid = os.getpid()
        self.seen = False
        self.has_warned = False
        # The exception as text: the object would keep the frames of the script, and what they hold, alive.
        self.exception = ""
        self.thread_exception = ""
        self.answers_hang = False
        self.session: Session | None = None

    @property
    def is_this_process(self) -> bool:
        return os.getpid() == self.pid

    @property
    def name(self) -> str:
        """What stands before our lines on its stderr."""
        return f"msprobe rank {self.rank}" if self.rank >= 0 else f"msprobe worker {self.local_rank}"

    @property
    def is_known_rank(self) -> bool:
        return self.is_this_process and self.rank >= 0

    def on_import(self, framework: str) -> None:
        """A framework has just been imported: start to record. Never raises."""
        if not self.is_this_process:
            return
        self.seen = True
        self._guarded("attach" if self.rank >= 0 else "attach_later", framework)

    def on_numbered(self, framework: str) -> None:
        """The framework knows this process's rank by now: start to record. Never raises."""
        if self.is_this_process and self.rank < 0:
            self._guarded("attach_numbered", framework)

    def on_exception(self, exception: BaseException) -> None:
        """An exception is about to end this process: keep it for the roster. Never raises."""
        if self.is_known_rank and not _imports_would_hide(exception):
            self._guarded("keep_exception", exception)

    def on_thread_exception(self, exception: BaseException) -> None:
        """An exception has ended a thread of this process: keep the first for the roster. Never raises."""
        if self.is_known_rank and not self.thread_exception:
            self._guarded("keep_thread_exception", exception)

    def on_exit(self) -> None:
        """Runs last of all exit functions, as it was registered first. Never raises."""
        if self.is_known_rank:
            # Python keeps the exception that ended it, also from whoever replaced sys.excepthook.
            last = getattr(sys, "last_value", None)
            if not _imports_would_hide(last):
                self._guarded("leave", last if isinstance(last, BaseException) else None)

    def _guarded(self, function: str, argument: object) -> None:
        try:
            from msprobe_launch.bootstrap import attach

            getattr(attach, function)(self, argument)
        except Exception as error:  # noqa: BLE001  # a guest never stops the training
            if not self.has_warned:
                self.has_warned = True
                sys.stderr.write(f"[{self.name}] {function} failed, the training goes on: {error!r}\n")


def activate(site: str) -> None:
    """Make this process a rank-to-be. `site` is our folder on PYTHONPATH. May raise; sitecustomize is the guard."""
    environ = os.environ
    source = rank_source(environ)
    if source is None:
        raise RuntimeError("no variable numbers this process")
    rank, world_size, local_rank = (environ.get(name, "") for name in source)
    config, ours = environ[CONFIG], {name: environ.pop(name, None) for name in OURS}
    was_empty = ours[PYTHONPATH_WAS_EMPTY] is not None
    pythonpath = users_pythonpath(environ.get("PYTHONPATH"), site, was_empty=was_empty)
    if pythonpath is None:
        environ.pop("PYTHONPATH", None)
    else:
        environ["PYTHONPATH"] = pythonpath
    # A worker of MindSpore's may import torch as well, to read a checkpoint say, and be none of its ranks.
    is_mindspores = source[0] in ("MS_NODE_ID", "")
    process = RankProcess(
        config,
        rank=int(rank) if source[0] else -1,
        local_rank=int(local_rank or "0"),
        world_size=int(world_size or "1"),
        attempt=int(ours[ATTEMPT] or environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        frameworks=tuple(name for name in FRAMEWORKS if name == "mindspore" or not is_mindspores),
    )
    process.answers_hang = ours[HANG] is not None
    atexit.register(process.on_exit)
    chain_excepthook(process.on_exception)
    FrameworkFinder(process.frameworks, process.on_import).install()


def _imports_would_hide(exception: object) -> bool:
    """True where our imports would change how the process ends.

    CPython ends by SIGINT after an unhandled KeyboardInterrupt unless another source text has been executed since, and
    making a dataclass executes one. A rank that has attached has made them all by then; another one stays silent.
    """
    return isinstance(exception, KeyboardInterrupt) and "msprobe_launch.bootstrap.attach" not in sys.modules


def users_pythonpath(value: str | None, site: str, *, was_empty: bool) -> str | None:
    """PYTHONPATH as it would be without our folder; None for unset.

    A wrapper may have put entries around ours (`PYTHONPATH=lib:$PYTHONPATH`), so ours is cut out where it stands.
    """
    if value == site:
        return "" if was_empty else None
    if value is None:
        return None
    before, found, after = f"{os.pathsep}{value}".partition(f"{os.pathsep}{site}{os.pathsep}")
    if found:
        return f"{before}{os.pathsep}{after}"[1:]
    # Last in the list: what stood there for the user was nothing, after the separator.
    return value[: -len(site)] if value.endswith(f"{os.pathsep}{site}") else value


def chain_excepthook(note: Callable[[BaseException], None]) -> None:
    """Call `note` with an uncaught exception, then whoever was to be told before us. What the user sees is the same."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        note(value)
        return previous(kind, value, trace)

    sys.excepthook = excepthook
