"""A finder that calls back once, when a framework has been imported. Imports sys only."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` would cost every rank several milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The import names of `adapters.ADAPTERS`, which is too heavy to ask here. A contract test holds the two together.
FRAMEWORKS = ("torch", "mindspore")


class FrameworkFinder:
    """Stands first in sys.meta_path until one of `names` has been imported, then calls `on_import(name)` and is gone.

    The module's spec and loader are those the other finders give: for the time of the import the loader *instance*
    carries its own `exec_module`, which takes itself off before the module's first line runs.
    """

    def __init__(self, names: Sequence[str], on_import: Callable[[str], None]) -> None:
        self._names = names
        self._on_import = on_import

    def install(self) -> None:
        """Wait for the import; a framework that is there already is reported at once."""
        for name in self._names:
            if name in sys.modules:
                self._on_import(name)
                return
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop waiting. Safe to call twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the import would find without us, its loader prepared; None for every other name."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                self._prepare(spec)
                return spec
        return None

    def _prepare(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return  # a namespace without code, or a loader of the old kind: nothing to wait for

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            self.remove()
            try:
                execute(module)
            except BaseException:
                sys.meta_path.insert(0, self)  # a script may catch this and try again
                raise
            self._on_import(spec.name)

        loader.exec_module = exec_module
