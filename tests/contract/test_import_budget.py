"""What may be imported where: `--help`, the first milliseconds of a process, and the arrow between the packages."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import msprobe_launch
from msprobe_launch.adapters import ADAPTERS
from msprobe_launch.bootstrap.importing import FRAMEWORKS
from msprobe_launch.bootstrap.variables import CONFIG
from msprobe_launch.config import ProbeConfig
from msprobe_launch.launch.injection import SITE, worker_environment

PACKAGE = Path(msprobe_launch.__file__).parent

# Anything that costs more than it is worth before a command has been understood.
HEAVY = {
    "torch",
    "mindspore",
    "numpy",
    "pandas",
    "pyarrow",
    "rich",
    "yaml",
    "msgspec",
    "filelock",
    "asyncio",
    "socketserver",
}

# Package -> what of ours it may import. `records`, `errors`, `logs` and `config` are the common ground.
COMMON = {"records", "errors", "logs", "config", "config_sources", "__version__"}
ALLOWED = {
    # `bootstrap` for the folder it injects and the names of the variables, never for what runs in a rank.
    "launch": {*COMMON, "launch", "bootstrap"},
    "bootstrap": {*COMMON, "bootstrap", "adapters", "capture"},
}

MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def modules_of(code: str, env: dict[str, str] | None = None) -> set[str]:
    """Names in sys.modules of a new interpreter after `code`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "MSPROBE_", "RANK"))}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{MODULES}"],
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_no_framework_and_nothing_heavy() -> None:
    loaded = modules_of("from msprobe_launch.cli import main; assert main(['--help']) == 0")
    assert not {name for name in loaded if name.partition(".")[0] in HEAVY}


def test_sitecustomize_adds_nothing_to_a_process_that_is_no_rank() -> None:
    assert modules_of("", {"PYTHONPATH": str(SITE)}) - {"sitecustomize"} == modules_of("") - {"sitecustomize"}
    # A configured process without a rank's number is somebody on the way to a rank: left alone as well.
    configured = {"PYTHONPATH": str(SITE), CONFIG: "{}"}
    assert modules_of("", configured) - {"sitecustomize"} == modules_of("") - {"sitecustomize"}


def test_a_rank_to_be_loads_our_first_modules_only(tmp_path: Path) -> None:
    added = worker_environment(ProbeConfig(run_dir=tmp_path), {})
    loaded = modules_of("", {**added, "RANK": "0"}) - modules_of("")
    assert loaded - {"__future__", "atexit", "sitecustomize"} == {
        "msprobe_launch",
        "msprobe_launch.bootstrap",
        "msprobe_launch.bootstrap.activate",
        "msprobe_launch.bootstrap.importing",
        "msprobe_launch.bootstrap.variables",
    }


def test_the_bootstrap_waits_for_the_frameworks_that_have_an_adapter() -> None:
    assert tuple(ADAPTERS) == FRAMEWORKS


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_follow_the_arrow(package: str) -> None:
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "msprobe_launch" and len(parts) > 1:
                assert parts[1] in ALLOWED[package], f"{path.name} imports {name}"
            assert parts[0] not in ("aggregator", "mindspore"), f"{path.name} imports {name}"
            if parts[0] == "torch":
                assert path.name == "torchrun.py", f"{path.name} imports {name}"


def test_the_launcher_takes_names_only_from_the_bootstrap() -> None:
    for path in sorted((PACKAGE / "launch").rglob("*.py")):
        taken = {name for name in imports_of(path) if name.startswith("msprobe_launch.bootstrap.")}
        assert taken <= {"msprobe_launch.bootstrap.variables"}, path.name


def test_the_first_modules_import_at_their_top_only_what_is_free() -> None:
    free = {
        "os",
        "sys",
        "atexit",
        "__future__",
        "msprobe_launch.bootstrap.importing",
        "msprobe_launch.bootstrap.variables",
    }
    for name in ("site/sitecustomize.py", "activate.py", "importing.py", "variables.py"):
        tree = ast.parse((PACKAGE / "bootstrap" / name).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= free, name
            elif isinstance(node, ast.ImportFrom):
                assert node.module in free, name
