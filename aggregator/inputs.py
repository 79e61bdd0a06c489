"""Files as they come: JSON that some rank wrote, YAML that a person wrote. What cannot be read is told in words."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msprobe_launch.errors import ConfigError, UnreadableInput

# An escape of JSON: a pair of surrogates, one alone, or any other.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)


def json_bytes(path: Path) -> bytes:
    """The bytes of a JSON file. A surrogate alone, which no table can hold, becomes U+FFFD.

    Raises FileNotFoundError, and UnreadableInput where it cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableInput(f"{path.name} is no file but a {_kind(path)}")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableInput(f"{path.name} cannot be read: {error.strerror or error}") from error
    if b"\\ud" in raw or b"\\uD" in raw:
        raw = _ESCAPE.sub(lambda escape: b"\\ufffd" if escape[1] else escape[0], raw)
    return raw


def _kind(path: Path) -> str:
    mode = path.stat().st_mode
    kinds = {"folder": stat.S_ISDIR, "pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
    return next((kind for kind, holds in kinds.items() if holds(mode)), "device")


def yaml_of(path: Path, parse: Callable[[str], Any]) -> Any:
    """What `parse` makes of a file of YAML. Raises ConfigError where it cannot be read or is no YAML."""
    import yaml

    try:
        return parse(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested deeper than any such file") from error
