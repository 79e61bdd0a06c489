"""A slow file system holds up nobody: what waits is bounded, what comes beyond is dropped and counted."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from msprobe_launch.capture import disk as disk_module
from msprobe_launch.capture import writer as writer_module
from msprobe_launch.capture.disk import Disk
from msprobe_launch.capture.guard import Guard
from msprobe_launch.config import WhenFull
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout
from tests.unit.capture.test_session import start, step


def held(disk: Disk) -> threading.Event:
    """A job that ends when the event is set: a write that hangs."""
    release = threading.Event()
    disk.submit(release.wait)
    return release


def test_jobs_are_done_in_their_order_and_one_that_raises_does_not_end_the_thread() -> None:
    guard = Guard()
    disk, done = Disk(100, WhenFull.DROP, guard), []

    def bad() -> None:
        raise ValueError("odd")

    disk.submit(lambda: done.append(1))
    disk.submit(bad)
    disk.submit(lambda: done.append(2), 7)
    assert disk.drain(30)
    assert done == [1, 2]
    assert guard.lost == {"write: ValueError: odd": 0}
    assert disk.waiting == 0


def test_without_a_thread_jobs_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(disk_module._thread, "start_new_thread", none)
    disk, done = Disk(10, WhenFull.DROP, Guard()), []
    disk.submit(lambda: done.append(1), 5)
    assert (done, disk.waiting, disk.drain(0)) == ([1], 0, True)


def test_what_waits_is_bounded() -> None:
    disk = Disk(10, WhenFull.DROP, Guard())
    release = held(disk)
    disk.submit(lambda: None, 10)
    assert disk.has_room()
    disk.submit(lambda: None, 1)
    assert not disk.has_room()
    assert not disk.drain(0.01)
    release.set()
    assert disk.drain(30)
    assert disk.has_room()


def test_waiting_is_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(10, WhenFull.WAIT, Guard())
    release = held(disk)
    disk.submit(lambda: None, 11)
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            release.set()
        threading.Event().wait(seconds)

    monkeypatch.setattr(disk_module.time, "sleep", nap)
    assert disk.has_room()
    assert len(naps) >= 3
    assert disk.drain(30)


def test_a_disk_that_is_behind_is_waited_for_once() -> None:
    disk = Disk(10, WhenFull.DROP, Guard())
    release = held(disk)
    disk.catch_up()
    begin = time.monotonic()
    for _ in range(100):
        disk.catch_up()
    waited = time.monotonic() - begin
    release.set()
    assert disk.drain(30)
    assert waited < 100 * 0.05  # each of them alone would have waited that long


def test_a_rank_trains_on_while_its_disk_hangs_and_says_what_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, writes = threading.Event(), []
    write = writer_module.write_all

    def slow(handle: object, data: bytes) -> None:
        writes.append(len(data))
        if len(writes) > 4:
            release.wait()
        write(handle, data)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "write_all", slow)
    toy, session = start(tmp_path, buffer_bytes=2000, flush_records=1)
    for _ in range(20):
        step(toy)  # returns although nothing is written any more
    assert not release.is_set()
    lost = dict(session.guard.lost)
    release.set()
    session.finish(clean=True)
    (reason,) = lost
    assert reason.startswith("file system: too slow, more than 0.002 MB wait")
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert mark.finished
    assert mark.lost[reason] >= lost[reason] > 0
    assert mark.partial_steps, "a step of which something was dropped is no complete one"
    written = sum(
        len(json.loads(RunLayout(tmp_path).rank_folder(n, 0).dump.read_text())["data"])
        for n in (*mark.steps, *mark.partial_steps)
    )
    assert written + mark.lost[reason] == mark.calls


def test_a_forked_child_has_nothing_to_write(tmp_path: Path) -> None:
    disk = Disk(10, WhenFull.DROP, Guard())
    release = held(disk)
    disk.submit(lambda: None, 11)
    child = os.fork()
    if not child:
        disk.forget()
        os._exit(0 if disk.has_room() and disk.drain(0.01) else 1)
    assert os.waitpid(child, 0)[1] == 0
    release.set()
    assert disk.drain(30)


def test_recording_goes_on_when_the_disk_is_well_again(tmp_path: Path) -> None:
    toy, session = start(tmp_path, buffer_bytes=0, flush_records=1)
    release = held(session.writer.disk)
    session.writer.disk.submit(lambda: None, 1)
    step(toy)  # dropped
    release.set()
    assert session.writer.disk.drain(30)
    step(toy)
    session.finish(clean=True)
    mark = roster.load(RunLayout(tmp_path).roster_mark(0), roster.RankMark)
    assert (mark.partial_steps, mark.steps) == ((0,), (1,))
