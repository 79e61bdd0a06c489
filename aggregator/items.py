"""Records of a dump -> columns of items. The aggregator's hot loop: it runs once per recorded value.

Bound locals, one tuple per tensor and one `extend` for its four statistics are what make it fast: 1.3 us an item, of
which building its name is a third (scripts/bench_aggregate).
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from msprobe_launch.records.names import Role

STATISTICS = ("Max", "Min", "Mean", "Norm")

ROLES = (Role.INPUT, Role.PARAMETERS, Role.OUTPUT, Role.PARAMETERS_GRAD, Role.DEBUG)
"""Meaning of the `role` column's numbers."""

_INPUT, _PARAMETERS, _OUTPUT, _PARAMETERS_GRAD, _DEBUG = range(len(ROLES))

NOT_APPLICABLE = "N/A"

# The keywords by which collectives name a rank. msprobe shows their values under the bare type name (`int`, not
# `<class 'int'>`), and its rule for scalars therefore never looks at them.
RANK_KEYWORDS = frozenset({"src", "dst", "group_src", "group_dst"})

_EXACT_INTEGER = 1 << 53  # larger integers are not all float64 numbers; their digits are kept as text

NO_CHECKSUM = "00000000"

_TENSOR = itemgetter("dtype", "shape", "Max", "Min", "Mean", "Norm")

_GRAD = {True: "True", False: "False"}


class HugeInteger(Exception):
    """A decoder that has no integers beyond 64 bits met one and made a float of it: decode with another one."""


class _Texts:
    """A column in which few rows have a text."""

    __slots__ = ("rows", "texts")

    def __init__(self) -> None:
        self.rows = array("i")
        self.texts: list[str] = []

    def add(self, row: int, text: str) -> None:
        self.rows.append(row)
        self.texts.append(text)

    def column(self, height: int, more: _Texts | None = None) -> pa.Array:
        """The column, together with `more` rows."""
        rows, texts = (self.rows, self.texts) if more is None else (self.rows + more.rows, self.texts + more.texts)
        found = pa.array(texts, pa.string()).dictionary_encode()
        codes = np.full(height, -1, np.int32)
        codes[_of(rows, np.int32)] = found.indices.to_numpy(zero_copy_only=False)
        return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), found.dictionary)


@dataclass(frozen=True, slots=True)
class _Plain:
    """What a value that is no tensor adds as a row."""

    kind: int
    number: float
    text: str | None
    is_integer: bool
    md5: str | None
    value: str | None


