"""Tasks and summary modes of the torch adapter: what is in the files, compared with the tensors themselves."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    out = net(torch.ones(2, 3))
    x = torch.arange(6.0).reshape(2, 3)
    view = x[:, 1:]
    y = torch.mul(view, 2.0)
    x.add_(100)          # what was saved of x and view stays as it was
    loss = out.sum() + y.sum()
    loss.backward()
    optimizer.step()
"""

# One process each for several runs: a session is started, a step is made, the session is finished.
RUNS = """
import os, sys
from pathlib import Path
import torch
from msprobe_launch import adapters
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.config import Level, ProbeConfig, SummaryMode, Task
{program}
folder, task, mode, tensor_list = sys.argv[1:]
config = ProbeConfig(run_dir=Path(folder), level=Level.MIX, task=Task(task), summary_mode=SummaryMode(mode),
                     tensor_list=tuple(filter(None, tensor_list.split(","))))
session = adapters.start("torch", config, RankIdentity(0, 0, 1, "here", os.getpid()))
step()
session.finish(clean=True)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_cli: Any) -> Any:
    pytest.importorskip("torch")
    made: dict[tuple[str, ...], Path] = {}

    def run(task: str, mode: str = "statistics", tensor_list: str = "") -> Path:
        key = (task, mode, tensor_list)
        if key not in made:
            folder = tmp_path_factory.mktemp("tasks")
            script = folder / "program.py"
            script.write_text(RUNS.format(program=PROGRAM))
            done = run_cli([script, folder / "run", *key])
            assert done.returncode == 0, done.stderr[-3000:]
            made[key] = folder / "run" / "step0" / "rank0"
        return made[key]

    return run


def data(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "dump.json").read_text())["data"]


def tensors(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value] if "shape" in value else [item for part in value.values() for item in tensors(part)]
    return [item for part in value for item in tensors(part)] if isinstance(value, list) else []


def test_task_tensor_saves_values_as_they_were(runs: Any) -> None:
    import torch

    folder = runs("tensor")
    dump = data(folder)
    load = lambda name: torch.load(folder / "dump_tensor_data" / name, weights_only=True)  # noqa: E731
    view = dump["Torch.mul.0.forward"]["input_args"][0]
    assert view["data_name"] == "Torch.mul.0.forward.input.0.pt"
    saved = load(view["data_name"])
    assert saved.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert saved.untyped_storage().nbytes() == 16  # not all that it is a view of
    assert load("Tensor.add_.0.forward.input.0.pt").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert load("Tensor.add_.0.forward.output.0.pt").tolist() == [[100.0, 101.0, 102.0], [103.0, 104.0, 105.0]]
    gradient = dump["Module.0.Linear.parameters_grad.0"]["weight"][0]
    assert gradient["data_name"] == "Module.0.Linear.parameters_grad.0.weight.pt"
    assert dump["Module.0.Linear.forward.0"]["parameters"]["bias"]["data_name"] == (
        "Module.0.Linear.forward.0.parameters.bias.pt"
    )
    header = json.loads((folder / "dump.json").read_text())
    assert header["dump_data_dir"] == str(folder / "dump_tensor_data")
    named = [item["data_name"] for item in tensors(dump)]
    assert len(named) == len(set(named)) > 40
    for item in tensors(dump):
        value = load(item["data_name"])
        assert [*value.shape] == item["shape"]
        assert value.max().item() == item["Max"]
        assert not value.requires_grad
    assert sorted(path.name for path in (folder / "dump_tensor_data").iterdir()) == sorted(named)


def test_a_tensor_that_two_ops_saw_is_on_the_disk_once(runs: Any) -> None:
    folder = runs("tensor") / "dump_tensor_data"
    output, following = (
        folder / "Functional.linear.0.forward.output.0.pt",
        folder / "Functional.relu.0.forward.input.0.pt",
    )
    assert output.stat().st_ino == following.stat().st_ino


def test_md5_is_the_crc_of_the_bytes_beside_the_statistics(runs: Any) -> None:
    import torch

    dump, values = data(runs("statistics", "md5")), runs("tensor") / "dump_tensor_data"
    checked = 0
    for name, op in dump.items():
        for role, part in (("input", op.get("input_args", [])), ("output", op.get("output", []))):
            for index, item in enumerate(part):
                path = values / f"{name}.{role}.{index}.pt"
                if not tensors([item]) or not path.exists():
                    continue
                raw = torch.load(path, weights_only=True).numpy().tobytes()
                assert item["md5"] == f"{zlib.crc32(raw):08x}"
                assert item["Norm"] is not None
                checked += 1
    assert checked > 30


def test_xor_stands_alone_as_in_msprobe(runs: Any) -> None:
    dump = data(runs("statistics", "xor"))
    item = dump["Torch.mul.0.forward"]["input_args"][0]
    # 1.0 and 2.0 against 4.0 and 5.0, as little-endian words of two float32.
    assert list(item) == ["type", "dtype", "shape", "md5", "requires_grad"]
    low, high = 0x3F800000 ^ 0x40800000, 0x40000000 ^ 0x40A00000
    assert item["md5"] == f"0x{(high << 32) | low:016x}"
    loss = dump["Tensor.sum.0.forward"]["output"][0]
    assert isinstance(loss["md5"], float)


def test_structure_has_names_parents_and_stacks_and_no_values(runs: Any) -> None:
    structure, statistics = runs("structure"), runs("statistics")
    assert sorted(data(structure)) == sorted(data(statistics))
    assert tensors(data(structure)) == []
    assert data(structure)["Module.0.Linear.parameters_grad.0"] == {}
    for name in ("construct.json", "stack.json"):
        assert len((structure / name).read_text()) > 200
    parents = [json.loads((folder / "construct.json").read_text()) for folder in (structure, statistics)]
    assert {op: parent for op, parent in parents[0].items() if "forward" in op} == {
        op: parent for op, parent in parents[1].items() if "forward" in op
    }
    assert not (structure / "dump_tensor_data").exists()


def test_tensor_list_saves_some_values_inside_statistics(runs: Any) -> None:
    folder = runs("statistics", "statistics", "relu,Module.2.Linear.forward.0")
    named = {item["data_name"] for item in tensors(data(folder)) if "data_name" in item}
    assert {name.split(".forward")[0].split(".backward")[0] for name in named} == {
        "Functional.relu.0",
        "Functional.linear.1",  # runs inside the module
        "Module.2.Linear",
    }
    assert "Module.2.Linear.forward.0.parameters.weight.pt" in named
    assert "Functional.relu.0.backward.input.0.pt" in named
    assert sorted(path.name for path in (folder / "dump_tensor_data").iterdir()) == sorted(named)


ARRAYS = """
import numpy as np, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x, *arrays, **more):
        arrays[0][0] = 50.0      # what was saved stays as it was
        return self.weight * x
