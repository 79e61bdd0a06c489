"""Statistics of one tensor: (max, min, mean, L2 norm).

Maximum and minimum are exact. Mean and norm are accumulated in at least float32 whatever the dtype; where float32
overflows (a norm of values above 1e19, a sum above 3e38) they are computed again in float64. The norm is
sqrt(sum |x|^2), mean is sum / n, both over all elements; of complex tensors all four are of the absolute values.
bool: max is any(), min is all(), no mean or norm. NaN anywhere makes all four NaN.

The reductions run at once, because the tensor may be changed in place a moment later; on a device only their four
results are brought home later, in one transfer for all tensors (`Deferred.settle`). The caller has switched gradients
and torch functions off.

On the CPU the kernel of `msprobe_launch.native` reads memory once: 1 us for a small tensor and 0.16 ms for 1M float32,
where torch's reductions take 8 us and 0.66 ms (docs/benchmarks.md). Without it those are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from msprobe_launch import native
from msprobe_launch.records.model import Statistics, TensorValue

Measure = Callable[[Tensor], Statistics]

_aminmax = torch.aminmax
_sum = torch.sum
_norm = torch.linalg.vector_norm
_FLOAT64 = torch.float64

# Elements per piece where a narrow dtype is widened: 512 KiB of float32 stay in a core's L2 cache.
PIECE = 1 << 17


def _by_kernel(kernel: native.Kernel) -> Measure:
    def measure(tensor: Tensor) -> Statistics:
        if tensor.is_neg():  # a lazy sign, from the imaginary part of a conjugate
            tensor = tensor.resolve_neg()
        if tensor.is_contiguous():
            return kernel(tensor.data_ptr(), 1, 0, tensor.numel())
        rows = rows_of(tensor)
        if rows is not None:
            return kernel(tensor.data_ptr(), *rows)
        packed = tensor.contiguous()  # in a name of its own: the kernel reads an address, which keeps nothing alive
        return kernel(packed.data_ptr(), 1, 0, packed.numel())

    return measure


# What `rows_of` has found so far, by (strides, shape), 250 bytes each; a model has some hundred.
ROWS_LIMIT = 512
ROWS: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int, int] | None] = {}


def rows_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """How the kernel can read a tensor in place, in whatever order: (rows, elements between them, elements per row).

    Contiguous and transposed ones are one row, slices of wider rows are some; None where it takes more than that.
    """
    key = (tensor.stride(), tensor.shape)
    try:
        return ROWS[key]
    except KeyError:
        pass
    covered = covered_by(tensor)
    rows = None
    if len(covered) == 1 and covered[0][0] == 1:
        rows = 1, 0, covered[0][1]
    elif len(covered) == 2 and covered[0][0] == 1:
        rows = covered[1][1], covered[1][0], covered[0][1]
    if len(ROWS) >= ROWS_LIMIT:
        ROWS.clear()
    ROWS[key] = rows
    return rows


def covered_by(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Which elements a tensor covers from its address on, whatever their order: merged (stride, size) pairs."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return tuple(merged)


def _by_torch(tensor: Tensor) -> Statistics:
    """float32 and float64, by torch's own reductions."""
    n = tensor.numel()
    if n == 1:
        value = tensor.item()
        return value, value, value, abs(value)
    low, high = _aminmax(tensor)
    total, norm = _sum(tensor).item(), _norm(tensor).item()
    top = high.item()
    if (total - total != 0.0 or norm == math.inf) and math.isfinite(top) and math.isfinite(low.item()):
        wide = tensor.double()
        total, norm = _sum(wide).item(), _norm(wide).item()
    return top, low.item(), total / n, norm


def _widened(measure: Measure) -> Measure:
    """Narrow floating dtypes: widened to float32, piece by piece where they are large."""

    def pieces(tensor: Tensor) -> Statistics:
        n = tensor.numel()
        if n <= PIECE:
            return measure(tensor.float())
        high, low, total, squares = -math.inf, math.inf, 0.0, 0.0
        for piece in tensor.reshape(-1).split(PIECE):
            top, bottom, mean, norm = measure(piece.float())
            if top != top:
                return math.nan, math.nan, math.nan, math.nan
            high, low = max(high, top), min(low, bottom)
            total += mean * piece.numel()
            squares += norm * norm
        return high, low, total / n, math.sqrt(squares)

    return pieces


