"""An exception as text for the roster: what, where in the user's code, when, and the whole traceback."""

from __future__ import annotations

import os
import site
import sysconfig
import traceback
from datetime import datetime, timezone


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
    whole = "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))
    return "\n".join(lines) + "\n" + whole.rstrip()


def _installed() -> tuple[str, ...]:
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(path for path in (*paths, ours, site.getusersitepackages(), "<frozen") if path)
