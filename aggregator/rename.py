"""The names that two dumps are matched by, where their own names say the same in other words.

    recomputed calls     activation checkpointing runs calls again, which shifts the numbers of all later ones: they
                         are left out, and the others are numbered as if they had not been
    one API, other ways  `x + y`, `x.add(y)` and `torch.add(x, y)` are one API: where the two sides use other mixtures
                         of them, calls are matched by the order in which they ran
    MindSpore            cells are modules, known by their path (classes have other names), parameters have PyTorch's
                         names, primitives that are one of PyTorch's functions are calls of that
    mapping files        see `mapping`

Where none of this applies (nearly always), names are used as they are and nothing here costs anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from aggregator.mapping import TOP_LAYER, ApiPair, Mappings
from aggregator.spelling import (
    API_PREFIXES,
    MINDSPORE_APIS,
    MINDSPORE_PARAMETERS,
    MINDSPORE_PRIMITIVES,
    MINT,
    OPERATORS,
    Primitive,
)
from msprobe_launch.errors import near_miss
from msprobe_launch.records.names import ItemName, OpName, Phase, Role

if TYPE_CHECKING:
    from aggregator.read import RankDump


@dataclass(frozen=True, slots=True)
class Renamed:
    """Names to match by: of the items, and of the ops. Null: the item or op is not to be matched."""

    items: pa.Array
    ops: tuple[str | None, ...]


def renamed(target: RankDump, bench: RankDump, mappings: Mappings) -> tuple[Renamed, Renamed, tuple[str, ...]] | None:
    """Both sides' names and notes on what was done; None where the names can be used as they are."""
    mindspore = [side.framework == "mindspore" for side in (target, bench)]
    across = mindspore[0] != mindspore[1]
    recompute = [any(side.ops["recompute"].to_pylist()) for side in (target, bench)]
    sides = [_Side(dump) for dump in (target, bench)] if across or any(recompute) or mappings else []
    notes = []
    if not sides:
        if not _spelled_otherwise(target, bench):
            return None
        sides = [_Side(target), _Side(bench)]
    if any(recompute) and _recomputed(target) != _recomputed(bench):
        left_out = [side.without_recomputed() for side in sides]
        notes.append(
            f"recomputed calls (activation checkpointing) were left out: {left_out[0]} ops of the target, "
            f"{left_out[1]} of the bench"
        )
    if across:
        for side, is_mindspore in zip(sides, mindspore, strict=True):
            side.across_frameworks(is_mindspore)
        notes.append("MindSpore against PyTorch: modules matched by their path, parameters by PyTorch's names")
    if mappings:
        left, right, given = (*sides, mappings)
        if across and mindspore[1]:
            # msprobe's files have MindSpore on the left.
            left, right = sides[1], sides[0]
        left.by_cell(given.cell)
        left.by_layer(given.layer)
        left.by_api(given.api, is_left=True)
        right.by_api(given.api, is_left=False)
        notes += _unknown(left, right, given)
    count = _one_way_of_calling(*sides)
    if count:
        notes.append(f"{count} APIs are called in other ways (`x + y`, `torch.add`): their calls matched in order")
    return sides[0].names(), sides[1].names(), tuple(notes)


def _recomputed(dump: RankDump) -> frozenset[str]:
    flags = dump.ops["recompute"].to_pylist()
    return frozenset(name for name, flag in zip(dump.ops["name"].to_pylist(), flags, strict=True) if flag)


def _spelled_otherwise(target: RankDump, bench: RankDump) -> bool:
    """True where a function is called in other ways by the two sides: a look that costs little."""
    stems: list[set[str]] = []
    for dump in (target, bench):
        bare = pc.replace_substring_regex(dump.ops["name"], r"\.\d+\.(forward|backward)$", "")
        stems.append({stem for stem in pc.unique(bare).to_pylist() if stem.partition(".")[0] in API_PREFIXES})
    if stems[0] == stems[1]:
        return False
    functions = [{_function(stem) for stem in stems[i] - stems[1 - i]} for i in (0, 1)]
    everything = [{_function(stem) for stem in side} for side in stems]
    return bool((functions[0] & everything[1]) | (functions[1] & everything[0]))


def _function(stem: str) -> str:
    api = stem.partition(".")[2]
    return OPERATORS.get(api, api)