def _integer(tensor: Tensor) -> Statistics:
    if tensor.numel() == 1:
        value = tensor.item()
        return value, value, float(value), float(abs(value))
    low, high = _aminmax(tensor)
    wide = tensor.double()
    return high.item(), low.item(), _sum(wide).item() / tensor.numel(), _norm(wide).item()


def _unsigned(tensor: Tensor) -> Statistics:
    """uint16, uint32, uint64: torch has no reductions for them."""
    return _integer(tensor.to(torch.int64))


def _bool(tensor: Tensor) -> Statistics:
    return bool(tensor.any()), bool(tensor.all()), None, None


def measures(kernels: dict[str, native.Kernel]) -> dict[torch.dtype, Measure]:
    """dtype -> statistics of a plain strided CPU tensor that is not empty. A dtype that is not here has none.

    They raise what torch raises. With `kernels` empty, torch's own reductions are used.
    """

    def floating(name: str) -> Measure:
        return _by_kernel(kernels[name]) if name in kernels else _by_torch

    single = floating("float32")
    narrow = _widened(single)
    kinds: dict[torch.dtype, Measure] = {
        torch.float32: single,
        torch.float64: floating("float64"),
        torch.bfloat16: _by_kernel(kernels["bfloat16"]) if "bfloat16" in kernels else narrow,
        torch.float16: narrow,
        torch.bool: _bool,
        torch.complex64: lambda tensor: single(tensor.abs()),
        torch.complex128: lambda tensor: kinds[_FLOAT64](tensor.abs()),
    }
    for name in ("int8", "int16", "int32", "int64", "uint8"):
        kinds[getattr(torch, name)] = _integer
    for name in ("uint16", "uint32", "uint64"):
        if hasattr(torch, name):
            kinds[getattr(torch, name)] = _unsigned
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        if hasattr(torch, name):
            kinds[getattr(torch, name)] = narrow
    return kinds


MEASURES = measures(native.load())
# dtype -> number of its kernel, see `native.load_table`.
ELEMENTS = {getattr(torch, name): number for name, number in native.ELEMENTS.items()}


class Deferred:
    """Statistics of device tensors that were reduced on the device and wait for the next flush.

    Float64 rows keep integers exact up to 2**53. `settle` makes one transfer, whatever the number of tensors.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[TensorValue, Tensor, torch.dtype]] = []

    def measure(self, value: TensorValue, tensor: Tensor) -> None:
        """Reduce now, without waiting for the device; `value.statistics` is filled by `settle`."""
        dtype = tensor.dtype
        if dtype not in MEASURES or not tensor.numel():
            return
        if dtype is torch.bool:
            row = torch.stack([tensor.any(), tensor.all(), tensor.any(), tensor.any()]).to(_FLOAT64)
        else:
            if dtype.is_complex:
                tensor = tensor.abs()
            elif tensor.element_size() < 4 or not dtype.is_floating_point:
                tensor = tensor.float() if dtype.is_floating_point else tensor.double()
            low, high = _aminmax(tensor)
            row = torch.stack([high, low, tensor.mean(), _norm(tensor)]).to(_FLOAT64)
        self._waiting.append((value, row, dtype))

    @property
    def waits(self) -> bool:
        """True where something is still on a device."""
        return bool(self._waiting)

    def settle(self) -> None:
        """Bring all waiting results home and fill them in."""
        waiting, self._waiting = self._waiting, []
        by_device: dict[torch.device, list[tuple[TensorValue, Tensor, torch.dtype]]] = {}
        for entry in waiting:
            by_device.setdefault(entry[1].device, []).append(entry)
        for entries in by_device.values():
            rows = torch.stack([row for _, row, _ in entries]).cpu().tolist()
            for (value, _, dtype), (high, low, mean, norm) in zip(entries, rows, strict=True):
                if dtype is torch.bool:
                    value.statistics = (bool(high), bool(low), None, None)
                elif dtype.is_floating_point or dtype.is_complex:
                    value.statistics = (high, low, mean, norm)
                else:
                    value.statistics = (int(high), int(low), mean, norm)
