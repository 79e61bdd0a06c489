"""Which backend `--backend auto` means: that of the framework which the script imports, by its source, never run.

Read are the script's own import statements, wherever they stand in it; what it imports is not followed. Where they
decide nothing, options decide that only one backend has, then what is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Framework -> the backend that starts its ranks.
BACKENDS = {"torch": "torchrun", "mindspore": "msrun"}
# Options of msrun that torchrun has too: they tell nothing.
_SHARED = {"--master_addr", "--master_port", "--node_rank", "--log_dir", "--help"}
# What msrun itself takes for the program where the first word is one of these.
PROGRAMS = ("python", "python3", "pytest")


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and why in words. `is_guess` where nothing in the command line or the script speaks for it."""

    backend: str
    reason: str
    is_guess: bool = False

    @property
    def text(self) -> str:
        other = "msrun" if self.backend == "torchrun" else "torchrun"
        return f"{self.backend}: {self.reason}" + (f"; a guess, else --backend {other}" if self.is_guess else "")


def installed() -> tuple[str, ...]:
    """The frameworks that this Python can import, found without importing one."""
    return tuple(name for name in BACKENDS if _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None  # a folder that happens to have the name has no origin


def script_of(target: Sequence[str]) -> str:
    """The Python script in a target, or an empty text where none can be named."""
    words = target[1:] if target[:1] and target[0] in PROGRAMS else target[:1]
    return next((word for word in words if word.endswith(".py")), "")


def frameworks_in(script: str) -> set[str]:
    """The frameworks that a script imports, anywhere in it. None where it cannot be read or is no Python."""
    tree = _tree(script)
    return set() if tree is None else {name.partition(".")[0] for name in _imports(tree)} & BACKENDS.keys()


def _tree(script: str) -> ast.Module | None:
    try:
        with open(script, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own syntax, which Python will show in each rank
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module


def needs_only(target: Sequence[str], framework: str) -> bool:
    """True where the script cannot do without `framework` and imports no other: it does so first of all, at its top."""
    script = script_of(target)
    if not script or frameworks_in(script) != {framework}:
        return False
    tree = _tree(script)
    return tree is not None and any(name.partition(".")[0] == framework for name in _imports_at_top(tree))


def _imports_at_top(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _imports(node)


def own_option(tokens: Iterable[str], msrun_options: Iterable[str]) -> str:
    """The first of `tokens` that is spelled as an option which msrun alone has, else an empty text."""
    own = {*msrun_options} - _SHARED
    return next((name for token in tokens if (name := token.partition("=")[0]) in own and name.startswith("--")), "")


def choose(target: Sequence[str], present: Sequence[str], own: str) -> Choice:
    """The backend for a target, where `present` are the installed frameworks and `own` an option of msrun's alone."""
    script = script_of(target)
    found = frameworks_in(script) if script else set()
    if len(found) == 1:
        (framework,) = found
        return Choice(BACKENDS[framework], f"{script} imports {framework}")
    if own:
        return Choice("msrun", f"{own} is msrun's")
    if len(present) == 1:
        return Choice(BACKENDS[present[0]], f"{present[0]} is installed here, and no other framework")
    named = script or (target[0] if target else "the command line")
    if found:
        return Choice("msrun", f"{named} imports torch and mindspore", is_guess=True)
    return Choice("torchrun", f"{named} imports neither torch nor mindspore", is_guess=True)
