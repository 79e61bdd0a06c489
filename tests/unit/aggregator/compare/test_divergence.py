"""Our own findings: what msprobe's rules do not see, what is rounding and what is not, and which item comes first."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator import divergence
from aggregator.compare import compare_rank

NAN, INF = float("nan"), float("inf")
OP = "Functional.linear.3.forward"


def scaled(make_value, factor, **more):
    """A tensor of 6,144 standard normal values, times a factor."""
    return make_value(3.9 * factor, -3.8 * factor, 0.004 * factor, 78.0 * factor, shape=[4, 24, 64], **more)


@pytest.fixture
def excess_of(compare_ops, make_call, make_value):
    """Excess of a single input opposite another one (`None` where nothing can be compared)."""

    def run(target, bench, **options):
        anchor = {"Torch.anchor.0.forward": make_call(make_value(1.0))}
        ops = [{OP: make_call(item) if item is not ... else make_call(), **anchor} for item in (target, bench)]
        return compare_ops(*ops, **options).excess(f"{OP}.input.0")

    return run


# -- FORMATS.md, "What msprobe's rules do not see", line by line


def test_a_weight_off_by_a_thousandth_and_the_output_that_follows(compare_ops, make_call, make_value):
    def ops(factor):
        return {
            "Functional.linear.2.forward": make_call(scaled(make_value, 1.0), out=scaled(make_value, 1.0)),
            OP: make_call(
                scaled(make_value, 1.0), scaled(make_value, factor, dtype="torch.float32"),
                out=scaled(make_value, factor),
            ),
            "Module.fc1.Linear.forward.0": make_call(
                scaled(make_value, 1.0), parameters={"weight": scaled(make_value, factor)},
                out=scaled(make_value, factor),
            ),
        }  # fmt: skip

    construct = {OP: "Module.fc1.Linear.forward.0", "Module.fc1.Linear.forward.0": None}
    found = compare_ops(ops(1.001), ops(1.0), construct=construct)
    assert set(found.result.results) == {"pass"}  # msprobe's word for all of it
    first = found.result.first
    assert first is not None
    assert (first.item, first.position, first.row) == (f"{OP}.input.1", 1, 3)
    assert first.parent == "Module.fc1.Linear.forward.0"
    assert first.excess == pytest.approx(8.19, rel=1e-2)
    assert first.reason.startswith("norm 78.078 against 78, 0.1 % apart (8.18 times")
    assert first.stack == ("File /job/model.py, line 3, in forward, \n y = f(x)",)
    assert (first.npu_norm, first.bench_norm) == ("78.07799999999999", "78.0")
    assert divergence.sentence(first).startswith(f"{OP}.input.1, inside Module.fc1.Linear.forward.0: norm")
    assert found.result.findings == 4


def test_an_output_one_percent_off(compare_ops, make_call, make_value):
    def ops(factor):
        return {OP: make_call(scaled(make_value, 1.0), out=scaled(make_value, factor))}

    found = compare_ops(ops(1.01), ops(1.0)).result
    assert set(found.results) == {"pass"}
    assert found.first is not None
    assert found.first.item == f"{OP}.output.0"


def test_a_flipped_sign(compare_ops, make_call, excess_of, make_value):
    flipped = make_value(3.8, -3.9, -0.004, 78.0, shape=[4, 24, 64])
    found = compare_ops({OP: make_call(out=flipped)}, {OP: make_call(out=scaled(make_value, 1.0))})
    assert (set(found.result.results), found.result.findings) == ({"pass"}, 1)
    assert found.excess(f"{OP}.output.0") > 50
    # Symmetric but for the mean, which is small beside the values and yet far beyond their rounding.
    assert (
        excess_of(
            make_value(3.9, -3.9, -0.004, 78.0, shape=[4, 24, 64]),
            make_value(3.9, -3.9, 0.004, 78.0, shape=[4, 24, 64]),
        )
        > 50
    )


@pytest.mark.parametrize("side", ["target", "bench"])
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_non_finite_on_one_side_only(compare_ops, make_call, make_value, side, odd):
    bad, good = {OP: make_call(make_value(odd))}, {OP: make_call(make_value(1.0))}
    found = compare_ops(bad, good) if side == "target" else compare_ops(good, bad)
    assert found.excess(f"{OP}.input.0") == INF
    assert found.result.findings == 1
    assert set(found.result.results) == {"error" if side == "target" else "pass"}
    shown = "Nan" if math.isnan(odd) else str(odd)
    assert shown in found.result.first.reason


def test_a_target_row_without_a_bench_row(compare_ops, make_call, make_value):
    one = make_value(1.0)
    found = compare_ops({OP: make_call(one, one), "Torch.x.0.forward": make_call(one)}, {OP: make_call(one)})
    assert (found.result.rows, found.result.matched) == (3, 1)
    assert set(found.result.results) == {"pass"}
    assert "2 of the target's 3 items have no counterpart" in found.result.notes[0]


def test_ops_only_in_the_bench(compare_ops, make_call, make_value):
    record = make_call(make_value(1.0))
    found = compare_ops({OP: record}, {OP: record, "Torch.x.0.forward": record})
    assert found.result.bench_only == ("Torch.x.0.forward",)


def test_names_that_differ_by_a_wrapper_are_compared(compare_ops, make_call, make_value):
    target = {"Module.module.fc.Linear.forward.0": make_call(scaled(make_value, 1.01))}
    found = compare_ops(target, {"Module.fc.Linear.forward.0": make_call(scaled(make_value, 1.0))})
    assert set(found.result.results) == {"pass"}
    assert found.result.first.bench_item == "Module.fc.Linear.forward.0.input.0"


@pytest.mark.parametrize(("keyword", "result"), [("src", "pass"), ("alpha", "error")])
def test_a_keyword_scalar_that_differs(compare_ops, make_call, make_value, keyword, result):
    def ops(value):
        return {OP: make_call(make_value(1.0), keywords={keyword: {"type": "int", "value": value}})}

    found = compare_ops(ops(0), ops(1))
    assert found.rows[f"{OP}.input.{keyword}"]["Result"] == result
    assert found.result.first.item == f"{OP}.input.{keyword}"
    assert found.result.first.reason == "value 0 against 1"
    assert found.result.first.excess == INF


def test_the_first_one_is_not_four_ops_downstream(compare_ops, make_call, make_value):
    """Where all later ops differ by more, the first is still the earliest."""

    def ops(*factors):
        return {f"Torch.f.{i}.forward": make_call(out=scaled(make_value, f)) for i, f in enumerate(factors)}

    found = compare_ops(ops(1, 1.001, 1.5, NAN), ops(1, 1, 1, 1))
    assert found.result.first.item == "Torch.f.1.forward.output.0"


def test_different_modes_are_compared_by_what_both_have(compare_ops, make_call, make_value, tmp_path, make_folder):

    md5 = make_folder(tmp_path / "m", {OP: make_call(make_value(1.0, md5="00aa"))})
    plain = make_folder(tmp_path / "p", {OP: make_call(make_value(1.0))}, task="tensor")
    found = compare_rank(md5, plain, step=0, rank=0, partition=tmp_path / "x.parquet")
    assert found.mode.value == "statistics"
    assert found.notes == (
        "only the target has checksums: compared by statistics",
        "only the bench has stored tensor values: compared by statistics",
    )


# -- what else is certain, and what is not


def test_certain_differences(excess_of, make_value):
    one = make_value(1.0)
    assert excess_of(one, one | {"dtype": "torch.float16"}) == INF
    assert excess_of(one, one | {"shape": [6]}) == INF
    assert excess_of(one, None) == INF
    assert excess_of(None, one) == INF
    assert excess_of({"type": "int", "value": 3}, {"type": "int", "value": 4}) == INF
    assert excess_of({"type": "int", "value": 1}, {"type": "float", "value": 1.0}) == INF
    assert excess_of({"type": "str", "value": "a"}, {"type": "str", "value": "b"}) == INF
    assert excess_of({"type": "slice", "value": [1, 2]}, {"type": "slice", "value": [1, 3]}) == INF
    assert (
        excess_of({"type": "torch.memory_format", "format": "a"}, {"type": "torch.memory_format", "format": "b"}) == INF
    )
    assert excess_of(
        {"class_type": "torch.distributed.P2POp", "tensor": one, "peer": 1},
        {"class_type": "torch.distributed.P2POp", "tensor": one, "peer": 2},
    ) == INF  # fmt: skip
    ids = make_value(7, 0, None, None, dtype="torch.int64")
    assert excess_of(ids, ids | {"Max": 8}) == INF
    mask = make_value(True, False, None, None, dtype="torch.bool")
    assert excess_of(mask, mask | {"Min": True}) == INF


@pytest.mark.parametrize(("own", "other"), [("Int32", "torch.int64"), ("torch.int32", "Int64")])
def test_ids_of_two_frameworks_are_judged_by_their_values(excess_of, make_value, own, other):
    """MindSpore asks for int32 labels where PyTorch asks for int64. Within one framework they differ."""
    target, bench = make_value(7, 0, 2.5, 9.0, dtype=own), make_value(7, 0, 2.5, 9.0, dtype=other)
    assert excess_of(target, bench) == 0.0
    assert excess_of(bench, target) == 0.0
    assert excess_of(target, bench | {"Max": 8}) == INF
    for first, second in (("Int32", "Int64"), ("torch.int32", "torch.int64"), ("Int8", "torch.int64")):
        assert excess_of(target | {"dtype": first}, target | {"dtype": second}) == INF


def test_arguments_of_two_frameworks_functions(tmp_path, make_folder, make_value, make_call):
    """One more in the bench's call is a finding, but not between frameworks, whose functions have others."""
    name = "Functional.cross_entropy.0.forward"
    value, more = make_value(1.0), {"type": "float", "value": 0.5}

    def findings(number, framework):
        folders = []
        for side, ops in (("t", {name: make_call(value)}), ("b", {name: make_call(value, more)})):
            folder = make_folder(tmp_path / f"{side}{number}", ops)
            dump = folder.path / "dump.json"
            dump.write_text(dump.read_text().replace('"pytorch"', f'"{framework if side == "t" else "pytorch"}"'))
            folders.append(folder)
        return compare_rank(*folders, step=0, rank=0, partition=tmp_path / f"{number}.parquet").findings

    assert findings(0, "pytorch") == 1
    assert findings(1, "mindspore") == 0


