"""The errors a user can meet.

    ProbeError                   every error of ours that a person should read
    |-- UsageError               the command line or the configuration is wrong (exit code 2)
    |   `-- ConfigError          a key or value in a configuration file, the environment or a flag
    |-- RunDirectoryError        the run directory cannot be used as asked (exit code 2)
    |-- LaunchError              the backend could not start the ranks (exit code 1)
    `-- InputError               input files cannot be used
        |-- UnreadableInput      one file or folder: missing, empty, cut, not what its name says
        `-- NothingUsable        after all inputs were looked at, nothing is left to work on (exit code 4)

One catch in each `main`: it prints `str(error)` and exits with `error.exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ProbeError(Exception):
    """Base of all errors addressed to a person.

    `what` says what happened, where and with which numbers; `hint` is the next thing to do or to type.
    """

    exit_code = 2

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what if not hint else f"{what}\n{hint}")
        self.what = what
        self.hint = hint


class UsageError(ProbeError):
    """The command line or the configuration is wrong."""


class ConfigError(UsageError):
    """A key or value of the probe's configuration is wrong."""


class RunDirectoryError(ProbeError):
    """The run directory cannot be used as asked."""


class LaunchError(ProbeError):
    """The backend failed before it had started a rank, and not for what was asked of it: the network, another node."""

    exit_code = 1


class InputError(ProbeError):
    """Input files cannot be used."""

    exit_code = 4


class UnreadableInput(InputError):
    """One file or folder is missing, empty, cut, or not what its name says."""


class NothingUsable(InputError):
    """Every input was looked at and nothing is left to work on."""


def near_miss(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` (with the leading blank) for the closest known word, or an empty text."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""
