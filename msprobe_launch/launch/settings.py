"""How the launcher itself behaves: flags `--probe-NAME` and variables MSPROBE_LAUNCH_NAME that no rank has to know."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from msprobe_launch.config_sources import ENV_PREFIX, truth
from msprobe_launch.errors import ConfigError, near_miss

_E = TypeVar("_E", bound=Enum)


class ExitCode(str, Enum):
    """Whose exit code the launcher ends with: that of the rank that failed first, or 1 as torchrun."""

    RANK = "rank"
    TORCHRUN = "torchrun"


class Msrun(str, Enum):
    """Who starts MindSpore's processes: we do as msrun would, or the installed msrun."""

    OWN = "own"
    EXEC = "exec"


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """`stop_at_divergence` is the number of findings after which recording stops, None for never.

    `status` is the seconds between two status lines, None for the default of the place. `rank_variable` names
    the variable that numbers the ranks of another launcher, None for the known ones.
    """

    off: bool = False
    strict: bool = False
    exit_code: ExitCode = ExitCode.RANK
    status: float | None = None
    hang_timeout: float | None = None
    hang_kill: bool = False
    rank_variable: str | None = None
    stop_at_divergence: int | None = None
    msrun: Msrun = Msrun.OWN


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"'{text}' is no number of seconds.")
    return value


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ValueError(f"'{text}' is no whole number of at least 1.")
    return int(text)


def _exit_code(text: str) -> ExitCode:
    return _one_of(ExitCode, text)


def _msrun(text: str) -> Msrun:
    return _one_of(Msrun, text)


def _one_of(kinds: type[_E], text: str) -> _E:
    try:
        return kinds(text)
    except ValueError:
        known = [kind.value for kind in kinds]
        raise ValueError(f"unknown value '{text}'.{near_miss(text, known)} Known: {', '.join(known)}.") from None


# Field -> reader of its text. Switches are those whose reader is `truth`.
FIELDS: dict[str, Callable[[str], Any]] = {
    "off": truth,
    "strict": truth,
    "exit_code": _exit_code,
    "status": _seconds,
    "hang_timeout": _seconds,
    "hang_kill": truth,
    "rank_variable": str,
    "stop_at_divergence": _count,
    "msrun": _msrun,
}
VARIABLES = {field: f"{ENV_PREFIX}{field.upper()}" for field in FIELDS}


def add_options(add: Callable[..., Any], exit_not_recorded: int) -> None:
    """Put the flags into our parser."""
    add("--probe-off", action="store_true", help="same launch, nothing injected: the control run")
    add("--probe-strict", action="store_true", help=f"exit {exit_not_recorded} where a rank did not record")
    add("--probe-exit-code", metavar="WHOSE", help="rank: that of the rank that failed first; torchrun: 1")
    add("--probe-status", metavar="S", help="seconds between status lines, 0 for none (terminal: 1, else 60)")
    add("--probe-hang-timeout", metavar="S", help="no step for S seconds: say who waits where (default: never)")
    add("--probe-hang-kill", action="store_true", help="and end the job then")
    add(
        "--probe-stop-at-divergence",
        metavar="N",
        help="with --probe-bench: stop recording after N findings, keep the values of N ops around the first",
    )
    add("--probe-rank-variable", metavar="NAME", help="--backend command: the variable that numbers the ranks")
    add("--probe-msrun", metavar="WHO", help="exec: the installed msrun starts the ranks (default: own)")


def resolve_settings(given: argparse.Namespace, environ: Mapping[str, str]) -> tuple[LaunchSettings, dict[str, str]]:
    """Flags before variables; and for each field that is set the flag or variable that did it. Raises ConfigError."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field, parse in FIELDS.items():
        flag = getattr(given, f"probe_{field}")
        name = f"--probe-{field.replace('_', '-')}"
        if flag == "":  # of a variable of the shell that is not set
            raise ConfigError(f"{name}: must not be empty.", hint=f"Leave out {name}.")
        source, text = (name, flag) if flag else (VARIABLES[field], "")
        text = text or environ.get(VARIABLES[field], "")
        if text is True:
            values[field] = True
        elif text:
            try:
                values[field] = parse(text)
            except ValueError as error:
                raise ConfigError(f"{source}: {error}") from None
        if text:
            sources[field] = source
    if not values.get("hang_timeout"):
        values.pop("hang_timeout", None)
        if values.get("hang_kill"):
            raise ConfigError("--probe-hang-kill needs --probe-hang-timeout S: how long no step may end.")
    return LaunchSettings(**values), sources
