"""What passes between the aggregator's stages: small frozen facts; rows stay in parquet partitions on disk.

    compare.py      one rank's pair of dumps      -> RankComparison | RankFailure
    results.py      one compare_result file       -> RankComparison | RankFailure
    merge.py        many RankComparisons          -> RunComparison
    report/*        a RunComparison               -> console, csv, xlsx, parquet, html, json

A partition is the table of one (step, rank) with the columns of `columns.Mode.header` (see columns.py for how numbers
and texts are kept) plus these of ours, which no msprobe file has:

    op           string   the op of the item (`records.names.OpName` as text)
    role         string   input, parameters, output, parameters_grad
    excess       float64  how many times the tolerance of the item's dtype the largest relative difference is;
                          > 1 means it differs by more than rounding explains, inf for NaN on one side or another
                          shape, dtype or value, null where nothing could be compared
    parent       string   parent op from construct.json, null where unknown
    integers     uint8    bit i: the i-th of the eight statistics was recorded as an integer (a cell `3`, not `3.0`);
                          only in partitions that compare.py wrote
    finding      string   what is wrong with the row beside its numbers (an argument that one side's call lacks), null
                          for nothing; only in partitions that compare.py wrote
    placement    string   how a DTensor is divided (`Shard(0) of [8, 4]`), null for other items; only where the target's
                          dump holds DTensors
Rows are in call order of the target, and within an op inputs, parameters, outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aggregator.columns import Mode


@dataclass(frozen=True, slots=True)
class Divergence:
    """The earliest item of one (step, rank) that differs by more than rounding explains.

    `row` is the row in the partition, `position` the call order of its op in the target (0 = first op of the step).
    Values are the cells as text, `reason` says in words what differs (`norm 8.00 against 8.008, 0.1 %`).
    """

    step: int | None
    rank: int | None
    row: int
    position: int
    item: str
    bench_item: str
    reason: str
    excess: float
    npu_max: str = ""
    bench_max: str = ""
    npu_norm: str = ""
    bench_norm: str = ""
    parent: str | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankComparison:
    """One rank of one step, compared. `partition` is the parquet file with its rows.

    `step` is None where compare results were given without a step, `rank` None for a single process.
    `rows` counts all rows, `matched` those with a bench row; `results` counts msprobe's words (pass, warning, error,
    '' in old files). `findings` counts rows with excess > 1. `bench_only` are ops of the bench that the target lacks.
    `notes` are sentences for the report (stale file left out, prefix ignored, partial journal read).
    """

    step: int | None
    rank: int | None
    mode: Mode
    partition: Path
    source: Path
    rows: int
    matched: int
    results: dict[str, int] = field(default_factory=dict)
    findings: int = 0
    first: Divergence | None = None
    bench_only: tuple[str, ...] = ()
    partial: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank of one step, or one file, that could not be used, and why (a sentence with numbers)."""

    step: int | None
    rank: int | None
    source: Path
    reason: str


def rank_order(key: RankComparison | RankFailure) -> tuple[int, int]:
    """Sort key: step, then rank, both numerically, unknown ones last. The fold must not depend on arrival order."""
    big = 1 << 62
    return (big if key.step is None else key.step, big if key.rank is None else key.rank)
