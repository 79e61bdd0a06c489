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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from aggregator import inputs
from aggregator.items import ROLES, STATISTICS, Columns, HugeInteger
from msprobe_launch.errors import UnreadableInput
from msprobe_launch.records import journal
from msprobe_launch.records.layout import RankFolder, run_directory_of

__all__ = ["ROLES", "STATISTICS", "RankDump", "read"]

TASKS = ("statistics", "tensor", "structure")

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
        data_name       string       name of the file with the tensor's values (task tensor), or null
        placement       string, dictionary-encoded; of a DTensor the JSON of [device mesh, placements, global shape]

    `ops`: name (string), parent (string, null where unknown), stack (int32 into `stacks`, -1 for none), recompute
    (bool: a call that activation checkpointing ran again).
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
    head, table = _gathered(path, raw)
    del raw
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


def one_recorder(dump: RankDump, other: RankDump) -> bool:
    """False where only one of two dumps lies in a run directory of ours: msprobe wrote the other one, most likely."""
    ours = [run_directory_of(side.path.parent) is not None for side in (dump, other)]
    return ours[0] == ours[1]


def names_only(dump: RankDump) -> RankDump:
    """The dump as one of task structure: its ops with their names for items. One of that task as it is."""
    if dump.task == "structure":
        return dump
    names = Columns()
    for op in dump.ops["name"].to_pylist():
        names.add_name(op)
    return replace(dump, items=names.items(), has_checksums=False)


# -- bytes -> records


def _gathered(path: Path, raw: bytes) -> tuple[dict[str, str], Columns]:
    try:
        return _head_and_columns(path, raw)
    except RecursionError as error:
        raise UnreadableInput(f"{path.name} is nested deeper than any dump") from error


def _head_and_columns(path: Path, raw: bytes) -> tuple[dict[str, str], Columns]:
    try:
        head, records = _records(path, raw)
        return head, _columns(head, records)
    except (HugeInteger, msgspec.MsgspecError):
        head, records = _records_slowly(path, raw)
        return head, _columns(head, records)


def _columns(head: Mapping[str, str], records: Iterable[tuple[str, Any]]) -> Columns:
    gathered = Columns()
    add = gathered.add_or_name if head["task"] == "structure" else gathered.add
    for op, record in records:
        add(op, record)
    return gathered


def _bytes_of(path: Path) -> bytes:
    try:
        raw = inputs.json_bytes(path)
    except FileNotFoundError:
        raise UnreadableInput(f"{path.name} is missing") from None
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
    for op, piece in data.items():
        if restore and b"\\u0000" in bytes(piece):
            yield op, _restored(decode(piece))
        else:
            yield op, decode(piece)


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
    except ValueError as error:
        raise UnreadableInput(f"{path.name} holds a number that is no number of a dump: {error}") from error
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
            tuple(tuple(json.loads(frames)) for frames in context.frames.values()),
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
        found = json.loads(inputs.json_bytes(path))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except UnreadableInput as error:
        notes.append(f"{error}; it was left out")
        return {}
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read and was left out: {error}")
        return {}
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} holds a {type(found).__name__}, not an object, and was left out")
    return {}
