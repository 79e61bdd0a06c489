"""Collectives: which arguments are receive buffers, when an asynchronous one is over, and those modes do not see."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from msprobe_launch.adapters.torch.quiet import Quiet
from msprobe_launch.records.model import CallRecord, TensorValue

if TYPE_CHECKING:
    from types import FrameType

    from msprobe_launch.adapters.torch.api import Site
    from msprobe_launch.capture.session import Session


# Where they live: the innermost frame of these files that has a public name is the collective that is called.
_FILES = ("distributed_c10d.py", "functional_collectives.py")


def waited_for(frame: FrameType | None) -> str:
    """Name of the collective that the innermost frames are in, or an empty text."""
    name = ""
    while frame is not None:
        file = os.path.basename(frame.f_code.co_filename)
        if file in _FILES and not frame.f_code.co_name.startswith("_"):
            name = frame.f_code.co_name
        elif name and file not in (*_FILES, "c10d_logger.py"):
            break
        frame = frame.f_back
    return "" if name == "wrapper" else name


@dataclass(frozen=True, slots=True)
class Collective:
    """Arguments by (position, name). A receive buffer holds nothing before the call, a send buffer no news after."""

    receives: tuple[int, str] | None = None
    sends: tuple[int, str] | None = None

    def without_receive_buffers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with what is not initialised yet replaced by None, as the field's files have it."""
        return _masked(self.receives, args, kwargs)

    def without_send_buffers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with what may be in flight replaced by None."""
        return _masked(self.sends, args, kwargs)


def _masked(which: tuple[int, str] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if which is None:
        return args, kwargs
    position, name = which
    if name in kwargs:
        return args, {**kwargs, name: None}
    if position < len(args):
        return (*args[:position], None, *args[position + 1 :]), kwargs
    return args, kwargs


_BOTH_WAYS = Collective()
COLLECTIVES = {
    "all_reduce": _BOTH_WAYS,
    "all_reduce_coalesced": _BOTH_WAYS,
    "broadcast": _BOTH_WAYS,
    "reduce": _BOTH_WAYS,
    "barrier": _BOTH_WAYS,
    "monitored_barrier": _BOTH_WAYS,
    "send": _BOTH_WAYS,
    "batch_isend_irecv": _BOTH_WAYS,
    "isend": Collective(sends=(0, "tensor")),
    "recv": Collective(receives=(0, "tensor")),
    "irecv": Collective(receives=(0, "tensor")),
    "all_gather": Collective(receives=(0, "tensor_list")),
    "all_gather_coalesced": Collective(receives=(0, "output_tensor_lists")),
    "all_gather_into_tensor": Collective(receives=(0, "output_tensor")),
    "_all_gather_base": Collective(receives=(0, "output_tensor")),
    "gather": Collective(receives=(1, "gather_list")),
    "scatter": Collective(receives=(0, "tensor")),
    "reduce_scatter": Collective(receives=(0, "output")),
    "reduce_scatter_tensor": Collective(receives=(0, "output")),
    "_reduce_scatter_base": Collective(receives=(0, "output")),
    "all_to_all": Collective(receives=(0, "output_tensor_list")),
    "all_to_all_single": Collective(receives=(0, "output")),
}

# A mode is not asked about these although Python calls them.
_UNSEEN = ("barrier", "monitored_barrier", "batch_isend_irecv")


def tensors_in(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """All tensors among a collective's arguments, lists of them included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value, {})
        elif type(value) is dist.P2POp:
            yield value.tensor


