"""The compiled way of describing a plain tensor says what the general one says, and notices what has changed."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msprobe_launch import native
from msprobe_launch.config import ProbeConfig
from msprobe_launch.records.codec import tensor_text

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def described_by(tmp_path: Path) -> Any:
    from msprobe_launch.adapters.torch.values import TorchValues

    return TorchValues(SimpleNamespace(config=ProbeConfig(run_dir=tmp_path), saving=False))


def quantized() -> Any:
    return torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)


def without_memory() -> Any:
    tensor = torch.randn(8)
    tensor.untyped_storage().resize_(0)
    return tensor


TENSORS: dict[str, Callable[[], Any]] = {
    "float32": lambda: torch.randn(3, 5),
    "float64": lambda: torch.randn(7, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(40).bfloat16(),
    "float16": lambda: torch.randn(40).half(),
    "int64": lambda: torch.arange(6),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5),
    "nan": lambda: torch.tensor([1.0, float("nan")]),
    "infinite": lambda: torch.tensor([1.0, float("-inf")]),
    "huge": lambda: torch.tensor([1e30, 1e30]),
    "large": lambda: torch.randn(1 << 16),
    "transposed": lambda: torch.randn(4, 6).t(),
    "slice of rows": lambda: torch.randn(4, 6)[:, :3],
    "every other": lambda: torch.randn(12)[::2],
    "expanded": lambda: torch.randn(1, 3).expand(5, 3),
    "negated view": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "needs a gradient": lambda: torch.randn(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(2, 2)),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "quantized": quantized,
    "memory given back": without_memory,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", TENSORS)
def test_both_ways_say_the_same(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    tensor = TENSORS[kind]()
    compiled, general = described_by(tmp_path), described_by(tmp_path)
    with torch.no_grad():
        for _ in range(2):  # the first time nothing is known of the shape yet
            expected = tensor_text(general.general(tensor))
            assert tensor_text(compiled.tensor(tensor)) == expected
            compiled.forget()
            general.forget()


def test_inference_tensors_have_no_versions(tmp_path: Path) -> None:
    values = described_by(tmp_path)
    with torch.inference_mode():
        tensor = torch.ones(3)
        assert '"Max": 1.0' in tensor_text(values.tensor(tensor))
        tensor.mul_(2)
        assert '"Max": 2.0' in tensor_text(values.tensor(tensor))


def test_what_is_unchanged_is_the_same_value_and_what_changed_is_not(tmp_path: Path) -> None:
    values = described_by(tmp_path)
    tensor = torch.ones(4)
    first = values.tensor(tensor)
    assert values.tensor(tensor) is first
    tensor.add_(1)
    second = values.tensor(tensor)
    assert second is not first
    assert '"Max": 2.0' in tensor_text(second)
    tensor.data = torch.full((4,), 5.0)  # other memory; the version says nothing
    assert '"Max": 5.0' in tensor_text(values.tensor(tensor))
    values.forget_tensor(tensor)
    tensor.data.mul_(2)
    assert '"Max": 10.0' in tensor_text(values.tensor(tensor))
    assert len(values.settle()) == 4
    assert values.settle() == []


def test_another_tensor_in_the_place_of_a_dead_one_is_measured(tmp_path: Path) -> None:
    values = described_by(tmp_path)
    for number in range(200):  # ids and addresses come back at once
        tensor = torch.full((4,), float(number))
        assert f'"Max": {float(number)}' in tensor_text(values.tensor(tensor))
        del tensor


def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    values = described_by(tmp_path)
    tensor = torch.ones(4)
    seen = weakref.ref(tensor)
    values.tensor(tensor)
    values.tensor(tensor)
    del tensor
    gc.collect()
    assert seen() is None


def test_a_table_is_collected_with_its_owner(tmp_path: Path) -> None:
    values = described_by(tmp_path)
    values.tensor(torch.ones(2))
    gone = weakref.ref(values)
    del values
    gc.collect()  # the table and its owner hold each other
    assert gone() is None


def test_the_compiled_way_is_there(tmp_path: Path) -> None:
    """Our own machines have a compiler and header files; without this nobody would notice that it is not used."""
    if not Path(native.__file__).with_name("_tensors.abi3.so").exists():
        pytest.skip("not compiled here: no header files of CPython")
    assert type(described_by(tmp_path).tensor).__name__ == "Table"


SHARED = """
import torch
from torch import nn
from torch.nn import functional as F

class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)

class Twice(nn.Module):                 # the same tensor in two places
    def forward(self, a, b):
        return torch.mul(a, b)

class Beside(nn.Module):                # an input is consumed by the API and before it
    def forward(self, x):
        return torch.mul(x, x.sin())

class After(nn.Module):                 # and here something follows it
    def forward(self, x):
        return F.relu(x) + 1

class Captured(nn.Module):              # one of two inputs is consumed by nobody
    def forward(self, x, y):
        return F.gelu(x)

class Through(nn.Module):
    def forward(self, x):
        return x

class Swapped(nn.Module):               # the API has the inputs in another order
    def forward(self, x, w):
        return F.linear(w, x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wrapped = Wrapper(Wrapper(nn.Linear(4, 4)))
        self.twice, self.beside, self.after = Twice(), Beside(), After()
        self.captured, self.through, self.swapped = Captured(), Through(), Swapped()
        self.chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(4, 4))
    def forward(self, x):
        h = self.wrapped(x)
        h = self.twice(h, h) + self.beside(h) + self.after(h)
        h = self.captured(h, h * 2) + self.through(h)
        h = self.swapped(h, self.scale)
        return self.chain(h)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.randn(4, 4, requires_grad=True)).square().sum().backward()
    optimizer.step()
"""


def test_modules_have_the_same_gradients_beside_their_apis_as_alone(record: Any) -> None:
    """At mix a module around one API shares that one's hooks; at L0 it has its own."""
    alone, beside = record(SHARED, "L0"), record(SHARED, "mix")
    for step in range(2):
        modules = {op: value for op, value in beside.steps[step].items() if op.startswith("Module.")}
        assert modules == alone.steps[step]
        assert [op for op in alone.steps[step] if ".backward." in op]
        assert {op: parent for op, parent in beside.construct(step).items() if op in modules} == {
            op: parent for op, parent in alone.construct(step).items() if op in modules
        }
    twice = alone.steps[0]["Module.twice.Twice.backward.0"]["output"]
    assert twice[0] is not None
    assert twice[1] is None, "the sum of both is the first one's"
    assert alone.steps[0]["Module.captured.Captured.backward.0"]["output"][1] is None


def test_ever_new_shapes_are_not_all_remembered(tmp_path: Path) -> None:
    values = described_by(tmp_path)

    def describe(sizes: range) -> int:
        for size in sizes:
            assert f'"shape": [{size}, 2]' in tensor_text(values.tensor(torch.ones(2, size).t()))
            values.describe(size)
            values.forget()
            values.settle()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with torch.no_grad():
            early = describe(range(1, 3000))
            late = describe(range(3000, 9000))
    finally:
        tracemalloc.stop()
    assert late - early < 500_000, "300 bytes for a head, 250 for its layout"
