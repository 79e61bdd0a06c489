"""A run directory is made for one run."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
from datetime import datetime, timezone
from pathlib import Path

import pytest

from msprobe_launch.errors import RunDirectoryError
from msprobe_launch.launch.rundir import default_run_dir, make_fresh, sign
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, load

MANIFEST = Manifest(
    command=("msprobe-launch", "t.py"),
    script="t.py",
    backend="torchrun",
    started="2026-01-31T12:00:00.000001+00:00",
    world_size=4,
)
NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)


def test_the_default_name_tells_time_and_script_and_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_run_dir("dir/train.py", NOON)
    assert first == tmp_path / "msprobe_runs" / "20260131-120000-train"
    make_fresh(first)
    assert default_run_dir("train.py", NOON).name == "20260131-120000-train-2"


def test_an_empty_directory_will_do(tmp_path: Path) -> None:
    make_fresh(tmp_path / "a" / "b")
    make_fresh(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("is_run", [True, False])
def test_anything_in_it_refuses_it_and_names_the_ways_on(tmp_path: Path, is_run: bool) -> None:
    (tmp_path / "manifest.json" if is_run else tmp_path / "train.py").write_text("{}")
    with pytest.raises(RunDirectoryError) as caught:
        make_fresh(tmp_path)
    text = str(caught.value)
    assert "it holds" in text
    assert "--run-dir DIR" in text
    # Only what is a run is offered for deletion; anything else may be somebody's project.
    assert (f"rm -r '{tmp_path}'" in text) == is_run


def test_a_file_in_its_place_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        make_fresh(tmp_path / "file")


def test_two_nodes_of_one_launch_share_it_and_another_launch_does_not(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.logs.mkdir(parents=True)  # torch makes it before the nodes have met
    sign(layout, MANIFEST)
    sign(layout, dataclasses.replace(MANIFEST, host="second"))
    assert load(layout.manifest, Manifest).host == ""
    with pytest.raises(RunDirectoryError, match=r"a run started 2026-01-31T12:00:00\.000001"):
        sign(layout, dataclasses.replace(MANIFEST, started="2026-01-31T12:00:00.000002+00:00"))


def test_files_of_no_known_run_refuse_it(tmp_path: Path) -> None:
    (tmp_path / "roster").mkdir()
    with pytest.raises(RunDirectoryError, match="it holds roster"):
        sign(RunLayout(tmp_path), MANIFEST)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_without_a_working_lock_the_manifest_is_still_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some Lustre and NFS mounts refuse flock."""

    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    layout = RunLayout(tmp_path / "run")
    sign(layout, MANIFEST)
    sign(layout, dataclasses.replace(MANIFEST, host="another node"))
    assert load(layout.manifest, Manifest).host == MANIFEST.host
    with pytest.raises(RunDirectoryError, match="it holds a run started"):
        sign(layout, dataclasses.replace(MANIFEST, started="later"))
    assert not [path for path in layout.root.iterdir() if path.name.startswith(".manifest.json")]


def test_a_long_script_name_gives_a_name_that_the_file_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = default_run_dir("语" * 84 + ".py", NOON)
    assert len(path.name.encode()) <= 255
    make_fresh(path)
