"""An exception as text for the roster: what, where in the user's code, when, and the whole traceback."""

from __future__ import annotations

import os
import site
import sysconfig
import traceback
from datetime import datetime, timezone

# Of an installed package the folder lies among others, so the separator belongs to it.
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_HOOKS = tuple(os.path.join(_OURS, package, "") for package in ("adapters", "capture"))


def describe(exception: BaseException) -> str:
    """First line `Type: text`, then `at FILE:LINE in FUNCTION`, the time with UTC offset, and the traceback.

    The place is the innermost frame outside installed packages, the standard library and ourselves, for a shape error
    raised deep inside the framework is looked for in the user's code; where there is no such frame, the innermost.
    """
    summary = "".join(traceback.format_exception_only(type(exception), exception))
    # A SyntaxError is preceded by its place and source line, both indented.
    lines = [next((line for line in summary.splitlines() if not line.startswith(" ")), type(exception).__name__)]
    frames = traceback.extract_tb(exception.__traceback__)
    if frames:
        own = [frame for frame in frames if not frame.filename.startswith(_installed())]
        place = (own or frames)[-1]
        lines.append(f"at {place.filename}:{place.lineno} in {place.name}")
    elif isinstance(exception, SyntaxError) and exception.filename:
        lines.append(f"at {exception.filename}:{exception.lineno}")
    lines.append(datetime.now(timezone.utc).astimezone().isoformat(timespec="milliseconds"))
    whole = traceback.TracebackException.from_exception(exception, compact=True)
    _without_hooks(whole, set())
    return "\n".join(lines) + "\n" + "".join(whole.format()).rstrip()


def _without_hooks(told: traceback.TracebackException, seen: set[int]) -> None:
    """Take the frames of our hooks out of a traceback's text, those of causes and groups too.

    The script's exception keeps them: what a program can see of it is not ours to change. Hooks stand between the
    script and the framework and let no error of their own out, so that nothing is lost with them.
    """
    if id(told) in seen:
        return
    seen.add(id(told))
    kept = [frame for frame in told.stack if not frame.filename.startswith(_HOOKS)]
    if kept:
        told.stack = traceback.StackSummary.from_list(kept)
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _without_hooks(other, seen)


def _installed() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(path for path in (*paths, _OURS, site.getusersitepackages(), "<frozen") if path)
