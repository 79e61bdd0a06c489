"""Which session this process has: what a script's own calls (`debugger`) act on. A process is one rank at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

_sessions: list[Session] = []


def put(session: Session) -> None:
    """`session` has been installed."""
    _sessions[:] = [session]


def session() -> Session | None:
    """The session that was installed last, or None."""
    return _sessions[-1] if _sessions else None
