"""The comparison that goes on beside the ranks (`--probe-bench`): a process of its own, at the lowest priority.

The launcher imports nothing of the aggregator. It starts `python -m aggregator.follow`, tells it of each attempt, and
passes on what it says. Whatever becomes of that process, the ranks do not notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_launch.records.layout import RunLayout

END_SECONDS = 60.0
"""How long the end of the launch waits for what is complete to be compared."""
HURRY_SECONDS = 3.0
"""The same where the launcher was told to stop, and after SIGTERM."""

Tell = Callable[[str, str, Iterable[int]], None]
"""(kind, text, ranks): an event worth a line."""


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """Which bench to compare with; after how many findings recording stops (None: never)."""

    bench: Path
    stop_at: int | None = None


class Follower:
    """The launcher's end. `poll` is called from one thread, the other methods from the main one."""

    def __init__(self, plan: FollowPlan, run_dir: Path, tell: Tell) -> None:
        self._plan, self._run_dir, self._tell = plan, run_dir, tell
        self._rest = b""
        self._compared = self._complete = 0
        self._lines: list[str] = []
        self._over = threading.Event()
        self._killed = False
        self._log = RunLayout(run_dir).aggregate / "inrun" / f"follower-{socket.gethostname()}.log"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._started()
        except OSError as error:
            self._failed(f"could not be started: {error.strerror or error}")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _started(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        folders = (os.fspath(self._run_dir), "--bench", os.fspath(self._plan.bench))
        command = [sys.executable, "-m", "aggregator.follow", *folders]
        if self._plan.stop_at is not None:
            command += ["--stop-at", str(self._plan.stop_at)]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Nothing in the working directory of the training is to be imported in place of ours.
                cwd=self._log.parent,
                env=_environment(os.environ),
                start_new_session=True,  # a terminal's Ctrl-C is for the ranks
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def attempt(self, number: int, ranks: Iterable[int]) -> None:
        """The ranks of this node in an attempt run; none where another launcher numbers them."""
        if self._process is None or self._process.stdin is None:
            return
        order = {"attempt": number, "ranks": sorted(rank for rank in ranks if rank >= 0)}
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def poll(self) -> None:
        """Pass on what was said since the last call."""
        if self._process is None or self._process.stdout is None or self._over.is_set():
            return
        while True:
            try:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._hear(json.loads(line))
        self._process.stdout.close()
        try:
            code = self._process.wait(HURRY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if not self._lines and not self._killed:
            self._failed(f"ended with code {code}{self._last_words()}")
        self._over.set()

    def _hear(self, said: Mapping[str, Any]) -> None:
        kind = said["kind"]
        if kind == "progress":
            self._compared, self._complete = said["compared"], said["complete"]
        elif kind == "done":
            self._lines = [said["text"]]
        else:
            self._tell(kind, said["text"], said.get("ranks", ()))

    def _failed(self, why: str) -> None:
        self._lines = [f"in-run: {self._compared:,} dumps were compared; the rest: {_command(self._run_dir)}"]
        self._tell("in-run", f"in-run: the comparison {why}; training goes on", ())
        self._over.set()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line]
            if lines:
                return f" ({lines[-1][:200]})"
        return ""

    def end(self, *, hurry: bool) -> list[str]:
        """The ranks have ended: wait for what is complete, END_SECONDS at most. The lines for the launcher's end."""
        process = self._process
        if process is None:
            return self._lines
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        limit = HURRY_SECONDS if hurry else END_SECONDS
        with contextlib.suppress(KeyboardInterrupt):
            self._over.wait(limit)
        if not self._over.is_set():
            self.kill()
            self._lines = [
                f"in-run: {self._compared:,} dumps were compared in the {limit:g} s that the launcher waits at its end;"
                f" the rest: {_command(self._run_dir)}"
            ]
        with contextlib.suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()
        return self._lines

    def kill(self) -> None:
        """End the process, whatever it does."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        self._killed = True
        process.terminate()
        try:
            process.wait(HURRY_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(run_dir: Path) -> str:
    return f"msprobe-aggregate {shlex.quote(os.fspath(run_dir))}"


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """One thread, UTF-8, and the packages that stand beside this one, wherever that was imported from."""
    packages = os.fspath(Path(__file__).resolve().parents[2])
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # Relative ones are the training's, and would mean another folder there.
    absolute = [path for path in paths if os.path.isabs(path)]
    # Arrow takes the names of files as UTF-8 whatever the locale, so Python has to see them so too.
    ours = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUTF8")
    return {**environ, **dict.fromkeys(ours, "1"), "PYTHONPATH": os.pathsep.join([*absolute, packages])}
