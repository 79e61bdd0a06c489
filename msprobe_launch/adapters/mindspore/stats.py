"""Statistics of one tensor as numpy sees it: (max, min, mean, L2 norm), with the meaning of the torch adapter's.

The array shares the tensor's memory and is never written to. The C kernels read it once: 1 us for a small one, where
numpy's reductions take 14 us. bfloat16 has no numpy type of its own: MindSpore's has kind 'V', and the kernel reads its
bits; without the kernel they are widened exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from msprobe_launch import native
from msprobe_launch.records.model import NO_STATISTICS, Statistics

Measure = Callable[[Any], Statistics]

# Elements per piece where a narrow type is widened: 512 KiB of float32 stay in a core's L2 cache.
PIECE = 1 << 17


def _by_kernel(kernel: native.Kernel) -> Measure:
    def measure(array: Any) -> Statistics:
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        return kernel(array.__array_interface__["data"][0], 1, 0, array.size)

    return measure


def _by_numpy(array: Any) -> Statistics:
    """float32 and float64."""
    flat = array.ravel()
    high, low = float(flat.max()), float(flat.min())
    wide = flat if flat.dtype == np.float64 else flat.astype(np.float64)
    with np.errstate(all="ignore"):
        mean, norm = float(wide.mean()), math.sqrt(float(np.dot(wide, wide)))
    if high != high:
        return high, high, high, high
    return high, low, mean, norm


def widened(array: Any) -> Any:
    """bfloat16 as float32, exactly."""
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrow(measure: Measure, widen: Callable[[Any], Any]) -> Measure:
    def pieces(array: Any) -> Statistics:
        flat = array.ravel()
        if flat.size <= PIECE:
            return measure(widen(flat))
        high, low, total, squares = -math.inf, math.inf, 0.0, 0.0
        for start in range(0, flat.size, PIECE):
            piece = widen(flat[start : start + PIECE])
            top, bottom, mean, norm = measure(piece)
            if top != top:
                return math.nan, math.nan, math.nan, math.nan
            high, low = max(high, top), min(low, bottom)
            total += mean * piece.size
            squares += norm * norm
        return high, low, total / flat.size, math.sqrt(squares)

    return pieces


def _integer(array: Any) -> Statistics:
    wide = array.ravel().astype(np.float64)
    return int(array.max()), int(array.min()), float(wide.mean()), math.sqrt(float(np.dot(wide, wide)))


def _bool(array: Any) -> Statistics:
    return bool(array.any()), bool(array.all()), None, None


def measures(kernels: dict[str, native.Kernel]) -> dict[str, Measure]:
    """numpy type name -> statistics of an array that is not empty. A type that is not here has none.

    With `kernels` empty, numpy's own reductions are used.
    """

    def floating(name: str) -> Measure:
        return _by_kernel(kernels[name]) if name in kernels else _by_numpy

    single, double = floating("float32"), floating("float64")
    bfloat16 = _by_kernel(kernels["bfloat16"]) if "bfloat16" in kernels else _narrow(single, widened)
    kinds: dict[str, Measure] = {
        "float32": single,
        "float64": double,
        "float16": _narrow(single, lambda piece: piece.astype(np.float32)),
        "bfloat16": bfloat16,
        "bool": _bool,
        "complex64": lambda array: single(np.abs(array)),
        "complex128": lambda array: double(np.abs(array)),
    }
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        kinds[name] = _integer
    return kinds


MEASURES = measures(native.load())


def statistics_of(array: Any) -> Statistics:
    """Statistics of any array; none of an empty one and of types that have none."""
    if not array.size:
        return NO_STATISTICS
    measure = MEASURES.get(array.dtype.name)
    return measure(array) if measure is not None else NO_STATISTICS
