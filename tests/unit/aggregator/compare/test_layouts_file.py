"""The layout file: what it says, and every mistake with file, line, key and near miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aggregator.layouts import spec
from aggregator.layouts.spec import Division
from msprobe_launch.errors import ConfigError


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def run(text: str) -> spec.LayoutFile:
        path = tmp_path / "layout.yaml"
        path.write_text(text)
        return spec.load(path)

    return run


WHOLE = """\
target:
  tp: 2
  dp: 2
  pp: 2
  order: tp-dp-pp
  microbatches: 4
  stages:
  - {blocks: layers.0}
  - {blocks: layers.3, blocks.extra: tail, out: head, "": rest.7}
bench: {}
rules:
  "*.fc1.*": {shard: -1}
  "*.fc2.weight": replicated
  "*.sum": partial
"""


def test_ranks_stages_and_rules_are_as_the_file_has_them(load: Any) -> None:
    found = load(WHOLE).of(range(8), [0])
    assert found.target.grid == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert (found.target.words, found.bench.words) == ("tp 2, dp 2, pp 2", "tp 1, dp 1, pp 1")
    assert found.target.microbatches == 4
    assert [(rule.division, rule.dim, rule.line) for rule in found.rules] == [
        (Division.SHARD, -1, 12),
        (Division.REPLICATED, 0, 13),
        (Division.PARTIAL, 0, 14),
    ]
    names = found.target.names(1)
    paths = ("blocks.0.fc", "blocks.12", "blocks.extra.x", "out", "out.norm", "5.fc", "other", "blocks")
    assert [names.whole(path) for path in paths] == [
        "layers.3.fc", "layers.15", "tail.x", "head", "head.norm", "rest.12.fc", "other", "blocks",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "grid"),
    [
        ("tp-dp-pp", (((0, 1), (2, 3)),)),
        ("dp-tp-pp", (((0, 2), (1, 3)),)),
        ("[pp, dp, tp]", (((0, 2), (1, 3)),)),
    ],
)
def test_the_order_says_which_size_changes_fastest(load: Any, order: str, grid: Any) -> None:
    assert load(f"target: {{tp: 2, dp: 2, order: {order}}}\nbench:\n").of(range(4), [0]).target.grid == grid


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target: {tpp: 2}\nbench: {}\n", r"line 1: unknown key 'tpp' under 'target'\. Did you mean 'tp'\?"),
        ("target: {}\nbenhc: {}\n", r"line 2: unknown key 'benhc'\. Did you mean 'bench'\?"),
        ("target: {}\n", "'bench' is missing"),
        ("- a\n", "holds list; it needs a mapping"),
        ("target: [1\n", "is not YAML"),
        ("target: {tp: 0}\nbench: {}\n", "line 1: 'target.tp' needs a whole number of at least 1, not 0"),
        ("target: {}\nbench:\n  tp: true\n", "line 3: 'bench.tp' needs a whole number"),
        ("target: {}\nbench: 4\n", "line 2: 'bench' needs sizes"),
        ("target: {order: tp-dp}\nbench: {}\n", r"'target\.order' needs each of tp, dp, pp once.*not 'tp-dp'"),
        ("target: {stages: 3}\nbench: {}\n", r"'target\.stages' needs a list"),
        ("target: {stages: [{a: 3}]}\nbench: {}\n", "'a' needs a module's name, not 3"),
        ("target: {}\nbench: {}\nrules: [a]\n", "line 3: 'rules' needs a mapping of name patterns"),
        ('target: {}\nbench: {}\nrules:\n  "*.a": replicate\n', r"line 4: rule '\*\.a': unknown 'replicate'\. Did"),
        ('target: {}\nbench: {}\nrules:\n  "*.a": {shad: 1}\n', r"unknown key 'shad'\. Did you mean 'shard'\?"),
        ('target: {}\nbench: {}\nrules:\n  "*.a": {shard: x}\n', "'shard' needs the number of a dimension, not 'x'"),
        ("target: {tp: 2}\nbench: {}\ntarget: {}\n", "line 3: 'target' stands there twice"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(load: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(text)


def test_sizes_that_do_not_multiply_to_the_number_of_ranks_are_refused(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"line 1: 'target': tp 2 x dp 1 x pp 2 = 4, but the target has 6 ranks"):
        load("target: {tp: 2, pp: 2}\nbench: {}\n").of(range(6), [0])
    with pytest.raises(ConfigError, match=r"'target': 1 entries under 'stages', but pp is 2"):
        load("target: {pp: 2, stages: [{a: b.0}]}\nbench: {}\n").of(range(2), [0])
    with pytest.raises(ConfigError, match="cannot be read"):
        spec.load(Path("/nowhere/layout.yaml"))
