"""Columns of tensor mode: the stored values of every matched row, compared file by file.

A pair of files is compared once, however many rows name it (views of one tensor, hard links of one file).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import tensors
from aggregator.columns import TENSOR_METRICS, TEXT_SUFFIX

if TYPE_CHECKING:
    import numpy.typing as npt

NO_FILE, NO_ROW = "-1", "N/A"
"""What `Data_name` says of a value without a file, and of a side without the row."""

_INFINITE = {math.inf: " inf", -math.inf: " -inf"}


@dataclass(frozen=True, slots=True)
class StoredMetrics:
    """The metric columns of a rank in tensor mode, row by row.

    `columns` has each of TENSOR_METRICS as partitions keep it. `one_thousandth` and `cosine` are NaN where the cell is
    no number; `off` and `worst` are as in `tensors.TensorMetrics`.
    """

    columns: dict[str, pa.Array]
    one_thousandth: npt.NDArray[np.float64]
    cosine: npt.NDArray[np.float64]
    off: npt.NDArray[np.float64]
    worst: npt.NDArray[np.float64]
    notes: tuple[str, ...]


def metrics(
    target: Path, bench: Path, names: pa.Array, bench_names: pa.Array, matched: npt.NDArray[np.bool_]
) -> StoredMetrics:
    """Compare the files of all rows; `target` and `bench` are the folders that hold them (dump_tensor_data)."""
    known: dict[tuple[Any, Any], tensors.TensorMetrics] = {}
    both = matched & names.is_valid().to_numpy(zero_copy_only=False)
    both &= bench_names.is_valid().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(both)
    chosen = pa.array(rows)
    pairs = dict(
        zip(
            rows.tolist(),
            zip(names.take(chosen).to_pylist(), bench_names.take(chosen).to_pylist(), strict=True),
            strict=True,
        )
    )

    def compared(row: int) -> tensors.TensorMetrics:
        name, bench_name = pairs[row]
        paths = _path(target, name), _path(bench, bench_name)
        key = _identity(paths[0]), _identity(paths[1])
        found = known.get(key)
        if found is None:
            found = known[key] = _compared(*paths)
        return found

    return collected(len(matched), rows, compared)


def collected(
    height: int, rows: npt.NDArray[np.int64], compared: Callable[[int], tensors.TensorMetrics]
) -> StoredMetrics:
    """The columns, of what `compared` says of each of the rows that have values on both sides."""
    values = np.full((height, len(TENSOR_METRICS)), np.nan)
    words: list[list[str | None]] = [[tensors.UNSUPPORTED] * height for _ in TENSOR_METRICS]
    off, worst = np.full(height, np.nan), np.full(height, np.nan)
    reasons: Counter[str] = Counter()
    first: dict[str, str] = {}
    for row in rows.tolist():
        found = compared(row)
        if found.reason:
            kind = found.reason.partition(":")[0] + " " + found.reason.rpartition(" is ")[2].partition(" ")[0]
            reasons[kind] += 1
            first.setdefault(kind, found.reason)
        off[row], worst[row] = found.off, found.worst
        for i, cell in enumerate(found.cells):
            if isinstance(cell, str):
                words[i][row] = cell
            elif math.isinf(cell):
                words[i][row] = _INFINITE[cell]
            else:
                words[i][row] = None
                values[row, i] = cell
    columns: dict[str, pa.Array] = {}
    for i, metric in enumerate(TENSOR_METRICS):
        column = np.ascontiguousarray(values[:, i])
        columns[metric] = pa.array(column, mask=np.isnan(column))
        columns[metric + TEXT_SUFFIX] = pa.array(words[i], pa.string())
    notes = tuple(f"values of {count} items were not compared, from {first[kind]}" for kind, count in reasons.items())
    at = TENSOR_METRICS.index
    return StoredMetrics(columns, values[:, at("One Thousandth Err Ratio")], values[:, at("Cosine")], off, worst, notes)


def _compared(target: Path | str, bench: Path | str) -> tensors.TensorMetrics:
    for side, path in (("target", target), ("bench", bench)):
        if isinstance(path, str):
            return tensors.TensorMetrics(tensors.NO_VALUES.cells, reason=f"{side}: {path!r} is no name of a file")
    return tensors.compare_files(Path(target), Path(bench))


def _path(folder: Path, name: str) -> Path | str:
    """The file of a name; the bare name where it would lead elsewhere."""
    return folder / name if name not in ("", ".", "..") and "/" not in name and "\0" not in name else name


def _identity(path: Path | str) -> Any:
    """What tells two files apart; the path itself where there is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return path
    return found.st_dev, found.st_ino


def row_names(names: pa.Array, data_names: pa.Array) -> pa.Array:
    """Names of rows, those with a file after their file, as msprobe has them."""
    stem = pc.replace_substring_regex(data_names, r"\.[^.]*$", "")
    return pc.coalesce(stem, names)


def data_names(names: pa.Array, bench_names: pa.Array, matched: npt.NDArray[np.bool_]) -> pa.Array:
    """The `Data_name` cells: the text of a Python list of both names."""
    npu = pc.fill_null(names, NO_FILE)
    bench = pc.if_else(pa.array(matched), pc.fill_null(bench_names, NO_FILE), NO_ROW)
    return pc.binary_join_element_wise("['", npu, "', '", bench, "']", "")
