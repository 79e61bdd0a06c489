"""One pass over two stored tensors in C, where it could be compiled (`hatch_build.py`).

Nothing but speed hangs on it: without the library, and for all that it does not know, `aggregator.tensors` computes the
same with numpy. `_values.so` is called through ctypes, holds no state and reads memory by address.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("_values.so")

# Element type -> that of relative errors, which the limits are given in.
_TYPES = {
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "bfloat16": ctypes.c_float,
    "float16": ctypes.c_float,
}


@dataclass(frozen=True, slots=True)
class Apart:
    """How far two arrays are apart: sums of products and squares, the largest of each, and two counts."""

    tt: float
    bb: float
    tb: float
    squares: float
    error: float
    largest: float
    relative: float
    below: tuple[int, int]


# (address of the target's elements, of the bench's, how many) -> Apart; None where values or sums are not finite.
Kernel = Callable[[int, int, int], "Apart | None"]


@functools.cache
def kernels(limits: tuple[float, float]) -> Mapping[str, Kernel]:
    """Kernels by element type; empty where there is no library for this machine.

    `limits`: an element counts where its relative error is below the first, and below the second.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
        return {name: _kernel(getattr(library, f"apart_{name}"), (kind * 2)(*limits)) for name, kind in _TYPES.items()}
    except (OSError, AttributeError):  # none, or one of another version
        return {}


def _kernel(function: ctypes._NamedFuncPointer, limits: ctypes.Array[Any]) -> Kernel:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, pointer, size, pointer, pointer, pointer]
    function.restype = ctypes.c_int

    def apart(target: int, bench: int, count: int) -> Apart | None:
        out, near = (ctypes.c_double * 7)(), (ctypes.c_uint64 * 2)()
        if function(target, bench, count, limits, out, near) < 0:
            return None
        tt, bb, tb, squares, error, largest, relative = out
        return Apart(tt, bb, tb, squares, error, largest, relative, (near[0], near[1]))

    return apart
