"""Gradients that only one of two runs changed before its optimizer took them."""

from __future__ import annotations

import pytest

NAME = "Module.fc.Linear.parameters_grad"


@pytest.fixture
def gradients(make_value):
    """A step that accumulated twice; `applied` is what the optimizer was given, None for what had accumulated."""

    def made(applied=None, accumulated=2.0):
        ops = {f"{NAME}.{k}": {"weight": [make_value(value)]} for k, value in enumerate((1.0, accumulated))}
        if applied is not None:
            ops[f"{NAME}.2"] = {"weight.applied": [make_value(applied)]}
        return ops

    return made


def test_a_gradient_that_only_the_target_changed_is_a_finding(compare_ops, gradients):
    found = compare_ops(gradients(applied=1.0), gradients()).result
    assert (found.findings, found.first.item) == (1, f"{NAME}.2.weight.applied")
    said = "changed before the optimizer took it (norm 2 to 1), and not so in the bench"
    assert found.first.reason == said


def test_a_gradient_that_only_the_bench_changed_is_a_finding(compare_ops, gradients):
    found = compare_ops(gradients(), gradients(applied=1.0)).result
    assert (found.findings, found.first.item) == (1, f"{NAME}.1.weight")
    assert "the bench changed it before its optimizer took it (norm 2 to 1)" in found.first.reason


def test_what_is_no_change(compare_ops, gradients):
    assert compare_ops(gradients(applied=2.0), gradients()).result.findings == 0
    assert compare_ops(gradients(applied=1.0), gradients(applied=1.0)).result.findings == 0
    # Noise of a gradient that cancels: each run is held against itself.
    assert compare_ops(gradients(2e-9, 2e-9), gradients(accumulated=3e-9)).excess(f"{NAME}.2.weight.applied") is None
