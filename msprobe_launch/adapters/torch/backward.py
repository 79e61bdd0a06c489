"""Backward records without touching the graph: hooks on autograd nodes.

Module full-backward hooks insert identity nodes, which regroup the sums of gradients (other bits) and break in-place
operations. Here a call is watched from outside: a pre-hook on the node of each output sees the gradient that comes in;
walking back from there, inside the call only, to the nodes that consume an input, post-hooks see what goes out. The
contributions of several consumers are added out of place, in arrival order.

Source of the method and of its equality with full-backward hooks: docs/capture.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from msprobe_launch.adapters.torch.edges import (
    Edge,
    Inputs,
    consumers,
    made_since,
    next_sequence_number,
    places_of,
    source_of,
    whole,
)
from msprobe_launch.adapters.torch.quiet import Quiet
from msprobe_launch.capture.plain import collect
from msprobe_launch.records.light import Light
from msprobe_launch.records.model import CallRecord, OpRef, Value

if TYPE_CHECKING:
    from msprobe_launch.adapters.torch.values import TorchValues
    from msprobe_launch.capture.session import Session

function_modes: Callable[[], int] = torch._C._len_torch_function_stack

Enclosing = tuple[OpRef, "OpRef | None", "list[int | None]"]
"""A call of which another one, inside it, is all there is to differentiate (a module around its one API), with the
places of its inputs among the other's: it gets the same gradients. (call, its parent, places)"""


