"""--verdict noise: what rounding and two trusted runs explain, and what they do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import aggregator
from aggregator import compare, noise, thresholds, verdict
from aggregator.model import RankFailure
from aggregator.verdict import Fault
from msprobe_launch.errors import ConfigError

U32, U16 = 2.0**-24, 2.0**-8
MESSAGE = {rule.fault: rule.message for rule in verdict.RULES}
NAN = float("nan")


@pytest.fixture
def judge(tmp_path: Path, make_folder: Callable[..., Any]) -> Callable[..., Any]:
    """Compare mappings of op -> record by noise: (excess, result, faults) by item."""

    def run(target: Any, bench: Any, *, second: Any = None, step: int = 0, set_to: Any = thresholds.DEFAULT) -> Any:
        sides = [make_folder(tmp_path / name, ops) for name, ops in (("t", target), ("b", bench))]
        result = compare.compare_rank(
            *sides,
            step=step,
            rank=0,
            partition=tmp_path / "out.parquet",
            policy=noise.Policy(set_to),
            second=None if second is None else make_folder(tmp_path / "s", second),
        )
        assert not isinstance(result, RankFailure), result.reason
        table = pq.read_table(result.partition)
        faults = [[f for f in Fault if MESSAGE[f] in json.loads(cell)] for cell in table["Err_message"].to_pylist()]
        rows = zip(table["excess"].to_pylist(), table["Result"].to_pylist(), faults, strict=True)
        return dict(zip(table["NPU Name"].to_pylist(), rows, strict=True))

    return run


def tensor(make_value: Any, norm: float, shape: tuple[int, ...] = (4, 64), dtype: str = "torch.float32") -> Any:
    """Other statistics are equal on both sides, so the norm alone decides."""
    return make_value(1.0, -1.0, 0.0, norm, shape=list(shape), dtype=dtype)


@pytest.fixture
def linear(make_value: Any, make_call: Any) -> Callable[..., Any]:
    """One linear call with the norms of input, weight and output; `width` is what it sums over."""

    def make(given: float = 1.0, weight: float = 1.0, out: float = 1.0, width: int = 64, dtype: str = "float32") -> Any:
        kind = f"torch.{dtype}"
        return {
            "Functional.linear.0.forward": make_call(
                tensor(make_value, given, (4, width), kind),
                tensor(make_value, weight, (8, width), kind),
                out=tensor(make_value, out, (4, 8), kind),
            )
        }

    return make


OUT = "Functional.linear.0.forward.output.0"


def test_a_cast_that_only_the_target_has_excuses_nothing(judge, make_call, make_value):
    one, off = (make_call(tensor(make_value, norm)) for norm in (1.0, 1.001))
    half = make_call(tensor(make_value, 1.0, dtype="torch.bfloat16"))
    cast = {"Tensor.bfloat16.0.forward": half}
    found = judge({**cast, "Torch.c.0.forward": off}, {"Torch.c.0.forward": one})
    assert found["Torch.c.0.forward.input.0"][0] > 1.0
    found = judge({**cast, "Torch.c.0.forward": off}, {**cast, "Torch.c.0.forward": one})
    assert found["Torch.c.0.forward.input.0"][0] < 1.0


@pytest.mark.parametrize(
    ("dtype", "width", "threshold"),
    [
        # half of lambda, times sqrt(u^2 + n u_summed^2) of the call and of what came before (n = 64)
        ("float32", 64, 2 * U32 * math.sqrt(2 + 64 + 64)),
        ("float32", 4096, 2 * U32 * math.sqrt(2 + 4096 + 64)),
        ("bfloat16", 64, 2 * math.sqrt(2 * U16**2 + (64 + 64) * U32**2)),
        ("float16", 64, 2 * math.sqrt(2 * 2.0**-22 + (64 + 64) * U32**2)),
        ("float64", 64, 2 * 2.0**-53 * math.sqrt(2 + 64 + 64)),
    ],
)
def test_the_threshold_is_made_of_roundoff_and_reduction_length(judge, linear, dtype, width, threshold):
    ratio = 1.0 + 10 * threshold
    rows = judge(linear(out=ratio, width=width, dtype=dtype), linear(width=width, dtype=dtype))
    assert rows[OUT][0] == pytest.approx(10 / ratio, rel=1e-3)
    assert rows[OUT][1:] == ("error", [Fault.NOISE_MADE])
    rows = judge(linear(out=1 + threshold / 2, width=width, dtype=dtype), linear(width=width, dtype=dtype))
    assert rows[OUT][1] == "pass"


def test_an_output_whose_input_was_off_already_is_a_warning(judge, linear):
    rows = judge(linear(given=1.1, out=1.1), linear())
    assert rows["Functional.linear.0.forward.input.0"][1:] == ("warning", [Fault.NOISE_PASSED])
    assert rows[OUT][1:] == ("warning", [Fault.NOISE_PASSED])


def test_what_is_exact_is_exact(judge, make_value, make_call):
    def side(high: float, count: int, dtype: str, plain: int) -> Any:
        integers = make_value(count, shape=[4], dtype="torch.int64")
        out = make_value(high, 0.0, 0.0, 1.0, dtype=dtype)
        return {"Torch.f.0.forward": make_call(integers, {"type": "int", "value": plain}, out=[out])}

    same = side(1.0, 3, "torch.float32", 7)
    rows = judge(side(1.0, 4, "torch.float32", 8), same)
    assert rows["Torch.f.0.forward.input.0"] == (math.inf, "error", [Fault.VALUE])
    assert rows["Torch.f.0.forward.input.1"] == (math.inf, "error", [Fault.SCALAR])
    assert judge(side(NAN, 3, "torch.float32", 7), same)["Torch.f.0.forward.output.0"][2] == [Fault.NON_FINITE]
    assert judge(same, side(NAN, 3, "torch.float32", 7))["Torch.f.0.forward.output.0"][2] == [Fault.VALUE]
    assert judge(side(1.0, 3, "torch.float64", 7), same)["Torch.f.0.forward.output.0"][2] == [Fault.DTYPE]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "length"),
    [
        ("Tensor.transpose.0.forward", [(4, 64)], [(64, 4)], 0),
        ("Tensor.__add__.0.forward", [(4, 64), (4, 64)], [(4, 64)], 1),
        ("Torch.matmul.0.forward", [(2, 4, 64), (2, 64, 512)], [(2, 4, 512)], 64),
        ("Functional.conv2d.0.forward", [(2, 3, 8, 8), (16, 3, 5, 5)], [(2, 16, 4, 4)], 75),
        ("Functional.softmax.0.forward", [(4, 64)], [(4, 64)], 64),
        ("Functional.batch_norm.0.forward", [(2, 3, 8, 8)], [(2, 3, 8, 8)], 128),
        ("Tensor.sum.0.forward", [(4, 64)], [()], 256),
        ("Torch.mean.0.forward", [(4, 64)], [(4,)], 64),
        ("Functional.linear.0.backward", [(8, 16, 32)], [(8, 16, 64), (32, 64)], 128),
        ("Functional.gelu.0.backward", [(4, 64)], [(4, 64)], 1),
        ("Module.a.Linear.forward.0", [(4, 64), (8, 64)], [(4, 8)], 64),
        ("Module.a.Mixer.forward.0", [(4, 64), (128, 8)], [(4, 64)], 128),
        ("Module.a.Relu.forward.0", [(4, 64)], [(4, 64)], 0),
    ],
)
def test_reduction_lengths(tmp_path, make_value, make_folder, name, inputs, outputs, length):
    given, made = ([tensor(make_value, 1.0, shape) for shape in shapes] for shapes in (inputs, outputs))
    record: dict[str, Any] = {"input_args": given, "input_kwargs": {}, "output": made}
    if name.endswith("backward"):
        record = {"input": given, "output": made}
    sides = [make_folder(tmp_path / side, {name: record}) for side in "tb"]
    compare.compare_rank(*sides, step=0, rank=0, partition=tmp_path / "p.parquet")
    found, _, _ = noise.reduction_lengths(pq.read_table(tmp_path / "p.parquet"))
    assert found.tolist() == [length]


def test_a_module_that_holds_others_rounds_nothing_itself(tmp_path, make_value, make_call, make_folder):
    one = make_call(tensor(make_value, 1.0), out=tensor(make_value, 1.0))
    inner, outer = "Module.a.b.Linear.forward.0", "Module.a.Block.forward.0"
    ops, parents = {inner: one, outer: one}, {inner: outer, outer: None}
    sides = [make_folder(tmp_path / side, ops, construct=parents) for side in "tb"]
    compare.compare_rank(*sides, step=0, rank=0, partition=tmp_path / "p.parquet")
    lengths, _, names = noise.reduction_lengths(pq.read_table(tmp_path / "p.parquet"))
    assert dict(zip(names, lengths.tolist(), strict=True)) == {inner: 64, outer: 0}


def test_after_the_first_step_a_small_parameter_is_held_against_what_it_is_added_to(judge, make_value, make_call):
    def side(bias: float) -> Any:
        kind = "torch.bfloat16"
        big = make_value(4.0, -4.0, 0.0, 1.0, shape=[4, 64], dtype=kind)
        small = make_value(0.001, -0.001, bias, 0.004, shape=[64], dtype=kind)
        return {"Functional.layer_norm.0.forward": make_call(big, small, out=[big])}

    item = "Functional.layer_norm.0.forward.input.1"
    # One of 64 elements went the other way by 0.001: 6 % of the bias itself.
    assert judge(side(0.00003), side(0.0), step=0)[item][1] == "warning"
    assert judge(side(0.00003), side(0.0), step=1)[item][1] == "pass"
    assert judge(side(0.1), side(0.0), step=1)[item][1] == "warning"


def test_what_two_trusted_runs_differ_by_is_noise_and_four_times_that_is_not(judge, linear):
    assert judge(linear(out=1.010), linear())[OUT][1] == "error"
    # The trusted runs are 0.3 % apart: 4 times that passes.
    assert judge(linear(out=1.010), linear(), second=linear(out=1.003))[OUT][1] == "pass"
    excess, result, _ = judge(linear(out=1.014), linear(), second=linear(out=1.003))[OUT]
    assert (result, excess) == ("error", pytest.approx(0.014 / 1.014 / (4 * 0.003 / 1.003), rel=1e-3))
    # Pooled over the op: its input varies, so its output may.
    assert judge(linear(out=1.010), linear(), second=linear(given=1.003))[OUT][1] == "pass"
    # Nothing is judged where they differ beyond all measure, and the rest still is.
    rows = judge(linear(given=NAN, out=2.0), linear(), second=linear(given=NAN))
    assert rows[OUT][:2] == (None, "pass")


def test_checksums_are_left_for_the_statistics_beside_them(judge, make_value, make_call):
    def side(norm: float, checksum: str) -> Any:
        held = tensor(make_value, norm) | {"md5": checksum}
        return {"Torch.f.0.forward": make_call(held, out=[held])}

    rows = judge(side(1.0, "aaaaaaaa"), side(1.0, "bbbbbbbb"))
    assert {row[1] for row in rows.values()} == {"pass"}
    assert judge(side(1.1, "aaaaaaaa"), side(1.0, "bbbbbbbb"))["Torch.f.0.forward.input.0"][1] == "warning"


def test_frames_are_judged_by_noise_as_well(tmp_path, linear, make_folder):
    for side, out in (("t", 1.01), ("b", 1.0)):
        make_folder(tmp_path / side / "step0/rank0", linear(out=out))
    frame = aggregator.compare_runs(tmp_path / "t", tmp_path / "b", policy=noise.Policy())
    assert frame[frame["excess"] > 1]["Result"].tolist() == ["error"]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("ops: {'Functional.*': {factor: 100000}}", "pass"),
        ("ops: {'Functional.*': {tolerance: 1e-1}}", "pass"),
        ("ops: {'Functional.*': {tolerance: 0.001}}", "error"),
        ("ops: {'Functional.linear.?.forward': {ignore: true}}", "pass"),
        ("ops: {'Functional.*': {unit_roundoff: 0.1}}", "pass"),
        ("ops: {'Functional.*': {reduction_length: 10000000000000}}", "pass"),
        ("ops: {'Torch.*': {ignore: true}}", "error"),
        ("ops: {'*linear*': {factor: 1}, '*': {ignore: true}}", "error"),  # the first that fits decides
        ("confidence: 1000000", "pass"),
        ("spread_factor: 100", "error"),
        ("", "error"),
    ],
)
def test_thresholds_of_a_file(judge, linear, make_call, make_value, tmp_path, text, result):
    (tmp_path / "t.yaml").write_text(text, encoding="utf-8")
    other = {"Tensor.other.0.forward": make_call(make_value(1.0), out=make_value(1.0))}
    set_to = thresholds.load(tmp_path / "t.yaml")
    assert judge({**linear(out=1.01), **other}, {**linear(), **other}, set_to=set_to)[OUT][1] == result


def test_a_file_that_decides_nothing_or_leaves_nothing_to_judge_is_said(linear, make_folder, tmp_path):
    sides = [make_folder(tmp_path / name, linear(out=out)) for name, out in (("t", 1.01), ("b", 1.0))]

    def judged(text):
        (tmp_path / "t.yaml").write_text(text, encoding="utf-8")
        policy = noise.Policy(thresholds.load(tmp_path / "t.yaml"))
        return compare.compare_rank(*sides, step=0, rank=0, partition=tmp_path / "p.parquet", policy=policy)

    unused = judged("ops: {'Functional.*': {factor: 2}, 'Functional.linear.*': {factor: 3}, 'Torch.*': {factor: 2}}")
    assert "thresholds: no op falls to 2 of the patterns, from 'Functional.linear.*'." in unused.notes[0]
    everything = judged("ops: {'*': {ignore: true}}")
    assert isinstance(everything, RankFailure)
    assert "the thresholds ignore all 3 items" in everything.reason


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("confidense: 4", "line 1: unknown key 'confidense'. Did you mean 'confidence'?"),
        ("# x\nops:\n  a:\n    factr: 2", "line 4: unknown key 'factr' under 'a'. Did you mean 'factor'?"),
        ("ops:\n  a: {factor: 2}\n  a: {factor: 3}", "line 3: 'a' stands there twice under 'ops' (first in line 2)"),
        ("ops:\n  a: {factor: 0}", "line 2: 'factor' must be a positive number, not 0"),
        ("ops:\n  a: {factor: true}", "line 2: 'factor' must be a positive number, not True"),
        ("ops:\n  a: {reduction_length: 1.5}", "line 2: 'reduction_length' must be a whole number of at least 1"),
        ("ops:\n  a: {ignore: maybe}", "line 2: 'ignore' must be true or false, not 'maybe'"),
        ("ops:\n  a: {ignore: true, factor: 2}", "line 2: 'a': ignore leaves nothing"),
        ("ops:\n  a: {tolerance: 1, factor: 2}", "line 2: 'a': tolerance replaces"),
        ("ops:\n  a: {}", "line 2: 'a' sets nothing"),
        ("ops: [a]", "line 1: a mapping is needed under 'ops'"),
        ("spread_factor: .nan", "line 1: 'spread_factor' must be a positive number, not nan"),
        ("spread_factor: 0.5", "line 1: 'spread_factor' must be at least 1, not 0.5"),
        ("- a", "line 1: a mapping is needed, with confidence"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, says):
    path = tmp_path / "t.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        thresholds.load(path)
    assert str(error.value).startswith(f"{path}")
    assert says in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        thresholds.load(tmp_path / "none.yaml")
