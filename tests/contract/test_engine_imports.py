"""The engine's side of the import arrow (docs/architecture.md): the neutral core knows no framework."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "msprobe_launch"

# package -> (our own modules it may import, other distributions it may import)
ALLOWED: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "records": (("records", "errors"), {"msgspec"}),
    "native": (("native",), set()),
    "capture": (("capture", "records", "config", "errors", "logs", "adapters.base"), {"yaml"}),
    "adapters/torch": (("adapters", "capture", "records", "config", "native", "errors", "logs"), {"torch", "numpy"}),
    "adapters/mindspore": (
        ("adapters", "capture", "records", "config", "native", "errors", "logs"),
        {"mindspore", "numpy"},
    ),
}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module if node.module != "msprobe_launch" else f"msprobe_launch.{node.names[0].name}"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_follow_the_arrow(package: str) -> None:
    ours, others = ALLOWED[package]
    files = sorted((PACKAGE / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imports_of(path):
            top, _, rest = name.partition(".")
            if top == "msprobe_launch":
                assert rest.startswith(ours), f"{path.relative_to(PACKAGE)} imports {name}"
            elif top not in sys.stdlib_module_names:
                assert top in others, f"{path.relative_to(PACKAGE)} imports {name}"


def test_names_are_split_and_joined_in_one_place_only() -> None:
    """`.split(".")` on a name is the business of records/names.py; torch's own module paths are something else."""
    allowed = {"names.py", "classify.py", "naming.py"}
    for folder in ("capture", "records", "adapters"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            if path.name not in allowed:
                assert '.split(".")' not in path.read_text(encoding="utf-8"), path
