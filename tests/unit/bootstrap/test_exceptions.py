"""An exception as the roster keeps it."""

from __future__ import annotations

import builtins
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import msprobe_launch
from msprobe_launch.bootstrap.exceptions import describe
from msprobe_launch.records.names import OpName


def caught(function: object) -> BaseException:
    try:
        function()  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is what the test is about
        return error
    raise AssertionError("nothing was raised")


def test_the_place_is_in_the_users_code_not_in_the_library_below() -> None:
    def users_function() -> None:
        json.loads("{")

    what, place, time, *rest = describe(caught(users_function)).splitlines()
    assert what.startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert re.fullmatch(rf"at {re.escape(__file__)}:\d+ in users_function", place)
    assert re.match(r"\d{4}-\d\d-\d\dT", time)
    assert rest[0] == "Traceback (most recent call last):"
    assert "json/decoder.py" in "\n".join(rest)


@pytest.mark.parametrize(
    ("error", "first", "second"),
    [
        (ValueError("two\nlines"), "ValueError: two", None),
        (KeyboardInterrupt(), "KeyboardInterrupt", None),
        (SyntaxError("bad", ("t.py", 3, 1, "x y")), "SyntaxError: bad", "at t.py:3"),
    ],
)
def test_an_exception_without_frames(error: BaseException, first: str, second: str | None) -> None:
    lines = describe(error).splitlines()
    assert lines[0] == first
    if second is not None:
        assert lines[1] == second


HOOK = os.path.join(os.path.dirname(msprobe_launch.__file__), "adapters", "torch", "api.py")


def through_a_hook(function: object) -> Callable[[], None]:
    """Call `function` from a frame that is in one of our files."""
    space: dict[str, Any] = {}
    exec(compile("def hook(function):\n    return function()\n", HOOK, "exec"), space)
    return lambda: space["hook"](function)


def test_our_frames_are_in_the_exception_but_not_in_its_text() -> None:
    def users_function() -> None:
        raise ValueError("mine")

    def users_other() -> None:
        try:
            through_a_hook(users_function)()
        except ValueError as error:
            raise KeyError("also mine") from error

    error = caught(through_a_hook(users_other))
    before = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    text = describe(error)
    assert HOOK in before
    assert HOOK not in text
    assert text.count("in users_other") >= 2  # the place, and the traceback
    assert "ValueError: mine" in text
    assert "The above exception was the direct cause" in text
    # What the program can see of its exception is as it was.
    assert [frame.filename for frame in traceback.extract_tb(error.__traceback__)] == before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_our_frames_are_not_in_the_text_of_a_group() -> None:
    def users_function() -> None:
        raise ValueError("inside")

    def raises_a_group() -> None:
        raise builtins.ExceptionGroup("all", [caught(through_a_hook(users_function))])  # type: ignore[list-item]

    text = describe(caught(raises_a_group))
    assert "ValueError: inside" in text
    assert HOOK not in text


def test_where_our_own_code_raised_its_frame_is_told() -> None:
    text = describe(caught(lambda: OpName.parse("")))
    assert "names.py" in text