def test_no_difference_at_all(excess_of, make_value):
    for item in (
        make_value(1.0),
        make_value(NAN),
        make_value(INF, -INF, NAN, INF),
        make_value(0.0),
        make_value(None),
        None,
        {"type": "int", "value": 3},
        {"type": "float", "value": NAN},
        {"type": "str", "value": "x"},
        make_value(True, False, None, None, dtype="torch.bool"),
    ):
        assert excess_of(item, item) in (None, 0.0)


def test_what_says_nothing(excess_of, make_value):
    # msprobe records no mean and norm of float64 and integers, we do.
    full, bare = make_value(2.0, 1.0, 1.5, 9.0), make_value(2.0, 1.0, None, None)
    assert excess_of(full, bare) == 0.0
    assert excess_of({"type": "str", "value": "cuda:0"}, {"type": "str", "value": "npu:0"}) is None
    # msprobe signs the norm of a 0-d tensor.
    assert excess_of(make_value(-2.0, norm=-2.0, shape=[]), make_value(-2.0, norm=2.0, shape=[])) == 0.0
    # Its norms of float16 overflow.
    half = {"dtype": "torch.float16"}
    assert excess_of(make_value(6e4, 1.0, 4e4, INF, **half), make_value(6e4, 1.0, 4e4, 8.5e4, **half)) == 0.0


