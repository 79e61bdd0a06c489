"""Reading one rank's folder: every kind of value, names and order of rows, journals, and files that are not whole."""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path

import pytest

from aggregator import read
from msprobe_launch.errors import UnreadableInput
from msprobe_launch.records import journal
from msprobe_launch.records.layout import RankFolder

HEAD = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}


def read_ops(folder, ops, make_folder):
    return read.read(make_folder(folder, ops))


def column(dump, name):
    return dump.items[name].to_pylist()


def test_rows_are_named_and_ordered_as_msprobe_does(tmp_path, make_folder, make_value, make_call):
    record = make_call(
        make_value(1.0),
        [{"type": "int", "value": 1}, {"a": make_value(2.0), "b": {"c": None}}],
        out=[make_value(3.0), None],
        keywords={"alpha": {"type": "float", "value": 0.5}},
        parameters={"weight": make_value(4.0)},
    )
    record = dict(reversed(record.items()))  # the order in the file does not matter
    ops = {
        "Module.fc.Linear.forward.0": record,
        "Module.fc.Linear.parameters_grad.0": {"weight": [make_value(5.0)], "bias": [None]},
        "Module.fc.Linear.backward.0": {"input": [make_value(6.0)], "output": [None]},
    }
    dump = read_ops(tmp_path, ops, make_folder)
    op = "Module.fc.Linear.forward.0"
    assert column(dump, "name") == [
        f"{op}.input.0",
        f"{op}.input.1.0",
        f"{op}.input.1.1.a",
        f"{op}.input.1.1.b.c",
        f"{op}.input.alpha",
        f"{op}.parameters.weight",
        f"{op}.output.0",
        f"{op}.output.1",
        "Module.fc.Linear.parameters_grad.0.weight",
        "Module.fc.Linear.parameters_grad.0.bias",
        "Module.fc.Linear.backward.0.input.0",
        "Module.fc.Linear.backward.0.output.0",
    ]
    roles = [read.ROLES[role].value for role in column(dump, "role")]
    assert roles == ["input"] * 5 + ["parameters"] + ["output"] * 2 + ["parameters_grad"] * 2 + ["input", "output"]
    assert column(dump, "op") == [0] * 8 + [1] * 2 + [2] * 2
    assert dump.ops["name"].to_pylist() == list(ops)