class _Side:
    """One side's ops with the names they are to be matched by, changed step by step."""

    def __init__(self, dump: RankDump) -> None:
        self.dump = dump
        self.texts: list[str] = dump.ops["name"].to_pylist()
        self.ops: list[OpName | None] = [_parsed(text) for text in self.texts]
        self.left_out: set[int] = set()
        # (position, role) -> {path's first part: the one to match by}, None: not to be matched.
        self.paths: dict[tuple[int, Role], dict[str, str | None]] = {}
        # Those of `paths` that say nothing of the items they do not name.
        self.kept: set[tuple[int, Role]] = set()
        self.parameters: Mapping[str, str] = {}
        self.primitives: Mapping[str, Primitive] = {}

    # -- recomputed calls

    def without_recomputed(self) -> int:
        """Leave recomputed calls out and number the others anew; how many ops were left out."""
        flags = self.dump.ops["recompute"].to_pylist()
        parents = self.dump.ops["parent"].to_pylist()
        numbers: Counter[str] = Counter()
        new: dict[tuple[str, int | None], int] = {}
        originals: dict[tuple[str, str], list[int]] = defaultdict(list)
        again: Counter[tuple[str, str]] = Counter()
        for place, op in enumerate(self.ops):
            if op is None or op.phase is not Phase.FORWARD:
                continue
            group = op.stem, _stem_of(parents[place])
            if flags[place]:
                # Backward of a recomputed call is that of the call it repeats.
                calls, number = originals[group], again[group]
                again[group] += 1
                if calls:
                    new[op.stem, op.call] = calls[number % len(calls)]
                self.left_out.add(place)
                continue
            new[op.stem, op.call] = numbers[op.stem]
            originals[group].append(numbers[op.stem])
            numbers[op.stem] += 1
        for place, op in enumerate(self.ops):
            if op is None or place in self.left_out:
                continue
            if op.phase is Phase.BACKWARD and flags[place] and (op.stem, op.call) not in new:
                self.left_out.add(place)
            elif op.phase in (Phase.FORWARD, Phase.BACKWARD) and (op.stem, op.call) in new:
                self.ops[place] = replace(op, call=new[op.stem, op.call])
        return len(self.left_out)

    # -- frameworks and mapping files

    def across_frameworks(self, is_mindspore: bool) -> None:
        """Modules without their class; MindSpore's names as PyTorch's."""
        for place, op in enumerate(self.ops):
            if op is None:
                continue
            if op.is_module:
                self.ops[place] = replace(op, prefix="Module", class_name="")
            elif is_mindspore and op.prefix in API_PREFIXES:
                prefix = MINT.get(op.prefix, op.prefix)
                name = op.name if op.prefix in MINT else MINDSPORE_APIS.get(op.name, op.name)
                self.ops[place] = replace(op, prefix=prefix, name=name)
        if is_mindspore:
            self._numbered_anew()
            self.parameters = MINDSPORE_PARAMETERS
            self.primitives = MINDSPORE_PRIMITIVES

    def _numbered_anew(self) -> None:
        """Where two APIs have become one (`concat` and `cat`), calls in the order in which they ran."""
        own: dict[str, set[str]] = defaultdict(set)
        for op, text in zip(self.ops, self.texts, strict=True):
            before = _parsed(text)
            if op is not None and before is not None and not op.is_module:
                own[op.stem].add(before.stem)
        numbers: Counter[str] = Counter()
        new: dict[tuple[str, int | None], int] = {}
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for place, (op, text) in enumerate(zip(self.ops, self.texts, strict=True)):
                before = _parsed(text)
                if op is None or before is None or op.phase is not phase or len(own[op.stem]) < 2:
                    continue
                key = before.stem, before.call
                if key not in new:
                    new[key] = numbers[op.stem]
                    numbers[op.stem] += 1
                self.ops[place] = replace(op, call=new[key])

    def function(self, op: OpName) -> str | None:
        """The function that an op calls, whichever way; None where it is none that has several ways."""
        if op.prefix in API_PREFIXES:
            return OPERATORS.get(op.name, op.name)
        primitive = self.primitive(op)
        return None if primitive is None else primitive.function

    def primitive(self, op: OpName) -> Primitive | None:
        """What a primitive's call is in PyTorch, where it is one function."""
        return self.primitives.get(op.name.rpartition(".")[2]) if op.prefix == "Primitive" else None

    def places_of(self, place: int, primitive: Primitive) -> None:
        """Note where the items of a primitive's call stand in the function's."""
        op = self.ops[place]
        if op is None:
            return
        role, places = Role.OUTPUT, primitive.gradients
        if op.phase is Phase.FORWARD:
            self.paths[place, Role.OUTPUT] = {"0": "0"}
            role, places = Role.INPUT, primitive.inputs
        if places:
            self.paths[place, role] = {str(here): there for here, there in enumerate(places)}

    def by_cell(self, mapping: Mapping[str, str]) -> None:
        if not mapping:
            return
        for place, (op, text) in enumerate(zip(self.ops, self.texts, strict=True)):
            own = _parsed(text)
            if op is None or own is None or not own.is_module:
                continue
            other = _mapped(f"{own.name}.{own.class_name}", mapping)
            if other is not None:
                name, _, kind = other.rpartition(".")
                self.ops[place] = replace(op, prefix="Module", name=name, class_name=kind if op.class_name else "")

    def by_layer(self, mapping: Mapping[str, Mapping[str, str]]) -> None:
        """Names inside modules, by the class of the module that holds them."""
        if not mapping:
            return
        kinds = self._classes()
        for place, op in enumerate(self.ops):
            if op is not None and op.is_module:
                self.ops[place] = replace(op, name=_by_layer(op.name, kinds, mapping))

    def _classes(self) -> dict[str, str]:
        """The class of each module, by its path."""
        own = (_parsed(text) for text in self.texts)
        return {op.name: op.class_name for op in own if op is not None and op.is_module and op.class_name}

    def names_by_class(self) -> dict[str, set[str]]:
        """What submodules are called inside modules of each class, and on top."""
        kinds = self._classes()
        inside: dict[str, set[str]] = {kind: set() for kind in (TOP_LAYER, *kinds.values())}
        for path in kinds:
            parts = path.split(".")
            for i, part in enumerate(parts):
                kind = TOP_LAYER if i == 0 else kinds.get(".".join(parts[:i]), "")
                inside.setdefault(kind, set()).add(part)
        return inside

    def by_api(self, pairs: Sequence[ApiPair], *, is_left: bool) -> None:
        known = {pair.left if is_left else pair.right: pair for pair in pairs}
        for place, (op, text) in enumerate(zip(self.ops, self.texts, strict=True)):
            own = _parsed(text)
            pair = known.get(own.stem) if own is not None and not own.is_module else None
            if op is None or pair is None:
                continue
            prefix, _, name = pair.right.partition(".")
            self.ops[place] = replace(op, prefix=prefix, name=name)
            for role, places in ((Role.INPUT, pair.inputs), (Role.OUTPUT, pair.outputs)):
                if places:
                    own_places = {a if is_left else b: b for a, b in places}
                    self.paths[place, role] = {str(a): str(b) for a, b in own_places.items()}
                    if op.phase is Phase.BACKWARD:
                        # msprobe reads places of inputs and outputs as those of a backward call's as well. What they
                        # leave out there keeps its place where it can: nobody meant to drop gradients.
                        self.kept.add((place, role))

    # -- names

    def names(self) -> Renamed:
        ops = tuple(
            None if place in self.left_out else _text(op, text)
            for place, (op, text) in enumerate(zip(self.ops, self.texts, strict=True))
        )
        op_of_item = self.dump.items["op"].to_numpy().tolist()
        texts = self.dump.items["name"].to_pylist()
        items: list[str | None] = []
        for text, place in zip(texts, op_of_item, strict=True):
            own, new = self.texts[place], ops[place]
            rest = text[len(own) :]
            if new is None:
                items.append(None)
            elif (new == own and not self.parameters and not self.paths) or not rest.startswith("."):
                items.append(new + rest)
            else:
                items.append(self._item(place, text, new, rest))
        return Renamed(pa.array(items, pa.string()), ops)

    def _item(self, place: int, text: str, op: str, rest: str) -> str | None:
        try:
            item = ItemName.parse(text)
        except ValueError:
            return op + rest
        head, dot, tail = item.path.partition(".")
        if item.role in (Role.PARAMETERS, Role.PARAMETERS_GRAD):
            return str(ItemName(op, item.role, self.parameters.get(head, head) + dot + tail))
        places = self.paths.get((place, item.role))
        if places is None:
            return op + rest
        other = places.get(head)
        if other is None and (place, item.role) in self.kept and head not in places.values():
            other = head
        return None if other is None else str(ItemName(op, item.role, other + dot + tail))