def test_non_finite_without_counterpart(compare_ops, make_call, make_value):
    anchor = {OP: make_call(make_value(1.0))}
    lone = {
        "Torch.log.0.forward": make_call(make_value(NAN)),
        "Tensor.masked_fill.0.forward": make_call(make_value(1.0, -INF, -INF, INF)),
        "Torch.x.0.forward": make_call(make_value(1.0)),
    }
    found = compare_ops(anchor | lone, anchor)
    assert [found.excess(f"{op}.input.0") for op in lone] == [INF, None, None]
    assert found.result.first.reason == "max Nan, and no counterpart in the bench"


@pytest.mark.parametrize(
    ("dtype", "rounding", "fault"),
    [
        ("torch.float64", 2.0**-45, 2.0**-40),
        ("torch.float32", 2.0**-16, 1e-3),
        ("torch.bfloat16", 2.0**-8, 1e-2),
        ("torch.float16", 2.0**-11, 2e-3),
        ("Float32", 2.0**-16, 1e-3),
        ("torch.complex64", 2.0**-16, 1e-3),
        ("float32", 2.0**-16, 1e-3),
    ],
)
def test_tolerances_by_dtype(excess_of, make_value, dtype, rounding, fault):
    reference = scaled(make_value, 1.0, dtype=dtype)
    assert excess_of(scaled(make_value, 1.0 + rounding, dtype=dtype), reference) < 1.0
    assert excess_of(scaled(make_value, 1.0 + fault, dtype=dtype), reference) > 1.0


