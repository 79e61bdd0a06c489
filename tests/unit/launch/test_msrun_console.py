"""Log files of several ranks on one console."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from msprobe_launch.launch.console import ConsoleTail


def test_lines_come_whole_in_order_and_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file of our own: what is written while capfd empties its file is lost.
    shown_to = tmp_path / "console"
    with shown_to.open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        _write_and_look(tmp_path, shown_to)
    shown = shown_to.read_text(errors="replace")
    of_first = [line for line in shown.splitlines() if line.startswith("[a]")]
    assert of_first == ["[a]: one", "[a]: two", "[a]: 50%"]
    of_second = [line for line in shown.splitlines() if line.startswith("[b]")]
    assert of_second[:2] == ["[b]: ein", f"[b]: {'z' * 200_000}"]
    assert len(of_second) == 3


def _write_and_look(folder: Path, shown_to: Path) -> None:
    logs = [folder / name for name in ("a", "b")]
    for log in logs:
        log.touch()
    tail = ConsoleTail({log: f"[{log.name}]: " for log in logs})
    with logs[0].open("ab", buffering=0) as first, logs[1].open("ab", buffering=0) as second:
        first.write(b"one\ntw")
        second.write(b"ein\r\n" + b"z" * 200_000 + b"\n")
        deadline = time.monotonic() + 30
        while "[a]: one\n" not in (shown := shown_to.read_text()) or "z\n" not in shown:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "tw" not in shown
        first.write(b"o\n10%\r50%\r")
        second.write("ü\xff".encode("latin-1"))
    tail.close()
    with logs[0].open("ab", buffering=0) as first:
        first.write(b"nobody reads this")


def test_a_console_that_nobody_reads_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a"
    log.write_text("line\n")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        ConsoleTail({log: ""}).close()
    # An exception of its thread would be an error of this test; what it could not show is in the log still.
    assert not any(thread.name == "msprobe-console" for thread in threading.enumerate())
    assert log.read_text() == "line\n"
