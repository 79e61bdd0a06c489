"""Programs whose results must not change by one bit when they are recorded.

    python neutral.py OUT [name ...]     writes OUT/rank<R>.json: {program: sha256 of all it computed}

Run by one process, or by two under torchrun. Each program trains for five steps; the hash covers losses, gradients,
parameters, buffers, evaluation outputs and the state of the random number generator. `<name>_bf16` is the same program
under autocast to bfloat16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

STEPS = 5
BF16 = "_bf16"
_autocast = contextlib.nullcontext


def autocast() -> AbstractContextManager[object]:
    """Autocast in the `_bf16` variants, nothing in the others."""
    return _autocast()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        q, k, v = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        score = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        if mask is not None:
            score = score.masked_fill(mask, float("-inf"))
        return self.proj((self.drop(score.softmax(-1)) @ v).transpose(1, 2).reshape(b, s, d))


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class PreNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2, self.attn, self.mlp = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width), mlp(width)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.n1(x), mask=mask)
        return x + self.mlp(self.n2(x))


class PostNorm(PreNorm):
    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = self.n1(x + self.attn(x, mask=mask))
        return self.n2(x + self.mlp(x))


class Parallel(nn.Module):
    """GPT-J: one tensor feeds attention, the MLP and the skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(width), mlp(width)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return x + self.attn(x, mask=mask) + self.mlp(x)


class LM(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module], *, tied: bool = False, width: int = 16) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(29, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(3))
        self.head = nn.Linear(width, 29, bias=False)
        if tied:
            self.head.weight = self.tok.weight
        self.register_buffer("mask", torch.triu(torch.ones(8, 8, dtype=torch.bool), 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, mask=self.mask)
        return self.head(x)


class TwoBranch(nn.Module):
    """BatchNorm in two branches and a skip: three gradients meet in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.c = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.out((self.b(x) + torch.tanh(self.c(x)) * x + x).mean((2, 3)))


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n, self.c2 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)
        self.act, self.out = nn.ReLU(inplace=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.n(self.c1(x)))
        z = self.c2(y)
        z += y
        y = z * 1.0
        y.mul_(0.5)
        v = y.mean((2, 3))
        v[:, 0].mul_(1.5)
        return self.out(v)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.p1, self.p3, self.p5 = (nn.Conv2d(8, 4, k, padding=k // 2) for k in (1, 3, 5))
        self.out = nn.Conv2d(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (self.out(torch.cat([self.p1(x), self.p3(x), self.p5(x)], 1)) + x).mean((2, 3))


class Shared(nn.Module):
    """One module called three times, dict and tuple outputs, keyword inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.cell(x, hx=h)
        return self.out(h)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNorm(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=True)
        return checkpoint(self.blocks[2], x, use_reentrant=False)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Cube.apply(self.a(x)))


def images() -> Tensor:
    return torch.randn(4, 3, 6, 6)


def ids() -> Tensor:
    return torch.randint(0, 29, (2, 8))


def digest(parts: Iterable[object]) -> str:
    out = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            part = part.detach().contiguous()
            out.update(str((part.dtype, tuple(part.shape))).encode())
            out.update(part.flatten().view(torch.uint8).numpy().tobytes())
        else:
            out.update(repr(part).encode())
    return out.hexdigest()