def route_through_modes(observe: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Show collectives to `observe(function, args, kwargs)` that this torch does not show to modes."""
    if not dist.is_available():
        return
    asked = torch.overrides.get_testing_overrides()
    for name in COLLECTIVES:
        function = getattr(dist, name, None)
        if function is None or (function in asked and name not in _UNSEEN):
            continue
        wrapped = _shown(function, observe)
        for holder in (dist, dist.distributed_c10d):
            if getattr(holder, name, None) is function:
                setattr(holder, name, wrapped)


def _shown(function: Any, observe: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        return observe(function, args, kwargs)

    return collective


Complete = Callable[[CallRecord, "Site", tuple[Any, ...], dict[str, Any], Any], None]


class PendingWorks:
    """Asynchronous collectives: their output is what the tensors hold when the work is done, not when it is issued."""

    def __init__(self, session: Session, complete: Complete) -> None:
        self._session = session
        self._complete = complete
        self._pending: dict[int, tuple[list[Any], CallRecord, Site, tuple[Any, ...], dict[str, Any]]] = {}

    def install(self) -> None:
        """Watch `Work.wait` and `Work.is_completed`; what they return is returned."""
        if not dist.is_available():
            return
        for name in ("wait", "is_completed"):
            self._watch(dist.Work, name)

    def _watch(self, work_class: Any, name: str) -> None:
        original = getattr(work_class, name)
        pending = self._pending
        done = self._done

        @functools.wraps(original)
        def watched(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            if pending and (name == "wait" or result):
                done(work)
            return result

        setattr(work_class, name, watched)

    def defer(self, result: Any, record: CallRecord, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True where `result` is work in progress and the record waits for it."""
        works = [result] if isinstance(result, dist.Work) else result
        if not isinstance(works, list) or not works or not all(isinstance(work, dist.Work) for work in works):
            return False
        # The works are kept alive with their entry, so that an identity is not given twice.
        entry = (list(works), record, site, args, kwargs)
        for work in works:
            self._pending[id(work)] = entry
        return True

    def _done(self, work: Any) -> None:
        entry = self._pending.pop(id(work), None)
        if entry is None:
            return
        works, record, site, args, kwargs = entry
        works.remove(work)
        if not works:
            self._finish(record, site, args, kwargs)

    def _finish(self, record: CallRecord, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._complete(record, site, args, kwargs, None)
        except Exception as error:  # noqa: BLE001 - a guest
            self._session.guard.lose("collective", error)

    def close(self) -> None:
        """Emit what nobody waited for in this step; only the inputs are known of it."""
        entries = {id(entry): entry for entry in self._pending.values()}
        self._pending.clear()
        for _, record, _, _, _ in entries.values():
            if self._session.gate.forward:
                self._session.guard.miss("asynchronous collective nobody waited for")
                self._session.emit(record)


_RESULT = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
_is_compiling: Callable[[], bool] = torch.compiler.is_compiling


class InFlight:
    """Results of functional collectives that the program has not waited for yet: to read one would be to wait.

    What is to be recorded of them is filled in when the program has waited, where it does so before the record is
    written (an operation waits for its inputs, so that is nearly always); else it is counted as unseen.
    """

    def __init__(self, session: Session, arrived: Callable[[TensorValue, Tensor | None, bool], object]) -> None:
        self._session = session
        self._arrived = arrived
        self._quiet = Quiet()
        self._watched = False
        # By storage, which a result shares with its views. Nothing is kept alive.
        self._waiting: dict[int, list[tuple[weakref.ref[Tensor], TensorValue, bool]]] = {}

    def is_result(self, tensor: Any) -> bool:
        """True for what a functional collective returns; its memory is `elem`, and `completed` says "waited for"."""
        kind = type(tensor)
        if (kind.__module__, kind.__name__) != _RESULT:
            return False
        if not self._watched:  # the first one: whoever made it has imported its class
            self._watched = True
            for name in ("trigger_wait", "wait"):
                self._watch(kind, name)
        return True

    def _watch(self, kind: Any, name: str) -> None:
        original = getattr(kind, name)
        waiting = self._waiting

        @functools.wraps(original)
        def watched(tensor: Any) -> Any:
            out = original(tensor)
            if not _is_compiling() and waiting:
                self._landed(tensor.elem)
            return out

        setattr(kind, name, watched)

    def add(self, value: TensorValue, data: Tensor, saving: bool) -> None:
        """`value` is of `data`, once that has come; `saving` where its numbers are to be saved."""
        self._waiting.setdefault(data.untyped_storage()._cdata, []).append((weakref.ref(data), value, saving))

    def _landed(self, data: Tensor) -> None:
        try:
            self._quiet.enter()
            try:
                for reference, value, saving in self._waiting.pop(data.untyped_storage()._cdata, ()):
                    self._arrive(value, reference(), saving)
            finally:
                self._quiet.leave()
        except Exception as error:  # noqa: BLE001 - a guest
            self._session.guard.lose("functional collective", error, 0)

    def _arrive(self, value: TensorValue, data: Tensor | None, saving: bool) -> None:
        if data is None:
            self._session.guard.miss("result of a functional collective that was not waited for")
        self._arrived(value, data, saving)

    def give_up(self) -> None:
        """Records are about to be written: what has not come by now is without numbers."""
        while self._waiting:
            for _, value, saving in self._waiting.popitem()[1]:
                self._arrive(value, None, saving)
