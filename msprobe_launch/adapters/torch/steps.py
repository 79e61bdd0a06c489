"""Optimizers and gradient scalers tell where a step ends; nothing of the program is replaced but three methods."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

_is_compiling: Callable[[], bool] = torch.compiler.is_compiling


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of an optimizer's step, whose `args` begin with itself; accelerate and transformers' Trainer say `step(None)`."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def install(
    session: Session,
    before_step: Callable[[bool], None],
    after_step: Callable[[], None],
    hidden: Callable[[], AbstractContextManager[None]],
) -> None:
    """Report every optimizer that is made and every step that is taken, or skipped by a scaler.

    `before_step(has_closure)` and `after_step()` run around each optimizer's step; gradients are cleared in `hidden()`.
    """
    _watch_creation(session)
    _hide_from_clearing(session, hidden)

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if session.observes_this_thread():
            before_step(has_closure(args, kwargs))

    def after(optimizer: Optimizer, *_: Any) -> None:
        if session.observes_this_thread():
            session.optimizer_stepped(id(optimizer))
            after_step()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    _watch_scaler(torch.amp.GradScaler, session)  # FSDP's is derived from it and steps in the same way


def _watch_creation(session: Session) -> None:
    original = Optimizer.__init__

    @functools.wraps(original)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        key = id(self)
        session.optimizer_made(key)
        weakref.finalize(self, session.optimizer_gone, key).atexit = False

    Optimizer.__init__ = __init__


def _hide_from_clearing(session: Session, hidden: Callable[[], AbstractContextManager[None]]) -> None:
    """A function mode is asked twice for each parameter whose gradient is cleared, and has nothing to record."""
    original = Optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # First of all: Dynamo folds this question, and must see nothing else of ours.
        if _is_compiling() or not session.recording or not session.observes_this_thread():
            return original(self, *args, **kwargs)
        with hidden():
            return original(self, *args, **kwargs)

    Optimizer.zero_grad = zero_grad


def _watch_scaler(scaler: type, session: Session) -> None:
    original = scaler.step  # type: ignore[attr-defined]

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # A scaler that met an infinity does not call the optimizer: for us the step has ended all the same.
        result = original(self, optimizer, *args, **kwargs)
        if session.observes_this_thread():
            session.optimizer_stepped(id(optimizer))
        return result

    scaler.step = step  # type: ignore[attr-defined]
