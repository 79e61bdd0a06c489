"""The aggregator runs on a login node: no framework, nothing of the recording half, and an answer at once."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "aggregator"

OURS = ("msprobe_launch.records", "msprobe_launch.errors", "msprobe_launch.logs", "msprobe_launch.__version__")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            # `from msprobe_launch import records` names the module only together with what is imported.
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_what_it_may(path: Path) -> None:
    for name in _imports(path):
        top = name.split(".")[0]
        assert top not in ("torch", "mindspore"), f"{path}: {name}"
        if top == "msprobe_launch":
            assert name.startswith(OURS), f"{path}: {name}"


def _modules_after(code: str) -> set[str]:
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_loads_nothing_heavy() -> None:
    loaded = _modules_after(
        "import contextlib, io\n"
        "from aggregator.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])"
    )
    for heavy in ("pandas", "pyarrow", "numpy", "rich", "yaml", "torch", "mindspore", "xlsxwriter", "python_calamine"):
        assert heavy not in loaded, heavy


def test_the_whole_aggregator_loads_no_framework() -> None:
    loaded = _modules_after("import aggregator.pipeline, aggregator.report.console, aggregator.report.summary")
    assert not loaded & {"torch", "mindspore", "msprobe_launch.capture", "msprobe_launch.launch"}
