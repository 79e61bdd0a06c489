"""Small inputs of the aggregator, made by hand: compare results and dumps of two or three ops."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aggregator.columns import Mode

Cells = Mapping[str, str]
ResultCsv = Callable[..., Path]
WriteDump = Callable[..., Path]


def row(name: str, npu: float = 1.0, bench: float | None = 1.0, **cells: str) -> dict[str, str]:
    """A statistics row whose four statistics are one value; `bench` None for an unmatched one."""
    out = dict.fromkeys(Mode.STATISTICS.header, "N/A")
    out |= {"NPU Name": name, "NPU Dtype": "torch.float32", "NPU Tensor Shape": "[1]", "Result": "pass"}
    out |= {key: repr(npu) for key in Mode.STATISTICS.statistics[:4]} | {"Err_message": "[]"}
    if bench is not None:
        out |= {"Bench Name": name, "Bench Dtype": "torch.float32", "Bench Tensor Shape": "[1]"}
        out |= {key: repr(bench) for key in Mode.STATISTICS.statistics[4:]}
        out |= {key: repr(npu - bench) for key in Mode.STATISTICS.metrics[:4]}
        percent = "0" if npu == bench else f"{abs((npu - bench) / bench) * 100}%"
        out |= dict.fromkeys(Mode.STATISTICS.metrics[4:], percent) | {"Requires_grad Consistent": "True"}
    return out | cells


@pytest.fixture
def make_row() -> Callable[..., dict[str, str]]:
    return row


@pytest.fixture
def result_csv() -> ResultCsv:
    """Write rows as a compare result and return its path."""

    def write(path: Path, rows: Sequence[Cells], header: Sequence[str] = Mode.STATISTICS.header) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, header, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def tensor(value: float, low: float | None = None) -> dict[str, Any]:
    """A recorded float32 tensor of one element's statistics."""
    least = value if low is None else low
    return {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [1],
        "Max": value, "Min": least, "Mean": value, "Norm": abs(value), "requires_grad": False,
    }  # fmt: skip


@pytest.fixture
def make_tensor() -> Callable[..., dict[str, Any]]:
    return tensor


@pytest.fixture
def write_dump() -> WriteDump:
    """Write a rank folder with the given ops and return it."""

    def write(folder: Path, ops: Mapping[str, Any], parents: Mapping[str, str | None] | None = None) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
        (folder / "dump.json").write_text(json.dumps({**head, "data": ops}, indent=1))
        stack = {"0": [list(ops), ["File /job/train.py, line 7, in step, \n y = model(x)"]]}
        (folder / "stack.json").write_text(json.dumps(stack))
        (folder / "construct.json").write_text(json.dumps(dict.fromkeys(ops) | dict(parents or {})))
        return folder

    return write
