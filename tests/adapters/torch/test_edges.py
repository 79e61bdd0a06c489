"""The compiled look at a call's graph says what the interpreted one says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from msprobe_launch import native  # noqa: E402
from msprobe_launch.adapters.torch import edges  # noqa: E402
from msprobe_launch.adapters.torch.backward import _is_whole  # noqa: E402

COMPILED = native.load_graph()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(COMPILED is None, reason="not compiled here: no header files of CPython"),
]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 3)), requires_grad=True)


def inner(*shape: int) -> torch.Tensor:
    return leaf(*shape) * 2


OUTSIDE = inner()


def twice(call: Callable[[Any], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    x = inner()
    return lambda a, _: call(a), (x, x)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two inputs": (torch.mul, (inner(), inner())),
    "a leaf": (torch.mul, (leaf(), inner())),
    "two leaves": (torch.add, (leaf(), leaf())),
    "a leaf twice": (lambda a, b: a * b, (w := leaf(), w)),
    "one input twice": (lambda a, b: a * b, (x := inner(), x)),
    "one of two uses it": twice(torch.exp),
    "no gradient beside": (torch.mul, (inner(), torch.ones(3, 3))),
    "a number beside": (torch.mul, (inner(), 2.0)),
    "a view": (lambda a: a.view(9), (inner(),)),
    "several nodes": (F.linear, (inner(2, 3, 3), leaf(3, 3), leaf(3))),
    "an input before its end": (lambda a: a * a.sin(), (inner(),)),
    "one of many outputs": (lambda a: a.chunk(3)[1], (inner(),)),
    "handed through": (lambda a: a, (inner(),)),
    "in place": (lambda a: a.mul_(2), (inner(),)),
    "a captured tensor": (lambda a: a * OUTSIDE, (inner(),)),
    "an output of several": (torch.mul, (inner(3, 3).chunk(3)[2], inner(1, 3))),
    "only a captured one": (lambda _: OUTSIDE * 2, (leaf(),)),
    "nested arguments": (torch.cat, ([inner(), leaf()],)),
    "seventy inputs": (lambda *values: torch.stack(values), tuple(inner() for _ in range(70))),
    "a block": (lambda a: sum(F.linear(a, OUTSIDE).relu().split(1)) + a.sin() * a, (inner(),)),
    "no gradient": (torch.mul, (torch.ones(2), torch.ones(2))),
}


@pytest.mark.parametrize("name", CALLS)
def test_whole_is_what_consumers_find(name: str) -> None:
    function, args = CALLS[name]
    inputs = edges.inputs_of(args, {})
    result = function(*args)
    sequence = inputs.sequence if inputs.sequence is not None else edges.next_sequence_number()
    said = COMPILED.whole(result, inputs.edges, sequence)
    places = edges.places_of(inputs.edges)
    node, number = edges.source_of(result)
    expected = None
    if node is not None and (id(node), number) not in places:
        nodes = {node: [(number, 0)]}
        found = edges._consumers(nodes, inputs.edges, sequence)
        assert COMPILED.consumers(nodes, inputs.edges, sequence) == found
        if len(found) == 1 and _is_whole(found[0], nodes):
            expected = (node, number, found[0][1])
    if name == "seventy inputs":
        assert expected is not None
        assert said is None, "more than 64 inputs are left to the general form"
        return
    assert said == expected


def test_whole_is_seen_and_left() -> None:
    def said(name: str) -> Any:
        function, args = CALLS[name]
        inputs = edges.inputs_of(args, {})
        return COMPILED.whole(function(*args), inputs.edges, inputs.sequence)

    assert said("two inputs")[1:] == (0, [(0, 0), (1, 1)])
    assert said("one of many outputs")[1:] == (1, [(0, 0)])
    assert said("one input twice") is None
    assert said("several nodes") is None


@dataclass
class Held:
    tensor: Any


class Own(torch.Tensor):
    pass


def test_edges_are_what_the_general_form_collects() -> None:
    circle: list[Any] = [leaf()]
    circle.append(circle)
    own = leaf().as_subclass(Own)
    values = [
        *(leaf(), inner(), torch.ones(2), torch.nn.Parameter(torch.ones(2)), own, own * 2),
        *(1, 2.0, None, True, "text", torch.float32, torch.device("cpu"), object()),
        *([inner(), (leaf(), 3)], {"a": leaf(), "b": [inner()]}, Held(inner()), Held, circle),
    ]
    collected: list[Any] = []
    edges._collect_edges(values, collected)
    quick: list[Any] = []
    edges._add_edges(tuple(values), quick)
    assert len(quick) == len(collected) > 12
    for one, other in zip(quick, collected, strict=True):
        assert one is other is None or (one[0] is other[0] and one[1] == other[1])
    again: list[Any] = []
    edges._add_edges({"a": values[1]}.values(), again)
    assert again[0][0] is values[1].grad_fn


def test_what_is_no_tensor_is_an_error() -> None:
    with pytest.raises(AttributeError):
        COMPILED.whole(3, [], 0)
    with pytest.raises(TypeError):
        COMPILED.whole(leaf(), (), 0)
    with pytest.raises(AttributeError):
        COMPILED.consumers({3: None}, [], 0)
    with pytest.raises(TypeError):
        COMPILED.Edges([], (), None)
