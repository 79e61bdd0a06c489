"""Torch values -> recorded values."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from msprobe_launch import native
from msprobe_launch.adapters.arrays import numpy_value
from msprobe_launch.adapters.torch.checksums import CRC32, XOR
from msprobe_launch.adapters.torch.collectives import InFlight
from msprobe_launch.adapters.torch.copies import Copies
from msprobe_launch.adapters.torch.saving import TensorSaver
from msprobe_launch.adapters.torch.stats import ELEMENTS, MEASURES, ROWS, Deferred, covered_by
from msprobe_launch.capture.plain import NamesOnly, PlainDescriber, plain, text
from msprobe_launch.config import SummaryMode, Task
from msprobe_launch.records.codec import quote, tensor_head
from msprobe_launch.records.model import PlainValue, Statistics, TensorValue, Value

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter, *((nn.Buffer,) if hasattr(nn, "Buffer") else ())})
_CACHE_LIMIT = 1 << 16
# Heads by (dtype, shape), 300 bytes each. A model has some hundred; where every batch has new shapes none is met again.
HEADS_LIMIT = 512
# Views of as many elements are looked up by the memory they cover: a look-up takes 4 us, measuring 65,536 takes 8.
_VIEW_FROM = 1 << 16
_LOW = 1 << 40
_STRIDED = torch.strided
_TENSOR = "torch.Tensor"


class TorchValues:
    """Describes any value of a torch program.

    Statistics of a tensor are reused while it is the same object with the same version counter and storage: one
    op's output is the next one's input. Those of a large view are reused from another view of the same elements.
    Some writes leave no trace in the version counter (`x.data.mul_()`, fused optimizers, collectives); `forget`
    drops what is remembered, and is called where such writes happen.
    """

    def __init__(self, session: Session) -> None:
        config = session.config
        structure = config.task is Task.STRUCTURE
        self.describe = (NamesOnly if structure else PlainDescriber)(self._leaf)
        self.deferred = Deferred()
        self._session = session
        self._fresh: list[TensorValue] = []
        self._copies = Copies()
        self._saver = TensorSaver(session, self._copies) if config.saves_values else None
        # Chosen once: the plain statistics must not pay for the others.
        self._fill = {
            SummaryMode.STATISTICS: self._statistics,
            SummaryMode.MD5: self._with_crc32,
            SummaryMode.XOR: self._xor,
        }[config.summary_mode]
        self._in_flight = InFlight(session, self._arrived)
        self._cache: dict[int, tuple[Any, int, int, TensorValue]] = {}
        # (address, elements covered, dtype) -> (owner of the memory, its version, statistics)
        self._views: dict[tuple[Any, ...], tuple[Any, int, Statistics]] = {}
        self._heads: dict[str, dict[Any, str]] = {_TENSOR: {}}
        self._plain: dict[Any, PlainValue] = {}
        # The common case in one call, where it was compiled. It knows statistics, no checksums.
        table = native.load_table(
            self.general,
            TensorValue,
            cache=self._cache,
            heads=self._heads[_TENSOR],
            kinds=ELEMENTS,
            rows=ROWS,
            fresh=self._fresh,
            below=_VIEW_FROM,
            limit=_CACHE_LIMIT,
        )
        self.tensor = table if table is not None and self._fill == self._statistics else self.general
        by_type = self.describe.by_type
        for kind in _PLAIN_TENSORS:
            by_type[kind] = self.tensor if self._saver is None else self._kept_tensor
        by_type[torch.Size] = self._size
        by_type[torch.dtype] = self._named("torch.dtype")
        by_type[torch.device] = self._device
        by_type[torch.layout] = self._named("torch.layout")
        by_type[torch.memory_format] = self._memory_format

    def save_values(self) -> None:
        """Values may be saved from now on, although the configuration asked for none."""
        if self._saver is None:
            self._saver = TensorSaver(self._session, self._copies)
            for kind in _PLAIN_TENSORS:
                self.describe.by_type[kind] = self._kept_tensor

    def forget(self) -> None:
        """Statistics are measured anew from now on."""
        self._cache.clear()
        self._views.clear()

    @property
    def settles_at_once(self) -> bool:
        """True where nothing waits on a device."""
        return not self.deferred.waits and not self._copies.waits

    def settle(self) -> list[TensorValue]:
        """Tensors seen since the last call, their statistics brought home."""
        self._in_flight.give_up()
        self.deferred.settle()
        self._copies.settle()
        # The list itself is shared; what comes in meanwhile (in another thread) stays in it.
        fresh = self._fresh[:]
        del self._fresh[: len(fresh)]
        return fresh

    def forget_tensor(self, tensor: Any) -> None:
        """The same for one tensor, and for all views there may be of it."""
        self._cache.pop(id(tensor), None)
        self._views.clear()

    def general(self, tensor: Tensor) -> TensorValue:
        """Any plain tensor (no subclass that computes for itself)."""
        key = id(tensor)
        known = self._cache.get(key)
        try:
            version, address = tensor._version, tensor.data_ptr()
            if known is not None and known[0]() is tensor and known[1] == version and known[2] == address:
                return known[3]
            value = self._measured(tensor, _TENSOR, held(tensor))
            if len(self._cache) >= _CACHE_LIMIT:
                self._cache.clear()
            self._cache[key] = (weakref.ref(tensor), version, address, value)
        except RuntimeError:
            # No version counter (inference tensors) or no storage (functional transforms, sparse).
            value = self._measured(tensor, _TENSOR, tensor)
        return value

    def _measured(
        self, tensor: Tensor, type_name: str, data: Tensor | None, tail: str = "", coming: Tensor | None = None
    ) -> TensorValue:
        """Head from `tensor`, statistics from `data` (None: there are none), or later from what is `coming`."""
        if tensor.is_nested:
            # It has no one shape; statistics are of all its values.
            value = TensorValue(tensor_head(type_name, str(tensor.dtype), []), requires_grad=tensor.requires_grad)
            return self._fill(value, data.values() if data is not None else None)
        value = TensorValue(self._head(type_name, tensor), requires_grad=tensor.requires_grad, tail=tail)
        if coming is not None:
            self._in_flight.add(value, coming, self._session.saving)
            return value
        return self._fill(value, data)

    def _arrived(self, value: TensorValue, data: Tensor | None, saving: bool) -> None:
        """The program has waited for a collective's result: `data` is what it got."""
        data = held(data) if data is not None else None
        self._fill(value, data)
        if saving and self._saver is not None and data is not None and data.numel():
            self._saver.keep(value, _dense(data))

    def _head(self, type_name: str, tensor: Tensor) -> str:
        heads = self._heads.setdefault(type_name, {})
        key = (tensor.dtype, tensor.shape)
        head = heads.get(key)
        if head is None:
            if len(heads) >= HEADS_LIMIT:
                heads.clear()
            head = heads[key] = tensor_head(type_name, str(tensor.dtype), list(tensor.shape))
        return head

    def _kept_tensor(self, tensor: Tensor) -> TensorValue:
        """`tensor` where values may be saved too."""
        value = self.tensor(tensor)
        if self._session.saving and value.saved is None and self._saver is not None and held(tensor) is not None:
            self._saver.keep(value, _dense(tensor))
        return value

    def _with_crc32(self, value: TensorValue, data: Tensor | None) -> TensorValue:
        tail = value.tail
        value.tail = f'{tail}, "md5": null'
        if data is not None and not data.is_meta:
            try:
                dense = _dense(data)
                if dense.is_cpu:
                    value.tail = f'{tail}, "md5": {CRC32(dense)}'
                else:

                    def home(copy: Tensor) -> None:
                        value.tail = f'{tail}, "md5": {CRC32(copy)}'

                    self._copies.later(dense, home)
            except (RuntimeError, NotImplementedError, TypeError):
                pass  # as with statistics
        return self._statistics(value, data)

    def _xor(self, value: TensorValue, data: Tensor | None) -> TensorValue:
        """No statistics: the checksum alone, as msprobe has it."""
        grad = "" if value.requires_grad is None else f', "requires_grad": {str(value.requires_grad).lower()}'

        def told(checksum: str) -> None:
            value.text = f'{value.head}, "md5": {checksum}{grad}{value.tail}}}'

        told("null")
        if data is None or data.is_meta:
            return value
        try:
            data = _dense(data)
            if data.is_cpu:
                told(XOR(data))
            else:
                self._copies.later(data, lambda copy: told(XOR(copy)))
        except (RuntimeError, NotImplementedError, TypeError):
            pass
        return value

    def _statistics(self, value: TensorValue, data: Tensor | None) -> TensorValue:
        if data is not None:
            self._measure(value, data)
        # Only now: measuring a large one lets other threads in, and the idle flusher would write it as it was.
        self._fresh.append(value)
        return value

    def _measure(self, value: TensorValue, data: Tensor) -> None:
        try:
            if data.layout is not _STRIDED or data.is_quantized:
                data = _dense(data)
            count = data.numel()
            if not count:
                return
            if data.is_cpu:
                measure = MEASURES.get(data.dtype)
                if measure is not None:
                    value.statistics = measure(data) if count < _VIEW_FROM else self._measured_view(data, measure)
            elif not data.is_meta:
                self.deferred.measure(value, data)
        except (RuntimeError, NotImplementedError, TypeError):
            pass  # a tensor that holds no data of its own: type, dtype and shape are the record

    def _measured_view(self, data: Tensor, measure: Callable[[Tensor], Statistics]) -> Statistics:
        base = data._base
        owner = data if base is None else base
        try:
            version = owner._version
        except RuntimeError:  # inference tensors have no versions
            return measure(data)
        key = (data.data_ptr(), data.dtype, covered_by(data))
        known = self._views.get(key)
        # While the owner lives nobody else can have its memory.
        if known is not None and known[0]() is owner and known[1] == version:
            return known[2]
        statistics = measure(data)
        self._views[key] = (weakref.ref(owner), version, statistics)
        return statistics

    # -- everything else

    def _leaf(self, value: Any) -> Value:
        if isinstance(value, Tensor):
            return self._subclass(value)
        if isinstance(value, dist.ProcessGroup):
            return process_group(value)
        kind = type(value)
        if kind.__module__.startswith("torch") and kind.__name__ in ("ReduceOp", "RedOpType"):
            return text("torch.distributed.ReduceOp", f"RedOpType.{reduce_op(value)}")
        if kind is dist.P2POp:
            return self._p2p(value)
        if kind.__module__ == "numpy":
            described = numpy_value(value)
            if self._saver is not None and self._session.saving and isinstance(described, TensorValue):
                self._keep_array(described, value)
            return described
        return None

    def _keep_array(self, described: TensorValue, array: Any) -> None:
        """Save an array as the tensor that `torch.tensor` makes of it, as msprobe does; texts and objects are not."""
        import numpy as np

        if self._saver is not None and array.size and array.dtype.kind in "fiubc":
            try:
                # A copy in this machine's byte order: what torch shares memory with, it wants writable and forward.
                tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
            except TypeError:  # a type that torch does not have (float128)
                return
            self._saver.keep(described, tensor)

    def _subclass(self, tensor: Tensor) -> TensorValue:
        # Its own __torch_function__ must not hear of us.
        with DisableTorchFunction():
            value, data = self._described_subclass(tensor)
            if self._saver is not None and self._session.saving and data is not None and data.numel():
                self._saver.keep(value, _dense(data))
            return value

    def _described_subclass(self, tensor: Tensor) -> tuple[TensorValue, Tensor | None]:
        """Its record, and the plain tensor that holds its numbers on this rank."""
        kind = type(tensor)
        name = f"{kind.__module__}.{kind.__qualname__}"
        local = getattr(tensor, "_local_tensor", None)
        if isinstance(local, Tensor) and hasattr(tensor, "placements"):
            data, coming = self._numbers(local)  # the shard may be a subclass too
            return self._dtensor(tensor, local, data, coming), data
        data, coming = self._numbers(tensor)
        return self._measured(tensor, name, data, coming=coming), data

    def _numbers(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The plain tensor that holds its numbers, and the one that will when the program has waited for it."""
        if type(tensor) is Tensor:
            return held(tensor), None
        if not _computes(tensor):
            return held(tensor.as_subclass(Tensor)), None
        if self._in_flight.is_result(tensor):
            data = tensor.elem
            if not _computes(data):
                return (held(data), None) if tensor.completed else (None, data)
        # It computes for itself (FakeTensor, a wrapper): asking it for numbers would run its code.
        return None, None

    def _dtensor(self, tensor: Any, local: Tensor, data: Tensor | None, coming: Tensor | None) -> TensorValue:
        mesh = tensor.device_mesh.mesh.tolist()
        placements = ", ".join(_placement(placement) for placement in tensor.placements)
        # Type, dtype, shape and statistics are the shard's; asking for more would be a communication.
        tail = f', "device_mesh": {mesh}, "placements": [{placements}], "global_shape": {list(tensor.shape)}'
        return self._measured(local, "torch.distributed.tensor.DTensor", data, tail, coming)

    @staticmethod
    def _size(value: torch.Size) -> PlainValue:
        return plain("torch.Size", str(list(value)))

    @staticmethod
    def _device(value: torch.device) -> PlainValue:
        return text("torch.device", str(value))

    @staticmethod
    def _memory_format(value: torch.memory_format) -> PlainValue:
        name = quote(str(value).removeprefix("torch."))
        return PlainValue(f'{{"type": "torch.memory_format", "format": {name}}}')

    def _named(self, type_name: str) -> Any:
        known = self._plain

        def describe(value: Any) -> PlainValue:
            found = known.get(value)
            if found is None:
                found = known[value] = text(type_name, str(value))
            return found

        return describe

    def _p2p(self, value: Any) -> Value:
        return {
            "class_type": PlainValue('"torch.distributed.P2POp"'),
            "tensor": self.describe(value.tensor),
            "op": PlainValue(quote(getattr(value.op, "__name__", str(value.op)))),
            "peer": PlainValue(str(value.peer)),
            "tag": PlainValue(str(value.tag)),
            "group_id": PlainValue(quote(group_id(group_ranks(value.group)))),
        }


def _computes(tensor: Tensor) -> bool:
    """True for a subclass with operations of its own."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def _dense(tensor: Tensor) -> Tensor:
    """The numbers a tensor holds, as a strided one: the stored values of a sparse one, all of a nested one."""
    if tensor.is_nested or tensor.layout is not _STRIDED:
        return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.dequantize() if tensor.is_quantized else tensor


def held(tensor: Tensor) -> Tensor | None:
    """The tensor, or None where its memory was given back.

    FSDP frees the storage of gathered parameters. Such a tensor has a shape, and the address 0 plus an offset: reading
    it would end the process. Addresses of a 64-bit process lie above 2^40, save the heap of an interpreter that is not
    position-independent, so the storage is asked (0.4 us) only below that.
    """
    try:
        if tensor.data_ptr() < _LOW and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            return None
    except RuntimeError:  # no storage at all (functional transforms, sparse): whoever measures it finds out
        pass
    return tensor


def _placement(placement: Any) -> str:
    if placement.is_shard():
        return f'{{"Shard": {{"dim": {placement.dim}}}}}'
    if placement.is_partial():
        how = str(placement.reduce_op)
        if how == "sum" and hasattr(placement, "norm_type"):
            how = f"norm{placement.norm_type}"  # torch's `_NormPartial` calls itself a sum, and is one of powers
        return f'{{"Partial": {{"reduce_op": {quote(how)}}}}}'
    return '{"Replicate": {}}'


def group_ranks(group: Any) -> list[int]:
    """Global ranks of a process group (None: the default group), ascending by group rank."""
    return list(dist.get_process_group_ranks(group))


def group_id(ranks: list[int]) -> str:
    """The field's group id: CRC-32 of the ranks' text, 8 hex digits."""
    return f"{zlib.crc32(str(ranks).encode()):08x}"


def process_group(group: Any) -> Value:
    """A process group as its global ranks; None for one that this rank is no member of."""
    try:
        ranks = group_ranks(group)
    except (RuntimeError, KeyError, ValueError):
        return None
    return PlainValue(f'{{"type": "torch.ProcessGroup", "group_ranks": {ranks}, "group_id": "{group_id(ranks)}"}}')


def reduce_op(value: Any) -> str:
    """Name of a reduce operation (`SUM`): `ReduceOp` holds a `RedOpType`, and either may be handed over."""
    return str(getattr(value, "op", value)).rpartition(".")[2]
