"""One rank of one step: read both dumps, match, measure, judge, find the first divergence.

A rank that cannot be compared is a RankFailure, a value; no error of an input leaves this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aggregator import (
    columns,
    divergence,
    dtypes,
    lonely,
    match,
    metrics,
    noise,
    placement,
    read,
    sheet,
    stored,
    verdict,
)
from aggregator.columns import BENCH_STATISTICS, DIFFERENCES, NPU_STATISTICS, RELATIVE_ERRORS, TEXT_SUFFIX, Mode
from aggregator.items import NO_CHECKSUM
from aggregator.model import RankComparison, RankFailure
from msprobe_launch.errors import InputError
from msprobe_launch.records.layout import RankFolder
from msprobe_launch.records.names import Role

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
    if by_statistics and mode is not Mode.STRUCTURE and _has_statistics(target) and _has_statistics(bench):
        mode = Mode.STATISTICS
    matching = match.match(target, bench, options)
    values = _stored(target, bench, matching, target_folder, bench_folder) if mode is Mode.TENSOR else None
    table, differs = table_of(target, bench, matching, mode, values)
    table, differs = _with_placements(target, bench, matching, table, differs)
    return Compared(
        table=_with_excess(table, mode, tolerance, differs, values),
        mode=mode,
        matching=matching,
        unmatched=pc.sum(pc.equal(table[columns.BENCH_NAME], "N/A")).as_py() or 0,
        partial=target.partial or bench.partial,
        notes=(*notes, *matching.notes, *_unmatched_notes(target, matching, table), *(values.notes if values else ())),
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
        _one(target.items["placement"].combine_chunks()), _one(bench.items["placement"].combine_chunks().take(places))
    )
    if placed is None:
        return table, differs
    return table.append_column(placement.COLUMN, placed[0]), differs | placed[1]


def _has_statistics(side: RankDump) -> bool:
    return bool(pc.any(side.items["norm"].is_valid()).as_py())


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
    spread, notes = None, list(found.notes)
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
    dtypes = _codes(target.items["dtype"].combine_chunks())
    other = _codes(bench.items["dtype"].combine_chunks().take(places))
    fits = (matching.bench_row >= 0) & _pairwise(dtypes, other, comparable)
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


# -- the table


def table_of(
    target: RankDump, bench: RankDump, matching: match.Matching, mode: Mode, values: stored.StoredMetrics | None
) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
    """(the partition without its excess, rows that differ by what the table does not show)."""

    items = target.items.combine_chunks()
    places = pa.array(matching.bench_row, mask=matching.bench_row < 0)
    other = bench.items.combine_chunks().take(places).combine_chunks()
    found = matching.bench_row >= 0
    dtype, other_dtype = _codes(items["dtype"]), _codes(other["dtype"])
    fits = _pairwise(dtype, other_dtype, comparable) if mode is not Mode.STRUCTURE else np.ones(len(found), bool)
    matched = found & fits
    differs = found & ~fits
    hidden, other_hidden = _joined(items["value"], other["value"])[:2]
    differs |= matched & (hidden != other_hidden)
    if target.framework == bench.framework:  # two frameworks' functions have other arguments
        differs |= _arguments_missing(items, bench.items, matching.bench_row)
    blank = pa.array(~matched)

    def shown(column: Any) -> pa.Array:
        """A column of the bench's side: `N/A` where no item stands opposite."""
        return pc.if_else(blank, "N/A", _one(column).cast(pa.string()))

    grad, other_grad = _one(items["grad"]).cast(pa.string()), shown(other["grad"])
    out: dict[str, pa.Array] = {
        columns.NPU_NAME: _one(items["name"]),
        columns.BENCH_NAME: shown(other["name"]),
        "NPU Dtype": _one(items["dtype"]).cast(pa.string()),
        "Bench Dtype": shown(other["dtype"]),
        "NPU Tensor Shape": _one(items["shape"]).cast(pa.string()),
        "Bench Tensor Shape": shown(other["shape"]),
        "NPU Requires_grad": grad,
        "Bench Requires_grad": other_grad,
    }
    same_grad = pc.equal(grad, other_grad)
    rows = _rows(target, items, matched, out, same_grad)
    integers = items["integers"].to_numpy() & 15
    if mode is Mode.MD5:
        faults = _checksums(items, other, matched, shown, rows, out)
    elif mode in (Mode.STATISTICS, Mode.TENSOR):
        faults = _statistics(items, other, matched, rows, out, values)
        integers = integers | (np.where(matched, pc.fill_null(_one(other["integers"]), 0).to_numpy(), 0) << 4)
    else:
        faults = np.zeros(len(matched), np.int64)
    out[columns.GRAD_CONSISTENT] = pc.if_else(same_grad, "True", "False")
    out[columns.RESULT], out[columns.ERR_MESSAGE] = verdict.words(faults)
    out[columns.STACK] = _stack_cells(target, items)
    if values is not None:
        # msprobe names a row of tensor mode after its file: `kwargs.alpha`, where other modes say `input.alpha`.
        out[columns.NPU_NAME] = stored.row_names(out[columns.NPU_NAME], _one(items["data_name"]))
        out[columns.BENCH_NAME] = stored.row_names(
            out[columns.BENCH_NAME], pc.if_else(blank, pa.scalar(None, pa.string()), _one(other["data_name"]))
        )
        out[columns.DATA_NAME] = stored.data_names(_one(items["data_name"]), _one(other["data_name"]), matched)
    op_names, parents = target.ops["name"].combine_chunks(), target.ops["parent"].combine_chunks()
    op = _one(items["op"])
    out["op"] = op_names.take(op)
    out["role"] = pa.array([role.value for role in read.ROLES]).take(_one(items["role"]))
    out["parent"] = parents.take(op)
    out[sheet.INTEGERS] = pa.array(integers.astype(np.uint8))
    return pa.table(out), differs


