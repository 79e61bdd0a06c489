"""MindSpore programs whose results must not change by one bit when they are recorded.

    python mindspore_neutral.py OUT [name ...]   writes OUT/rank<R>.json: {program: sha256 of all it computed}

Names are those of PROGRAMS (one process), GRAPH (one process, GRAPH_MODE, `--graph`) or PARALLEL (2 or 4 workers,
`--parallel`). Each program trains for three to five steps; the hash covers losses, gradients, parameters, outputs of
evaluation and the state of the random number generator, which is read and then drawn from.

Before each program a cell named `Mark` is differentiated at MARK + the program's number, so that a reader of the
records can tell whose they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Model, Parameter, ParameterTuple, Tensor, amp, mint, nn, ops
from mindspore.common.initializer import Normal
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim as experimental
from mindspore.mint.nn import functional as F
from mindspore.train.callback import Callback

STEPS = 3
MARK = 7_000_000.0
Seen = list[Any]


class Mark(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.add(x, 1.0)


# -- data: by numpy, from one seed per program


class Data:
    def __init__(self, rank: int = 0) -> None:
        self.random = np.random.default_rng(1234 + rank)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return Tensor((scale * self.random.standard_normal(shape)).astype(np.float32))

    def ids(self, *shape: int, high: int = 29) -> Tensor:
        return Tensor(self.random.integers(0, high, shape).astype(np.int32))


# -- models


class Mlp(nn.Cell):
    def __init__(self, width: int = 6, out: int = 6, act: Callable[[], nn.Cell] = nn.GELU) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Dense(width, 2 * width), act(), nn.Dense(2 * width, out)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Attention(nn.Cell):
    def __init__(self, width: int, drop: float, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Dense(width, 3 * width), nn.Dense(width, width), heads
        self.drop = nn.Dropout(p=drop)

    def construct(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        q, k, v = ops.split(self.qkv(x), d, axis=-1)
        q, k, v = (ops.transpose(p.reshape(b, s, self.heads, -1), (0, 2, 1, 3)) for p in (q, k, v))
        score = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / (d // self.heads) ** 0.5
        if mask is not None:
            score = ops.masked_fill(score, mask, -1e9)
        mixed = ops.matmul(self.drop(ops.softmax(score, axis=-1)), v)
        return self.proj(ops.transpose(mixed, (0, 2, 1, 3)).reshape(b, s, d))


class Block(nn.Cell):
    """Pre-norm, with the skip connections that give a tensor several consumers."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.attn, self.mlp = Attention(width, drop), Mlp(width, width)

    def construct(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.n1(x), mask=mask)
        return x + self.mlp(self.n2(x))


