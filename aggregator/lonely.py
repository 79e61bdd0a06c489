"""Ops without a counterpart, each with the nearest op of the other side and why that one was not taken."""

from __future__ import annotations

import csv
import difflib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from msprobe_launch.records.names import OpName, Phase

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

MOST = 10_000  # ops a side that are looked up; a table of more is no help to anybody


@dataclass(frozen=True, slots=True)
class Lonely:
    """`side` is target or bench; `nearest` is '' where the other side has nothing like it."""

    side: str
    op: str
    nearest: str
    why: str

    def sentence(self) -> str:
        nearest = f"; nearest {self.nearest}: " if self.nearest else ": "
        return f"{self.op} is in the {self.side} only{nearest}{self.why}"


def find(target: RankDump, bench: RankDump, bench_row: npt.NDArray[np.int64]) -> tuple[Lonely, ...]:
    """All ops none of whose items is matched, the target's first, each side in call order."""
    rows = np.flatnonzero(bench_row >= 0)
    pairs = {
        int(a): int(b)
        for a, b in zip(target.items["op"].to_numpy()[rows], bench.items["op"].to_numpy()[bench_row[rows]], strict=True)
    }
    back = {b: a for a, b in pairs.items()}
    return (*_of("target", target, bench, pairs, back), *_of("bench", bench, target, back, pairs))


def _of(side: str, own: RankDump, other: RankDump, pairs: dict[int, int], back: dict[int, int]) -> list[Lonely]:
    lone = [place for place in np.unique(own.items["op"].to_numpy()).tolist() if place not in pairs][:MOST]
    if not lone:
        return []
    names, other_names = own.ops["name"].to_pylist(), other.ops["name"].to_pylist()
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    named: dict[Phase, dict[str, str]] = defaultdict(dict)
    for place, name in enumerate(other_names):
        op = _parsed(name)
        if op is not None:
            calls[f"{op.stem} {op.phase.value}"].append((op.call or 0, place))
            named[op.phase].setdefault(op.name, f"{op.stem} {op.phase.value}")
    near: dict[str, str] = {}
    out = []
    for place in lone:
        op = _parsed(names[place])
        if op is None:
            out.append(Lonely(side, names[place], "", "its name is of no known shape"))
            continue
        key = f"{op.stem} {op.phase.value}"
        found = calls.get(key)
        if found:
            number = op.call or 0
            call, there = min(found, key=lambda entry: (entry[1] in back, abs(entry[0] - number), entry[0]))
            if there in back:
                why = f"taken by {names[back[there]]}; the other side has {len(found)} calls of {op.stem}"
            else:
                why = f"call number {number} against {call}; --fuzzy-match aligns calls of the same types and shapes"
            out.append(Lonely(side, names[place], other_names[there], why))
            continue
        if key not in near:
            # By the API's or module's own name: prefixes and directions would make any two names alike.
            close = difflib.get_close_matches(op.name, named[op.phase], n=1, cutoff=0.6)
            near[key] = named[op.phase][close[0]] if close else ""
        if near[key]:
            there = calls[near[key]][0][1]
            taken = ", and it is taken" if there in back else "; a mapping file can put them together"
            out.append(Lonely(side, names[place], other_names[there], f"another name{taken}"))
        else:
            out.append(Lonely(side, names[place], "", f"the other side never calls {op.stem}"))
    return out


def _parsed(name: str) -> OpName | None:
    try:
        return OpName.parse(name)
    except ValueError:
        return None


def write(found: tuple[Lonely, ...], path: Path) -> None:
    """Write the list as csv. Raises OSError."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("side", "op", "nearest", "why"))
        table.writerows((entry.side, entry.op, entry.nearest, entry.why) for entry in found)
