"""Every option of the installed torchrun, in every spelling, parses to the same value through us.

The cases are made from torchrun's own parser: a new torch with a new option needs no change here or in the launcher.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from msprobe_launch.cli import own_parser
from msprobe_launch.config import ProbeConfig
from msprobe_launch.errors import UsageError
from msprobe_launch.launch.base import LaunchPlan
from msprobe_launch.launch.commandline import OptionTable, cut
from msprobe_launch.launch.torchrun import TorchrunLauncher
from msprobe_launch.records.roster import Manifest

pytestmark = pytest.mark.torch
run = pytest.importorskip("torch.distributed.run")

SCRIPT = ("train.py", "--lr", "1", "x")
MANIFEST = Manifest(command=(), script="train.py", backend="torchrun", started="")


def through_us(*tokens: str) -> dict[str, Any]:
    line = cut([*tokens, *SCRIPT], OptionTable(own_parser()), OptionTable(run.get_args_parser()))
    assert line.ours == ()
    plan = LaunchPlan(line.backend, line.target, ProbeConfig(run_dir=Path("r")), False, MANIFEST)
    return vars(TorchrunLauncher().parse(plan))


def through_torchrun(*tokens: str) -> dict[str, Any]:
    return vars(run.get_args_parser().parse_args([*tokens, *SCRIPT]))


def options() -> list[argparse.Action]:
    return [a for a in run.get_args_parser()._actions if a.option_strings and a.dest not in ("help", "run_path")]


def sample(action: argparse.Action) -> str:
    """A value that the option's type takes and that is not its default."""
    if action.choices:
        return str(next(choice for choice in action.choices if choice != action.default))
    return {int: "3", float: "0.5"}.get(action.type, "a,b:1=x")  # type: ignore[call-overload, no-any-return]


SPELLINGS = [(action, option) for action in options() for option in action.option_strings]
IDS = [option for _, option in SPELLINGS]


@pytest.mark.parametrize(("action", "option"), SPELLINGS, ids=IDS)
def test_every_spelling_parses_to_the_same_value(action: argparse.Action, option: str) -> None:
    forms = [[option]] if action.nargs == 0 else [[option, sample(action)], [f"{option}={sample(action)}"]]
    if action.nargs != 0 and not option.startswith("--"):
        forms.append([f"{option}{sample(action)}"])
    for form in forms:
        expected = through_torchrun(*form)
        assert expected[action.dest] != action.default
        assert through_us(*form) == expected


@pytest.mark.parametrize(("action", "option"), SPELLINGS, ids=IDS)
def test_every_abbreviation_that_torchrun_takes_means_the_same(action: argparse.Action, option: str) -> None:
    value = [] if action.nargs == 0 else [sample(action)]
    ours = OptionTable(own_parser())
    for length in range(4, len(option)):
        form = [option[:length], *value]
        if not option.startswith("--") or ours.exact(form[0]) is not None:
            continue
        try:
            expected = through_torchrun(*form)
        except SystemExit:
            continue  # ambiguous there, so nobody uses it
        assert through_us(*form) == expected


@pytest.mark.parametrize("action", options(), ids=lambda action: action.dest)
def test_pet_variables_are_the_defaults(action: argparse.Action, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PET_{action.dest.upper()}", "1" if action.nargs == 0 else sample(action))
    assert through_us() == through_torchrun()


def test_run_path_is_refused_also_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--run-path"):
        through_us("--run-path")
    monkeypatch.setenv("PET_RUN_PATH", "1")
    with pytest.raises(UsageError, match="--run-path"):
        through_us()