def test_one_unit_in_the_last_place_of_bfloat16_is_rounding(excess_of, make_value):
    """1.0 and the next bfloat16, 1 + 2^-7, as a maximum; the norm, rounded to bfloat16 by msprobe, alike."""
    more = {"dtype": "torch.bfloat16", "shape": [4, 24, 64]}
    assert (
        excess_of(make_value(1 + 2**-7, -1.0, 0.0, 1 + 2**-7, **more), make_value(1.0, -1.0, 0.0, 1.0, **more)) <= 1.0
    )


def test_python_floats_are_judged_as_float32(excess_of):
    def plain(value):
        return {"type": "float", "value": value}

    assert excess_of(plain(0.1), plain(0.10000000149011612)) < 1.0
    assert excess_of(plain(1e-5), plain(1e-6)) > 1000


def test_a_mean_near_zero_is_judged_by_the_values(excess_of, make_value):
    noise = make_value(3.9, -3.8, 1e-9, 78.0, shape=[4, 24, 64])
    assert excess_of(noise | {"Mean": -2e-9}, noise) < 1e-3
    assert excess_of(noise | {"Mean": 1e-3}, noise) > 1.0


def test_gradients_that_cancel_are_judged_by_what_came_in(compare_ops, make_call, make_value):
    """The bias of attention keys has a gradient of exactly zero but for rounding."""

    def ops(bias):
        noise = make_value(bias, -bias, bias / 9, bias * 3, shape=[64])
        return {
            "Functional.linear.0.backward": {"input": [scaled(make_value, 1.0)], "output": [noise]},
            "Module.k.Linear.parameters_grad.0": {"weight": [scaled(make_value, 1.0)], "bias": [noise]},
            OP: make_call(noise, out=noise),
        }

    found = compare_ops(ops(2e-7), ops(3e-7))
    assert found.excess("Functional.linear.0.backward.output.0") < 1.0
    assert found.excess("Module.k.Linear.parameters_grad.0.bias") < 1.0
    assert found.excess(f"{OP}.input.0") > 1.0  # inputs and forward outputs have no floor
    assert compare_ops(ops(0.2), ops(0.3)).excess("Functional.linear.0.backward.output.0") > 1.0


@pytest.mark.parametrize(("tokens", "is_noise"), [(48, False), (4096, True)])
def test_what_a_sum_cancels_to_may_be_off_by_the_root_of_its_length(
    compare_ops, make_call, make_value, tokens, is_noise
):
    def ops(bias):
        out = make_value(bias, -bias, bias / 9, bias * 3, shape=[64])
        incoming = scaled(make_value, 1.0) | {"shape": [tokens, 64]}
        return {"Functional.linear.0.backward": {"input": [incoming], "output": [out]}}

    # Off by 26 times 2^-13 / 128 of the largest value that came in.
    found = compare_ops(ops(1e-5), ops(1e-5 + 100e-6)).excess("Functional.linear.0.backward.output.0")
    assert (found < 1.0) is is_noise


