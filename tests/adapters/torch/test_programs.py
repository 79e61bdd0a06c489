"""What is recorded of the things programs do: custom functions, compiled parts, gradients as applied, stacks."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import dataclasses, torch
from torch import nn

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x ** 2

@dataclasses.dataclass
class Out:
    logits: torch.Tensor

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return Out(self.fc(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Head()
        self.part = torch.compile(nn.Linear(4, 4), backend="aot_eager")
    def forward(self, x):
        return self.head(Cube.apply(self.part(self.stack(x))))

@torch.compile(backend="aot_eager")
def objective(x):
    return (x.sin() ** 2).sum()

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    out = net(torch.ones(2, 4))
    x = torch.ones(2, 4, requires_grad=True)
    assert type(out) is Out
    (slope,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
    (objective(out.logits) + slope.square().sum()).backward()
    nn.utils.clip_grad_norm_(net.head.parameters(), 1e-3)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def recorded(record: Any) -> Any:
    found = record(PROGRAM)
    assert found.mark["lost"] == {}
    assert len(found.steps) == 2
    return found


def test_a_custom_function_is_an_op_in_both_directions(recorded: Any) -> None:
    step = recorded.steps[1]
    assert step["Function.Cube.0.forward"]["input_args"][0]["shape"] == [2, 4]
    assert step["Function.Cube.0.backward"]["output"][0]["shape"] == [2, 4]
    assert recorded.construct(1)["Function.Cube.0.forward"] is None  # called by the outermost module


def test_a_double_backward_is_no_recomputation(recorded: Any) -> None:
    assert not [name for name, op in recorded.steps[1].items() if op.get("is_recompute")]


def test_a_dataclass_output_has_a_backward(recorded: Any) -> None:
    step = recorded.steps[1]
    assert set(step["Module.head.Head.forward.0"]["output"][0]) == {"logits"}
    assert step["Module.head.Head.backward.0"]["input"][0]["shape"] == [2, 4]


def test_compiled_parts_are_recorded_at_their_boundary_and_named(recorded: Any) -> None:
    step = recorded.steps[1]
    assert step["Module.part.Linear.forward.0"]["output"][0]["shape"] == [2, 4]
    assert step["Compiled.objective.0.forward"]["output"][0]["shape"] == []
    assert step["Compiled.objective.0.backward"]["output"][0]["shape"] == [2, 4]
    assert not [name for name in step if name.startswith(("Aten.", "Tensor.sin", "Torch.sin")) or "GraphModule" in name]
    assert recorded.mark["unseen"]["inside of Module.part.Linear: not observable (compiled)"] == 2
    assert recorded.mark["unseen"]["inside of Compiled.objective: not observable (compiled)"] == 2


def test_gradients_as_applied_stand_beside_the_local_ones_where_they_differ(recorded: Any) -> None:
    step = recorded.steps[1]
    grads = {
        f"{op}.{name}": items[0]["Norm"]
        for op, gradients in step.items()
        if ".parameters_grad." in op
        for name, items in gradients.items()
    }
    applied = {name: norm for name, norm in grads.items() if name.endswith(".applied")}
    clipped = [norm for name, norm in applied.items() if name.startswith("Module.head.fc.Linear.")]
    assert len(clipped) == 2  # weight and bias
    assert max(clipped) <= 1e-3 < grads["Module.head.fc.Linear.parameters_grad.0.weight"]
    assert not [name for name in applied if ".stack." in name]  # nobody changed those


def test_stacks_fold_the_framework_and_keep_every_frame_of_the_user(recorded: Any) -> None:
    frames = recorded.stacks(1)["Functional.linear.0.forward"]
    own = [frame.split(", ")[1:3] for frame in frames if "program.py" in frame.split(",")[0]]
    assert [where for _, where in own] == ["in forward", "in <module>"]
    inside = [frame for frame in frames if "/torch/" in frame.split(",")[0]]
    assert len(inside) == 1  # Linear.forward; Sequential's and the plumbing between are folded
    assert "linear.py" in inside[0]
