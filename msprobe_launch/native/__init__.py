"""The statistics kernel in C, where it could be compiled. Framework-neutral: it reads memory by address.

Compiled when the package is built (`hatch_build.py`). It is called through ctypes and holds no state.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

LIBRARY = Path(__file__).with_name("_statistics.so")

# Elements from which a call lets other threads run: below, giving the interpreter lock away costs more than the work.
RELEASE_FROM = 1 << 15

Row4 = tuple[float, float, float, float]
# (address, rows, elements between rows, elements per row) -> (max, min, mean, L2 norm)
Kernel = Callable[[int, int, int, int], Row4]


def load() -> dict[str, Kernel]:
    """Kernels by element type (`float32`, `float64`, `bfloat16`); empty where there is no library for this machine."""
    try:
        quick, long = ctypes.PyDLL(str(LIBRARY)), ctypes.CDLL(str(LIBRARY))
    except OSError:
        return {}
    return {name: _kernel(quick, long, name) for name in ("float32", "float64", "bfloat16")}


def _kernel(quick: ctypes.CDLL, long: ctypes.CDLL, name: str) -> Kernel:
    functions = [getattr(library, f"statistics_{name}") for library in (quick, long)]
    for function in functions:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        function.restype = None
    held, released = functions
    buffer = (ctypes.c_double * 4)()
    address = ctypes.addressof(buffer)
    sqrt = math.sqrt

    def kernel(data: int, rows: int, stride: int, count: int) -> Row4:
        n = rows * count
        if n < RELEASE_FROM:
            held(data, rows, stride, count, address)
            high, low, total, squares = buffer[:]  # iterating over it takes four times as long
        else:
            # Another thread may come in while this one computes: it has the shared buffer, we have our own.
            own = (ctypes.c_double * 4)()
            released(data, rows, stride, count, ctypes.addressof(own))
            high, low, total, squares = own[:]
        return high, low, total / n, sqrt(squares)

    return kernel
