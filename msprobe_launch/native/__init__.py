"""Statistics, checksums, plain tensors and the graphs of calls in C, where it was compiled (`hatch_build.py`).

`_statistics.so` is called through ctypes, holds no state and reads memory by address. `_tensors.abi3.so` and
`_graph.abi3.so` are modules for any CPython since 3.10; they need that one's header files when they are compiled, and
nothing but speed hangs on them.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


# Element types of `load_table`; the numbers are those of tensors.c.
ELEMENTS = {"float32": 0, "float64": 1, "bfloat16": 2}


def load_table(
    general: Callable[[Any], Any],
    make: Callable[[Any, Any, Any], Any],
    *,
    cache: dict[int, tuple[Any, int, int, Any]],
    heads: dict[Any, str],
    kinds: dict[Any, int],
    rows: dict[Any, tuple[int, int, int] | None],
    fresh: list[Any],
    below: int,
    limit: int,
) -> Callable[[Any], Any] | None:
    """`general`, with plain tensors of less than `below` elements described in C; None where that is not compiled.

    `kinds` maps a framework's dtypes to ELEMENTS. The dictionaries and the list are shared with the caller: both sides
    read and fill `cache` (`limit` entries at most) and `fresh`; `heads` and `rows` are filled by `general` alone.
    """
    try:
        from msprobe_launch.native._tensors import Table  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return None
    table: Callable[[Any], Any] = Table(cache, heads, kinds, rows, fresh, make, weakref.ref, general, below, limit)
    return table


def load_graph() -> Any:
    """`Edges`, `whole` and `consumers` of graph.c; None where it is not compiled."""
    try:
        from msprobe_launch.native import _graph  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return None
    return _graph


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
