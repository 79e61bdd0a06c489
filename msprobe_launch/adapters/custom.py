"""Functions that the script wants recorded by itself (`PrecisionDebugger.register_custom_api`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

Observe = Callable[[str, str, Any, tuple[Any, ...], dict[str, Any]], Any]
_MISSING = object()


class CustomApis:
    """Replaced functions, each with what stood in its place."""

    def __init__(self, session: Session, observe: Observe) -> None:
        self._session = session
        self._observe = observe
        self._replaced: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def register(self, owner: Any, name: str, prefix: str) -> None:
        """Record calls of `owner.name` as `<prefix>.<name>`. A second time changes nothing."""
        if (id(owner), name) in self._replaced:
            return
        original = getattr(owner, name)
        if not callable(original):
            raise TypeError(f"{name} of {owner!r} is no function")
        session, observe = self._session, self._observe

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not session.recording or not session.takes_apis:
                return original(*args, **kwargs)
            return observe(prefix, name, original, args, kwargs)

        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, staticmethod(call) if isinstance(before, staticmethod) else call)
        self._replaced[id(owner), name] = (owner, name, before)

    def restore(self) -> None:
        """Put everything back."""
        for owner, name, before in self._replaced.values():
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()
