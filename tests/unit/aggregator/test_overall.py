"""Which divergence is the first of all, and which ops are worst."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aggregator import pipeline, results
from aggregator.analyse import overall
from aggregator.model import RankComparison
from aggregator.sources import ResultFile

Row = Callable[..., dict[str, str]]
Compared = Callable[..., RankComparison]


@pytest.fixture
def compared(tmp_path: Path, make_row: Row, result_csv: Callable[..., Path]) -> Compared:
    """A comparison of 12 ops in which the op number i is off by `off[i]`."""

    def make(rank: int, off: dict[int, float], step: int | None = None) -> RankComparison:
        rows = [make_row(f"Torch.a.{i}.forward.output.0", 1.0 + off.get(i, 1e-7)) for i in range(12)]
        path = result_csv(tmp_path / f"{step}-{rank}.csv", rows)
        found = results.load(ResultFile(path, step, rank, 1), path.with_suffix(".parquet"))
        assert isinstance(found, RankComparison)
        return found

    return make


def _first(every: Sequence[RankComparison]) -> tuple[int | None, str | None, str | None]:
    found = overall.first(every, pipeline.divergence_at)
    assert found.culprit is not None
    common = found.common.item.split(".")[2] if found.common else None
    return found.culprit.rank, found.culprit.item.split(".")[2], common


def test_earliest_step_then_call_then_rank(compared: Compared) -> None:
    every = [
        compared(0, {9: 0.1}, step=1),
        compared(1, {5: 0.1, 6: 9.0}, step=1),
        compared(2, {5: 0.1}, step=1),
        compared(0, {1: 0.5}, step=10),
    ]
    assert _first(every) == (1, "5", None)
    random.Random(0).shuffle(every)
    assert _first(every) == (1, "5", None)
    assert overall.first([compared(0, {})], pipeline.divergence_at).culprit is None


def test_what_all_ranks_share_and_does_not_spread_comes_second(compared: Compared) -> None:
    every = [compared(rank, {3: 0.2} | ({8: 0.1} if rank == 2 else {})) for rank in range(4)]
    assert _first(every) == (2, "8", "3")


def test_what_all_ranks_share_and_spreads_stays_first(compared: Compared) -> None:
    spread = dict.fromkeys(range(3, 12), 0.01)
    every = [compared(rank, spread | ({8: 0.5} if rank == 2 else {})) for rank in range(4)]
    assert _first(every) == (0, "3", None)


def test_noise_at_the_threshold_singles_nobody_out(compared: Compared) -> None:
    # 1.2e-4 is the tolerance of float32: rank 2 is just over it, the others just under it.
    every = [compared(rank, {3: 0.2, 8: 1.3e-4 if rank == 2 else 1.1e-4}) for rank in range(4)]
    assert _first(every) == (0, "3", None)


def test_two_ranks_are_no_crowd(compared: Compared) -> None:
    every = [compared(rank, {3: 0.2} | ({8: 0.1} if rank == 1 else {})) for rank in range(2)]
    assert _first(every) == (0, "3", None)


def test_a_rank_that_makes_more_calls_is_not_later_for_it(
    tmp_path: Path, make_row: Row, result_csv: Callable[..., Path]
) -> None:
    """Rank 0 logs twice before its fault at `b`; rank 1 differs one call after, by what came of it."""

    def rank(number: int, names: list[str], off: str) -> RankComparison:
        rows = [make_row(f"Torch.{name}.0.forward.output.0", 1.0 + 0.1 * (name == off)) for name in names]
        path = result_csv(tmp_path / f"{number}.csv", rows)
        found = results.load(ResultFile(path, 0, number, 1), path.with_suffix(".parquet"))
        assert isinstance(found, RankComparison)
        return found

    every = [rank(0, ["a", "log", "max", "b", "c", "d"], "b"), rank(1, ["a", "b", "c", "d"], "c")]
    for compared in (every, every[::-1]):
        culprit = overall.first(compared, pipeline.divergence_at).culprit
        assert culprit is not None
        assert (culprit.rank, culprit.item) == (0, "Torch.b.0.forward.output.0")


def test_what_a_collective_gave_comes_after_what_went_in(
    tmp_path: Path, make_row: Row, result_csv: Callable[..., Path]
) -> None:
    def rank(number: int, off: str) -> RankComparison:
        names = [f"Distributed.all_reduce.0.forward.{part}.0" for part in ("output", "input")]
        if number:  # one call more before it: positions of two ranks say nothing
            names = ["Torch.a.0.forward.output.0", *names]
        path = result_csv(tmp_path / f"{number}.csv", [make_row(n, 1.0 + 0.1 * n.endswith(off)) for n in names])
        found = results.load(ResultFile(path, 0, number, 1), path.with_suffix(".parquet"))
        assert isinstance(found, RankComparison)
        return found

    culprit = overall.first([rank(0, "output.0"), rank(1, "forward.input.0")], pipeline.divergence_at).culprit
    assert culprit is not None
    assert (culprit.rank, culprit.item) == (1, "Distributed.all_reduce.0.forward.input.0")


def test_worst_ops(compared: Compared) -> None:
    every = [compared(0, {3: 0.2, 5: 0.9}), compared(1, {3: 0.3})]
    ops = overall.worst_ops(every)
    assert [(op.op, op.findings, op.ranks) for op in ops] == [
        ("Torch.a.5.forward", 1, 1),
        ("Torch.a.3.forward", 2, 2),
    ]
    assert overall.worst_ops([compared(0, {})]) == ()
    assert len(overall.worst_ops(every, limit=1)) == 1
