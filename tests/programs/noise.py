"""A small transformer that trains three steps on one rank, float32 or bfloat16, with one or two threads.

noise.py DTYPE THREADS [FAULT]       FAULT: mask (attention sees one token more), scale (2 % more), bias (dropped)
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, WIDTH, LENGTH, BATCH, HEADS = 128, 64, 32, 8, 4
DTYPE, THREADS, FAULT = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "none"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fault = "none"
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        scores = torch.matmul(q, k.transpose(-2, -1)) / (WIDTH // HEADS) ** 0.5
        future = torch.arange(LENGTH)[None] > torch.arange(LENGTH)[:, None] + (1 if self.fault == "mask" else 0)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        x = x + self.proj(torch.matmul(weights, v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        h = self.ln2(x)
        h = F.linear(h, self.fc1.weight, None if self.fault == "bias" else self.fc1.bias)
        return x + self.fc2(F.gelu(h))


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


def main():
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = Model().to(getattr(torch, DTYPE))
    model.blocks[1].fault = FAULT
    if FAULT == "scale":
        with torch.no_grad():
            model.blocks[1].fc2.weight.mul_(1.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        torch.manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


main()