def _one_way_of_calling(target: _Side, bench: _Side) -> int:
    """Number calls of APIs that both sides call as often, but in other ways, in their order; how many APIs."""
    found = [_by_function(side) for side in (target, bench)]
    count = 0
    for function, calls in found[0].items():
        others = found[1].get(function)
        if others is None or len(others) != len(calls):
            continue
        spelled = [_stems(target, calls), _stems(bench, others)]
        if spelled[0] == spelled[1]:
            continue
        count += 1
        for side, places in ((target, calls), (bench, others)):
            side_numbers: dict[tuple[str, int | None], int] = {}
            for number, place in enumerate(places):
                op = side.ops[place]
                if op is not None:
                    side_numbers[op.stem, op.call] = number
            stems = {stem for stem, _ in side_numbers}
            for place, op in enumerate(side.ops):
                if op is not None and op.stem in stems and not op.is_module and (op.stem, op.call) in side_numbers:
                    number = side_numbers[op.stem, op.call]
                    if (primitive := side.primitive(op)) is not None:
                        side.places_of(place, primitive)
                    side.ops[place] = replace(op, prefix="Torch", name=function, call=number)
    return count


def _stems(side: _Side, places: Sequence[int]) -> list[str]:
    return [op.stem for place in places if (op := side.ops[place]) is not None]


