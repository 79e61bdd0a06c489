"""Cuts a command line at the script's name before anything is parsed: the script owns every token after it.

Which tokens before it are values is read from the two parsers (ours and the backend's), so that an option that a new
release of the backend brings along needs no change here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from msprobe_launch.errors import UsageError, near_miss


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line in three parts. `target` is the script's name and everything after it, as typed."""

    ours: tuple[str, ...]
    backend: tuple[str, ...]
    target: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Match:
    """An option as found. `token` is what its parser shall see; `action` the last one in it, which may take values."""

    token: str
    action: argparse.Action
    has_value: bool

    def values(self, following: Sequence[str]) -> int:
        """How many of the tokens that follow belong to the option."""
        nargs = self.action.nargs
        if self.has_value or nargs == 0:
            return 0
        if nargs is None:
            return 1
        if isinstance(nargs, int):
            return nargs
        plain = next((i for i, token in enumerate(following) if token.startswith("-")), len(following))
        return min(plain, 1) if nargs == argparse.OPTIONAL else plain


class OptionTable:
    """The options of one parser, found by argparse's rules: `--opt v`, `--opt=v`, `-rv`, `-mr v`, abbreviations."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._actions = {option: action for action in parser._actions for option in action.option_strings}

    @property
    def names(self) -> Iterable[str]:
        return self._actions.keys()

    def exact(self, token: str) -> _Match | None:
        """The option that is spelled out in `token`."""
        name, equals, _ = token.partition("=")
        if name in self._actions:
            return _Match(token, self._actions[name], has_value=bool(equals))
        return None

    def find(self, token: str) -> _Match | None:
        """As `exact`, and abbreviations and joined short options too. Raises UsageError for an ambiguous one."""
        return self.exact(token) or (self._abbreviated(token) if token.startswith("--") else self._joined(token))

    def _abbreviated(self, token: str) -> _Match | None:
        name, equals, value = token.partition("=")
        found = {option: action for option, action in self._actions.items() if option.startswith(name)}
        if len(set(found.values())) > 1:
            raise UsageError(f"ambiguous option {name}: it could be {', '.join(sorted(found))}")
        # Spelled out, because argparse before 3.12 calls two spellings of one option ambiguous.
        return next((_Match(f"{full}{equals}{value}", action, bool(equals)) for full, action in found.items()), None)

    def _joined(self, token: str) -> _Match | None:
        action: argparse.Action | None = None
        for at, letter in enumerate(token[1:], start=1):
            action = self._actions.get(f"-{letter}")
            if action is None:
                return None
            if action.nargs != 0:
                return _Match(token, action, has_value=at + 1 < len(token))
        return None if action is None else _Match(token, action, has_value=False)


def refusing(parser: argparse.ArgumentParser, of: str = "torchrun") -> argparse.ArgumentParser:
    """The parser, made to raise UsageError where argparse would print all its options and end the process.

    `of` is the launcher whose options may have been meant.
    """

    def error(message: str) -> NoReturn:
        raise UsageError(message[:1].lower() + message[1:], hint=f"See msprobe-launch --help, {of} --help.")

    parser.error = error  # type: ignore[method-assign]
    return parser


def leading(tokens: Sequence[str], ours: OptionTable) -> list[str]:
    """Our options, with their values, that stand before any other token: what is known before a backend is chosen."""
    at = 0
    while at < len(tokens) and (match := ours.exact(tokens[at])) is not None:
        at += 1 + match.values(tokens[at + 1 :])
    return list(tokens[:at])


def cut(tokens: Sequence[str], ours: OptionTable, backend: OptionTable) -> CommandLine:
    """Part a command line. Raises UsageError for an option that nobody has.

    An abbreviation means what it means to the backend, so that its command lines go on to work; only then ours.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    at = 0
    while at < len(tokens) and tokens[at].startswith("-") and tokens[at] not in ("-", "--"):
        token, following = tokens[at], tokens[at + 1 :]
        match = ours.exact(token)
        part = parts[0] if match else parts[1]
        if match is None:
            match = backend.find(token)
        if match is None:
            match, part = ours.find(token), parts[0]
        if match is None:
            name = token.partition("=")[0]
            raise UsageError(
                f"unknown option {name}.{near_miss(name, [*ours.names, *backend.names])}",
                hint="Options of the script go after its name. msprobe-launch --help lists ours.",
            )
        count = match.values(following)
        part += [match.token, *following[:count]]
        at += 1 + count
    at += at < len(tokens) and tokens[at] == "--"
    return CommandLine(tuple(parts[0]), tuple(parts[1]), tuple(tokens[at:]))
