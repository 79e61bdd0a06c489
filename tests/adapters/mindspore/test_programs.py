"""Programs of other kinds: graph mode, whole compiled steps, Model.train, errors of the program's own, the debugger."""

from __future__ import annotations

import json
from typing import Any

import pytest

HEAD = """
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn, ops
ms.set_device("CPU")
ms.set_seed(1)
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dense(4, 4), nn.Dense(4, 1)
    def construct(self, x):
        return self.b(ops.relu(self.a(x)))
net, loss = Net(), nn.MSELoss()
optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
rng = np.random.default_rng(0)
def batch():
    return Tensor(rng.standard_normal((3, 4)).astype(np.float32)), Tensor(rng.standard_normal((3, 1)).astype(np.float32))
def forward(x, y):
    return loss(net(x), y)
step = ms.value_and_grad(forward, None, optimizer.parameters)
"""

GRAPHS = (
    HEAD
    + """
whole = nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)
whole.set_train()
for _ in range(2):
    whole(*batch())                      # PyNative: seen inside
@ms.jit
def compiled(x, y):
    value, gradients = step(x, y)
    optimizer(gradients)
    return value
for _ in range(2):
    compiled(*batch())
ms.set_context(mode=ms.GRAPH_MODE)
for _ in range(2):
    value, gradients = step(*batch())
    optimizer(gradients)
"""
)


def test_compiled_parts_are_seen_at_their_boundary(record: Any) -> None:
    found = record(GRAPHS)
    assert found.mark["lost"] == {}
    assert len(found.steps) == 6
    cells, compiled, graph = found.steps[0], found.steps[2], found.steps[4]
    assert "Cell.network._backbone.a.Dense.forward.0" in cells
    assert "Cell.network._backbone.a.Dense.parameters_grad.0" in cells
    assert [name for name in compiled if not name.startswith("Jit.compiled.0")] == []
    assert compiled["Jit.compiled.0.forward"]["output"][0]["shape"] == []
    boundary = graph["Jit.forward.0.forward"]
    assert [item["shape"] for item in boundary["input_args"]] == [[3, 4], [3, 1]]
    gradients = graph["Cell.network._backbone.a.Dense.parameters_grad.0"]
    assert set(gradients) == {"weight.applied", "weight.value", "bias.applied", "bias.value"}
    warned = [line for line in found.stderr.splitlines() if "graph mode: nothing inside" in line]
    assert len(warned) == 1


TRAINING = (
    HEAD
    + """
from mindspore import dataset as ds
from mindspore.train import Model
def rows():
    for _ in range(4):
        x, y = batch()
        yield x.asnumpy(), y.asnumpy()
data = ds.GeneratorDataset(list(rows()), ["x", "y"], shuffle=False)
Model(net, loss, optimizer).train(1, data, dataset_sink_mode=False)
"""
)


@pytest.mark.slow
def test_model_train_has_one_step_per_batch(record: Any) -> None:
    found = record(TRAINING)
    assert found.mark["lost"] == {}
    assert len(found.steps) == 4
    for data in found.steps:
        assert [name for name in data if ".a.Dense." in name] == [
            "Cell.network._backbone.a.Dense.forward.0",
            "Cell.network._backbone.a.Dense.backward.0",
            "Cell.network._backbone.a.Dense.parameters_grad.0",
        ]
    assert found.mark["unseen"] == {}


ERROR = (
    HEAD
    + """
from mindspore import mint
step(*batch())
try:
    mint.nn.functional.gelu(batch()[0]).asnumpy()      # has no kernel on the CPU
except RuntimeError as error:
    print("theirs:", str(error).splitlines()[0])
value, gradients = step(*batch())
optimizer(gradients)
mint.nn.functional.gelu(batch()[0]) + 1
"""
)


def test_the_programs_own_errors_are_raised_as_theirs(record: Any) -> None:
    found = record(ERROR, returncode=1)
    assert "theirs: The kernel GeluExt unregistered." in found.stdout
    assert "RuntimeError: The kernel GeluExt unregistered." in found.stderr
    assert found.mark["lost"] == {}


DEBUGGER = (
    """
import sys
from msprobe_launch import PrecisionDebugger, seed_all
assert "mindspore" not in sys.modules
"""
    + HEAD.replace(
        "step = ms",
        """
seed_all(7)
debugger = PrecisionDebugger(dump_path="run", level="mix")
def forward(x, y):
    out = net(x)
    debugger.save(out, "logits")
    return loss(out, y)
step = ms""",
    )
    + """
for number in range(2):
    debugger.start(net)
    value, gradients = step(*batch())
    debugger.save({"loss": value}, "result", save_backward=False)
    debugger.stop()
    optimizer(gradients)
    debugger.step()
"""
)


@pytest.mark.slow
def test_the_script_in_control(run_mindspore: Any, tmp_path: Any) -> None:
    script = tmp_path / "program.py"
    script.write_text(DEBUGGER)
    done = run_mindspore([script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = next((tmp_path / "run" / "step1").iterdir())
    data = json.loads((folder / "dump.json").read_text())["data"]
    assert "Cell.a.Dense.forward.0" in data
    assert "Cell.a.Dense.backward.0" in data
    debug = json.loads((folder / "debug.json").read_text())["data"]
    assert set(debug) == {"logits.0.debug", "logits_grad.0.debug", "result.0.debug"}
    assert debug["logits.0.debug"]["shape"] == debug["logits_grad.0.debug"]["shape"] == [3, 1]
    assert set(debug["result.0.debug"]) == {"loss"}


BACKWARD_ORDER = """
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn, ops
ms.set_device("CPU")
ms.set_seed(0)
class Loss(nn.Cell):
    def construct(self, out, labels):
        return ops.nll_loss(ops.log_softmax(out, -1), labels)
class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(4, 4)
    def construct(self, x, mask):
        return x + ops.tanh(self.fc(x)) * (1 - mask)
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(7, 4), nn.CellList([Block(), Block()]), nn.Dense(4, 7)
    def construct(self, ids, mask):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)
net, loss = Net(), Loss()
optimizer = nn.SGD(net.trainable_params(), 0.1)
step = ms.value_and_grad(lambda ids, mask, y: loss(net(ids, mask), y), None, optimizer.parameters)
ids, mask, y = (Tensor(np.arange(3) % 7, ms.int32), Tensor(np.eye(3, 4), ms.float32), Tensor([1, 2, 3], ms.int32))
optimizer(step(ids, mask, y)[1])
"""


def test_backward_records_come_in_the_order_of_the_backward(record: Any) -> None:
    """Also where an input gets no gradient: labels, ids, and a mask that has operations of its own."""
    found = record(BACKWARD_ORDER, "L0")
    assert found.mark["lost"] == {}
    cells = [name.split(".")[1:-2] for name in found.steps[0] if name.endswith(".backward.0")]
    order = [".".join(cell) for cell in cells]
    assert order == [
        *("Loss.Loss", "head.Dense", "blocks.1.fc.Dense", "blocks.1.Block"),
        *("blocks.0.fc.Dense", "blocks.0.Block", "emb.Embedding"),
    ]