def _by_function(side: _Side) -> dict[str, list[int]]:
    """Positions of forward calls by function, in the order in which they ran."""
    out: dict[str, list[int]] = defaultdict(list)
    for place, op in enumerate(side.ops):
        if op is None or op.is_module or op.phase is not Phase.FORWARD or place in side.left_out:
            continue
        function = side.function(op)
        if function is not None:
            out[function].append(place)
    return out


def _unknown(left: _Side, right: _Side, given: Mappings) -> list[str]:
    """Notes on names of cell, API and layer mappings that the dumps do not have."""
    modules: list[set[str]] = []
    apis: list[set[str]] = []
    for side in (left, right):
        own = [op for text in side.texts if (op := _parsed(text)) is not None]
        names = [f"{op.name}.{op.class_name}".split(".") for op in own if op.is_module]
        modules.append({".".join(parts[:cut]) for parts in names for cut in range(1, len(parts) + 1)})
        apis.append({op.stem for op in own if not op.is_module})
    notes = []
    for kind, known, pairs in (
        ("cell", modules, list(given.cell.items())),
        ("api", apis, [(pair.left, pair.right) for pair in given.api]),
    ):
        lost = [(name, known[i]) for pair in pairs for i, name in enumerate(pair) if name not in known[i]]
        if lost:
            name, there = lost[0]
            near = near_miss(name, sorted(there))
            notes.append(f"{kind} mapping: {len(lost)} names are not in the dump of their side, from '{name}'.{near}")
    return notes + _unknown_layers(left, right, given.layer)


def _unknown_layers(left: _Side, right: _Side, mapping: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A note on classes that neither dump has, and on names that no module of such a class has inside."""
    inside, other = left.names_by_class(), right.names_by_class()
    lost = []
    for kind, names in mapping.items():
        if kind in inside:
            lost += [(f"{kind}: {name}", sorted(inside[kind])) for name in names if name not in inside[kind]]
        elif kind not in other:
            lost.append((kind, sorted({*inside, *other})))
    if not lost:
        return []
    said, there = lost[0]
    return [
        f"layer mapping: the dumps lack {len(lost)} of the classes and names inside them, from '{said}'."
        f"{near_miss(said.rpartition(' ')[2], there)}"
    ]


def _mapped(module: str, mapping: Mapping[str, str]) -> str | None:
    """A module's name and class with the longest key that it begins with replaced; None where there is none."""
    parts = module.split(".")
    for cut in range(len(parts), 0, -1):
        other = mapping.get(".".join(parts[:cut]))
        if other is not None:
            return ".".join([other, *parts[cut:]])
    return None


def _by_layer(path: str, kinds: Mapping[str, str], mapping: Mapping[str, Mapping[str, str]]) -> str:
    out: list[str] = []
    parts = path.split(".")
    for i, part in enumerate(parts):
        kind = TOP_LAYER if i == 0 else kinds.get(".".join(parts[:i]), "")
        out.append(mapping.get(kind, {}).get(part, part))
    return ".".join(part for part in out if part)


def _parsed(text: str) -> OpName | None:
    try:
        return OpName.parse(text)
    except ValueError:
        return None


def _stem_of(parent: str | None) -> str:
    op = _parsed(parent) if parent else None
    return op.stem if op is not None else ""


def _text(op: OpName | None, text: str) -> str:
    return text if op is None else str(op)
