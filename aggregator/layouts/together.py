"""One side's ranks as one: each row joined, added, or one of its replicas; and what differs that should not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from aggregator.items import ROLES
from aggregator.layouts import combine
from aggregator.layouts.combine import MEAN, Part, Vocabulary
from aggregator.layouts.decide import Decisions, Kind, Source
from aggregator.layouts.gather import Side
from aggregator.layouts.pairing import APPLIED
from msprobe_launch.records.names import Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from aggregator.read import RankDump

    Flags = npt.NDArray[np.bool_]
    Codes = npt.NDArray[np.int64]

_INPUT, _PARAMETERS, _OUTPUT, _GRADIENT = (
    ROLES.index(role) for role in (Role.INPUT, Role.PARAMETERS, Role.OUTPUT, Role.PARAMETERS_GRAD)
)

AGREES = 4.0  # tolerances up to which one rank's value is the bench's: other kernels, other order of sums


@dataclass(frozen=True, slots=True)
class Whole:
    """One side put together: a part for each row, which of its ranks' columns a row shows, and what was noticed.

    `summands` are rows that are parts of a sum, `unlike` rows whose replicas differ, `mean` rows that are a mean over
    the data parallel ranks; `batches` rows that differ between the data parallel ranks because their data do.
    """

    part: Part
    shown: Codes
    summands: Flags
    unlike: Flags
    mean: Flags
    batches: Flags


def together(
    side: Side, decisions: Decisions, parts: list[list[Part]], reference: Part | None, vocabulary: Vocabulary
) -> Whole:
    """One side's parts as one. `reference` is the other side's value of each row, where it is known."""
    dump = side.skeleton
    allowed = combine.tolerances(dump.items["dtype"].combine_chunks())
    height = side.height
    per_replica = [_of_group(side, decisions, group, reference, allowed, vocabulary) for group in parts]
    whole, shown, summands, unlike = per_replica[0]
    mean, batches = np.zeros(height, bool), np.zeros(height, bool)
    dims = decisions.of(lambda verdict: -1 if verdict.dp_dim is None else verdict.dp_dim, np.int64)
    shared = dims >= 0
    values = [entry[0] for entry in per_replica]
    if side.lent:
        whole = combine.merged(whole, combine.joined(values, dims, vocabulary), shared)
    elif len(per_replica) > 1:
        counts = combine.elements(values[0].shapes, vocabulary)
        far = np.max([combine.apart(values[0], value, allowed, counts) for value in values[1:]], axis=0)
        role = dump.items["role"].to_numpy()
        differ = (far > 1.0) & ~shared
        ours = (role == _PARAMETERS) | ((role == _GRADIENT) & ends(dump, APPLIED))
        unlike = np.logical_or.reduce([unlike, differ & ours, *(entry[3] for entry in per_replica[1:])])
        mean = differ & _is_loss(dump) & (counts == 1)
        batches = differ & ~ours & ~mean
        present = np.stack([value.there for value in values]).argmax(axis=0)
        whole = combine.merged(combine.choose(values, present), combine.joined(values, dims, vocabulary), shared)
        whole = combine.merged(whole, combine.summed(values, counts, vocabulary, mean=True), mean)
        if reference is not None and (differ & ours).any():
            furthest = np.argmax([combine.apart(value, reference, allowed, counts) for value in values], axis=0)
            whole = combine.merged(whole, combine.choose(values, furthest), differ & ours)
    return Whole(whole, shown, summands, unlike, mean, batches)


def _of_group(
    side: Side,
    decisions: Decisions,
    parts: list[Part],
    reference: Part | None,
    allowed: npt.NDArray[np.float64],
    vocabulary: Vocabulary,
) -> tuple[Part, Codes, Flags, Flags]:
    """A tensor-parallel group as one: (its value, the column shown, parts of a sum, replicas that differ)."""
    height = side.height
    shown = np.zeros(height, np.int64)
    nobody = np.zeros(height, bool)
    if len(parts) == 1:
        return parts[0], shown, nobody, nobody
    dump = side.skeleton
    kinds = decisions.kinds
    counts = combine.elements(parts[0].shapes, vocabulary)
    same = kinds == Kind.SAME
    far = np.max([combine.apart(parts[0], part, allowed, counts) for part in parts[1:]], axis=0)
    differ = same & (far > 1.0)
    summands = kinds == Kind.PARTIAL
    unlike = nobody
    if differ.any():
        told = decisions.of(lambda verdict: verdict.source in (Source.FILE, Source.PLACEMENTS), bool)
        role = dump.items["role"].to_numpy()
        local = (role == _OUTPUT) | ((role == _GRADIENT) & ~ends(dump, APPLIED))
        right = nobody.copy()
        adds_up = nobody.copy()
        if reference is not None:
            distances = np.stack([combine.apart(part, reference, allowed, counts) for part in parts])
            right = reference.there & (distances.min(axis=0) <= AGREES)
            adds_up = reference.there & _means_add_up(parts, reference, allowed, counts)
            shown = np.where(differ, distances.argmax(axis=0), shown)
        # Where what a call takes in is divided, what it gives may be a part of a sum on each rank.
        op = dump.items["op"].to_numpy()
        divided = np.zeros(dump.ops.num_rows, bool)
        divided[op[((kinds == Kind.SHARD) | summands) & ((role == _INPUT) | (role == _PARAMETERS))]] = True
        summands = summands | (differ & ~told & ~right & ((local & divided[op]) | (adds_up & (role != _PARAMETERS))))
        # Accumulated on this rank and not yet reduced: nobody promised that these agree.
        waiting = (role == _GRADIENT) & ~ends(dump, APPLIED) & ~right
        summands = summands | (differ & ~told & waiting)
        unlike = differ & ~summands
    # Something that is not finite on any rank is shown.
    odd = np.stack([part.is_number[0] & ~np.isfinite(part.numbers[0]) for part in parts])
    shown = np.where(odd.any(axis=0) & (kinds != Kind.SHARD), odd.argmax(axis=0), shown)
    absent = ~np.stack([part.there for part in parts])
    shown = np.where(absent[shown, np.arange(height)], (~absent).argmax(axis=0), shown)
    chosen = combine.choose(parts, shown)
    return combine.mixed(decisions, parts, chosen, vocabulary, summands), shown, summands, unlike


def _means_add_up(
    parts: list[Part], reference: Part, allowed: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]
) -> Flags:
    """Rows whose means add up to the other side's: what parts of a sum do."""
    with np.errstate(all="ignore"):
        total = np.sum([part.numbers[MEAN] for part in parts], axis=0)
        spread = np.max([np.abs(part.numbers[3]) for part in (*parts, reference)], axis=0) / np.sqrt(counts)
        close: Flags = np.abs(total - reference.numbers[MEAN]) <= AGREES * allowed * spread
    return close


def ends(dump: RankDump, ending: str) -> Flags:
    return np.asarray(pc.ends_with(dump.items["name"], ending).to_numpy())


_LOSSES = r"(?i)loss|cross_?entropy|criterion"


def _is_loss(dump: RankDump) -> Flags:
    """Outputs of forward calls whose name says that they are losses."""
    names = np.asarray(pc.match_substring_regex(dump.ops["name"], _LOSSES).to_numpy())
    forward = np.asarray(pc.match_substring_regex(dump.ops["name"], r"\.forward(?:\.\d+)?$").to_numpy())
    op = dump.items["op"].to_numpy()
    return np.asarray((names & forward)[op] & (dump.items["role"].to_numpy() == _OUTPUT))