def train(
    model: nn.Module,
    batch: Callable[[], Tensor],
    *,
    accumulate: int = 1,
    evaluate: bool = False,
    optimizer: str = "AdamW",
    inner: nn.Module | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> list[object]:
    """Five steps; everything that training computed. `inner` is the module under a wrapper, for its state."""
    if prepare is not None:
        prepare(model)
    opt = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    seen: list[object] = []
    for _ in range(STEPS):
        opt.zero_grad()
        for _ in range(accumulate):
            with autocast():
                out = model(batch())
                out = out if isinstance(out, Tensor) else out.logits
                loss = out.float().square().mean() / accumulate
            loss.backward()
            seen.append(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        opt.step()
        if evaluate:
            model.eval()
            with torch.no_grad(), autocast():
                seen.append(model(batch()).clone())
            with torch.inference_mode():
                seen.append(model(batch()).clone())
            model.train()
    seen += list((inner or model).state_dict().values())
    seen.append(torch.get_rng_state())
    return seen


def ddp(model: nn.Module) -> nn.Module:
    if not dist.is_initialized():
        return model
    return nn.parallel.DistributedDataParallel(model)


def gan() -> list[object]:
    g, d = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
    )
    og, od = torch.optim.Adam(g.parameters(), lr=1e-2), torch.optim.Adam(d.parameters(), lr=1e-2)
    seen: list[object] = []
    for _ in range(STEPS):
        real, z = torch.randn(5, 6), torch.randn(5, 4)
        od.zero_grad()
        x = real.clone().requires_grad_()
        with autocast():
            (penalty,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
            loss_d = F.softplus(d(g(z).detach())).mean() + F.softplus(-d(real)).mean() + penalty.square().mean()
        loss_d.backward()
        od.step()
        og.zero_grad()
        with autocast():
            loss_g = F.softplus(-d(g(z))).mean()
        loss_g.backward()
        og.step()
        seen += [loss_d, loss_g, *(p.grad.clone() for p in (*g.parameters(), *d.parameters()))]
    return [*seen, *g.state_dict().values(), *d.state_dict().values(), torch.get_rng_state()]


def functional() -> list[object]:
    """No module at all."""
    w, b = torch.randn(6, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    opt = torch.optim.SGD([w, b], lr=0.1, momentum=0.9)
    seen: list[object] = []
    for _ in range(STEPS):
        opt.zero_grad()
        with autocast():
            loss = ((torch.randn(4, 6) @ w + b).relu() ** 2).float().sum()
        loss.backward()
        opt.step()
        seen += [loss, w.grad.clone(), b.grad.clone()]
    return [*seen, w, b, torch.get_rng_state()]


def encoder() -> list[object]:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    return train(model, lambda: torch.randn(2, 5, 16), evaluate=True)


def lstm() -> list[object]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r, self.o = nn.LSTM(5, 7, num_layers=2, batch_first=True), nn.Linear(7, 2)

        def forward(self, x: Tensor) -> Tensor:
            y, (_, _) = self.r(x)
            return self.o(y[:, -1])

    return train(Net(), lambda: torch.randn(3, 4, 5))


def scaled() -> list[object]:
    """A gradient scaler that skips a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    seen: list[object] = []
    for step in range(STEPS):
        opt.zero_grad()
        with autocast():
            loss = model(torch.randn(3, 4)).float().sum() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        seen.append(scaler.get_scale())
    return [*seen, *model.state_dict().values()]


def lbfgs() -> list[object]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def closure() -> Tensor:
        opt.zero_grad()
        with autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        return loss

    seen: list[object] = [opt.step(closure) for _ in range(STEPS)]
    return [*seen, *model.state_dict().values()]


class Experts(nn.Module):
    """Mixture of experts: which tokens an expert gets, and whether any, depends on the values."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, experts), nn.ModuleList(mlp(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).float().softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            out.index_add_(0, token, (expert(x[token]).float() * weight[token, place, None]).to(out.dtype))
        return out


class ModelOutput(OrderedDict):
    """As transformers has it: a dictionary with attributes."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class Outputs(nn.Module):
    """Dataclass and ModelOutput outputs, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Packed(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Output:
        packed = self.a(x)
        assert type(packed) is ModelOutput
        return Output(self.b(packed.logits), (packed.hidden, x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> ModelOutput:
        y = self.fc(x)
        return ModelOutput(logits=y.tanh(), hidden=y * 2)


class Selective(nn.Module):
    """Selective recomputation: products are kept, the rest is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = PreNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        def policy(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
            keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return checkpoint(
            self.block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )


@torch.library.custom_op("neutral::scaled_sin", mutates_args=())
def scaled_sin(x: Tensor, scale: float) -> Tensor:
    return x.sin() * scale


def _saves_input(ctx, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


scaled_sin.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0].cos() * ctx.scale, None), setup_context=_saves_input
)


class Odd(nn.Module):
    """A custom op, a lazy module, complex numbers, an orthogonal parametrization, and views that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(6)
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.table = nn.Embedding(7, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = scaled_sin(self.lazy(x).float(), 0.5)
        y = torch.fft.irfft(torch.fft.rfft(y) * (1 + 0.5j), n=6)
        y = self.orthogonal(y.float()).float() + self.table(torch.tensor([1, 4, 1]))
        z = y.clone()
        z[:, ::2] *= 2.0
        z.view(-1)[:3].add_(1.0)
        return z.unflatten(1, (2, 3)).transpose(1, 2).flatten(1) * self.scale


def transforms() -> list[object]:
    """torch.func: per-sample gradients, a Hessian-vector product, forward-mode derivatives, functional calls."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    values = {name: value.detach() for name, value in model.named_parameters()}
    seen: list[object] = []

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        with autocast():
            return torch.func.functional_call(model, values, (x,)).float().square().mean()

    for _ in range(STEPS):
        x = torch.randn(3, 4)
        samples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)
        gradient = torch.func.grad(loss)(values, x)
        _, product = torch.func.jvp(lambda v, x=x: torch.func.grad(loss)(v, x), (values,), (gradient,))
        seen += [*samples.values(), *gradient.values(), *product.values()]
        values = {name: value - 0.1 * gradient[name] for name, value in values.items()}
        with torch.enable_grad():
            value = loss(dict(model.named_parameters()), x)
            value.backward()
        seen += [value, *(p.grad.clone() for p in model.parameters())]
    return [*seen, *values.values(), torch.get_rng_state()]


def threads() -> list[object]:
    """Two threads that each train a model of their own while the main thread trains a third."""
    results: dict[int, list[object]] = {}

    def work(index: int) -> None:
        model = mlp(6)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(0.01 * (number + 1)).add_(torch.arange(parameter.numel()).view_as(parameter) * 0.01)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[object] = []
        for step in range(STEPS):
            opt.zero_grad()
            with autocast():
                value = model(torch.full((2, 6), 0.1 * (step + index))).float().square().mean()
            value.backward()
            opt.step()
            seen.append(value)
        results[index] = [*seen, *model.state_dict().values()]

    others = [threading.Thread(target=work, args=(index,)) for index in (1, 2)]
    for other in others:
        other.start()
    work(0)
    for other in others:
        other.join()
    return [part for index in sorted(results) for part in results[index]]


def double_backward() -> list[object]:
    """A gradient of a gradient through a custom function, twice over one graph."""
    model = Custom()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[object] = []
    for _ in range(STEPS):
        opt.zero_grad()
        x = torch.randn(3, 6, requires_grad=True)
        with autocast():
            value = model(x).float().square().mean()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        value.backward(retain_graph=True)
        first.square().sum().backward()
        opt.step()
        seen += [value, first, *(p.grad.clone() for p in model.parameters())]
    return [*seen, *model.state_dict().values(), torch.get_rng_state()]


PROGRAMS: dict[str, Callable[[], list[object]]] = {
    "pre_norm_ddp": lambda: train(ddp(LM(PreNorm)), ids, evaluate=True),
    "post_norm": lambda: train(LM(PostNorm), ids, evaluate=True),
    "parallel_block": lambda: train(LM(Parallel), ids),
    "tied_weights": lambda: train(LM(PreNorm, tied=True), ids),
    "two_branch": lambda: train(TwoBranch(), images, evaluate=True),
    "two_branch_ddp_accumulate": lambda: train(ddp(TwoBranch()), images, accumulate=2),
    "inplace": lambda: train(Inplace(), images),
    "inplace_ddp": lambda: train(ddp(Inplace()), images),
    "inception": lambda: train(Inception(), images),
    "shared": lambda: train(Shared(), lambda: torch.randn(3, 6)),
    "checkpointed": lambda: train(Checkpointed(), lambda: torch.randn(2, 4, 8)),
    "custom_function": lambda: train(Custom(), lambda: torch.randn(3, 6)),
    "accumulation_sgd": lambda: train(LM(PreNorm), ids, accumulate=3, optimizer="SGD"),
    "gan": gan,
    "functional": functional,
    "encoder": encoder,
    "lstm": lstm,
    "scaler": scaled,
    "lbfgs": lbfgs,
    "experts": lambda: train(Experts(), lambda: torch.randn(6, 8), evaluate=True),
    "outputs": lambda: train(Outputs(), lambda: torch.randn(3, 6)),
    "selective": lambda: train(Selective(), lambda: torch.randn(2, 4, 8)),
    "odd": lambda: train(Odd(), lambda: torch.randn(3, 4), optimizer="SGD", prepare=lambda m: m(torch.randn(3, 4))),
    "transforms": transforms,
    "threads": threads,
    "double_backward": double_backward,
}


def write(out: str, hashes: dict[str, str]) -> None:
    """Leave this rank's hashes in the folder."""
    Path(out).mkdir(parents=True, exist_ok=True)
    Path(out, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(hashes, indent=1))


def run(out: str, names: list[str], programs: dict[str, Callable[[], list[object]]]) -> None:
    """Run programs by name and write their hashes."""
    global _autocast
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    hashes = {}
    for name in names:
        torch.manual_seed(1234)
        wide = name.removesuffix(BF16)
        _autocast = contextlib.nullcontext if wide == name else lambda: torch.autocast("cpu", dtype=torch.bfloat16)
        hashes[name] = digest(programs[wide]())
    write(out, hashes)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:] or [name + variant for name in PROGRAMS for variant in ("", BF16)], PROGRAMS)
