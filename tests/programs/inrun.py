"""Trains a small model, each rank by itself, for runs that are compared while they go on.

    inrun.py STEPS SECONDS FAULTY_STEP [FAIL_AT]

From FAULTY_STEP on (-1: never) rank 1 computes with a weight that is off by 1 %. A first attempt fails in step FAIL_AT.
"""

import os
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS, SECONDS, FAULTY_STEP = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
FAIL_AT = int(sys.argv[4]) if len(sys.argv) > 4 else -1
RANK = int(os.environ["RANK"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, scale):
        x = F.relu(self.first(x))
        x = F.relu(F.linear(x, self.second.weight * scale, self.second.bias))
        return self.last(x)


torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(STEPS):
    torch.manual_seed(step)
    faulty = RANK == 1 and 0 <= FAULTY_STEP <= step
    model(torch.randn(8, 16), 1.01 if faulty else 1.0).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(SECONDS)
    if step == FAIL_AT and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        sys.exit(7)
print(f"rank {RANK} trained {STEPS} steps", flush=True)
