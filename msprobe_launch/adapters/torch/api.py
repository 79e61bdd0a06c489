"""API calls (L1): one torch-function mode sees what Python calls of torch, however it was imported.

The mode is on the stack only while something is to be recorded. It never sees what runs inside one API (torch takes
modes off the stack while it is asked), so only outermost calls are recorded, as msprobe does.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.graph
import torch.overrides
from torch import Tensor
from torch._C import _len_torch_function_stack as stack_depth
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from msprobe_launch.adapters.torch import collectives, compiled
from msprobe_launch.adapters.torch.backward import BackwardWatch
from msprobe_launch.adapters.torch.classify import OperatorNames, api_name, is_operator
from msprobe_launch.adapters.torch.edges import inputs_of, next_sequence_number
from msprobe_launch.adapters.torch.quiet import Quiet, from_compiler, is_traced
from msprobe_launch.adapters.torch.values import TorchValues
from msprobe_launch.capture.plain import output_items
from msprobe_launch.records.model import CallRecord, Value
from msprobe_launch.records.names import NameTemplate

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

_frame = sys._getframe
_is_grad_enabled = torch.is_grad_enabled
_is_compiling: Callable[[], bool] = torch.compiler.is_compiling

# Modules that stand between a user's call and torch: the caller is looked for above them.
_HELPERS = (
    "torch.nn.functional",
    "torch.functional",
    "torch.overrides",
    "torch._tensor",
    "torch._ops",
    "torch._library",
    "torch.utils._contextlib",
    "msprobe_launch.",
)
# The same for collectives; other calls from here serve a collective's own ends (pickling an object to gather).
_COLLECTIVE_HELPERS = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
# Modules whose own torch calls are machinery and not the user's computation. Collectives are recorded all the same.
_MACHINERY = (
    "torch.optim",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.nn.parallel",
    "torch.nn.init",
    "torch.serialization",
    "torch._tensor_str",
    "torch.amp",
    "torch.cuda.amp",
    "torch._utils",
    "torch.utils._",
    "torch.nn.modules.module",
    "torch.storage",
    "torch.random",
)
_HELPER, _COLLECTIVE_HELPER, _SKIPPED, _CALLER, _GENERATED = range(5)


class Site:
    """What is known of one torch function: its name, and what of its arguments needs care."""

    __slots__ = ("collective", "defaults", "name", "operator", "template", "writes")

    def __init__(self, function: Any, prefix: str, name: str) -> None:
        self.name = name
        self.template = NameTemplate.of_api(prefix, name)
        self.operator = prefix == "Tensor" and is_operator(name)
        self.collective = collectives.COLLECTIVES.get(name) if prefix == "Distributed" else None
        # A write that may leave no trace in the version counter.
        self.writes = prefix == "Distributed" or name.endswith("_") or name in ("__setitem__", "copy_")
        self.defaults = _defaults(function)


def _defaults(function: Any) -> dict[str, Any]:
    """Default values of a Python-level torch function, which hands all its arguments on as keywords."""
    if not inspect.isfunction(function):
        return {}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


class ApiCalls(TorchFunctionMode):
    """The mode. `arm` puts it on this thread's stack, `disarm` takes it off, wherever in the stack it stands."""

    def __init__(self, session: Session, values: TorchValues, backward: BackwardWatch, quiet: Quiet) -> None:
        super().__init__()
        self._session = session
        self._values = values
        self._backward = backward
        self._quiet = quiet
        self._works = collectives.PendingWorks(session, self._complete_collective)
        self._operators = OperatorNames()
        self._sites: dict[Any, Site | None] = {}
        # By identity, the code kept alive: a code object's own hash reads all its constants, 1 us a time.
        self._callers: dict[int, tuple[int, CodeType]] = {}
        # True while a call that is being observed may open a step: the mode is off the stack, torch will put it back.
        self._handling = False

    # -- the stack

    def install(self) -> None:
        """Follow the program into backward, and keep torch's own decisions as they are without us."""
        self._follow_backward()
        self._watch_functions()
        self._hide_from_fast_paths()
        compiled.install(self._unobserved, self._compiled)
        self._works.install()
        collectives.route_through_modes(self._outer_collective)

    def arm(self) -> None:
        """Put the mode on the stack, above default-device contexts, which insist on the bottom."""
        stack = _get_current_function_mode_stack()
        if self._handling or self in stack:
            return
        above = []
        while stack_depth() and not isinstance(stack[stack_depth() - 1], DeviceContext):
            above.append(_pop_mode())
        _push_mode(self)
        for mode in reversed(above):
            _push_mode(mode)

    def disarm(self) -> None:
        """Take the mode off, leaving the user's own in their order."""
        if not stack_depth() or self not in _get_current_function_mode_stack():
            return
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the mode off for a while, if it is on."""
        was_on = bool(stack_depth()) and self in _get_current_function_mode_stack()
        if was_on:
            self.disarm()
        try:
            yield
        finally:
            if was_on:
                self.arm()

    def _follow_backward(self) -> None:
        session = self._session
        original = torch.autograd.graph._engine_run_backward

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not session.observes_this_thread():
                return original(*args, **kwargs)
            session.backward_begins()
            # torch has taken the modes off: `backward` itself is an API they were asked about.
            pushed = session.recording and session.config.level.apis and not stack_depth()
            if pushed:
                _push_mode(self)
            try:
                return original(*args, **kwargs)
            finally:
                if pushed:
                    self.disarm()
                session.backward_ends()

        torch.autograd.graph._engine_run_backward = run
        torch.autograd._engine_run_backward = run

    def _watch_functions(self) -> None:
        """Record `Function.apply` of the program's own autograd functions, which no mode is asked about."""
        session = self._session
        observe = self._observe
        original = torch.autograd.Function.__dict__["apply"].__func__
        sites: dict[type, Site | None] = {}

        @functools.wraps(original)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or not (session.listening and session.recording and session.takes_apis):
                return original(cls, *args, **kwargs)
            site = sites.get(cls)
            if site is None:
                if cls in sites:
                    return original(cls, *args, **kwargs)
                own = not cls.__module__.startswith("torch.")
                site = sites[cls] = Site(None, "Function", cls.__name__) if own else None
                return apply(cls, *args, **kwargs)
            return observe(site, original.__get__(cls), args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)

    def _compiled(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a compiled function (not a module's): one record at its boundary, and it may begin a step."""
        session = self._session
        if _is_compiling() or not session.listening or not session.observes_this_thread():
            return self._unobserved(function, *args, **kwargs)
        if not session.modules and not session.in_backward and session.watches_calls and _is_grad_enabled():
            session.functional_forward()  # a compiled training step calls no module that we see
        if not session.recording or not session.takes_apis:
            return self._unobserved(function, *args, **kwargs)
        site = self._sites.get(("compiled", name))
        if site is None:
            site = self._sites["compiled", name] = Site(None, "Compiled", name)
        session.guard.miss(f"inside of Compiled.{name}: not observable (compiled)")
        with self.hidden():
            return self._observe(site, functools.partial(self._unobserved, function), args, kwargs)

    def _unobserved(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what must not see anything of us, and of which nothing inside is observed."""
        session = self._session
        listening, session.listening = session.listening, False
        try:
            with self.hidden():
                return function(*args, **kwargs)
        finally:
            session.listening = listening or session.listening

    def _hide_from_fast_paths(self) -> None:
        """Fused fast paths of evaluation are left where torch sees a mode; it must not see ours (docs/capture.md)."""
        original = torch.overrides.has_torch_function

        @functools.wraps(original)
        def has_torch_function(relevant_args: Any) -> bool:
            if not stack_depth():
                return bool(original(relevant_args))
            with self.hidden():
                return bool(original(relevant_args))

        torch.overrides.has_torch_function = has_torch_function

    # -- calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        session = self._session
        try:
            site = self._sites[func]
        except KeyError:
            site = self._new_site(func)
        except TypeError:  # cannot be hashed: nothing we know
            site = None
        if site is None or not session.listening:
            if kwargs is None:
                return func(*args)
            return func(*args, **kwargs)
        return self._observe(site, func, args, kwargs or {})

    def _new_site(self, func: Any) -> Site | None:
        try:
            named = api_name(func)
            site = Site(func, *named) if named is not None else None
        except Exception as error:  # noqa: BLE001 - a guest
            self._session.guard.lose("classify", error, 0)
            site = None
        self._sites[func] = site
        return site

    def observe(self, prefix: str, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call and record a function that the script has registered (`adapters.custom`)."""
        key = ("custom", prefix, name)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(None, prefix, name)
        return self._observe(site, func, args, kwargs)

    def _observe(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        record = inputs = None
        try:
            frame = self._caller(_frame(2), site)
            if frame is not None and is_traced():
                session.guard.miss("API call inside a traced function")
            elif frame is not None:
                if not session.modules and not session.in_backward and session.watches_calls:
                    self._maybe_functional(args, kwargs)
                if session.recording and session.observes_this_thread():
                    record, inputs = self._before(site, frame, args, kwargs)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("API input", error)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            if record is not None:
                self._finish(record)  # what went in is on record
            raise
        if record is None:
            return result
        try:
            self._after(site, record, inputs, args, kwargs, result)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("API output", error)
        return result

    def _caller(self, frame: FrameType | None, site: Site) -> FrameType | None:
        """The frame that made the call, above torch's own helpers; None where it is machinery."""
        callers = self._callers
        while frame is not None:
            code = frame.f_code
            known = callers.get(id(code))
            if known is None:
                kind = _kind_of(frame.f_globals.get("__name__") or "", code.co_filename)
                callers[id(code)] = (kind, code)
            else:
                kind = known[0]
            if kind == _CALLER:
                return frame
            if kind == _GENERATED:
                return None if from_compiler(frame) else frame
            if kind != _HELPER:
                if site.collective is None:
                    return None
                if kind == _SKIPPED:
                    return frame
            frame = frame.f_back
        return None

    def _maybe_functional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            self._handling = True
            try:
                self._session.functional_forward()
            finally:
                self._handling = False

    def _before(
        self, site: Site, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallRecord | None, Any]:
        session = self._session
        template = site.template
        if site.operator:
            template = self._operators.of(frame.f_code, frame.f_lasti, site.name) or template
        op = session.open_call(template)
        if op is None:
            return None, None
        gate = session.gate
        parent = session.parent
        record = CallRecord(op, None, None, None, None, parent, session.stack_of(frame))
        if gate.names_only:
            gradients = _is_grad_enabled()
            if session.in_backward:
                record.recompute = gradients and (bool(session.modules) or _recomputes(frame))
            return record, next_sequence_number() if gradients and gate.backward else None
        quiet = self._quiet
        quiet.enter()
        try:
            gradients = quiet.gradients
            record.recompute = bool(session.in_backward) and gradients and (bool(session.modules) or _recomputes(frame))
            if gate.inputs and gate.forward:
                record.inputs, record.kwargs = self._arguments(site, args, kwargs)
            inputs = inputs_of(args, kwargs) if gradients and gate.backward else None
        finally:
            quiet.leave()
        return record, inputs

    def _arguments(
        self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Value], dict[str, Value] | None]:
        collective = site.collective
        if collective is not None:
            args, kwargs = collective.without_receive_buffers(args, kwargs)
        describe = self._values.describe
        positional = describe.items(args)
        if not kwargs:
            return positional, None
        defaults = site.defaults
        return positional, {
            key: describe(value)
            for key, value in kwargs.items()
            if not (key in defaults and _same(defaults[key], value)) and not key.startswith("_")
        }

    def _after(
        self, site: Site, record: CallRecord, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if site.collective is not None:
            for tensor in collectives.tensors_in(args, kwargs):
                self._values.forget_tensor(tensor)
            if self._works.defer(result, record, site, args, kwargs):
                return
            self._complete_collective(record, site, args, kwargs, result)
            return
        session = self._session
        gate = session.gate
        if gate.names_only:
            if inputs is not None:
                self._backward.watch_name(record.op, record.parent, inputs, result)
            self._finish(record)
            return
        quiet = self._quiet
        quiet.enter()
        try:
            if site.writes and args and isinstance(args[0], Tensor):
                self._values.forget_tensor(args[0])
            if gate.outputs and gate.forward:
                record.outputs = output_items(result, self._values.describe)
            if inputs is not None and inputs.sequence is not None:
                self._backward.watch(record.op, record.parent, inputs, result)
        finally:
            quiet.leave()
        self._finish(record)

    def _complete_collective(
        self, record: CallRecord, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """The transfer is over: what the tensors hold now is the output. Collectives return nothing of their own."""
        session = self._session
        describe = self._values.describe
        if session.gate.outputs and session.gate.forward and site.collective is not None:
            self._quiet.enter()
            try:
                args, kwargs = site.collective.without_send_buffers(args, kwargs)
                given = [value for key, value in kwargs.items() if not _same(site.defaults.get(key), value)]
                record.outputs = [describe(value) for value in (*args, *given)]
            finally:
                self._quiet.leave()
        self._finish(record)

    def _finish(self, record: CallRecord) -> None:
        session = self._session
        if session.gate.forward and session.recording:
            session.emit(record)
        session.close_call(record.op)

    def close(self) -> None:
        """Record asynchronous collectives nobody waited for, as they are now."""
        self._works.close()

    # -- collectives that modes are not asked about

    def _outer_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._session.recording or not self._session.config.level.apis:
            return func(*args, **kwargs)
        with self.hidden():
            return self.__torch_function__(func, (), args, kwargs)


def _recomputes(frame: FrameType | None) -> bool:
    """True under activation checkpointing: in backward, but not of a double backward's own making."""
    while frame is not None:
        if "checkpoint" in frame.f_globals.get("__name__", ""):
            return True
        frame = frame.f_back
    return False


def _kind_of(module: str, file: str) -> int:
    if file.startswith("<eval_with_key>"):
        return _GENERATED  # code of a graph: the program's own, or a compiler's
    if module.startswith(_HELPERS):
        return _HELPER
    if module.startswith(_COLLECTIVE_HELPERS):
        return _COLLECTIVE_HELPER
    return _SKIPPED if module.startswith(_MACHINERY) else _CALLER


def _same(default: Any, value: Any) -> bool:
    """True where an argument has its default value; a tensor never has, and is never asked."""
    if default is value:
        return True
    if isinstance(value, Tensor) or type(default) is not type(value):
        return False
    try:
        return bool(default == value)
    except Exception:  # noqa: BLE001 - an object whose comparison is of its own kind
        return False
