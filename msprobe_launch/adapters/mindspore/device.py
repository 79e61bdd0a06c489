"""Tensors on an accelerator: reduced there at once, their results brought home later, all in one transfer.

Nothing here waits for the device but `settle`. It runs at the session's flush, or earlier where LIMIT bytes of copies
wait: those are of tensors of which all bytes are wanted (values, checksums).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore.common.dtype import bool_, complex_type, float32, float_type
from mindspore.graph.api import _no_grad
from mindspore.mint import clone  # before it is wrapped, as those below
from mindspore.ops import ReduceMax, ReduceMin, ReduceSum, cast, sqrt, square, stack
from mindspore.ops import abs as absolute

from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.records.model import TensorValue

LIMIT = 64 << 20

_max, _min, _sum = ReduceMax(), ReduceMin(), ReduceSum()


class Deferred:
    """Results that wait on the device. `fill(value, array, saving)` gets whole tensors when they are home."""

    def __init__(self, switch: Switch, fill: Callable[[TensorValue, Any, bool], None]) -> None:
        self._switch = switch
        self._fill = fill
        self._rows: list[tuple[TensorValue, Any, Any, int]] = []
        self._copies: list[tuple[TensorValue, Any, bool]] = []
        self._bytes = 0

    @property
    def waits(self) -> bool:
        """True where something is still on the device."""
        return bool(self._rows or self._copies)

    def add(self, value: TensorValue, tensor: Any, *, whole: bool, saving: bool) -> None:
        """Reduce `tensor` as it is now, or copy it where it is wanted `whole`."""
        self._switch.enter_quiet()
        try:
            with _no_grad():
                if whole:
                    self._copies.append((value, clone(tensor), saving))
                    self._bytes += tensor.nbytes
                else:
                    self._reduce(value, tensor)
        finally:
            self._switch.leave_quiet()
        if self._bytes >= LIMIT:
            self.settle()

    def _reduce(self, value: TensorValue, tensor: Any) -> None:
        dtype, count = tensor.dtype, tensor.size
        if not count:
            return
        if dtype in complex_type:
            tensor = absolute(tensor)
        if tensor.dtype != float32:
            tensor = cast(tensor, float32)
        row = stack([_max(tensor), _min(tensor), _sum(tensor), sqrt(_sum(square(tensor)))])
        self._rows.append((value, row, dtype, count))

    def settle(self) -> None:
        """Bring all waiting results home and fill them in. Raises what the device raises."""
        rows, self._rows = self._rows, []
        copies, self._copies, self._bytes = self._copies, [], 0
        if rows:
            self._switch.enter_quiet()
            try:
                with _no_grad():
                    home = stack([row for _, row, _, _ in rows]).asnumpy().tolist()
            finally:
                self._switch.leave_quiet()
            for (value, _, dtype, count), (high, low, total, norm) in zip(rows, home, strict=True):
                if dtype == bool_:
                    value.statistics = (bool(high), bool(low), None, None)
                elif dtype in float_type or dtype in complex_type:
                    value.statistics = (high, low, total / count, norm)
                else:
                    value.statistics = (int(high), int(low), total / count, norm)
        for value, copy, saving in copies:
            self._fill(value, copy.asnumpy(), saving)
