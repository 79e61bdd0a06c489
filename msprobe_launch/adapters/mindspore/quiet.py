"""Whether calls are looked at right now: the one thing that a wrapper asks when nothing is to be recorded."""

from __future__ import annotations


class Switch:
    """`on` is True while an API call would be recorded, and false inside such a call and wherever we are quiet.

    Quiet is everything inside of a compiled function, an optimizer's arithmetic, and our own calls. `arm` and `disarm`
    are the session's; the others nest.
    """

    __slots__ = ("_armed", "_inside", "on", "quiet")

    def __init__(self) -> None:
        self.on = False
        self.quiet = 0
        self._armed = False
        self._inside = 0

    def arm(self, armed: bool) -> None:
        """Recording of API calls begins or ends."""
        self._armed = armed
        self.on = armed and not self.quiet and not self._inside

    def enter_quiet(self) -> None:
        """Look at nothing."""
        self.quiet += 1
        self.on = False

    def leave_quiet(self) -> None:
        """Look again, unless there is another reason not to."""
        self.quiet -= 1
        self.on = self._armed and not self.quiet and not self._inside

    def enter_api(self) -> None:
        """An API call begins; what it calls itself is not recorded."""
        self._inside += 1
        self.on = False

    def leave_api(self) -> None:
        """The call has returned."""
        self._inside -= 1
        self.on = self._armed and not self.quiet and not self._inside
