"""What is in a folder, and which dump is compared with which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator import sources
from aggregator.sources import Picked, ResultSet, Run
from msprobe_launch.errors import NothingUsable, RunDirectoryError, UsageError
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.numbers import NumberSet
from msprobe_launch.records.roster import Manifest, RankMark

WriteDump = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, write_dump: WriteDump) -> Callable[..., Path]:
    def make(name: str, steps: tuple[int, ...] = (0,), ranks: tuple[int, ...] = (0, 1), below: str = "") -> Path:
        root = tmp_path / name
        for step in steps:
            for rank in ranks:
                write_dump(root / below / f"step{step}" / f"rank{rank}", {})
        return root

    return make


def _run(*paths: Path, attempt: int | None = None) -> Run:
    found = sources.find(paths, attempt=attempt)
    assert isinstance(found, Run)
    return found


def _keys(run: Run) -> list[tuple[int | None, int | None]]:
    return [(dump.step, dump.rank) for dump in run.dumps]


def test_every_level_of_a_run_is_accepted(make_run: Callable[..., Path]) -> None:
    root = make_run("run", steps=(2, 10), ranks=(0, 10, 9))
    assert _keys(_run(root)) == [(s, r) for s in (2, 10) for r in (0, 9, 10)]
    assert _keys(_run(root / "step10")) == [(10, 0), (10, 9), (10, 10)]
    assert _keys(_run(root / "step10/rank9")) == [(10, 9)]
    assert _keys(_run(root / "step10/rank9/dump.json")) == [(10, 9)]


def test_run_directories_of_several_nodes_are_one_run(make_run: Callable[..., Path]) -> None:
    one, other = make_run("node0", ranks=(0, 1)), make_run("node1", ranks=(2, 3))
    assert _keys(_run(one, other)) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_two_runs_with_the_same_ranks_are_no_run(make_run: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"step 0 of rank 0 is both in .*a and in .*b\n.*--bench"):
        sources.find([make_run("a"), make_run("b")])


def test_the_last_attempt_is_read(make_run: Callable[..., Path]) -> None:
    root = make_run("run", ranks=(0, 1))
    make_run("run", ranks=(5,), below="attempt1")
    make_run("run", ranks=(6,), below="attempt10")
    assert _keys(_run(root)) == [(0, 6)]
    assert "left out: 0, 1 " in _run(root).notes[0]
    assert _keys(_run(root, attempt=0)) == [(0, 0), (0, 1)]
    with pytest.raises(RunDirectoryError, match="no attempt 3"):
        _run(root, attempt=3)


def test_roster_and_manifest_come_along(make_run: Callable[..., Path]) -> None:
    root = make_run("run")
    layout = RunLayout(root)
    roster.save(layout.manifest, Manifest(("torchrun",), "train.py", "torchrun", "now", world_size=4))
    roster.save(layout.roster_mark(0), RankMark(0, attached=True, world_size=4))
    layout.roster_mark(1).write_text("{")
    run = _run(root)
    assert run.world_size == 4
    assert [mark.rank for mark in run.marks] == [0]
    assert "rank1.json" in run.notes[0]


def test_a_run_that_recorded_nothing_says_why(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    roster.save(layout.manifest, Manifest(("torchrun",), "train.py", "torchrun", "now", world_size=8))
    roster.save(layout.roster_mark(3), RankMark(3, attached=False, note="python -I"))
    with pytest.raises(NothingUsable, match=r"0 of 8 ranks attached \(python -I\)"):
        sources.find([tmp_path])


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("compare_result_rank12_20260101000000.csv", 12),
        ("compare_result_rank12-rank12_20260101000000.xlsx", 12),
        ("compare_result_20260101000000.csv", None),
        ("compare_result_rank_20260101000000.csv", None),
    ],
)
def test_names_of_all_versions(tmp_path: Path, name: str, rank: int | None) -> None:
    (tmp_path / name).touch()
    found = sources.find([tmp_path])
    assert isinstance(found, ResultSet)
    assert [file.rank for file in found.files] == [rank]
    assert found.files[0].stamp == 20260101000000


def test_newest_of_each_rank_and_step(tmp_path: Path) -> None:
    names = [
        "step0/compare_result_rank1_20260101000002.csv",
        "step0/compare_result_rank1_20260101000001.csv",
        "step0/compare_result_rank1_20260101000002.xlsx",
        "step10/compare_result_rank1_20250101000000.csv",
        "step2/compare_result_rank1_20250101000000.csv",
    ]
    for name in [*names, "step0/notes.txt", "other/compare_result_rank1_20260101000000.csv", "step0/merged/x.csv"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = sources.find([tmp_path])
    assert isinstance(found, ResultSet)
    assert [file.step for file in found.files] == [0, 2, 10]
    assert found.files[0].path.name == "compare_result_rank1_20260101000002.csv"
    reasons = {entry.path.name: (entry.stale, entry.reason) for entry in found.left_out}
    assert reasons["compare_result_rank1_20260101000001.csv"][0]
    assert reasons["compare_result_rank1_20260101000001.csv"][1].startswith("older than")
    assert reasons["compare_result_rank1_20260101000002.xlsx"][1].startswith("the same time as")
    assert reasons["notes.txt"] == (False, "not named like a compare result")
    assert reasons["other"] == (False, "a folder")
    assert "merged" not in reasons


def test_what_is_not_there_or_not_ours(tmp_path: Path) -> None:
    (tmp_path / "run_a").mkdir()
    with pytest.raises(UsageError, match=r"no such file or folder\nFolders in .*: run_a"):
        sources.find([tmp_path / "run_b"])
    (tmp_path / "run_a/notes.txt").touch()
    with pytest.raises(NothingUsable, match=r"1 other entries there, such as notes\.txt\nExpected"):
        sources.find([tmp_path / "run_a"])


def test_dumps_and_results_are_not_mixed(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/compare_result_rank0_1.csv").touch()
    with pytest.raises(UsageError, match=r"holds dumps and .* compare results"):
        sources.find([make_run("run"), tmp_path / "r"])


# -- pairs


def test_pairs_by_step_and_rank(make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", (0, 1, 5), (0, 1, 2)), make_run("b", (0, 1, 7), (0, 1, 3))
    pairs, failures, notes = sources.pair(_run(target), _run(bench))
    assert [(p.step, p.rank) for p in pairs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(f.step, f.rank) for f in failures] == [(0, 2), (1, 2), (5, 0), (5, 1), (5, 2)]
    assert failures[0].reason == "the bench has no rank 2 in this step (it has 0-1, 3)"
    assert failures[2].reason == "the bench has no step 5 (it has 0-1, 7)"
    assert notes[0] == "steps only in the bench, not compared: 7"


def test_single_steps_and_single_ranks_are_pairs(make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", (4,), (3,)), make_run("b", (0,), (0,))
    pairs, failures, notes = sources.pair(_run(target), _run(bench / "step0/rank0"))
    assert [(p.step, p.rank) for p in pairs] == [(4, 3)]
    assert failures == ()
    assert notes == ("step 4 is compared with the bench's only step 0", "rank3 is compared with the bench's only rank0")


@pytest.mark.parametrize("steps", ["1", "1-1000000000000"])
def test_what_is_left_out_takes_nobodys_place(make_run: Callable[..., Path], steps: str) -> None:
    target, bench = _run(make_run("t", (0, 1), (0, 1))), _run(make_run("b", (0, 2), (0,)))
    pairs, failures, notes = sources.pair(target, bench, Picked(NumberSet.parse(steps)))
    assert (pairs, notes) == ((), ("steps only in the bench, not compared: 2",) if "-" in steps else ())
    assert {f.reason for f in failures} == {"the bench has no step 1 (it has 0, 2)"}
    pairs, failures, notes = sources.pair(target, bench, Picked(NumberSet.parse("0"), NumberSet.parse("1")))
    assert (pairs, notes) == ((), ())
    assert [f.reason for f in failures] == ["the bench has no rank 1 in this step (it has 0)"]


def test_a_rank_that_only_the_bench_has_is_told(make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", (0,), (0,)), _run(make_run("b", (0,), (0, 1)))
    assert sources.pair(_run(target), bench)[2] == ("step 0: ranks only in the bench: 1",)
    assert sources.pair(_run(target / "step0/rank0"), bench)[2] == ()
    assert sources.pair(_run(target), bench, Picked(ranks=NumberSet.parse("0")))[2] == ()


def test_number_ranges() -> None:
    assert sources.number_ranges([7, 0, 1, None, 2, 10, 9]) == "0-2, 7, 9-10"
    assert sources.number_ranges([]) == "none"
