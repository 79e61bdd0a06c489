"""One rank's dump (ours or msprobe's, or the journal a crash left) -> columns of its items, in call order.

Row names and row order are those of msprobe's compare: inputs, keyword inputs, parameters, outputs; nested lists by
index, nested dictionaries by key; parameter gradients as `<op>.<parameter>`.

Speed: msgspec cuts the file into one undecoded slice per record, which are then decoded one at a time, so that no tree
of the whole file ever exists. msgspec refuses bare NaN and Infinity, so they are first turned into marked strings;
where that spoils the text (a recorded string that contains `: NaN`), the standard library reads the file instead.
70,000 items (18 MB) take 0.5 s and 90 MB on one core; json.loads alone takes 0.45 s and 190 MB.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from msprobe_launch.errors import UnreadableInput
from msprobe_launch.records import journal
from msprobe_launch.records.layout import RankFolder
from msprobe_launch.records.names import Role

TASKS = ("statistics", "tensor", "structure")

STATISTICS = ("Max", "Min", "Mean", "Norm")

ROLES = (Role.INPUT, Role.PARAMETERS, Role.OUTPUT, Role.PARAMETERS_GRAD, Role.DEBUG)
"""Meaning of the `role` column's numbers."""

NOT_APPLICABLE = "N/A"

# The keywords by which collectives name a rank. msprobe shows their values under the bare type name (`int`, not
# `<class 'int'>`), and its rule for scalars therefore never looks at them.
RANK_KEYWORDS = frozenset({"src", "dst", "group_src", "group_dst"})

_EXACT_INTEGER = 1 << 53  # larger integers are not all float64 numbers; their digits are kept as text

_NO_CHECKSUM = "00000000"

_NUL = "\0"
_NON_FINITE = {f"{_NUL}NaN": float("nan"), f"{_NUL}Infinity": float("inf"), f"{_NUL}-Infinity": float("-inf")}


@dataclass(frozen=True, slots=True)
class RankDump:
    """One rank's records of one step.

    `items`, one row per value in call order:

        name            string       as in msprobe's compare result
        op              int32        row of `ops`
        role            uint8        place in ROLES
        dtype, shape, grad   string, dictionary-encoded; `N/A` where the value has none
        max min mean norm    float64, null where not recorded or not a number; NaN and infinities are numbers here
        max:text ...    string, dictionary-encoded; what the cell shows where it is no number (`None`, `True`,
                        `[0, 1]`), and the digits of integers beyond 2^53; null otherwise
        integers        uint8        bit i: statistic i is an integer (a cell `3`, not `3.0`)
        md5             string       the recorded checksum, or the CRC-32 of a plain value's text as msprobe makes it
        value           string, dictionary-encoded; what a value holds beyond its cells (slice bounds, a peer), or null

    `ops`: name (string), parent (string, null where unknown), stack (int32 into `stacks`, -1 for none).
    `dropped` is the number of bytes after the last whole record of an unfinished journal.
    """

    path: Path
    task: str
    level: str
    framework: str
    items: pa.Table
    ops: pa.Table
    stacks: tuple[tuple[str, ...], ...] = ()
    has_checksums: bool = False
    partial: bool = False
    dropped: int = 0
    notes: tuple[str, ...] = field(default=())


def read(folder: RankFolder) -> RankDump:
    """Read a rank's folder: dump.json, else the journal of an unfinished step.

    Raises UnreadableInput with the reason in words and numbers.
    """
    notes: list[str] = []
    partial, dropped = False, 0
    if folder.dump.exists() or not folder.journal.exists():
        path = folder.dump
        raw = _bytes_of(path)
    else:
        path = folder.journal
        raw, dropped = _whole_records(path)
        partial = True
        notes.append(f"{path.name}: the step was never finished; {dropped} bytes after its last whole record left out")
    head, records = _records(path, raw)
    del raw
    table = _Columns()
    for op, record in records:
        table.add(op, record)
    parents, stacks, sharing = _context(folder, partial, notes)
    if head["task"] == "structure":
        for op in dict.fromkeys([*parents, *sharing]):
            if op not in table.seen:
                table.add_name(op)
    if table.unknown:
        notes.append(f"{path.name}: {table.unknown} records are no objects and were left out")
    return RankDump(
        path=path,
        task=head["task"],
        level=head["level"],
        framework=head["framework"],
        items=table.items(),
        ops=table.op_table(parents, sharing),
        stacks=stacks,
        has_checksums=table.has_checksums,
        partial=partial,
        dropped=dropped,
        notes=tuple(notes),
    )


