"""Result and Err_message: what msprobe 26.2 answered to the same planted differences (observed)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from aggregator import noise, verdict
from aggregator.verdict import Fault

NAN, INF = float("nan"), float("inf")
MESSAGE = {rule.fault: rule.message for rule in verdict.RULES}


@pytest.fixture
def norm(make_value):
    """(target, bench) of a tensor whose norm is off by a ratio; words stand for other pairs of values."""

    def pair(what):
        named = {
            "none": (None, None),
            "int": ({"type": "int", "value": 3},) * 2,
            "ints": ({"type": "int", "value": 1}, {"type": "int", "value": 2}),
            "word": ({"type": "str", "value": "a"}, {"type": "str", "value": "b"}),
            "nan": (make_value(1.0, 1.0, 1.0, NAN), make_value(1.0)),
            "inf": (make_value(1.0, 1.0, 1.0, 0.5), make_value(1.0, 1.0, 1.0, 0.0)),
        }
        if isinstance(what, str):
            return named[what]
        return make_value(1.0, 1.0, 1.0, 1.0 + what), make_value(1.0)

    return pair


@pytest.fixture
def verdicts(compare_ops, make_call, norm):
    """Faults of each item of one op, by place (`input.0`), from its rows in the csv."""

    def run(inputs=(), outputs=(), parameters=None, op="Functional.f.0.forward"):
        ins, outs = [norm(what) for what in inputs], [norm(what) for what in outputs]
        held = {name: norm(what) for name, what in (parameters or {}).items()}
        sides = [
            {
                op: make_call(
                    *(pair[side] for pair in ins),
                    out=[pair[side] for pair in outs],
                    parameters={name: pair[side] for name, pair in held.items()} if held else None,
                )
            }
            for side in (0, 1)
        ]
        found = compare_ops(*sides)
        return {item.removeprefix(op + "."): faults(row) for item, row in found.rows.items()}

    return run


def faults(row):
    messages = json.loads(row["Err_message"])
    found = [fault for fault, message in MESSAGE.items() if message in messages]
    assert [MESSAGE[fault] for fault in found] == messages  # in this order, and no other words
    worst = "error" if any(m.startswith("error") for m in messages) else "warning" if messages else "pass"
    assert row["Result"] == worst
    return found


BOTH = [Fault.OUTPUT_NORM, Fault.NORM_GROWTH]


@pytest.mark.parametrize(
    ("inputs", "outputs", "parameters", "expected"),
    [
        ([0], [0.51], None, [BOTH]),
        ([0], [0.5], None, [[Fault.NORM_GROWTH]]),
        ([0.09], [0.51], None, [[Fault.OUTPUT_NORM]]),
        ([0.11], [0.51], None, [[]]),
        ([0.11], [1.2], None, [[Fault.NORM_GROWTH]]),
        ([0, 0.2], [0.51], None, [[]]),
        ([0.2], [0.51], {"w": 0}, [[]]),
        ([0], [0.51], {"w": 0.2}, [[]]),
        ([2**-7], [10 * 2**-7], None, [[]]),
        ([2**-7], [10 * 2**-7 + 2**-40], None, [[Fault.NORM_GROWTH]]),
        ([0], [0.09], None, [[]]),
        ([0], [0.11], None, [[Fault.NORM_GROWTH]]),
        ([1e-12], [1e-10], None, [[Fault.NORM_GROWTH]]),
        ([0], [0, 0.51], None, [[Fault.NORM_GROWTH], [Fault.OUTPUT_NORM]]),
        ([0], [0.51, 0], None, [BOTH, []]),
        ([], [0.51], None, [BOTH]),
        (["none"], [0.51], None, [BOTH]),
        (["int", 0.2], [0.51], None, [[]]),
        (["ints"], [0.7], None, [[]]),
        (["nan"], [0.51], None, [BOTH]),
        (["nan", 0.2], [0.51], None, [[]]),
        (["inf"], [0.51], None, [BOTH]),
        ([0], ["inf"], None, [[Fault.OUTPUT_NORM]]),
        ([0], ["nan"], None, [[]]),
        ([0], ["nan", 0.2], None, [[Fault.NORM_GROWTH], []]),
        ([0], ["ints"], None, [[Fault.NORM_GROWTH]]),
        ([0], ["word"], None, [[]]),
    ],
)
def test_norm_rules(verdicts, inputs, outputs, parameters, expected):
    found = verdicts(inputs, outputs, parameters)
    assert [found[f"output.{i}"] for i in range(len(outputs))] == expected


@pytest.mark.parametrize("api", sorted(verdict.SKIPPED_APIS))
def test_apis_without_rules(verdicts, api):
    assert verdicts(["ints"], [0.51], op=f"Tensor.{api}.0.forward") == {"input.0": [], "output.0": []}


@pytest.mark.parametrize("api", sorted(verdict.BUFFER_APIS))
def test_collectives_with_receive_buffers(verdicts, api):
    assert verdicts(["ints"], [0.51], op=f"Distributed.{api}.0.forward") == {"input.0": [], "output.0": []}


def test_only_the_second_part_of_a_name_is_an_api(verdicts):
    assert verdicts([0], [0.51], op="Module.a.to.forward.0")["output.0"] == BOTH
    assert verdicts([0], [0.51], op="Module.to.Linear.forward.0")["output.0"] == []
    assert verdicts([0], [0.51], op="Tensor.setitem.0.forward")["output.0"] == BOTH


def one_row(compare_ops, make_call, target, bench, role="input"):
    records = [make_call(item) if role == "input" else make_call(out=item) for item in (target, bench)]
    found = compare_ops({"Functional.f.0.forward": records[0]}, {"Functional.f.0.forward": records[1]})
    return faults(found.rows[f"Functional.f.0.forward.{role}.0"])


def test_row_rules(compare_ops, make_value, make_call):
    def row(target, bench, role="input"):
        return one_row(compare_ops, make_call, target, bench, role)

    one = make_value(1.0)
    assert row(make_value(NAN), one) == [Fault.NON_FINITE]
    assert row(make_value(INF, 1.0), one) == [Fault.NON_FINITE]
    assert row(make_value(NAN, 1.0, 1.0, 1.0), make_value(1.0, INF, 1.0, 1.0)) == []
    assert row(make_value(INF, 1.0, 1.0, 1.0), make_value(NAN, 2.0, 1.0, 1.0)) == []
    assert row(one, make_value(NAN)) == []
    assert row(make_value(1.0, 1.0, NAN, INF), one) == []
    assert row(make_value(NAN), make_value(None)) == [Fault.NON_FINITE]
    assert row(one, one | {"requires_grad": True}) == [Fault.GRAD]
    assert row(one, one | {"dtype": "torch.float16"}) == [Fault.DTYPE]
    assert row(one, one | {"shape": [3, 2]}) == [Fault.SHAPE]
    everything = make_value(NAN, 1.0, 1.0, 1.8, dtype="torch.float16", shape=[1], requires_grad=True)
    assert row(everything, one, "output") == [
        Fault.NON_FINITE, Fault.OUTPUT_NORM, Fault.GRAD, Fault.DTYPE, Fault.SHAPE, Fault.NORM_GROWTH,
    ]  # fmt: skip
    assert row({"type": "int", "value": 1}, {"type": "int", "value": 2}) == [Fault.SCALAR]
    assert row({"type": "float", "value": NAN}, {"type": "float", "value": 1.0}) == [Fault.NON_FINITE, Fault.SCALAR]
    assert row({"type": "slice", "value": [1]}, {"type": "slice", "value": [2]}) == []
    assert row({"type": "torch.Size", "value": [1]}, {"type": "torch.Size", "value": [2]}) == [Fault.SHAPE]


def test_keywords_that_name_ranks_are_shown_bare_and_not_judged(compare_ops, make_call, make_value):
    def ops(number):
        plain = {"type": "int", "value": number}
        return {"Distributed.broadcast.0.forward": make_call(make_value(1.0), keywords={"src": plain, "dim": plain})}

    found = compare_ops(ops(1), ops(2))
    src, dim = (found.rows[f"Distributed.broadcast.0.forward.input.{name}"] for name in ("src", "dim"))
    assert (src["NPU Dtype"], faults(src)) == ("int", [])
    assert (dim["NPU Dtype"], faults(dim)) == ("<class 'int'>", [Fault.SCALAR])


def test_zeros_of_either_sign_are_one_scalar(compare_ops, make_call):
    def ops(number):
        return {"Torch.a.0.forward": make_call({"type": "float", "value": number})}

    row = compare_ops(ops(0.0), ops(-0.0)).rows["Torch.a.0.forward.input.0"]
    assert (row["Max diff"], row["MaxRelativeErr"], faults(row)) == ("0.0", "inf", [])


def test_without_a_checksum_stands_that_of_no_bytes(compare_ops, make_value, make_call):
    ops = {"Torch.a.0.forward": make_call(make_value(1.0, md5="a1"), make_value(1.0, type="numpy.ndarray"), None)}
    found = compare_ops(ops, ops)
    assert [row["NPU MD5"] for row in found.rows.values()] == ["a1", "00000000", "N/A"]
    assert [row["BENCH MD5"] for row in found.rows.values()] == ["a1", "00000000", "N/A"]
    assert found.result.findings == 0


def test_rules_of_checksums(compare_ops, make_value, make_call):
    def item(md5, **more):
        return make_value(1.0, md5=md5, **more)

    target = {
        "Torch.a.0.forward": make_call(item("a1"), item("b2"), item("c3", dtype="torch.int8"), None, out=item("d4")),
        "Tensor.to.0.forward": make_call(item("a1")),
        "Distributed._all_gather_base.0.forward": make_call(item("a1"), out=item("a1")),
        "Torch.lone.0.forward": make_call(item("a1"), None),
    }
    bench = {
        "Torch.a.0.forward": make_call(item("a1"), item("b3"), item("c3"), None, out=item("d4", shape=[9])),
        "Tensor.to.0.forward": make_call(item("ff")),
        "Distributed._all_gather_base.0.forward": make_call(item("ff"), out=item("ff")),
    }
    found = {item: faults(row) for item, row in compare_ops(target, bench).rows.items()}
    assert found == {
        "Torch.a.0.forward.input.0": [],
        "Torch.a.0.forward.input.1": [Fault.CHECKSUM],
        "Torch.a.0.forward.input.2": [Fault.UNMATCHED],
        "Torch.a.0.forward.input.3": [],
        "Torch.a.0.forward.output.0": [],
        "Tensor.to.0.forward.input.0": [],
        "Distributed._all_gather_base.0.forward.input.0": [],
        "Distributed._all_gather_base.0.forward.output.0": [Fault.CHECKSUM],
        "Torch.lone.0.forward.input.0": [Fault.UNMATCHED],
        "Torch.lone.0.forward.input.1": [],
    }


def test_every_fault_has_one_rule_with_a_reason():
    assert [rule.fault for rule in verdict.RULES] == list(Fault)
    assert all(rule.why and rule.message.startswith(rule.result) for rule in verdict.RULES)


# -- tensor mode: (one-thousandth ratio, cosine) of each item, NaN where the cell is no number


@pytest.fixture
def faults_of_values():
    """Faults of an op's first output, and whether any other row has one."""

    def run(inputs, outputs, parameters=(), api="f"):
        items = [*inputs, *parameters, *outputs]
        places = ["input"] * len(inputs) + ["parameter"] * len(parameters) + ["output"] * len(outputs)
        height = len(items)
        yes = np.ones(height, bool)
        rows = verdict.Rows(
            op=np.zeros(height, np.int64),
            api=pa.array([api] * height),
            matched=yes,
            is_input=np.array([place == "input" for place in places]),
            is_parameter=np.array([place == "parameter" for place in places]),
            is_output=np.array([place == "output" for place in places]),
            same_grad=yes,
            same_dtype=yes,
            same_shape=yes,
        )
        ratio, cosine = (np.array([item[i] for item in items], float) for i in (0, 1))
        found = verdict.of_tensors(rows, ratio, cosine, ~yes, ~yes)
        first = places.index("output")
        assert not found[np.arange(height) != first].any()
        return [fault for fault in Fault if found[first] & fault]

    return run


