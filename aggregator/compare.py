"""One rank of one step: read both dumps, match, measure, judge, find the first divergence.

A rank that cannot be compared is a RankFailure, a value; no error of an input leaves this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import (
    applied,
    coded,
    columns,
    divergence,
    dtypes,
    lonely,
    match,
    noise,
    placement,
    read,
    sheet,
    stored,
    tabulate,
)
from aggregator.columns import Mode
from aggregator.model import RankComparison, RankFailure
from msprobe_launch.errors import InputError, NothingUsable
from msprobe_launch.records.layout import RankFolder

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

FORMATS = ("csv", "xlsx")


def compare_rank(
    target: RankFolder,
    bench: RankFolder,
    *,
    step: int | None,
    rank: int | None,
    partition: Path,
    results: Path | None = None,
    time: str = "",
    formats: Sequence[str] = ("csv",),
    tolerance: float | None = None,
    matching: match.Options = match.PLAIN,
    policy: noise.Policy | None = None,
    second: RankFolder | None = None,
) -> RankComparison | RankFailure:
    """Compare one rank and write its partition (a parquet file, see model.py; its folder is made).

    With `results` (a folder), `compare_result_rank<R>_<time>.<format>` is written there in each of `formats`; `time`
    is `YYYYmmddHHMMSS`. `tolerance`, a ratio, replaces the tolerances of `divergence`. `matching`: see `match`. With
    `policy` excess, `Result` and `Err_message` are those of `noise`; `second` is the rank in a second trusted run.

    Never raises because of its inputs or of a full disk: those are a RankFailure.
    """

    def made() -> Compared:
        found = _compared(target, bench, tolerance, matching)
        return found if policy is None else _by_noise(found, target, (bench, second), matching, policy, step)

    return publish(
        made, target.path, step=step, rank=rank, partition=partition, results=results, time=time, formats=formats
    )


def publish(
    made: Callable[[], Compared],
    source: Path,
    *,
    step: int | None,
    rank: int | None,
    partition: Path,
    results: Path | None,
    time: str,
    formats: Sequence[str],
) -> RankComparison | RankFailure:
    """Run a comparison, write its files (see `compare_rank`) and say how it went. Never raises because of inputs."""
    try:
        found = made()
        partition.parent.mkdir(parents=True, exist_ok=True)
        _write_partition(found.table, partition)
        if results is not None:
            write_results(found.table, found.mode, results, rank, time, formats)
            if found.matching.lonely:
                which = "" if rank is None else f"rank{rank}_"
                lonely.write(found.matching.lonely, results / f"unmatched_{which}{time}.csv")
    except InputError as error:
        return RankFailure(step, rank, source, str(error))
    except MemoryError:
        return RankFailure(step, rank, source, "out of memory; run with fewer workers (--jobs 1)")
    except OSError as error:
        return RankFailure(step, rank, source, f"{error.filename or 'a file'}: {error.strerror or error}")
    counts = found.table[columns.RESULT].value_counts().to_pylist()
    return RankComparison(
        step=step,
        rank=rank,
        mode=found.mode,
        partition=partition,
        source=source,
        rows=found.table.num_rows,
        matched=found.table.num_rows - found.unmatched,
        results={entry["values"]: entry["counts"] for entry in counts},
        findings=divergence.findings(found.table),
        first=divergence.first(found.table, found.mode, step=step, rank=rank),
        bench_only=found.matching.bench_only,
        partial=found.partial,
        notes=found.notes,
    )


# Nearly every row has another text there, so that a dictionary would only cost time.
_DISTINCT = frozenset({columns.NPU_NAME, columns.BENCH_NAME})


def _write_partition(table: pa.Table, path: Path) -> None:
    """Write a partition, readable column by column. Raises OSError."""
    repeated = [
        name
        for name in table.column_names
        if pa.types.is_string(table.schema.field(name).type) and name not in _DISTINCT
    ]
    pq.write_table(table, path, compression="zstd", compression_level=1, use_dictionary=repeated)


def write_results(
    table: pa.Table, mode: Mode, folder: Path, rank: int | None, time: str, formats: Sequence[str]
) -> tuple[Path, ...]:
    """Write a partition as compare_result files and return their paths. Raises OSError.

    Without a rank the name is `compare_result_<time>`, as msprobe has it for a single process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "compare_result_" + ("" if rank is None else f"rank{rank}_") + time
    written = []
    for kind in formats:
        path = folder / f"{stem}.{kind}"
        (sheet.write_xlsx if kind == "xlsx" else sheet.write_csv)(table, mode, path)
        written.append(path)
    return tuple(written)


