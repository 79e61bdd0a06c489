"""The command: exit codes, flags, files written. In this process, so that it is quick; see integration for the rest."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from aggregator import cli, pipeline
from msprobe_launch import __version__
from msprobe_launch.records import roster
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark

Row = Callable[..., dict[str, str]]
Write = Callable[..., Path]
Tensor = Callable[..., dict[str, Any]]
Aggregate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def aggregate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Aggregate:
    """Run the command in this process -> (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*argv: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(arg) for arg in (*argv, "--jobs", 1)])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def _linear(make_tensor: Tensor, weight: float) -> dict[str, Any]:
    return {
        "Functional.linear.0.forward": {
            "input_args": [make_tensor(1.0), make_tensor(weight)],
            "input_kwargs": {},
            "output": [make_tensor(weight)],
        }
    }


@pytest.fixture
def make_run(tmp_path: Path, write_dump: Write, make_tensor: Tensor) -> Callable[..., Path]:
    """A run whose ranks hold one linear call with the given weights."""

    def make(name: str, *weights: float, step: int = 0) -> Path:
        for rank, weight in enumerate(weights):
            write_dump(tmp_path / name / f"step{step}/rank{rank}", _linear(make_tensor, weight))
        return tmp_path / name

    return make


def test_nothing_found(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    code, out, _ = aggregate(make_run("t", 2.0, 2.0), "--bench", make_run("b", 2.0, 2.0))
    assert code == 0
    assert "No divergence" in out
    assert "Exit code 0: nothing found" in out


def test_findings(aggregate: Aggregate, make_run: Callable[..., Path], tmp_path: Path) -> None:
    out_folder = tmp_path / "out"
    target = make_run("t", 2.0, 2.002)
    code, out, _ = aggregate(target, "--bench", make_run("b", 2.0, 2.0), "-o", out_folder)
    assert code == 1
    assert "FIRST DIVERGENCE: rank 1, step 0\n  Functional.linear.0.forward.input.1\n" in out
    assert "train.py:7 in step" in out
    summary = json.loads((out_folder / "summary.json").read_text())
    assert summary["exit_code"] == 1
    assert summary["first"]["rank"] == 1
    assert summary["totals"] == {
        "ranks": 2, "expected_ranks": 2, "steps": [0], "rows": 6, "matched": 6, "findings": 2, "results": {"pass": 6},
        "without_bench": {},
    }  # fmt: skip
    for path in summary["files"]:
        assert Path(path).is_file()
    names = sorted(path.name for path in (out_folder / "step0").iterdir())
    assert [name.split("_2")[0] for name in names] == [
        "compare_result_rank0", "compare_result_rank1", "merged", "multi_ranks_compare_merge",
    ]  # fmt: skip


def test_a_pair_of_single_ranks_has_its_first_divergence(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    """msprobe's `-da` says nothing of single ranks (FORMATS.md, last section)."""
    target, bench = (run / "step0/rank0/dump.json" for run in (make_run("t", 2.002), make_run("b", 2.0)))
    code, out, _ = aggregate(target, "--bench", bench)
    assert code == 1
    assert "FIRST DIVERGENCE: rank 0, step 0\n  Functional.linear.0.forward.input.1\n" in out


def test_tolerance(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", 2.0, 2.002), make_run("b", 2.0, 2.0)
    assert aggregate(target, "--bench", bench, "--tolerance", "0.2%")[0] == 0
    assert aggregate(target, "--bench", bench, "--tolerance", "0.0005")[0] == 1


def test_our_own_compare_results_are_read_again(
    aggregate: Aggregate, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    aggregate(make_run("t", 2.0, 2.002), "--bench", make_run("b", 2.0, 2.0), "-o", tmp_path / "out")
    code, out, _ = aggregate(tmp_path / "out", "-o", tmp_path / "again")
    assert code == 1
    assert "FIRST DIVERGENCE: rank 1, step 0\n  Functional.linear.0.forward.input.1\n" in out
    assert "Left out" not in out
    one, other = (next((tmp_path / n / "step0/merged").glob("Max_diff.csv")) for n in ("out", "again"))
    assert one.read_text() == other.read_text()


def test_the_manifests_bench_is_used(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", 2.002), make_run("b", 2.0)
    manifest = Manifest(("torchrun",), "train.py", "torchrun", "now", world_size=1, bench=str(bench))
    roster.save(RunLayout(target).manifest, manifest)
    code, out, _ = aggregate(target)
    assert code == 1
    assert f"bench    {bench}" in out
    assert (target / "aggregate").is_dir()
    roster.save(RunLayout(target).manifest, Manifest(("t",), "train.py", "t", "now", bench="gone"))
    code, _, err = aggregate(target)
    assert code == 2
    assert "is not there: gone" in err


def test_a_missing_rank_with_the_rosters_reason(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", 2.0, 2.0), make_run("b", 2.0, 2.0)
    layout = RunLayout(target)
    roster.save(layout.manifest, Manifest(("torchrun",), "train.py", "torchrun", "now", world_size=5))
    for rank in (0, 1):
        roster.save(layout.roster_mark(rank), RankMark(rank, attached=True, world_size=5, lost={"queue full": 3}))
    roster.save(layout.roster_mark(2), RankMark(2, attached=False, note="python -I"))
    roster.save(layout.roster_mark(3), RankMark(3, attached=True, recording=False))
    roster.save(layout.roster_mark(4), RankMark(4, attached=True, ended="finished", steps=(1, 2)))
    code, out, _ = aggregate(target, "--bench", bench)
    assert code == 3
    assert "2 of 4 ranks x 1 step" in out
    assert "rank 4 left nothing in step 0: finished; it recorded steps 1-2" in out
    assert "rank 2 left nothing in step 0: python -I" in out
    assert "rank 3 left" not in out
    assert "ranks 0-1: calls lost: 3 (queue full)" in out
    assert aggregate(target, "--bench", bench, "--allow-missing")[0] == 0


def test_an_unfinished_step_is_partial(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", 2.0, 2.0), make_run("b", 2.0, 2.0)
    dump = target / "step0/rank1/dump.json"
    text = json.dumps(json.loads(dump.read_text()))
    head, body = text.split('"data": {')
    dump.unlink()
    dump.with_name("dump.json.partial").write_text(f'{head}"data": {{\n {body[:-2]},\n "Torch.b.0.forward": {{"inp')
    code, out, _ = aggregate(target, "--bench", bench)
    assert code == 3
    assert "rank 1, step 0 is partial" in out
    assert "partial input (1 unfinished); nothing found in the rest" in out


def test_nothing_that_matches_is_no_success(
    aggregate: Aggregate, make_run: Callable[..., Path], write_dump: Write, make_tensor: Tensor, tmp_path: Path
) -> None:
    other = {"Torch.conv.0.forward": {"input_args": [make_tensor(1.0)], "input_kwargs": {}, "output": []}}
    write_dump(tmp_path / "b/step0/rank0", other)
    code, out, _ = aggregate(make_run("t", 2.0), "--bench", tmp_path / "b")
    assert code == 4
    assert "NOT USED: 1" in out


def test_a_cut_dump_costs_its_rank_only(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", 2.0, 2.002, 2.0), make_run("b", 2.0, 2.0, 2.0)
    dump = target / "step0/rank0/dump.json"
    dump.write_bytes(dump.read_bytes()[:200])
    code, out, _ = aggregate(target, "--bench", bench)
    assert code == 3
    assert "FIRST DIVERGENCE: rank 1" in out
    assert re.search(r"rank 0, step 0: .*dump\.json is cut", out)


def test_a_run_alone(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    code, out, _ = aggregate(make_run("t", 2.0, float("inf")))
    assert code == 1
    assert "FIRST NON-FINITE VALUE: rank 1, step 0" in out
    assert "--bench TRUSTED_RUN" in out
    assert aggregate(make_run("clean", 2.0, 2.0))[0] == 0


def test_order_of_the_folders_does_not_matter(
    aggregate: Aggregate, write_dump: Write, make_tensor: Tensor, tmp_path: Path
) -> None:
    """One run directory per node, given in every order: the same report, but for the order of its inputs."""
    for node, weight in enumerate((2.0, 2.002, 2.1)):
        for side, value in (("t", weight), ("b", 2.0)):
            write_dump(tmp_path / f"{side}{node}/step0/rank{node}", _linear(make_tensor, value))
    seen = set()
    for number, order in enumerate(itertools.permutations(range(3))):
        out = tmp_path / f"out{number}"
        bench = [flag for node in order for flag in ("--bench", tmp_path / f"b{node}")]
        code, _, _ = aggregate(*(tmp_path / f"t{node}" for node in order), *bench, "-o", out, "--format", "parquet")
        assert code == 1
        facts = json.loads((out / "summary.json").read_text())
        assert facts["first"]["rank"] == 1
        assert [entry["rank"] for entry in facts["compared"]] == [0, 1, 2]
        for changing in ("inputs", "bench", "time", "files", "next", "output", "compared"):
            del facts[changing]
        seen.add(json.dumps(facts))
    assert len(seen) == 1


def test_steps_and_ranks(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    target, bench = make_run("t", 2.002, 2.0), make_run("b", 2.0, 2.0)
    make_run("t", 2.0, 2.0, step=1)
    make_run("b", 2.0, 2.0, step=1)
    assert aggregate(target, "--bench", bench)[0] == 1
    assert aggregate(target, "--bench", bench, "--steps", "1")[0] == 0
    assert aggregate(target, "--bench", bench, "--ranks", "1-1")[0] == 0
    code, _, err = aggregate(target, "--bench", bench, "--steps", "7")
    assert code == 2
    assert "--steps: 7 are not there\nThere are: 0-1" in err
    assert aggregate(target, "--bench", bench, "--steps", "1-999999999999")[0] == 0
    # Without a manifest nobody knows how many there were; who asks for more is told.
    code, out, _ = aggregate(target, "--bench", bench, "--steps", "1", "--ranks", "1-999999999999")
    assert code == 3
    assert "--ranks asks for 2-999999999999, and the run has 0-1" in " ".join(out.split())


def test_formats(aggregate: Aggregate, make_run: Callable[..., Path], tmp_path: Path) -> None:
    aggregate(make_run("t", 2.0), "--bench", make_run("b", 2.0), "--format", "parquet", "-o", tmp_path / "o")
    assert not list(tmp_path.glob("o/step0/*.xlsx"))
    assert not list(tmp_path.glob("o/step0/merged/*.csv"))
    assert len(list(tmp_path.glob("o/step0/merged/*.parquet"))) == 9


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--format", "xslx"], "Did you mean 'xlsx'"),
        (["--tolerance", "-1"], "not a positive number"),
        (["--tolerance", "nan"], "not a positive number"),
        (["--steps", "8-5"], "runs backwards"),
        (["--steps", ""], "an empty text picks nothing"),
        (["--ranks", "a"], "neither a number nor a range"),
        (["--bensh", "x"], "unrecognized arguments: --bensh x Did you mean '--bench'"),
        (["--tol", "0.1"], "unrecognized arguments: --tol 0.1"),
        (["-o", ""], "an empty text is no path"),
        (["--bench", ""], "an empty text is no path"),
        (["--config", "no.yaml"], "cannot be read"),
        (["--bench", "no-such-run"], "no-such-run: no such file or folder"),
        (["--attempt", "3"], "no attempt 3"),
    ],
)
def test_usage_errors(aggregate: Aggregate, make_run: Callable[..., Path], flags: list[str], said: str) -> None:
    code, _, err = aggregate(make_run("t", 2.0), *flags)
    assert code == 2
    assert re.search(said, err)


def test_a_bench_for_compare_results_is_an_error(
    aggregate: Aggregate, result_csv: Write, make_row: Row, tmp_path: Path
) -> None:
    result_csv(tmp_path / "r/compare_result_rank0_1.csv", [make_row("Torch.a.0.forward.output.0")])
    code, _, err = aggregate(tmp_path / "r", "--bench", tmp_path)
    assert code == 2
    assert "Leave out --bench" in err


def test_an_output_that_cannot_be_written(aggregate: Aggregate, make_run: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = aggregate(make_run("t", 2.0), "-o", tmp_path / "file/out")
    assert code == 2
    assert "cannot be written: Not a directory\nWrite elsewhere: msprobe-aggregate" in err


def test_help_holds_the_exit_codes_and_an_example(aggregate: Aggregate) -> None:
    code, out, _ = aggregate("--help")
    assert code == 0
    assert "msprobe-aggregate runs/suspect --bench runs/trusted" in out
    for number in range(5):
        assert f"\n  {number}  " in out


def test_a_recording_without_items_is_no_success(
    aggregate: Aggregate, make_run: Callable[..., Path], write_dump: Write, tmp_path: Path
) -> None:
    run, bench = tmp_path / "t", make_run("b", 2.0, 2.0)
    layout = RunLayout(run)
    roster.save(layout.manifest, Manifest(("torchrun",), "train.py", "torchrun", "now", world_size=2))
    for rank in (0, 1):
        write_dump(run / f"step0/rank{rank}", {})
        unseen = {"filter 'zzz' matched nothing.": 1}
        roster.save(layout.roster_mark(rank), RankMark(rank, attached=True, world_size=2, unseen=unseen, finished=True))
    for flags in ((), ("--bench", bench)):
        code, out, _ = aggregate(run, *flags)
        assert code == 4
        assert "rank 1, step 0: its dump holds 0 items: filter 'zzz' matched nothing." in out
        assert "No NaN" not in out
    code, out, _ = aggregate(bench, "--bench", run)
    assert code == 4
    assert "holds 0 items" in out


def test_a_rank_without_items_is_not_used(
    aggregate: Aggregate, make_run: Callable[..., Path], write_dump: Write
) -> None:
    run = make_run("t", 2.0, 2.0)
    write_dump(run / "step0/rank2", {})
    code, out, _ = aggregate(run)
    assert code == 3
    assert "2 of 3 ranks x 1 step x 3 items" in out
    assert "rank 2, step 0: its dump holds 0 items" in out


def test_an_unexpected_error_is_no_finding(
    aggregate: Aggregate, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("list index\nout of range")

    monkeypatch.setattr(pipeline, "aggregate", fail)
    code, out, err = aggregate(make_run("t", 2.0))
    assert (code, out) == (70, "")
    assert err.startswith("msprobe-aggregate: internal error: IndexError: list index out of range (test_")
    assert "Please report it" in err
    assert "Traceback" not in err


def test_version(aggregate: Aggregate) -> None:
    code, out, _ = aggregate("--version")
    assert (code, out) == (0, f"msprobe-aggregate {__version__}\n")


@pytest.mark.parametrize(
    ("redirect", "code", "said"),
    [
        (">&-", 70, "stdout is closed; the report is in "),
        ("> /dev/full", 70, "stdout cannot be written: No space left on device; the report is in "),
        ("| head -1", 1, ""),
        (">&- 2>&-", 70, ""),
        ("--help > /dev/full", 70, "stdout cannot be written: No space left"),
    ],
)
def test_stdout_that_does_not_take_it(
    make_run: Callable[..., Path], tmp_path: Path, redirect: str, code: int, said: str
) -> None:
    run = make_run("t", float("inf"))
    command = f"set -o pipefail; {sys.executable} -m aggregator {run} --jobs 1 -o {tmp_path}/out {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)


def test_paths_beyond_the_locale(make_run: Callable[..., Path]) -> None:
    run = make_run("sp ü 日", 2.0, float("inf"))
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "aggregator", str(run)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert r"sp \xfc" in done.stdout
    (path,) = run.glob("aggregate/*/summary.json")
    assert json.loads(path.read_text())["inputs"] == [str(run)]


def test_paths_that_are_no_utf8(aggregate: Aggregate, make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run("t", 2.0, float("inf")).rename(tmp_path / "t\udcfc")
    code, _, err = aggregate(run)
    assert code == 2
    assert "-o FOLDER" in err
    code, out, _ = aggregate(run, "-o", tmp_path / "out")
    assert code == 1
    assert r"t\udcfc" in out
    assert json.loads((tmp_path / "out/summary.json").read_text())["inputs"] == [str(run)]


def test_a_full_disk_is_one_clean_message(
    aggregate: Aggregate, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = Path.open

    def full(path: Path, *args: Any, **more: Any) -> Any:
        if path.name.endswith(".xlsx.tmp"):
            path.symlink_to("/dev/full")
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", full)
    code, out, err = aggregate(make_run("t", 2.0, 2.0), "-o", tmp_path / "out", "--format", "xlsx")
    assert (code, out) == (2, "")
    assert "No space left on device\nWrite elsewhere with -o FOLDER." in err
    assert len(err.splitlines()) == 2
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_steps_that_the_roster_has_and_the_disk_has_not(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    for name in ("t", "b"):
        for step in (0, 2):
            run = make_run(name, 2.0, 2.0, step=step)
        make_run("b", 2.0, 2.0, step=5)
    layout = RunLayout(run.with_name("t"))
    for rank in (0, 1):
        mark = RankMark(rank, attached=True, world_size=2, steps=(0, 1, 2, 3), finished=True)
        roster.save(layout.roster_mark(rank), mark)
    for flags in ((), ("--bench", run)):
        code, out, _ = aggregate(layout.root, *flags)
        assert code == 3
        assert "MISSING: 2 steps\n  steps 1, 3: recorded according to the roster" in out
        assert "partial input (2 steps missing)" in out
        assert aggregate(layout.root, *flags, "--steps", "0,2")[0] == 0
        assert aggregate(layout.root, *flags, "--allow-missing")[0] == 0
    assert "steps only in the bench, not compared: 5" in out
    assert aggregate(layout.step(0))[0] == 0


def test_the_same_folder_twice(
    aggregate: Aggregate, make_run: Callable[..., Path], result_csv: Write, make_row: Row, tmp_path: Path
) -> None:
    run = make_run("t", 2.0, 2.0)
    link = tmp_path / "link"
    link.symlink_to(run)
    code, out, _ = aggregate(run, link, run)
    assert code == 0
    assert "2 of 2 ranks x 1 step x 3 items = 6 rows" in out
    notes = json.loads(next(run.glob("aggregate/*/summary.json")).read_text())["notes"]
    assert notes == [f"{link}: the same as {run}, which is read", f"{run}: given twice"]
    code, out, _ = aggregate(run, "--bench", run, "--bench", link)
    assert f"bench:{link}:thesameas{run}" in re.sub(r"\s", "", out)
    results = result_csv(tmp_path / "r/compare_result_rank0_1.csv", [make_row("Torch.a.0.forward.output.0")]).parent
    code, out, _ = aggregate(results, results)
    assert "Left out: 1\n  r: given twice" in out


@pytest.mark.parametrize("what", ["run", "report", "foreign"])
def test_a_report_gets_a_folder_of_its_own(
    aggregate: Aggregate, make_run: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    run = make_run("t", 2.0)
    output = run if what == "run" else tmp_path / "out"
    if what == "report":
        assert aggregate(run, "-o", output)[0] == 0
    elif what == "foreign":
        output.mkdir()
        (output / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    code, _, err = aggregate(run, "-o", output)
    assert code == 2
    said = {"run": "is a run directory", "report": "holds a report already", "foreign": "is not empty (1 entries, such"}
    assert f"-o {output} {said[what]}" in err
    assert f"-o {output}/report, or leave out -o" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_names_only_say_so(aggregate: Aggregate, make_run: Callable[..., Path], tmp_path: Path) -> None:
    target, bench = make_run("t", 2.0), make_run("b", 2.0)
    for run in (target, bench):
        dump = run / "step0/rank0/dump.json"
        dump.write_text(dump.read_text().replace('"statistics"', '"structure"'))
    code, out, _ = aggregate(target, "--bench", bench)
    assert code == 0
    assert "Names only" in out
    assert "rounding" not in out
    code, out, _ = aggregate(target)
    assert code == 0
    assert "No NaN" not in out
    assert "Names only" in out


def test_another_model_is_asked_about(
    aggregate: Aggregate, write_dump: Write, make_tensor: Tensor, tmp_path: Path
) -> None:
    def ops(*names: str) -> dict[str, Any]:
        call = {"input_args": [make_tensor(1.0)], "input_kwargs": {}, "output": []}
        return {f"Torch.{name}.0.forward": call for name in names}

    write_dump(tmp_path / "t/step0/rank0", ops("relu", "exp", "conv2d"))
    write_dump(tmp_path / "b/step0/rank0", ops("relu", "tanh"))
    code, out, _ = aggregate(tmp_path / "t", "--bench", tmp_path / "b")
    assert code == 0
    assert "msprobe  pass 1, warning 0, error 0, without a bench row 2\n" in out
    assert "2 of 3 rows have no bench row: are these the same model" in out
    (result,) = tmp_path.glob("t/aggregate/*/step0/compare_result*.csv")
    assert result.read_text().count(",pass,") == 3
    _, out, _ = aggregate(result)
    assert "without a bench row 2" in out


def test_nan_on_both_sides_is_a_note(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    nan = float("nan")
    code, out, _ = aggregate(make_run("t", nan, 2.0), "--bench", make_run("b", nan, 2.0))
    assert code == 0
    assert "2 items are NaN on both sides" in out


def test_a_run_that_may_still_be_going_on(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    layout = RunLayout(make_run("t", 2.0, 2.0, 2.0, 2.0))
    ends = [{}, {"finished": True}, {"ended": "killed by SIGKILL"}, {"exit_code": 0}]
    for rank, end in enumerate(ends):
        roster.save(layout.roster_mark(rank), RankMark(rank, attached=True, world_size=4, **end))
    code, out, _ = aggregate(layout.root)
    assert code == 0
    assert "rank 0: has not ended according to the roster: the run may still be going on" in out


@pytest.mark.parametrize("with_bench", [False, True])
def test_a_disk_that_is_full_already_for_the_tables(
    aggregate: Aggregate, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, with_bench: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        # As Arrow tells it.
        raise OSError("Error writing bytes to file. Detail: [errno 28] No space left on device")

    target, bench = make_run("t", 2.0, 2.0), make_run("b", 2.0, 2.0)
    monkeypatch.setattr(pq, "write_table", full)
    code, out, err = aggregate(target, *(("--bench", bench) if with_bench else ()))
    assert (code, out) == (2, "")
    assert "cannot be written: No space left on device\nWrite elsewhere" in err


def test_verdict_noise_needs_dumps_and_a_bench(aggregate: Aggregate, make_run: Callable[..., Path]) -> None:
    a, b, c = make_run("a", 1.0), make_run("b", 1.0), make_run("c", 1.0)
    code, out, _ = aggregate(a, "--bench", b, "--verdict", "noise", "--format", "csv")
    assert code == 0
    assert "verdict noise" in out
    assert "noise    pass 3, warning 0, error 0" in out
    # Two trusted runs: of other ranks one bench together, of the same ranks for this policy only.
    assert aggregate(a, "--bench", b, "--bench", c, "--verdict", "noise", "--format", "csv")[0] == 0
    for argv, said in (
        ((a, "--verdict", "noise"), "there is no bench"),
        ((a, "--tolerance", "0.1", "--fuzzy-match"), "--tolerance, --fuzzy-match: there is no bench to compare with"),
        ((next((a / "aggregate").iterdir()) / "step0", "--fuzzy-match"), "--fuzzy-match works on dumps"),
        ((a, "--bench", b, "--bench", c), "\nTwo trusted runs are for --verdict noise"),
        ((a, "--bench", b, "--bench", b, "--verdict", "noise"), "is given twice"),
        ((a, "--bench", b, "--thresholds", b), "--thresholds goes with --verdict noise"),
        ((a, "--bench", b, "--verdict", "noise", "--tolerance", "1"), "both say what counts as a finding"),
        ((a, "--bench", b, "--verdict", "noize"), "Did you mean 'noise'?"),
        ((next((a / "aggregate").iterdir()) / "step0", "--verdict", "noise"), "works on dumps"),
    ):
        code, _, error = aggregate(*argv)
        assert code == 2
        assert said in error
