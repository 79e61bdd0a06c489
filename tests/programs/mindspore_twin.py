"""`torch_twin.py` in MindSpore, with its weights and its inputs.

    python mindspore_twin.py FOLDER [--plant PARAMETER]

--plant multiplies one parameter, by PyTorch's name, by 1.01.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

WIDTH, TOKENS, CLASSES = 16, 29, 5
TORCH_NAMES = {
    "gamma": "weight",
    "beta": "bias",
    "embedding_table": "weight",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Dense(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Dense(WIDTH, WIDTH, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        score = ops.matmul(self.query(x), self.key(x).swapaxes(1, 2)) / WIDTH**0.5
        return self.proj(ops.matmul(ops.softmax(score, axis=-1), self.value(x)))


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,), epsilon=1e-5), nn.LayerNorm((WIDTH,), epsilon=1e-5)
        self.attention = Attention()
        self.mlp = nn.SequentialCell(nn.Dense(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dense(2 * WIDTH, WIDTH))

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Twin(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, has_bias=True), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, WIDTH, 3), nn.BatchNorm2d(WIDTH)
        self.pool, self.tanh = nn.MaxPool2d(2, 2), nn.Tanh()
        self.blocks = nn.CellList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm((WIDTH,), epsilon=1e-5), nn.Dense(WIDTH, CLASSES)

    def construct(self, picture: Tensor, tokens: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(picture)))
        y = self.tanh(self.bn2(self.conv2(self.pool(y)))).mean((2, 3))
        x = self.embedding(tokens) + y.expand_dims(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean(1)


def torch_name(name: str) -> str:
    """MindSpore's name of a parameter as PyTorch has it."""
    path, _, last = name.rpartition(".")
    return f"{path}.{TORCH_NAMES.get(last, last)}"


def main(folder: Path, planted: str | None) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    model, loss = Twin(), nn.CrossEntropyLoss()
    model.set_train()
    weights, inputs = (dict(np.load(folder / f"{name}.npz")) for name in ("weights", "inputs"))
    if planted is not None:
        weights[planted] = weights[planted] * np.float32(1.01)
    for name, parameter in model.parameters_and_names():
        value = weights.pop(torch_name(name))
        assert value.shape == parameter.shape, name
        parameter.set_data(Tensor(value))
    assert all(name.endswith("num_batches_tracked") for name in weights), weights.keys()
    optimizer = nn.SGD(model.trainable_params(), 0.05)

    def forward(picture: Tensor, tokens: Tensor, label: Tensor) -> Tensor:
        return loss(model(picture, tokens), label)

    step = ms.value_and_grad(forward, None, optimizer.parameters)
    for number in range(len(inputs["picture"])):
        value, gradients = step(*(Tensor(inputs[name][number]) for name in ("picture", "tokens", "label")))
        optimizer(gradients)
        print(f"loss {float(value):.6f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3] if sys.argv[2:3] == ["--plant"] else None)