@dataclass(frozen=True, slots=True)
class Compared:
    """The table of one rank and what is known about it."""

    table: pa.Table
    mode: Mode
    matching: match.Matching
    unmatched: int
    partial: bool
    notes: tuple[str, ...]
    differs: npt.NDArray[np.bool_]
    apart: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None


def _compared(
    target_folder: RankFolder,
    bench_folder: RankFolder,
    tolerance: float | None,
    options: match.Options,
    *,
    by_statistics: bool = False,
) -> Compared:
    target = _read_side("target", target_folder)
    bench = _read_side("bench", bench_folder)
    mode, notes = mode_of(target, bench)
    if mode is Mode.STRUCTURE:
        target, bench = read.names_only(target), read.names_only(bench)
    if by_statistics and mode is not Mode.STRUCTURE and has_statistics(target) and has_statistics(bench):
        mode = Mode.STATISTICS
    if target.has_checksums != bench.has_checksums and mode is Mode.STATISTICS:
        for word, side in (("target", target), ("bench", bench)):
            if side.has_checksums and not has_statistics(side):
                raise NothingUsable(
                    f"the {word}'s dump holds checksums only (summary mode xor), and the other one has none",
                    hint="Record both runs with one --probe-summary-mode.",
                )
    matching = match.match(target, bench, options)
    values = _stored(target, bench, matching, target_folder, bench_folder) if mode is Mode.TENSOR else None
    table, differs, said = tabulate.table_of(target, bench, matching, mode, values)
    table, differs = _with_placements(target, bench, matching, table, differs)
    table, differs = _with_changed_gradients(target, bench, table, differs)
    more = [*_divided_note(target, bench, matching), *(values.notes if values is not None else ())]
    return Compared(
        table=_with_excess(table, mode, tolerance, differs, values),
        mode=mode,
        matching=matching,
        unmatched=pc.sum(pc.equal(table[columns.BENCH_NAME], "N/A")).as_py() or 0,
        partial=target.partial or bench.partial,
        notes=(*notes, *matching.notes, *said, *_unmatched_notes(target, matching, table), *more),
        differs=differs,
        apart=(values.off, values.worst) if values is not None else None,
    )


def _with_placements(
    target: RankDump,
    bench: RankDump,
    matching: match.Matching,
    table: pa.Table,
    differs: npt.NDArray[np.bool_],
) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
    """The table with a column of its DTensors' placements, and rows that are divided in other ways as differing."""
    places = pa.array(matching.bench_row, mask=matching.bench_row < 0)
    placed = placement.column(
        coded.one(target.items["placement"].combine_chunks()),
        coded.one(bench.items["placement"].combine_chunks().take(places)),
    )
    if placed is None:
        return table, differs
    return table.append_column(placement.COLUMN, placed[0]), differs | placed[1]


def _with_changed_gradients(
    target: RankDump, bench: RankDump, table: pa.Table, differs: npt.NDArray[np.bool_]
) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
    """The table with the reasons of `applied`, and its rows as differing."""
    changed = applied.changed_on_one_side(target, bench) if target.framework == bench.framework else {}
    if not changed:
        return table, differs
    differs = differs.copy()
    differs[list(changed)] = True
    reasons = table[columns.OUR_REASON].to_pylist()
    for row, reason in changed.items():
        reasons[row] = reason
    at = table.schema.get_field_index(columns.OUR_REASON)
    return table.set_column(at, columns.OUR_REASON, pa.array(reasons, pa.string())), differs


def _divided_note(target: RankDump, bench: RankDump, matching: match.Matching) -> list[str]:
    paired = np.flatnonzero(matching.bench_row >= 0)
    own, other = target.items["placement"].combine_chunks(), bench.items["placement"].combine_chunks()
    count = placement.divided_otherwise(own.take(pa.array(paired)), other.take(pa.array(matching.bench_row[paired])))
    if not count:
        return []
    return [f"{count} items are divided among ranks in another way than the bench's: --layout auto joins their parts"]


def has_statistics(side: RankDump) -> bool:
    """True where a tensor of the dump has a maximum (integers have no norm): with summary mode xor none has."""
    plain = pc.starts_with(side.items["dtype"].cast(pa.string()), "<class")
    return bool(pc.any(pc.and_not(side.items["max"].is_valid(), plain)).as_py())


