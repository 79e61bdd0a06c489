"""Metrics of stored values, each side's parts joined or added on the way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow.compute as pc

from aggregator import stored, tensors
from aggregator.items import ROLES
from aggregator.layouts import combine, shards
from aggregator.layouts.decide import Decisions, Kind, Source
from aggregator.layouts.gather import Side
from aggregator.layouts.judge import Judged
from aggregator.layouts.together import Whole
from aggregator.values import UnreadableValues, Values
from msprobe_launch.records.names import Role

if TYPE_CHECKING:
    import numpy.typing as npt

    Flags = npt.NDArray[np.bool_]
    Codes = npt.NDArray[np.int64]

_INPUT, _PARAMETERS, _OUTPUT, _GRADIENT = (
    ROLES.index(role) for role in (Role.INPUT, Role.PARAMETERS, Role.OUTPUT, Role.PARAMETERS_GRAD)
)


def metrics(
    target: Side,
    bench: Side,
    own: Decisions,
    other: Decisions,
    whole: Whole,
    theirs: Whole,
    comparable: Codes,
    judged: Judged,
) -> stored.StoredMetrics:
    """Metrics of the stored values, each side's parts joined or added on the way."""
    names = _file_names(target), _file_names(bench)
    rows = []
    # A mean over data parallel ranks is that of their single numbers, which the statistics hold.
    means = whole.mean | theirs.mean[np.maximum(comparable, 0)]
    for row in np.flatnonzero((comparable >= 0) & ~means).tolist():
        if names[0][0][0][row] is not None and names[1][0][0][int(comparable[row])] is not None:
            rows.append(row)

    def compared(row: int) -> tensors.TensorMetrics:
        at = int(comparable[row])
        opened: list[Values] = []
        for side, decisions, found, files, place in (
            (target, own, whole, names[0], row),
            (bench, other, theirs, names[1], at),
        ):
            word = "target" if side is target else "bench"
            try:
                opened.append(cast(Values, _opened(side, decisions, found, files, place)))
            except UnreadableValues as error:
                return tensors.TensorMetrics(tensors.NO_VALUES.cells, reason=f"{word}: {error}")
        metrics = tensors.compare_values(opened[0], opened[1])
        for values in opened:
            values.forget()
        guessed = any(
            verdict.kind is Kind.SHARD and verdict.source is Source.SHAPES
            for verdict in (own.verdicts[own.codes[row]], other.verdicts[other.codes[at]])
        )
        if guessed and metrics.off > 0 and _statistics_agree(target, judged, row, at):
            # The dimension was guessed; values of the same statistics in another order say that it is another one.
            return tensors.TensorMetrics(metrics.cells)
        return metrics

    return stored.collected(target.height, np.array(rows, np.int64), compared)


CANCELLED = 2.0**-12  # of the largest value around: a gradient below it is the rounding of sums that cancel


def cancelled(target: Side, judged: Judged) -> Flags:
    """Gradients that cancel to zero: summed in another order, element by element nothing agrees.

    What comes out of a backward call against what came in, a parameter's gradient against those of its module.
    """
    dump = target.skeleton
    op = dump.items["op"].to_numpy()
    role = dump.items["role"].to_numpy()
    backward = np.asarray(pc.match_substring_regex(dump.ops["name"], r"\.backward(?:\.\d+)?$").to_numpy())[op]
    with np.errstate(all="ignore"):
        largest = np.fmax(np.abs(judged.target.numbers[0]), np.abs(judged.target.numbers[1]))
    largest = np.where(np.isfinite(largest), largest, 0.0)
    source = (backward & (role == _INPUT)) | (role == _GRADIENT)
    around = np.zeros(dump.ops.num_rows)
    np.maximum.at(around, op[source], largest[source])
    return np.asarray(((backward & (role == _OUTPUT)) | (role == _GRADIENT)) & (largest < around[op] * CANCELLED))


def _statistics_agree(target: Side, judged: Judged, row: int, at: int) -> bool:
    a, b = judged.target.take(np.array([row])), judged.bench.take(np.array([at]))
    allowed = combine.tolerances(target.skeleton.items["dtype"].slice(row, 1).combine_chunks())
    counts = np.array([np.nan])
    return bool(combine.apart(a, b, allowed, counts)[0] <= 1.0)


def _file_names(side: Side) -> list[list[list[str | None]]]:
    return [[column.data_names.to_pylist() for column in row] for row in side.columns]


def _opened(
    side: Side, decisions: Decisions, whole: Whole, names: list[list[list[str | None]]], row: int
) -> shards.Whole:
    """One row's value on one side. Raises UnreadableValues."""
    verdict = decisions.verdicts[decisions.codes[row]]
    stage = int(side.stage[row])

    def paths(d: int) -> list[Path]:
        found = []
        for t, column in enumerate(side.columns[d]):
            name = names[d][t][row]
            if name is None:
                if "[0" in str(column.shapes[row].as_py()) or ", 0" in str(column.shapes[row].as_py()):
                    continue  # an empty shard has no file
                raise UnreadableValues(f"rank {column.ranks[stage]} has no values of it")
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise UnreadableValues(f"{name!r} is no name of a file")
            found.append(column.folders[stage] / name)
        return found

    shared = verdict.dp_dim is not None and len(side.columns) > 1
    if shared and (whole.summands[row] or verdict.kind in (Kind.SHARD, Kind.BESIDE)):
        raise UnreadableValues("a value that is divided among tensor and data parallel ranks: compared by statistics")
    files = paths(0)
    if whole.summands[row]:
        return shards.open_summed(files)
    if verdict.kind is Kind.SHARD:
        return shards.open_joined(files, verdict.dim)
    if verdict.kind is Kind.BESIDE:
        return shards.open_joined(files, None)
    if shared:
        return shards.open_joined([paths(d)[0] for d in range(len(side.columns))], verdict.dp_dim)
    return shards.open_joined([files[min(int(whole.shown[row]), len(files) - 1)]], None)
