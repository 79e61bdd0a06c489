"""ProbeConfig: number sets, and the way to the ranks as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_launch.config import DataMode, Level, ProbeConfig, StepOn, SummaryMode, Task
from msprobe_launch.records.numbers import NumberSet


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("0,2,5-8", [0, 2, 5, 8], [1, 3, 4, 9]), ("3", [3], [0, 4]), ("", [0, 10**6], []), (" 1 , 2-2 ", [1, 2], [0, 3])],
)
def test_number_set_reads_numbers_and_ranges(text: str, inside: list[int], outside: list[int]) -> None:
    numbers = NumberSet.parse(text)
    assert all(n in numbers for n in inside)
    assert not any(n in numbers for n in outside)
    assert NumberSet.parse(str(numbers)) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "8-5", "1.5", "1 2", "²"])
def test_number_set_refuses_anything_else(text: str) -> None:
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        NumberSet.parse(text)


def test_json_round_trip_keeps_every_field() -> None:
    config = ProbeConfig(
        run_dir=Path("/runs/a b/数据"),
        level=Level.MIX,
        task=Task.STRUCTURE,
        steps=NumberSet.parse("0,5-8"),
        ranks=NumberSet.parse("1"),
        scope=("Module.a.Linear.forward.0", "Functional.relu.1.forward"),
        list=("linear", "relu"),
        data_mode=frozenset({DataMode.FORWARD, DataMode.INPUT}),
        step_on=StepOn.MANUAL,
        eval=True,
        bench=Path("/runs/good"),
        summary_mode=SummaryMode.XOR,
        tensor_list=("linear",),
        max_bytes=10**9,
        every=3,
        start=2,
        stop=9,
        control_seconds=0.25,
        flush_records=7,
        flush_seconds=0.5,
    )
    text = config.to_json()
    assert "\n" not in text
    assert ProbeConfig.from_json(text) == config


def test_json_round_trip_of_defaults() -> None:
    config = ProbeConfig(run_dir=Path("/r"))
    assert ProbeConfig.from_json(config.to_json()) == config
