"""How a DTensor is divided, in words. Its recorded statistics and values are those of this rank's part, which stand
opposite the same rank's part in the bench; the words say which part of what that is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import numpy.typing as npt

COLUMN = "placement"
"""Column of a partition whose dump holds DTensors: their placement, both sides' where they differ; null for others."""

AGAINST = " against "


def words(recorded: str) -> str:
    """`Shard(0) of [8, 4]` for what the `placement` column of a dump's items holds; a mesh of several dimensions has a
    placement for each (`Shard(0), Replicate of [8, 4]`)."""
    _, placements, shape = json.loads(recorded)
    told = ", ".join(_one(placement) for placement in placements)
    return told if shape is None else f"{told} of {shape}"


def _one(placement: Any) -> str:
    """`Shard(0)` for `{"Shard": {"dim": 0}}`."""
    if not isinstance(placement, dict) or len(placement) != 1:
        return str(placement)
    ((kind, details),) = placement.items()
    values = details.values() if isinstance(details, dict) else [details]
    inside = ", ".join(str(value) for value in values)
    return f"{kind}({inside})" if inside else str(kind)


def divided_otherwise(target: pa.Array, bench: pa.Array) -> int:
    """Rows that are divided in other ways on the two sides, or on one of them only. Arguments as `column`'s."""
    if target.null_count == len(target) and bench.null_count == len(bench):
        return 0
    sides = [pc.fill_null(side.cast(pa.string()), "") for side in (target, bench)]
    pairs = pc.binary_join_element_wise(*sides, "\0").value_counts().to_pylist()
    return sum(
        pair["counts"]
        for pair in pairs
        if len({words(side) if side else "" for side in pair["values"].split("\0")}) > 1
    )


def column(target: pa.Array, bench: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_]] | None:
    """(COLUMN, rows that are divided in another way on the two sides); None where the target holds no DTensor.

    `target` and `bench` are the recorded placements of each row, null for none. Which ranks form the mesh is no
    difference: two runs may have been given other ones.
    """
    if target.null_count == len(target):
        return None
    pairs = pc.binary_join_element_wise(
        pc.fill_null(target.cast(pa.string()), ""), pc.fill_null(bench.cast(pa.string()), ""), "\0"
    ).dictionary_encode()
    told: list[str | None] = []
    for pair in pairs.dictionary.to_pylist():
        own, _, other = pair.partition("\0")
        both = [words(side) for side in (own, other) if side]
        told.append(None if not own else AGAINST.join(dict.fromkeys(both)))
    differs = np.array([text is not None and AGAINST in text for text in told], bool)
    codes = pairs.indices.to_numpy(zero_copy_only=False)
    return pa.array(told, pa.string()).take(pairs.indices), differs[codes]
