"""One small transformer in several parallel layouts: same parameters, same global batch, whatever the layout.

    layouts.py LAYOUT [FAULT]      under msprobe-launch or torchrun

    single       one rank, or the same on each; with MICROBATCHES=M the batch in M parts, gradients accumulated
    dtensor      tensor parallel by torch.distributed.tensor (parallelize_module)
    sequence     the same, the second norm of each block on slices of the sequence
    megatron     tensor parallel by hand: shards in plain tensors, all_reduce in autograd functions
    ddp          data parallel, by contiguous parts of the global batch
    fsdp         the same, parameters divided as well (fully_shard)
    pipeline     stages that number their own blocks from 0 and call the list `blocks`; MICROBATCHES=M, as in GPipe
    both         data parallel 2 x tensor parallel by hand

FAULT is `column` or `row`: the last rank adds the bias of the second block's fc1 (column parallel) or fc2 (row
parallel) once more; `replica`: the last rank's norm weight of the second block is off. In its place, `ids` makes no
fault: the batch is token ids, and the model begins with embeddings of positions and of tokens.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, BATCH, LENGTH, VOCABULARY = 16, 4, 4, 8, 6, 50
STEPS = int(os.environ.get("STEPS", "2"))
MICROBATCHES = int(os.environ.get("MICROBATCHES", "1"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        # As many heads as this rank's shard holds.
        q, k, v = (part(x).view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        score = (q @ k.transpose(-2, -1)) / (WIDTH // HEADS) ** 0.5
        return self.o((F.softmax(score, -1) @ v).transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            MLP(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, *, ids: bool = False) -> None:
        super().__init__()
        if ids:
            self.positions, self.tokens = nn.Embedding(LENGTH, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = self.positions(torch.arange(LENGTH)) + self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batches(*, ids: bool) -> list[tuple[Tensor, Tensor]]:
    """The global batch of each step, with its targets."""
    made = torch.Generator().manual_seed(7)

    def inputs() -> Tensor:
        if ids:
            return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=made)
        return torch.randn(BATCH, LENGTH, WIDTH, generator=made)

    return [(inputs(), torch.randn(BATCH, LENGTH, 3, generator=made)) for _ in range(STEPS)]


def full_model(*, ids: bool) -> Model:
    torch.manual_seed(3)
    model = Model(ids=ids)
    for parameter in model.parameters():
        # Norms and biases that do something.
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
    return model


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for x, y in data:
        opt.zero_grad()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = F.mse_loss(model(part), target) / MICROBATCHES
            loss.backward()
        opt.step()


# -- tensor parallel by DTensor


def by_dtensor(model: Model, *, sequence: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    attention = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    for layer in model.layers:
        plan: dict[str, object] = {f"attention.{name}": style for name, style in attention.items()}
        plan |= {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
        if sequence:
            whole, slices = (Replicate(),), (Shard(1),)
            parallelize_module(layer.norm2, mesh, PrepareModuleInput(input_layouts=whole, desired_input_layouts=slices))
            plan |= {
                "norm2": SequenceParallel(use_local_output=True),
                "mlp.fc1": ColwiseParallel(input_layouts=Shard(1)),
            }
        parallelize_module(layer, mesh, plan)
    return model


# -- tensor parallel by hand


class ToRegion(torch.autograd.Function):
    """Identity; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: object) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class FromRegion(torch.autograd.Function):
    """Sum over the group; the gradient passes."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: object) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ColumnParallelLinear(nn.Module):
    def __init__(self, full: nn.Linear, group: object) -> None:
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.twice = group, False
        self.weight = nn.Parameter(full.weight.detach().chunk(size, 0)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().chunk(size, 0)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(ToRegion.apply(x, self.group), self.weight, self.bias)
        return y + self.bias if self.twice else y


class RowParallelLinear(nn.Module):
    def __init__(self, full: nn.Linear, group: object) -> None:
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.twice = group, False
        self.weight = nn.Parameter(full.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.twice:
            # What it looks like when a shard adds the bias before the sum as well.
            y = y + self.bias
        return FromRegion.apply(y, self.group) + self.bias


def by_hand(model: Model, group: object, fault: str) -> nn.Module:
    for number, layer in enumerate(model.layers):
        for name in ("q", "k", "v"):
            setattr(layer.attention, name, ColumnParallelLinear(getattr(layer.attention, name), group))
        layer.attention.o = RowParallelLinear(layer.attention.o, group)
        layer.mlp.fc1 = ColumnParallelLinear(layer.mlp.fc1, group)
        layer.mlp.fc2 = RowParallelLinear(layer.mlp.fc2, group)
        if number == 1 and dist.get_rank() == dist.get_world_size() - 1:
            layer.mlp.fc1.twice, layer.mlp.fc2.twice = fault == "column", fault == "row"
    return model


# -- pipeline


class Stage(nn.Module):
    """Its own blocks from 0 on; the last one also has the head."""

    def __init__(self, model: Model, stage: int, stages: int) -> None:
        super().__init__()
        each = LAYERS // stages
        self.blocks = nn.ModuleList(model.layers[stage * each : (stage + 1) * each])
        self.last = stage == stages - 1
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def pipeline(model: Model, data: list[tuple[Tensor, Tensor]]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = Stage(model, rank, size)
    opt = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for x, y in data:
        opt.zero_grad()
        kept = []
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            if rank:
                part = torch.zeros_like(part)
                dist.recv(part, rank - 1)
                part.requires_grad_()
            out = stage(part)
            if rank < size - 1:
                dist.send(out.detach(), rank + 1)
            else:
                out = F.mse_loss(out, target) / MICROBATCHES
            kept.append((part, out))
        for part, out in kept:
            grad = None
            if rank < size - 1:
                grad = torch.zeros_like(out)
                dist.recv(grad, rank + 1)
            out.backward(grad)
            if rank:
                dist.send(part.grad, rank - 1)
        opt.step()


def spoiled(model: Model, fault: str) -> Model:
    if fault == "replica" and dist.get_rank() == dist.get_world_size() - 1:
        model.layers[1].norm1.weight.data.mul_(1.5)
    return model


def main(layout: str, fault: str = "") -> None:
    torch.set_num_threads(1)
    ids = fault == "ids"
    data = batches(ids=ids)
    model = full_model(ids=ids)
    if layout == "single":
        train(model, data)
        return
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if layout in ("dtensor", "sequence"):
        model = by_dtensor(model, sequence=layout == "sequence")
        if fault == "column" and rank == size - 1:
            # Behind DTensor's back, as a wrong kernel would: this rank's shard only.
            fc1 = model.layers[1].mlp.fc1
            fc1.register_forward_hook(lambda module, args, out: out + module.bias.to_local())
        train(spoiled(model, fault), data)
    elif layout == "megatron":
        train(spoiled(by_hand(model, dist.group.WORLD, fault), fault), data)
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        train(model, [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in data])
    elif layout == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in data])
    elif layout == "pipeline":
        pipeline(model, data)
    elif layout == "both":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        model = by_hand(model, mesh.get_group("tp"), fault)
        ddp = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        part = mesh.get_local_rank("dp")
        train(ddp, [(x.chunk(2)[part], y.chunk(2)[part]) for x, y in data])
    else:
        raise SystemExit(f"unknown layout {layout}")
    # torch's own trap, with and without a recorder: gloo's thread still wants the interpreter lock to drop a collective
    # while this one holds it and waits for that thread to end.
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
