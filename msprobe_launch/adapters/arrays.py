"""numpy's scalars and arrays among a program's values: the same whatever framework the program uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msprobe_launch.capture.plain import plain, text
from msprobe_launch.records.codec import number_text
from msprobe_launch.records.model import TensorValue, Value

# By numpy's letters. `item()` of a long double is one again, which no JSON can hold.
_NUMBERS: dict[str, Callable[[Any], Any]] = {"f": float, "i": int, "u": int, "b": bool}


def numpy_value(value: Any) -> Value:
    """A numpy scalar or array. numpy has been imported by whoever made the value."""
    import numpy as np

    name = type(value).__name__
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        head = f'{{"type": "numpy.ndarray", "dtype": "{value.dtype}", "shape": {shape}'
        if value.dtype.kind not in "fiub" or not value.size:
            return TensorValue(head, requires_grad=None)
        out = TensorValue(head, requires_grad=None)
        wide, number = value.astype(np.float64), _NUMBERS[value.dtype.kind]
        out.statistics = (
            number(value.max()),
            number(value.min()),
            wide.mean().item(),
            float(np.linalg.norm(wide.ravel())),
        )
        return out
    if isinstance(value, np.bool_):
        return plain("bool", "true" if value else "false")
    if isinstance(value, np.generic) and value.dtype.kind in "fiu":
        return plain(name, number_text(_NUMBERS[value.dtype.kind](value)))
    if isinstance(value, np.str_):
        return text(name, str(value))
    if isinstance(value, np.generic):
        return text(name, str(value))
    return None
