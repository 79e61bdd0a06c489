"""What the adapter needs of MindSpore's inside, all of it in one place: it moves from release to release.

In the whole package no module object of MindSpore's is kept. A module that somebody keeps is emptied at the end of the
process, a module that nobody keeps is not, and `Cell.__del__` of a program's last cells needs what is in its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore.common.parameter import Parameter
from mindspore.common.tensor import Tensor
from mindspore.context import GRAPH_MODE, _get_mode, get_context
from mindspore.experimental.optim.optimizer import Optimizer as ExperimentalOptimizer
from mindspore.graph._parse.resources import convert_object_map
from mindspore.graph.api import _no_grad, _pynative_executor
from mindspore.graph.jit_context import jit_context
from mindspore.nn.cell import Cell
from mindspore.nn.optim.optimizer import Optimizer
from mindspore.ops import add  # before it is wrapped
from mindspore.ops.primitive import Primitive

__all__ = [
    "OPTIMIZERS",
    "Cell",
    "Parameter",
    "Primitive",
    "Tensor",
    "add_gradients",
    "builds_graph",
    "in_graph_mode",
    "is_traced",
    "on_host",
    "seen_as",
    "top_cell",
]

# mint.optim is derived from the second.
OPTIMIZERS: tuple[type, ...] = (Optimizer, ExperimentalOptimizer)

_executor = _pynative_executor

# True while operations are noted for a backward (inside `grad`, `value_and_grad`, and what they recompute).
builds_graph: Callable[[], bool] = _executor.requires_grad


def add_gradients(one: Any, other: Any) -> Any:
    """The sum of two contributions to a gradient, out of place: the engine's buffers are its own."""
    with _no_grad():
        return add(one, other)


def in_graph_mode() -> bool:
    """True where a cell's call compiles and runs a graph instead of its Python code."""
    return bool(_get_mode() == GRAPH_MODE)


def is_traced() -> bool:
    """True where calls build a graph instead of computing: values are placeholders, and must not be touched."""
    return jit_context() is not None


def top_cell(cell: Any) -> bool:
    """True where a call of this cell, made now, opens the graph for a backward."""
    return bool(cell.requires_grad) and (not _executor.grad_flag() or bool(_executor.high_order()))


def on_host() -> bool:
    """True where tensors lie in the host's memory, so that numpy reads them without a copy."""
    return bool(get_context("device_target") == "CPU")


def seen_as(wrapper: Any, original: Any) -> None:
    """Let the graph compilers see `original` where a program calls `wrapper`.

    Without it the compiler of byte code gave a wrong loss, silently.
    """
    convert_object_map[wrapper] = convert_object_map.get(original, original)
