"""`--backend auto`: what the script imports, then whose options these are, then what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_launch.launch.choice import choose, frameworks_in, needs_only, script_of

BOTH = ("torch", "mindspore")

SOURCES = {
    "import mindspore as ms": {"mindspore"},
    "from mindspore import nn, ops": {"mindspore"},
    "import os, torch.nn as nn": {"torch"},
    "def main():\n    from torch.distributed import run": {"torch"},
    "import torch\nimport mindspore": {"torch", "mindspore"},
    "import mindspore_gl, torchvision, numpy": set(),
    "from . import torch\nfrom .mindspore import x": set(),
    "'import torch'\n# import mindspore": set(),
    "import torch\nthis is no Python": set(),
    "": set(),
}


@pytest.mark.parametrize(("source", "expected"), SOURCES.items())
def test_what_a_script_imports_is_read_and_not_run(source: str, expected: set[str], tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(source + "\nraise SystemExit('it was run')\n" if "no Python" not in source else source)
    assert frameworks_in(str(script)) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (["a/train.py", "b.py"], "a/train.py"),
        (["python", "-u", "train.py", "--x"], "train.py"),
        (["pytest", "-s", "test_it.py"], "test_it.py"),
        (["run.sh", "train.py"], ""),
        ([], ""),
    ],
)
def test_which_word_is_the_script(target: list[str], expected: str) -> None:
    assert script_of(target) == expected


@pytest.mark.parametrize(
    ("source", "present", "own", "expected", "is_guess"),
    [
        ("import mindspore", BOTH, "", "msrun: {script} imports mindspore", False),
        ("import torch", BOTH, "--worker_num", "torchrun: {script} imports torch", False),
        ("import mindspore", ("torch",), "", "msrun: {script} imports mindspore", False),
        ("import mine", BOTH, "--worker_num", "msrun: --worker_num is msrun's", False),
        (
            "import mine",
            ("mindspore",),
            "",
            "msrun: mindspore is installed here, and no other framework",
            False,
        ),
        (
            "import mine",
            BOTH,
            "",
            "torchrun: {script} imports neither torch nor mindspore; a guess, else --backend msrun",
            True,
        ),
        (
            "import torch, mindspore",
            BOTH,
            "",
            "msrun: {script} imports torch and mindspore; a guess, else --backend torchrun",
            True,
        ),
    ],
)
def test_the_reasons_in_their_order(
    source: str, present: tuple[str, ...], own: str, expected: str, is_guess: bool, tmp_path: Path
) -> None:
    script = tmp_path / "t.py"
    script.write_text(source)
    choice = choose([str(script)], present, own)
    assert (choice.text, choice.is_guess) == (expected.format(script=script), is_guess)


def test_a_script_that_may_do_without_is_not_refused_for_it(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    for source, expected in (
        ("import mindspore", True),
        ("try:\n    import mindspore\nexcept ImportError:\n    pass", False),
        ("import torch, mindspore", False),
    ):
        script.write_text(source)
        assert needs_only([str(script)], "mindspore") is expected
