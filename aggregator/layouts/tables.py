"""The partition of a combined rank: what its rows show, and the words on how they were put together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import columns, divergence
from aggregator.layouts import decide, pairing, stages
from aggregator.layouts.combine import Part, Vocabulary
from aggregator.layouts.decide import Decisions, Kind
from aggregator.layouts.gather import Side
from aggregator.layouts.judge import Judged

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

    Flags = npt.NDArray[np.bool_]
    Codes = npt.NDArray[np.int64]

LAYOUT, FINDING = columns.LAYOUT, columns.OUR_REASON


def with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


def as_dump(side: Side, part: Part, vocabulary: Vocabulary, names: Sequence[str] | None) -> RankDump:
    """The side as the dump of one rank that held the whole. `names` are its ops' names in the other side's words."""
    dump = side.skeleton
    items = dump.items
    for i, name in enumerate(("max", "min", "mean", "norm")):
        items = with_column(items, name, pa.array(part.numbers[i], mask=~part.is_number[i]))
        items = with_column(items, f"{name}:text", vocabulary.column(part.texts[i]))
    items = with_column(items, "shape", vocabulary.column(part.shapes))
    dump = replace(dump, items=items.combine_chunks(), has_checksums=False)
    if names is None:
        return dump
    # Of several stages: each numbers its calls from 0, so the bench's names are shown where there are some.
    own: list[str] = dump.ops["name"].to_pylist()
    shown = [new if pairing.is_matched(new) else old for new, old in zip(names, own, strict=True)]
    return stages.with_names(replace(side, skeleton=dump), own, shown).skeleton


def without_blame(table: pa.Table, target: Side, bench_row: Codes, *, odd: Part) -> pa.Table:
    """A call that the bench lacks is to blame for what follows only where not all ranks make it.

    The others belong to the layout: they stand before every divided layer.
    """
    values = table[divergence.EXCESS].to_numpy().copy()
    finite = ~(odd.is_number[0] & ~np.isfinite(odd.numbers[0]))
    there = np.logical_and.reduce([column.there for row in target.own for column in row])
    alone = np.isposinf(values) & (bench_row < 0) & finite & there
    if not alone.any():
        return table
    values[alone] = np.nan
    return with_column(table, divergence.EXCESS, pa.array(values, mask=np.isnan(values)))


def filled(table: pa.Table, right: RankDump, bench_row: Codes, comparable: Codes) -> pa.Table:
    """Names, dtypes and shapes of the bench also where a row is not compared."""
    rows = (bench_row >= 0) & (comparable < 0)
    if not rows.any():
        return table
    places = pa.array(bench_row, mask=bench_row < 0)
    for name, source in (
        (columns.BENCH_NAME, "name"),
        ("Bench Dtype", "dtype"),
        ("Bench Tensor Shape", "shape"),
        ("Bench Requires_grad", "grad"),
    ):
        theirs = right.items[source].combine_chunks().take(places).cast(pa.string())
        shown = table[name].combine_chunks() if isinstance(table[name], pa.ChunkedArray) else table[name]
        table = with_column(table, name, pc.if_else(pa.array(rows), theirs, shown))
    return table


def told(
    table: pa.Table,
    target: Side,
    bench: Side,
    own: Decisions,
    other: Decisions,
    bench_row: Codes,
    judged: Judged,
) -> pa.Table:
    """The layout and finding columns, and the same in Err_message."""
    found = bench_row >= 0
    at = np.where(found, bench_row, 0)
    mine = _words(target, own, judged.target_sums)
    theirs = _words(bench, other, judged.bench_sums).take(pa.array(at))
    single = bench.layout.tp == 1 and len(bench.own) == 1
    shown = mine
    if not single:
        shown = pc.if_else(pa.array(found), pc.binary_join_element_wise(mine, theirs, "; bench "), mine)
    reasons = pa.array([judged.whys.get(code) for code in range(max(judged.whys) + 1)], pa.string())
    why = reasons.take(pa.array(judged.why, mask=judged.why == 0))
    findings = pa.array([None, *judged.findings[1:]], pa.string()).take(pa.array(judged.finding_codes))
    layout = pc.if_else(why.is_valid(), pc.binary_join_element_wise(shown, pc.fill_null(why, ""), "; "), shown)
    with_finding = pc.binary_join_element_wise(layout, pc.fill_null(findings, ""), "; ")
    message = _added(table[columns.ERR_MESSAGE], pc.if_else(findings.is_valid(), with_finding, layout))
    table = with_column(table, columns.ERR_MESSAGE, message)
    table = with_column(table, FINDING, pc.coalesce(findings, table[FINDING].combine_chunks()))
    return table.append_column(LAYOUT, layout)


def _added(messages: pa.ChunkedArray, texts: pa.Array) -> pa.Array:
    """Err_message cells, which are texts of lists, with one text more in each."""
    known = messages.combine_chunks().cast(pa.string()).dictionary_encode()
    more = texts.dictionary_encode()
    codes = known.indices.to_numpy(zero_copy_only=False) * len(more.dictionary) + more.indices.to_numpy(
        zero_copy_only=False
    )
    unique, place = np.unique(codes, return_inverse=True)
    made = []
    for code in unique.tolist():
        cell = known.dictionary[code // len(more.dictionary)].as_py()
        text = json.dumps(more.dictionary[code % len(more.dictionary)].as_py())
        inside = cell.strip()[1:-1] if cell.strip().startswith("[") else ""
        made.append(f"[{inside}{', ' if inside else ''}{text}]")
    return pa.array(made, pa.string()).take(pa.array(place.reshape(-1)))


def _words(side: Side, decisions: Decisions, sums: Flags) -> pa.Array:
    """For each row which ranks were put together and how."""
    stages_ = side.layout.pp
    codes = (decisions.codes * stages_ + side.stage) * 2 + sums
    unique, place = np.unique(codes, return_inverse=True)
    texts = []
    for code in unique.tolist():
        verdict = decisions.verdicts[code // 2 // stages_]
        stage = code // 2 % stages_
        shared = verdict.dp_dim is not None and len(side.columns) > 1
        ranks = [column.ranks[stage] for row in (side.columns if shared else side.own) for column in row]
        before = f"stage {stage}, " if stages_ > 1 else ""
        if code % 2 and verdict.kind is Kind.SAME:
            verdict = replace(verdict, kind=Kind.PARTIAL)
        text = before + decide.words(verdict, ranks)
        if shared:
            text += f", data parallel shards joined along dimension {verdict.dp_dim}"
        texts.append(text)
    return pa.array(texts, pa.string()).take(pa.array(place.reshape(-1)))
