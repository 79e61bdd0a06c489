"""Backward records without touching the graph: hooks on MindSpore's autograd nodes.

The cell's own hook primitive puts identity operations around arguments and results. They regroup the sums of
gradients of what is used twice (other bits), keep views and in-place operations from working, and break the call that
opens the graph, which is known by the identities of its arguments. Here a call is watched from outside: walking back
from the nodes of its outputs, inside the call only, to those that consume an input, a hook after each node sees the
gradients that come in and go out. The contributions of several consumers are added out of place, in arrival order.

A node's Python object is made anew each time it is asked for; `_unique_id` tells nodes apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msprobe_launch.adapters.mindspore.quiet import Switch
from msprobe_launch.adapters.mindspore.runtime import Tensor, add_gradients
from msprobe_launch.capture.plain import MAX_DEPTH, collect
from msprobe_launch.records.model import CallRecord, OpRef, Value

if TYPE_CHECKING:
    from msprobe_launch.adapters.mindspore.values import MindSporeValues
    from msprobe_launch.capture.session import Session

Key = tuple[int, int]  # (node, which of its outputs)

_LEAF = (1 << 64) - 1  # sequence number of leaves
_KNOWN_NODES = 16  # nodes whose one hook is shared with the calls around: they return what the innermost returned


class Inputs:
    """The tensors that went into a call, as the graph knew them: a key each, None for one without a gradient.

    `sequence` is a number that no node of the call can have: they are younger. `nodes` keeps the inputs' nodes alive as
    long as they are compared by number.
    """

    __slots__ = ("edges", "nodes", "sequence")

    def __init__(self, sequence: int) -> None:
        self.edges: list[Key | None] = []
        self.nodes: list[Any] = []
        self.sequence = sequence

    def collect(self, values: Sequence[Any], keywords: dict[str, Any]) -> Inputs:
        """Note all tensors in a call's arguments, in order. Before the call: in-place operations change them."""
        _collect_edges(values, self, 0)
        if keywords:
            _collect_edges(keywords.values(), self, 0)
        return self


def _collect_edges(values: Any, found: Inputs, depth: int) -> None:
    for value in values:
        if isinstance(value, Tensor):
            node = value._grad_node
            if node is None or not (value.is_floating_point() or value.is_complex()):
                found.edges.append(None)  # no gradient comes for integers, and their nodes never run
            else:
                found.edges.append((node._unique_id(), value._output_index))
                found.nodes.append(node)
                sequence = node._sequence_nr()
                if found.sequence < sequence < _LEAF:
                    found.sequence = sequence
        elif depth >= MAX_DEPTH:
            continue  # a container that holds itself must end somewhere
        elif isinstance(value, (list, tuple)):
            _collect_edges(value, found, depth + 1)
        elif isinstance(value, dict):
            _collect_edges(value.values(), found, depth + 1)


class OpenBackward:
    """A backward record that still waits for gradients."""

    __slots__ = ("awaited", "done", "incoming", "missing", "op", "outgoing", "parent", "sequence", "sums", "waiting")

    def __init__(self, op: OpRef, parent: OpRef | None, outputs: int, inputs: int, sequence: int) -> None:
        self.op = op
        self.sequence = sequence  # nodes up to this number are older than the call
        self.parent = parent
        self.incoming: list[Value] = [None] * outputs
        self.outgoing: list[Value] = [None] * inputs
        self.missing = [0] * inputs  # contributions still to come, by input
        self.sums: dict[int, Any] = {}  # of inputs of which some have come
        self.awaited = 0  # nodes still to run
        self.waiting = False  # has begun and is on the list of open ones
        self.done = False


class _Part:
    """What one node's run means to one call: gradients of its outputs at `places`, of its inputs at `hits`."""

    __slots__ = ("hits", "places", "state")

    def __init__(self, state: OpenBackward, places: list[tuple[int, int]], hits: list[tuple[int, int]]) -> None:
        self.state = state
        self.places = places
        self.hits = hits


class NodeHook:
    """The one hook of a node, for all calls that watch it. `node` is kept only while more may come to watch it."""

    __slots__ = ("node", "number", "parts", "watch")

    def __init__(self, watch: BackwardWatch, node: Any) -> None:
        self.watch = watch
        self.node: Any | None = node
        self.number = node._sequence_nr()
        self.parts: list[_Part] = []

    def __call__(self, outgoing: Any, incoming: Any) -> None:
        self.watch.see(self.parts, outgoing, incoming, self.number)


def _consumers(
    nodes: dict[int, Any], edges: dict[Key, int], sequence: int
) -> dict[int, tuple[Any, list[tuple[int, int]]]]:
    """Nodes of the call that consume one of its inputs, with (gradient slot, input index) each.

    `nodes` are those of the outputs; nodes up to number `sequence` are older than the call.
    """
    todo, seen = list(nodes.values()), set(nodes)
    found: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
    while todo:
        node = todo.pop()
        hits = []
        slot = -1
        for following, number in node.next_functions:
            slot += 1
            if following is None:
                continue
            key = following._unique_id()
            index = edges.get((key, number))
            if index is not None:
                hits.append((slot, index))
            elif key not in seen:
                seen.add(key)
                if sequence < following._sequence_nr() < _LEAF:
                    todo.append(following)
        if hits:
            found[node._unique_id()] = (node, hits)
    return found


