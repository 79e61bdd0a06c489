"""What the installed msrun accepts and how it binds processes, asked of its own code.

`import mindspore` takes seconds and writes to stderr, so the launcher never does it. The module that defines msrun's
options is read from its file and executed with stand-ins for all of MindSpore (milliseconds): it needs nothing of it
to make its parser. What it works out about cores and memory nodes needs MindSpore whole: a child process is asked, and
only where binding is asked for.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from msprobe_launch.errors import UsageError

# Up to this release MindSpore's C++ half cannot import numpy 2: operators raise, and workers that train to their end
# leave the cluster as if they had failed. Releases after it have not been seen.
BROKEN_WITH_NUMPY_2 = (2, 10)
INSTALL = "pip install 'mindspore==2.10.*' 'numpy<2'"
_MODULE = Path("parallel", "cluster", "run.py")
# How long `import mindspore` may take from a cold network file system.
_CHILD_SECONDS = 300


class _Anything:
    """Stands for whatever msrun's module imports of MindSpore. It is never used while options are read."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *_: object, **__: object) -> _Anything:
        return self


class _Found(Exception):
    """msrun's parser is complete: its module wants to parse sys.argv now."""


class _Parser(argparse.ArgumentParser):
    """Hands itself out at the first attempt to parse, and is a parser like any other afterwards."""

    is_found = False

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_found:
            self.is_found = True
            raise _Found(self)
        return super().parse_args(*args, **kwargs)


def installed_parser() -> argparse.ArgumentParser:
    """The installed msrun's own parser. Raises UsageError where there is no msrun or it is not as we know it."""
    try:
        spec = importlib.util.find_spec("mindspore")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations or spec.origin is None:
        raise UsageError(
            "the msrun backend needs MindSpore, which this Python cannot import.",
            hint=f"Install it here ({INSTALL}), or run msprobe-launch from the training's environment.",
        )
    path = Path(next(iter(spec.submodule_search_locations))) / _MODULE
    try:
        namespace = _executed(path)
        namespace["get_args"]()
    except _Found as found:
        parser: argparse.ArgumentParser = found.args[0]
        parser.prog = "msrun"
        return parser
    except (OSError, SyntaxError, KeyError, ImportError, AttributeError, TypeError, NameError) as error:
        raise _unknown(path, f"{type(error).__name__}: {error}") from error
    raise _unknown(path, "get_args() parsed nothing")


def _executed(path: Path) -> dict[str, Any]:
    """The names that a module of MindSpore's defines, nothing of MindSpore imported."""
    seen = types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})

    def stand_in(name: str, *args: Any, **kwargs: Any) -> Any:
        level = kwargs.get("level", args[3] if len(args) > 3 else 0)
        if level or name.partition(".")[0] == "mindspore":
            return _Anything()
        return seen if name == "argparse" else importlib.__import__(name, *args, **kwargs)

    namespace: dict[str, Any] = {
        "__name__": "mindspore.parallel.cluster.run",
        "__file__": str(path),
        "__builtins__": {**vars(builtins), "__import__": stand_in},
    }
    exec(compile(path.read_bytes(), path, "exec"), namespace)
    return namespace


def _unknown(path: Path, why: str) -> UsageError:
    return UsageError(
        f"the options of the installed msrun cannot be read from {path}: {why}",
        hint="Start msrun itself: msprobe-launch --backend command -- msrun --join=True ...",
    )


@dataclass(frozen=True, slots=True)
class Parsed:
    """msrun's options. `environ` is what its parser puts into the environment while it looks at them."""

    args: argparse.Namespace
    environ: dict[str, str] = field(default_factory=dict)


def parse(parser: argparse.ArgumentParser, tokens: list[str]) -> Parsed:
    """Parse with msrun's own parser, this process's environment left as it is. Raises UsageError."""
    before = dict(os.environ)
    try:
        args = parser.parse_args(tokens)
        added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    except SyntaxError as error:  # --join is read by ast.literal_eval
        raise UsageError(f"msrun's options: {error.msg}: {error.text}", hint="--join=True") from error
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)
    return Parsed(args, added)


# -- numpy


def refuse_numpy() -> None:
    """Raise UsageError where the numpy that is installed breaks the MindSpore that is installed."""
    why = numpy_breaks(_version("mindspore"), _version("numpy"))
    if why:
        raise UsageError(why, hint="pip install 'numpy<2'")


def numpy_breaks(mindspore: str | None, numpy: str | None) -> str:
    """Why this pair of versions does not work, or an empty text. None stands for a package that is not there."""
    if mindspore is None or numpy is None or _numbers(numpy) < (2,) or _numbers(mindspore)[:2] > BROKEN_WITH_NUMPY_2:
        return ""
    return f"MindSpore {mindspore} does not work with numpy {numpy}: it needs numpy<2."


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`2.10.0rc1` as (2, 10); what is no number ends it."""
    found = []
    for part in version.split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


# -- binding


@dataclass(frozen=True, slots=True)
class Binding:
    """What stands before a process's command, and what its environment gets, so that it stays on its cores."""

    prefix: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


# Run by a child with MindSpore's own functions; its warnings go where the launcher's go.
_BINDS = """
import json, os, sys
from mindspore.parallel.cluster.process_entity import _bind, _utils
asked = json.loads(sys.argv[1])
context = _bind._generate_bind_context(asked["workers"], asked["bind_numa"], asked["bind_core"])
answer = []
for local_rank in range(-1, asked["workers"]):
    os.environ.pop("MSRUN_CPU_LIST", None)
    command = _utils._generate_cmd("python", [], local_rank, context)
    cores = os.environ.get("MSRUN_CPU_LIST")
    answer.append([command[:-1], {} if cores is None else {"MSRUN_CPU_LIST": cores}])
with open(int(sys.argv[2]), "w") as file:
    json.dump(answer, file)
"""


def bindings(args: argparse.Namespace, workers: int, environ: Mapping[str, str]) -> list[Binding]:
    """The scheduler's binding, then that of each worker of this node, as the installed msrun has them.

    Raises UsageError where MindSpore finds them impossible.
    """
    if not args.bind_core and not args.bind_numa:
        return [Binding()] * (workers + 1)
    asked = json.dumps({"workers": workers, "bind_core": args.bind_core, "bind_numa": args.bind_numa})
    read, write = os.pipe()
    with open(read, encoding="utf-8") as answer:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _BINDS, asked, str(write)],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=(write,),
                timeout=_CHILD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(f"MindSpore did not say within {_CHILD_SECONDS} s how to bind processes.") from error
        finally:
            os.close(write)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise UsageError(f"--bind_core, --bind_numa: {said[-1]}")
        sys.stderr.write("".join(line for line in done.stderr.splitlines(keepends=True) if "WARNING" in line))
        return [Binding(tuple(prefix), added) for prefix, added in json.load(answer)]
