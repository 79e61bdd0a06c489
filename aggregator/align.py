"""Items that names alone do not match: keywords against positional inputs, and calls whose numbers differ.

Everything here is symmetric (the two sides can be swapped) and works on one API or module at a time, calls in the
order of their numbers, so that the order of the records in a file does not matter.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from aggregator.dtypes import canonical_dtype
from aggregator.items import ROLES
from msprobe_launch.records.names import ItemName, OpName, Phase, Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

MOST_CELLS = 4_000_000
"""Largest table of an alignment, 2,000 calls of one API on each side; above it call numbers are all there is."""

NEAR = 0.05  # norms that are this close, as a ratio, speak for two calls being one

_INPUT = ROLES.index(Role.INPUT)


@dataclass(frozen=True, slots=True)
class _Item:
    """What is looked at of one row."""

    row: int
    role: int
    path: str
    dtype: str
    shape: str
    shown: Any
    norm: float


class Side:
    """One dump, read op by op where something is open. `op_names` are the names to match ops by, None for none."""

    def __init__(self, dump: RankDump, op_names: Sequence[str | None], wrapper: re.Pattern[str]) -> None:
        self.dump = dump
        self.op_of_row: npt.NDArray[np.int64] = dump.items["op"].to_numpy().astype(np.int64)
        self._given, self._wrapper = op_names, wrapper
        self._table = dump.items
        self._bounds: dict[int, list[int]] | None = None

    @cached_property
    def names(self) -> list[str | None]:
        """Ops' names without wrappers."""
        return [name if name is None else self._wrapper.sub("", name) for name in self._given]

    @cached_property
    def groups(self) -> list[Group | None]:
        """What each op's call is one of; None for what is no numbered call, or not to be matched."""
        return [_group(name) for name in self.names]

    def rows(self, op: int) -> list[int]:
        """Rows of an op."""
        if self._bounds is None:
            self._bounds = defaultdict(list)
            for row, place in enumerate(self.op_of_row.tolist()):
                self._bounds[place].append(row)
        return self._bounds.get(op, [])

    def items(self, rows: Sequence[int]) -> list[_Item]:
        """The rows as objects: for the few that are open."""
        wanted = self._table.select(["name", "role", "dtype", "shape", "max", "max:text", "norm"])
        part = wanted.take(np.array(rows, np.int64))  # typed: there may be none
        out = []
        for row, (name, role, dtype, shape, high, text, norm) in zip(
            rows, zip(*(column.to_pylist() for column in part.columns), strict=True), strict=True
        ):
            try:
                path = ItemName.parse(name).path
            except ValueError:
                path = name
            shown = text if high is None else high
            out.append(
                _Item(row, role, path, canonical_dtype(dtype), shape, shown, norm if norm is not None else np.nan)
            )
        return out


def _group(name: str | None) -> Group | None:
    try:
        parsed = OpName.parse(name or "")
    except ValueError:
        return None
    return parsed.stem, parsed.phase


# -- positional against keyword


def arguments(
    target: Side, bench: Side, bench_row: npt.NDArray[np.int64], shifted: Collection[Group] = frozenset()
) -> int:
    """Match inputs of one call that only one side recorded as a keyword; how many were matched.

    Calls of `shifted` groups are left alone: equal names are not equal calls there.

    Inputs of one type and shape (and place within a list or dictionary) belong together; where several have these,
    those with one value do, and then their order decides.
    """
    taken = np.zeros(len(bench.op_of_row), bool)
    taken[bench_row[bench_row >= 0]] = True
    open_ops = set(np.unique(target.op_of_row[bench_row < 0]).tolist())
    free_ops = set(np.unique(bench.op_of_row[~taken]).tolist())
    places = dict(_numbered(bench.names))
    groups = target.groups
    count = 0
    for name, op in _numbered(target.names):
        other = places.get(name)
        if other is None or op not in open_ops or other not in free_ops or groups[op] in shifted:
            continue
        mine = [item for item in target.items([r for r in target.rows(op) if bench_row[r] < 0]) if item.role == _INPUT]
        theirs = [item for item in bench.items([r for r in bench.rows(other) if not taken[r]]) if item.role == _INPUT]
        for a, b in _same_arguments(mine, theirs):
            bench_row[a.row] = b.row
            taken[b.row] = True
            count += 1
    return count


