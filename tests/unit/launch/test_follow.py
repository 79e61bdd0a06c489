"""The launcher's end of the in-run comparison, against processes that stand in for it and behave as told."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from msprobe_launch.launch import follow
from msprobe_launch.launch.follow import Follower, FollowPlan

HEAD = """
import json, os, sys, time
def say(kind, text, **more):
    print(json.dumps({"kind": kind, "text": text, **more}), flush=True)
"""
Told = list[tuple[str, str, tuple[int, ...]]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Callable[[str], tuple[Follower, Told]]]:
    """A follower whose process runs this code, and the list of what it tells."""
    made: list[Follower] = []

    def make(code: str) -> tuple[Follower, Told]:
        package = tmp_path / "stand-in" / "aggregator"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "follow.py").write_text(HEAD + textwrap.dedent(code))
        # A relative entry is the training's: it must not reach the process.
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), "relative"]))
        told: Told = []
        follower = Follower(
            FollowPlan(tmp_path / "bench", 3),
            tmp_path / "run",
            lambda kind, text, ranks: told.append((kind, text, (*ranks,))),
        )
        made.append(follower)
        return follower, told

    yield make
    for follower in made:
        follower.kill()
        follower.end(hurry=True)
        follower.poll()


def poll(follower: Follower, until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        follower.poll()
        time.sleep(0.01)


def test_what_it_says_is_passed_on_and_its_last_line_is_the_end(start: Callable[..., tuple[Follower, Told]]) -> None:
    follower, told = start(
        """
        say("note", json.dumps([sys.argv[2:], "relative" in os.environ["PYTHONPATH"], os.getsid(0) == os.getpid()]))
        for line in sys.stdin:
            say("divergence", line.strip(), ranks=[1])
        say("progress", "", compared=1, complete=2)
        say("done", "all of it")
        """
    )
    follower.attempt(0, (1, 0, -1))
    poll(follower, lambda: len(told) == 2)
    assert told[0][1].startswith('[["--bench", ')
    assert told[0][1].endswith(', "--stop-at", "3"], false, true]')
    assert told[1] == ("divergence", '{"attempt": 0, "ranks": [0, 1]}', (1,))
    assert follower._process is not None
    assert follower._process.stdin is not None
    follower._process.stdin.close()
    poll(follower, follower._over.is_set)
    assert follower.end(hurry=False) == ["all of it"]
    assert len(told) == 2


def test_one_that_dies_is_said_once_with_its_last_words(
    start: Callable[..., tuple[Follower, Told]], tmp_path: Path
) -> None:
    follower, told = start("say('progress', '', compared=7, complete=9); sys.exit('no room')")
    poll(follower, follower._over.is_set)
    for _ in range(3):
        follower.attempt(1, (0,))
        follower.poll()
    assert told == [("in-run", "in-run: the comparison ended with code 1 (no room); training goes on", ())]
    assert follower.end(hurry=False) == [
        f"in-run: 7 dumps were compared; the rest: msprobe-aggregate {tmp_path / 'run'}"
    ]


def test_one_that_does_not_end_is_ended(
    start: Callable[..., tuple[Follower, Told]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "HURRY_SECONDS", 0.2)
    follower, told = start(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); say('progress', '', compared=2, complete=9)\n"
        "say('note', 'here'); time.sleep(60)"
    )
    poll(follower, lambda: told)
    begin = time.monotonic()
    (line,) = follower.end(hurry=True)
    assert time.monotonic() - begin < 20
    assert line.startswith("in-run: 2 dumps were compared in the 0.2 s that the launcher waits at its end; the rest: ")
    follower.poll()
    assert told == [("note", "here", ())]


def test_one_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow.sys, "executable", str(tmp_path / "no-python"))
    told: Told = []
    follower = Follower(FollowPlan(tmp_path), tmp_path / "run", lambda *said: told.append(said))  # type: ignore[arg-type]
    follower.attempt(0, (0,))
    follower.poll()
    assert told[0][1] == "in-run: the comparison could not be started: No such file or directory; training goes on"
    assert follower.pid is None
    assert follower.end(hurry=False)[0].startswith("in-run: 0 dumps were compared")
