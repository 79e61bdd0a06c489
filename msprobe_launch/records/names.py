"""Names of recorded calls (ops) and of the values inside them (items): the only code that splits or joins them.

Two shapes exist in the field's files, and the call number stands in a different place in each:

    API     <Prefix>.<api>.<call>.forward|backward            Functional.linear.3.forward
    module  <Module|Cell>.<name>.<Class>.forward|backward.<call>   Module.blocks.0.fc1.Linear.forward.0
    module gradients  Module.<name>.<Class>.parameters_grad.<k>
    debug   <name>.<count>.debug
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Phase(str, Enum):
    """Which direction of a call, or which kind of side record, an op name stands for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PARAMETERS_GRAD = "parameters_grad"
    DEBUG = "debug"


class Role(str, Enum):
    """What an item is to its op. Keyword arguments are inputs whose path starts with the keyword."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETERS = "parameters"
    PARAMETERS_GRAD = "parameters_grad"
    DEBUG = "debug"


MODULE_PREFIXES = frozenset({"Module", "Cell"})

_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class OpName:
    """A parsed op name. `class_name` is set for modules only; `call` is None where the file gives none."""

    prefix: str
    name: str
    class_name: str | None
    call: int | None
    phase: Phase

    @property
    def is_module(self) -> bool:
        return self.class_name is not None

    @classmethod
    def parse(cls, text: str) -> OpName:
        """Parse an op name; raises ValueError where the text has none of the shapes above."""
        parts = text.split(".")
        if len(parts) >= 4:
            prefix, last, before = parts[0], parts[-1], parts[-2]
            if prefix in MODULE_PREFIXES and last.isdigit() and before in (*_DIRECTIONS, "parameters_grad"):
                return cls(prefix, ".".join(parts[1:-3]), parts[-3], int(last), Phase(before))
            if last in _DIRECTIONS and before.isdigit():
                return cls(prefix, ".".join(parts[1:-2]), None, int(before), Phase(last))
        if parts[0] in MODULE_PREFIXES and len(parts) >= 3 and parts[-1] == "parameters_grad":
            return cls(parts[0], ".".join(parts[1:-2]), parts[-2], None, Phase.PARAMETERS_GRAD)
        if len(parts) >= 3 and parts[-1] == "debug" and parts[-2].isdigit():
            return cls("", ".".join(parts[:-2]), None, int(parts[-2]), Phase.DEBUG)
        raise ValueError(f"not an op name: {text!r}")

    @property
    def stem(self) -> str:
        """What all calls of one API or module share: `Functional.linear`, `Module.fc.Linear`."""
        return ".".join(part for part in (self.prefix, self.name, self.class_name) if part)

    @property
    def words(self) -> tuple[str, ...]:
        """The parts of `stem`."""
        return tuple(self.stem.split("."))

    def __str__(self) -> str:
        if self.phase is Phase.DEBUG:
            return f"{self.name}.{self.call}.debug"
        if self.class_name is None:
            return f"{self.prefix}.{self.name}.{self.call}.{self.phase.value}"
        head = ".".join(part for part in (self.prefix, self.name, self.class_name) if part)
        return f"{head}.{self.phase.value}" + ("" if self.call is None else f".{self.call}")


def debug_name(name: str, count: int) -> str:
    """`<name>.<count>.debug`."""
    return f"{name}.{count}.{Phase.DEBUG.value}"


def regex_of(entry: str) -> str | None:
    """The expression in a filter entry `name-regex(<expression>)`, which is msprobe's way to write one, else None."""
    return entry[len("name-regex(") : -1] if entry.startswith("name-regex(") and entry.endswith(")") else None


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """The names of all calls of one API or module but for the call number, made once and kept.

    A name is `head + str(number) + tail`, head and tail by direction. `counter` is what calls are numbered by.
    """

    counter: str
    forward: tuple[str, str]
    backward: tuple[str, str]

    @classmethod
    def of_api(cls, prefix: str, name: str) -> NameTemplate:
        """`Functional.linear.` number `.forward`."""
        counter = f"{prefix}.{name}"
        return cls(counter, (f"{counter}.", ".forward"), (f"{counter}.", ".backward"))

    @classmethod
    def of_module(cls, prefix: str, name: str, class_name: str) -> NameTemplate:
        """`Module.blocks.0.fc1.Linear.forward.` number."""
        counter = ".".join(part for part in (prefix, name, class_name) if part)
        return cls(counter, (f"{counter}.forward.", ""), (f"{counter}.backward.", ""))

    def parameters_grad(self) -> NameTemplate:
        """`Module.blocks.0.fc1.Linear.parameters_grad.` number, counted on its own."""
        counter = f"{self.counter}.parameters_grad"
        return NameTemplate(counter, (f"{counter}.", ""), (f"{counter}.", ""))


_ITEM = re.compile(
    r"^(?P<op>.+?\.(?:forward|backward)(?:\.\d+)?)\.(?P<role>input|output|parameters|kwargs)(?:\.(?P<path>.+))?$"
    r"|^(?P<gradop>.+?\.parameters_grad(?:\.\d+)?)(?:\.(?P<gradpath>.+))?$"
)


@dataclass(frozen=True, slots=True)
class ItemName:
    """A parsed item name: `op` and `path` are texts, the path's parts joined by dots ('' for none)."""

    op: str
    role: Role
    path: str

    @classmethod
    def parse(cls, text: str) -> ItemName:
        """Parse a row name such as `Functional.linear.0.forward.input.1`; raises ValueError where it is none."""
        match = _ITEM.match(text)
        if match is None:
            raise ValueError(f"not an item name: {text!r}")
        if match["gradop"] is not None:
            return cls(match["gradop"], Role.PARAMETERS_GRAD, match["gradpath"] or "")
        role = Role.INPUT if match["role"] == "kwargs" else Role(match["role"])
        return cls(match["op"], role, match["path"] or "")

    def __str__(self) -> str:
        if self.role is Role.PARAMETERS_GRAD:
            return f"{self.op}.{self.path}" if self.path else self.op
        return f"{self.op}.{self.role.value}" + (f".{self.path}" if self.path else "")
