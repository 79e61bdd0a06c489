"""The tree of processes: who belongs to it, who does not, and that ending it ends everyone and nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from msprobe_launch.launch import tree
from msprobe_launch.launch.supervision import exit_code_of, handles
from msprobe_launch.launch.tree import GRACE_SECONDS, Tree, send, stat_of

DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)\n"
# A process that has a child which ignores SIGTERM, and a daemon of two forks and a session of its own.
FAMILY = f"""
import os, subprocess, sys, time
code = {DEAF!r}
children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)]
children[0].stdout.readline()
if os.fork() == 0:
    os.setsid()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    os._exit(0)
os.wait()
print(children[0].pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a Python program; whoever is left at the end is killed."""
    with contextlib.ExitStack() as stack:

        def start(code: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def alive(pid: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and stat.is_alive


def test_a_tree_ends_whole_and_a_stranger_lives(started: Callable[[str], subprocess.Popen[str]]) -> None:
    """The root stands for a launcher: it has started a rank, and is a subreaper."""
    root = started(
        f"import subprocess, sys, time\nsys.path[:0] = [{os.path.dirname(tree.__file__)!r}]\n"
        f"import tree\nassert tree.become_subreaper()\nsubprocess.Popen([sys.executable, '-c', {FAMILY!r}])\n"
        "time.sleep(600)\n"
    )
    stranger = started(DEAF)
    assert root.stdout is not None
    assert stranger.stdout is not None
    stranger.stdout.readline()
    daemon, child = int(root.stdout.readline()), int(root.stdout.readline())
    found = Tree(root.pid)
    found.look()
    assert {daemon, child} < found.members.keys()
    assert len(found.members) == 3
    assert stranger.pid not in found.members
    started_at = stat_of(child)
    assert started_at is not None
    assert child in found.living(sessions={started_at.session})
    assert daemon not in found.living(sessions={started_at.session})
    assert found.end(grace=0.2) == 3
    assert not alive(daemon)
    assert not alive(child)
    assert alive(root.pid)
    assert alive(stranger.pid)


@pytest.mark.parametrize("farewell", [True, False])
def test_the_guardian_ends_the_tree_unless_told_farewell(
    started: Callable[[str], subprocess.Popen[str]], farewell: bool
) -> None:
    root = started(
        f"import os, subprocess, sys, time\nsys.path[:0] = [{os.path.dirname(tree.__file__)!r}]\n"
        f"import tree\ntree.become_subreaper()\nguardian = tree.Guardian()\n"
        f"subprocess.Popen([sys.executable, '-c', {FAMILY!r}])\n"
        f"time.sleep(1.5)\n{'guardian.dismiss()' if farewell else ''}\nos.kill(os.getpid(), 9)\n"
    )
    assert root.stdout is not None
    left = [int(root.stdout.readline()), int(root.stdout.readline())]
    root.wait(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(alive, left)) and time.monotonic() < deadline:
        time.sleep(0.1)
        if farewell and time.monotonic() > deadline - 10 + GRACE_SECONDS + 1:
            break
    assert [alive(pid) for pid in left] == [farewell, farewell]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(root.pid, signal.SIGKILL)


def test_a_number_used_again_is_somebody_else(started: Callable[[str], subprocess.Popen[str]]) -> None:
    process = started(DEAF)
    stat = stat_of(process.pid)
    assert stat is not None
    assert not send(process.pid, stat.start - 1, signal.SIGKILL)
    assert alive(process.pid)
    assert send(process.pid, stat.start, signal.SIGKILL)
    process.wait(timeout=30)
    assert not send(process.pid, stat.start, signal.SIGKILL)


def test_an_exit_code_is_seen_and_left_for_who_waits(started: Callable[[str], subprocess.Popen[str]]) -> None:
    process = started("import sys; input() if 0 else sys.exit(7)")
    assert process.stdout is not None
    process.stdout.read()
    deadline = time.monotonic() + 30
    while exit_code_of(process.pid) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert exit_code_of(process.pid) == 7
    assert process.wait(timeout=30) == 7
    assert exit_code_of(process.pid) is None


def test_who_handles_a_signal(started: Callable[[str], subprocess.Popen[str]]) -> None:
    process = started(DEAF)
    assert process.stdout is not None
    process.stdout.readline()
    assert handles(process.pid, signal.SIGTERM)
    assert not handles(process.pid, signal.SIGUSR1)


def test_a_daemon_whose_parent_ends_while_we_look_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent was read as the dying one, which is gone when that one is read; at the next look it is the root."""
    daemon, dying = os.getpid(), 1 << 30
    real = stat_of(daemon)
    assert real is not None
    said = dying

    def told(pid: int) -> tree.Stat | None:
        if pid == dying:
            return None
        return tree.Stat(real.state, said, real.session, real.start) if pid == daemon else stat_of(pid)

    monkeypatch.setattr(tree, "stat_of", told)
    looking = Tree(root=1 << 29)
    looking.look()
    assert daemon not in looking.members
    said = looking.root
    looking.look()
    assert daemon in looking.members