class BackwardWatch:
    """Watches calls for their gradients and emits their backward records when they are complete."""

    def __init__(self, session: Session, values: MindSporeValues, switch: Switch) -> None:
        self._session = session
        self._values = values
        self._switch = switch
        self._open: dict[int, OpenBackward] = {}
        self._known: OrderedDict[int, NodeHook] = OrderedDict()
        self._youngest = -1  # the largest node number seen
        gate = session.gate
        self._names_only = not gate.inputs and not gate.outputs

    def inputs(self) -> Inputs:
        """For a call that begins now."""
        return Inputs(self._youngest)

    def watch(self, op: OpRef, parent: OpRef | None, inputs: Inputs, result: Any) -> None:
        """Arrange for the backward record of a call that has just returned `result`."""
        outputs: list[Any] = []
        collect(result, Tensor, outputs)
        edges: dict[Key, int] = {}
        for index, edge in enumerate(inputs.edges):
            if edge is not None:
                edges.setdefault(edge, index)
        nodes: dict[int, Any] = {}
        places: dict[int, list[tuple[int, int]]] = {}
        for index, tensor in enumerate(outputs):
            node = tensor._grad_node
            if node is None:
                continue
            key, number, sequence = node._unique_id(), tensor._output_index, node._sequence_nr()
            # An output that is an input handed through has the graph of whatever made that input.
            if (key, number) in edges or sequence == _LEAF:
                continue
            nodes[key] = node
            places.setdefault(key, []).append((number, index))
            if sequence > self._youngest:
                self._youngest = sequence
        if not nodes:
            return
        within = parent.as_backward() if parent is not None else None
        state = OpenBackward(op.as_backward(), within, len(outputs), len(inputs.edges), inputs.sequence)
        consumers = _consumers(nodes, edges, inputs.sequence) if edges else {}
        for key, (node, hits) in consumers.items():
            for _, index in hits:
                state.missing[index] += 1
            self._add_part(key, node, _Part(state, places.pop(key, []), hits))
        for key, remaining in places.items():
            self._add_part(key, nodes[key], _Part(state, remaining, []))

    def _add_part(self, key: int, node: Any, part: _Part) -> None:
        part.state.awaited += 1
        hook = self._known.get(key)
        if hook is None:
            hook = self._known[key] = NodeHook(self, node)
            node.register_hook(hook)
            if len(self._known) > _KNOWN_NODES:
                self._known.popitem(last=False)[1].node = None
        hook.parts.append(part)

    def forget_nodes(self) -> None:
        """Let go of nodes: the graph belongs to the program, and so does its memory."""
        for hook in self._known.values():
            hook.node = None
        self._known.clear()

    def see(self, parts: list[_Part], outgoing: Any, incoming: Any, number: int) -> None:
        """A node has run: `incoming` are gradients of its outputs, `outgoing` of its inputs."""
        session = self._session
        if not session.recording:
            return
        described: dict[int, Value] = {}
        self._switch.enter_quiet()
        try:
            if self._open:
                self._give_up(number)
            # The innermost call is the first one that watched.
            for part in parts:
                self._see_part(part, outgoing, incoming, described)
        except Exception as error:  # noqa: BLE001 - a guest
            session.guard.lose("backward", error)
        finally:
            self._switch.leave_quiet()
        self._values.raise_theirs()

    def _see_part(self, part: _Part, outgoing: Any, incoming: Any, described: dict[int, Value]) -> None:
        session, state = self._session, part.state
        if state.done:
            session.guard.miss("gradient of a repeated backward over the same graph")
            return
        gate = session.gate
        if not gate.open:
            session.attend(state.op)
            described = {}  # what is saved of one call need not be of another
        state.awaited -= 1
        if not state.waiting and state.awaited > 0:
            state.waiting = True
            self._open[id(state)] = state
        if gate.inputs:
            for number, index in part.places:
                gradient = incoming[number] if number < len(incoming) else None
                if gradient is not None:
                    state.incoming[index] = self._describe(gradient, described)
        if gate.outputs:
            for slot, index in part.hits:
                self._add(state, index, outgoing[slot] if slot < len(outgoing) else None, described)
        if state.awaited <= 0:
            if state.waiting:
                self._open.pop(id(state), None)
            self._emit(state)

    def _describe(self, gradient: Any, described: dict[int, Value]) -> Value:
        known = described.get(id(gradient))
        if known is None:
            known = described[id(gradient)] = self._values.describe(gradient)
        return known

    def _add(self, state: OpenBackward, index: int, gradient: Any, described: dict[int, Value]) -> None:
        state.missing[index] -= 1
        so_far = state.sums.pop(index, None)
        if so_far is not None:
            gradient = so_far if gradient is None else add_gradients(so_far, gradient)
        if gradient is None:
            return
        if state.missing[index] <= 0:
            state.outgoing[index] = self._describe(gradient, described)
        else:
            state.sums[index] = gradient

    def _emit(self, state: OpenBackward) -> None:
        state.done = True
        if self._names_only:
            self._session.emit(CallRecord(state.op, None, None, None, None, state.parent))
        else:
            self._session.emit(CallRecord(state.op, state.incoming, None, state.outgoing, None, state.parent))

    def close(self) -> None:
        """Emit what has begun and will not be completed: an input whose gradient nobody asked for."""
        self.forget_nodes()
        self._give_up(-1)

    def _give_up(self, number: int) -> None:
        """Emit open calls all of whose nodes are younger than the one that runs: the youngest node runs first."""
        for state in reversed([state for state in self._open.values() if state.sequence >= number]):
            del self._open[id(state)]
            for index, total in state.sums.items():
                state.outgoing[index] = self._values.describe(total)
            state.sums = {}
            self._emit(state)