torch.manual_seed(0)
net = Net()
fixed = np.arange(3.0)
fixed.setflags(write=False)
def step():
    given = (np.arange(6.0)[::-2], np.arange(4, dtype=">i2").reshape(2, 2).T, fixed, np.array([True, False]),
             np.array([1 + 2j]), np.array(7.0), np.array(["text"]), np.array([None]), np.empty((0, 3)),
             np.array([1.5], dtype=np.longdouble))
    net(torch.ones(1, 2), *given, table={"rows": np.float32([1, 2])}, long=np.longdouble(2.5)).sum().backward()
"""


def test_task_tensor_saves_numpy_arrays_among_the_arguments(tmp_path: Path, run_cli: Any) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(RUNS.format(program=ARRAYS))
    done = run_cli(["-W", "error", tmp_path / "program.py", tmp_path / "run", "tensor", "statistics", ""])
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "run" / "step0" / "rank0"
    call = data(folder)["Module.Net.forward.0"]
    arrays = [*call["input_args"][1:], call["input_kwargs"]["table"]["rows"]]
    assert {item["type"] for item in arrays} == {"numpy.ndarray"}
    names = [item.get("data_name") for item in arrays]
    expected = [[5.0, 3.0, 1.0], [[0, 2], [1, 3]], [0.0, 1.0, 2.0], [True, False], [1 + 2j], 7.0]
    assert names[:6] == [f"Module.Net.forward.0.input.{index}.pt" for index in range(1, 7)]
    assert names[6:] == [None] * 4 + ["Module.Net.forward.0.kwargs.table.rows.pt"]
    for name, values in zip([*names[:6], names[-1]], [*expected, [1.0, 2.0]], strict=True):
        assert torch.load(folder / "dump_tensor_data" / name, weights_only=True).tolist() == values
    assert (arrays[9]["Max"], call["input_kwargs"]["long"]["value"]) == (1.5, 2.5)
    mark = json.loads((tmp_path / "run" / "roster" / "rank0.json").read_text())
    assert (mark["lost"], mark["unseen"]) == ({}, {})


CLIP = "nn.utils.clip_grad_norm_(net.parameters(), 1e-3)"
CLOSURES = {
    "None, as accelerate says": PROGRAM.replace("optimizer.step()", f"{CLIP}; optimizer.step(None)"),
    "one, as lightning hands over": PROGRAM.replace("def step():", "def closure():").replace("optimizer.step()", CLIP)
    + "    return loss\ndef step():\n    optimizer.step(closure)\n",
}


@pytest.mark.parametrize("program", CLOSURES.values(), ids=list(CLOSURES))
def test_gradients_as_applied_where_a_step_takes_a_closure(tmp_path: Path, run_cli: Any, program: str) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(RUNS.format(program=program))
    done = run_cli([tmp_path / "program.py", tmp_path / "run", "statistics", "statistics", ""])
    assert done.returncode == 0, done.stderr[-3000:]
    dump = data(tmp_path / "run" / "step0" / "rank0")
    local, applied = (dump[f"Module.2.Linear.parameters_grad.{number}"] for number in (0, 1))
    assert list(applied) == ["weight.applied", "bias.applied"]
    assert applied["weight.applied"][0]["Norm"] < 2e-3 < local["weight"][0]["Norm"]


LONE = """
import ctypes, torch, zlib
from msprobe_launch.adapters.torch.checksums import CRC32, XOR, checksums
slow_crc, slow_xor = checksums({})
torch.manual_seed(0)
cases = [torch.empty(0), torch.randn(1), torch.randn(7), torch.randn(100, 33).t(), torch.randn(50, 40)[::2, 3:9],
         torch.randn(70000), torch.randn(33).bfloat16(), torch.tensor([True, False, True]), torch.randn(9, dtype=torch.complex64).conj(),
         torch.randint(0, 9, (13,), dtype=torch.uint8), torch.randn(5, 1, 3).expand(5, 4, 3)]
