"""Primitives: layers of MindSpore call these objects themselves. `Primitive.<attribute>.<Class>.<call>`.

The attribute is the name under which the cell that calls one holds it. Most classes have a `__call__` of their own,
so each of these is replaced. Those that communicate are recorded as the functions that do the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msprobe_launch.adapters.mindspore.collectives import PRIMITIVES, Collective
from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import Primitive, seen_as
from msprobe_launch.adapters.mindspore.steps import Scope
from msprobe_launch.records.names import NameTemplate

if TYPE_CHECKING:
    from msprobe_launch.adapters.mindspore.apis import ApiCalls

_frame = sys._getframe

# What computes no tensor, and MindSpore's own hooks. Those of the base class itself are parts of the graph language.
_NO_OPERATIONS = frozenset(
    """Primitive CompileOp ProxyOp Shape DType Rank Size TensorShape DynamicShape IsConstant Depend UpdateState Load
    CellBackwardHook HookBackward InsertGradientOf Print TensorDump ScalarSummary TensorSummary ImageSummary
    HistogramSummary Assert IsInstance IsSubClass InDict Partial StopGradient""".split()
)


def _classes(kind: Any) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from _classes(child)


class PrimitiveCalls:
    """Replaces `__call__` of the primitives' classes."""

    def __init__(self, apis: ApiCalls, switch: Switch, scope: Scope) -> None:
        self._apis = apis
        self._switch = switch
        self._scope = scope
        self._others: dict[str, NameTemplate] = {}
        self._collectives: dict[int, tuple[Any, Collective]] = {}  # by identity, the primitive kept alive

    def install(self) -> None:
        """Replace it in the base class and wherever a class has its own."""
        self._replace(Primitive)
        for kind in list(_classes(Primitive)):
            if "__call__" in vars(kind) and kind.__name__ not in _NO_OPERATIONS:
                self._replace(kind)

    def _replace(self, kind: Any) -> None:
        original = vars(kind)["__call__"]
        switch, observe = self._switch, self._observe

        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not switch.on:
                return original(self, *args, **kwargs)
            return observe(self, original, args, kwargs, _frame(1))

        seen_as(__call__, original)
        kind.__call__ = __call__

    def _observe(self, primitive: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> Any:
        name = type(primitive).__name__
        if name in _NO_OPERATIONS:
            return original(primitive, *args, **kwargs)
        function = PRIMITIVES.get(name)
        collective = None
        if function is not None:
            template = self._template(f"Distributed.{function}", "Distributed", function)
            collective = self._collective(primitive)
        else:
            template = self._named(primitive, name)
        bound = functools.partial(original, primitive)
        return self._apis.observe(template, bound, args, kwargs, frame, collective)

    def _template(self, key: str, prefix: str, name: str) -> NameTemplate:
        template = self._others.get(key)
        if template is None:
            template = self._others[key] = NameTemplate.of_api(prefix, name)
        return template

    def _collective(self, primitive: Any) -> Collective:
        known = self._collectives.get(id(primitive))
        if known is None or known[0] is not primitive:
            known = self._collectives[id(primitive)] = primitive, Collective.of_primitive(primitive)
        return known[1]

    def _named(self, primitive: Any, name: str) -> NameTemplate:
        for cell, info in reversed(self._scope.cells):
            known: NameTemplate | None = info.primitives.get(id(primitive))
            if known is not None:
                return known
            for attribute, held in cell._primitives.items():
                if held is primitive:
                    # The cell holds the primitive as long as its info lives.
                    made: NameTemplate = NameTemplate.of_api("Primitive", f"{attribute}.{name}")
                    info.primitives[id(primitive)] = made
                    return made
        return self._template(name, "Primitive", f"{name}.{name}")
