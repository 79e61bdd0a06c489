"""Matching is a partial injection, symmetric, exact by name first and without wrappers then."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator import match
from aggregator.model import RankFailure

PARTS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "blocks", "0", "fc")
NAMES = st.lists(
    st.builds(
        lambda path, kind, call: ".".join((kind, *path, "Linear", "forward", str(call), "input", "0")),
        st.lists(st.sampled_from(PARTS), max_size=4),
        st.sampled_from(["Module", "Cell", "Functional"]),
        st.integers(0, 2),
    ),
    max_size=12,
)


def pairs(rule, names, bench):
    found = rule(pa.array(names, pa.string()), pa.array(bench, pa.string())).tolist()
    return {(i, j) for i, j in enumerate(found) if j >= 0}


@settings(deadline=None)  # the first call of an Arrow kernel loads it
@given(NAMES, NAMES)
@pytest.mark.parametrize("rule", [match.by_name, match.without_wrappers])
def test_a_rule_is_a_partial_injection_and_symmetric(rule, names, bench):
    found = pairs(rule, names, bench)
    assert len({j for _, j in found}) == len(found)
    assert pairs(rule, bench, names) == {(j, i) for i, j in found}


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=8))
def test_by_name_matches_everything_with_itself(names):
    assert pairs(match.by_name, names, names) == {(i, i) for i in range(len(names))}


def test_wrappers_are_left_out_anywhere(compare_ops, make_value, make_call):
    record = make_call(make_value(1.0), parameters={"weight": make_value(2.0)})
    target = {
        "Module.module._orig_mod.blocks.0._fsdp_wrapped_module.fc.Linear.forward.0": record,
        "Functional.linear.0.forward": make_call(make_value(1.0)),
    }
    bench = {"Module.blocks.0.fc.Linear.forward.0": record, "Functional.linear.0.forward": make_call(make_value(1.0))}
    found = compare_ops(target, bench)
    assert found.result.matched == found.result.rows == 3
    assert any(note.startswith("2 items matched only after wrapper prefixes") for note in found.result.notes)
    bench_names = [row["Bench Name"] for row in found.rows.values()]
    assert bench_names[0] == "Module.blocks.0.fc.Linear.forward.0.input.0"
    assert found.result.bench_only == ()


def test_names_that_become_ambiguous_are_left_unmatched():
    names = ["Module.module.fc.Linear.forward.0.input.0", "Module._orig_mod.fc.Linear.forward.0.input.0"]
    assert pairs(match.without_wrappers, names, ["Module.fc.Linear.forward.0.input.0"]) == set()


def test_nothing_matches_is_a_failure_with_names_of_both_sides(tmp_path, make_folder, make_value, make_call):
    from aggregator import compare

    target = make_folder(tmp_path / "t", {"Functional.linear.0.forward": make_call(make_value(1.0))})
    bench = make_folder(tmp_path / "b", {"Torch.matmul.0.forward": make_call(make_value(1.0))})
    found = compare.compare_rank(target, bench, step=2, rank=5, partition=tmp_path / "p.parquet")
    assert isinstance(found, RankFailure)
    assert (found.step, found.rank) == (2, 5)
    assert "none of the target's 1 items" in found.reason
    assert "Functional.linear.0.forward" in found.reason
    assert "Torch.matmul.0.forward" in found.reason
    assert not (tmp_path / "p.parquet").exists()


@pytest.mark.parametrize("empty", ["t", "b"])
def test_a_dump_without_items_is_a_failure(tmp_path, make_folder, make_value, make_call, empty):
    from aggregator import compare

    ops = {"Functional.linear.0.forward": make_call(make_value(1.0))}
    sides = [make_folder(tmp_path / side, {} if side == empty else ops) for side in ("t", "b")]
    found = compare.compare_rank(*sides, step=0, rank=0, partition=tmp_path / "p.parquet")
    assert isinstance(found, RankFailure)
    assert "holds no items" in found.reason


def test_what_is_left_on_both_sides_is_named(compare_ops, make_value, make_call):
    record = make_call(make_value(1.0))
    found = compare_ops(
        {"Torch.a.0.forward": record, "Torch.b.0.forward": record},
        {"Torch.a.0.forward": record, "Torch.c.0.forward": record},
    )
    assert (found.result.rows, found.result.matched) == (2, 1)
    assert found.result.bench_only == ("Torch.c.0.forward",)
    assert found.rows["Torch.b.0.forward.input.0"]["Bench Name"] == "N/A"
    assert found.result.notes == (
        "1 of the target's 2 items have no counterpart, from Torch.b.0.forward.input.0",
        "1 ops are in the bench only, from Torch.c.0.forward",
        "2 ops without a counterpart are in unmatched_*.csv: Torch.b.0.forward is in the target only: "
        "the other side never calls Torch.b",
    )


def test_a_name_that_stands_twice_is_matched_by_occurrence():
    assert pairs(match.by_name, ["a", "a", "b"], ["a", "b", "a"]) == {(0, 0), (1, 2), (2, 1)}


def test_a_backward_call_is_matched_by_its_number(compare_ops, make_value):
    """msprobe takes backward calls in the order in which they came (docs/compatibility.md): here 1 against 2."""

    def ops(*numbers):
        return {f"Torch.a.{i}.backward": {"input": [make_value(float(i))], "output": []} for i in numbers}

    found = compare_ops(ops(3, 1), ops(3, 2, 1))
    assert [(row["NPU Name"], row["Bench Name"]) for row in found.rows.values()] == [
        (f"Torch.a.{i}.backward.input.0",) * 2 for i in (3, 1)
    ]
    assert found.result.bench_only == ("Torch.a.2.backward",)