for tensor in cases:
    raw = bytes(tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    assert CRC32(tensor) == slow_crc(tensor) == f'"{zlib.crc32(raw):08x}"', tensor
    assert XOR(tensor) == slow_xor(tensor), tensor
print("SAME", len(cases))
"""


def test_checksums_are_those_of_zlib_for_any_layout(run_cli: Any) -> None:
    pytest.importorskip("torch")
    done = run_cli(["-c", LONE])
    assert done.stdout == "SAME 11\n", done.stderr[-2000:]


DEVICE = """
import torch
from torch.utils._pytree import tree_map
from msprobe_launch.adapters.torch.copies import Copies
from msprobe_launch.adapters.torch.stats import Deferred
from msprobe_launch.records.model import TensorValue

class Device(torch.Tensor):
    '''A tensor that says it lies on a device, and counts what makes the program wait for it.'''
    waits = 0
    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device="xpu")
    def __init__(self, data):
        self.data_ = data
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        home = name == "_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if home or name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
            Device.waits += 1
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        out = func(*tree_map(lambda a: a.data_ if isinstance(a, Device) else a, args), **kwargs)
        if home:
            return out
        return tree_map(lambda a: Device(a) if isinstance(a, torch.Tensor) else a, out)

deferred, copies, values, home = Deferred(), Copies(), [], []
with torch.no_grad():
    for i in range(100):
        values.append(TensorValue("{"))
        tensor = Device(torch.arange(4.0) + i)
        deferred.measure(values[-1], tensor)
        copies.later(tensor, home.append)
        tensor.add_(1000)  # what was seen before stays what it was
    print("WAITS", Device.waits)
    deferred.settle()
    print("WAITS", Device.waits)
    copies.settle()
    print("WAITS", Device.waits)
print(values[7].statistics, home[7].tolist())
"""


def test_a_device_is_waited_for_once_a_flush(run_cli: Any) -> None:
    """100 tensors: nothing waits while they are seen, then one transfer for statistics, one for copies."""
    pytest.importorskip("torch")
    done = run_cli(["-c", DEVICE])
    *waits, values = done.stdout.splitlines()
    assert waits == ["WAITS 0", "WAITS 1", "WAITS 2"], done.stderr[-3000:]
    assert values.startswith("(10.0, 7.0, 8.5, 17.1464")
    assert values.endswith("[7.0, 8.0, 9.0, 10.0]")
