"""Tasks and summary modes of the MindSpore adapter: what is in the files, compared with the tensors themselves."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import numpy as np
import mindspore as ms
from mindspore import Tensor, mint, nn, ops
ms.set_device("CPU")
ms.set_seed(0)
net = nn.SequentialCell(nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 2))
optimizer = nn.SGD(net.trainable_params(), 0.1)
def forward(x):
    y = ops.mul(x, 2.0)
    kept = ops.add(x, 1.0).astype(ms.bfloat16)
    x.add_(100)          # what was saved of x stays as it was
    return net(y).sum() + kept.astype(ms.float32).sum()
step = ms.value_and_grad(forward, None, optimizer.parameters)
for _ in range(2):
    x = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    loss, gradients = step(x)
    np.save(f"gradient{_}.npy", gradients[0].asnumpy())
    optimizer(gradients)
"""


def dump(found: Any) -> tuple[dict[str, Any], Path]:
    folder = found.run_dir / "step1" / "rank0"
    whole = json.loads((folder / "dump.json").read_text())
    assert found.mark["lost"] == {}
    assert whole["framework"] == "mindspore"
    return whole, folder


def test_a_step_that_is_not_recorded_is_not_looked_at(record: Any) -> None:
    """A loss around cells is no cell: what is called inside `value_and_grad` must know of the step all the same."""
    found = record(PROGRAM.replace("range(2)", "range(4)"), task="tensor", steps="2")
    assert sorted(path.name for path in found.run_dir.glob("step*")) == ["step2"]
    assert found.mark["steps"] == [2]


def test_values_and_checksums_are_of_the_tensors_as_they_were(record: Any) -> None:
    found = record(PROGRAM, task="tensor", summary_mode="md5")
    whole, folder = dump(found)
    data = whole["data"]
    assert whole["task"] == "tensor"
    assert whole["dump_data_dir"] == str(folder / "dump_tensor_data")
    item = data["Functional.mul.0.forward"]["input_args"][0]
    assert item["data_name"] == "Functional.mul.0.forward.input.0.npy"
    saved = np.load(folder / "dump_tensor_data" / item["data_name"])
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert saved.tolist() == expected.tolist()
    assert item["md5"] == f"{zlib.crc32(expected.tobytes()):08x}"
    narrow = data["Tensor.astype.0.forward"]["output"][0]
    assert narrow["dtype"] == "BFloat16"
    assert np.load(folder / "dump_tensor_data" / narrow["data_name"]).tolist() == (expected + 1).tolist()
    weight = data["Cell.0.Dense.parameters_grad.0"]["weight"][0]
    gradient = np.load(found.run_dir.parent / "gradient1.npy")
    assert np.array_equal(np.load(folder / "dump_tensor_data" / weight["data_name"]), gradient)
    assert not list((folder / "dump_tensor_data").glob(".*"))


@pytest.mark.parametrize("summary_mode", ["statistics", "xor"])
@pytest.mark.parametrize("call", ["optimizer(gradients)", "optimizer(gradients=gradients)"])
def test_a_gradient_that_was_changed_is_recorded_as_applied(record: Any, summary_mode: str, call: str) -> None:
    changed = PROGRAM.replace(
        "    optimizer(gradients)", f"    gradients = tuple(g * 0.5 for g in gradients)\n    {call}"
    )
    whole, _ = dump(record(changed, summary_mode=summary_mode))
    assert "weight.applied" in whole["data"]["Cell.0.Dense.parameters_grad.1"]
    whole, _ = dump(record(PROGRAM.replace("sum() + kept", "log().sum() + kept"), summary_mode=summary_mode))  # NaN
    assert "Cell.0.Dense.parameters_grad.1" not in whole["data"]


def test_structure_has_names_and_xor_a_checksum_only(record: Any) -> None:
    whole, folder = dump(record(PROGRAM, task="structure"))
    assert whole["data"]["Cell.0.Dense.forward.0"] == {"input_args": [], "input_kwargs": {}, "output": []}
    assert list(whole["data"]) == list(dump(record(PROGRAM))[0]["data"])
    assert not (folder / "dump_tensor_data").exists()
    whole, _ = dump(record(PROGRAM, "L1", summary_mode="xor", list=["Functional.mul"]))
    assert {name.rpartition(".")[0] for name in whole["data"]} == {"Functional.mul.0"}
    item = whole["data"]["Functional.mul.0.forward"]["input_args"][0]
    words = np.arange(6, dtype=np.float32).view(np.uint64)
    assert item["md5"] == f"0x{int(np.bitwise_xor.reduce(words)):016x}"
    assert "Max" not in item