@pytest.mark.parametrize(
    ("item", "dtype", "shape", "cell"),
    [
        ({"type": "int", "value": 3}, "<class 'int'>", "[]", 3.0),
        ({"type": "int32", "value": 4}, "<class 'int'>", "[]", 4.0),
        ({"type": "float", "value": 2.5}, "<class 'float'>", "[]", 2.5),
        ({"type": "bool", "value": True}, "<class 'bool'>", "[]", "True"),
        ({"type": "str", "value": "hello"}, "<class 'str'>", "[]", "hello"),
        (None, "N/A", "N/A", "None"),
        ({"type": "slice", "value": [1, 5, None]}, "slice", "(3,)", "None"),
        ({"type": "ellipsis", "value": "..."}, "ellipsis", "[]", "..."),
        ({"type": "torch.Size", "value": [2, 3]}, "torch.Size", "[2, 3]", "None"),
        ({"type": "torch.dtype", "value": "torch.float16"}, "<class 'str'>", "[]", "torch.float16"),
        ({"type": "torch.memory_format", "format": "channels_last"}, "<class 'NoneType'>", "[]", "None"),
        ({"type": "torch.distributed.ReduceOp", "value": "RedOpType.SUM"}, "<class 'str'>", "[]", "RedOpType.SUM"),
        ({"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "x"}, "torch.ProcessGroup", "[]", "[0, 1]"),
        ({"type": "mindspore.ProcessGroup", "group_ranks": [0, 1]}, "mindspore.ProcessGroup", "[]", "[0, 1]"),
        ({"type": "a.new.Kind", "value": "what"}, "<class 'str'>", "[]", "what"),
        ({"type": "complex", "value": [1.0, 2.0]}, "<class 'list'>", "[]", "[1.0, 2.0]"),
        ({"type": "a.new.Kind", "other": 1}, "<class 'NoneType'>", "[]", "None"),
        ({"type": "int", "value": 1 << 70}, "<class 'int'>", "[]", str(1 << 70)),
    ],
)
def test_every_kind_of_value(tmp_path, make_folder, make_call, item, dtype, shape, cell):
    dump = read_ops(tmp_path, {"Torch.f.0.forward": make_call(item)}, make_folder)
    assert column(dump, "dtype") == [dtype]
    assert column(dump, "shape") == [shape]
    for statistic in ("max", "min", "mean", "norm"):
        text, number = column(dump, f"{statistic}:text")[0], column(dump, statistic)[0]
        assert (text if isinstance(cell, str) else number) == cell


def test_statistics_of_tensors(tmp_path, make_folder, make_value, make_call):
    nan, inf = float("nan"), float("inf")
    items = [
        make_value(nan, -inf, inf, 1e-7, requires_grad=True),
        make_value(True, False, None, None, dtype="torch.bool"),
        make_value(7, -2, None, None, dtype="torch.int64"),
        {"type": "numpy.ndarray", "dtype": "float64", "shape": [2], "Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0},
    ]
    dump = read_ops(tmp_path, {"Torch.f.0.forward": make_call(*items)}, make_folder)
    assert str(column(dump, "max")) == "[nan, None, 7.0, 1.0]"
    assert column(dump, "min") == [-inf, None, -2.0, 0.0]
    assert column(dump, "max:text") == [None, "True", None, None]
    assert column(dump, "norm:text") == [None, "None", "None", None]
    assert column(dump, "integers") == [0, 0, 0b0011, 0]
    assert column(dump, "grad") == ["True", "False", "False", "N/A"]


def test_a_value_that_looks_like_our_mark_for_nan_is_read_right(tmp_path, make_folder, make_value, make_call):
    """`: NaN` inside a string breaks the fast way; the file is then read the slow way."""
    items = [{"type": "str", "value": "loss: NaN, really"}, make_value(float("nan")), make_value(1.0)]
    dump = read_ops(tmp_path, {"Torch.f.0.forward": make_call(*items)}, make_folder)
    assert column(dump, "max:text") == ["loss: NaN, really", None, None]
    assert str(column(dump, "max")) == "[None, nan, 1.0]"


def test_one_record_per_line_reads_as_indented(tmp_path, make_folder, make_value, make_call):
    ops = {f"Torch.f.{i}.forward": make_call(make_value(float(i))) for i in range(3)}
    indented = read_ops(tmp_path / "a", ops, make_folder)
    folder = make_folder(tmp_path / "b", ops)
    lines = ",\n".join(f"{json.dumps(op)}: {json.dumps(record)}" for op, record in ops.items())
    folder.dump.write_text(journal.header("statistics", "mix", "pytorch") + lines + journal.CLOSE)
    assert read.read(folder).items.equals(indented.items)


def test_checksums(tmp_path, make_folder, make_value, make_call):
    ops = {
        "Torch.f.0.forward": make_call(
            make_value(1.0, md5="00c0ffee"),
            make_value(1.0, md5=None),
            {"type": "int", "value": 3},
            None,
            keywords={"src": {"type": "int", "value": 3}},
        )
    }
    dump = read_ops(tmp_path, ops, make_folder)
    assert dump.has_checksums
    assert column(dump, "md5") == ["00c0ffee", "00000000", f"{zlib.crc32(b'3'):08x}", None, "3"]


def test_stack_and_parent(tmp_path, make_folder, make_value, make_call):
    parents = {"Torch.f.0.forward": "Module.fc.Linear.forward.0"}
    dump = read.read(make_folder(tmp_path, {"Torch.f.0.forward": make_call(make_value(1.0))}, construct=parents))
    assert dump.ops["parent"].to_pylist() == ["Module.fc.Linear.forward.0"]
    assert dump.stacks[dump.ops["stack"][0].as_py()][0].startswith("File /job/model.py")


@pytest.mark.parametrize("content", ["", "{", "[1]", None])
def test_side_files_may_be_bad_or_missing(tmp_path, make_folder, make_value, make_call, content):
    folder = make_folder(tmp_path, {"Torch.f.0.forward": make_call(make_value(1.0))})
    for path in (folder.stack, folder.construct):
        path.unlink()
        if content is not None:
            path.write_text(content)
    dump = read.read(folder)
    assert dump.ops["parent"].to_pylist() == [None]
    assert dump.ops["stack"].to_pylist() == [-1]
    assert len(dump.notes) == 2


def test_structure_dumps_have_their_names_in_the_side_files(tmp_path, make_folder):
    folder = make_folder(tmp_path, {}, task="structure", construct={"Module.fc.Linear.forward.0": None})
    assert column(read.read(folder), "name") == ["Module.fc.Linear.forward.0"]


def test_structure_dumps_of_ours_have_calls_without_items(tmp_path, make_folder, make_call):
    ops = ["Torch.a.0.forward", "Module.fc.Linear.forward.0"]
    folder = make_folder(tmp_path, dict.fromkeys(ops, make_call()), task="structure", construct=dict.fromkeys(ops))
    dump = read.read(folder)
    assert column(dump, "name") == ops
    assert dump.ops["name"].to_pylist() == ops
    assert not read.read(make_folder(tmp_path, dict.fromkeys(ops, make_call()))).items.num_rows


# -- journals


def write_journal(folder: Path, records: dict[str, object], torn: str = "") -> RankFolder:
    folder.mkdir(parents=True, exist_ok=True)
    text = journal.header("statistics", "mix", "pytorch")
    text += "".join(f"{json.dumps(op)}: {json.dumps(record)},\n" for op, record in records.items())
    found = RankFolder(folder, 0)
    found.journal.write_bytes(text.encode() + torn.encode())
    found.context_journal.write_text(
        '{"stack": 4, "frames": ["File a.py, line 1, in f, \\\\n x"]}\n'
        '{"op": "Torch.f.0.forward", "parent": "Module.m.M.forward.0", "stack": 4}\n{"op": "Torch.f.1'
    )
    return found


def test_a_journal_is_read_where_there_is_no_dump(tmp_path, make_value, make_call):
    torn = '"Torch.f.1.forward": {"input_args": [{"type": "é'
    folder = write_journal(tmp_path, {"Torch.f.0.forward": make_call(make_value(1.0))}, torn)
    dump = read.read(folder)
    assert dump.partial
    assert dump.dropped == len(torn.encode())
    assert column(dump, "name") == ["Torch.f.0.forward.input.0"]
    assert dump.ops["parent"].to_pylist() == ["Module.m.M.forward.0"]
    assert dump.stacks == (("File a.py, line 1, in f, \\n x",),)
    assert f"{len(torn.encode())} bytes" in dump.notes[0]


def test_a_journal_torn_inside_a_character(tmp_path, make_value, make_call):
    folder = write_journal(tmp_path, {"Torch.f.0.forward": make_call(make_value(1.0))}, '"é')
    folder.journal.write_bytes(folder.journal.read_bytes()[:-1])
    assert read.read(folder).items.num_rows == 1


def test_a_journal_without_a_whole_record_is_an_empty_partial_dump(tmp_path):
    dump = read.read(write_journal(tmp_path, {}, '"Torch.f.0.for'))
    assert dump.partial
    assert dump.items.num_rows == 0


def test_a_journal_cut_in_its_header(tmp_path):
    folder = write_journal(tmp_path, {})
    folder.journal.write_text('{"task": "stat')
    with pytest.raises(UnreadableInput, match=r"holds no whole record.*14 bytes"):
        read.read(folder)


def test_a_finished_dump_wins_over_a_journal(tmp_path, make_folder, make_value, make_call):
    write_journal(tmp_path, {"Torch.f.0.forward": make_call(make_value(1.0))})
    folder = make_folder(tmp_path, {"Torch.g.0.forward": make_call(make_value(1.0))})
    dump = read.read(folder)
    assert not dump.partial
    assert column(dump, "name") == ["Torch.g.0.forward.input.0"]


# -- files that are not whole


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"dump\.json is empty \(0 bytes\)"),
        (b" \n ", r"dump\.json is empty \(3 bytes\)"),
        (b'{"task": "statistics", "data": {"a": {"input_args": [', r"is cut: it ends after 53 bytes at line 1"),
        (b'{"task": "statistics", "data": {"a": {"inp', r"is cut: it ends after 42 bytes at line 1"),
        (b"<html>", r"is not JSON: it begins with '<html>'"),
        (b'{"task": "statistics",\n "data": {"a": nope}}', r"is not valid JSON: Expecting value at line 2, column 16"),
        ('{"task": "statistics", "data": {}}'.encode("utf-16"), r"is UTF-16 text.*iconv"),
        (b'{"task": "statistics", "data": {"\xff": 1}}', r"is not UTF-8 text: invalid start byte at byte 33"),
        (b"[1, 2]", r"holds a list, not an object"),
        (b'{"task": "statistics"}', r"has no 'data'"),
        (b'{"task": "statistics", "data": [1]}', r"'data' that is a list"),
        (b'{"task": "overflow_check", "data": {}}', r"has the task 'overflow_check'; a dump's task is one of"),
        (b'{"data": {}}', r"has no 'task'"),
        (b"[" * 100_000, r"is nested deeper|is cut"),
        (
            b'{"task": "statistics", "data": {"a": {"input_args": [' + b"[" * 5000 + b"]" * 5000 + b"]}}}",
            r"is nested deeper than any dump",
        ),
        (
            b'{"task": "statistics", "data": {"a": {"input_args": [{"type": "int", "value": ' + b"1" * 5000 + b"}]}}}",
            r"holds a number that is no number of a dump",
        ),
    ],
)
def test_bad_files_are_told_apart(tmp_path, content, says):
    (tmp_path / "dump.json").write_bytes(content)
    with pytest.raises(UnreadableInput, match=says):
        read.read(RankFolder(tmp_path, 0))


