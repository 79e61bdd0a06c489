"""How much memory the launcher's control group may use, and how often the kernel's memory killer has struck in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

# A limit above this is what version 1 writes for "none".
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """`limit` in bytes, None where there is none or it cannot be read; `kills` of the memory killer so far."""

    limit: int | None = None
    kills: int | None = None

    @classmethod
    def read(cls, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> MemoryGroup:
        """The smallest limit of our group and those around it, with the kills of our own group."""
        limits: list[int] = []
        kills: int | None = None
        for group in _groups(root, membership):
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _text(group / name)
                if text.isdigit() and int(text) < _NO_LIMIT:
                    limits.append(int(text))
            for name in ("memory.events", "memory.oom_control"):
                for line in _text(group / name).splitlines():
                    key, _, count = line.partition(" ")
                    if key == "oom_kill" and count.isdigit() and kills is None:
                        kills = int(count)
        return cls(min(limits, default=None), kills)


def _groups(root: Path, membership: Path) -> Iterator[Path]:
    """Our group and those around it, innermost first, in either version of control groups."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root
        elif "memory" in controllers.split(","):
            top = root / "memory"
        else:
            continue
        inner = top / path.strip("/")
        # In a container the path is the host's, and the group itself is mounted at the top.
        while inner != top:
            yield inner
            inner = inner.parent
        yield top


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
