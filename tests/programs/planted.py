"""One fault per step in a small transformer on two ranks, and none with `planted.py none`: the runs to compare.

Every step begins with the same parameters, so that a fault stays in its step.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

FAULTS = ("none", "bf16", "weight", "mask", "residual", "bias", "epsilon", "normalisation", "shard", "none")
VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fault = "none"
        self.ln1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.ln2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        before = x
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        kt = k.transpose(-2, -1)
        if self.fault == "bf16":
            scores = torch.matmul(q.bfloat16(), kt.bfloat16()).float()
        else:
            scores = torch.matmul(q, kt)
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 2 if self.fault == "mask" else 1)
        weights = torch.softmax((scores / WIDTH**0.5).masked_fill(mask, float("-inf")), dim=-1)
        x = x + self.proj(torch.matmul(weights, v))
        h = self.ln2(x)
        if self.fault == "bias":
            h = F.linear(h, self.fc1.weight)
        else:
            h = self.fc1(h)
        h = self.fc2(F.gelu(h))
        return (before if self.fault == "residual" else x) + h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Summed(torch.autograd.Function):
    """The sum over all ranks; its gradient is the same on each."""

    @staticmethod
    def forward(ctx, partial):
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Sharded(nn.Module):
    """Tensor parallel: each rank has half of fc1's rows and bias, and half of fc2's columns."""

    def __init__(self, rank):
        super().__init__()
        self.fault, self.rank = "none", rank
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.fc1(self.norm(x))
        if self.fault == "shard" and self.rank == 1:
            h = torch.add(h, self.fc1.bias)
        return x + Summed.apply(self.fc2(F.gelu(h)))


def set_fault(model, fault, initial):
    """The model as it was, but for one fault in its second block."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), initial, strict=True):
            parameter.copy_(value)
        if fault == "weight":
            model.blocks[1].fc2.weight.mul_(1.001)
    model.blocks[1].fault = fault
    model.blocks[1].ln1.eps = 1e-5 if fault == "epsilon" else 1e-6


def step(model, wrapped, optimizer, fault, rank, world):
    torch.manual_seed(100 + rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    # Ranks have other numbers of tokens; the loss must be divided by all of them, times the ranks that DDP divides by.
    kept = torch.arange(LENGTH).expand(BATCH, LENGTH) < LENGTH - 4 * rank
    count = kept.sum().float()
    total = count.clone()
    dist.all_reduce(total)
    logits = wrapped(tokens[:, :-1])
    losses = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1), reduction="none")
    loss = torch.div((losses * kept.reshape(-1)).sum(), count if fault == "normalisation" else total / world)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_step(model, optimizer, fault):
    torch.manual_seed(100)
    model.fault = fault
    loss = model(torch.randn(BATCH, LENGTH, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ.get("PLANTED_THREADS", "1")))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    # A dropped bias leaves a parameter without a gradient.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(1 + rank)
    sharded = Sharded(rank)
    optimizer = torch.optim.SGD([*model.parameters(), *sharded.parameters()], lr=1e-3)
    for kind in FAULTS:
        fault = "none" if sys.argv[1] == "none" else kind
        if kind == "shard":
            sharded_step(sharded, optimizer, fault)
            continue
        set_fault(model, fault, initial)
        step(model, wrapped, optimizer, fault, rank, world)
    dist.destroy_process_group()


main()
