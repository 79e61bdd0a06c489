"""The cut at the script's name, on a made-up backend parser."""

from __future__ import annotations

import argparse

import pytest

from msprobe_launch.cli import own_parser
from msprobe_launch.errors import UsageError
from msprobe_launch.launch.commandline import CommandLine, OptionTable, cut


def backend_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="backend")
    parser.add_argument("--nproc-per-node", "--nproc_per_node")
    parser.add_argument("--rdzv-conf")
    parser.add_argument("--run-path", action="store_true")
    parser.add_argument("-r", "--redirects")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--pair", nargs=2)
    parser.add_argument("--maybe", nargs="?")
    parser.add_argument("--many", nargs="*")
    parser.add_argument("script")
    return parser


def parted(*tokens: str) -> CommandLine:
    return cut(tokens, OptionTable(own_parser()), OptionTable(backend_parser()))


@pytest.mark.parametrize(
    ("tokens", "backend"),
    [
        (["--nproc-per-node", "2"], ["--nproc-per-node", "2"]),
        (["--nproc_per_node", "2"], ["--nproc_per_node", "2"]),
        (["--nproc-per-node=2"], ["--nproc-per-node=2"]),
        (["--rdzv-conf", "a=1,b=2", "-m"], ["--rdzv-conf", "a=1,b=2", "-m"]),
        (["--rdzv-conf", "-x"], ["--rdzv-conf", "-x"]),
        (["-r", "3"], ["-r", "3"]),
        (["-r3"], ["-r3"]),
        (["-mr", "3"], ["-mr", "3"]),
        (["-mr3"], ["-mr3"]),
        (["--pair", "a", "b"], ["--pair", "a", "b"]),
        (["--maybe", "a"], ["--maybe", "a"]),
        (["--maybe", "--module"], ["--maybe", "--module"]),
        (["--many", "a", "b", "-m"], ["--many", "a", "b", "-m"]),
        # An abbreviation is spelled out; both spellings of one option are one option.
        (["--rd", "x=1"], ["--rdzv-conf", "x=1"]),
        (["--nproc-per", "2"], ["--nproc-per-node", "2"]),
        (["--nproc_p=2"], ["--nproc_per_node=2"]),
        # `--run` means the backend's --run-path, as it does without us, and not our --run-dir.
        (["--run"], ["--run-path"]),
    ],
)
def test_backend_options_and_their_values_stand_before_the_script(tokens: list[str], backend: list[str]) -> None:
    assert parted(*tokens, "train.py", "x") == CommandLine((), tuple(backend), ("train.py", "x"))


def test_our_options_are_taken_out() -> None:
    line = parted(
        "--nproc", "2", "-m", "--probe-eval", "--run-dir=a b", "--probe-steps", "0-3", "pkg.train", "--lr", "1"
    )
    assert line.ours == ("--nproc", "2", "--probe-eval", "--run-dir=a b", "--probe-steps", "0-3")
    assert line.backend == ("-m",)
    assert line.target == ("pkg.train", "--lr", "1")


def test_our_options_may_be_abbreviated_where_the_backend_has_no_such_option() -> None:
    assert parted("--probe-lev", "mix", "t.py").ours == ("--probe-level", "mix")


@pytest.mark.parametrize(
    "arguments",
    [["--r=16", "--log", "x", "--", "--nnodes", "3", "-m", "foo"], ["--probe-level", "L9", "-h", "--version"], ["--"]],
)
def test_the_script_owns_every_token_after_its_name(arguments: list[str]) -> None:
    assert parted("--nproc", "2", "t.py", *arguments).target == ("t.py", *arguments)


def test_two_dashes_before_the_script_end_the_options() -> None:
    assert parted("--nproc", "2", "--", "--odd-name.py", "--", "a").target == ("--odd-name.py", "--", "a")


def test_no_script() -> None:
    assert parted("--nproc", "2").target == ()


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("--probe-levle", "unknown option --probe-levle. Did you mean '--probe-level'?"),
        ("--nproc-per-nod3=2", "Did you mean '--nproc-per-node'?"),
        ("--redirect-to", "unknown option --redirect-to."),
        ("-z", "unknown option -z."),
        ("--ma", "ambiguous option --ma: it could be --many, --maybe"),
        ("--probe-s", "ambiguous option --probe-s: it could be --probe-scope"),
    ],
)
def test_unknown_and_ambiguous_options_are_refused(token: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parted(token, "t.py")
    assert expected in str(caught.value)
