"""The table of two matched dumps: every cell of msprobe's compare result, and what our own analysis adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import arguments, coded, columns, dtypes, match, metrics, read, sheet, stored, verdict
from aggregator.columns import BENCH_STATISTICS, DIFFERENCES, NPU_STATISTICS, RELATIVE_ERRORS, TEXT_SUFFIX, Mode
from aggregator.items import NO_CHECKSUM
from msprobe_launch.records.names import Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump


def table_of(
    target: RankDump, bench: RankDump, matching: match.Matching, mode: Mode, values: stored.StoredMetrics | None
) -> tuple[pa.Table, npt.NDArray[np.bool_], tuple[str, ...]]:
    """(the partition without its excess, rows that differ by what the table does not show, notes)."""

    items = target.items.combine_chunks()
    places = pa.array(matching.bench_row, mask=matching.bench_row < 0)
    other = bench.items.combine_chunks().take(places).combine_chunks()
    found = matching.bench_row >= 0
    dtype, other_dtype = coded.codes(items["dtype"]), coded.codes(other["dtype"])
    fits = (
        coded.pairwise(dtype, other_dtype, dtypes.comparable)
        if mode is not Mode.STRUCTURE
        else np.ones(len(found), bool)
    )
    matched = found & fits
    differs = found & ~fits
    hidden, other_hidden = coded.joined(items["value"], other["value"])[:2]
    differs |= matched & (hidden != other_hidden)
    notes: tuple[str, ...] = ()
    reasons: pa.Array = pa.nulls(len(found), pa.string())
    if target.framework == bench.framework:  # two frameworks' functions have other arguments
        alone = arguments.one_sided(target, bench, matching.bench_row)
        differs |= alone.rows
        reasons, notes = alone.reasons, (alone.note,) if alone.note else ()
    blank = pa.array(~matched)

    def shown(column: Any) -> pa.Array:
        """A column of the bench's side: `N/A` where no item stands opposite."""
        return pc.if_else(blank, "N/A", coded.one(column).cast(pa.string()))

    grad, other_grad = coded.one(items["grad"]).cast(pa.string()), shown(other["grad"])
    out: dict[str, pa.Array] = {
        columns.NPU_NAME: coded.one(items["name"]),
        columns.BENCH_NAME: shown(other["name"]),
        "NPU Dtype": coded.one(items["dtype"]).cast(pa.string()),
        "Bench Dtype": shown(other["dtype"]),
        "NPU Tensor Shape": coded.one(items["shape"]).cast(pa.string()),
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
        integers = integers | (np.where(matched, pc.fill_null(coded.one(other["integers"]), 0).to_numpy(), 0) << 4)
    else:
        faults = np.zeros(len(matched), np.int64)
    out[columns.GRAD_CONSISTENT] = pc.if_else(same_grad, "True", "False")
    out[columns.RESULT], out[columns.ERR_MESSAGE] = verdict.words(faults)
    out[columns.STACK] = _stack_cells(target, items)
    if values is not None:
        # msprobe names a row of tensor mode after its file: `kwargs.alpha`, where other modes say `input.alpha`.
        out[columns.NPU_NAME] = stored.row_names(out[columns.NPU_NAME], coded.one(items["data_name"]))
        out[columns.BENCH_NAME] = stored.row_names(
            out[columns.BENCH_NAME], pc.if_else(blank, pa.scalar(None, pa.string()), coded.one(other["data_name"]))
        )
        out[columns.DATA_NAME] = stored.data_names(
            coded.one(items["data_name"]), coded.one(other["data_name"]), matched
        )
    op_names, parents = target.ops["name"].combine_chunks(), target.ops["parent"].combine_chunks()
    op = coded.one(items["op"])
    out["op"] = op_names.take(op)
    out["role"] = pa.array([role.value for role in read.ROLES]).take(coded.one(items["role"]))
    out["parent"] = parents.take(op)
    out[sheet.INTEGERS] = pa.array(integers.astype(np.uint8))
    out[columns.OUR_REASON] = reasons
    return pa.table(out), differs, notes


def _rows(
    target: RankDump, items: pa.Table, matched: npt.NDArray[np.bool_], out: dict[str, pa.Array], same_grad: pa.Array
) -> verdict.Rows:

    role = items["role"].to_numpy()
    op = items["op"].to_numpy().astype("int64")
    # The second part of a name is the API of a call and the first part of a module's name; msprobe looks no further.
    names = target.ops["name"].combine_chunks()
    api = pc.struct_field(pc.extract_regex(names, r"^[^.]*\.(?P<api>[^.]*)"), "api").take(coded.one(items["op"]))

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
        is_none = pc.equal(coded.one(side["dtype"]).cast(pa.string()), "N/A")
        return pc.coalesce(coded.one(side["md5"]), pc.if_else(is_none, "N/A", NO_CHECKSUM))

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

    codes, other_codes, texts = coded.joined(items[f"{statistic}:text"], other[f"{statistic}:text"])

    def side(table: pa.Table, text_codes: npt.NDArray[np.int64]) -> metrics.Statistic:
        numbers = coded.one(table[statistic])
        integers = pc.fill_null(coded.one(table["integers"]), 0).to_numpy()
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
