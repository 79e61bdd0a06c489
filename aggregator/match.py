"""Which item of the bench stands opposite each item of the target.

Rules run in order, each on what the ones before left open; a bench item is given away once, so the result is a partial
injection. A new rule (mapping files, alignment of call numbers) is one more function of the type `Rule`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from msprobe_launch.errors import NothingUsable

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attribute names under which DDP, torch.compile, FSDP and activation checkpointing keep the model they wrap."""

# The look-ahead leaves the dot that follows to the next wrapper (`.module._orig_mod.`).
_WRAPPER = re.compile(rf"\.(?:{'|'.join(WRAPPERS)})(?=\.)")
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


def match(target: RankDump, bench: RankDump) -> Matching:
    """Match two dumps of one rank.

    Raises NothingUsable, with names from both sides, where no item of the target has a counterpart.
    """

    names, bench_names = target.items["name"].combine_chunks(), bench.items["name"].combine_chunks()
    for side, count in (("target", len(names)), ("bench", len(bench_names))):
        if not count:
            raise NothingUsable(f"the {side}'s dump holds no items; there is nothing to compare")
    bench_row = np.full(len(names), -1, np.int64)
    taken = np.zeros(len(bench_names), bool)
    matched_by: dict[str, int] = {}
    for label, rule in RULES.items():
        open_rows, free_rows = np.flatnonzero(bench_row < 0), np.flatnonzero(~taken)
        if not len(open_rows) or not len(free_rows):
            break
        found = rule(names.take(pa.array(open_rows)), bench_names.take(pa.array(free_rows)))
        hits = found >= 0
        bench_row[open_rows[hits]] = free_rows[found[hits]]
        taken[free_rows[found[hits]]] = True
        matched_by[label] = int(hits.sum())
    if not taken.any():
        raise NothingUsable(
            f"none of the target's {len(names)} items has a counterpart among the bench's {len(bench_names)}: "
            f"the target has {_examples(target)}, the bench has {_examples(bench)}",
            hint="Are these two runs of one model, at one level (L0, L1, mix)?",
        )
    notes = []
    if wrapped := matched_by.get(WITHOUT_WRAPPERS):
        notes.append(f"{wrapped} items matched only after wrapper prefixes ({', '.join(WRAPPERS)}) were left out")
    return Matching(bench_row, _bench_only(target, bench, taken), tuple(notes))


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
        out.append(f"{name}\0{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return pa.array(out, pa.string())


def _unwrapped(names: pa.Array) -> pa.Array:
    """Module names without wrappers; null for other names and where two names become one."""

    keys = [_WRAPPER.sub("", name) if _MODULE.match(name) else None for name in names.to_pylist()]
    times = Counter(keys)
    return pa.array([key if times[key] == 1 else None for key in keys], pa.string())


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
