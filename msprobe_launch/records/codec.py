"""Recorded values and calls -> JSON text, in msprobe's form.

NaN and infinities are bare (`NaN`, `Infinity`, `-Infinity`), as the field's readers expect and Python's json reads.
Text is assembled by hand: building dictionaries for an encoder costs more than encoding them (docs/benchmarks.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from msprobe_launch.records.model import CallRecord, PlainValue, TensorValue, Value

quote = json.encoder.encode_basestring_ascii

encode: Callable[[list[Any]], bytes] | None
try:
    from msgspec.json import encode
except ImportError:  # a rank's environment may be leaner than ours
    encode = None

_REQUIRES_GRAD = {True: ', "requires_grad": true', False: ', "requires_grad": false', None: ""}


def number_text(value: object) -> str:
    """JSON text of one statistic: a float, int, bool or None."""
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, float):
        if value - value == 0.0:
            return repr(value)
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return str(value)


def tensor_head(type_name: str, dtype: str, shape: Sequence[int]) -> str:
    """Opening of a tensor's object, to which `tensor_text` adds the statistics."""
    return f'{{"type": "{type_name}", "dtype": "{dtype}", "shape": {list(shape)}'


def tensor_text(value: TensorValue) -> str:
    """JSON object of a tensor; made once per TensorValue."""
    if value.text is None:
        format_tensors([value])
    return value.text or ""


def format_tensors(values: list[TensorValue]) -> None:
    """Make the texts of many tensors at once: their numbers go through one encoder call (0.1 us each, repr 0.8)."""
    numbers = [number for value in values for number in value.statistics]
    texts = number_texts(numbers)
    at = 0
    for value in values:
        value.text = (
            f'{value.head}, "Max": {texts[at]}, "Min": {texts[at + 1]}, "Mean": {texts[at + 2]}, '
            f'"Norm": {texts[at + 3]}{_REQUIRES_GRAD[value.requires_grad]}{value.tail}}}'
        )
        at += 4


def number_texts(numbers: list[Any]) -> list[str]:
    """JSON texts of statistics. Shortest texts that read back as the same number, as repr gives them."""
    if encode is None:
        return [number_text(number) for number in numbers]
    texts: list[str] = encode(numbers)[1:-1].decode().split(",") if numbers else []
    # The encoder has no word for these; it writes null.
    for index, number in enumerate(numbers):
        if number is not None and number - number != 0:
            texts[index] = number_text(number)
    return texts


def value_text(value: Value) -> str:
    """JSON text of any recorded value."""
    kind = type(value)
    if kind is TensorValue:
        tensor = cast("TensorValue", value)
        return tensor.text or tensor_text(tensor)
    if value is None:
        return "null"
    if kind is PlainValue:
        return cast("PlainValue", value).text
    if kind is list:
        return _list_text(cast("list[Value]", value))
    return _object_text(cast("dict[str, Value]", value))


def _list_text(values: Sequence[Value] | None) -> str:
    if not values:
        return "[]"
    # Most are flat, with texts made by `format_tensors`: no call for each.
    try:
        return f"[{', '.join(['null' if value is None else value.text for value in values])}]"  # type: ignore[union-attr,misc]
    except (AttributeError, TypeError):
        return f"[{', '.join([value_text(item) for item in values])}]"


def _object_text(values: Mapping[str, Value]) -> str:
    return f"{{{', '.join([f'{quote(key)}: {value_text(item)}' for key, item in values.items()])}}}"


def record_line(name: str, record: CallRecord) -> str:
    """One journal line without its end: ` "<op>": {...}`."""
    if record.is_grad:
        # One list per parameter, as the field's files have it: {"weight": [item]}.
        # None (task structure) is left out: msprobe's compare ends with a traceback on `{"weight": [null]}`.
        items: dict[str, Value] = {k: [item] for k, item in (record.parameters or {}).items() if item is not None}
        return f" {quote(name)}: {_object_text(items)}"
    inputs, outputs = _list_text(record.inputs), _list_text(record.outputs)
    if record.op.backward:
        fields = f'"input": {inputs}, "output": {outputs}'
    else:
        kwargs = _object_text(record.kwargs) if record.kwargs else "{}"
        fields = f'"input_args": {inputs}, "input_kwargs": {kwargs}, "output": {outputs}'
    if record.parameters:
        fields = f'{fields}, "parameters": {_object_text(record.parameters)}'
    if record.recompute:
        fields = f'{fields}, "is_recompute": true'
    return f" {quote(name)}: {{{fields}}}"
