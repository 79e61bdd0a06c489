"""What stands opposite the target's rows: nothing at all, or a NaN where the target has one too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import columns
from aggregator.columns import TEXT_SUFFIX
from aggregator.model import RankComparison
from aggregator.results import matched_mask

_MAXIMA = ("NPU max" + TEXT_SUFFIX, "Bench max" + TEXT_SUFFIX)


@dataclass(frozen=True, slots=True)
class Opposite:
    """`alone` counts msprobe's words of the rows without a bench row, `both_nan` the rows with a NaN on both sides."""

    alone: dict[str, int] = field(default_factory=dict)
    both_nan: int = 0


def look(compared: Iterable[RankComparison]) -> Opposite:
    """Over all ranks; reads four columns of one partition at a time."""
    alone: Counter[str] = Counter()
    both = 0
    for entry in compared:
        there = pq.read_schema(entry.partition).names
        if entry.matched != entry.rows:
            table = pq.read_table(entry.partition, columns=[columns.BENCH_NAME, columns.RESULT])
            words = table.filter(pc.invert(matched_mask(table))).column(columns.RESULT).cast(pa.string())
            alone.update({found["values"] or "": found["counts"] for found in words.value_counts().to_pylist()})
        if all(name in there for name in _MAXIMA):
            table = pq.read_table(entry.partition, columns=list(_MAXIMA))
            own, other = (pc.equal(pc.utf8_lower(table.column(name).cast(pa.string())), "nan") for name in _MAXIMA)
            both += pc.sum(pc.and_(own, other)).as_py() or 0
    return Opposite(dict(alone), both)
