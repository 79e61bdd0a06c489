"""Collectives: their groups as global ranks, what is sent and received, and when an asynchronous one is over."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspore.communication import GlobalComm, get_process_group_ranks
from mindspore.communication.comm_func import CommHandle

from msprobe_launch.adapters.mindspore.runtime import Tensor
from msprobe_launch.records.model import CallRecord, PlainValue, Value

if TYPE_CHECKING:
    from msprobe_launch.adapters.mindspore.values import MindSporeValues
    from msprobe_launch.capture.session import Session

# Buffers that hold nothing before the call.
_RECEIVES = frozenset({"output_tensor", "output", "tensor_list", "output_tensor_list", "gather_list"})
_RECEIVES_TENSOR = frozenset({"recv", "irecv", "scatter"})
# Class of a primitive -> name of the function that does the same.
PRIMITIVES = {
    "AllReduce": "all_reduce",
    "Reduce": "reduce",
    "AllGather": "all_gather_into_tensor",
    "AllGatherV": "all_gather_into_tensor_uneven",
    "ReduceScatter": "reduce_scatter_tensor",
    "ReduceScatterV": "reduce_scatter_tensor_uneven",
    "Broadcast": "broadcast",
    "AlltoAll": "all_to_all_single",
    "AlltoAllV": "all_to_all_single",
    "AlltoAllVC": "all_to_all_v_c",
    "NeighborExchange": "neighbor_exchange",
    "NeighborExchangeV2": "neighbor_exchange",
    "CollectiveScatter": "scatter_tensor",
    "CollectiveGather": "gather_into_tensor",
    "Barrier": "barrier",
    "Send": "send",
    "Receive": "recv",
    "BatchISendIRecv": "batch_isend_irecv",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One function's or primitive's arguments: `names` by position, which of them are only `received`.

    `primitive` carries what a function has as arguments (its group, its operation).
    """

    names: tuple[str, ...]
    received: frozenset[str]
    primitive: Any = None

    @classmethod
    def of(cls, function: Any) -> Collective:
        """Of a function that communicates."""
        names = tuple(inspect.signature(function).parameters)
        received = _RECEIVES | ({"tensor"} if function.__name__ in _RECEIVES_TENSOR else frozenset())
        # A function that returns its result has no such buffer.
        return cls(names, frozenset(received.intersection(names)))

    @classmethod
    def of_primitive(cls, primitive: Any) -> Collective:
        """Of a primitive, whose arguments are tensors."""
        return cls((), frozenset(), primitive)


class Collectives:
    """Describes what goes into collectives and what comes out."""

    def __init__(self, session: Session, values: MindSporeValues) -> None:
        self._session = session
        self._values = values
        self._pending: dict[int, tuple[Any, Callable[[], None], Callable[[], None]]] = {}

    def install(self) -> None:
        """Watch the handles of asynchronous ones."""
        kinds = {CommHandle, *(base for base in CommHandle.__mro__ if "wait" in vars(base))}
        for kind in kinds:
            self._watch(kind)

    def _watch(self, kind: Any) -> None:
        original = kind.wait
        done = self._done

        @functools.wraps(original)
        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(handle, *args, **kwargs)
            done(handle)
            return result

        kind.wait = wait

    def inputs(
        self, collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Value], dict[str, Value] | None]:
        """Arguments by position and by keyword; the group always, also where the default stands."""
        describe = self._values.describe
        primitive = collective.primitive
        if primitive is not None:
            named: dict[str, Value] = {}
            for attribute, keyword in (("op", "op"), ("root_rank", "src"), ("dest_rank", "dst"), ("src_rank", "src")):
                value = getattr(primitive, attribute, None)
                if value is None:
                    value = primitive.attrs.get(attribute)
                if value is not None:
                    named[keyword] = describe(value)
            named["group"] = group_value(getattr(primitive, "group", None) or primitive.attrs.get("group"))
            return describe.items(args), named
        positional: list[Value] = []
        for name, value in zip(collective.names, args, strict=False):
            if name in collective.received:
                positional.append(None)
            else:
                positional.append(group_value(value) if name == "group" else describe(value))
        keywords: dict[str, Value] = {}
        for name, value in kwargs.items():
            if name in collective.received:
                keywords[name] = None
            else:
                keywords[name] = group_value(value) if name == "group" else describe(value)
        if "group" in collective.names[len(args) :] and "group" not in kwargs:
            keywords["group"] = group_value(None)
        return positional, keywords or None

    def outputs(
        self,
        collective: Collective,
        record: CallRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        finish: Callable[[], None],
    ) -> bool:
        """Fill in what came out. True where the transfer is still under way: `finish` is called when it is over."""
        tensors = [value for value in _flat(result) if isinstance(value, Tensor)]
        handles = [value for value in _flat(result) if isinstance(value, _HANDLES)]
        given = tensors
        if not tensors:
            # It works in place: what its arguments hold now is the output.
            given = [
                value
                for name, value in (*zip(collective.names, args, strict=False), *kwargs.items())
                if isinstance(value, (Tensor, list, tuple)) and (name in collective.received or not collective.received)
            ]

        def complete() -> None:
            if self._session.gate.outputs and self._session.gate.forward:
                record.outputs = self._values.describe.items(given)

        if handles:
            # The handle is kept alive with its entry, so that an identity is not given twice.
            self._pending[id(handles[-1])] = (handles[-1], complete, finish)
            return True
        complete()
        return False

    def _done(self, handle: Any) -> None:
        entry = self._pending.pop(id(handle), None)
        if entry is None:
            return
        try:
            entry[1]()
            entry[2]()
        except Exception as error:  # noqa: BLE001 - a guest
            self._session.guard.lose("collective", error)
        self._values.raise_theirs()

    def close(self) -> None:
        """Emit what nobody waited for in this step; only the inputs are known of it."""
        pending, self._pending = self._pending, {}
        for _, _, finish in pending.values():
            self._session.guard.miss("asynchronous collective nobody waited for")
            finish()


_HANDLES = tuple({CommHandle, *(base for base in CommHandle.__mro__[:-1] if "wait" in vars(base))})


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def group_value(group: Any) -> Value:
    """A communication group as its global ranks; None for one that this rank is no member of."""
    try:
        name = group or GlobalComm.WORLD_COMM_GROUP
        ranks = [int(rank) for rank in get_process_group_ranks(name)]
    except Exception:  # noqa: BLE001 - whatever MindSpore raises of a group that it does not know
        return None
    number = f"{zlib.crc32(str(ranks).encode()):08x}"
    return PlainValue(f'{{"type": "mindspore.ProcessGroup", "group_ranks": {ranks}, "group_id": "{number}"}}')