class OneNode(Light):
    """The backward of a call with one output, whose node consumes the inputs too: most calls. Hook and state in one.

    `number` is which of the node's outputs the call returned, `hits` are (gradient slot, input index), each input once;
    all that is recorded comes at one time.
    """

    watch: BackwardWatch
    op: OpRef
    parent: OpRef | None
    number: int
    hits: list[tuple[int, int]]
    inputs: int
    enclosing: list[Enclosing] | None = None
    done: bool = False

    def __call__(self, outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        self.watch.see_one(self, outgoing, incoming)


class OpenBackward(Light):
    """A backward record that still waits for gradients, of any call; `op` and `parent` are the call's own.

    `incoming` and `outgoing` have a place for each output and input; `missing` counts the contributions to come by
    input, `sums` holds those of which some have come; `awaited` counts the hooks still to fire. It is `waiting` once it
    has begun and is on the list of open ones.
    """

    op: OpRef
    parent: OpRef | None
    incoming: list[Value]
    outgoing: list[Value]
    missing: list[int]
    sums: dict[int, Tensor] | None = None
    enclosing: list[Enclosing] | None = None
    awaited: int = 0
    waiting: bool = False
    done: bool = False


class _Latest:
    """The call watched last, where it returned one tensor: the one whose call encloses it may be found equal.

    Nothing is kept alive: objects and nodes are known by their numbers.
    """

    __slots__ = ("after", "before", "edges", "node", "number", "result", "state")

    def __init__(self, state: OpenBackward | OneNode, inputs: Inputs | None, result: Tensor) -> None:
        self.state = state
        self.edges = places_of(inputs.edges) if inputs is not None else {}
        self.before = inputs.sequence if inputs is not None else None
        self.after = next_sequence_number()
        self.result = id(result)
        node, self.number = source_of(result)
        self.node = node._sequence_nr()


class NodeHook(Light):
    """After a node has run: its inputs' gradients are outputs of the call, and where it made an output, vice versa.

    An object and not a closure: this is made for every recorded call, and a closure is six objects.
    """

    watch: BackwardWatch
    state: OpenBackward
    hits: list[tuple[int, int]]
    places: list[tuple[int, int]] | None

    def __call__(self, outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        self.watch.see(self.state, outgoing, self.hits, incoming, self.places)


class NodePreHook(Light):
    """Before a node runs that made an output of the call: the gradients that come in."""

    watch: BackwardWatch
    state: OpenBackward
    places: list[tuple[int, int]]

    def __call__(self, incoming: tuple[Tensor | None, ...]) -> None:
        self.watch.see(self.state, None, None, incoming, self.places)


class NameHook:
    """Task structure: backward has come by, which is all there is to record of the calls that end in this node."""

    __slots__ = ("calls", "number", "session")

    def __init__(self, session: Session, number: int, op: OpRef, parent: OpRef | None) -> None:
        self.session = session
        self.number = number
        self.calls = [(op, parent)]

    def __call__(self, _: Any) -> None:
        session = self.session
        if not session.recording:
            return
        calls, self.calls = self.calls, []  # a second backward over the graph tells nothing new
        try:
            for op, parent in calls:
                within = parent.as_backward() if parent is not None else None
                session.emit(CallRecord(op.as_backward(), None, None, None, None, within))
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("backward", error)


def _is_whole(found: tuple[Any, list[tuple[int, int]]], nodes: dict[Any, Any]) -> bool:
    """True where the only node that consumes inputs also made the output, and each input goes in once.

    A tensor in two places gets the sum of two gradients.
    """
    node, hits = found
    return node in nodes and (len(hits) == 1 or len({index for _, index in hits}) == len(hits))


def _hold(edges: list[Edge | None], node: Any, number: int) -> bool:
    return any(edge is not None and edge[0] is node and edge[1] == number for edge in edges)


class BackwardWatch:
    """Watches calls for their gradients and emits their backward records when they are complete."""

    def __init__(self, session: Session, values: TorchValues, quiet: Quiet) -> None:
        self._session = session
        self._values = values
        self._quiet = quiet
        self._open: dict[int, OpenBackward] = {}
        self._latest: _Latest | None = None
        self._named: NameHook | None = None
        self.take_values()

    def take_values(self) -> None:
        """How a plain gradient is described, looked up once."""
        self._tensor = self._values.describe.by_type[Tensor]

    def watch(self, op: OpRef, parent: OpRef | None, inputs: Inputs | None, result: Any) -> None:
        """Arrange for the backward record of a call that has just returned `result`."""
        outputs: list[Tensor] = []
        plain = type(result) is Tensor
        if plain:
            outputs.append(result)
        else:
            collect(result, Tensor, outputs)
        single = outputs[0] if len(outputs) == 1 else None
        if single is not None and self._encloses_latest(op, parent, inputs, single):
            return
        found = None
        if plain and inputs is not None and inputs.sequence is not None:
            found = whole(result, inputs.edges, inputs.sequence)
        state: OneNode | OpenBackward | None
        if found is not None and inputs is not None:
            node, number, hits = found
            state = OneNode(self, op, parent, number, hits, len(inputs.edges))
            node.register_hook(state)
        else:
            state = self._watch_any(op, parent, inputs, outputs)
        if state is not None and single is not None:
            # Only a module's call is found around another one.
            self._latest = _Latest(state, inputs, single) if self._session.takes_modules else None

    def _watch_any(
        self, op: OpRef, parent: OpRef | None, inputs: Inputs | None, outputs: list[Tensor]
    ) -> OneNode | OpenBackward | None:
        """Watch a call of whatever form; None where it has made nothing to be watched."""
        edges = inputs.edges if inputs is not None else []
        nodes: dict[Any, list[tuple[int, int]]] = {}
        for index, tensor in enumerate(outputs):
            node, number = source_of(tensor)
            # An output that is an input handed through has the graph of whatever made that input.
            if node is not None and not _hold(edges, node, number):
                nodes.setdefault(node, []).append((number, index))
        if not nodes:
            return None
        found: list[tuple[Any, list[tuple[int, int]]]] = []
        if inputs is not None and inputs.sequence is not None:
            found = consumers(nodes, edges, inputs.sequence)
        count = len(edges)
        if len(outputs) == 1 and len(found) == 1 and _is_whole(found[0], nodes):
            node, hits = found[0]
            one = OneNode(self, op, parent, nodes[node][0][0], hits, count)
            node.register_hook(one)
            return one
        state = OpenBackward(op, parent, [None] * len(outputs), [None] * count, [0] * count)
        self._hook(state, nodes, found)
        return state

    def _hook(
        self,
        state: OpenBackward,
        nodes: dict[Any, list[tuple[int, int]]],
        found: list[tuple[Any, list[tuple[int, int]]]],
    ) -> None:
        """Hooks on the nodes of a call's outputs, and on those that consume its inputs; one where they are the same."""
        for node, hits in found:
            for _, index in hits:
                state.missing[index] += 1
            state.awaited += 1
            node.register_hook(NodeHook(self, state, hits, nodes.pop(node, None)))
        for node, places in nodes.items():
            state.awaited += 1
            node.register_prehook(NodePreHook(self, state, places))

    def _encloses_latest(self, op: OpRef, parent: OpRef | None, inputs: Inputs | None, result: Tensor) -> bool:
        """True where a call has added nothing to the graph but what the call inside it has, which is watched.

        Both return one tensor, and no node was made in between, before or after: nothing else inside can consume an
        input of the outer call.
        """
        latest = self._latest
        if latest is None or id(result) != latest.result or latest.after != next_sequence_number():
            return False
        if not self._session.gate.open:
            return False
        node, number = source_of(result)
        if node is None or number != latest.number or node._sequence_nr() != latest.node:
            return False
        places: list[int | None] = []
        if inputs is not None and inputs.sequence is not None:
            if inputs.sequence != latest.before:
                return False
            used = set()
            for edge in inputs.edges:
                place = None
                if edge is not None:
                    place = latest.edges.get((id(edge[0]), edge[1]))
                    if place is None:
                        return False  # not consumed inside, or in a way that we have not seen
                    if place in used:
                        place = None  # the same tensor twice: its gradient is the first one's
                    else:
                        used.add(place)
                places.append(place)
        elif inputs is not None:
            places = [None] * len(inputs.edges)
        if latest.state.enclosing is None:
            latest.state.enclosing = []
        latest.state.enclosing.append((op, parent, places))
        return True

    def watch_name(self, op: OpRef, parent: OpRef | None, sequence: int, result: Any) -> None:
        """Task structure: that backward comes by is all there is to record, and one hook on one node tells.

        `sequence` is the number that the call's first node has got if it made any. Nothing may be switched off before.
        """
        quiet = bool(function_modes())
        if quiet:
            self._quiet.enter()
        try:
            node = made_since(sequence, result)
        finally:
            if quiet:
                self._quiet.leave()
        if node is None:
            return
        number = node._sequence_nr()
        last = self._named
        # A module around its one API ends in the same node: one hook tells of both.
        if last is not None and last.number == number and last.calls:
            last.calls.append((op, parent))
            return
        self._named = hook = NameHook(self._session, number, op, parent)
        node.register_prehook(hook)

    def see_one(self, state: OneNode, outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        """The node of a call has run: `incoming` are gradients of its outputs, `outgoing` of its inputs."""
        session = self._session
        if not session.recording:
            return
        try:
            if state.done:
                session.guard.miss("gradient of a repeated backward over the same graph")
                return
            state.done = True
            gate = session.gate
            if not gate.open:
                session.attend(state.op)
            came: Value = None
            went: list[Value] = [None] * state.inputs
            self._quiet.enter()
            try:
                gradient = incoming[state.number]
                if gradient is not None and gate.inputs:
                    came = self._describe(gradient)
                if gate.outputs:
                    for slot, index in state.hits:
                        gradient = outgoing[slot] if slot < len(outgoing) else None
                        if gradient is not None:
                            went[index] = self._describe(gradient)
            finally:
                self._quiet.leave()
            self._emit(state, [came], went)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("backward", error)

    def see(
        self,
        state: OpenBackward,
        outgoing: tuple[Tensor | None, ...] | None,
        hits: list[tuple[int, int]] | None,
        incoming: tuple[Tensor | None, ...],
        places: list[tuple[int, int]] | None,
    ) -> None:
        """A node has run: `incoming` are gradients of its outputs, `outgoing` of its inputs."""
        session = self._session
        if not session.recording:
            return
        try:
            if state.done:
                session.guard.miss("gradient of a repeated backward over the same graph")
                return
            gate = session.gate
            if not gate.open:
                session.attend(state.op)
            state.awaited -= 1
            if not state.waiting and state.awaited > 0:
                state.waiting = True
                self._open[id(state)] = state
            self._quiet.enter()
            try:
                if places is not None and gate.inputs:
                    for number, index in places:
                        gradient = incoming[number]
                        if gradient is not None:
                            state.incoming[index] = self._describe(gradient)
                if hits is not None and outgoing is not None and gate.outputs:
                    self._add(state, outgoing, hits)
            finally:
                self._quiet.leave()
            if state.awaited <= 0:
                if state.waiting:
                    self._open.pop(id(state), None)
                state.done = True
                self._emit(state, state.incoming, state.outgoing)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("backward", error)

    def _add(self, state: OpenBackward, outgoing: tuple[Tensor | None, ...], hits: list[tuple[int, int]]) -> None:
        missing = state.missing
        for slot, index in hits:
            total = outgoing[slot] if slot < len(outgoing) else None
            missing[index] -= 1
            sums = state.sums
            if sums is not None and (so_far := sums.pop(index, None)) is not None:
                # Out of place: the engine's buffers are its own.
                with DisableTorchFunction():
                    total = so_far if total is None else so_far + total
            if total is None:
                continue
            if missing[index] <= 0:
                state.outgoing[index] = self._describe(total)
            elif sums is None:
                state.sums = {index: total}
            else:
                sums[index] = total

    def _describe(self, gradient: Any) -> Value:
        return self._tensor(gradient) if type(gradient) is Tensor else self._values.describe(gradient)

    def _emit(self, state: OpenBackward | OneNode, incoming: list[Value], outgoing: list[Value]) -> None:
        emit = self._session.emit
        parent = state.parent
        within = parent.as_backward() if parent is not None else None
        emit(CallRecord(state.op.as_backward(), incoming, None, outgoing, None, within))
        for op, parent, places in state.enclosing or ():
            given = [None if place is None else outgoing[place] for place in places]
            within = parent.as_backward() if parent is not None else None
            emit(CallRecord(op.as_backward(), incoming, None, given, None, within))

    def close(self) -> None:
        """Emit what has begun and will not be completed: an input whose gradient nobody asked for."""
        waiting, self._open = list(self._open.values()), {}
        for state in waiting:
            self._quiet.enter()
            try:
                for index, total in (state.sums or {}).items():
                    state.outgoing[index] = self._describe(total)
                state.sums = None
            finally:
                self._quiet.leave()
            state.done = True
            self._emit(state, state.incoming, state.outgoing)
