"""Optimizers and `grad` tell where a step ends; see `capture.steps` for what the session makes of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspore.train.callback._callback import CallbackManager

from msprobe_launch.adapters.mindspore import runtime
from msprobe_launch.adapters.mindspore.naming import CellInfo
from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import OPTIMIZERS, Cell
from msprobe_launch.logs import get_logger

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

Gradients = Callable[[Any, Any], None]


class Scope:
    """Where the program is: inside a differentiated function, or inside a forward that is left out.

    `inside` counts calls of `grad` under way: their cells and functions are not outermost ones, so that a program
    without cells, or one that updates its parameters by hand, has one step per `grad`. `skipped` is the info of an
    outermost cell that was taken for evaluation; a `grad` inside it says that it was not. `cells` are the calls of
    cells under way, outermost first.
    """

    __slots__ = ("_said_graphs", "cells", "inside", "skipped")

    def __init__(self) -> None:
        self.inside = 0
        self.skipped: CellInfo | None = None
        self.cells: list[tuple[Any, CellInfo]] = []
        self._said_graphs = False

    def say_graphs(self, rank: int) -> None:
        """Say once what cannot be seen in graph mode."""
        if not self._said_graphs:
            self._said_graphs = True
            get_logger().warning(
                "rank %d: graph mode: nothing inside a graph is seen. Recorded are what goes into and out of the "
                "outermost cell or compiled function, and gradients and parameters at the optimizer",
                rank,
            )


class Steps:
    """Reports optimizers, differentiated functions and `Model.train`'s steps to the session."""

    def __init__(self, session: Session, switch: Switch, scope: Scope, local: Gradients, applied: Gradients) -> None:
        self._session = session
        self._switch = switch
        self._scope = scope
        self._local = local  # called with (weights, gradients) that a backward has computed
        self._applied = applied  # called with (parameters, gradients) that an optimizer is given

    def install(self) -> None:
        """Replace what is called there. `Cell.__call__` must not have been replaced yet."""
        for kind in OPTIMIZERS:
            self._watch_creation(kind)
            self._watch_steps(kind)
        self._watch_forward()
        self._watch_backward()
        self._watch_training()

    def _watch_creation(self, kind: Any) -> None:
        session = self._session
        original = kind.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            key = id(self)
            session.optimizer_made(key)
            weakref.finalize(self, session.optimizer_gone, key).atexit = False

        kind.__init__ = __init__

    def _watch_steps(self, kind: Any) -> None:
        session, switch, applied = self._session, self._switch, self._applied
        original = Cell.__call__

        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if switch.quiet or runtime.is_traced() or not session.observes_this_thread():
                return original(self, *args, **kwargs)
            if session.recording and (args or kwargs):
                applied(self.parameters, args[0] if args else next(iter(kwargs.values())))
            # An optimizer's arithmetic is not recorded: hundreds of calls nobody compares.
            switch.enter_quiet()
            try:
                result = original(self, *args, **kwargs)
            finally:
                switch.leave_quiet()
            session.optimizer_stepped(id(self))
            return result

        kind.__call__ = __call__

    def _watch_forward(self) -> None:
        from mindspore.ops.composite import base as composite
        from mindspore.ops.function.grad import grad_func

        session, switch, scope = self._session, self._switch, self._scope
        original = composite._pynative_func_grad_forward

        @functools.wraps(original)
        def forward(function: Any, *args: Any, **kwargs: Any) -> Any:
            skipped = scope.skipped
            if not session.listening or (switch.quiet and skipped is None) or not session.observes_this_thread():
                return original(function, *args, **kwargs)
            outermost = not session.modules and not session.in_backward and not scope.inside
            if not outermost:
                scope.inside += 1
                try:
                    return original(function, *args, **kwargs)
                finally:
                    scope.inside -= 1
            if skipped is not None:
                # The cell around was taken for evaluation, and left out; from the next call on it is known better.
                skipped.trains, scope.skipped = True, None
                switch.leave_quiet()
            if not session.outermost_forward(True):
                session.listening = False  # nothing inside this forward matters to us
            scope.inside += 1
            try:
                return original(function, *args, **kwargs)
            finally:
                scope.inside -= 1
                session.forward_done()

        composite._pynative_func_grad_forward = grad_func._pynative_func_grad_forward = forward

    def _watch_backward(self) -> None:
        from mindspore.ops.composite import base as composite
        from mindspore.ops.function.grad import grad_func

        session, switch, local = self._session, self._switch, self._local
        original = composite._pynative_func_grad_backward

        @functools.wraps(original)
        def backward(function: Any, grad: Any, weights: Any, position: Any, has_aux: Any, *args: Any) -> Any:
            if switch.quiet or not session.observes_this_thread():
                return original(function, grad, weights, position, has_aux, *args)
            session.backward_begins()
            try:
                result = original(function, grad, weights, position, has_aux, *args)
            finally:
                session.backward_ends()
            if session.recording and grad.get_by_list and weights is not None:
                both = getattr(grad, "get_by_position", False) or grad.get_all
                local(weights, result[1] if both else result)
            return result

        composite._pynative_func_grad_backward = grad_func._pynative_func_grad_backward = backward

    def _watch_training(self) -> None:
        """`Model.train` whose optimizer nobody can see (a graph, a custom network) says itself where a step ends."""
        session = self._session
        original = CallbackManager.on_train_step_end

        @functools.wraps(original)
        def on_train_step_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if not session.tracker.pending and session.observes_this_thread():
                session.optimizer_stepped("Model.train")
            return result

        CallbackManager.on_train_step_end = on_train_step_end
