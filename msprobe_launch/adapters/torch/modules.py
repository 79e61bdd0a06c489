"""Module calls (L0): `nn.Module.__call__` is replaced once, for all modules there are and will be.

Registered hooks would be seen by the program, get no keyword arguments, and break compiled graphs. The wrapper also
tells the session where outermost forwards begin, at every level.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from msprobe_launch.adapters.torch.backward import BackwardWatch
from msprobe_launch.adapters.torch.edges import Inputs, inputs_of, next_sequence_number
from msprobe_launch.adapters.torch.naming import ModuleInfo, ModuleNames, is_compiled
from msprobe_launch.adapters.torch.quiet import Quiet, from_compiler, is_traced
from msprobe_launch.adapters.torch.steps import has_closure
from msprobe_launch.adapters.torch.values import TorchValues
from msprobe_launch.capture.plain import output_items
from msprobe_launch.records.light import Light
from msprobe_launch.records.model import CallRecord, OpRef, Value

if TYPE_CHECKING:
    from msprobe_launch.capture.session import ModuleCall, Session

_is_compiling: Callable[[], bool] = torch.compiler.is_compiling
_frame = sys._getframe


class ModuleCalls:
    """The wrapper around `nn.Module.__call__` and what it records."""

    def __init__(self, session: Session, values: TorchValues, backward: BackwardWatch, quiet: Quiet) -> None:
        self._session = session
        self._values = values
        self._backward = backward
        self._quiet = quiet
        self._names = ModuleNames()
        self._gradients = ParameterGradients(session, values, quiet, self._names)
        self._original: Callable[..., Any] = nn.Module.__call__

    def install(self) -> None:
        """Replace `nn.Module.__call__` and note which module holds which from now on."""
        original = self._original
        session = self._session
        observe = self._observe

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # First of all: Dynamo folds this question, and must see nothing else of ours.
            if _is_compiling() or not session.listening:
                return original(self, *args, **kwargs)
            return observe(self, args, kwargs)

        __call__.__annotations__ = {}  # as the original, for whoever inspects it
        __call__.__name__ = original.__name__
        __call__.__qualname__ = original.__qualname__
        __call__.__module__ = original.__module__
        __call__.__doc__ = original.__doc__
        nn.Module.__call__ = __call__
        nn.modules.module.register_module_module_registration_hook(self._names.held_by)
        stacks = session.writer.stacks
        stacks.framework = (os.path.dirname(torch.__file__) + os.sep,)
        stacks.plumbing = frozenset({nn.modules.module.__file__})
        if session.gate.backward:
            register_optimizer_step_pre_hook(self._gradients.before_step)
            register_optimizer_step_post_hook(self._gradients.after_step)

    def name_models(self, models: Sequence[nn.Module]) -> None:
        """Several models: their index stands before their modules' names."""
        for index, model in enumerate(models):
            self._names.name_top(model, str(index))

    def close(self) -> None:
        """Emit what waits for a gradient that will not come."""
        self._gradients.close()

    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        if not session.observes_this_thread() and not (torch.is_grad_enabled() and session.follow_this_thread()):
            session.guard.miss("module call in another thread")
            return self._original(module, *args, **kwargs)
        if is_traced():
            session.guard.miss("module call inside a traced function")
            return self._original(module, *args, **kwargs)
        if session.modules or session.in_backward:
            if session.in_backward and isinstance(module, torch.fx.GraphModule) and from_compiler(_frame()):
                return self._original(module, *args, **kwargs)
            return self._record(module, args, kwargs)
        recorded = session.outermost_forward(torch.is_grad_enabled())
        session.functional = False
        if not recorded:
            session.listening = False  # nothing inside this forward matters to us
        try:
            if recorded:
                return self._record(module, args, kwargs)
            return self._original(module, *args, **kwargs)
        finally:
            session.forward_done()

    def _enclose(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no record and no filter names (level L1): the base of the stacks inside it, and no more."""
        session = self._session
        call = None
        try:
            if module._compiled_call_impl is not None or is_compiled(module):
                self._say_compiled(self._names.of(module))
            call = session.enter_module(None, _frame())
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("module input", error)
        try:
            return self._original(module, *args, **kwargs)
        finally:
            if call is not None:
                session.leave_module(call)

    def _say_compiled(self, info: ModuleInfo) -> None:
        self._session.guard.miss(f"inside of {info.template.counter}: not observable (compiled)")

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        if not session.names_modules:
            return self._enclose(module, args, kwargs)
        state = call = None
        try:
            gradients = torch.is_grad_enabled()
            if session.gate.names_only:
                state = self._before(module, args, kwargs, gradients)
            else:
                self._quiet.enter()
                try:
                    state = self._before(module, args, kwargs, gradients)
                finally:
                    self._quiet.leave()
            call = session.enter_module(state.op, _frame())
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("module input", error)
        try:
            result = self._original(module, *args, **kwargs)
        except BaseException:
            self._end(state, call, _RAISED)
            raise
        self._end(state, call, result)
        return result

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool) -> _Before:
        """What goes in. `gradients`: the graph of this call is built."""
        session = self._session
        state = _Before()
        info = self._names.of(module)
        if not info.recorded:
            return state
        state.parent = session.parent
        op = session.open_call(info.template)
        if info.compiled or module._compiled_call_impl is not None:
            self._say_compiled(info)
        if op is None:  # left out by a filter; it still encloses what runs inside
            segment = session.segment
            state.op = OpRef(info.template, segment.counters[info.template.counter] - 1, segment)
            return state
        state.op = op
        if not session.takes_modules:
            return state
        gate = session.gate
        state.gradients = gradients
        record = state.record = CallRecord(op, None, None, None, None, state.parent)
        record.recompute = bool(session.in_backward) and gradients
        if gate.inputs and gate.forward:
            describe = self._values.describe
            record.inputs = describe.items(args)
            record.kwargs = {key: describe(value) for key, value in kwargs.items()} if kwargs else None
            parameters = module._parameters
            if parameters and not (info.lazy and _is_uninitialized(parameters)):
                record.parameters = {n: describe(value) for n, value in parameters.items() if value is not None}
        if gradients and gate.backward:
            if gate.names_only:
                state.sequence = next_sequence_number()
            else:
                state.inputs = inputs_of(args, kwargs)
            if module._parameters and not info.lazy:
                self._gradients.watch(info, module)
        return state

    def _end(self, state: _Before | None, call: ModuleCall | None, result: Any) -> None:
        """The call has returned `result`, or raised: then what went in is on record."""
        session = self._session
        if call is not None:
            session.leave_module(call)
        if state is None or state.op is None or not session.recording:
            return
        try:
            record = state.record
            if record is not None:
                record.stack = call.stack if call is not None else -1
                if result is not _RAISED:
                    self._after(state, record, result)
                if session.gate.forward:
                    session.emit(record)
            session.close_call(state.op)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("module output", error)

    def _after(self, state: _Before, record: CallRecord, result: Any) -> None:
        gate = self._session.gate
        if gate.names_only:
            if state.sequence is not None:
                self._backward.watch_name(record.op, state.parent, state.sequence, result)
            return
        self._quiet.enter()
        try:
            if gate.outputs and gate.forward:
                record.outputs = output_items(result, self._values.describe)
            if state.gradients and gate.backward:
                self._backward.watch(record.op, state.parent, state.inputs, result)
        finally:
            self._quiet.leave()


def _is_uninitialized(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, UninitializedParameter) for value in parameters.values())


_RAISED = object()


class _Before(Light):
    """What was seen at the start of a module call. `op` is None where the module is no op of its own.

    `sequence` is for task structure: the number of the next autograd node.
    """

    op: OpRef | None = None
    parent: OpRef | None = None
    record: CallRecord | None = None
    inputs: Inputs | None = None
    sequence: int | None = None
    gradients: bool = False


class ParameterGradients:
    """Gradients of parameters, both ways; those of one module make one record.

    As accumulated on this rank (under DDP: before they are reduced), by a hook after each accumulation, once per
    parameter. And as applied, read when the optimizer's step begins (reduced, unscaled, clipped): `<name>.applied`,
    where they can be others than those.
    """

    def __init__(self, session: Session, values: TorchValues, quiet: Quiet, names: ModuleNames) -> None:
        self._session = session
        self._values = values
        self._quiet = quiet
        self._names = names
        self._local: dict[tuple[int, str], Value] = {}
        self._hooked: dict[int, weakref.ref[Tensor]] = {}
        self._waiting: dict[int, tuple[ModuleInfo, dict[str, Value], set[str]]] = {}

    def watch(self, info: ModuleInfo, module: nn.Module) -> None:
        """Hook the module's own parameters, those that are not hooked yet."""
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            known = self._hooked.get(id(parameter))
            if known is not None and known() is parameter:
                continue
            with DisableTorchFunction():
                if parameter.requires_grad and parameter.is_leaf:
                    self._hooked[id(parameter)] = weakref.ref(parameter)
                    info.expected.add(name)
                    parameter.register_post_accumulate_grad_hook(self._hook(info, name))

    def _hook(self, info: ModuleInfo, name: str) -> Callable[[Tensor], None]:
        def accumulated(parameter: Tensor) -> None:
            session = self._session
            if not session.recording:
                return
            try:
                if not session.gate.open:
                    session.attend_to(info.gradients)
                self._quiet.enter()
                try:
                    value = self._values.describe(parameter.grad)
                finally:
                    self._quiet.leave()
                key = id(info)
                self._local[key, name] = value
                entry = self._waiting.get(key)
                if entry is not None and name in entry[1]:
                    self._emit(key)  # a second accumulation before the first was complete
                    entry = None
                if entry is None:
                    entry = self._waiting[key] = (info, {}, set(info.expected))
                entry[1][name] = value
                entry[2].discard(name)
                if not entry[2]:
                    self._emit(key)
            except Exception as error:  # noqa: BLE001 - a guest
                session.guard.lose("parameter gradient", error)

        return accumulated

    def _emit(self, key: int) -> None:
        info, values, _ = self._waiting.pop(key)
        self._record(info, values)

    def _record(self, info: ModuleInfo, values: dict[str, Value]) -> None:
        session = self._session
        op = session.open_call(info.gradients)
        if op is not None:
            session.emit(CallRecord(op, None, None, None, values, is_grad=True))

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer is about to step: what it finds in `.grad` is what it applies."""
        if not has_closure(args, kwargs):
            self._read_applied(optimizer)

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same where a closure has computed the gradients in the step. LBFGS calls it often and applies none."""
        if has_closure(args, kwargs) and not isinstance(optimizer, torch.optim.LBFGS):
            self._read_applied(optimizer)

    def _read_applied(self, optimizer: Optimizer) -> None:
        session = self._session
        if not session.recording or not session.takes_modules or not session.observes_this_thread():
            return
        try:
            self._quiet.enter()
            try:
                self._applied(optimizer)
            finally:
                self._quiet.leave()
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("applied gradient", error)

    def _applied(self, optimizer: Optimizer) -> None:
        values = self._values
        reduces = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if reduces:
            # Reducers, and scripts that reduce `p.grad.data`, leave no trace in the version counter.
            values.forget()
        left = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        local, self._local = self._local, {}
        for info in self._names.holding:
            module = info.module()
            if module is None:
                continue
            found: dict[str, Value] = {}
            changed = False
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in left:
                    continue
                left.discard(id(parameter))  # a shared one has the name of its first holder
                gradient = parameter.grad
                if gradient is not None:
                    found[f"{name}.applied"] = value = values.describe(gradient)
                    # The very value of the local record: the same tensor, unchanged since.
                    same = value is local.get((id(info), name)) and not (value is None and reduces)
                    changed = changed or not same
            if changed:
                self._record(info, found)

    def close(self) -> None:
        """Emit modules of which not every parameter got a gradient."""
        for key in list(self._waiting):
            self._emit(key)