def test_a_folder_without_a_dump(tmp_path):
    with pytest.raises(UnreadableInput, match=r"dump\.json is missing"):
        read.read(RankFolder(tmp_path / "nowhere", 0))


def test_a_dump_that_cannot_be_read(tmp_path):
    (tmp_path / "dump.json").mkdir()
    with pytest.raises(UnreadableInput, match=r"dump\.json is no file but a folder"):
        read.read(RankFolder(tmp_path, 0))
    (tmp_path / "dump.json").rmdir()
    os.mkfifo(tmp_path / "dump.json")  # reading it would wait for ever
    with pytest.raises(UnreadableInput, match=r"dump\.json is no file but a pipe"):
        read.read(RankFolder(tmp_path, 0))


def test_what_no_table_can_hold_is_read_all_the_same(tmp_path, make_folder, make_call):
    huge, lone = {"type": "int", "value": 10**400}, {"type": "str", "value": "a\ud800b \\ud800 \U0001f600"}
    make_folder(tmp_path, {"Torch.a\udc00.0.forward": make_call(huge, lone)})
    items = read.read(RankFolder(tmp_path, 0)).items
    assert items["name"].to_pylist()[0] == "Torch.a\ufffd.0.forward.input.0"
    assert items["max"].to_pylist()[0] == math.inf
    assert items["max:text"].to_pylist()[0] == str(10**400)
    assert items["max:text"].to_pylist()[1] == "a\ufffdb \\ud800 \U0001f600"


def test_records_that_are_no_objects_cost_a_note(tmp_path, make_folder):
    dump = read_ops(tmp_path, {"Torch.f.0.forward": 3}, make_folder)
    assert dump.notes == ("dump.json: 1 records are no objects and were left out",)


def test_tensors_with_missing_parts_are_still_rows(tmp_path, make_folder, make_call):
    dump = read_ops(tmp_path, {"Torch.f.0.forward": make_call({"type": "torch.Tensor", "Max": 1.0})}, make_folder)
    assert column(dump, "max") == [1.0]
    assert column(dump, "norm:text") == ["None"]
