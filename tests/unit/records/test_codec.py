"""Records and their texts, with msgspec and in a rank's environment that has none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import gc, math, sys
if sys.argv[1] == "without":
    sys.modules["msgspec"] = sys.modules["msgspec.json"] = None
from msprobe_launch.records.codec import format_tensors, record_line, tensor_head
from msprobe_launch.records.model import CallRecord, OpRef, PlainValue, Segment, TensorValue
from msprobe_launch.records.names import NameTemplate

head = tensor_head("torch.Tensor", "torch.float32", [2, 3])
numbers = [0.1, -0.0, 1e-45, 1e300, 123456789.125, math.nan, math.inf, -math.inf, True, False, None, 3, 1e16, 1e-5]
values = [TensorValue(head, (n, n, n, n), requires_grad=r) for n in numbers for r in (True, False, None)]
values.append(TensorValue(head, tail=', "placements": []'))
format_tensors(values)
op = OpRef(NameTemplate.of_api("Torch", "add"), 3, Segment())
record = CallRecord(op, [*values, [values[0], None]], {"k": PlainValue("1")}, [None], stack=4, recompute=True)
print(record_line(op.text, record))
twin = op.as_backward()
assert twin is op.as_backward() and twin.as_forward().text == op.text and twin.text.endswith(".backward")
print(record_line(twin.text, CallRecord(twin, [values[1]], None, None, parameters={"w": values[2]})))
print(record_line("g", CallRecord(op, None, None, None, {"w": values[2], "b": None}, is_grad=True)))
assert (record.saves, record.parent, record.stack, twin.backward) == (False, None, 4, True)
print(gc.is_tracked(record), file=sys.stderr)
"""


def records(text: str) -> list[str]:
    """The records as they are read: msgspec writes 1e300 where repr writes 1e+300. As text, since NaN is not itself."""
    return [repr(json.loads(f"{{{line}}}")) for line in text.splitlines()]


def lines(way: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.strip()


def test_records_are_the_same_without_msgspec_and_not_tracked_with_it() -> None:
    pytest.importorskip("msgspec")
    (with_it, tracked), (without, _) = lines("with"), lines("without")
    assert records(with_it) == records(without)
    assert '"Max": NaN' in with_it
    assert '"Max": -Infinity' in with_it
    assert '"is_recompute": true' in with_it
    assert tracked == "False"
