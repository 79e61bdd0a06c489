"""`--dry-run`: the plan as it would be started, and where each setting came from. Nothing is made or started."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from enum import Enum

from msprobe_launch.launch.base import Launcher, LaunchPlan
from msprobe_launch.launch.choice import Choice
from msprobe_launch.launch.rundir import check_free

# What an empty value of a filter lets through; of all other settings it means that there is none.
_EMPTY = {"steps": "all", "ranks": "all", "scope": "all", "list": "all"}


def lines(
    plan: LaunchPlan, launcher: Launcher, sources: Mapping[str, str], choice: Choice | None = None
) -> Iterator[str]:
    """The plan in lines. `sources` maps a field to the file's key, the variable or the flag that set it.

    `choice` says why it is this backend, where there was a choice.

    Raises ProbeError where the launch would be refused.
    """
    described = launcher.describe(plan)
    if plan.config is not None:
        check_free(plan.config.run_dir)
    yield f"backend: {launcher.name if choice is None else choice.text}"
    yield from described
    if plan.config is None:
        yield f"probe off ({sources.get('off', 'default')}): nothing is injected"
    else:
        yield "environment of each rank, beside what its launcher sets:"
        for name, value in launcher.environment(plan, os.environ).items():
            yield f"  {name}={shlex.quote(value)}"
        yield "recording:"
        for field, value in plan.config.as_dict().items():
            yield _setting(field, value, sources)
    yield "launcher:"
    for setting in dataclasses.fields(plan.settings):
        yield _setting(setting.name, getattr(plan.settings, setting.name), sources)


def _setting(field: str, value: object, sources: Mapping[str, str]) -> str:
    if isinstance(value, Enum):
        value = value.value
    elif isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    shown = _EMPTY.get(field, "none") if value is None or value == "" else value
    return f"  {field} = {shown}  ({sources.get(field, 'default')})"
