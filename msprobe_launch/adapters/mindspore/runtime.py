"""What the adapter needs of MindSpore's inside, all of it in one place: it moves from release to release.

In the whole package no module object of MindSpore's is kept. A module that somebody keeps is emptied at the end of the
process, a module that nobody keeps is not, and `Cell.__del__` of a program's last cells needs what is in its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore._c_expression import MSContext, ms_ctx_param
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
    "InOrder",
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


class InOrder:
    """Operations run where they are called, one after the other, while we read their results on the host.

    MindSpore hands each operation through three threads; to read a result is to wait for all of them, 0.5 to 4 ms a
    time, which is most of what recording would cost. Results and their order are the same. A failing operation raises
    in its own line, which is where reading its result would raise it.
    """

    def __init__(self) -> None:
        self._on = False
        self._pipeline = False  # ours to switch on again
        self._was_blocking = False

    def enter(self) -> None:
        """From now on, until `leave`. Nothing on an accelerator, nor in graph mode."""
        if self._on or in_graph_mode() or not on_host():
            return
        self._on = True
        if not _executor.disable_frontend_and_bprop_pipeline():
            self._pipeline = True
        context = MSContext.get_instance()
        self._was_blocking = bool(context.get_param(ms_ctx_param.pynative_synchronize))
        context.set_param(ms_ctx_param.pynative_synchronize, True)

    def leave(self) -> None:
        """As it was before `enter`; what the program has switched itself in between is not noticed."""
        if not self._on:
            return
        self._on = False
        if not self._was_blocking:
            MSContext.get_instance().set_param(ms_ctx_param.pynative_synchronize, False)
        # Hooks on saved tensors need the pipeline off as well; it is ours to switch on again later.
        if self._pipeline and not _executor.is_saved_tensor_hook_active():
            self._pipeline = False
            _executor.enable_frontend_and_bprop_pipeline()
