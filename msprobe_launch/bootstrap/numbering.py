"""Waits for MindSpore to number a worker that its launcher did not: several nodes under msrun without --node_rank.

What is called before `init()` has come back is not recorded: nobody knows yet whose it is.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from msprobe_launch.bootstrap.activate import RankProcess

# The functions that make a process part of the cluster, where they are defined. Others import them from there.
_HOME = "communication.management"
_JOINING = ("init", "_init_with_store")


def wait(process: RankProcess, framework: str) -> None:
    """Put `process.on_numbered` behind the framework's joining functions, wherever its modules hold them.

    They are put back once one of them has come back, and `from mindspore.communication import init` finds ours.
    """
    home = sys.modules.get(f"{framework}.{_HOME}")
    if home is None:
        raise RuntimeError(f"{framework}.{_HOME} is not there: this process's rank cannot be learned")
    replaced: list[tuple[ModuleType, str, Any]] = []

    def behind(original: Any) -> Any:
        @functools.wraps(original)
        def joins(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            while replaced:
                module, name, function = replaced.pop()
                setattr(module, name, function)
            process.on_numbered(framework)
            return result

        return joins

    wrappers = {id(original): behind(original) for name in _JOINING if (original := getattr(home, name, None))}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == framework and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in wrappers:
                    replaced.append((module, name, value))
                    setattr(module, name, wrappers[id(value)])
