"""The report as text: narrow, in ASCII, without colour, with nothing lost."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest

from aggregator.alone import RankStatistics
from aggregator.analyse.attendance import MissingRank, RankNote
from aggregator.columns import Mode
from aggregator.model import Divergence, RankComparison, RankFailure
from aggregator.report import console
from aggregator.report.base import Exit, Report, Task
from aggregator.report.console import render, user_frame
from aggregator.report.page import PIPE_WIDTH, Surface
from aggregator.sources import LeftOut

LONG = (
    "Module.module.transformer.decoder.layers.11.self_attention.query_key_value.ColumnParallelLinear.forward.0.input.0"
)


def _report(**changes: object) -> Report:
    first = Divergence(
        step=0,
        rank=8,
        row=5,
        position=2,
        item=LONG,
        bench_item=LONG.replace("module.", "", 1),
        reason="norm 8.008 against 8, 0.1 % apart (8.19 times the tolerance)",
        excess=8.19,
        npu_max="0.12509922683238983",
        bench_max="0.12497425079345703",
        npu_norm="8.008",
        bench_norm="8.0",
        parent=LONG.removesuffix(".input.0"),
        stack=(
            "File /venv/site-packages/torch/nn/modules/linear.py, line 134, in forward, \n return F.linear(input)",
            "File /home/größe/train.py, line 7, in step, \n y = model(x)",
        ),
    )
    compared = tuple(
        RankComparison(
            0, rank, Mode.STATISTICS, Path(f"p{rank}"), Path(f"s{rank}"), 70_000, 70_000,
            {"pass": 69_990, "warning": 10}, findings=3 if rank == 8 else 0, first=first if rank == 8 else None,
        )
        for rank in (0, 1, 8)
    )  # fmt: skip
    values: dict[str, object] = {
        "task": Task.COMPARED,
        "inputs": (Path("runs/größe-target"),),
        "bench": (Path("runs/bench"),),
        "output": Path("/a/rather/long/path/to/the/folder/of/runs/größe-target/aggregate/20260101000000"),
        "time": "20260101000000",
        "mode": Mode.STATISTICS,
        "compared": compared,
        "expected": 9,
        "first": first,
        "failures": (RankFailure(0, 5, Path("runs/target/step0/rank5"), "dump.json is cut: it ends after 53 bytes"),),
        "missing": tuple(MissingRank(0, rank, "the probe never reached it (python -I)") for rank in (2, 3)),
        "left_out": (LeftOut(Path("x/notes.txt"), "not named like a compare result"),),
        "rank_notes": (RankNote(1, "calls lost: 3 (queue full)"), RankNote(0, "calls lost: 3 (queue full)")),
        "files": (Path("/a/rather/long/path/to/the/folder/of/runs/größe-target/aggregate/20260101000000/m.xlsx"),),
    }
    return Report(**{**values, **changes})  # type: ignore[arg-type]


def _text(report: Report, width: int = 100, *, ascii_only: bool = False) -> str:
    return "\n".join(line.text for line in render(report, Surface(width, ascii_only)))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_surface_and_nothing_is_lost(width: int) -> None:
    text = _text(_report(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    # Breaks add blanks and line ends and take away none but blanks.
    joined = re.sub(r"\s", "", text)
    for part in (LONG, "0.12509922683238983", "runs/größe-target/aggregate/20260101000000", "(8.19timesthetolerance)"):
        assert part in joined


def test_long_names_are_broken_between_their_parts() -> None:
    lines = _text(_report(), 60).splitlines()
    parts = set(re.split(r"[._/ ]", LONG))
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("Module.module"))
    for piece in (lines[at], lines[at + 1]):
        assert set(re.split(r"[._/ ]", piece.strip())) <= parts | {""}


def test_what_a_person_needs() -> None:
    text = _text(_report(), 160)
    assert "3 of 9 ranks x 1 step x 70,000 items = 210,000 rows" in text
    assert "FIRST DIVERGENCE: rank 8, step 0" in text
    assert f"inside   {LONG.removesuffix('.input.0')}" in text
    assert "target   max 0.12509922683238983  norm 8.008" in text
    assert "at       /home/größe/train.py:7 in step" in text
    assert "msprobe  pass 209,970, warning 30, error 0" in text
    assert "rank 5, step 0: dump.json is cut" in text
    assert "rank 3 left nothing in step 0: the probe never reached it (python -I)" in text
    assert "ranks 0-1: calls lost: 3 (queue full)" in text
    assert "Exit code 3: partial input (1 unusable, 2 ranks missing); findings as well: 3" in text


def test_exit_codes() -> None:
    clean = _report(failures=(), missing=())
    assert clean.exit is Exit.FINDINGS
    quiet = tuple(c for c in clean.compared if not c.findings)
    assert _report(failures=(), missing=(), compared=quiet).exit is Exit.NOTHING_FOUND
    assert _report(compared=quiet).exit is Exit.PARTIAL
    assert _report(failures=(), allow_missing=True).exit is Exit.FINDINGS
    assert _report(compared=()).exit is Exit.NOTHING_USABLE
    assert "No divergence" in _text(_report(failures=(), missing=(), compared=quiet, first=None))
    assert "nothing: no rank could be used" in _text(_report(compared=(), first=None))


def test_long_lists_are_cut_with_the_number_left() -> None:
    failures = tuple(RankFailure(0, rank, Path(f"r{rank}"), "is empty") for rank in range(1000))
    text = _text(_report(failures=failures))
    assert "... and 980 more (summary.json)" in text
    assert "NOT USED: 1000" in text


def test_a_pipe_that_holds_ascii_gets_ascii_and_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    console.show(_report(), stream)
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "\x1b" not in text
    assert "gr\\xf6\\xdfe-target" in text
    assert max(len(line) for line in text.splitlines()) <= PIPE_WIDTH + 8  # escapes are longer


def test_all_words_of_ours_are_ascii() -> None:
    assert _text(_report()).replace("größe", "").isascii()


def test_columns_sets_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert Surface.of(io.StringIO()).width == 60
    monkeypatch.setenv("COLUMNS", "wide")
    assert Surface.of(io.StringIO()).width == PIPE_WIDTH


def test_user_frame_is_the_innermost_outside_packages() -> None:
    library = "File /usr/lib/python3.11/runpy.py, line 1, in run, \n exec()"
    package = "File /v/site-packages/torch/x.py, line 1, in f, \n g()"
    own = "File train.py, line 2, in main, \n f()"
    assert user_frame((package, library, own, "File other.py, line 1, in m, \n x")) == own
    assert user_frame((package, library)) == package
    assert user_frame(()) is None


def test_one_item_is_no_plural() -> None:
    entry = RankStatistics(0, 0, Path("p"), Path("s"), rows=3, ops=1, metrics=("NPU max",), asked_for=1)
    text = _text(_report(task=Task.ALONE, compared=(), alone=(entry,), first=None))
    assert "1 item holds infinities" in text


def test_a_difference_that_all_ranks_share_names_all_ranks() -> None:
    report = _report()
    assert report.first is not None
    every = tuple(dataclasses.replace(entry, first=report.first) for entry in report.compared)
    text = _text(_report(compared=every))
    assert "FIRST DIVERGENCE: all 3 ranks, step 0\n" in text
    assert "the values are those of rank 8" in text
    assert "FIRST DIVERGENCE: rank 8, step 0\n" in _text(_report(compared=every[2:]))
