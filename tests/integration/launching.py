"""What tests of whole launches share: a launcher in the background, its tree found by a mark in the environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

TIMEOUT = 150.0


class Started:
    """A launcher in the background. Its processes carry a mark in their environment, whoever their parent is."""

    def __init__(self, argv: list[str], cwd: Path, env: dict[str, str], python: str | Path = sys.executable) -> None:
        self.mark = f"LAUNCH_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        # Files, because whoever of the tree lives on would hold a pipe open.
        self.out, self.err = cwd / f"stdout-{value}", cwd / f"stderr-{value}"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [str(python), "-m", "msprobe_launch", *argv],
                cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env, name: value},
                stdout=out,
                stderr=err,
            )

    def tree(self) -> set[int]:
        """Every living process that was started under this launch, the launcher and its helpers included."""
        found = set()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    stat = Path(f"/proc/{name}/stat").read_text()
                    if stat.rpartition(")")[2].split()[0] in "ZX":
                        continue
                    if self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.add(int(name))
        return found

    def gone_within(self, seconds: float) -> bool:
        return eventually(lambda: not self.tree(), seconds)

    def await_(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds; fail where the launcher ends first."""
        assert eventually(lambda: condition() or self.process.poll() is not None)
        assert condition(), self.err.read_text()

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr, once it has ended."""
        code = self.process.wait(timeout=TIMEOUT)
        return code, self.out.read_text(), self.err.read_text()


@contextlib.contextmanager
def started(cwd: Path, *argv: str | Path, python: str | Path = sys.executable, **env: str) -> Iterator[Started]:
    """A launcher that is gone at the end with all its tree, whatever the test did."""
    launch = Started([*map(str, argv)], cwd, env, python)
    try:
        yield launch
    finally:
        for _ in range(100):
            left = launch.tree()
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.02)
        launch.process.wait(timeout=10)


def eventually(condition: Callable[[], object], seconds: float = TIMEOUT) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