class LM(nn.Cell):
    def __init__(self, width: int = 16, *, tied: bool = False, recompute: bool = False, drop: float = 0.1) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(29, width), nn.Embedding(8, width)
        self.blocks = nn.CellList([Block(width, drop) for _ in range(2)])
        if recompute:
            for block in self.blocks:
                block.recompute()
        self.norm, self.tied = nn.LayerNorm((width,)), tied
        if not tied:
            self.head = nn.Dense(width, 29, has_bias=False)
        self.mask = Tensor(np.triu(np.ones((8, 8)), 1) > 0)
        self.places = Tensor(np.arange(8), ms.int32)

    def construct(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(self.places)
        for block in self.blocks:
            x = block(x, self.mask)
        x = self.norm(x)
        return ops.matmul(x, ops.transpose(self.tok.embedding_table, (1, 0))) if self.tied else self.head(x)


class LMLoss(nn.Cell):
    """Next-token loss; the network holds its loss as TrainOneStepCell wants it."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def construct(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        return self.loss(logits[:, :-1].reshape(-1, 29), ids[:, 1:].reshape(-1))


class Two(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Dense(6, 6), nn.Dense(6, 6)

    def construct(self, x: Tensor, scale: float = 1.0, extra: Tensor | None = None) -> Any:
        h = ops.relu(self.f(x))
        h = h if extra is None else h + extra
        return h * scale, {"side": self.g(h), "nothing": None}, [h, (x, None)]


class Nothing(nn.Cell):
    """A cell that returns None, and one whose only tensors are keyword arguments."""

    def construct(self, *, x: Tensor, flag: bool = True) -> None:
        self.seen = x.shape if flag else None


class Outputs(nn.Cell):
    """Tuple, dict and list outputs, keyword arguments, None."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n, self.o = Two(), Two(), Nothing(), nn.Dense(6, 1)

    def construct(self, x: Tensor) -> Tensor:
        h, d, rest = self.a(x, scale=0.5)
        assert d["nothing"] is None
        assert rest[1][1] is None
        assert self.n(x=h) is None
        h, e, _ = self.b(h + d["side"], extra=rest[0])
        return self.o(h + e["side"]).mean()


class ConvBn(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.SequentialCell(nn.Conv2d(3, 8, 3, weight_init=Normal(0.1)), nn.BatchNorm2d(8), nn.ReLU())
        self.left, self.right = nn.Conv2d(8, 8, 3, weight_init=Normal(0.1)), nn.Conv2d(8, 8, 1, weight_init=Normal(0.1))
        self.norm, self.pool, self.flat, self.out = nn.BatchNorm2d(8), nn.MaxPool2d(2, 2), nn.Flatten(), nn.Dense(72, 5)

    def construct(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.out(self.flat(self.pool(self.norm(self.left(x)) + ops.tanh(self.right(x)) * x + x)))


class Mint(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = mint.nn.Linear(6, 8), nn.LayerNorm((8,)), mint.nn.Linear(8, 3)

    def construct(self, x: Tensor) -> Tensor:
        h = F.silu(self.n(self.a(x)))
        h = mint.cat((h, mint.mul(h, 0.5)), dim=0)
        return self.b(mint.where(h > 0, h, mint.sin(h)))


class InPlace(nn.Cell):
    """In place on a cell's output, on a cell's input, on a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Dense(6, 6), Doubles(), nn.Dense(6, 6)

    def construct(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.add_(x)
        z = self.b(y * 1.0)
        z = self.c(z)
        z.mul_(2.0)
        z += x
        part = z[:, :3]
        return ops.tanh(z).mean() + part.sum() * 0.01


class Doubles(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return x


class Bprop(nn.Cell):
    """A cell with a backward of its own, which is not the derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 3.0

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y * self.scale

    def bprop(self, x: Tensor, y: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        return dout * y * 2.0, dout * x * 5.0


class CustomBackward(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix, self.out = nn.Dense(6, 6), nn.Dense(6, 6), Bprop(), nn.Dense(6, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.a(x), self.b(x)))


class Square(nn.Cell):
    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().mean()


# -- training


def digest(parts: Iterable[Any]) -> str:
    out = hashlib.sha256()
    for part in parts:
        if isinstance(part, (Tensor, Parameter)):
            # Without asnumpy for bfloat16: its numpy type is not one that tobytes of every version knows.
            array = np.ascontiguousarray(part.asnumpy())
            out.update(str((str(part.dtype), tuple(part.shape))).encode())
            out.update(array.tobytes())
        else:
            out.update(repr(part).encode())
    return out.hexdigest()


def kept(parts: Iterable[Any]) -> Seen:
    """Copies: an optimizer or an in-place op may write to what is hashed later."""
    out: Seen = []
    for part in parts:
        if isinstance(part, (tuple, list)):
            out += kept(part)
        elif isinstance(part, (Tensor, Parameter)):
            out.append(Tensor(part.asnumpy().copy(), part.dtype) if part.dtype != ms.bfloat16 else part.copy())
        else:
            out.append(part)
    return out


def state(model: nn.Cell) -> Seen:
    return kept(parameter for _, parameter in model.parameters_and_names())


def fit(
    forward: Callable[..., Tensor],
    optimizer: Any,
    batch: Callable[[], tuple[Any, ...]],
    *,
    model: nn.Cell,
    accumulate: int = 1,
    evaluate: Callable[[], Tensor] | None = None,
    steps: int = STEPS,
    change: Callable[[Any], Any] = lambda gradients: gradients,
) -> Seen:
    """Training by value_and_grad, as MindSpore's functional examples have it."""
    step = ms.value_and_grad(forward, None, optimizer.parameters)
    seen: Seen = []
    for _ in range(steps):
        total: Any = None
        for _ in range(accumulate):
            loss, gradients = step(*batch())
            total = gradients if total is None else tuple(a + b for a, b in zip(total, gradients, strict=True))
            seen += kept([loss])
        total = change(total)
        seen += kept(total)
        optimizer(tuple(total))
        if evaluate is not None:
            model.set_train(False)
            seen += kept([evaluate()])
            model.set_train(True)
    return seen + state(model)


def lm(
    optimizer: Callable[[Any], Any], *, tied: bool = False, recompute: bool = False, drop: float = 0.1, **how: Any
) -> Seen:
    data, model = Data(), LM(tied=tied, recompute=recompute, drop=drop)
    loss = LMLoss(model)
    model.set_train()
    return fit(loss, optimizer(model.trainable_params()), lambda: (data.ids(2, 8),), model=model, **how)


def mlp(optimizer: Callable[[Any], Any], **how: Any) -> Seen:
    data, model, loss = Data(), Mlp(), Square()

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss(model(x), y)

    return fit(forward, optimizer(model.trainable_params()), lambda: (data(4, 6), data(4, 6)), model=model, **how)


def sgd(parameters: Any) -> Any:
    return nn.SGD(parameters, 0.05)


def momentum(parameters: Any) -> Any:
    return nn.Momentum(parameters, 0.05, 0.9)


def adam(parameters: Any) -> Any:
    return nn.Adam(parameters, 1e-2)


def adamw(parameters: Any) -> Any:
    return experimental.AdamW(parameters, lr=1e-2)


def experimental_sgd(parameters: Any) -> Any:
    return experimental.SGD(parameters, lr=0.05, momentum=0.9)


def simple(model: nn.Cell, *shape: int, optimizer: Callable[[Any], Any] = momentum, **how: Any) -> Seen:
    """A model of one tensor, trained on the mean square of what it gives."""
    data = Data()
    model.set_train()

    def forward(x: Tensor) -> Tensor:
        out = model(x)
        return out if out.ndim == 0 else out.square().mean()

    return fit(forward, optimizer(model.trainable_params()), lambda: (data(*shape),), model=model, **how)


def clipped(gradients: Any) -> Any:
    return ops.clip_by_global_norm(gradients, 1.0)


def evaluation() -> Seen:
    """Steps with evaluation between them, with set_train(False) and without gradients."""
    data, model = Data(), LM()
    loss = LMLoss(model)
    model.set_train()
    ids = data.ids(2, 8)

    def evaluate() -> Tensor:
        with ms._no_grad():
            first = model(ids)
        return first + model(ids)

    return fit(
        loss, adam(model.trainable_params()), lambda: (data.ids(2, 8),), model=model, evaluate=evaluate, change=clipped
    )


def one_step_cell() -> Seen:
    data, model = Data(), Mlp()
    cell = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), momentum(model.trainable_params()))
    cell.set_train()
    seen = [kept([cell(data(4, 6), data(4, 6))]) for _ in range(STEPS)]
    return [*seen, *state(model)]


def one_step_lm() -> Seen:
    data, model = Data(), LM()
    cell = nn.TrainOneStepCell(LMLoss(model), adam(model.trainable_params()), sens=2.0)
    cell.set_train()
    seen = [kept([cell(data.ids(2, 8))]) for _ in range(STEPS)]
    return [*seen, *state(model)]


class Losses(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.seen += kept([run_context.original_args().net_outputs])


def dataset(count: int = 12, batch: int = 4, *, shuffle: bool = False, rank: int = 0) -> Any:
    random = np.random.default_rng(99 + rank)
    x, y = (random.standard_normal((count, 6)).astype(np.float32) for _ in range(2))
    ms.dataset.config.set_seed(3)
    return ms.dataset.NumpySlicesDataset((x, y), ["x", "y"], shuffle=shuffle).batch(batch)


def model_train(*, sink: bool, evaluate: bool = False, level: str = "O0", rank: int = 0) -> Seen:
    network, losses = Mlp(), Losses()
    how = {"loss_scale_manager": ms.FixedLossScaleManager(4.0, drop_overflow_update=False)} if level == "O2" else {}
    model = Model(
        network, nn.MSELoss(), momentum(network.trainable_params()), metrics={"mse": nn.MSE()}, amp_level=level, **how
    )
    model.train(2, dataset(rank=rank), callbacks=[losses], dataset_sink_mode=sink)
    seen: Seen = list(losses.seen)
    if evaluate:
        seen.append(model.eval(dataset(rank=rank), dataset_sink_mode=sink))
        seen += kept([model.predict(Tensor(np.ones((2, 6), np.float32)))])
    assert seen
    return seen + state(network)


def dataset_loop() -> Seen:
    """A shuffled dataset, read as tuples and as dictionaries."""
    model, loss = Mlp(), Square()
    optimizer = momentum(model.trainable_params())
    step = ms.value_and_grad(lambda x, y: loss(model(x), y), None, optimizer.parameters)
    seen: Seen = []
    rows = dataset(shuffle=True)
    for x, y in rows.create_tuple_iterator():
        value, gradients = step(x, y)
        optimizer(gradients)
        seen += kept([x, value, *gradients])
    for row in rows.create_dict_iterator(num_epochs=1):
        value, gradients = step(row["x"], row["y"])
        optimizer(gradients)
        seen += kept([row["y"], value])
    return seen + state(model)


def amp_o2() -> Seen:
    data = Data()
    model = amp.auto_mixed_precision(ConvBn(), "O2", dtype=ms.float16)
    model.set_train()
    optimizer, scaler = momentum(model.trainable_params()), amp.DynamicLossScaler(2.0**8, 2, 2)

    def forward(x: Tensor) -> Tensor:
        return scaler.scale(model(x).astype(ms.float32).square().mean())

    step = ms.value_and_grad(forward, None, optimizer.parameters)
    seen: Seen = []
    for number in range(STEPS + 1):
        value, gradients = step(data(4, 3, 6, 6, scale=1e30 if number == 2 else 1.0))
        finite = amp.all_finite(gradients)
        if bool(finite):
            gradients = scaler.unscale(gradients)
            optimizer(gradients)
        scaler.adjust(finite)
        seen += kept([value, finite, *gradients, scaler.scale_value])
    return seen + state(model)


def amp_train_network() -> Seen:
    data, model = Data(), Mlp()
    network = amp.build_train_network(model, momentum(model.trainable_params()), nn.MSELoss(), level="O3")
    network.set_train()
    seen = [kept([network(data(4, 6), data(4, 6))]) for _ in range(STEPS)]
    return [*seen, *state(model)]


class Narrow(nn.Cell):
    """bfloat16 where the CPU has it: not in products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.round, self.b = nn.Dense(6, 6), Rounds(), nn.Dense(6, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.round(self.a(x).astype(ms.bfloat16)).astype(ms.float32))


class Rounds(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.full((4, 6), 1.1, np.float32)), name="scale")

    def construct(self, x: Tensor) -> Tensor:
        return x * x + x * self.scale.astype(ms.bfloat16)


def transforms() -> Seen:
    """vmap, jvp, vjp, the gradient of a gradient, gradients of inputs, with auxiliary outputs and by position."""
    data, model = Data(), Mlp(6, 1, nn.Tanh)
    model.set_train()
    weights = ParameterTuple(model.trainable_params())

    def value(x: Tensor) -> Tensor:
        return ops.tanh(model(x)).sum()

    def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return model(x * y).sum(), x

    def wave(x: Tensor) -> Tensor:
        return ops.sin(x) * x

    # By name: the compiler that these use reads a lambda's source line.
    each = ms.vmap(wave, in_axes=0)
    optimizer = sgd(weights)
    seen: Seen = []
    for _ in range(STEPS):
        x, y = data(4, 6), data(4, 6)
        seen += kept([each(x)])
        out, product = ms.jvp(wave, x, y)
        seen += kept([out, product])
        out, pull = ms.vjp(wave, x)
        seen += kept([out, pull(y)])
        seen += kept([ms.grad(value)(x), ms.grad(value, None, weights)(x), ms.grad(value, 0, weights)(x)])
        seen += kept([ms.grad(pair, (0, 1), has_aux=True)(x, y)])
        result, gradients = ms.value_and_grad(value, None, weights)(x)
        optimizer(gradients)
        seen += kept([result, *gradients])
    return seen + state(model)


def vmapped() -> Seen:
    """vmap over a cell, in a training loop."""
    data, model = Data(), Mlp(6, 2)
    optimizer = sgd(model.trainable_params())
    each = ms.vmap(model, in_axes=0)
    step = ms.value_and_grad(lambda x: model(x).square().mean(), None, optimizer.parameters)
    seen: Seen = []
    for _ in range(STEPS):
        x = data(3, 2, 6)
        loss, gradients = step(x)
        optimizer(gradients)
        seen += kept([loss, each(x)])
    return seen + state(model)


def jvp_vjp() -> Seen:
    data, model = Data(), Mlp(6, 2, nn.Tanh)
    optimizer = sgd(model.trainable_params())
    step = ms.value_and_grad(lambda x: model(x).square().mean(), None, optimizer.parameters)
    seen: Seen = []
    for _ in range(STEPS):
        x, y = data(4, 6), data(4, 6)
        loss, gradients = step(x)
        optimizer(gradients)
        out, product = ms.jvp(model, x, y)
        seen += kept([loss, out, product])
        out, pull = ms.vjp(model, x)
        seen += kept([out, pull(data(4, 2))])
    return seen + state(model)


def second_order() -> Seen:
    """A gradient penalty: the loss holds the gradient of the cell by its input."""
    data, model = Data(), Mlp(6, 1, nn.Tanh)
    optimizer = sgd(model.trainable_params())
    inner = ms.grad(lambda x: ops.tanh(model(x)).sum())

    def forward(x: Tensor) -> Tensor:
        return model(x).square().mean() + inner(x).square().mean()

    outer = ms.grad(ms.grad(lambda x: (ops.sin(x) * x).sum()))
    seen: Seen = []
    for _ in range(STEPS):
        x = data(4, 6)
        loss, gradients = ms.value_and_grad(forward, None, optimizer.parameters)(x)
        optimizer(gradients)
        seen += kept([loss, *gradients, outer(data(3))])
    return seen + state(model)


def grad_operation() -> Seen:
    """The older way: GradOperation over a network with its loss, with a sensitivity."""
    data, model = Data(), Mlp()
    network = nn.WithLossCell(model, nn.MSELoss())
    weights = ParameterTuple(model.trainable_params())
    optimizer = momentum(weights)
    gradient = ops.GradOperation(get_by_list=True, sens_param=True)(network, weights)
    both = ops.GradOperation(get_all=True, get_by_list=True)(network, weights)
    seen: Seen = []
    for _ in range(STEPS):
        x, y = data(4, 6), data(4, 6)
        loss = network(x, y)
        gradients = gradient(x, y, ops.ones_like(loss) * 0.5)
        optimizer(gradients)
        seen += kept([loss, gradients, both(x, y)])
    return seen + state(model)


def functional() -> Seen:
    """No cell at all: parameters, ops, an update written by hand."""
    data = Data()
    w, b = Parameter(data(6, 3), name="w"), Parameter(data(3), name="b")

    def forward(x: Tensor) -> Tensor:
        return ops.relu(ops.matmul(x, w) + b).square().sum()

    step = ms.value_and_grad(forward, None, ParameterTuple([w, b]))
    seen: Seen = []
    for _ in range(STEPS):
        loss, gradients = step(data(4, 6, scale=0.1))
        for parameter, gradient in zip((w, b), gradients, strict=True):
            ops.assign_sub(parameter, 0.1 * gradient)
        seen += kept([loss, *gradients])
    return seen + kept([w, b])


class Raises(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(6, 6)

    def construct(self, x: Tensor, number: int = 0) -> Tensor:
        h = self.fc(x)
        if number == 1:
            raise KeyError("from the inside")
        if number == 2:
            return ops.matmul(h, "no tensor")
        return h


def caught() -> Seen:
    """Exceptions inside a cell that the program catches, in and outside a gradient, and goes on.

    Not those of ops that have been started: they show at some later op, and what MindSpore does then differs from run
    to run.
    """
    data, model = Data(), nn.SequentialCell(Raises(), nn.Dense(6, 2))
    optimizer = momentum(model.trainable_params())
    seen: Seen = []

    def forward(x: Tensor, number: int) -> Tensor:
        return model[1](model[0](x, number)).square().mean()

    step = ms.value_and_grad(forward, None, optimizer.parameters)
    for number in range(STEPS):
        x = data(4, 6)
        try:
            model[0](x, number)
        except (KeyError, TypeError) as error:
            seen.append(type(error).__name__)
        try:
            loss, gradients = step(x, number)
        except (KeyError, TypeError) as error:
            seen.append(type(error).__name__)
            loss, gradients = step(x, 0)
        optimizer(gradients)
        seen += kept([loss, *gradients])
    assert seen.count("KeyError") == seen.count("TypeError") == 2
    return seen + state(model)


def multihead() -> Seen:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Dense(8, 3)
            self.norm = nn.LayerNorm((8,))

        def construct(self, x: Tensor) -> Tensor:
            y, weights = self.attn(x, x, x)
            return self.out(self.norm(x + y)) + weights.mean()

    return simple(Net(), 2, 5, 8)


def encoder() -> Seen:
    # Few draws of dropout only, here and elsewhere: after some dozen its masks differ from run to run.
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return simple(nn.TransformerEncoder(layer, 2), 2, 5, 8, optimizer=adam)


def embedding_dropout() -> Seen:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.drop, self.out = nn.Embedding(29, 8, padding_idx=0), nn.Dropout(p=0.3), nn.Dense(8, 4)

        def construct(self, ids: Tensor) -> Tensor:
            h = self.drop(self.table(ids))
            return self.out(ops.dropout(h, p=0.2, training=self.training)).square().mean()

    data, model = Data(), Net()
    model.set_train()
    return fit(model, adam(model.trainable_params()), lambda: (data.ids(3, 5),), model=model)


def lstm() -> Seen:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.r, self.g = nn.LSTM(5, 7, num_layers=1, batch_first=True), nn.GRUCell(7, 7)
            self.o = nn.Dense(7, 2)

        def construct(self, x: Tensor) -> Tensor:
            y, (h, _) = self.r(x)
            h = h[0]
            for number in range(3):
                h = self.g(y[:, number], h)
            return self.o(h)

    return simple(Net(), 3, 4, 5)


def gan() -> Seen:
    """Two optimizers in turn, a stopped gradient between them."""
    data = Data()
    g = nn.SequentialCell(nn.Dense(4, 8), nn.Tanh(), nn.Dense(8, 6))
    d = nn.SequentialCell(nn.Dense(6, 8), nn.ReLU(), nn.Dense(8, 1))
    og, od = adam(g.trainable_params()), adam(d.trainable_params())

    def loss_d(real: Tensor, z: Tensor) -> Tensor:
        return ops.softplus(d(ops.stop_gradient(g(z)))).mean() + ops.softplus(-d(real)).mean()

    def loss_g(z: Tensor) -> Tensor:
        return ops.softplus(-d(g(z))).mean()

    step_d, step_g = (ms.value_and_grad(f, None, o.parameters) for f, o in ((loss_d, od), (loss_g, og)))
    seen: Seen = []
    for _ in range(STEPS):
        z = data(5, 4)
        value, gradients = step_d(data(5, 6), z)
        od(gradients)
        seen += kept([value, *gradients])
        value, gradients = step_g(z)
        og(gradients)
        seen += kept([value, *gradients])
    return seen + state(g) + state(d)


def shared() -> Seen:
    """One cell called three times, and a weight that two cells share."""

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.again, self.o = nn.Dense(6, 6), nn.Dense(6, 6), nn.Dense(6, 3)
            self.again.weight = self.fc.weight

        def construct(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = ops.tanh(self.fc(x))
            return self.o(self.again(x))

    return simple(Net(), 3, 6)


def users_hooks() -> Seen:
    """Hooks of the program's own: forward, backward and of a tensor; they change values."""
    data, model = Data(), Mlp()
    order: Seen = []
    model.fc1.register_forward_pre_hook(lambda _cell, args: (args[0] * 1.5,))
    model.fc1.register_forward_hook(lambda _cell, _args, out: out + 1.0)
    model.fc2.register_backward_hook(lambda _cell, into, _out: (order.append("fc2"), (into[0] * 0.5,))[1])

    def forward(x: Tensor) -> Tensor:
        h = model(x)
        h.register_hook(lambda gradient: (order.append("h"), gradient * 2.0)[1])
        return h.square().mean()

    seen = fit(forward, momentum(model.trainable_params()), lambda: (data(4, 6),), model=model)
    assert order.count("fc2") == order.count("h") == STEPS
    return seen + order


def indexing() -> Seen:
    """Views and indices: setitem, boolean masks, slices, in-place APIs of tensors that need no gradient."""
    data, model = Data(), Mlp()
    buffer = Tensor(np.zeros((4, 6), np.float32))

    def forward(x: Tensor) -> Tensor:
        y = model(x)
        z = y * 1.0
        z[:, ::2] = z[:, ::2] * 2.0
        z[0] = 0.5
        return z[1:].square().mean() + ops.where(y > 0, y, y * 0.1).sum() * 0.1

    optimizer = momentum(model.trainable_params())
    step = ms.value_and_grad(forward, None, optimizer.parameters)
    seen: Seen = []
    for _ in range(STEPS):
        x = data(4, 6)
        buffer.mul_(0.9)
        buffer.add_(x)
        buffer[0, 0] = 3.0
        loss, gradients = step(x)
        optimizer(gradients)
        seen += kept([buffer, loss, *gradients])
    return seen + state(model)


def random_draws() -> Seen:
    """Random numbers between and inside cells, and a state that is put back."""

    class Noise(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x + ops.standard_normal(x.shape) * 0.1 + ops.dropout(x, p=0.2)

    model = nn.SequentialCell(nn.Dense(6, 6), Noise(), nn.Dropout(p=0.5), nn.Dense(6, 2))
    seen: Seen = []
    before = ms.get_rng_state()
    seen += kept([before, ops.rand(3), ops.randn(2, 2), ops.normal((3,), 0.0, 1.0)])
    ms.set_rng_state(before)
    seen += kept([ops.rand(3), ops.randperm(5)])
    return seen + simple(model, 4, 6)


class Jitted(nn.Cell):
    """A cell whose construct is compiled, among cells that are not."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Dense(6, 6), Compiled(), nn.Dense(6, 2)
        self.inside.construct = ms.jit(self.inside.construct, **how)

    def construct(self, x: Tensor) -> Tensor:
        return self.after(self.inside(self.before(x)))


class Compiled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Dense(6, 6), nn.LayerNorm((6,))

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.norm(self.fc(x))) + x


class Decorated(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.inner = nn.Dense(6, 6), Compiled()

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.inner(ops.relu(self.fc(x)))


def jit_function(**how: Any) -> Seen:
    """A compiled function among plain ones, with a cell inside."""
    data, model = Data(), Mlp()

    @ms.jit(**how)
    def inside(x: Tensor) -> Tensor:
        return ops.tanh(model(x)) * 2.0

    def forward(x: Tensor) -> Tensor:
        return (inside(x) + ops.sin(x)).square().mean()

    return fit(forward, momentum(model.trainable_params()), lambda: (data(4, 6),), model=model)


def jit_step(**how: Any) -> Seen:
    """The whole step compiled: loss, gradient and update."""
    data, model, loss = Data(), Mlp(), Square()
    optimizer = momentum(model.trainable_params())

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss(model(x), y)

    gradient = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit(**how)
    def step(x: Tensor, y: Tensor) -> Tensor:
        value, gradients = gradient(x, y)
        optimizer(gradients)
        return value

    seen = [kept([step(data(4, 6), data(4, 6))]) for _ in range(STEPS)]
    return [*seen, *state(model)]


def jit_lm() -> Seen:
    """A transformer's blocks compiled one by one."""
    data, model = Data(), LM()
    model.set_train()
    for block in model.blocks:
        block.mlp.construct = ms.jit(block.mlp.construct)
    loss = LMLoss(model)
    return fit(loss, adam(model.trainable_params()), lambda: (data.ids(2, 8),), model=model)


PROGRAMS: dict[str, Callable[[], Seen]] = {
    "outputs": lambda: simple(Outputs(), 4, 6),
    "lm_adam": lambda: lm(adam),
    "lm_tied": lambda: lm(momentum, tied=True, change=clipped),
    "experimental_adamw": lambda: lm(adamw),
    "experimental_sgd": lambda: mlp(experimental_sgd),
    "mint_adam": lambda: mlp(lambda p: mint.optim.Adam(p, lr=1e-2)),
    "mint_sgd": lambda: mlp(lambda p: mint.optim.SGD(p, lr=0.05)),
    "mint_layers": lambda: simple(Mint(), 4, 6),
    "accumulation": lambda: lm(sgd, accumulate=2, drop=0.0),
    "evaluation": evaluation,
    "train_one_step": one_step_cell,
    "train_one_step_lm": one_step_lm,
    "model_train": lambda: model_train(sink=False, evaluate=True),
    "model_train_sink": lambda: model_train(sink=True),
    "model_train_o2": lambda: model_train(sink=False, level="O2"),
    "dataset_loop": dataset_loop,
    "recompute": lambda: lm(momentum, recompute=True),
    "amp_o2": amp_o2,
    "amp_train_network": amp_train_network,
    "bf16": lambda: simple(Narrow(), 4, 6, optimizer=experimental_sgd),
    "custom_bprop": lambda: simple(CustomBackward(), 4, 6),
    "transforms": transforms,
    "vmap": vmapped,
    "jvp_vjp": jvp_vjp,
    "second_order": second_order,
    "grad_operation": grad_operation,
    "functional": functional,
    "inplace": lambda: simple(InPlace(), 4, 6),
    "indexing": indexing,
    "caught_exceptions": caught,
    "conv_bn": lambda: simple(ConvBn(), 4, 3, 6, 6),
    "multihead_attention": multihead,
    "encoder": encoder,
    "embedding_dropout": embedding_dropout,
    "lstm": lstm,
    "gan": gan,
    "shared": shared,
    "users_hooks": users_hooks,
    "random_draws": random_draws,
    "jit_cell": lambda: simple(Jitted(), 4, 6),
    "jit_decorated_cell": lambda: simple(nn.SequentialCell(Decorated(), nn.Dense(6, 2)), 4, 6),
    "jit_lm": jit_lm,
    "jit_function": jit_function,
    "jit_step": jit_step,
    "jit_bytecode": lambda: jit_function(capture_mode="bytecode"),
    "jit_bytecode_cell": lambda: simple(Jitted(capture_mode="bytecode"), 4, 6),
    "jit_trace": lambda: jit_function(capture_mode="trace"),
}

GRAPH: dict[str, Callable[[], Seen]] = {
    "graph_mlp": lambda: mlp(momentum),
    "graph_lm": lambda: lm(adam),
    "graph_conv_bn": lambda: simple(ConvBn(), 4, 3, 6, 6),
    "graph_accumulation": lambda: mlp(sgd, accumulate=2),
    "graph_train_one_step": one_step_cell,
    "graph_model_train": lambda: model_train(sink=False),
    "graph_model_train_sink": lambda: model_train(sink=True),
    "graph_recompute": lambda: lm(momentum, recompute=True),
    "graph_jit_step": jit_step,
}


# -- several workers


def reduced_by_hand() -> Seen:
    """Gradients averaged by AllReduce; every worker has its own data."""
    data, model, loss, reduce = Data(get_rank()), LM(), None, ops.AllReduce()
    loss = LMLoss(model)
    model.set_train()
    return fit(
        loss,
        adam(model.trainable_params()),
        lambda: (data.ids(2, 8),),
        model=model,
        change=lambda gradients: tuple(reduce(g) / get_group_size() for g in gradients),
    )


def reduced_inside() -> Seen:
    """A collective inside the differentiated function, and those of mint.distributed around it."""
    data, model, reduce, gather = Data(get_rank()), Mlp(), ops.AllReduce(), ops.AllGather()

    def forward(x: Tensor) -> Tensor:
        return reduce(model(x)).square().mean()

    def change(gradients: Any) -> Any:
        out = []
        for gradient in gradients:
            mint.distributed.all_reduce(gradient)
            out.append(gradient / get_group_size())
        return out

    seen = fit(forward, momentum(model.trainable_params()), lambda: (data(4, 6),), model=model, change=change)
    mint.distributed.barrier()
    everyone: list[Tensor] = [Tensor(np.zeros((2, 2), np.float32)) for _ in range(get_group_size())]
    mint.distributed.all_gather(everyone, Tensor(np.full((2, 2), get_rank(), np.float32)))
    return seen + kept([gather(data(2, 3)), *everyone])


def grad_reducer() -> Seen:
    """MindSpore's own reducer over a functional step."""
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=get_group_size()
    )
    data, model, loss = Data(get_rank()), Mlp(), Square()
    optimizer = momentum(model.trainable_params())
    reducer = nn.DistributedGradReducer(optimizer.parameters)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss(model(x), y)

    return fit(forward, optimizer, lambda: (data(4, 6), data(4, 6)), model=model, change=reducer)


def data_parallel(*, sink: bool) -> Seen:
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=get_group_size()
    )
    return model_train(sink=sink, rank=get_rank())


PARALLEL: dict[str, Callable[[], Seen]] = {
    "dp_by_hand": reduced_by_hand,
    "dp_inside": reduced_inside,
    "dp_reducer": grad_reducer,
    "dp_model_train": lambda: data_parallel(sink=False),
    "dp_one_step": lambda: data_parallel_one_step(),
}


def data_parallel_one_step() -> Seen:
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=get_group_size()
    )
    data, model = Data(get_rank()), Mlp()
    cell = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), momentum(model.trainable_params()))
    cell.set_train()
    seen = [kept([cell(data(4, 6), data(4, 6))]) for _ in range(STEPS)]
    return [*seen, *state(model)]


