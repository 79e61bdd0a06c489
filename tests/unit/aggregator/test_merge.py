"""Ranks joined by item name: order, gaps, the N/A rule, the configuration."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import python_calamine

from aggregator import merge, merge_config, results
from aggregator.columns import Mode
from aggregator.merge import RankTable
from aggregator.merge_config import MergeConfig
from aggregator.report.table import Format, workbook_name, write_merged
from msprobe_launch.errors import ConfigError, NothingUsable

Row = Callable[..., dict[str, str]]
Write = Callable[..., Path]
Ranks = Callable[..., list[RankTable]]


@pytest.fixture
def ranks(tmp_path: Path, result_csv: Write) -> Ranks:
    """Partitions of ranks 0, 1, ... out of their rows."""

    def make(*rows_by_rank: Sequence[dict[str, str]]) -> list[RankTable]:
        out = []
        for rank, rows in enumerate(rows_by_rank):
            read = results.read(result_csv(tmp_path / f"{rank}.csv", rows))
            pq.write_table(results.partition_table(read), tmp_path / f"{rank}.parquet", row_group_size=5)
            out.append(RankTable(rank, tmp_path / f"{rank}.parquet"))
        return out

    return make


def _names(count: int) -> list[str]:
    return [f"Torch.add.{i}.forward.output.0" for i in range(count)]


def _cells(folder: Path, metric: str) -> dict[str, list[str]]:
    with (folder / "merged" / f"{metric}.csv").open(encoding="utf-8", newline="") as stream:
        _, *rows = csv.reader(stream)
    return {row[0]: row[1:] for row in rows}


def test_call_order_is_kept_and_gaps_stay_empty(tmp_path: Path, make_row: Row, ranks: Ranks) -> None:
    names = _names(12)  # as text, add.10 would come before add.2
    without = [make_row(name) for name in names if ".5." not in name and ".11." not in name]
    plan = merge.plan(Mode.STATISTICS, ranks(without, [make_row(name, 2.0) for name in names]))
    assert plan.names.to_pylist() == names
    write_merged(plan, ["Max diff"], tmp_path / "out", "1", frozenset(Format))
    cells = _cells(tmp_path / "out", "Max_diff")
    assert cells[names[5]] == ["", "1"]
    assert cells[names[4]] == ["0", "1"]
    table = pq.read_table(tmp_path / "out/merged/Max_diff.parquet")
    assert table["rank0"].to_pylist()[5] is None
    assert table["rank0:text"].to_pylist()[5] is None


def test_an_item_of_one_rank_stands_behind_the_item_it_follows(make_row: Row, ranks: Ranks) -> None:
    first = ["Torch.a.0.forward.output.0", "Torch.b.0.forward.output.0", "Torch.c.0.forward.output.0"]
    second = [
        "Torch.x.0.forward.output.0",
        first[0],
        "Torch.y.0.forward.output.0",
        "Torch.z.0.forward.output.0",
        first[1],
    ]
    plan = merge.plan(Mode.STATISTICS, ranks([make_row(n) for n in first], [make_row(n) for n in second]))
    assert [name.split(".")[1] for name in plan.names.to_pylist()] == ["x", "a", "y", "z", "b", "c"]


def test_na_rule(tmp_path: Path, make_row: Row, ranks: Ranks) -> None:
    name = "Distributed.all_reduce.0.forward.input.group"
    group = {"NPU max": "[0, 1]", "Bench max": "[0, 1]"}
    lone = {"NPU max": "1e-07"}
    plan = merge.plan(
        Mode.STATISTICS,
        ranks(
            [make_row(name, **dict.fromkeys(Mode.STATISTICS.metrics, "N/A"), **group)],
            [make_row(name, bench=None) | lone],
            [make_row(name, **dict.fromkeys(Mode.STATISTICS.metrics, "Nan")) | {"NPU max": "Nan", "Bench max": "7.0"}],
            [
                make_row(name, **dict.fromkeys(Mode.STATISTICS.metrics, "unsupported"))
                | {"NPU max": "", "Bench max": ""}
            ],
            [make_row(name, **{"Max diff": " inf"})],
        ),
    )
    write_merged(plan, ["Max diff"], tmp_path / "out", "1", frozenset(Format))
    assert _cells(tmp_path / "out", "Max_diff")[name] == [
        "NPU:[0, 1]  Bench:[0, 1]",
        "NPU:1e-07  Bench:N/A",
        "NPU:Nan  Bench:7",
        "NPU:N/A  Bench:N/A",
        "inf",
    ]
    table = pq.read_table(tmp_path / "out/merged/Max_diff.parquet")
    assert str(table.schema.field("rank0").type) == "double"
    assert table["rank0:text"].to_pylist() == ["NPU:[0, 1]  Bench:[0, 1]"]
    assert table["rank0"].null_count == 1


def test_order_of_the_ranks_given_does_not_matter(make_row: Row, ranks: Ranks) -> None:
    names = _names(30)
    dice = random.Random(3)
    tables = ranks(*([make_row(n) for n in names if dice.random() < 0.7] for _ in range(11)))
    expected = merge.plan(Mode.STATISTICS, tables)
    for _ in range(5):
        dice.shuffle(tables)
        plan = merge.plan(Mode.STATISTICS, tables)
        assert plan.names.equals(expected.names)
        assert [rank.label for rank in plan.ranks] == [f"rank{i}" for i in range(11)]


def test_blocks_of_any_height_hold_the_same_cells(make_row: Row, ranks: Ranks) -> None:
    names = _names(23)
    tables = ranks([make_row(n) for n in names if ".7." not in n], [make_row(n, bench=None) for n in names])
    plan = merge.plan(Mode.STATISTICS, tables)

    def cells(height: int) -> list[list[str | None]]:
        out: list[list[str | None]] = [[], []]
        for block in merge.blocks(plan, "Max diff", rows_per_block=height):
            assert len(block.names) <= height
            for column, into in zip(block.columns, out, strict=True):
                into += column.shown(percentage=False).to_pylist()
        return out

    assert cells(1) == cells(7) == cells(1000)


def test_a_repeated_name_keeps_its_first_row_with_a_note(make_row: Row, ranks: Ranks) -> None:
    rows = [make_row("Torch.a.0.forward.output.0", 3.0), make_row("Torch.a.0.forward.output.0", 4.0)]
    plan = merge.plan(Mode.STATISTICS, ranks(rows))
    assert plan.height == 1
    assert plan.notes == ("rank0: 1 rows repeat an item's name; the first one is kept",)


def test_workbook_has_msprobes_sheets(tmp_path: Path, make_row: Row, ranks: Ranks) -> None:
    plan = merge.plan(Mode.STATISTICS, ranks([make_row("Torch.a.0.forward.output.0", 2.0)]))
    write_merged(plan, merge_config.default_metrics(Mode.STATISTICS), tmp_path, "1", frozenset({Format.XLSX}))
    book = python_calamine.CalamineWorkbook.from_path(str(tmp_path / workbook_name("1")))
    assert book.sheet_names == [*Mode.STATISTICS.metrics, "Requires_grad Consistent"]
    name = "Torch.a.0.forward.output.0"
    assert book.get_sheet_by_name("Max diff").to_python() == [["NPU Name", "rank0"], [name, 1.0]]
    assert book.get_sheet_by_name("MaxRelativeErr").to_python()[1] == [name, "100%"]
    assert book.get_sheet_by_name("Requires_grad Consistent").to_python()[1] == [name, True]


# -- configuration


def _config(tmp_path: Path, text: str) -> MergeConfig:
    path = tmp_path / "merge.yaml"
    path.write_text(text)
    return merge_config.load(path)


def test_api_chooses_items_by_whole_parts(tmp_path: Path, make_row: Row, ranks: Ranks) -> None:
    rows = [make_row(f"Functional.{api}.0.forward.output.0") for api in ("linear", "linear_fast", "relu")]
    config = _config(tmp_path, "api:\n- Functional.linear\n- Functional.lineer\n")
    plan = merge.plan(Mode.STATISTICS, ranks(rows), config)
    assert plan.names.to_pylist() == ["Functional.linear.0.forward.output.0"]
    assert "Did you mean 'Functional.linear'?" in plan.notes[0]


def test_an_api_that_leaves_nothing_is_an_error(tmp_path: Path, make_row: Row, ranks: Ranks) -> None:
    config = _config(tmp_path, "api: [Torch.bdd]")
    with pytest.raises(NothingUsable, match=r"Torch\.bdd.*Did you mean 'Torch\.add'"):
        merge.plan(Mode.STATISTICS, ranks([make_row("Torch.add.0.forward.output.0")]), config)


def test_compare_index_keeps_its_order(tmp_path: Path) -> None:
    config = _config(tmp_path, "compare_index: [NormRelativeErr, Max diff]")
    assert merge_config.chosen(config, Mode.STATISTICS) == ("NormRelativeErr", "Max diff")
    with pytest.raises(ConfigError, match="no metric of tensor mode"):
        merge_config.chosen(config, Mode.TENSOR)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("api: [Torch]\ncompare_idx: [Max diff]", "unknown key 'compare_idx'.*Did you mean 'compare_index'"),
        ("compare_index: [Max dif]", "unknown metric 'Max dif'.*Did you mean 'Max diff'"),
        ("api: Torch", "'api' .* must be a list of texts"),
        ("- Torch", "holds list"),
        ("api: [", "is not YAML"),
    ],
)
def test_a_wrong_configuration_names_what_is_meant(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _config(tmp_path, text)


def test_an_empty_configuration_means_everything(tmp_path: Path) -> None:
    assert _config(tmp_path, "") == MergeConfig()
