"""Copies the lines of log files to the console while they grow, each with a word about whose it is."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

# Between two looks: a line is on the console well before a reader could miss it.
LOOK_SECONDS = 0.1
_CHUNK = 1 << 16


class ConsoleTail:
    """Follows files that other processes write. Within a file lines keep their order; none is cut by another file's.

    A line is shown once it is complete, or with what there is of it at the end. Of a line that was drawn several times
    (a progress bar: carriage returns) the last state is shown.
    """

    def __init__(self, files: Mapping[Path, str]) -> None:
        """`files` maps each to what stands before its lines. They are there already."""
        self._sources = [(path.open("rb", buffering=0), prefix.encode(), bytearray()) for path, prefix in files.items()]
        self._stop = threading.Event()
        self._is_open = bool(self._sources)
        self._thread = threading.Thread(target=self._follow, name="msprobe-console", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show what is still to be shown. Whoever writes the files has ended."""
        self._stop.set()
        self._thread.join()
        for file, _, _ in self._sources:
            file.close()

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._look()
        self._look()
        for _, prefix, rest in self._sources:
            if rest:
                self._write(_line(prefix, bytes(rest)))

    def _look(self) -> None:
        for file, prefix, rest in self._sources:
            while self._is_open and (data := file.read(_CHUNK)):
                *lines, last = (bytes(rest) + data).split(b"\n")
                self._write(b"".join(_line(prefix, line) for line in lines))
                rest[:] = _drawn(last)

    def _write(self, data: bytes) -> None:
        try:
            while data and self._is_open:
                try:
                    data = data[os.write(sys.stdout.fileno(), data) :]
                except BlockingIOError:  # somebody has made the terminal such
                    select.select([], [sys.stdout], [])
        except (OSError, ValueError, AttributeError):
            self._is_open = False  # nobody reads any more; the files have it all


def _line(prefix: bytes, line: bytes) -> bytes:
    return prefix + _drawn(line).rstrip(b"\r") + b"\n"


def _drawn(line: bytes) -> bytes:
    """What is to be seen of a line, with the carriage returns at its end: a line feed may follow them."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]
