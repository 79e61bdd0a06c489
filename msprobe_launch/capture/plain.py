"""Values that are no tensors -> recorded values. What only a framework knows is asked of its adapter."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from msprobe_launch.records.codec import number_text, quote
from msprobe_launch.records.model import PlainValue, Value

Describe = Callable[[Any], Value]

MAX_TEXT = 4096  # longer texts are cut: a prompt in a keyword argument must not fill the disk
MAX_ITEMS = 2000  # of a list or dict, per level, for the same reason
MAX_DEPTH = 12  # deeper nesting is written as its type: a cyclic container must end somewhere

_TRUE = PlainValue('{"type": "bool", "value": true}')
_FALSE = PlainValue('{"type": "bool", "value": false}')
_ELLIPSIS = PlainValue('{"type": "ellipsis", "value": "..."}')


def plain(type_name: str, json_value: str) -> PlainValue:
    """`{"type": ..., "value": ...}` from a JSON text."""
    return PlainValue(f'{{"type": {quote(type_name)}, "value": {json_value}}}')


def text(type_name: str, value: str) -> PlainValue:
    """`{"type": ..., "value": "..."}` from a text, cut at MAX_TEXT characters."""
    return plain(type_name, quote(value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}... ({len(value)} chars)"))


class PlainDescriber:
    """Describes Python's own types and containers; `leaf` describes what is neither (tensors first of all).

    `leaf` returns None for values that it does not know. One instance per session; `depth` guards cycles.
    """

    def __init__(self, leaf: Describe) -> None:
        self._leaf = leaf
        self._depth = 0
        self._small: dict[tuple[type, Any], PlainValue] = {}
        self.by_type: dict[type, Callable[[Any], Value]] = {
            type(None): lambda _: None,
            bool: lambda value: _TRUE if value else _FALSE,
            int: self._number,
            float: self._number,
            str: lambda value: text("str", value),
            list: self._sequence,
            tuple: self._sequence,
            dict: self._mapping,
            slice: self._slice,
            type(Ellipsis): lambda _: _ELLIPSIS,
            complex: lambda value: plain("complex", f'"{value}"'),
            bytes: lambda value: text("bytes", repr(value[:MAX_TEXT])),
        }

    def __call__(self, value: Any) -> Value:
        """The recorded form of any value; never raises for an odd object, which becomes None."""
        handler = self.by_type.get(type(value))
        return handler(value) if handler is not None else self._other(value)

    def items(self, values: Sequence[Any]) -> list[Value]:
        """The recorded forms of several values: what calling for each gives, without a call for each."""
        handlers = self.by_type
        out = []
        for value in values:
            handler = handlers.get(type(value))
            out.append(handler(value) if handler is not None else self._other(value))
        return out

    def _number(self, value: float) -> PlainValue:
        if value != value:  # NaN is no usable key
            return plain("float", "NaN")
        # repr tells 0.0 from -0.0, which compare equal
        key = (type(value), value if value else repr(value))
        known = self._small.get(key)
        if known is None:
            known = plain(type(value).__name__, number_text(value))
            if len(self._small) < 1024:  # 230 bytes each
                self._small[key] = known
        return known

    def _sequence(self, value: Any) -> Value:
        if self._depth >= MAX_DEPTH:
            return text(type(value).__name__, f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        try:
            items: list[Value] = [self(item) for item in (value if len(value) <= MAX_ITEMS else value[:MAX_ITEMS])]
        finally:
            self._depth -= 1
        if len(value) > MAX_ITEMS:
            items.append(text("str", f"... {len(value) - MAX_ITEMS} more items"))
        return items

    def _mapping(self, value: Any) -> Value:
        if self._depth >= MAX_DEPTH:
            return text(type(value).__name__, f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        try:
            out: dict[str, Value] = {}
            for key, item in value.items():
                if len(out) >= MAX_ITEMS:
                    out["..."] = text("str", f"{len(value) - MAX_ITEMS} more items")
                    break
                out[key if isinstance(key, str) else str(key)] = self(item)
        finally:
            self._depth -= 1
        return out

    def _slice(self, value: slice) -> PlainValue:
        ends = ", ".join(
            number_text(end) if end is None or type(end) in (int, bool) else self._index(end)
            for end in (value.start, value.stop, value.step)
        )
        return plain("slice", f"[{ends}]")

    @staticmethod
    def _index(end: Any) -> str:
        # A tensor as a bound would have to be read, which waits for the device: leave it out.
        return str(int(end)) if isinstance(end, int) else "null"

    def _other(self, value: Any) -> Value:
        leaf = self._leaf(value)
        if leaf is not None:
            return leaf
        kind = type(value)
        if isinstance(value, enum.Enum):
            return text(kind.__name__, value.name)
        if isinstance(value, (bool, int, float)):
            return self._number(bool(value) if isinstance(value, bool) else (value + 0))
        if isinstance(value, str):
            return text("str", str(value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._mapping(dict(zip(value._fields, value, strict=False)))
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, (list, tuple)):
            return self._sequence(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._mapping({field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)})
        return None


def collect(value: Any, kind: type, found: list[Any], depth: int = 0) -> None:
    """Add all instances of `kind` in a value to `found`, in order, those in its containers and dataclasses too."""
    if isinstance(value, kind):
        found.append(value)
    elif depth >= MAX_DEPTH:
        return  # a container that holds itself must end somewhere
    elif isinstance(value, (list, tuple)):
        for item in value:
            collect(item, kind, found, depth + 1)
    elif isinstance(value, dict):
        for item in value.values():
            collect(item, kind, found, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in fields_of(value):
            collect(item, kind, found, depth + 1)


def fields_of(value: Any) -> list[Any]:
    """The values of a dataclass object's fields; None for one that is not set."""
    return [getattr(value, field.name, None) for field in dataclasses.fields(value)]


def output_items(result: Any, describe: PlainDescriber) -> list[Value]:
    """A call's result as the list that the field's files have: a tuple or list is spread, anything else is item 0."""
    if isinstance(result, (tuple, list)):
        return describe.items(result)
    return [describe(result)]


class NamesOnly(PlainDescriber):
    """For task structure: values are not looked at."""

    def __call__(self, value: Any) -> Value:
        return None

    def items(self, values: Sequence[Any]) -> list[Value]:
        return []
