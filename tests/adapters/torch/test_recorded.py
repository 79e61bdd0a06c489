"""What the torch adapter records of programs, value by value."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.torch

NET = """
import collections, dataclasses, torch
from torch import nn
from torch.nn import functional as F
from torch import relu as early_relu

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
    def forward(self, x, *, scale=1.0, pair=None):
        h = self.fc(x) * scale
        return h, {"side": h + 1}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.norm = nn.LayerNorm(2)
    def forward(self, x):
        h, extra = self.inner(x, scale=0.5, pair=(x, [1, "two"]))
        h += extra["side"]
        return self.norm(early_relu(h))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
TRAIN = """
for _ in range(2):
    optimizer.zero_grad()
    loss = net(torch.ones(4, 3)).square().sum()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def trained(record: Any) -> Any:
    return record(NET + TRAIN + 'print("LOSS", float(loss))')


def test_names_numbers_and_order_are_those_of_the_field(trained: Any) -> None:
    forward = [name for name in trained.steps[0] if "forward" in name and name != "Torch.ones.0.forward"]
    assert forward == [
        "Functional.linear.0.forward",
        "Module.inner.fc.Linear.forward.0",
        "Tensor.__mul__.0.forward",
        "Tensor.__add__.0.forward",
        "Module.inner.Inner.forward.0",
        "Tensor.__iadd__.0.forward",
        "Torch.relu.0.forward",
        "Functional.layer_norm.0.forward",
        "Module.norm.LayerNorm.forward.0",
        "Tensor.square.0.forward",
        "Tensor.sum.0.forward",
    ]
    # Step 1's batch is made after step 0's optimizer: until the next forward it belongs to step 0.
    assert list(trained.steps[0])[-1] == "Torch.ones.0.forward"
    assert [n for n in trained.steps[0] if n != "Torch.ones.0.forward"] == list(trained.steps[1])


def test_keyword_inputs_nested_values_and_outputs(trained: Any) -> None:
    op = trained.steps[0]["Module.inner.Inner.forward.0"]
    assert op["input_kwargs"]["scale"] == {"type": "float", "value": 0.5}
    first, second = op["input_kwargs"]["pair"]
    assert first["shape"] == [4, 3]
    assert second == [{"type": "int", "value": 1}, {"type": "str", "value": "two"}]
    assert [type(item) for item in op["output"]] == [dict, dict]
    assert op["output"][1]["side"]["shape"] == [4, 2]
    assert set(trained.steps[0]["Module.inner.fc.Linear.forward.0"]["parameters"]) == {"weight", "bias"}


def test_in_place_changes_do_not_reach_back_into_what_was_recorded(trained: Any) -> None:
    returned = trained.steps[0]["Module.inner.Inner.forward.0"]["output"][0]
    changed = trained.steps[0]["Tensor.__iadd__.0.forward"]
    assert changed["input_args"][0] == returned
    assert changed["output"][0]["Max"] != returned["Max"]


def test_gradients_of_inputs_outputs_and_parameters(trained: Any) -> None:
    step = trained.steps[0]
    backward = step["Module.norm.LayerNorm.backward.0"]
    assert backward["input"][0]["shape"] == [4, 2]
    assert backward["output"][0]["shape"] == [4, 2]
    # x needs no gradient: its place is kept and empty.
    assert step["Module.inner.fc.Linear.backward.0"]["output"] == [None]
    gradients = step["Module.norm.LayerNorm.parameters_grad.0"]
    assert set(gradients) == {"weight", "bias"}
    assert gradients["weight"][0]["shape"] == [2]


def test_parents_and_stacks(trained: Any) -> None:
    parents = trained.construct()
    assert parents["Functional.linear.0.forward"] == "Module.inner.fc.Linear.forward.0"
    assert parents["Module.inner.fc.Linear.forward.0"] == "Module.inner.Inner.forward.0"
    assert parents["Functional.layer_norm.0.backward"] == "Module.norm.LayerNorm.backward.0"
    assert parents["Tensor.sum.0.forward"] is None
    frames = trained.stacks()["Tensor.__iadd__.0.forward"]
    assert frames[0].endswith(', in forward, \n h += extra["side"]')
    assert frames[-1].endswith("in <module>, \n loss = net(torch.ones(4, 3)).square().sum()") or any(
        "loss = net(torch.ones(4, 3))" in frame for frame in frames
    )
    assert not any("msprobe_launch" in frame for frame in frames)


def test_the_loss_is_in_the_file(trained: Any) -> None:
    loss = trained.steps[1]["Tensor.sum.0.forward"]["output"][0]
    assert loss["Max"] == loss["Min"] == loss["Mean"] == loss["Norm"] == float(trained.stdout.split()[-1])


@pytest.mark.parametrize(("level", "kinds"), [("L0", {"Module"}), ("L1", {"Functional", "Tensor", "Torch"})])
def test_levels(record: Any, level: str, kinds: set[str]) -> None:
    recorded = record(NET + TRAIN, level)
    assert {name.split(".")[0] for name in recorded.steps[0]} == kinds
    if level == "L1":
        assert recorded.construct() == {}


VALUES = """
import collections, dataclasses, enum, numpy as np, torch
from torch import nn