def _numbered(names: Sequence[str | None]) -> Iterator[tuple[tuple[str, int], int]]:
    """((name, how many ops had it before), place) of the ops that have one: renaming can give two ops one name."""
    before: Counter[str] = Counter()
    for place, name in enumerate(names):
        if name is not None:
            yield (name, before[name]), place
            before[name] += 1


def _same_arguments(mine: list[_Item], theirs: list[_Item]) -> list[tuple[_Item, _Item]]:
    out: list[tuple[_Item, _Item]] = []
    for looks in (lambda i: (_inside(i), i.dtype, i.shape, str(i.shown)), lambda i: (_inside(i), i.dtype, i.shape)):
        done = {id(part) for pair in out for part in pair}
        groups: dict[Any, tuple[list[_Item], list[_Item]]] = defaultdict(lambda: ([], []))
        for side, items in enumerate((mine, theirs)):
            for item in items:
                if id(item) not in done:
                    groups[looks(item)][side].append(item)
        for a, b in groups.values():
            keywords, positional = (
                [[i for i in side if not _place(i)] for side in (a, b)],
                [[i for i in side if _place(i)] for side in (a, b)],
            )
            if len(keywords[0]) == len(positional[1]):
                out += zip(keywords[0], positional[1], strict=True)
            if len(positional[0]) == len(keywords[1]):
                out += zip(positional[0], keywords[1], strict=True)
    return out


def _inside(item: _Item) -> str:
    """Where an item stands within its argument, '' for the argument itself."""
    return item.path.partition(".")[2]


def _place(item: _Item) -> bool:
    return item.path.partition(".")[0].isdigit()


# -- calls with other numbers


@dataclass(frozen=True, slots=True)
class _Call:
    """A call with open items: its number, what its items look like, and their norms."""

    op: int
    number: int
    looks: tuple[tuple[int, str, str, str], ...]
    norms: tuple[float, ...]
    items: tuple[_Item, ...]


Group = tuple[str, Phase]
"""What calls are numbered within: an API or module, and a direction."""


def uneven(target: Side, bench: Side) -> dict[Group, tuple[int, int]]:
    """How often each side makes calls of what one calls more often than the other: numbers may be shifted there.

    So are those of the calls' other direction, however many there are.
    """
    counts = [Counter(group for group in side.groups if group is not None) for side in (target, bench)]
    found = {
        group: (count, counts[1][group])
        for group, count in counts[0].items()
        if counts[1][group] and counts[1][group] != count and count * counts[1][group] <= MOST_CELLS
    }
    for stem, phase in list(found):
        other = _OPPOSITE.get(phase)
        if other is not None and counts[0][stem, other] and counts[1][stem, other]:
            found.setdefault((stem, other), (counts[0][stem, other], counts[1][stem, other]))
    return found


_OPPOSITE = {Phase.FORWARD: Phase.BACKWARD, Phase.BACKWARD: Phase.FORWARD}


def calls(target: Side, bench: Side, bench_row: npt.NDArray[np.int64]) -> int:
    """Align the open calls of every API and module; how many items were matched.

    Two calls may be one where the roles, paths, dtypes and shapes of their items agree. Of all alignments that keep
    the order, the one with most calls is taken, and among these the one whose norms agree best.
    """
    taken = np.zeros(len(bench.op_of_row), bool)
    taken[bench_row[bench_row >= 0]] = True
    mine = _grouped(target, bench_row >= 0)
    theirs = _grouped(bench, taken)
    count = 0
    numbers: dict[str, dict[int, int]] = {}  # of the forward calls of one API that were aligned
    for (stem, phase), own in sorted(mine.items(), key=lambda entry: entry[0][1] is Phase.BACKWARD):
        others = theirs.get((stem, phase), [])
        pairs: list[tuple[_Call, _Call]] = []
        if phase is Phase.BACKWARD and stem in numbers:
            pairs, own, others = _like_forward(own, others, numbers[stem])
        pairs += _aligned(own, others)
        if phase is Phase.FORWARD:
            numbers[stem] = {a.number: b.number for a, b in pairs}
        for a, b in pairs:
            for x, y in zip(a.items, b.items, strict=True):
                bench_row[x.row] = y.row
                count += 1
    return count


