"""Compiled functions run as they do without us: our mode is off the stack while Dynamo looks and while they run.

A visible mode would be traced into the graph and guarded on: other graphs, recompilations, in the end eager execution.
The compiled region is therefore seen at its boundary only (the module that was compiled, its inputs and outputs).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Unobserved = Callable[..., Any]
Boundary = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]


def install(unobserved: Unobserved, boundary: Boundary) -> None:
    """Leave whatever is compiled from now on unobserved: `unobserved(function, *args)` calls it so.

    `boundary(name, function, args, kwargs)` calls a compiled function of the program's; modules have their own record.

    Dynamo is imported late, by the first `torch.compile`; importing it here would cost the program a second.
    """
    original = torch.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        import torch._dynamo.eval_frame

        _hide_in(torch._dynamo.eval_frame, unobserved, boundary)
        return original(*args, **kwargs)

    torch.compile = compile
    if "torch._dynamo.eval_frame" in sys.modules:
        _hide_in(sys.modules["torch._dynamo.eval_frame"], unobserved, boundary)


def _hide_in(dynamo: Any, unobserved: Unobserved, boundary: Boundary) -> None:
    context = dynamo._TorchDynamoContext
    original = context.__call__
    if hasattr(original, "_msprobe_hidden"):
        return
    # Where a compiled region begins Dynamo looks at the frame below our `nn.Module.__call__`, as it does without us;
    # else a graph break inside would be met once more, in that frame.
    dynamo.skip_code(nn.Module.__call__.__code__)

    @functools.wraps(original)
    def __call__(self: Any, function: Any) -> Any:
        compiled = original(self, function)
        if isinstance(compiled, (nn.Module, type)):
            return compiled  # its forward has come through here by itself

        name = _name_of(function)

        @functools.wraps(compiled)
        def unseen(*args: Any, **kwargs: Any) -> Any:
            if name is None:
                return unobserved(compiled, *args, **kwargs)
            return boundary(name, compiled, args, kwargs)

        return unseen

    __call__._msprobe_hidden = True  # type: ignore[attr-defined]
    context.__call__ = __call__


def _name_of(function: Any) -> str | None:
    """Name of a compiled function; None for a module's method and for torch's own."""
    if isinstance(getattr(function, "__self__", None), nn.Module):
        return None
    if (getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch":
        return None
    name = getattr(function, "__name__", None)
    return name.replace("<", "").replace(">", "") if isinstance(name, str) else None