class Color(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Pair:
    u: int
    v: torch.Tensor
Point = collections.namedtuple("Point", "p q")
class Take(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
    def forward(self, x, value=None):
        return x * self.w
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.take = Take()
    def forward(self, values):
        x = torch.ones(2)
        for value in values:
            x = self.take(x, value=value)
        return x.sum()
cyclic = []
cyclic.append(cyclic)
class Hostile:
    def __getattr__(self, name): raise RuntimeError("do not ask")
VALUES = dict(
    f32=torch.arange(6.0).reshape(2, 3), scalar=torch.tensor(-3.5), boolean=torch.tensor([True, False]),
    int64=torch.tensor([3, -2, 1]), uint8=torch.tensor([1, 2], dtype=torch.uint8),
    uint16=torch.tensor([1, 2], dtype=torch.uint16), f64=torch.tensor([1.0, 2.0], dtype=torch.float64),
    bf16=torch.tensor([1.0, 2.5], dtype=torch.bfloat16), f16=torch.tensor([1.0, 6e4, 6e4], dtype=torch.float16),
    fp8=torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), c64=torch.tensor([3 + 4j, 1 + 2j]),
    empty=torch.empty(0, 3), meta=torch.empty(2, 2, device="meta"), nan=torch.tensor([1.0, float("nan")]),
    inf=torch.tensor([1.0, float("inf"), -float("inf")]), big=torch.full((4,), 3e38), strided=torch.arange(6.0).reshape(2, 3).T,
    sparse=torch.eye(3).to_sparse(), nested=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    quantized=torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 0, torch.qint8),
    i=3, f=2.5, f_nan=float("nan"), f_inf=float("inf"), neg_zero=-0.0, zero=0.0, b=True, s="hello", none=None, c=1 + 2j, by=b"ab",
    sl=slice(1, 5, 2), ell=..., size=torch.Size([2, 3]), dtype=torch.float16, memfmt=torch.channels_last,
    dev=torch.device("cpu"), np_i=np.int32(4), np_b=np.bool_(True), np_arr=np.arange(4.0).reshape(2, 2), np_c=np.complex64(1j),
    np_obj=np.array([object()]), lst=[1, torch.ones(2), "x"], dct={"a": torch.ones(1), (1, 2): 5}, nt=Point(1, torch.zeros(1)),
    dc=Pair(1, torch.zeros(2)), enum=Color.RED, obj=object(), fn=print, hostile=Hostile(), cyclic=cyclic, long="x" * 10000,
)
net = Net()
net(list(VALUES.values())).backward()
print(" ".join(VALUES))
"""


@pytest.fixture(scope="module")
def values(record: Any) -> dict[str, Any]:
    recorded = record(VALUES, "L0")
    assert recorded.mark["lost"] == {}
    names = recorded.stdout.split()
    return {
        name: recorded.steps[0][f"Module.take.Take.forward.{i}"]["input_kwargs"]["value"]
        for i, name in enumerate(names)
    }


def stats(item: dict[str, Any]) -> tuple[Any, ...]:
    return item["Max"], item["Min"], item["Mean"], item["Norm"]


def test_statistics_of_each_dtype(values: dict[str, Any]) -> None:
    assert stats(values["f32"]) == (5.0, 0.0, 2.5, pytest.approx(math.sqrt(55)))
    assert stats(values["scalar"]) == (-3.5, -3.5, -3.5, 3.5)  # a norm has no sign
    assert stats(values["boolean"]) == (True, False, None, None)
    assert stats(values["int64"]) == (3, -2, pytest.approx(2 / 3), pytest.approx(math.sqrt(14)))
    assert stats(values["uint8"]) == (2, 1, 1.5, pytest.approx(math.sqrt(5)))
    assert stats(values["uint16"]) == (2, 1, 1.5, pytest.approx(math.sqrt(5)))
    assert stats(values["f64"]) == (2.0, 1.0, 1.5, pytest.approx(math.sqrt(5)))
    assert stats(values["bf16"]) == (2.5, 1.0, 1.75, pytest.approx(math.sqrt(7.25)))  # not rounded to bf16
    assert stats(values["f16"]) == (6e4, 1.0, pytest.approx(120001 / 3), pytest.approx(math.sqrt(7.2e9 + 1)))
    assert stats(values["fp8"]) == (2.0, 1.0, 1.5, pytest.approx(math.sqrt(5)))
    assert stats(values["c64"]) == (
        5.0,
        pytest.approx(math.sqrt(5)),
        pytest.approx((5 + 5**0.5) / 2),
        pytest.approx(30**0.5),
    )
    assert stats(values["empty"]) == stats(values["meta"]) == (None, None, None, None)
    assert all(math.isnan(x) for x in stats(values["nan"]))
    high, low, mean, norm = stats(values["inf"])
    assert (high, low, norm) == (math.inf, -math.inf, math.inf)
    assert math.isnan(mean)
    assert stats(values["big"])[2:] == (pytest.approx(3e38), pytest.approx(6e38))  # float32 overflows here
    assert stats(values["strided"]) == stats(values["f32"])
    assert values["strided"]["shape"] == [3, 2]
    assert stats(values["sparse"]) == (1.0, 1.0, 1.0, pytest.approx(3**0.5))
    assert stats(values["nested"]) == (1.0, 1.0, 1.0, pytest.approx(5**0.5))
    assert stats(values["quantized"]) == (1.0, 0.5, 0.75, pytest.approx(1.25**0.5))
    assert values["f32"] | {"Norm": 0} == {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "Max": 5.0, "Min": 0.0, "Mean": 2.5, "Norm": 0,
        "requires_grad": False,
    }  # fmt: skip


def test_values_that_are_no_tensors(values: dict[str, Any]) -> None:
    assert values["i"] == {"type": "int", "value": 3}
    assert values["f"] == {"type": "float", "value": 2.5}
    assert math.isnan(values["f_nan"]["value"])
    assert values["f_inf"]["value"] == math.inf
    assert math.copysign(1, values["neg_zero"]["value"]) == -1
    assert math.copysign(1, values["zero"]["value"]) == 1
    assert values["b"] == {"type": "bool", "value": True}
    assert values["s"] == {"type": "str", "value": "hello"}
    assert values["none"] is None
    assert values["c"] == {"type": "complex", "value": "(1+2j)"}
    assert values["sl"] == {"type": "slice", "value": [1, 5, 2]}
    assert values["ell"] == {"type": "ellipsis", "value": "..."}
    assert values["size"] == {"type": "torch.Size", "value": [2, 3]}
    assert values["dtype"] == {"type": "torch.dtype", "value": "torch.float16"}
    assert values["memfmt"] == {"type": "torch.memory_format", "format": "channels_last"}
    assert values["dev"] == {"type": "torch.device", "value": "cpu"}
    assert values["np_i"] == {"type": "int32", "value": 4}
    assert values["np_b"] == {"type": "bool", "value": True}
    assert values["np_arr"] | {"Norm": 0} == {
        "type": "numpy.ndarray", "dtype": "float64", "shape": [2, 2], "Max": 3.0, "Min": 0.0, "Mean": 1.5, "Norm": 0,
    }  # fmt: skip
    assert values["np_c"] == {"type": "complex64", "value": "1j"}
    assert values["np_obj"]["Max"] is None
    assert values["lst"][0] == {"type": "int", "value": 1}
    assert set(values["dct"]) == {"a", "(1, 2)"}
    assert values["nt"]["p"] == {"type": "int", "value": 1}
    assert values["dc"]["v"]["shape"] == [2]
    assert values["enum"] == {"type": "Color", "value": "RED"}
    assert values["obj"] is values["fn"] is values["hostile"] is None


def test_hostile_sizes_are_bounded(values: dict[str, Any]) -> None:
    assert "10000 chars" in values["long"]["value"]
    depth, node = 0, values["cyclic"]
    while isinstance(node, list):
        depth, node = depth + 1, node[0]
    assert depth < 20
    assert "nested deeper" in node["value"]


def test_a_module_called_directly_has_its_name_inside_the_model(record: Any) -> None:
    recorded = record(NET + "net.inner(torch.ones(1, 3))[0].sum().backward()\n", "L0")
    assert "Module.inner.fc.Linear.forward.0" in recorded.steps[0]


def test_a_second_model_carries_its_class_name(record: Any) -> None:
    recorded = record(
        NET + "d = nn.Sequential(nn.Linear(2, 1))\nd(net(torch.ones(1, 3))).sum().backward()\n", "L0+eval"
    )
    names = {name for step in recorded.steps for name in step}
    assert "Module.inner.fc.Linear.forward.0" in names
    assert "Module.Sequential.0.Linear.forward.0" in names


def test_a_model_that_is_one_layer_is_recorded(record: Any) -> None:
    recorded = record("import torch\nm = torch.nn.Linear(3, 2)\nm(torch.ones(1, 3)).sum().backward()\n", "L0")
    assert next(iter(recorded.steps[0])) == "Module.Linear.forward.0"


def test_a_call_before_the_first_module_that_opens_the_step_leaves_every_call_recorded_once(record: Any) -> None:
    recorded = record(
        "import torch\nm = torch.nn.Linear(3, 2)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for p in m.parameters(): p.data.add_(torch.rand_like(p))\nm(torch.ones(1, 3)).sum().backward(); o.step()\n",
        "L1",
    )
    assert [name for name in recorded.steps[0] if "linear" in name or "rand_like" in name] == [
        "Torch.rand_like.0.forward",
        "Torch.rand_like.1.forward",
        "Functional.linear.0.forward",
        "Functional.linear.0.backward",
    ]


def test_a_program_without_modules_is_recorded_step_by_step(record: Any) -> None:
    recorded = record(
        "import torch\nw = torch.ones(3, 2, requires_grad=True)\no = torch.optim.SGD([w], lr=0.1)\n"
        "for _ in range(3):\n    o.zero_grad(); (torch.ones(4, 3) @ w).sum().backward(); o.step()\n",
        "L1",
    )
    assert len(recorded.steps) == 3
    assert "Tensor.__matmul__.0.forward" in recorded.steps[0]
    assert "Tensor.__matmul__.0.backward" in recorded.steps[2]


def test_a_caught_exception_of_the_program_does_not_end_recording(record: Any) -> None:
    code = NET + (
        "x = torch.ones(4, 3)\n"
        "try:\n    net(torch.ones(4, 7))\nexcept RuntimeError as error:\n    print('THEIRS', 'shapes' in str(error))\n"
        "net(x).sum().backward()\n"
    )
    recorded = record(code + "optimizer.step()\n")
    assert recorded.stdout.split() == ["THEIRS", "True"]
    assert recorded.mark["lost"] == {}
    step = recorded.steps[0]
    assert step["Module.inner.fc.Linear.forward.0"]["output"] == []  # what went in is on record
    assert step["Module.inner.fc.Linear.forward.0"]["input_args"][0]["shape"] == [4, 7]
    assert recorded.construct()["Module.inner.Inner.forward.1"] is None  # nothing was left open as a parent


def test_recompute_is_marked_and_every_block_has_one_logical_forward(
    record: Any, shared: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    code = (shared / "cases" / "p06_recompute.py").read_text()
    first, second = record(code), record(code)
    for block in ("plain", "re", "nonre"):
        calls = [op for name, op in first.steps[0].items() if name.startswith(f"Module.{block}.Blk.forward")]
        assert [bool(op.get("is_recompute")) for op in calls].count(False) == 1
        assert len(calls) == (1 if block == "plain" else 2)
    assert [list(step) for step in first.steps] == [list(step) for step in second.steps]


COMPILED = (
    NET
    + """
