"""What a call is to autograd: the edges that went in, and the nodes of the call that consume them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn import Parameter

from msprobe_launch import native
from msprobe_launch.capture.plain import MAX_DEPTH, collect, fields_of
from msprobe_launch.records.light import Light

Edge = tuple[Any, int]  # (autograd node or leaf tensor, output number)

next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr
# Most arguments that are no tensors are of these types, and need not be asked what they might hold.
_HOLDS_NONE = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
LEAF_SEQUENCE = 1 << 62  # AccumulateGrad nodes carry the largest number there is


class Inputs(Light):
    """The tensors that went into a call, as the graph knew them before it.

    `edges` has an entry per tensor, None for those without a gradient; `sequence` is the next autograd node's number,
    None where no input has a gradient.
    """

    edges: list[Edge | None]
    sequence: int | None = None


def places_of(edges: Sequence[Edge | None]) -> dict[tuple[int, int], int]:
    """Edge by identity -> index; of a tensor that went in twice the first."""
    found: dict[tuple[int, int], int] = {}
    for index, edge in enumerate(edges):
        if edge is not None:
            found.setdefault((id(edge[0]), edge[1]), index)
    return found


def inputs_of(values: Sequence[Any], keywords: dict[str, Any]) -> Inputs:
    """Edges of all tensors in a call's arguments, in order.

    Must run before the call: an in-place operation gives its input another node.
    """
    edges: list[Edge | None] = []
    _add_edges(values, edges)
    if keywords:
        _add_edges(keywords.values(), edges)
    return Inputs(edges, next_sequence_number() if any(edges) else None)


def _collect_edges(values: Any, edges: list[Edge | None], depth: int = 0) -> None:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.requires_grad:
                node = value.grad_fn
                edges.append((value, 0) if node is None else (node, value.output_nr))
            else:
                edges.append(None)
        elif kind in _HOLDS_NONE:
            continue
        elif isinstance(value, Tensor):
            edges.append(_edge_of_subclass(value))
        elif depth >= MAX_DEPTH:
            continue  # a container that holds itself must end somewhere
        elif isinstance(value, (list, tuple)):
            _collect_edges(value, edges, depth + 1)
        elif isinstance(value, dict):
            _collect_edges(value.values(), edges, depth + 1)
        elif is_dataclass(value) and not isinstance(value, type):
            _collect_edges(fields_of(value), edges, depth + 1)


def _edge_of_subclass(tensor: Tensor) -> Edge | None:
    """Its own __torch_function__ must not hear of us."""
    with DisableTorchFunction():
        if not tensor.requires_grad:
            return None
        node = tensor.grad_fn
        return (tensor, 0) if node is None else (node, tensor.output_nr)


def source_of(tensor: Tensor) -> tuple[Any, int]:
    """The node that made an output, and which of its outputs it is."""
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return tensor.grad_fn, tensor.output_nr
    with DisableTorchFunction():
        return tensor.grad_fn, tensor.output_nr


def _whole(_result: Tensor, _edges: list[Edge | None], _sequence: int) -> tuple[Any, int, list[tuple[int, int]]] | None:
    """(node, output number, [(gradient slot, input index)]) of a call's one output, a plain tensor.

    Only where its node consumes all inputs, each once, and None where that is not sure: here it is not looked at, and
    `consumers` finds the same.
    """
    return None


def _consumers(
    nodes: dict[Any, Any], edges: list[Edge | None], sequence: int
) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Nodes made by the call that consume one of its inputs, with (gradient slot, input index) each.

    `nodes` are those of the outputs, `edges` the inputs, `sequence` the number of the call's first node.
    """
    places = places_of(edges)
    todo = list(nodes)
    seen = None
    found = []
    while todo:
        node = todo.pop()
        hits: list[tuple[int, int]] = []
        slot = -1
        for following, number in node.next_functions:
            slot += 1
            if following is None:
                continue
            index = places.get((id(following), number))
            if index is None:
                order = following._sequence_nr()
                if order < sequence and order >= 0:
                    continue  # older than the call
                if order < 0 or order > LEAF_SEQUENCE:
                    leaf = getattr(following, "variable", None)
                    index = places.get((id(leaf), 0)) if leaf is not None else None
                    if index is None:
                        continue
                else:
                    if seen is None:
                        seen = set(nodes)
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)
                    continue
            hits.append((slot, index))
        if hits:
            found.append((node, hits))
    return found


_graph = native.load_graph()
_add_edges = _graph.Edges(frozenset({Tensor, Parameter}), _HOLDS_NONE, _collect_edges) if _graph else _collect_edges
whole = _graph.whole if _graph else _whole
consumers = _graph.consumers if _graph else _consumers


def made_since(sequence: int, result: Any) -> Any:
    """The node of the first tensor in a call's result that was made in the call, or None."""
    outputs: list[Tensor] = []
    if type(result) is Tensor:
        outputs.append(result)
    else:
        collect(result, Tensor, outputs)
    for tensor in outputs:
        node, _ = source_of(tensor)
        if node is not None and sequence <= node._sequence_nr() < LEAF_SEQUENCE:
            return node
    return None