RIGHT, ODD = (1.0, 1.0), (NAN, NAN)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([(0.95, 1.0)], [(0.09, 1.0)], [Fault.OUTPUT_RATIO]),
        ([(0.95, 1.0)], [(0.1, 1.0)], []),
        ([(0.9, 1.0)], [(0.0, 1.0)], []),
        ([RIGHT, (0.5, 1.0)], [(0.0, 1.0)], []),
        ([], [(0.0, 1.0)], [Fault.OUTPUT_RATIO]),
        ([ODD], [(0.0, 1.0)], [Fault.OUTPUT_RATIO]),
        ([RIGHT], [ODD, (0.0, 1.0)], [Fault.OUTPUT_RATIO]),
        ([RIGHT], [RIGHT, (0.0, 1.0)], [Fault.OUTPUT_RATIO]),
        ([RIGHT], [ODD], []),
        ([(0.0, 0.901)], [(0.0, 0.7)], [Fault.COSINE_DROP]),
        ([(0.0, 0.9)], [(0.0, 0.7)], []),
        ([(0.0, 0.95)], [(0.0, 0.85)], []),
        ([(0.0, 0.95)], [(0.0, 0.849)], [Fault.COSINE_DROP]),
        ([(0.0, 0.95), (0.0, 0.5)], [(0.0, 0.8)], []),
        ([(0.0, 0.95), (0.0, 0.99)], [(0.0, 0.87), (0.0, 0.5)], [Fault.COSINE_DROP]),
        ([(0.0, 0.95)], [ODD, (0.0, 0.5)], [Fault.COSINE_DROP]),
        ([RIGHT], [(0.0, 0.5)], [Fault.OUTPUT_RATIO, Fault.COSINE_DROP]),
    ],
)
def test_rules_on_stored_values(faults_of_values, inputs, outputs, expected):
    assert faults_of_values(inputs, outputs) == expected


def test_parameters_count_as_inputs_and_some_apis_are_spared(faults_of_values):
    assert faults_of_values([RIGHT], [(0.0, 0.5)], parameters=[(0.5, 0.5)]) == []
    assert faults_of_values([RIGHT], [(0.0, 0.5)], api="empty") == []
    assert faults_of_values([RIGHT], [(0.0, 0.5)], api="all_to_all_single") == []


def test_the_page_of_rules_is_up_to_date():
    page = Path(__file__).parents[4] / "docs" / "verdicts.md"
    assert page.read_text(encoding="utf-8") == verdict.as_markdown(noise.CONSTANTS), "run scripts/verdicts"
