"""PYTHONPATH there and back: what the launcher adds, the rank takes out again without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_launch.bootstrap.activate import users_pythonpath
from msprobe_launch.bootstrap.variables import CONFIG, PYTHONPATH_WAS_EMPTY
from msprobe_launch.config import ProbeConfig
from msprobe_launch.errors import UsageError
from msprobe_launch.launch.injection import SITE, worker_environment

CONFIG_VALUE = ProbeConfig(run_dir=Path("/runs/a"))


@pytest.mark.parametrize("users", [None, "", "/a", "/a:/b", ":", "/a:", ":/a", "/a::/b"])
def test_the_rank_sees_what_the_user_set(users: str | None) -> None:
    added = worker_environment(CONFIG_VALUE, {} if users is None else {"PYTHONPATH": users})
    assert added["PYTHONPATH"].split(":")[0] == str(SITE)
    was_empty = PYTHONPATH_WAS_EMPTY in added
    assert users_pythonpath(added["PYTHONPATH"], str(SITE), was_empty=was_empty) == users


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/w:SITE:/a", "/w:/a"),
        ("/w:SITE", "/w:"),
        ("SITE:/a:/w", "/a:/w"),
        ("/w", "/w"),
        (None, None),
        ("SITEX", "SITEX"),
    ],
)
def test_what_a_wrapper_added_around_ours_stays(value: str | None, expected: str | None) -> None:
    assert users_pythonpath(value, "SITE", was_empty=False) == expected


def test_the_folder_holds_sitecustomize_alone() -> None:
    assert [path.name for path in SITE.iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]


def test_the_configuration_travels_whole() -> None:
    assert ProbeConfig.from_json(worker_environment(CONFIG_VALUE, {})[CONFIG]) == CONFIG_VALUE


def test_a_path_that_cannot_stand_on_pythonpath_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be put on PYTHONPATH"):
        worker_environment(CONFIG_VALUE, {}, site=Path("/a:b/site"))
