"""Cells of statistics mode: what msprobe 26.2 was observed to write for the same pairs of values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator import metrics
from aggregator.sheet import number_texts

NAN, INF = float("nan"), float("inf")

# (target's maximum, bench's maximum) -> Max diff, MaxRelativeErr, NPU max, Bench max
CELLS = [
    (1.5, 1.0, "0.5", "50.0%", "1.5", "1.0"),
    (1.5, 0.0, "1.5", "inf", "1.5", "0.0"),
    (0.0, 0.0, "0", "0", "0.0", "0.0"),
    (-0.0, 0.0, "-0.0", "inf", "-0.0", "0.0"),
    (-1.5, -1.0, "-0.5", "50.0%", "-1.5", "-1.0"),
    (1.0, -1.0, "2.0", "200.0%", "1.0", "-1.0"),
    (0.0, 2.0, "-2.0", "100.0%", "0.0", "2.0"),
    (NAN, 1.0, "Nan", "Nan", "Nan", "1.0"),
    (1.0, NAN, "Nan", "Nan", "1.0", "Nan"),
    (NAN, NAN, "0", "0", "Nan", "Nan"),
    (INF, 1.0, "inf", "inf", " inf", "1.0"),
    (1.0, INF, "-inf", "-inf", "1.0", " inf"),
    (INF, INF, "0", "0", " inf", " inf"),
    (INF, -INF, "inf", "inf", " inf", " -inf"),
    (INF, NAN, "Nan", "Nan", " inf", "Nan"),
    (None, 1.0, "Diff", "Diff", "None", "1.0"),
    (1.0, None, "Diff", "Diff", "1.0", "None"),
    (None, None, "0", "0", "None", "None"),
    (3, 2, "1.0", "50.0%", "3", "2"),
    (3, 3, "0", "0", "3", "3"),
    (-2, -2.0, "0.0", "0.0%", "-2", "-2.0"),
    (3, 0, "3.0", "inf", "3", "0"),
    (True, False, "Diff", "Diff", "True", "False"),
    (True, True, "0", "0", "True", "True"),
    (1e300, 1e-300, "1e+300", "inf%", "1e+300", "1e-300"),
    (1.0000001, 1.0, "1.0000000005838672e-07", "1.0000000005838672e-05%", "1.0000001", "1.0"),
    (123456789012345680.0, 1e17, "2.345678901234568e+16", "23.45678901234568%", "1.2345678901234568e+17", "1e+17"),
    (1e22, 2e22, "-1e+22", "50.0%", "1e+22", "2e+22"),
    (1 << 70, 1 << 71, "-1.1805916207174113e+21", "50.0%", str(1 << 70), str(1 << 71)),
    ((1 << 53) + 1, 1 << 53, "0.0", "0.0%", str((1 << 53) + 1), str(1 << 53)),
    (1e-7, 3e-5, "-2.9900000000000002e-05", "99.66666666666667%", "1e-07", "3e-05"),
]


@pytest.fixture
def cells_of(compare_ops, make_value, make_call):
    """Cells of all CELLS at once, one op each, beside an op that matches."""

    def run(pairs):
        anchor = {"Torch.anchor.0.forward": make_call(make_value(1.0))}
        ops = [
            {f"Torch.f.{i}.forward": make_call(make_value(pair[side], 1.0, 1.0, 1.0)) for i, pair in enumerate(pairs)}
            for side in (0, 1)
        ]
        found = compare_ops({**anchor, **ops[0]}, {**anchor, **ops[1]})
        return [found.rows[f"Torch.f.{i}.forward.input.0"] for i in range(len(pairs))]

    return run


def test_cells_are_msprobes(cells_of):
    shown = ("Max diff", "MaxRelativeErr", "NPU max", "Bench max")
    found = [tuple(row[name] for name in shown) for row in cells_of(CELLS)]
    assert found == [case[2:] for case in CELLS]


PLAIN = [
    # (target, bench) -> matched, Max diff, MaxRelativeErr
    ({"type": "int", "value": 3}, {"type": "int", "value": 4}, True, "-1.0", "25.0%"),
    ({"type": "int", "value": 3}, {"type": "float", "value": 3.0}, False, "N/A", "N/A"),
    ({"type": "float", "value": 2.5}, {"type": "float", "value": 2.6}, True, "-0.10000000000000009", None),
    ({"type": "str", "value": "a"}, {"type": "str", "value": "b"}, True, "Diff", "Diff"),
    ({"type": "str", "value": "3"}, {"type": "str", "value": "4"}, True, "-1.0", "25.0%"),
    ({"type": "str", "value": "3"}, {"type": "str", "value": "3.0"}, True, "0.0", "0.0%"),
    ({"type": "str", "value": "cpu"}, {"type": "str", "value": "cuda:0"}, True, "N/A", "N/A"),
    ({"type": "str", "value": "cpu"}, {"type": "str", "value": "x"}, True, "Diff", "Diff"),
    ({"type": "str", "value": "nan"}, {"type": "str", "value": "2"}, True, "Nan", "Nan"),
    ({"type": "bool", "value": True}, {"type": "int", "value": 1}, False, "N/A", "N/A"),
    ({"type": "int", "value": 3}, None, False, "N/A", "N/A"),
    (None, {"type": "int", "value": 3}, False, "N/A", "N/A"),
    (None, None, True, "0", "0"),
    ({"type": "torch.ProcessGroup", "group_ranks": [0, 1]}, {"type": "torch.ProcessGroup", "group_ranks": [0, 2]},
     True, "Diff", "Diff"),
    ({"type": "slice", "value": [1, 2, 3]}, {"type": "slice", "value": [1, 2, 4]}, True, "0", "0"),
]  # fmt: skip


def test_cells_of_plain_values(compare_ops, make_value, make_call):
    anchor = make_call(make_value(1.0))
    ops = [
        {"Torch.a.0.forward": anchor} | {f"Torch.f.{i}.forward": make_call(pair[side]) for i, pair in enumerate(PLAIN)}
        for side in (0, 1)
    ]
    found = compare_ops(*ops)
    for i, (_, _, matched, difference, relative) in enumerate(PLAIN):
        row = found.rows[f"Torch.f.{i}.forward.input.0"]
        assert (row["Bench Name"] != "N/A") == matched, PLAIN[i]
        assert row["Max diff"] == difference, PLAIN[i]
        assert relative is None or row["MaxRelativeErr"] == relative, PLAIN[i]


@pytest.mark.parametrize(
    ("dtype", "other", "matched"),
    [
        ("torch.float32", "torch.bfloat16", True),
        ("torch.float16", "torch.float64", True),
        ("Float32", "BFloat16", True),
        ("torch.float32", "torch.int64", False),
        ("torch.int64", "torch.int32", False),
        ("torch.bfloat16", "torch.float8_e4m3fn", False),
        ("torch.float32", "Float32", True),  # ours: msprobe asks for a mapping file
        ("torch.float32", "Float16", False),
        ("torch.int64", "Int64", True),
    ],
)
def test_which_dtypes_stand_opposite_each_other(compare_ops, make_value, make_call, dtype, other, matched):
    anchor = {"Torch.a.0.forward": make_call(make_value(1.0))}
    found = compare_ops(
        anchor | {"Torch.f.0.forward": make_call(make_value(1.0, dtype=dtype))},
        anchor | {"Torch.f.0.forward": make_call(make_value(1.0, dtype=other))},
    )
    row = found.rows["Torch.f.0.forward.input.0"]
    assert (row["Bench Name"] != "N/A") == matched
    assert found.result.matched == 1 + matched
    assert any("of another type" in note for note in found.result.notes) != matched


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_are_written_as_python_writes_them(values):
    import numpy as np
    import pyarrow as pa

    shown = number_texts(pa.array(values), np.zeros(len(values), bool))
    assert shown.to_pylist() == [repr(value) for value in values]


def test_ratio_keeps_infinities_and_has_no_number_for_words():
    import numpy as np

    cells = metrics.Cells(
        np.array([50.0, np.nan, np.nan, np.nan]), np.array([-1, metrics.INF, metrics.NAN, 0], np.int8)
    )
    assert str(metrics.ratio(cells).tolist()) == "[0.5, inf, nan, nan]"
