"""Every option of the installed msrun, in every spelling, parses to the same value through us.

What msrun itself makes of a command line is asked of msrun, in a process that imports MindSpore whole; ours never does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msprobe_launch.cli import own_parser
from msprobe_launch.errors import UsageError
from msprobe_launch.launch.commandline import OptionTable, cut
from msprobe_launch.launch.msrun import MsrunLauncher
from msprobe_launch.launch.msrun_options import numpy_breaks, parse

SCRIPT = ["train.py", "--lr", "1", "x", "--worker_num", "3"]
OURS = "shutdown_timeout"
# Values of options whose type is a function of msrun's.
VALUES = {"join": "True", "bind_core": '{"device0": ["0-1"]}', "bind_numa": '{"scheduler": ["0"]}', "sim_level": "2"}
ASK = """
import json, sys
from mindspore.parallel.cluster.run import get_args
answers = []
for tokens in json.loads(sys.stdin.read()):
    sys.argv = ["msrun", *tokens]
    try:
        answers.append(vars(get_args()))
    except SystemExit:
        answers.append(None)
print("ANSWERS " + json.dumps(answers))
"""


FOLDER = "import importlib.util as u; print(next(iter(u.find_spec('mindspore').submodule_search_locations)))"


@pytest.fixture
def mindspore(mindspore_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed MindSpore can be found from here, and nothing else of its environment; its interpreter."""
    done = subprocess.run([mindspore_python, "-c", FOLDER], capture_output=True, text=True, check=True)
    (tmp_path / "found").mkdir()
    (tmp_path / "found/mindspore").symlink_to(done.stdout.strip())
    monkeypatch.syspath_prepend(tmp_path / "found")
    return mindspore_python


def options() -> list[argparse.Action]:
    actions = MsrunLauncher().parser()._actions
    return [action for action in actions if action.option_strings and action.dest not in ("help", OURS)]


def forms() -> list[list[str]]:
    """Both ways to give a value, abbreviations, and all options in one line."""
    found = []
    for action in options():
        value = VALUES.get(action.dest, "7" if action.type is int else "a,b:1=x")
        for option in action.option_strings:
            found += [[option, value], [f"{option}={value}"]]
            found += [[option[:length], value] for length in range(4, len(option))]
    names = names_of_options()
    found.append([token for form in found if len(form) == 2 and form[0] in names for token in form])
    return found


def names_of_options() -> set[str]:
    return {option for action in options() for option in action.option_strings}


def through_us(tokens: list[str], parser: argparse.ArgumentParser, ours: OptionTable) -> dict[str, Any] | None:
    try:
        line = cut([*tokens, *SCRIPT], ours, OptionTable(parser))
    except UsageError:
        return None
    assert (line.ours, list(line.target)) == ((), SCRIPT)
    args = vars(parse(parser, [*line.backend, SCRIPT[0]]).args)
    args["task_script_args"] = SCRIPT[1:]
    del args[OURS]
    return args


def test_every_option_in_every_spelling_parses_to_the_same_value(mindspore: Path) -> None:

    asked = [[], *forms()]
    done = subprocess.run(
        [mindspore, "-c", ASK],
        input=json.dumps([[*form, *SCRIPT] for form in asked]),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers = json.loads(done.stdout.rpartition("ANSWERS ")[2])
    assert len(options()) >= 15
    names, parser, ours = names_of_options(), MsrunLauncher().parser(), OptionTable(own_parser())
    assert all(answers[at] is not None for at, form in enumerate(asked) if form[:1] and form[0] in names)
    for form, expected in zip(asked, answers, strict=True):
        # What is ambiguous to msrun nobody uses.
        if expected is not None:
            assert through_us(form, parser, ours) == expected, form


def test_options_are_read_without_mindspore_and_the_environment_stays(tmp_path: Path, mindspore_python: Path) -> None:
    code = (
        "import os, sys\nfrom msprobe_launch.launch.msrun import MsrunLauncher\nbefore = dict(os.environ)\n"
        "from msprobe_launch.launch.msrun_options import parse\n"
        "parsed = parse(MsrunLauncher().parser(), ['--bind_numa', 'bind.json', 't.py'])\n"
        "assert dict(os.environ) == before\nassert 'MSRUN_BIND_FILE' in parsed.environ\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('mindspore', 'numpy')]\n"
    )
    (tmp_path / "bind.json").write_text('{"bind_config": {"bind_cpu_mode": "none"}}')
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run([mindspore_python, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_numpy_that_breaks_mindspore() -> None:
    assert "MindSpore 2.10.0 does not work with numpy 2.4.6" in numpy_breaks("2.10.0", "2.4.6")
    assert numpy_breaks("2.9.1rc1", "2.0.0rc1")
    for pair in (("2.10.0", "1.26.4"), ("2.11.0", "2.4.6"), (None, "2.4.6"), ("2.10.0", None)):
        assert not numpy_breaks(*pair)


def test_without_mindspore_the_backend_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "mindspore", raising=False)
    with pytest.raises(UsageError, match="needs MindSpore, which this Python cannot import") as error:
        MsrunLauncher().parser()
    assert "pip install 'mindspore" in error.value.hint
