"""Call stacks, kept as a tree of code positions so that a stack costs a few dictionary look-ups, not text.

A node is one frame under its caller; a stack is the index of its innermost node. Source lines are read only when a
step is written, once per position.
"""

from __future__ import annotations

import json
import linecache
from types import CodeType, FrameType

ROOT = -1


class StackTable:
    """All stacks of one session. Positions stay for the session's life; a program has a bounded number of them.

    Code objects are looked up by identity and kept alive: their own hash reads all their constants, 1 us a time.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, int, int], int] = {}
        self._nodes: list[tuple[int, CodeType, int]] = []
        self._texts: dict[tuple[CodeType, int], str] = {}
        self._json: dict[int, str] = {}
        self._ours: dict[int, tuple[bool, CodeType]] = {}
        # Set by an adapter: where the framework's code lies, and which of its files only pass calls on.
        self.framework: tuple[str, ...] = ()
        self.plumbing: frozenset[str] = frozenset()

    def index(self, frame: FrameType | None, until: FrameType | None = None, base: int = ROOT) -> int:
        """The stack that ends in `frame`. Walking up stops at `until`, whose own stack is `base`.

        Frames of this package are left out.
        """
        positions = []
        ours = self._ours
        while frame is not None and frame is not until:
            code = frame.f_code
            known = ours.get(id(code))
            if known is None:
                name = frame.f_globals.get("__name__") or ""
                known = ours[id(code)] = (name.startswith("msprobe_launch"), code)
            if not known[0]:
                positions.append((code, frame.f_lasti))
            frame = frame.f_back
        if frame is None:
            base = ROOT
        children = self._children
        for code, position in reversed(positions):
            key = (base, id(code), position)
            node = children.get(key)
            if node is None:
                node = children[key] = len(self._nodes)
                self._nodes.append((base, code, position))
            base = node
        return base

    def frames_json(self, stack: int) -> str:
        """Frame texts of a stack, innermost first, as the JSON list that stack.json has.

        Of frames of the framework that follow each other only the innermost is kept, and none that only passes
        calls on; all others are kept.
        """
        known = self._json.get(stack)
        if known is not None:
            return known
        out = []
        inside, innermost = False, stack
        while stack != ROOT:
            stack, code, position = self._nodes[stack]
            if code.co_filename in self.plumbing:
                continue
            was_inside, inside = inside, code.co_filename.startswith(self.framework)
            if inside and was_inside:
                continue
            text = self._texts.get((code, position))
            if text is None:
                text = self._texts[code, position] = _frame_text(code, position)
            out.append(text)
        known = self._json[innermost] = json.dumps(out)
        return known


def _frame_text(code: CodeType, position: int) -> str:
    line = next((line for start, end, line in code.co_lines() if start <= position < end and line), code.co_firstlineno)
    source = linecache.getline(code.co_filename, line).strip()
    return f"File {code.co_filename}, line {line}, in {code.co_name}, \n {source}"