def test_gradients_that_cancel_are_noise_in_the_optimizer_as_well(compare_ops, make_call, make_value):
    def ops(noise, weight=1.0):
        def step(number, value):
            return {f"Tensor.lerp_.{number}.forward": make_call(scaled(make_value, value), scaled(make_value, value))}

        return {
            **step(0, noise),  # before the last backward call nothing is known to be a gradient
            "Functional.linear.0.backward": {"input": [scaled(make_value, 1.0)], "output": []},
            **step(1, noise),
            **step(2, weight),
        }

    found = compare_ops(ops(2e-8), ops(3e-8))
    assert found.excess("Tensor.lerp_.0.forward.input.1") > 1.0
    assert found.excess("Tensor.lerp_.1.forward.input.1") < 1.0
    assert compare_ops(ops(2e-8, 1.01), ops(2e-8, 1.0)).excess("Tensor.lerp_.2.forward.input.1") > 1.0


def test_float32_that_was_computed_from_bfloat16_is_judged_as_such(compare_ops, make_call, make_value):
    def ops(off):
        return {
            "Torch.a.0.forward": make_call(out=scaled(make_value, off)),
            "Torch.b.0.forward": make_call(scaled(make_value, 1.0, dtype="torch.bfloat16")),
            "Torch.c.0.forward": make_call(out=scaled(make_value, off)),
            "Module.d.D.forward.0": make_call(parameters={"w": scaled(make_value, off)}),
            "Torch.e.0.forward": make_call({"type": "float", "value": off}),
        }

    found = compare_ops(ops(1.002), ops(1.0))
    assert found.excess("Torch.a.0.forward.output.0") > 1.0
    assert found.excess("Torch.c.0.forward.output.0") < 1.0
    assert found.excess("Module.d.D.forward.0.parameters.w") > 1.0
    assert found.excess("Torch.e.0.forward.input.0") > 1.0


def test_a_cast_that_only_the_target_has_excuses_nothing(compare_ops, make_call, make_value):
    """What it changes is judged as float32: it hid itself, and the rank that only received from it was named."""
    one, off = make_call(scaled(make_value, 1.0)), make_call(scaled(make_value, 1.001))
    half = make_call(scaled(make_value, 1.0, dtype="torch.bfloat16"))
    found = compare_ops(
        {"Torch.a.0.forward": one, "Tensor.bfloat16.0.forward": half, "Torch.c.0.forward": off},
        {"Torch.a.0.forward": one, "Torch.c.0.forward": one},
    )
    assert found.excess("Torch.c.0.forward.input.0") > 1.0


def test_gradients_of_bfloat16_are_sums_over_all_tokens(compare_ops, make_call, make_value):
    def ops(off):
        half = {"dtype": "torch.bfloat16"}
        return {
            "Torch.a.0.forward": make_call(out=scaled(make_value, off, **half)),
            "Torch.a.0.backward": {"input": [], "output": [scaled(make_value, off, **half)]},
        }

    found = compare_ops(ops(1.05), ops(1.0))
    assert found.excess("Torch.a.0.forward.output.0") > 1.0
    assert found.excess("Torch.a.0.backward.output.0") < 1.0
    assert compare_ops(ops(1.2), ops(1.0)).excess("Torch.a.0.backward.output.0") > 1.0


def test_tolerance_overrides(excess_of, make_value):
    off = scaled(make_value, 1.01), scaled(make_value, 1.0)
    assert excess_of(*off, tolerance=0.02) == pytest.approx(0.495, rel=0.02)
    assert excess_of(*off, tolerance=0.005) == pytest.approx(2.0, rel=0.02)
    one = make_value(1.0)
    assert excess_of(one, one | {"shape": [6]}, tolerance=100.0) == INF


def test_checksums_of_any_difference(compare_ops, make_call, make_value):
    def ops(md5):
        return {OP: make_call(make_value(1.0, md5="aa"), make_value(1.0, md5=md5), {"type": "int", "value": 1}, None)}

    found = compare_ops(ops("bb"), ops("cc"))
    assert [found.excess(f"{OP}.input.{i}") for i in range(4)] == [0.0, INF, 0.0, None]
    assert found.result.first.reason == "checksum bb against cc"