# -- bytes -> records


def _bytes_of(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UnreadableInput(f"{path.name} is missing") from None
    except OSError as error:
        raise UnreadableInput(f"{path.name} cannot be read: {error.strerror or error}") from error
    if not raw.strip():
        raise UnreadableInput(f"{path.name} is empty ({len(raw)} bytes)")
    return raw


def _whole_records(path: Path) -> tuple[bytes, int]:
    """Bytes of a valid dump.json made of a journal's whole records, and how many bytes were dropped."""
    raw = _bytes_of(path)
    # A crash can cut a character in two; what follows the last whole line is dropped anyway.
    text = raw[: raw.rfind(b"\n") + 1]
    try:
        whole, cut = journal.complete_text(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnreadableInput(f"{path.name} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise UnreadableInput(f"{path.name} holds no whole record: {error} ({len(raw)} bytes)") from error
    return whole.encode("utf-8"), len(raw) - len(text) + cut


def _records(path: Path, raw: bytes) -> tuple[dict[str, str], Iterator[tuple[str, Any]]]:
    """The head of a dump and its records, decoded one by one as the iterator moves."""

    marked = raw
    if b"NaN" in raw or b"Infinity" in raw:
        for word in (b"NaN", b"Infinity", b"-Infinity"):
            marked = marked.replace(b": " + word, b': "\\u0000' + word + b'"')
    try:
        outer = msgspec.json.decode(marked, type=dict[str, msgspec.Raw])
        # Also checks every record's syntax, so that decoding them later cannot fail.
        data = msgspec.json.decode(outer["data"], type=dict[str, msgspec.Raw])
        head: dict[str, Any] = {
            key: msgspec.json.decode(outer[key]) for key in ("task", "level", "framework") if key in outer
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return _records_slowly(path, raw)
    return _head(path, head), _decoded(data, restore=marked is not raw)


def _decoded(data: Mapping[str, Any], *, restore: bool) -> Iterator[tuple[str, Any]]:

    decode = msgspec.json.Decoder().decode
    for op, slice_ in data.items():
        # msgspec turns integers beyond 64 bits into floats; their length gives such a record away cheaply enough,
        # since only plain `int` values can hold them.
        text = bytes(slice_)
        record = json.loads(text) if _may_hold_huge_integer(text) else decode(text)
        yield op, (_restored(record) if restore and b"\\u0000" in text else record)


def _may_hold_huge_integer(text: bytes) -> bool:
    start = text.find(b'"type": "int"')
    while start >= 0:
        end = text.find(b"}", start)
        if end - start > 40:
            return True
        start = text.find(b'"type": "int"', end)
    return False


def _restored(value: Any) -> Any:
    """The value with the marks of `_records` turned back into NaN and infinities."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_restored(part) for part in value]
    return value


def _records_slowly(path: Path, raw: bytes) -> tuple[dict[str, str], Iterator[tuple[str, Any]]]:
    """As `_records`, by the standard library, which reads every NaN and can say where a file breaks off."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableInput(f"{path.name} is UTF-16 text, not UTF-8; to use it: iconv -f UTF-16 -t UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableInput(f"{path.name} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableInput(_broken(path, text, len(raw), error)) from error
    except RecursionError as error:
        raise UnreadableInput(f"{path.name} is nested deeper than any dump") from error
    if not isinstance(whole, dict):
        raise UnreadableInput(f"{path.name} holds a {type(whole).__name__}, not an object with 'task' and 'data'")
    head = _head(path, whole)
    data = whole.get("data")
    if not isinstance(data, dict):
        found = "no 'data'" if data is None else f"'data' that is a {type(data).__name__}"
        raise UnreadableInput(f"{path.name} has {found}; it is no dump (keys: {', '.join(list(whole)[:5])})")
    return head, iter(data.items())


def _broken(path: Path, text: str, size: int, error: json.JSONDecodeError) -> str:
    where = f"line {error.lineno}, column {error.colno}"
    rest = text[error.pos :].strip()
    # An unterminated string is reported where it begins, so look at the end of the text as well.
    if not rest or (error.msg.startswith("Unterminated string") and text.count("\n", error.pos) == 0):
        return f"{path.name} is cut: it ends after {size} bytes at {where}, before its brackets are closed"
    if error.pos == 0:
        return f"{path.name} is not JSON: it begins with {text[:20]!r}"
    return f"{path.name} is not valid JSON: {error.msg} at {where} (byte {len(text[: error.pos].encode())} of {size})"


def _head(path: Path, whole: Mapping[str, Any]) -> dict[str, str]:
    task = whole.get("task")
    if task not in TASKS:
        found = f"the task {task!r}" if "task" in whole else "no 'task'"
        raise UnreadableInput(f"{path.name} has {found}; a dump's task is one of {', '.join(TASKS)}")
    level, framework = whole.get("level"), whole.get("framework")
    return {
        "task": task,
        "level": level if isinstance(level, str) else "",
        "framework": framework if isinstance(framework, str) else "",
    }


# -- stack.json, construct.json


def _context(
    folder: RankFolder, partial: bool, notes: list[str]
) -> tuple[dict[str, str | None], tuple[tuple[str, ...], ...], dict[str, int]]:
    """(op -> parent, the distinct stacks, op -> stack). Missing or bad files cost a note, never the dump."""
    if partial and folder.context_journal.exists():
        try:
            context = journal.read_context(folder.context_journal)
        except OSError as error:
            notes.append(f"{folder.context_journal.name} cannot be read: {error.strerror}")
            return {}, (), {}
        place = {stack: i for i, stack in enumerate(context.frames)}
        return (
            {op: parent for op, (parent, _) in context.ops.items()},
            tuple(tuple(frames) for frames in context.frames.values()),
            {op: place[stack] for op, (_, stack) in context.ops.items() if stack in place},
        )
    stacks: list[tuple[str, ...]] = []
    sharing: dict[str, int] = {}
    for entry in _side_file(folder.stack, notes).values():
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and isinstance(entry[1], list):
            stacks.append(tuple(map(str, entry[1])))
            sharing.update(dict.fromkeys(map(str, entry[0]), len(stacks) - 1))
    parents = {
        op: parent if isinstance(parent, str) else None for op, parent in _side_file(folder.construct, notes).items()
    }
    return parents, tuple(stacks), sharing


def _side_file(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read and was left out: {error}")
        return {}
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} holds a {type(found).__name__}, not an object, and was left out")
    return {}


# -- records -> columns


class _Texts:
    """A column in which few rows have a text."""

    __slots__ = ("rows", "texts")

    def __init__(self) -> None:
        self.rows = array("i")
        self.texts: list[str] = []

    def add(self, row: int, text: str) -> None:
        self.rows.append(row)
        self.texts.append(text)

    def column(self, height: int) -> pa.Array:

        found = pa.array(self.texts, pa.string()).dictionary_encode()
        codes = np.full(height, -1, np.int32)
        if self.rows:
            codes[np.frombuffer(self.rows, dtype=np.int32)] = found.indices.to_numpy(zero_copy_only=False)
        return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), found.dictionary)


def plain_number(value: object) -> bool:
    """True for int and float, not for bool, which is an int to Python."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Columns:
    """Gathers items row by row. Python objects that stay: names, and distinct texts."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ops: list[str] = []
        self.seen: set[str] = set()
        self.op = array("i")
        self.role = array("B")
        # dtype, shape and grad of a row are one number: few combinations exist, and one look-up is cheaper than three.
        self.kind = array("i")
        self.kinds: dict[tuple[str, tuple[Any, ...] | str, str], int] = {}
        self.numbers = tuple(array("d") for _ in STATISTICS)
        self.texts = tuple(_Texts() for _ in STATISTICS)
        self.integers = array("B")
        self.md5 = _Texts()
        self.value = _Texts()
        self.has_checksums = False
        self.unknown = 0

    # -- one record

    def add(self, op: str, record: Any) -> None:
        """Add one record's items. The order of the parts is fixed, whatever their order in the file."""
        if op in self.seen:
            return  # JSON allows a key twice, and the parsers keep the last; nothing to add here
        self.seen.add(op)
        self.ops.append(op)
        if not isinstance(record, dict):
            if record is not None and not isinstance(record, list):
                self.unknown += 1
                return
            self._walk(op, record, 4, "")
            return
        known = False
        if "input_args" in record:
            known = True
            self._walk(f"{op}.input", record["input_args"], 0, "")
        elif "input" in record:
            known = True
            self._walk(f"{op}.input", record["input"], 0, "")
        keywords = record.get("input_kwargs")
        if isinstance(keywords, dict):
            known = True
            for keyword, value in keywords.items():
                self._walk(f"{op}.input.{keyword}", value, 0, keyword)
        parameters = record.get("parameters")
        if isinstance(parameters, dict):
            for name, value in parameters.items():
                self._walk(f"{op}.parameters.{name}", value, 1, "")
        if "output" in record:
            known = True
            self._walk(f"{op}.output", record["output"], 2, "")
        if known:
            return
        if ".parameters_grad" in op:
            for name, value in record.items():
                single = isinstance(value, list) and len(value) == 1
                self._walk(f"{op}.{name}", value[0] if single else value, 3, "")
        else:
            self._walk(op, record, 4, "")

    def add_name(self, op: str) -> None:
        """Add an op of which only the name is known (task structure)."""
        self.seen.add(op)
        self.ops.append(op)
        self._row(op, 4, NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE)
        self._same(None)

    def _walk(self, name: str, value: Any, role: int, keyword: str) -> None:
        if isinstance(value, dict):
            if "Max" in value and "dtype" in value:
                self._tensor(name, value, role)
            elif isinstance(value.get("type"), str):
                self._plain(name, value, role, keyword)
            elif isinstance(value.get("class_type"), str):
                self._peer_op(name, value, role)
            else:
                for key, part in value.items():
                    self._walk(f"{name}.{key}", part, role, "")
        elif isinstance(value, list):
            for i, part in enumerate(value):
                self._walk(f"{name}.{i}", part, role, "")
        elif value is None:
            self._row(name, role, NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE)
            self._same(None)
        # A bare number or text is no item (objects without a type hold some); msprobe lists none either.

    # -- one item

    def _row(self, name: str, role: int, dtype: str, shape: tuple[Any, ...] | str, grad: str) -> None:
        self.names.append(name)
        self.op.append(len(self.ops) - 1)
        self.role.append(role)
        self.kind.append(self.kinds.setdefault((dtype, shape, grad), len(self.kinds)))

    def _tensor(self, name: str, item: dict[str, Any], role: int) -> None:
        grad = item.get("requires_grad")
        shape = item.get("shape")
        self._row(
            name,
            role,
            str(item["dtype"]),
            tuple(shape) if isinstance(shape, list) else str(shape),
            "True" if grad is True else "False" if grad is False else NOT_APPLICABLE,
        )
        integers = 0
        for i, statistic in enumerate(STATISTICS):
            number = item.get(statistic)
            if number.__class__ is float:
                self.numbers[i].append(number)
            else:
                integers |= self._odd(i, number)
        self.integers.append(integers)
        if "md5" in item:
            self.has_checksums = True
            self.md5.add(len(self.names) - 1, item["md5"] if isinstance(item["md5"], str) else _NO_CHECKSUM)

    def _plain(self, name: str, item: dict[str, Any], role: int, keyword: str) -> None:
        kind = item["type"]
        value = item.get("value")
        shape: tuple[Any, ...] | str = ()
        shown: Any = value
        if kind == "slice" and isinstance(value, list):
            dtype, shape, shown = kind, f"({len(value)},)", None
            self.value.add(len(self.names), json.dumps(value))
        elif kind == "torch.Size" and isinstance(value, list):
            dtype, shape, shown = kind, tuple(value), None
        elif kind == "torch.ProcessGroup":
            dtype, shown = kind, item.get("group_ranks")
        elif kind == "ellipsis" or keyword in RANK_KEYWORDS:
            dtype = kind
        else:
            dtype = str(type(value))
            beyond = {key: part for key, part in item.items() if key not in ("type", "value")}
            if beyond or isinstance(value, (list, dict)):
                self.value.add(len(self.names), json.dumps({**beyond, "value": value}, sort_keys=True))
        self._row(name, role, dtype, shape, NOT_APPLICABLE)
        row = len(self.names) - 1
        if keyword in RANK_KEYWORDS and kind not in ("slice", "torch.Size", "ellipsis"):
            self.md5.add(row, str(value))
        elif kind == "torch.ProcessGroup":
            self.md5.add(row, str(shown))
        else:
            self.md5.add(row, f"{zlib.crc32(str(value).encode()):08x}" if "value" in item else _NO_CHECKSUM)
        self._same(shown)

    def _peer_op(self, name: str, item: dict[str, Any], role: int) -> None:
        """A P2POp: msprobe shows its tensor in its place and nothing else of it."""
        beyond = {key: part for key, part in item.items() if key not in ("class_type", "tensor", "group_id")}
        self.value.add(len(self.names), json.dumps(beyond, sort_keys=True))
        tensor = item.get("tensor")
        if isinstance(tensor, dict) and "Max" in tensor:
            self._tensor(name, tensor, role)
        else:
            self._row(name, role, NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE)
            self._same(None)

    def _same(self, value: Any) -> None:
        """Fill all four statistics with one value, as msprobe does for what is no tensor."""
        integers = 0
        for i in range(len(STATISTICS)):
            if value.__class__ is float:
                self.numbers[i].append(value)
            else:
                integers |= self._odd(i, value)
        self.integers.append(integers)

    def _odd(self, i: int, value: Any) -> int:
        """Add a statistic that is no float; returns the bit for `integers`."""
        if plain_number(value):
            self.numbers[i].append(float(value) if abs(value) < 1 << 1023 else float("inf"))
            if abs(value) > _EXACT_INTEGER:
                self.texts[i].add(len(self.names) - 1, str(value))
            return 1 << i
        self.numbers[i].append(float("nan"))
        text = str(value)
        self.texts[i].add(len(self.names) - 1, "Nan" if text in ("nan", "NaN") else text)
        return 0

    # -- columns

    def items(self) -> pa.Table:

        height = len(self.names)

        def numeric(values: array[Any], dtype: Any) -> Any:
            return np.frombuffer(values, dtype=dtype) if height else np.empty(0, dtype)

        kinds = numeric(self.kind, np.int32)
        shapes = [shape if isinstance(shape, str) else str(list(shape)) for _, shape, _ in self.kinds]

        def by_kind(texts: list[str]) -> pa.Array:
            found = pa.array(texts, pa.string()).dictionary_encode()
            codes = found.indices.to_numpy(zero_copy_only=False)
            return pa.DictionaryArray.from_arrays(pa.array(codes[kinds]), found.dictionary)

        columns: dict[str, pa.Array] = {
            "name": pa.array(self.names, pa.string()),
            "op": pa.array(numeric(self.op, np.int32)),
            "role": pa.array(numeric(self.role, np.uint8)),
            "dtype": by_kind([dtype for dtype, _, _ in self.kinds]),
            "shape": by_kind(shapes),
            "grad": by_kind([grad for _, _, grad in self.kinds]),
        }
        integers = numeric(self.integers, np.uint8)
        for i, statistic in enumerate(STATISTICS):
            texts = self.texts[i].column(height)
            wordy = texts.is_valid().to_numpy(zero_copy_only=False) & ((integers >> i) & 1 == 0)
            columns[statistic.lower()] = pa.array(numeric(self.numbers[i], np.float64), mask=wordy)
            columns[f"{statistic.lower()}:text"] = texts
        columns["integers"] = pa.array(integers)
        columns["md5"] = self.md5.column(height).cast(pa.string())
        columns["value"] = self.value.column(height)
        return pa.table(columns)

    def op_table(self, parents: dict[str, str | None], sharing: dict[str, int]) -> pa.Table:

        return pa.table(
            {
                "name": pa.array(self.ops, pa.string()),
                "parent": pa.array([parents.get(op) for op in self.ops], pa.string()),
                "stack": pa.array([sharing.get(op, -1) for op in self.ops], pa.int32()),
            }
        )
