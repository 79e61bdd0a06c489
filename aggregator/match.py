"""Which item of the bench stands opposite each item of the target.

Rules run in order, each on what the ones before left open; a bench item is given away once, so the result is a partial
injection. First come the user's data mapping and `rename` (what says the same in other words), then names, then names
without wrappers, then `align` (keywords, calls with other numbers).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregator import align, lonely, rename
from aggregator.lonely import Lonely
from aggregator.mapping import Mappings
from msprobe_launch.errors import NothingUsable, near_miss

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attribute names under which DDP, torch.compile, FSDP and activation checkpointing keep the model they wrap."""

# The look-ahead leaves the dot that follows to the next wrapper (`.module._orig_mod.`).
WRAPPER = re.compile(rf"\.(?:{'|'.join(WRAPPERS)})(?=\.)")
_MODULE = re.compile(r"^(?:Module|Cell)\.")

_EXAMPLES = 3

Rule = Callable[["pa.Array", "pa.Array"], "npt.NDArray[np.int64]"]
"""(names of open target items, names of open bench items), both in call order -> for each target item the place of its
bench item, or -1. No place may occur twice."""


@dataclass(frozen=True, slots=True)
class Matching:
    """`bench_row[i]` is the bench's row for target row i, -1 for none. `bench_only` are ops that the target lacks."""

    bench_row: npt.NDArray[np.int64]
    bench_only: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lonely: tuple[Lonely, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """How to match beyond names: `fuzzy` aligns calls whose numbers differ; `mappings` are the user's files."""

    fuzzy: bool = False
    mappings: Mappings = field(default_factory=Mappings)


PLAIN = Options()


def match(target: RankDump, bench: RankDump, options: Options = PLAIN, *, paired: bool = False) -> Matching:
    """Match two dumps of one rank. `paired`: calls were put opposite each other already, and have the same names.

    Raises NothingUsable, with names from both sides, where no item of the target has a counterpart.
    """
    own_names, own_bench_names = target.items["name"].combine_chunks(), bench.items["name"].combine_chunks()
    for side, count in (("target", len(own_names)), ("bench", len(own_bench_names))):
        if not count:
            raise NothingUsable(f"the {side}'s dump holds no items; there is nothing to compare")
    found = _Places(len(own_names), len(own_bench_names))
    notes: list[str] = []
    if options.mappings.data:
        found.take(_by_data(own_names, own_bench_names, options.mappings.data, notes))
    other = rename.renamed(target, bench, options.mappings)
    if other is None:
        names, bench_names = own_names, own_bench_names
        op_names: Sequence[str | None] = ()
        bench_op_names: Sequence[str | None] = ()
    else:
        (names, op_names), (bench_names, bench_op_names) = ((side.items, side.ops) for side in other[:2])
        notes += other[2]
    sides = (
        align.Side(target, op_names or target.ops["name"].to_pylist(), WRAPPER),
        align.Side(bench, bench_op_names or bench.ops["name"].to_pylist(), WRAPPER),
    )
    shifted = align.uneven(*sides) if options.fuzzy and not paired else {}
    if shifted:
        names, bench_names = (
            _without(given, side, shifted) for given, side in zip((names, bench_names), sides, strict=True)
        )
    for label, rule in RULES.items():
        places = found.open()
        if places is None:
            break
        open_rows, free_rows = places
        hits = found.take(rule(names.take(pa.array(open_rows)), bench_names.take(pa.array(free_rows))), places)
        if hits and label == WITHOUT_WRAPPERS:
            notes.append(f"{hits} items matched only after wrapper prefixes ({', '.join(WRAPPERS)}) were left out")
    if found.open() is not None:
        if hits := align.arguments(*sides, found.bench_row, shifted):
            notes.append(f"{hits} inputs are positional on one side and keywords on the other")
        if options.fuzzy and (hits := align.calls(*sides, found.bench_row)):
            notes.append(f"{hits} items matched by the order of their calls (--fuzzy-match)")
        found.refresh()
    if not (options.fuzzy or paired) and not (found.taken.all() and (found.bench_row >= 0).all()):
        notes += _shifts(align.uneven(*sides))
    if not found.taken.any():
        raise NothingUsable(
            f"none of the target's {len(names)} items has a counterpart among the bench's {len(bench_names)}: "
            f"the target has {_examples(target)}, the bench has {_examples(bench)}",
            hint="Are these two runs of one model, at one level (L0, L1, mix)?",
        )
    return Matching(
        found.bench_row,
        _bench_only(target, bench, found.taken),
        tuple(notes),
        lonely.find(target, bench, found.bench_row),
    )


class _Places:
    """Which bench row each target row has, and which bench rows are taken."""

    def __init__(self, height: int, bench_height: int) -> None:
        self.bench_row = np.full(height, -1, np.int64)
        self.taken = np.zeros(bench_height, bool)

    def open(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """(open target rows, free bench rows), None where there is nothing left to match."""
        rows, free = np.flatnonzero(self.bench_row < 0), np.flatnonzero(~self.taken)
        return (rows, free) if len(rows) and len(free) else None

    def take(
        self,
        found: npt.NDArray[np.int64],
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,
    ) -> int:
        """Keep what a rule found among `places` (None: all rows); how many rows."""
        rows, free = places or (np.arange(len(self.bench_row)), np.arange(len(self.taken)))
        hits = found >= 0
        self.bench_row[rows[hits]] = free[found[hits]]
        self.taken[free[found[hits]]] = True
        return int(hits.sum())

    def refresh(self) -> None:
        self.taken[self.bench_row[self.bench_row >= 0]] = True


def _by_data(
    names: pa.Array, bench_names: pa.Array, mapping: Mapping[str, str], notes: list[str]
) -> npt.NDArray[np.int64]:
    """Items that the user's file puts opposite each other. Names that neither dump has are said."""
    spelled = {
        left.replace(".kwargs.", ".input."): right.replace(".kwargs.", ".input.") for left, right in mapping.items()
    }
    wanted = pa.array([spelled.get(name) for name in names.to_pylist()], pa.string())
    found = _by_key(wanted, pa.array(_once(bench_names.to_pylist()), pa.string()))
    known = set(names.to_pylist())
    lost = [left for left in spelled if left not in known]
    here = set(bench_names.to_pylist())
    lost += [right for right in spelled.values() if right not in here]
    if lost:
        near = near_miss(lost[0], sorted(known | here))
        notes.append(f"data mapping: {len(lost)} names are in no dump, from '{lost[0]}'{near}")
    return found


def _once(names: Sequence[str]) -> list[str | None]:
    times = Counter(names)
    return [name if times[name] == 1 else None for name in names]


# -- rules


def by_name(names: pa.Array, bench_names: pa.Array) -> npt.NDArray[np.int64]:
    """Equal names. A name that a dump holds twice (a keyword called `0`) is matched by occurrence."""
    return _by_key(_numbered(names), _numbered(bench_names))


def without_wrappers(names: pa.Array, bench_names: pa.Array) -> npt.NDArray[np.int64]:
    """Equal names of modules once wrappers are left out. Names that become ambiguous so are left unmatched."""
    return _by_key(_unwrapped(names), _unwrapped(bench_names))


WITHOUT_WRAPPERS = "without wrappers"

RULES: dict[str, Rule] = {"by name": by_name, WITHOUT_WRAPPERS: without_wrappers}


def _by_key(keys: pa.Array, bench_keys: pa.Array) -> npt.NDArray[np.int64]:
    """Matches equal keys; null keys match nothing. Keys that are not null must be unique on each side."""

    found = pc.index_in(keys, value_set=bench_keys, skip_nulls=True)
    places: npt.NDArray[np.int64] = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return places


def _numbered(names: pa.Array) -> pa.Array:
    """The names, those that occur before with a number after them."""

    if len(names.unique()) == len(names):
        return names
    seen: Counter[str] = Counter()
    out = []
    for name in names.to_pylist():
        out.append(f"{name}\0{seen[name]}" if name is not None and seen[name] else name)
        seen[name] += 1
    return pa.array(out, pa.string())


def _unwrapped(names: pa.Array) -> pa.Array:
    """Module names without wrappers; null for other names and where two names become one."""

    keys = [WRAPPER.sub("", name) if name is not None and _MODULE.match(name) else None for name in names.to_pylist()]
    times = Counter(keys)
    return pa.array([key if times[key] == 1 else None for key in keys], pa.string())


# -- calls whose numbers are shifted


def _without(names: pa.Array, side: align.Side, shifted: Collection[align.Group]) -> pa.Array:
    """Item names, null for items of calls whose number says nothing."""
    groups = side.groups
    odd = np.array([group in shifted for group in groups], bool)[side.op_of_row]
    return pc.if_else(pa.array(odd), pa.scalar(None, pa.string()), names)


def _shifts(uneven: Mapping[align.Group, tuple[int, int]]) -> list[str]:
    if not uneven:
        return []
    (first, phase), (own, other) = next(iter(uneven.items()))
    count = len({stem for stem, _ in uneven})
    return [
        f"{count} APIs or modules are called more often by one side, from '{first}' {phase.value} ({own} times, "
        f"the bench {other}): if that is one call more in between, calls after it stand opposite others; "
        "--fuzzy-match aligns them by what they hold"
    ]


# -- what is left


def _bench_only(target: RankDump, bench: RankDump, taken: Any) -> tuple[str, ...]:
    """Bench ops that have items, none of which is matched, and that the target does not know by name."""

    op_of_row = bench.items["op"].to_numpy()
    lonely = np.setdiff1d(np.unique(op_of_row), np.unique(op_of_row[taken]))
    known = set(target.ops["name"].to_pylist()) if len(lonely) else set()
    names: Sequence[str] = bench.ops["name"].take(pa.array(lonely)).to_pylist()
    return tuple(name for name in names if name not in known)


def _examples(dump: RankDump) -> str:
    return ", ".join(dump.ops["name"].slice(0, _EXAMPLES).to_pylist())
