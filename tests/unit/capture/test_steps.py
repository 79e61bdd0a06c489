"""Steps found from events alone: each test plays a program's events and reads off where the cuts fall."""

from __future__ import annotations

import pytest

from msprobe_launch.capture.steps import Boundary, StepTracker
from msprobe_launch.config import StepOn


def play(events: str, *, made: str = "", step_on: StepOn = StepOn.AUTO, evaluation: bool = False) -> list[str]:
    """Run a program: `f` training forward, `e` evaluation forward, a capital letter = that optimizer steps.

    Returns the steps as texts of the events they hold, evaluation that is left out not among them.
    """
    tracker = StepTracker(step_on, evaluation=evaluation)
    for key in made:
        tracker.optimizer_made(key)
    steps, current, held = [], "", None
    for event in events:
        if event in "fe":
            decision = tracker.outermost_forward(event == "f")
            boundary = decision.boundary
            if boundary in (Boundary.JOIN, Boundary.JOIN_CUT, Boundary.JOIN_HOLD):
                assert held is not None
                current, held = current + held, None
            if boundary in (Boundary.CUT, Boundary.JOIN_CUT):
                assert held is None
                steps.append(current)
                current = ""
            if boundary in (Boundary.HOLD, Boundary.JOIN_HOLD):
                held = ""
            if not decision.record:
                continue
        elif tracker.optimizer_stepped(event) is Boundary.SPLIT:
            assert held is not None
            steps.append(current)
            current, held = held, None
        if held is None:
            current += event
        else:
            held += event
    return [*steps, current + (held or "")]


@pytest.mark.parametrize(
    ("events", "made", "expected"),
    [
        ("fAfAfA", "A", ["fA", "fA", "fA"]),
        ("ffAffA", "A", ["ffA", "ffA"]),  # accumulation
        ("fABfAB", "AB", ["fAB", "fAB"]),  # two optimizers in a row count once
        ("fDfGfDfGfD", "DG", ["fDfG", "fDfG", "fD"]),  # GAN
        ("fAfAfA", "AX", ["fA", "fA", "fA"]),  # X is never used
        ("fAfBfAfBfA", "ABX", ["fAfB", "fAfB", "fA"]),
        ("fDfDfGfDfDfG", "DG", ["fD", "fD", "fGfD", "fD", "fG"]),  # critic steps more often
        ("ffff", "", ["f", "f", "f", "f"]),  # no optimizer at all
        ("eee", "", ["e", "e", "e"]),  # inference
        ("fAeefAe", "A", ["fA", "fA"]),  # evaluation is left out
        ("efAfA", "A", ["fA", "fA"]),  # a sanity evaluation first
        ("fAAAfA", "A", ["fAAA", "fA"]),
        ("fAfAfBfBfB", "AB", ["fA", "fA", "fB", "fB", "fB"]),  # a second phase with another optimizer
        ("fDfGfDfGfDfDfG", "DG", ["fDfG", "fDfG", "fDfD", "fG"]),  # a cycle that changes is cut late once
    ],
)
def test_auto(events: str, made: str, expected: list[str]) -> None:
    assert play(events, made=made) == expected


def test_an_optimizer_that_was_replaced_does_not_hold_the_step_open() -> None:
    tracker = StepTracker(StepOn.AUTO, evaluation=False)
    tracker.optimizer_made("A")
    tracker.outermost_forward(True)
    tracker.optimizer_stepped("A")
    assert tracker.outermost_forward(True).boundary is Boundary.CUT
    tracker.optimizer_gone("A")
    tracker.optimizer_stepped("B")
    assert tracker.outermost_forward(True).boundary is Boundary.CUT


def test_forward_policy_cuts_at_each_forward_with_or_without_optimizers() -> None:
    assert play("ffAfA", made="A", step_on=StepOn.FORWARD) == ["f", "fA", "fA"]


def test_optimizer_policy_cuts_after_any_optimizer() -> None:
    assert play("fDfGfD", made="DG", step_on=StepOn.OPTIMIZER) == ["fD", "fG", "fD"]


def test_manual_policy_never_cuts_by_itself() -> None:
    assert play("fAfAfA", made="A", step_on=StepOn.MANUAL) == ["fAfAfA"]


def test_evaluation_is_part_of_the_step_where_it_is_asked_for() -> None:
    assert play("fAefA", made="A", evaluation=True) == ["fAe", "fA"]


def test_a_program_that_ends_before_its_optimizer_steps_leaves_a_part_of_a_step() -> None:
    tracker = StepTracker(StepOn.AUTO, evaluation=False)
    tracker.outermost_forward(True)
    tracker.optimizer_stepped("A")
    assert tracker.closed_cleanly
    tracker.outermost_forward(True)
    assert not tracker.closed_cleanly
