"""Where a configuration comes from, and what is said about a wrong one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msprobe_launch.config import DataMode, Level, NumberSet, StepOn, SummaryMode, Task
from msprobe_launch.config_sources import Resolved, resolve
from msprobe_launch.errors import ConfigError

# msprobe 26.2's own sample, as it ships, but for the sections' order.
MSPROBE_SAMPLE = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "extra_info": True,
    "async_dump": False,
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}


def resolved(
    tmp_path: Path,
    file: Any = None,
    environ: Mapping[str, str] | None = None,
    suffix: str = ".json",
    **flags: str | bool,
) -> Resolved:
    path = None
    if file is not None:
        path = tmp_path / f"probe{suffix}"
        path.write_text(file if isinstance(file, str) else json.dumps(file), encoding="utf-8")
    return resolve(flags, environ or {}, path, default_run_dir=tmp_path / "run")


def message(tmp_path: Path, file: Any = None, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, file, **more)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    config = resolved(tmp_path).config
    assert (config.run_dir, config.level, config.task) == (tmp_path / "run", Level.L1, Task.STATISTICS)


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    file = {"level": "L0", "step": [1], "rank": [1], "step_on": "forward"}
    environ = {"MSPROBE_LAUNCH_STEPS": "2", "MSPROBE_LAUNCH_RANKS": "2", "MSPROBE_LAUNCH_EVAL": "yes"}
    found = resolved(tmp_path, file, environ, ranks="3")
    config = found.config
    assert (config.level, config.steps, config.ranks) == (Level.L0, NumberSet.parse("2"), NumberSet.parse("3"))
    assert (config.step_on, config.eval) == (StepOn.FORWARD, True)
    assert found.sources == {
        "level": "'level' in probe.json",
        "step_on": "'step_on' in probe.json",
        "steps": "MSPROBE_LAUNCH_STEPS",
        "eval": "MSPROBE_LAUNCH_EVAL",
        "ranks": "--probe-ranks",
    }


def test_msprobes_sample_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolved(tmp_path, MSPROBE_SAMPLE).config
    assert config.run_dir == tmp_path / "dump_path"
    assert (config.level, config.data_mode) == (Level.L1, frozenset({DataMode.ALL}))


def test_yaml_says_the_same(tmp_path: Path) -> None:
    text = "level: mix\nstep: [0, '5-8']\nstatistics:\n  list: [linear]\n  data_mode: [forward, input]\n"
    config = resolved(tmp_path, text, suffix=".yaml").config
    assert (config.level, str(config.steps), config.list) == (Level.MIX, "0,5-8", ("linear",))
    assert config.data_mode == {DataMode.FORWARD, DataMode.INPUT}


def test_only_the_chosen_tasks_section_is_read(tmp_path: Path) -> None:
    file = {"statistics": {"list": ["a"]}, "structure": {"list": ["b"]}, "tensor": {"no_such": 1}}
    assert resolved(tmp_path, file).config.list == ("a",)
    assert resolved(tmp_path, file, task="structure").config.list == ("b",)
    assert resolved(tmp_path, file, {"MSPROBE_LAUNCH_TASK": "structure"}).config.list == ("b",)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"setp": [1]}, "unknown key 'setp' in probe.json. Did you mean 'step'?"),
        ({"statistics": {"lsit": []}}, "unknown key 'lsit' in 'statistics' of probe.json. Did you mean 'list'?"),
        ({"level": "L3"}, "unknown value 'L3'."),
        ({"level": "mixx"}, "Did you mean 'mix'?"),
        ({"task": "nan_check"}, "'nan_check' is not supported yet. Known: statistics, tensor, structure."),
        ({"step_every": 0}, "must be a whole number of at least 1, not 0."),
        ({"step_start": 5, "step_stop": 4}, "step 4 comes before the first one, 5."),
        ({"max_bytes": "20 parsecs"}, "'20 parsecs' is no number of bytes such as 500M, 20GB or 64GiB."),
        ({"step": "0"}, 'must be a list of numbers and ranges such as [0, "5-8"], not "0".'),
        ({"step": [True]}, "not [true]."),
        ({"rank": ["7-5"]}, "the range '7-5' runs backwards"),
        ({"level": 1}, "must be a text, not 1."),
        ({"eval": 1}, "must be true or false, not 1."),
        ({"statistics": []}, "must be an object"),
        ({"statistics": {"list": "conv"}}, "must be a list of texts"),
        ({"statistics": {"data_mode": ["all", "input"]}}, "'all' already includes input."),
        ({"statistics": {"data_mode": ["inptu"]}}, "Did you mean 'input'?"),
        (
            {"statistics": {"summary_mode": "md"}},
            "unknown value 'md'. Did you mean 'md5'? Known: statistics, md5, xor.",
        ),
        ({"statistics": {"list": ["name-regex(a(.*)"]}}, "'name-regex(a(.*)' is no regular expression:"),
        ({"task": "tensor", "tensor": {"tensor_list": ["linear"]}}, "goes with task statistics, not with task tensor."),
        ({"async_dump": True}, "true is not supported yet. Use false, or leave it out."),
        ({"async_dump": 0}, "0 is not supported yet."),
        ({"is_deterministic": True}, "'is_deterministic' in probe.json"),
        ({"seed": 1234}, "1234 is not supported yet. Leave it out."),
        ({"statistics": {"scope": ["Functional.linear.0.forward"]}}, "scope needs two names"),
        ({"statistics": {"scope": ["linear", "relu"]}}, "'linear' is not a full op name."),
        ({"bench": "/no/such/run"}, "there is no directory /no/such/run."),
        ([], "must hold an object"),
        ("{", "not valid JSON"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, file: Any, expected: str) -> None:
    assert expected in message(tmp_path, file)


def test_bytes_checksums_and_steps_by_rule(tmp_path: Path) -> None:
    section = {"summary_mode": "md5", "tensor_list": ["linear"]}
    config = resolved(
        tmp_path, {"statistics": section, "max_bytes": "2.5GB"}, every="10", start="100", stop="120"
    ).config
    assert (config.summary_mode, config.tensor_list, config.max_bytes) == (SummaryMode.MD5, ("linear",), 2_500_000_000)
    assert [step for step in range(200) if config.selects(step)] == [100, 110, 120]
    assert config.last_step == 120
    assert resolved(tmp_path, max_bytes="64KiB").config.max_bytes == 65536


def test_a_scope_must_be_of_the_levels_kind(tmp_path: Path) -> None:
    module, api = "Module.fc.Linear.forward.0", "Functional.linear.0.forward"
    assert "level L1 records APIs only" in message(tmp_path, scope=f"{api},{module}")
    assert "level L0 records modules only" in message(tmp_path, scope=f"{module},{api}", level="L0")
    assert resolved(tmp_path, scope=f"{module},{api}", level="mix").config.scope == (module, api)


def test_a_flags_error_names_the_flag(tmp_path: Path) -> None:
    assert message(tmp_path, steps="1-x").startswith("--probe-steps: ")
    assert message(tmp_path, data_mode="al").startswith("--probe-data-mode: ")
    assert message(tmp_path, environ={"MSPROBE_LAUNCH_EVAL": "perhaps"}).startswith("MSPROBE_LAUNCH_EVAL: ")


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\xff\xfe{}", "utf-8")])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "probe.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        resolve({}, {}, path, default_run_dir=tmp_path)


def test_bad_yaml_is_refused(tmp_path: Path) -> None:
    assert "not valid YAML" in message(tmp_path, "level: [", suffix=".yml")