@pytest.mark.parametrize("of_target", [True, False])
def test_names_are_compared_with_a_dump_that_has_values(tmp_path, make_folder, make_call, make_value, of_target):
    ops = {OP: make_call(make_value(1.0), out=make_value(2.0)), "Torch.other.0.forward": make_call(make_value(1.0))}
    sides = (
        make_folder(tmp_path / "s", dict.fromkeys(ops, make_call()), task="structure"),
        make_folder(tmp_path / "v", ops),
    )
    found = compare_rank(*(sides if of_target else sides[::-1]), step=0, rank=0, partition=tmp_path / "p.parquet")
    assert (found.mode.value, found.rows, found.matched, found.findings) == ("structure", 2, 2, 0)


def test_structure_compares_names_only(compare_ops):
    names = {"Module.a.A.forward.0": None, "Module.b.B.forward.0": "Module.a.A.forward.0"}
    found = compare_ops({}, {}, task="structure", construct=names)
    assert (found.result.mode.value, found.result.matched, found.result.findings) == ("structure", 2, 0)
    assert found.result.first is None


def test_results_read_from_a_file_are_judged_alike(compare_ops, make_call, make_value):
    """A partition without our own columns' help (integers, hidden values) has the same excess."""
    target = {OP: make_call(scaled(make_value, 1.001), make_value(NAN), {"type": "int", "value": 3}, make_value(1.0))}
    bench = {OP: make_call(scaled(make_value, 1.0), make_value(1.0), {"type": "int", "value": 4}, make_value(1.0))}
    found = compare_ops(target, bench)
    again = divergence.with_excess(found.table.drop_columns(["excess", "integers"]), found.result.mode)
    assert again["excess"].to_pylist() == found.table["excess"].to_pylist()


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-30, 1e30), st.floats(-1e-2, 1e-2), st.sampled_from(["torch.float32", "torch.bfloat16"]))
def test_excess_does_not_depend_on_scale(scale, off, dtype):
    """Multiplying both sides changes nothing; a zero difference is zero."""
    import pyarrow as pa

    def table(unit):
        target, bench = unit * (1.0 + off), unit
        columns = {
            "NPU Name": ["a"], "Bench Name": ["a"], "op": ["a"], "role": ["input"],
            "NPU Dtype": [dtype], "Bench Dtype": [dtype], "NPU Tensor Shape": ["[4]"], "Bench Tensor Shape": ["[4]"],
        }  # fmt: skip
        for names, value in ((divergence.NPU_STATISTICS, target), (divergence.BENCH_STATISTICS, bench)):
            for name in names:
                columns[name] = [value]
                columns[name + ":text"] = pa.array([None], pa.string())
        return pa.table(columns)

    one, other = (float(divergence.excess(table(unit), divergence.Mode.STATISTICS)[0]) for unit in (1.0, scale))
    assert other == pytest.approx(one, rel=1e-6, abs=1e-6)


def test_a_reason_names_the_smallest_of_values(compare_ops, make_call, make_value):
    found = compare_ops({OP: make_call(make_value(0.0))}, {OP: make_call(make_value(1e-300))})
    assert found.result.first.reason == "norm 0 against 1e-300, 100 % apart (8.19e+03 times the tolerance)"


def test_a_shard_is_named_with_its_placement(compare_ops, make_call, make_value):
    """DTensors are compared by this rank's part; two runs that divide a tensor in other ways are told apart."""

    def ops(factor, dim=0, ranks=(0, 1)):
        part = {
            "type": "torch.distributed.tensor.DTensor",
            "device_mesh": list(ranks),
            "placements": [{"Shard": {"dim": dim}}, {"Partial": {"reduce_op": "sum"}}, {"Replicate": {}}],
            "global_shape": [4, 3],
        }
        return {"Torch.a.0.forward": make_call(make_value(1.0), scaled(make_value, factor) | part)}

    words = "Partial(sum), Replicate of [4, 3]"
    found = compare_ops(ops(1.01), ops(1.0, ranks=(4, 5)))
    assert found.result.first.reason.endswith(f"times the tolerance); this rank's part, Shard(0), {words}")
    assert found.table["placement"].to_pylist() == [None, f"Shard(0), {words}"]
    assert compare_ops(ops(1.0), ops(1.0)).result.first is None
    other = compare_ops(ops(1.0), ops(1.0, dim=1)).result
    assert (other.findings, set(other.results)) == (1, {"pass"})
    assert other.first.reason == f"placement Shard(0), {words} against Shard(1), {words}"