from torch._dynamo.utils import counters
import hashlib
compiled = torch.compile(net, backend="aot_eager")
for _ in range(4):
    optimizer.zero_grad()
    compiled(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        compiled(torch.ones(4, 3))
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
print(digest, counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
"""
)


def test_compiled_models_keep_their_graphs_and_results(record: Any, run_cli: Any, tmp_path: Any) -> None:
    (tmp_path / "bare.py").write_text(COMPILED)
    bare = run_cli([tmp_path / "bare.py"])
    assert bare.returncode == 0, bare.stderr[-2000:]
    recorded = record(COMPILED)
    assert recorded.stdout == bare.stdout
    assert bare.stdout.split()[2] == "{}"
    assert len(recorded.steps) == 4
    assert recorded.mark["lost"] == {}


def test_memory_that_was_given_back_is_not_read(record: Any) -> None:
    code = """
import torch
from torch import nn
class Take(nn.Module):
    def forward(self, x, other=None): return x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.take, self.weight = Take(), nn.Parameter(torch.ones(2))
    def forward(self, x, other): return self.take(x * self.weight, other=other)
freed = torch.ones(64, 64), torch.ones(9).bfloat16(), torch.ones(9).bool(), torch.ones(9, dtype=torch.float16)
view = freed[0][3:, 1:]
for tensor in freed:
    tensor.untyped_storage().resize_(0)  # what FSDP does to gathered parameters
net = Net()
for other in (*freed, view):
    net(torch.ones(2), other).sum().backward()
"""
    recorded = record(code, "L0")
    assert recorded.mark["lost"] == {}
    others = [step["Module.take.Take.forward.0"]["input_kwargs"]["other"] for step in recorded.steps]
    assert [item["shape"] for item in others] == [[64, 64], [9], [9], [9], [61, 63]]
    assert all(stats(item) == (None, None, None, None) for item in others)
