"""Statistics and checksums in C, where they could be compiled. Framework-neutral: it reads memory by address.

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


# (address, bytes) -> checksum
Checksum = Callable[[int, int], int]


def load_checksums() -> dict[str, Checksum]:
    """`crc32` (as zlib has it) and `xor` (of 8-byte words); empty where there is no library for this machine."""
    try:
        quick, long = ctypes.PyDLL(str(LIBRARY)), ctypes.CDLL(str(LIBRARY))
        return {"crc32": _crc32(quick, long), "xor": _xor(quick, long)}
    except (OSError, AttributeError):  # none, or one of an earlier version
        return {}


def _crc32(quick: ctypes.CDLL, long: ctypes.CDLL) -> Checksum:
    functions = [library.crc32_of for library in (quick, long)]
    for function in functions:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        function.restype = ctypes.c_uint32
    held, released = functions
    limit = 4 * RELEASE_FROM

    def crc32(data: int, size: int) -> int:
        return int(held(data, size) if size < limit else released(data, size))

    return crc32


def _xor(quick: ctypes.CDLL, long: ctypes.CDLL) -> Checksum:
    functions = [library.xor_words for library in (quick, long)]
    for function in functions:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        function.restype = None
    held, released = functions
    limit = 4 * RELEASE_FROM

    def xor(data: int, size: int) -> int:
        out = ctypes.c_uint64()
        (held if size < limit else released)(data, size, ctypes.byref(out))
        return out.value

    return xor


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
