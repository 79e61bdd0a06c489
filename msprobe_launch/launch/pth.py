"""`install-pth` and `uninstall-pth`: the way in that works under `python -I` and `-E` and needs no PYTHONPATH."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from msprobe_launch.errors import UsageError
from msprobe_launch.launch.injection import SITE

NAME = "msprobe_launch.pth"
USAGE = "msprobe-launch install-pth|uninstall-pth [--python PYTHON]"


def command(tokens: Sequence[str]) -> str:
    """Run `install-pth` or `uninstall-pth`; what to say. Raises UsageError."""
    verb, *rest = tokens
    if rest and (len(rest) != 2 or rest[0] != "--python"):
        raise UsageError(f"unknown arguments {' '.join(rest)}.", hint=f"usage: {USAGE}")
    path = place(rest[1] if rest else sys.executable)
    try:
        if verb == "install-pth":
            path.write_text(line(), encoding="utf-8")
            return f"{path} is installed: ranks are reached under python -I and -E too (not -S). Undo: uninstall-pth"
        if not path.exists():
            return f"{path} is not there, nothing to remove"
        path.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be changed: {error.strerror}", hint="Use the owner's account.") from error
    return f"{path} is removed"


def line() -> str:
    """The file's one line. A process without our configuration looks into its environment and goes on."""
    file = SITE.parent / "pth.py"
    run = "exec(compile(open(f).read(), f, 'exec'), {'__file__': f, '__name__': '_msprobe'})"
    asks = "'MSPROBE_RANK_CONFIG' in os.environ and os.path.exists(f)"
    return f"import os; f = {str(file)!r}; {run} if {asks} else None\n"


def place(python: str) -> Path:
    """Where an interpreter looks for .pth files. Raises UsageError."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{python} is no Python interpreter: {error}") from error
    return Path(done.stdout.strip()) / NAME
