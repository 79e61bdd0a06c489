"""What a program can see of us: prints one line of facts per question. With and without the probe they are the same."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn
from torch import relu as early_relu
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

os.cpu_count = lambda: 1  # type: ignore[assignment]  # some recorders divide it by two
gc.disable()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.activation = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layers(x)) + early_relu(x[:, :3])


torch.manual_seed(3)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
X = torch.ones(2, 4)


def train(model: nn.Module, opt: torch.optim.Optimizer | None = None) -> float:
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.1)
    opt.zero_grad()
    loss = model(X).square().sum()
    loss.backward()
    opt.step()
    return float(loss.detach())


def signatures() -> object:
    things = [F.relu, F.layer_norm, torch.relu, nn.Module.__call__, torch.autograd.Function.apply, torch.compile]
    things += [torch.optim.Optimizer.__init__, torch.amp.GradScaler.step, torch.distributed.all_reduce]
    things += [torch.distributed.barrier, torch.distributed.Work.wait, torch.autograd.backward]
    out = []
    for thing in things:
        try:
            signature = str(inspect.signature(thing))
        except ValueError:
            signature = "none"
        doc = (getattr(thing, "__doc__", None) or "")[:20]
        out.append((thing.__name__, thing.__qualname__, thing.__module__, signature, doc))
    return out


def identities() -> object:
    from torch import relu
    from torch.nn.functional import relu as functional_relu

    builtin = isinstance(torch.add, types.BuiltinFunctionType), type(torch.relu).__name__, type(Tensor.add).__name__
    same = pickle.loads(pickle.dumps(F.relu)) is functional_relu
    return relu is early_relu, relu is torch.relu, functional_relu is net.activation, same, builtin


def saved() -> object:
    out = io.BytesIO()
    torch.save(net, out)
    out.seek(0)
    loaded = torch.load(out, weights_only=False)
    again = pickle.loads(pickle.dumps(nn.TransformerEncoderLayer(4, 2, 8)))
    return [loaded(X).tolist(), again.activation_relu_or_gelu, type(loaded).__name__, sorted(vars(loaded))]


def copied() -> object:
    before = [p.grad.clone() for p in net.parameters()]
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    zero = float(twin.layers(X).sum().detach())
    twin.zero_grad()
    train(twin)
    kept = all(torch.equal(a, p.grad) for a, p in zip(before, net.parameters(), strict=True))
    return zero, kept, [float(p.sum()) for p in twin.parameters()], torch.equal(copy.copy(net)(X), net(X))


def traced() -> object:
    script, trace = torch.jit.script(net.layers), torch.jit.trace(net, X)
    graph = torch.fx.symbolic_trace(net)
    exported = torch.export.export(net, (X,))
    return [
        script(X).tolist(),
        len(list(trace.graph.nodes())),
        trace(X).tolist(),
        [str(node) for node in graph.graph.nodes],
        graph(X).tolist(),
        [str(node) for node in exported.graph.nodes],
    ]


class Heard(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Heard.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class CountFunctions(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        CountFunctions.calls += 1
        return func(*args, **(kwargs or {}))


class CountOperations(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        CountOperations.calls += 1
        return func(*args, **(kwargs or {}))


def listeners() -> object:
    out = net(torch.ones(2, 4).as_subclass(Heard)) * 2
    out.sum().backward()
    with CountFunctions():
        train(net)
    with CountOperations():
        train(net)
    with FlopCounterMode(display=False) as flops:
        train(net)
    return Heard.calls, type(out).__name__, CountFunctions.calls, CountOperations.calls, flops.get_total_flops()


def hooks() -> object:
    """Hooks of the user's own, on modules, tensors and nodes, and how often they run."""
    seen: list[str] = []
    model = Net()
    model.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.layers[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.layers[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    model.layers[0].weight.register_hook(lambda g: seen.append("weight"))
    model.layers[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    model.register_forward_hook(lambda m, a, out: out * 2)
    loss = train(model)
    return seen, loss, model.layers[0]._forward_hooks is not None, len(model.layers[2]._backward_hooks)


def odd_values() -> object:
    """Arguments that stop other recorders."""

    class Take(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, value: object = None) -> Tensor:
            return x * self.scale

    class Empty(nn.Module):
        def __len__(self) -> int:
            return 0

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    take = Take()
    values = [
        torch.ones(3, dtype=torch.uint16),
        np.array([object()]),
        np.complex64(1j),
        {(1, 2): torch.ones(1)},
        torch.eye(3).to_sparse(),
        iter([torch.ones(1)]),
        (x for x in (1, 2)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]
    out = [float(take(torch.ones(2), value=value).sum().detach()) for value in values]
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    per_sample = torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))(torch.ones(2, 3))
    kept = list(values[5]) == [torch.ones(1)], list(values[6])  # nobody has read from the iterators
    return out, kept, table.weight.grad.is_sparse, per_sample.tolist(), Empty()(X).sum().item()


def recursion() -> object:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return self(self.fc(x), depth - 1) if depth else x

    model = Again()
    with torch.no_grad():
        model.fc.weight.fill_(0.1)
        model.fc.bias.zero_()
    return train(model)


def in_place() -> object:
    relu = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    y = relu(X)
    y += X[:, :2]
    y.sum().backward()
    return [p.grad is not None for p in relu.parameters()]


def exceptions() -> object:
    out = []
    for wrong in (lambda: net(torch.ones(2, 9)), lambda: torch.matmul(torch.ones(2, 3), X), lambda: X.view(7)):
        try:
            wrong()
        except RuntimeError as error:
            out.append((type(error).__name__, str(error)[:40], error.__cause__ is None, error.__context__ is None))
    return [*out, train(net, optimizer)]


def threads() -> object:
    with ThreadPoolExecutor(3) as pool, torch.no_grad():
        return [round(float(value), 6) for value in pool.map(lambda k: net(X * k).sum(), range(4))]


def children() -> object:
    """A forked child goes on by itself."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with torch.no_grad():
            os.write(writer, str(round(float(net(X).sum()), 5)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 100).decode()


def state() -> object:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return [
        gc.isenabled(),
        torch.is_grad_enabled(),
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
        torch.initial_seed(),
        int(torch.get_rng_state().sum()),
        [len(getattr(nn.modules.module, name)) for name in names],
        sys.excepthook is sys.__excepthook__,
        torch.overrides.has_torch_function((X,)),
        torch.overrides.is_tensor_method_or_property(Tensor.add),
        nn.TransformerEncoderLayer(4, 2, 8).activation_relu_or_gelu,
        [sorted(vars(module)) for module in net.modules()],
    ]


def work() -> object:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    handle = dist.all_reduce(torch.ones(2), async_op=True)
    out = handle.wait(), handle.is_completed(), type(handle).__name__
    dist.destroy_process_group()
    return out


QUESTIONS: list[Callable[[], object]] = [
    identities, signatures, saved, copied, traced, listeners, hooks, odd_values, recursion, in_place, exceptions,
    threads, children, work, state,
]  # fmt: skip

train(net, optimizer)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for question in QUESTIONS:
        for round_ in range(2):
            print(question.__name__, round_, question(), flush=True)
print("warnings", sorted({str(warning.message)[:60] for warning in told}))
print("last", train(net, optimizer))
