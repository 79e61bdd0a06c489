"""The limit and the kills of a control group, in both versions, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_launch.launch.memory import MemoryGroup


def group(tmp_path: Path, membership: str, files: dict[str, str]) -> MemoryGroup:
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return MemoryGroup.read(tmp_path / "sys", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("membership", "files", "limit", "kills"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "4000"}, 4000, None),
        ("0::/job\n", {"job/memory.max": "9", "job/memory.events": "low 0\noom 2\noom_kill 3\n"}, 9, 3),
        ("4:cpu,memory:/j\n0::/\n", {"memory/j/memory.limit_in_bytes": "77"}, 77, None),
        ("4:memory:/j\n", {"memory/j/memory.limit_in_bytes": "9223372036854771712"}, None, None),
        ("4:memory:/hosts/path\n", {"memory/memory.limit_in_bytes": "5"}, 5, None),
        ("4:memory:/j\n", {"memory/j/memory.oom_control": "under_oom 0\noom_kill 1\n"}, None, 1),
        ("", {}, None, None),
    ],
)
def test_limit_and_kills(
    tmp_path: Path, membership: str, files: dict[str, str], limit: int | None, kills: int | None
) -> None:
    assert group(tmp_path, membership, files) == MemoryGroup(limit, kills)
