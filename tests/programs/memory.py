"""Training steps with double backward and ever new shapes; prints resident memory in KiB after 200 and at the end."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from torch import nn

steps = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)


def resident() -> int:
    gc.collect()
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line).split()[1])


after_200 = 0
for step in range(steps):
    optimizer.zero_grad()
    x = torch.randn(1 + step % 997, 8, requires_grad=True)
    (penalty,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (net(x).square().mean() + penalty.square().mean()).backward()
    optimizer.step()
    if step == 199:
        after_200 = resident()
print(after_200, resident())
