"""What the neutral engine asks of a framework. An adapter calls the Session back with what it sees.

    adapter -> session    outermost_forward, forward_done, optimizer_made/gone/stepped, backward_begins/ends,
                          open_call, attend, emit, enter_module, leave_module, value_file, value_lost,
                          graph_begins, graph_ends
    session -> adapter    the methods below

`adapters/fake.py` is a complete small adapter for a toy framework, and the documentation of this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import FrameType

    from msprobe_launch.capture.session import Session
    from msprobe_launch.records.model import TensorValue, Value


class FrameworkAdapter(Protocol):
    """One framework's side of the engine. Methods may raise; the session guards every call of them."""

    @property
    def framework(self) -> str:
        """Value of the `framework` key in dump.json, as msprobe writes it (`pytorch`, `mindspore`)."""

    @property
    def versions(self) -> dict[str, str]:
        """Package name -> version, for the roster."""

    @property
    def value_ending(self) -> str:
        """Ending of a file that holds one tensor's values (`.pt`)."""

    def install(self, session: Session) -> None:
        """Put hooks into the framework. They must cost nothing measurable until `arm`."""

    def arm(self) -> None:
        """Recording begins: start to observe calls."""

    def disarm(self) -> None:
        """Recording pauses: let go of whatever the user's program could notice or pay for."""

    def settle(self) -> list[TensorValue]:
        """Tensors seen since the last call, with their statistics.

        Statistics that wait on a device are brought home in one transfer, which waits for the device.
        """

    @property
    def settles_at_once(self) -> bool:
        """True where `settle` would not wait for a device: only then may another thread call it."""

    def describe(self, value: Any) -> Value:
        """The recorded form of any value, as it is now. For what the script saves by itself."""

    def watch_gradient(self, value: Any, put: Callable[[Value], None]) -> None:
        """Call `put` with the gradient of `value`, each time one comes. Nothing where it can have none."""

    def save_values(self) -> None:
        """Values may be saved from now on (`session.saving`), although the configuration asked for none."""

    def register_api(self, owner: Any, name: str, prefix: str) -> None:
        """Record calls of `owner.name`, a function of the program's own, as `<prefix>.<name>`.

        Raises AttributeError or TypeError where there is no such function.
        """

    def restore_apis(self) -> None:
        """Put back what `register_api` has replaced."""

    def name_models(self, models: Sequence[Any]) -> None:
        """Name the modules of several models `Module.<index>.<name>`; called before any of them was called."""

    def close_open_calls(self) -> None:
        """Emit what waits for an event that will not come (a gradient that was never needed)."""

    def close_step(self) -> None:
        """The step ends: emit what still waits for anything at all (work in flight nobody waited for)."""

    def forget_values(self) -> None:
        """Drop what is remembered about tensors: their values may change now in ways that leave no trace."""

    def waits_in(self, frame: FrameType | None, begun: Sequence[str]) -> str:
        """The collective that the thread with this innermost frame is in, or an empty text.

        `begun`: names of the collectives that the step has begun so far. Called by another thread; reads only.
        """

    def leave_child(self) -> None:
        """This process is a forked child of the rank: observe nothing any more."""