def _like_forward(
    own: list[_Call], others: list[_Call], numbers: dict[int, int]
) -> tuple[list[tuple[_Call, _Call]], list[_Call], list[_Call]]:
    """Backward calls of forward calls that are opposite each other; and those of no such call, of either side."""
    there = {call.number: call for call in others}
    pairs = []
    for call in own:
        other = there.get(numbers.get(call.number, -1))
        if other is not None and other.looks == call.looks:
            pairs.append((call, other))
    known = set(numbers.values())
    return (
        pairs,
        [call for call in own if call.number not in numbers],
        [call for call in others if call.number not in known],
    )


def _grouped(side: Side, done: npt.NDArray[np.bool_]) -> dict[Group, list[_Call]]:
    """Calls none of whose items is matched, by API or module and direction, in the order of their numbers."""
    out: dict[Group, list[_Call]] = defaultdict(list)
    some = np.zeros(len(side.names), bool)
    some[side.op_of_row[done]] = True
    groups = side.groups
    for op in np.unique(side.op_of_row[~done]).tolist():
        name, group = side.names[op], groups[op]
        if name is None or group is None or some[op]:
            continue
        items = side.items(side.rows(op))
        looks = tuple((item.role, item.path, item.dtype, item.shape) for item in items)
        number = OpName.parse(name).call or 0
        out[group].append(_Call(op, number, looks, tuple(item.norm for item in items), tuple(items)))
    for found in out.values():
        found.sort(key=lambda call: call.number)
    return out


def _aligned(a: list[_Call], b: list[_Call]) -> list[tuple[_Call, _Call]]:
    """The best alignment, the same with sides swapped: they are put in an order of their own first."""
    if not a or not b or len(a) * len(b) > MOST_CELLS:
        return []
    if _order(b) < _order(a):
        return [(x, y) for y, x in _aligned(b, a)]
    kinds: dict[Any, int] = {}
    codes = [np.array([kinds.setdefault(call.looks, len(kinds)) for call in side]) for side in (a, b)]
    # A call more counts more than all norms together could.
    bonus = 1.0 / (4 * min(len(a), len(b)))
    score = np.zeros((len(a) + 1, len(b) + 1))
    for i, call in enumerate(a, 1):
        gain = np.where(codes[1] == codes[0][i - 1], 1.0, -1.0)
        for j in np.flatnonzero(gain > 0).tolist():
            gain[j] += bonus * _alike(call.norms, b[j].norms)
        # Best of the row above, and of taking the pair; then the best so far along the row.
        here = np.maximum(score[i - 1, 1:], score[i - 1, :-1] + np.maximum(gain, 0.0))
        score[i, 1:] = np.maximum.accumulate(here)
    pairs = []
    i, j = len(a), len(b)
    while i and j:
        if score[i, j] == score[i - 1, j]:
            i -= 1
        elif score[i, j] == score[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((a[i], b[j]))
    return pairs[::-1]


def _order(side: list[_Call]) -> Any:
    return [(call.looks, tuple(map(repr, call.norms)), call.number) for call in side]


def _alike(norms: tuple[float, ...], others: tuple[float, ...]) -> float:
    """Share of the items whose norms are near each other."""
    near = [abs(x - y) <= NEAR * max(abs(x), abs(y)) for x, y in zip(norms, others, strict=True) if x == x and y == y]
    return sum(near) / len(near) if near else 0.0
