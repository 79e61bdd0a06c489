"""What the adapter needs of MindSpore's inside, all of it in one place: it moves from release to release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import context, ops
from mindspore.common.parameter import Parameter
from mindspore.common.tensor import Tensor
from mindspore.experimental.optim.optimizer import Optimizer as ExperimentalOptimizer
from mindspore.graph import jit_context
from mindspore.graph._parse.resources import convert_object_map
from mindspore.graph.api import _no_grad, _pynative_executor
from mindspore.nn.cell import Cell
from mindspore.nn.optim.optimizer import Optimizer
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

_mode: Callable[[], int] = context._get_mode
_GRAPH = context.GRAPH_MODE
_executor = _pynative_executor

# True while operations are noted for a backward (inside `grad`, `value_and_grad`, and what they recompute).
builds_graph: Callable[[], bool] = _executor.requires_grad


_add = ops.add  # taken before anything is wrapped


def add_gradients(one: Any, other: Any) -> Any:
    """The sum of two contributions to a gradient, out of place: the engine's buffers are its own."""
    with _no_grad():
        return _add(one, other)


def in_graph_mode() -> bool:
    """True where a cell's call compiles and runs a graph instead of its Python code."""
    return bool(_mode() == _GRAPH)


def is_traced() -> bool:
    """True where calls build a graph instead of computing: values are placeholders, and must not be touched."""
    return jit_context._jit_context is not None


def top_cell(cell: Any) -> bool:
    """True where a call of this cell, made now, opens the graph for a backward."""
    return bool(cell.requires_grad) and (not _executor.grad_flag() or bool(_executor.high_order()))


def on_host() -> bool:
    """True where tensors lie in the host's memory, so that numpy reads them without a copy."""
    return bool(context.get_context("device_target") == "CPU")


def seen_as(wrapper: Any, original: Any) -> None:
    """Let the graph compilers see `original` where a program calls `wrapper`.

    Without it the compiler of byte code gave a wrong loss, silently.
    """
    convert_object_map[wrapper] = convert_object_map.get(original, original)