# -- running


@contextlib.contextmanager
def fresh(number: int) -> Iterator[None]:
    """Seeds as at a program's start, and the mark by which the records are told apart."""
    ms.set_seed(1234)
    ms.manual_seed(1234)
    np.random.seed(1234)
    ms.grad(Mark())(Tensor([MARK + number], ms.float32))
    yield
    ms.reset_auto_parallel_context()


def draws() -> Seen:
    """The random number generator's state, and what it gives next."""
    dropped = nn.Dropout(p=0.5).set_train()(ops.ones((9,), ms.float32))
    return kept([ms.get_rng_state(), ops.rand(3), ops.standard_normal((3,)), dropped])


def run(out: str, programs: dict[str, Callable[[], Seen]], names: list[str]) -> int:
    hashes = {}
    failed = 0
    numbers = {name: number for number, name in enumerate(programs)}
    for name in names or programs:
        with fresh(numbers[name]):
            try:
                seen = programs[name]()
                hashes[name] = digest([*seen, *draws()])
            except Exception as error:  # noqa: BLE001  # a comparison of hashes shows it; the others run on
                hashes[name] = f"{type(error).__name__}"
                failed = 1
                print(f"--- {name}", file=sys.stderr)
                traceback.print_exc()
    Path(out).mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("MS_NODE_ID", "0")
    Path(out, f"rank{rank}.json").write_text(json.dumps(hashes, indent=1))
    return failed


def main(arguments: list[str]) -> int:
    options = [argument for argument in arguments if argument.startswith("--")]
    out, *names = (argument for argument in arguments if not argument.startswith("--"))
    ms.set_device("CPU")
    ms.set_context(runtime_num_threads=1)
    ms.set_context(mode=ms.GRAPH_MODE if "--graph" in options else ms.PYNATIVE_MODE)
    if "--parallel" in options:
        init()
        return run(out, PARALLEL, names)
    return run(out, GRAPH if "--graph" in options else PROGRAMS, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
