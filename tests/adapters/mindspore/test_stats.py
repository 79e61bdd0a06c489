"""Statistics of every dtype against numpy in float64, on the host and by the operations of a device."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

PROGRAM = """
import json, os, sys
from pathlib import Path
import numpy as np
import mindspore as ms
from mindspore import Tensor, ops
from msprobe_launch import adapters
from msprobe_launch.adapters.mindspore import runtime, stats
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.config import ProbeConfig
ms.set_device("CPU")
session = adapters.start("mindspore", ProbeConfig(run_dir=Path("run")), RankIdentity(0, 0, 1, "here", os.getpid()))
adapter = session.adapter
random = np.random.default_rng(0)
base = random.standard_normal((5, 7)) * 3
tensors = {name: Tensor(base.astype(kind)) for name, kind in {
    "float32": np.float32, "float64": np.float64, "float16": np.float16, "int8": np.int8, "int32": np.int32,
    "int64": np.int64, "uint8": np.uint8, "bool": np.bool_, "complex64": np.complex64}.items()}
tensors["bfloat16"] = Tensor(base.astype(np.float32)).astype(ms.bfloat16)
tensors["transposed"] = tensors["float32"].T
tensors["scalar"] = Tensor(np.float32(-2.5))
tensors["empty"] = Tensor(np.zeros((0, 3), np.float32))
tensors["nan"] = Tensor(np.array([1.0, np.nan], np.float32))
tensors["huge"] = Tensor(np.array([3e38, 3e38], np.float32))
out = {}
for where in ("host", "numpy", "device"):
    adapter._values._host = where != "device"
    if where == "numpy":
        stats.MEASURES.update(stats.measures({}))
    if where == "device":
        Tensor.device = "Ascend:0"
    out[where] = {}
    for name, tensor in tensors.items():
        if where == "device" and name in ("empty", "huge", "nan", "float64", "int64"):
            continue
        value = adapter.describe(tensor)
        adapter.settle()
        out[where][name] = value.statistics
expected = {}
for name, tensor in tensors.items():
    array = tensor.astype(ms.float32).asnumpy() if name == "bfloat16" else tensor.asnumpy()
    wide = np.abs(array).astype(np.float64) if name == "complex64" else array.astype(np.float64)
    if array.size:
        expected[name] = [wide.max(), wide.min(), wide.mean(), float(np.linalg.norm(wide.ravel()))]
print(json.dumps({"out": out, "expected": expected}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, run_mindspore: Any) -> Any:
    folder = tmp_path_factory.mktemp("statistics")
    script = folder / "program.py"
    script.write_text(PROGRAM)
    done = run_mindspore([script], cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("where", ["host", "numpy", "device"])
def test_statistics_of_each_dtype(said: Any, where: str) -> None:
    found = said["out"][where]
    assert len(found) >= 10
    for name, statistics in found.items():
        if name == "empty":
            assert statistics == [None] * 4
        elif name == "nan":
            assert all(math.isnan(number) for number in statistics)
        elif name == "bool":
            assert statistics == [True, True, None, None]
        else:
            high, low, mean, norm = said["expected"][name]
            assert statistics[:2] == pytest.approx([high, low], rel=1e-6), name
            assert statistics[2:] == pytest.approx([mean, norm], rel=1e-5, abs=1e-7), name


def test_narrow_and_whole_numbers_are_exact_on_the_host(said: Any) -> None:
    for name in ("bfloat16", "float16", "int8", "int64"):
        assert said["out"]["host"][name][:2] == said["expected"][name][:2]
