"""Programs on two ranks, and compiled ones, whose results must not change by one bit when they are recorded.

torchrun --nproc-per-node 2 parallel.py OUT [name ...]      as neutral.py; without names all but inductor's
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

import neutral
import torch
import torch.distributed as dist
from neutral import LM, PreNorm, autocast, ids, mlp, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

WIDTH = 8


def local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def steps(model: nn.Module, batch: Callable[[], Tensor], *, loss: Callable[[Tensor], Tensor] | None = None) -> list:
    """As neutral.train, for parameters that are shards."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[object] = []
    for _ in range(neutral.STEPS):
        opt.zero_grad()
        with autocast():
            out = model(batch())
            value = loss(out) if loss is not None else out.float().square().mean()
        value.backward()
        seen += [local(value.detach()), *(local(p.grad).clone() for p in model.parameters() if p.grad is not None)]
        opt.step()
        model.eval()
        with torch.no_grad():
            seen.append(local(model(batch())).clone())
        model.train()
    return [*seen, *(local(p) for p in model.parameters()), torch.get_rng_state()]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def fsdp1(**options: object) -> list:
    model = FullyShardedDataParallel(
        LM(PreNorm), device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({PreNorm}), **options
    )
    return steps(model, ids)


def fsdp2(policy: MixedPrecisionPolicy | None = None) -> list:
    model, options = LM(PreNorm), {"mesh": mesh(), **({"mp_policy": policy} if policy is not None else {})}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return steps(model, ids)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tensor_parallel(sequence: bool) -> list:
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        plan: dict[str, object] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        parallelize_module(layer, mesh(), plan)
    if sequence:
        parallelize_module(
            model, mesh(), PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))
        )

    def loss(out: Tensor) -> Tensor:
        return (out.to_local() if isinstance(out, DTensor) else out).float().square().mean()

    return steps(model, lambda: torch.randn(2, 4, WIDTH), loss=loss)


def pipeline() -> list:
    stage_model = mlp(WIDTH)
    stage = PipelineStage(stage_model, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).square().mean())
    opt = torch.optim.SGD(stage_model.parameters(), lr=0.1)
    seen: list[object] = []
    for _ in range(neutral.STEPS):
        opt.zero_grad()
        x, target = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            seen.append(schedule.step(target=target, losses=losses))
        seen += [*losses, *(p.grad.clone() for p in stage_model.parameters())]
        opt.step()
    return [*seen, *stage_model.parameters()]


def compiled(backend: str, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> list:
    """A compiled model, and what Dynamo made of it: graphs, breaks, recompilations."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = LM(PreNorm)
    seen = train(torch.compile(wrap(model), backend=backend), ids, evaluate=True, inner=model)
    return [*seen, counters["stats"]["unique_graphs"], sorted(counters["graph_break"].items())]


def compiled_parts(backend: str) -> list:
    """A compiled layer inside a model that is not, one compiled in place, a compiled loss, an inner graph break."""
    torch._dynamo.reset()
    model = LM(PreNorm)
    model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
    model.blocks[1].compile(backend=backend)

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(29)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            torch._dynamo.graph_break()
            return neutral.Cube.apply(self.inner(y * 0.1))

    model.head = nn.Sequential(model.head, torch.compile(Broken(), backend=backend))

    @torch.compile(backend=backend)
    def loss(out: Tensor) -> Tensor:
        return out.float().square().mean()

    return steps(model, ids, loss=loss)


def compiled_step(backend: str) -> list:
    """Nothing but a compiled function: no module is called outside it."""
    torch._dynamo.reset()
    model = LM(PreNorm)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def loss(batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    seen: list[object] = []
    for _ in range(neutral.STEPS):
        opt.zero_grad()
        with autocast():
            value = loss(ids())
        value.backward()
        opt.step()
        seen.append(value)
    return [*seen, *model.parameters(), torch.get_rng_state()]


def ddp(model: nn.Module, **options: object) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **options)


BF16_PARAMETERS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
PROGRAMS: dict[str, Callable[[], list]] = {
    "ddp": lambda: train(ddp(LM(PreNorm)), ids, evaluate=True),
    "ddp_static_graph": lambda: train(ddp(LM(PreNorm), static_graph=True, gradient_as_bucket_view=True), ids),
    "ddp_unused": lambda: train(ddp(neutral.Experts(), find_unused_parameters=True), lambda: torch.randn(6, 8)),
    "ddp_outputs": lambda: train(ddp(neutral.Outputs()), lambda: torch.randn(3, 6)),
    "fsdp1": fsdp1,
    "fsdp1_original_parameters": lambda: fsdp1(use_orig_params=True),
    "fsdp1_mixed": lambda: fsdp1(mixed_precision=MixedPrecision(**BF16_PARAMETERS)),
    "fsdp2": fsdp2,
    "fsdp2_mixed": lambda: fsdp2(MixedPrecisionPolicy(**BF16_PARAMETERS)),
    "tensor_parallel": lambda: tensor_parallel(sequence=False),
    "sequence_parallel": lambda: tensor_parallel(sequence=True),
    "pipeline": pipeline,
    "compiled_aot_eager": lambda: compiled("aot_eager"),
    "compiled_ddp": lambda: compiled("aot_eager", ddp),
    "compiled_parts": lambda: compiled_parts("aot_eager"),
    "compiled_step": lambda: compiled_step("aot_eager"),
}
SLOW: dict[str, Callable[[], list]] = {
    "compiled_inductor": lambda: compiled("inductor"),
    "compiled_inductor_ddp": lambda: compiled("inductor", ddp),
    "compiled_inductor_parts": lambda: compiled_parts("inductor"),
}

if __name__ == "__main__":
    # Ranks get data of their own where a program shards it; tensor parallel ranks need the same, and do not care.
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    names = sys.argv[2:] or [name + variant for name in PROGRAMS for variant in ("", neutral.BF16)]
    neutral.run(sys.argv[1], names, {**PROGRAMS, **SLOW})
