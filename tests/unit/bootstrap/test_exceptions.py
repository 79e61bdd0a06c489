"""An exception as the roster keeps it."""

from __future__ import annotations

import json
import re

import pytest

from msprobe_launch.bootstrap.exceptions import describe


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
