"""Arguments that one side's calls have and the other's lack."""

from __future__ import annotations

import pytest

from aggregator import compare
from msprobe_launch.records.layout import RankFolder

NORM = "Functional.layer_norm.0.forward"


@pytest.fixture
def norm_ops(make_call, make_value):
    """One layer norm with these keywords; every value is the same whatever they are."""

    def made(**keywords):
        spelled = {
            name: None if value is None else {"type": "float", "value": value} for name, value in keywords.items()
        }
        return {NORM: make_call(make_value(1.0), out=make_value(2.0), keywords=spelled)}

    return made


def test_an_argument_that_only_the_target_has_is_named(compare_ops, norm_ops):
    found = compare_ops(norm_ops(eps=1.1e-5), norm_ops()).result
    assert (found.findings, found.first.item) == (1, f"{NORM}.input.eps")
    assert found.first.reason == "the bench's call has no argument eps"


def test_an_argument_that_only_the_bench_has_is_named(compare_ops, norm_ops):
    found = compare_ops(norm_ops(), norm_ops(eps=1.1e-5, scale=2.0)).result
    assert (found.findings, found.first.item) == (1, f"{NORM}.input.0")
    assert found.first.reason == "the bench's call also has arguments eps, scale"


@pytest.mark.parametrize("case", ["none", "both", "no counterpart", "longer list"])
def test_what_is_no_finding(compare_ops, norm_ops, make_value, make_call, case):
    bench = norm_ops()
    if case == "none":
        target = norm_ops(bias=None)
    elif case == "both":
        target, bench = norm_ops(epsilon=1e-5), norm_ops(eps=1e-5)
    elif case == "no counterpart":
        target = {**norm_ops(), "Functional.gelu.0.forward": make_call(make_value(1.0), out=make_value(1.0))}
    else:
        parts = [make_value(1.0), make_value(2.0)]
        target = {NORM: make_call(parts, out=make_value(2.0))}
        bench = {NORM: make_call(parts[:1], out=make_value(2.0))}
    assert compare_ops(target, bench).result.findings == 0


@pytest.mark.parametrize("ours", [(), ("t",), ("b",), ("t", "b")])
def test_two_recorders_hand_arguments_over_in_other_ways(tmp_path, norm_ops, make_folder, ours):
    """A run directory of ours is known by its manifest, or its roster where there was no launcher."""
    sides = []
    for name, ops in (("t", norm_ops(eps=1e-5)), ("b", norm_ops())):
        make_folder(tmp_path / name / "step0" / "rank0", ops)
        if name in ours and name == "t":
            (tmp_path / name / "roster").mkdir()
        elif name in ours:
            (tmp_path / name / "manifest.json").write_text("{}")
        sides.append(RankFolder(tmp_path / name / "step0" / "rank0", 0))
    found = compare.compare_rank(*sides, step=0, rank=0, partition=tmp_path / "p.parquet")
    assert found.findings == (0 if len(ours) == 1 else 1)
    assert any("two recorders" in note for note in found.notes) is (len(ours) == 1)
