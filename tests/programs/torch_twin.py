"""One small network and its training; `mindspore_twin.py` is the same in MindSpore.

    python torch_twin.py FOLDER [--steps N]

Leaves FOLDER/weights.npz, the parameters and buffers before the first step by PyTorch's names, and FOLDER/inputs.npz.
The twin reads both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

STEPS, WIDTH, TOKENS, BATCH, CLASSES = 2, 16, 29, 4, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        score = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / WIDTH**0.5
        return self.proj(torch.matmul(torch.softmax(score, dim=-1), self.value(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, eps=1e-5)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Twin(nn.Module):
    """Pictures through convolutions, tokens through an embedding and two blocks, both to one output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.pool, self.tanh = nn.MaxPool2d(2, 2), nn.Tanh()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, CLASSES)

    def forward(self, picture: Tensor, tokens: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(picture)))
        y = self.tanh(self.bn2(self.conv2(self.pool(y)))).mean((2, 3))
        x = self.embedding(tokens) + y.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean(1)


def main(folder: Path, steps: int) -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model, loss = Twin(), nn.CrossEntropyLoss()
    random = np.random.default_rng(7)
    with torch.no_grad():
        for parameter in model.parameters():  # no gamma of ones, no beta of zeros: mixed up they would go unseen
            parameter.add_(torch.from_numpy(0.05 * random.standard_normal(parameter.shape).astype(np.float32)))
    inputs = {
        "picture": random.standard_normal((steps, BATCH, 3, 6, 6)).astype(np.float32),
        "tokens": random.integers(0, TOKENS, (steps, BATCH, 7)).astype(np.int32),
        "label": random.integers(0, CLASSES, (steps, BATCH)).astype(np.int32),
    }
    np.savez(folder / "weights.npz", **{name: value.numpy() for name, value in model.state_dict().items()})
    np.savez(folder / "inputs.npz", **inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        picture, tokens, label = (torch.from_numpy(inputs[name][step]) for name in ("picture", "tokens", "label"))
        value = loss(model(picture, tokens), label.long())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        print(f"loss {float(value):.6f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]) if sys.argv[2:3] == ["--steps"] else STEPS)