class Columns:
    """Gathers items record by record. Python objects that stay until the end: names, and texts of few rows."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.seen: set[str] = set()
        self.has_checksums = False
        self.unknown = 0
        self.recomputed: set[str] = set()
        self._names: list[str] = []
        # Rows of one part of a record come in a row: (op, role, number of rows).
        self._runs = array("i")
        # dtype, shape and grad of a row are one number: few combinations exist, and one look-up is cheaper than three.
        self._kind = array("i")
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._numbers = array("d")
        self._integers = array("i")
        self._texts = tuple(_Texts() for _ in STATISTICS)
        # Of values that show one text in all four statistics.
        self._text = _Texts()
        # Plain values that were met before: most calls repeat a few of them.
        self._known: dict[tuple[Any, ...], _Plain] = {}
        self._none = self._described(NOT_APPLICABLE, NOT_APPLICABLE, None)
        self._md5 = _Texts()
        self._data_name = _Texts()
        self._value = _Texts()
        self._placement = _Texts()

    # -- one record

    def add(self, op: str, record: Any) -> None:
        """Add one record's items. The order of the parts is fixed, whatever their order in the file."""
        self.seen.add(op)
        self.ops.append(op)
        if not isinstance(record, dict):
            if record is None or isinstance(record, list):
                self._part(_DEBUG, op, record)
            else:
                self.unknown += 1
            return
        if "is_recompute" in record and record["is_recompute"] is True:
            self.recomputed.add(op)
        known = False
        for key in ("input_args", "input"):
            if key in record:
                known = True
                self._part(_INPUT, f"{op}.input", record[key])
        keywords = record.get("input_kwargs")
        if isinstance(keywords, dict):
            known = True
            for keyword, value in keywords.items():
                self._part(_INPUT, f"{op}.input.{keyword}", value, keyword)
        parameters = record.get("parameters")
        if isinstance(parameters, dict):
            for name, value in parameters.items():
                self._part(_PARAMETERS, f"{op}.parameters.{name}", value)
        if "output" in record:
            known = True
            self._part(_OUTPUT, f"{op}.output", record["output"])
        if known:
            return
        if ".parameters_grad" in op:
            for name, value in record.items():
                single = isinstance(value, list) and len(value) == 1
                self._part(_PARAMETERS_GRAD, f"{op}.{name}", value[0] if single else value)
        else:
            self._part(_DEBUG, op, record)

    def add_name(self, op: str) -> None:
        """Add an op of which only the name is known (task structure)."""
        self.seen.add(op)
        self.ops.append(op)
        self._part(_DEBUG, op, None)

    def add_or_name(self, op: str, record: Any) -> None:
        """As `add`; an op without an item has its name for one (task structure)."""
        rows = len(self._names)
        self.add(op, record)
        if len(self._names) == rows:
            self._part(_DEBUG, op, None)

    def _part(self, role: int, name: str, value: Any, keyword: str = "") -> None:
        before = len(self._names)
        self._walk(name, value, keyword)
        self._runs.extend((len(self.ops) - 1, role, len(self._names) - before))

    def _walk(self, name: str, value: Any, keyword: str) -> None:
        kind = value.__class__
        if kind is list:
            for i, part in enumerate(value):
                if part.__class__ is dict and ("Max" in part or "md5" in part):
                    self._tensor(f"{name}.{i}", part)
                else:
                    self._walk(f"{name}.{i}", part, "")
        elif value is None:
            self._row(name, self._none)
        elif kind is dict:
            if "Max" in value or "md5" in value:  # summary mode xor: a checksum and no statistics
                self._tensor(name, value)
            elif isinstance(value.get("type"), str):
                self._plain(name, value, keyword)
            elif isinstance(value.get("class_type"), str):
                self._peer_op(name, value)
            else:
                for key, part in value.items():
                    self._walk(f"{name}.{key}", part, "")
        # A bare number or text is no item (objects without a type hold some); msprobe lists none either.

    # -- one item

    def _tensor(self, name: str, item: dict[str, Any]) -> None:
        try:
            dtype, shape, high, low, mean, norm = _TENSOR(item)
        except KeyError:
            # A tensor whose record lacks a part still is a row: what is there is shown.
            item = {"dtype": NOT_APPLICABLE, "shape": None, **dict.fromkeys(STATISTICS), **item}
            dtype, shape, high, low, mean, norm = _TENSOR(item)
        self._names.append(name)
        key = (dtype, tuple(shape) if shape.__class__ is list else str(shape), item.get("requires_grad"))
        self._kind.append(self._kinds.setdefault(key, len(self._kinds)))
        if high.__class__ is low.__class__ is mean.__class__ is norm.__class__ is float:
            self._numbers.extend((high, low, mean, norm))
        else:
            self._odd((high, low, mean, norm))
        if "md5" in item:
            self.has_checksums = True
            self._md5.add(len(self._names) - 1, item["md5"] if isinstance(item["md5"], str) else NO_CHECKSUM)
        if "data_name" in item and isinstance(item["data_name"], str):
            self._data_name.add(len(self._names) - 1, item["data_name"])
        if "placements" in item:
            said = [item.get("device_mesh"), item["placements"], item.get("global_shape")]
            self._placement.add(len(self._names) - 1, json.dumps(said))

    def _plain(self, name: str, item: dict[str, Any], keyword: str) -> None:
        value = item.get("value")
        # Not floats: 0.0 and -0.0 are equal, and a NaN is equal to nothing.
        if value.__class__ in (int, bool, str) and len(item) == 2:
            key = (item["type"], value.__class__, value, keyword in RANK_KEYWORDS)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._describe(item, keyword in RANK_KEYWORDS)
        else:
            known = self._describe(item, keyword in RANK_KEYWORDS)
        self._row(name, known)

    def _describe(self, item: dict[str, Any], names_a_rank: bool) -> _Plain:
        kind, value = item["type"], item.get("value")
        if kind == "int" and value.__class__ is float:
            raise HugeInteger
        checksum = f"{zlib.crc32(str(value).encode()):08x}" if "value" in item else NO_CHECKSUM
        if kind == "slice" and isinstance(value, list):
            return self._described(kind, f"({len(value)},)", None, checksum, json.dumps(value))
        if kind == "torch.Size" and isinstance(value, list):
            return self._described(kind, tuple(value), None, checksum)
        if kind in ("torch.ProcessGroup", "mindspore.ProcessGroup"):
            ranks = item.get("group_ranks")
            return self._described(kind, (), ranks, "None" if names_a_rank else str(ranks))
        if kind == "ellipsis":
            return self._described(kind, (), value, checksum)
        if names_a_rank:
            return self._described(kind, (), value, str(value))
        beyond = {key: part for key, part in item.items() if key not in ("type", "value")}
        more = beyond or isinstance(value, (list, dict))
        hidden = json.dumps({**beyond, "value": value}, sort_keys=True) if more else None
        return self._described(str(type(value)), (), value, checksum, hidden)

    def _described(
        self,
        dtype: str,
        shape: tuple[Any, ...] | str,
        shown: Any,
        md5: str | None = None,
        value: str | None = None,
    ) -> _Plain:
        """A row with one value in all four statistics, as msprobe has it for what is no tensor."""
        number, text = _cell(shown)
        code = self._kinds.setdefault((dtype, shape, None), len(self._kinds))
        return _Plain(code, number, text, shown.__class__ is int, md5, value)

    def _row(self, name: str, plain: _Plain) -> None:
        row = len(self._names)
        self._names.append(name)
        self._kind.append(plain.kind)
        self._numbers.extend((plain.number,) * 4)
        if plain.text is not None:
            self._text.add(row, plain.text)
        if plain.is_integer:
            self._integers.extend((row, 15))
        if plain.md5 is not None:
            self._md5.add(row, plain.md5)
        if plain.value is not None:
            self._value.add(row, plain.value)

    def _peer_op(self, name: str, item: dict[str, Any]) -> None:
        """A P2POp: msprobe shows its tensor in its place and nothing else of it."""
        beyond = {key: part for key, part in item.items() if key not in ("class_type", "tensor", "group_id")}
        self._value.add(len(self._names), json.dumps(beyond, sort_keys=True))
        tensor = item.get("tensor")
        if isinstance(tensor, dict) and "Max" in tensor:
            self._tensor(name, tensor)
        else:
            self._row(name, self._none)

    def _odd(self, values: tuple[Any, ...]) -> None:
        """Add statistics that are not all floats."""
        row = len(self._names) - 1
        integers = 0
        for i, value in enumerate(values):
            number, text = _cell(value)
            self._numbers.append(number)
            if text is not None:
                self._texts[i].add(row, text)
            if value.__class__ is int:
                integers |= 1 << i
        if integers:
            self._integers.extend((row, integers))

    # -- columns

    def items(self) -> pa.Table:
        """The table that `read.RankDump` describes."""
        height = len(self._names)
        runs = _of(self._runs, np.int32).reshape(-1, 3)
        kinds = _of(self._kind, np.int32)
        integers = np.zeros(height, np.uint8)
        marked = _of(self._integers, np.int32).reshape(-1, 2)
        integers[marked[:, 0]] = marked[:, 1]

        def by_kind(texts: list[str]) -> pa.Array:
            found = pa.array(texts, pa.string()).dictionary_encode()
            codes = found.indices.to_numpy(zero_copy_only=False)
            return pa.DictionaryArray.from_arrays(pa.array(codes[kinds]), found.dictionary)

        columns: dict[str, pa.Array] = {
            "name": pa.array(self._names, pa.string()),
            "op": pa.array(np.repeat(runs[:, 0], runs[:, 2])),
            "role": pa.array(np.repeat(runs[:, 1], runs[:, 2]).astype(np.uint8)),
            "dtype": by_kind([str(dtype) for dtype, _, _ in self._kinds]),
            "shape": by_kind([s if isinstance(s, str) else str(list(s)) for _, s, _ in self._kinds]),
            "grad": by_kind([_GRAD.get(grad, NOT_APPLICABLE) for _, _, grad in self._kinds]),
        }
        numbers = _of(self._numbers, np.float64).reshape(-1, 4)
        for i, statistic in enumerate(STATISTICS):
            texts = self._texts[i].column(height, self._text)
            wordy = texts.is_valid().to_numpy(zero_copy_only=False) & ((integers >> i) & 1 == 0)
            columns[statistic.lower()] = pa.array(np.ascontiguousarray(numbers[:, i]), mask=wordy)
            columns[f"{statistic.lower()}:text"] = texts
        columns["integers"] = pa.array(integers)
        columns["md5"] = self._md5.column(height).cast(pa.string())
        columns["value"] = self._value.column(height)
        columns["data_name"] = self._data_name.column(height).cast(pa.string())
        columns["placement"] = self._placement.column(height)
        return pa.table(columns)

    def op_table(self, parents: dict[str, str | None], sharing: dict[str, int]) -> pa.Table:
        """The `ops` table that `read.RankDump` describes."""
        return pa.table(
            {
                "name": pa.array(self.ops, pa.string()),
                "parent": pa.array([parents.get(op) for op in self.ops], pa.string()),
                "stack": pa.array([sharing.get(op, -1) for op in self.ops], pa.int32()),
                "recompute": pa.array([op in self.recomputed for op in self.ops], pa.bool_()),
            }
        )


def _cell(value: Any) -> tuple[float, str | None]:
    """(number, text) of a statistic's cell; the number is NaN where there is none."""
    if value.__class__ is float:
        return value, None
    if value.__class__ is int:
        number = float(value) if abs(value) < 1 << 1023 else math.inf if value > 0 else -math.inf
        return number, str(value) if abs(value) > _EXACT_INTEGER else None
    text = str(value)
    return math.nan, "Nan" if text in ("nan", "NaN") else text


def _of(values: array[Any], dtype: Any) -> Any:
    """A numpy view of an array, also of an empty one."""
    return np.frombuffer(values, dtype=dtype) if len(values) else np.empty(0, dtype)
