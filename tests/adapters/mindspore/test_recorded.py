"""What is recorded of a MindSpore program: names, nesting, gradients in both directions, steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

PROGRAM = """
import json
import numpy as np
import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.mint.nn import functional as F

ms.set_device("CPU")
ms.set_seed(1)

class Two(nn.Cell):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Dense(4, 4), mint.nn.Linear(4, 4)
        self.scale = Parameter(Tensor(np.ones(4, np.float32)), name="scale")
    def construct(self, x, factor=1.0):
        h = ops.relu(self.f(x)) * self.scale
        return h * factor, {"side": self.g(h)}

class Cube(nn.Cell):
    def construct(self, x):
        return x ** 3
    def bprop(self, x, out, dout):
        return (dout * 3 * x * x,)

@ms.jit
def objective(x):
    return ops.sum(x * x)

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Two(), Two()])
        self.cube, self.attention = Cube(), nn.MultiheadAttention(4, 2)
    def construct(self, x):
        h, d = self.blocks[0](x, factor=0.5)
        h, d = self.blocks[1](h + d["side"] + x)
        a, _ = self.attention(h, h, h)
        return objective(self.cube(a) + F.silu(h) + d["side"].tanh())

net = Net()
optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
gradients = ms.value_and_grad(net, 0, optimizer.parameters)
rng = np.random.default_rng(0)
for step in range(2):
    net.set_train()
    x = Tensor(rng.standard_normal((3, 2, 4)).astype(np.float32))
    loss, (dx, grads) = gradients(x)
    grads = ops.clip_by_global_norm(grads, 1e-3)
    optimizer(grads)
    net.set_train(False)
    net(x)                       # evaluation between the steps: not recorded
    print(json.dumps({"loss": float(loss.asnumpy()), "dx": float(np.linalg.norm(dx.asnumpy())),
                      "first": optimizer.parameters[0].name, "clipped": float(np.linalg.norm(grads[0].asnumpy()))}))
"""


@pytest.fixture(scope="module")
def recorded(record: Any) -> Any:
    found = record(PROGRAM)
    assert found.mark["lost"] == {}
    assert len(found.steps) == 2
    return found


def norm(item: dict[str, Any]) -> float:
    return float(item["Norm"])


def test_cells_have_their_paths_and_keep_what_they_were_given(recorded: Any) -> None:
    step = recorded.steps[1]
    block = step["Cell.blocks.0.Two.forward.0"]
    assert block["input_kwargs"] == {"factor": {"type": "float", "value": 0.5}}
    assert block["output"][0]["type"] == "mindspore.Tensor"
    assert set(block["output"][1]) == {"side"}
    assert set(block["parameters"]) == {"scale"}
    assert set(step["Cell.blocks.1.g.Linear.forward.0"]["parameters"]) == {"weight", "bias"}
    assert "Cell.attention.MultiheadAttention.forward.0" in step  # it has a `__call__` of its own
    assert not [name for name in step if ".Net." in name or "Momentum" in name]


def test_outermost_apis_and_primitives_stand_in_the_cells_that_call_them(recorded: Any) -> None:
    construct = recorded.construct(1)
    assert construct["Primitive.matmul.MatMul.0.forward"] == "Cell.blocks.0.f.Dense.forward.0"
    assert construct["Functional.relu.0.forward"] == "Cell.blocks.0.Two.forward.0"
    assert construct["Cell.blocks.0.f.Dense.forward.0"] == "Cell.blocks.0.Two.forward.0"
    assert construct["Cell.blocks.0.f.Dense.backward.0"] == "Cell.blocks.0.Two.backward.0"
    assert construct["Tensor.__add__.0.forward"] is None
    assert {"MintFunctional.silu.0.forward", "Tensor.tanh.0.forward", "Functional.clip_by_global_norm.0.forward"} <= {
        *construct
    }


def test_stacks_fold_the_framework_and_keep_every_frame_of_the_user(recorded: Any) -> None:
    frames = recorded.stacks(1)["Primitive.matmul.MatMul.0.forward"]
    own = [frame.split(", ")[2].strip() for frame in frames if "program.py" in frame.split(",")[0]]
    assert own == ["in construct", "in construct", "in <module>"]
    assert "in __call__" not in "".join(frames)


def test_gradients_are_those_that_mindspore_gives(recorded: Any) -> None:
    step, said = recorded.steps[1], json.loads(recorded.stdout.splitlines()[1])
    # x goes into the first block and is added to its result: the gradient of the whole is the sum of both.
    inner = step["Cell.blocks.0.Two.backward.0"]["output"]
    assert [item["shape"] for item in inner] == [[3, 2, 4]]
    assert step["Cell.blocks.0.Two.backward.0"]["input"][0]["shape"] == [3, 2, 4]
    assert norm(step["Jit.objective.0.forward"]["output"][0]) == pytest.approx(abs(said["loss"]), rel=1e-6)
    assert step["Jit.objective.0.backward"]["input"][0]["Max"] == 1.0
    cube = step["Cell.cube.Cube.backward.0"]
    assert cube["input"][0]["shape"] == cube["output"][0]["shape"]
    added = step["Tensor.__add__.1.backward"]["output"]
    assert norm(added[1]) == norm(added[0])
    assert said["dx"] > 0


def test_parameter_gradients_as_computed_and_as_applied(recorded: Any) -> None:
    step, said = recorded.steps[1], json.loads(recorded.stdout.splitlines()[1])
    assert set(step["Cell.blocks.0.f.Dense.parameters_grad.0"]) == {"weight", "bias"}
    applied = step["Cell.blocks.0.f.Dense.parameters_grad.1"]
    assert set(applied) == {"weight.applied", "bias.applied"}
    assert said["first"] == "blocks.0.scale" or said["first"].startswith("blocks.0")
    assert max(norm(items[0]) for items in applied.values()) <= 1e-3 * 1.001
    assert step["Cell.blocks.0.f.Dense.parameters_grad.0"]["weight"][0]["Norm"] > 1e-3


def test_a_step_is_from_forward_to_forward_and_evaluation_is_left_out(recorded: Any) -> None:
    for step in recorded.steps:
        assert [name for name in step if "blocks.0.Two.forward" in name] == ["Cell.blocks.0.Two.forward.0"]
    assert recorded.mark["unseen"] == {"inside of Jit.objective: not observable (compiled)": 2}
