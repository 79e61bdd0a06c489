"""Names of modules."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch

MADE_FOR_ONE_CALL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, y):
        logits = self.fc(x)
        return nn.CrossEntropyLoss()(logits, y) + nn.MSELoss()(logits, x[:, :3]) + nn.MSELoss()(logits, x[:, 1:])

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.ones(2, 4), torch.tensor([0, 1])).backward()
    optimizer.step()
"""


def test_a_module_made_in_each_forward_has_the_same_name_in_each_step(record: Any) -> None:
    steps = record(MADE_FOR_ONE_CALL, level="L0").steps
    assert len(steps) == 3
    forwards = [[op for op in step if ".forward." in op] for step in steps]
    assert forwards[0] == [
        "Module.fc.Linear.forward.0",
        "Module.CrossEntropyLoss.CrossEntropyLoss.forward.0",
        "Module.MSELoss.MSELoss.forward.0",
        "Module.MSELoss.MSELoss.forward.1",
    ]
    assert forwards[1] == forwards[2] == forwards[0]
    assert list(steps[1]) == list(steps[2]) == list(steps[0])


def test_names_are_taken_while_their_modules_live(record: Any) -> None:
    program = MADE_FOR_ONE_CALL.replace("net = Net()", "net = Net(); kept = [nn.MSELoss(), nn.MSELoss()]").replace(
        "    optimizer.step()", "    optimizer.step(); [loss(torch.ones(1), torch.ones(1)) for loss in kept]"
    )
    step = record(program, level="L0").steps[1]
    losses = [op for op in step if "MSELoss" in op and ".forward." in op]
    assert losses == [  # what comes before the next forward of the model begins its step
        "Module.MSELoss.MSELoss.forward.0",
        "Module.MSELoss_1.MSELoss.forward.0",
        "Module.MSELoss_2.MSELoss.forward.0",
        "Module.MSELoss_2.MSELoss.forward.1",
    ]


MADE_IN_EACH_STEP = """
import gc, torch
from torch import nn

kept = []
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(1500):
    fresh = nn.Linear(4, 4, bias=step % 2 == 0)      # a hypernetwork's, trained by nobody
    fresh(net(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    kept.append(bytearray(step))  # so that modules have ever new addresses
gc.collect()
print(sum(type(thing).__name__ == "ModuleInfo" for thing in gc.get_objects()))
"""


def test_modules_that_are_gone_are_forgotten(record: Any) -> None:
    recorded = record(MADE_IN_EACH_STEP, level="L0")
    assert int(recorded.stdout) < 1100
    assert recorded.mark["lost"] == {}
    for number, step in enumerate(recorded.steps[2:], 2):
        gradients = step["Module.Linear.Linear.parameters_grad.0"]
        assert sorted(gradients) == (["bias", "weight"] if number % 2 == 0 else ["weight"]), number
