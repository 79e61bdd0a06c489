"""MindSpore values -> recorded values.

Nothing is remembered about a tensor: its version counter stays 0 through in-place operations, so nobody can tell
whether it is still what it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore.common.dtype import float32
from mindspore.common.sparse_tensor import COOTensor, CSRTensor, RowTensor

from msprobe_launch.adapters.arrays import numpy_value
from msprobe_launch.adapters.mindspore import runtime
from msprobe_launch.adapters.mindspore.device import Deferred
from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import Parameter, Tensor
from msprobe_launch.adapters.mindspore.saving import ArraySaver, crc32_text, xor_text
from msprobe_launch.adapters.mindspore.stats import statistics_of
from msprobe_launch.capture.plain import NamesOnly, PlainDescriber, text
from msprobe_launch.config import SummaryMode, Task
from msprobe_launch.records.codec import tensor_head
from msprobe_launch.records.model import PlainValue, TensorValue, Value

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

# Heads by (dtype, shape), 300 bytes each. A model has some hundred; where every batch has new shapes none is met again.
HEADS_LIMIT = 512
_TENSOR = "mindspore.Tensor"
_SPARSE = (COOTensor, CSRTensor, RowTensor)
_TYPE: type = type(float32).__mro__[2]  # the base of all of MindSpore's types


class MindSporeValues:
    """Describes any value of a MindSpore program.

    Reading a tensor waits for the operations that compute it, and raises what went wrong in them: errors of the
    program's own. They are kept in `theirs`, and the wrapper around the call raises them (`raise_theirs`); they never
    count as ours.
    """

    def __init__(self, session: Session, switch: Switch) -> None:
        config = session.config
        self.describe = (NamesOnly if config.task is Task.STRUCTURE else PlainDescriber)(self._leaf)
        self.deferred = Deferred(switch, self._fill)
        self.theirs: BaseException | None = None
        self._session = session
        self._fresh: list[TensorValue] = []
        self._saver = ArraySaver(session) if config.saves_values else None
        self._mode = config.summary_mode
        self._heads: dict[tuple[Any, Any], str] = {}
        self._types: dict[str, PlainValue] = {}
        self._host: bool | None = None
        by_type = self.describe.by_type
        by_type[Tensor] = self._tensor
        by_type[Parameter] = self._tensor

    def save_values(self) -> None:
        """Values may be saved from now on, although the configuration asked for none."""
        if self._saver is None:
            self._saver = ArraySaver(self._session)

    def raise_theirs(self) -> None:
        """Raise the program's own error, where reading a tensor has met one."""
        if self.theirs is not None:
            error, self.theirs = self.theirs, None
            raise error.with_traceback(None)

    @property
    def settles_at_once(self) -> bool:
        """True where nothing waits on a device."""
        return not self.deferred.waits

    def settle(self) -> list[TensorValue]:
        """Tensors seen since the last call, their statistics brought home."""
        try:
            self.deferred.settle()
        except Exception as error:  # noqa: BLE001 - the device failed in the program's own work
            self.theirs = error
        # What comes in meanwhile (in another thread) stays in the list.
        fresh = self._fresh[:]
        del self._fresh[: len(fresh)]
        return fresh

    def _tensor(self, tensor: Any) -> TensorValue:
        value = TensorValue(self._head(tensor.dtype, tensor.shape), requires_grad=None)
        self._read(value, tensor)
        # Only now: reading waits without the interpreter's lock, and where another thread settles meanwhile (backward
        # hooks have one of their own) the value would be written without its statistics.
        if self._mode is not SummaryMode.XOR:  # which makes the text itself
            self._fresh.append(value)
        return value

    def _read(self, value: TensorValue, tensor: Any) -> None:
        """Statistics and what is saved of a tensor, now or (on a device) later."""
        if self._host is None:
            self._host = runtime.on_host()
        if tensor.has_init or runtime.is_traced():
            return  # reading would run an initializer that the program has not run, or break a trace
        if not self._host and self._on_device(value, tensor):
            return
        try:
            array = tensor.asnumpy()
        except Exception as error:  # noqa: BLE001 - an operation of the program has failed, and this is where it is said
            self.theirs = error
            return
        self._fill(value, array, self._session.saving)

    def _on_device(self, value: TensorValue, tensor: Any) -> bool:
        """True where the statistics come later, or the value when it has come home."""
        device = getattr(tensor, "device", None)
        if isinstance(device, str) and device.startswith("CPU"):
            return False
        whole = self._mode is not SummaryMode.STATISTICS or (self._saver is not None and self._session.saving)
        self.deferred.add(value, tensor, whole=whole, saving=self._session.saving)
        return True

    def _fill(self, value: TensorValue, array: Any, saving: bool) -> None:
        mode = self._mode
        if mode is SummaryMode.XOR:
            value.text = f'{value.head}, "md5": {xor_text(array) if array.size else "null"}}}'
        else:
            value.statistics = statistics_of(array)
            if mode is SummaryMode.MD5:
                value.tail = f'{value.tail}, "md5": {crc32_text(array)}'
        if saving and self._saver is not None and array.size and value.saved is None:
            self._saver.keep(value, array)

    def _head(self, dtype: Any, shape: Any) -> str:
        key = (dtype, shape)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= HEADS_LIMIT:
                self._heads.clear()
            head = self._heads[key] = tensor_head(_TENSOR, str(dtype), list(shape))
        return head

    def _leaf(self, value: Any) -> Value:
        if isinstance(value, Tensor):  # a parameter (its class is made by MindSpore), or a subclass
            if issubclass(type(value), Parameter):
                self.describe.by_type[type(value)] = self._tensor
            return self._tensor(value)
        if isinstance(value, _TYPE):
            name = str(value)
            if name not in self._types:
                self._types[name] = text("mindspore.dtype", name)
            return self._types[name]
        if isinstance(value, _SPARSE):
            return TensorValue(
                tensor_head(f"mindspore.{type(value).__name__}", str(value.dtype), list(value.shape)),
                requires_grad=None,
            )
        if type(value).__module__ == "numpy":
            described = numpy_value(value)
            wanted = self._saver is not None and self._session.saving and isinstance(described, TensorValue)
            if wanted and value.size and value.dtype.kind in "fiubc":
                self._saver.keep(described, value)  # type: ignore[union-attr,arg-type]
            return described
        return None
