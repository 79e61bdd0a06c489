"""A page of text: what it is printed on, and lines that are wrapped for it."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

# A pipe has no width; logs are read in windows of about this many columns.
PIPE_WIDTH = 100
MIN_WIDTH = 30

_BREAK_BEHIND = re.compile(r"(?<=[./ ,_-])")


@dataclass(frozen=True, slots=True)
class Surface:
    """What the text is printed on."""

    width: int
    ascii_only: bool

    @classmethod
    def of(cls, stream: TextIO) -> Surface:
        """The width of the terminal (or of COLUMNS), and whether only ASCII can be shown."""
        is_terminal = stream.isatty()
        fallback = 80 if is_terminal else PIPE_WIDTH
        width = shutil.get_terminal_size((fallback, 24)).columns if is_terminal else _columns(fallback)
        encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
        return cls(max(MIN_WIDTH, width), encoding not in ("utf8", "utf8sig"))


def _columns(fallback: int) -> int:
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        return fallback


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report. The style repeats what the words say."""

    text: str
    style: str = ""


class Page:
    """Gathers lines and wraps them."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[Line] = []

    def heading(self, text: str, style: str = "bold") -> None:
        if self.lines:
            self.lines.append(Line(""))
        self.text(text, indent=0, style=style)

    def text(self, text: str, indent: int = 2, style: str = "", hang: int = 2) -> None:
        """A sentence, wrapped at blanks; longer words at dots and slashes."""
        for paragraph in text.splitlines() or [""]:
            first = True
            for piece in _wrapped(paragraph, self.width - indent - hang, self.width - indent):
                self.lines.append(Line(" " * (indent if first else indent + hang) + piece, style))
                first = False

    def name(self, name: str, indent: int = 2, style: str = "") -> None:
        """A name or path on its own line."""
        self.text(name, indent, style)

    def pair(self, label: str, value: str, indent: int = 2, style: str = "") -> None:
        self.text(f"{label:<8} {value}", indent, style, hang=9 if self.width >= 50 else 2)


def _wrapped(text: str, width: int, first_width: int) -> Iterable[str]:
    """`text` in pieces no longer than `width` (the first: `first_width`), nothing lost but blanks at the breaks."""
    if len(text) <= first_width:
        return [text]
    pieces: list[str] = []
    lines = textwrap.wrap(
        text, width, break_long_words=False, break_on_hyphens=False, drop_whitespace=True, initial_indent=""
    )
    for line in lines:
        while len(line) > width:
            breaks = [match.start() for match in _BREAK_BEHIND.finditer(line) if 0 < match.start() <= width]
            at = breaks[-1] if breaks else width
            pieces.append(line[:at].rstrip())
            line = line[at:]
        pieces.append(line)
    return pieces