def _arguments_missing(items: pa.Table, bench: pa.Table, bench_row: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """The last input of each op whose bench has an input more: an argument was left out (and has its default).

    Ops that have unmatched inputs of their own are passed over: those name their arguments otherwise.
    """
    op, bench_op = items["op"].to_numpy(), bench["op"].to_numpy()
    is_input = items["role"].to_numpy() == read.ROLES.index(Role.INPUT)
    rows = np.flatnonzero(bench_row >= 0)
    free = np.ones(len(bench_op), bool)
    free[bench_row[rows]] = False
    free &= bench["role"].to_numpy() == read.ROLES.index(Role.INPUT)
    found = np.zeros(len(op), bool)
    if not free.any() or not len(rows):
        return found
    counterpart = np.full(int(bench_op.max()) + 1, -1, np.int64)
    counterpart[bench_op[bench_row[rows]]] = op[rows]
    lacking = np.unique(counterpart[bench_op[free]])
    own = np.unique(op[is_input & (bench_row < 0)])
    for place in np.setdiff1d(lacking[lacking >= 0], own).tolist():
        inputs = np.flatnonzero((op == place) & is_input)
        found[inputs[-1:]] = True
    return found


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


def _rows(
    target: RankDump, items: pa.Table, matched: npt.NDArray[np.bool_], out: dict[str, pa.Array], same_grad: pa.Array
) -> verdict.Rows:

    role = items["role"].to_numpy()
    op = items["op"].to_numpy().astype("int64")
    # The second part of a name is the API of a call and the first part of a module's name; msprobe looks no further.
    names = target.ops["name"].combine_chunks()
    api = pc.struct_field(pc.extract_regex(names, r"^[^.]*\.(?P<api>[^.]*)"), "api").take(_one(items["op"]))

    def same(a: str, b: str) -> npt.NDArray[np.bool_]:
        equal: npt.NDArray[np.bool_] = pc.equal(out[a], out[b]).to_numpy(zero_copy_only=False)
        return equal

    return verdict.Rows(
        op=op,
        api=api,
        matched=matched,
        is_input=role == read.ROLES.index(Role.INPUT),
        is_parameter=role == read.ROLES.index(Role.PARAMETERS),
        is_output=role == read.ROLES.index(Role.OUTPUT),
        same_grad=same_grad.to_numpy(zero_copy_only=False),
        same_dtype=same("NPU Dtype", "Bench Dtype"),
        same_shape=same("NPU Tensor Shape", "Bench Tensor Shape"),
    )


def _checksums(
    items: pa.Table,
    other: pa.Table,
    matched: npt.NDArray[np.bool_],
    shown: Any,
    rows: verdict.Rows,
    out: dict[str, pa.Array],
) -> npt.NDArray[np.int64]:

    def checksums(side: pa.Table) -> pa.Array:
        """None has no checksum; any other value that was recorded without one has that of no bytes, as in msprobe."""
        is_none = pc.equal(_one(side["dtype"]).cast(pa.string()), "N/A")
        return pc.coalesce(_one(side["md5"]), pc.if_else(is_none, "N/A", NO_CHECKSUM))

    npu, bench = checksums(items), pc.fill_null(shown(checksums(other)), "N/A")
    out[columns.CHECKSUMS[0]], out[columns.CHECKSUMS[1]] = npu, bench
    differs = pc.not_equal(npu, bench).to_numpy(zero_copy_only=False) & matched
    has = pc.not_equal(npu, "N/A").to_numpy(zero_copy_only=False)
    return verdict.of_checksums(rows, differs, has)


def _statistics(
    items: pa.Table,
    other: pa.Table,
    matched: npt.NDArray[np.bool_],
    rows: verdict.Rows,
    out: dict[str, pa.Array],
    values: stored.StoredMetrics | None,
) -> npt.NDArray[np.int64]:
    """The metric and statistics columns, and the faults. With `values` the metrics are those of tensor mode."""
    equal, pairs = [], []
    for i, statistic in enumerate(read.STATISTICS):
        pair = _pair(items, other, statistic.lower(), i)
        difference, relative, same = metrics.statistics_cells(pair, matched)
        equal.append(same)
        pairs.append(pair)
        if values is None:
            for name, cells in ((DIFFERENCES[i], difference), (RELATIVE_ERRORS[i], relative)):
                out[name], out[name + TEXT_SUFFIX] = cells.arrays()
    norm_ratio = metrics.ratio(relative)
    if values is not None:
        out.update(values.columns)
    for i, pair in enumerate(pairs):
        texts = pa.array([*pair.texts, "Nan", " inf", " -inf", "N/A"])
        for name, side, is_bench in ((NPU_STATISTICS[i], pair.target, False), (BENCH_STATISTICS[i], pair.bench, True)):
            codes = side.codes.copy()
            extra = len(pair.texts)
            codes[side.is_number & np.isnan(side.numbers)] = extra
            codes[side.is_number & np.isposinf(side.numbers)] = extra + 1
            codes[side.is_number & np.isneginf(side.numbers)] = extra + 2
            if is_bench:
                codes[~matched] = extra + 3
            plain = side.is_number & np.isfinite(side.numbers) & (matched | (not is_bench))
            out[name] = pa.array(side.numbers, mask=~plain)
            out[name + TEXT_SUFFIX] = texts.take(pa.array(codes, mask=codes < 0))

    def odd(side: str) -> npt.NDArray[np.bool_]:
        """NaN or infinite maximum or minimum; a string argument that says so counts, as it does for msprobe."""
        found = np.zeros(len(matched), bool)
        for pair in pairs[:2]:
            part: metrics.Statistic = getattr(pair, side)
            says_so = np.array([*(text in ("Nan", "inf", "-inf") for text in pair.texts), False])
            found |= np.where(part.is_number, ~np.isfinite(part.numbers), says_so[part.codes])
        return found

    is_plain = pc.starts_with(out["NPU Dtype"], "<class").to_numpy(zero_copy_only=False)
    non_finite = odd("target") & ~(odd("bench") & matched)
    # 0.0 and -0.0 show another text and a difference, but are the same value to the rule.
    both_zero = (pairs[0].target.numbers == 0.0) & (pairs[0].bench.numbers == 0.0)
    scalar_differs = is_plain & ~equal[0] & ~both_zero
    if values is not None:
        return verdict.of_tensors(rows, values.one_thousandth, values.cosine, non_finite, scalar_differs)
    return verdict.of_statistics(rows, norm_ratio, non_finite, scalar_differs)


def _pair(items: pa.Table, other: pa.Table, statistic: str, bit: int) -> metrics.Pair:

    codes, other_codes, texts = _joined(items[f"{statistic}:text"], other[f"{statistic}:text"])

    def side(table: pa.Table, text_codes: npt.NDArray[np.int64]) -> metrics.Statistic:
        numbers = _one(table[statistic])
        integers = pc.fill_null(_one(table["integers"]), 0).to_numpy()
        return metrics.Statistic(
            numbers=numbers.to_numpy(zero_copy_only=False),
            is_number=numbers.is_valid().to_numpy(zero_copy_only=False),
            codes=text_codes,
            is_integer=(integers >> bit) & 1 == 1,
        )

    return metrics.Pair(side(items, codes), side(other, other_codes), texts)


def _stack_cells(target: RankDump, items: pa.Table) -> pa.Array:
    """The stack of an op as the text of a Python list on the op's first row, `N/A` on the others."""

    op = items["op"].to_numpy()
    first = np.ones(len(op), bool)
    first[1:] = op[1:] != op[:-1]
    texts = pa.array([*(str(list(frames)) for frames in target.stacks), "N/A"], pa.string())
    none = len(target.stacks)
    stack = target.ops["stack"].to_numpy()[op]
    place = np.where(first & (stack >= 0), stack, none)
    return texts.take(pa.array(place))


# -- dtypes that msprobe puts opposite each other

_TORCH_FLOATS = frozenset({"torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"})
_MINDSPORE_FLOATS = frozenset({"Float16", "BFloat16", "Float32", "Float64"})


def comparable(dtype: str, other: str) -> bool:
    """True where two dtypes may stand opposite each other: equal, equal but for the framework (`same_dtype`), or both
    floating.

    Anything else (an int opposite a float, a tensor opposite None) leaves the row unmatched in msprobe's table; our
    findings name it all the same.
    """
    if dtype == other:
        return True
    if dtype in _TORCH_FLOATS | _MINDSPORE_FLOATS and other in _TORCH_FLOATS | _MINDSPORE_FLOATS:
        return (dtype in _TORCH_FLOATS) == (other in _TORCH_FLOATS) or (
            dtypes.canonical_dtype(dtype) == dtypes.canonical_dtype(other)
        )
    if "N/A" in (dtype, other):
        return False
    both_tensors = not dtype.startswith("<") and not other.startswith("<")
    return both_tensors and dtypes.same_dtype(dtype, other)


# -- dictionary-encoded columns of two tables


@dataclass(frozen=True, slots=True)
class _Coded:
    codes: npt.NDArray[np.int64]
    texts: list[str]


def _codes(column: Any) -> _Coded:

    array = _one(column)
    codes = pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return _Coded(codes, array.dictionary.to_pylist())


def _joined(column: Any, other: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], tuple[str, ...]]:
    """Codes of both columns in one vocabulary (-1 for null), and the vocabulary."""

    a, b = _codes(column), _codes(other)
    places: dict[str, int] = {}
    maps = [np.array([*(places.setdefault(text, len(places)) for text in side.texts), -1]) for side in (a, b)]
    return maps[0][a.codes], maps[1][b.codes], tuple(places)


def _pairwise(a: _Coded, b: _Coded, holds: Any) -> npt.NDArray[np.bool_]:
    """`holds(text, other)` row by row, asked once per distinct pair; False where one side is null."""

    width = len(b.texts) + 1
    pairs, place = np.unique(a.codes * width + b.codes + 1, return_inverse=True)
    answers: npt.NDArray[np.bool_] = np.array(
        [
            pair % width > 0 and pair >= 0 and bool(holds(a.texts[pair // width], b.texts[pair % width - 1]))
            for pair in pairs
        ],
        bool,
    )
    found: npt.NDArray[np.bool_] = answers[place.reshape(-1)]
    return found


def _one(column: Any) -> Any:
    """One Array of a column whose chunks were combined."""

    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.array([], column.type) if column.num_chunks == 0 else column.combine_chunks()
