"""RUN_DIR/control.yaml: what a running job rereads between steps, so that it can be looked at without a restart.

    record: on          # on, off, or auto (as it was started)
    level: mix          # as --probe-level
    steps: 5000-5004    # record these; the way to have all ranks begin at one step
    every: 100          # record every 100th step
    tensor_list: conv1  # save the values of these ops too, from the next step on (task statistics)

Flat `key: value` lines, read without a YAML package: a rank's environment may have none. A file that is wrong is said
once and changes nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from msprobe_launch.config import Level, ProbeConfig
from msprobe_launch.errors import ConfigError, near_miss
from msprobe_launch.records.numbers import NumberSet

KEYS = ("record", "level", "steps", "every", "tensor_list")
_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False, "auto": None}


@dataclass(frozen=True, slots=True)
class Orders:
    """What the file says. None: as the job was started."""

    record: bool | None = None
    level: Level | None = None
    steps: NumberSet | None = None
    every: int | None = None
    tensor_list: tuple[str, ...] | None = None

    def selects(self, step: int, config: ProbeConfig) -> bool:
        """True where `step` is to be recorded."""
        if self.record is False:
            return False
        if self.record is None and self.steps is None and self.every is None:
            return config.selects(step)
        return step in (self.steps or NumberSet()) and not step % (self.every or 1)

    @property
    def more_may_come(self) -> bool:
        """True where steps after those of the configuration may be recorded."""
        return self.record is not False and (self.record is True or self.steps is not None or self.every is not None)


def parse(text: str, where: str) -> Orders:
    """Read the file's text. Raises ConfigError."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line or line == "---":
            continue
        key, colon, value = line.partition(":")
        key = key.strip()
        if not colon:
            raise ConfigError(f"{where}: '{line}' is no line such as 'record: on'.")
        if key not in KEYS:
            raise ConfigError(f"unknown key '{key}' in {where}.{near_miss(key, KEYS)} Known: {', '.join(KEYS)}.")
        found[key] = value.strip().strip("[]").replace("'", "").replace('"', "").strip()
    try:
        return Orders(
            record=_switch(found["record"]) if found.get("record") else None,
            level=_level(found["level"]) if found.get("level") else None,
            steps=NumberSet.parse(found["steps"]) if found.get("steps") else None,
            every=_every(found["every"]) if found.get("every") else None,
            tensor_list=_names(found["tensor_list"]) if found.get("tensor_list") else None,
        )
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if "(" in name:
            raise ValueError(f"tensor_list: '{name}' is no name or part of a name.")
    return names


def _switch(text: str) -> bool | None:
    if text.lower() not in _SWITCH:
        raise ValueError(f"unknown value '{text}' of record. Known: on, off, auto.")
    return _SWITCH[text.lower()]


def _level(text: str) -> Level:
    known = [level.value for level in Level]
    if text not in known:
        raise ValueError(f"unknown level '{text}'.{near_miss(text, known)} Known: {', '.join(known)}.")
    return Level(text)


def _every(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"every: '{text}' is no whole number of at least 1.")
    return int(text)


class Control:
    """Watches the file; at most one look at the disk in `interval` seconds."""

    def __init__(self, path: Path, interval: float) -> None:
        self.orders = Orders()
        self._path = os.fspath(path)
        self._interval = interval
        self._look_at = 0.0
        self._state: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Read the file again where it has changed. True where there are new orders; raises ConfigError, OSError.

        A file that is gone means: as the job was started.
        """
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + self._interval
        try:
            status = os.stat(self._path)
            state = (status.st_mtime_ns, status.st_size)
        except OSError:
            state = None
        if state == self._state:
            return False
        self._state = state
        before = self.orders
        if state is None:
            self.orders = Orders()
        else:
            with open(self._path, encoding="utf-8", errors="replace") as handle:
                self.orders = parse(handle.read(), os.path.basename(self._path))
        return self.orders != before