def _by_noise(
    found: Compared,
    target: RankFolder,
    benches: tuple[RankFolder, RankFolder | None],
    options: match.Options,
    policy: noise.Policy,
    step: int | None,
) -> Compared:
    """The same comparison judged by `noise`, against what the benches differ by where there are two."""
    bench, second = benches
    spread, notes = None, [*found.notes, *noise.notes_on(found.table, policy.thresholds)]
    if second is not None:
        between = _compared(bench, second, None, options, by_statistics=True)
        spread = noise.judged(between.table, between.mode, policy, step=step, differs=between.differs)
        if odd := noise.unjudged(spread):
            notes.append(f"{odd} items in which the trusted runs differ beyond all measure are not judged")
    if found.mode is Mode.MD5:
        found = _compared(target, bench, None, options, by_statistics=True)
        if found.mode is Mode.STATISTICS:
            notes.append("checksums cannot tell noise: compared by the statistics beside them")
    table = noise.judged(
        found.table.drop_columns([divergence.EXCESS]),
        found.mode,
        policy,
        step=step,
        differs=found.differs,
        apart=found.apart,
        spread=spread,
    )
    return replace(found, table=table, notes=tuple(notes))


def _read_side(side: str, folder: RankFolder) -> RankDump:
    try:
        return read.read(folder)
    except InputError as error:
        raise type(error)(f"{side} {folder.path}: {error.what}", hint=error.hint) from error


def mode_of(target: RankDump, bench: RankDump) -> tuple[Mode, list[str]]:
    """The best mode that both dumps have, and notes on what was left unused."""
    notes = [*(f"target: {note}" for note in target.notes), *(f"bench: {note}" for note in bench.notes)]
    if "structure" in (target.task, bench.task):
        notes.append("one dump holds names only (task structure): names were compared, and no values")
        return Mode.STRUCTURE, notes
    if target.has_checksums and bench.has_checksums and target.task == bench.task == "statistics":
        return Mode.MD5, notes
    if target.has_checksums != bench.has_checksums:
        with_them = "target" if target.has_checksums else "bench"
        notes.append(f"only the {with_them} has checksums: compared by statistics")
    if target.task == bench.task == "tensor":
        return Mode.TENSOR, notes
    if "tensor" in (target.task, bench.task):
        with_them = "target" if target.task == "tensor" else "bench"
        notes.append(f"only the {with_them} has stored tensor values: compared by statistics")
    return Mode.STATISTICS, notes


def _stored(
    target: RankDump, bench: RankDump, matching: match.Matching, target_folder: RankFolder, bench_folder: RankFolder
) -> stored.StoredMetrics:
    """Metrics of the stored values of all matched rows whose dtypes may stand opposite each other."""
    places = pa.array(matching.bench_row, mask=matching.bench_row < 0)
    own = coded.codes(target.items["dtype"].combine_chunks())
    other = coded.codes(bench.items["dtype"].combine_chunks().take(places))
    fits = (matching.bench_row >= 0) & coded.pairwise(own, other, dtypes.comparable)
    return stored.metrics(
        target_folder.tensors,
        bench_folder.tensors,
        target.items["data_name"].combine_chunks(),
        bench.items["data_name"].combine_chunks().take(places),
        fits,
    )


def _unmatched_notes(target: RankDump, matching: match.Matching, table: pa.Table) -> list[str]:
    notes = []
    lone = matching.bench_row < 0
    odd = pc.equal(table[columns.BENCH_NAME], "N/A").to_numpy() & ~lone
    names, total = target.items["name"], target.items.num_rows
    for rows, what in ((lone, "have no counterpart"), (odd, "stand opposite a value of another type")):
        if rows.any():
            first = names[int(np.flatnonzero(rows)[0])].as_py()
            notes.append(f"{int(rows.sum())} of the target's {total} items {what}, from {first}")
    if matching.bench_only:
        notes.append(f"{len(matching.bench_only)} ops are in the bench only, from {matching.bench_only[0]}")
    if matching.lonely:
        first = matching.lonely[0].sentence()
        notes.append(f"{len(matching.lonely)} ops without a counterpart are in unmatched_*.csv: {first}")
    return notes


def _with_excess(
    table: pa.Table,
    mode: Mode,
    tolerance: float | None,
    differs: npt.NDArray[np.bool_],
    stored_values: stored.StoredMetrics | None,
) -> pa.Table:

    apart = (stored_values.off, stored_values.worst) if stored_values is not None else None
    values = divergence.excess(table, mode, tolerance=tolerance, differs=differs, apart=apart)
    return table.append_column(divergence.EXCESS, pa.array(values, mask=np.isnan(values)))
