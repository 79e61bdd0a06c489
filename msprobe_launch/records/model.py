"""What a recorded call is made of, framework-neutral. These objects live on the hot path: slots, no validation.

    Value = TensorValue | PlainValue | list[Value] | dict[str, Value] | None

A CallRecord becomes one line of the journal (`records.codec.record_line`) and is then dropped.
"""

from __future__ import annotations

from typing import Any, Union

from msprobe_launch.records.light import Light
from msprobe_launch.records.names import NameTemplate

# (max, min, mean, L2 norm); None for a statistic that does not exist (empty tensor, mean of bools).
Statistics = tuple[Any, Any, Any, Any]
NO_STATISTICS: Statistics = (None, None, None, None)


class TensorValue(Light):
    """A tensor as it was when it was seen.

    `head` is the JSON text of type, dtype and shape; `statistics` is filled at once on the host and at the next flush
    for tensors on a device; `tail` is JSON text of further keys (placements).
    `requires_grad` is None for what can have no gradient (a numpy array). The object is shared by all records that
    saw the same unchanged tensor, so its text is made once. `saved` is the path of the file that holds its values.
    """

    head: str
    statistics: Statistics = NO_STATISTICS
    requires_grad: bool | None = False
    tail: str = ""
    text: str | None = None
    saved: str | None = None


class PlainValue(Light):
    """A value that is no tensor, as the JSON text of its record."""

    text: str


Value = Union[TensorValue, PlainValue, "list[Value]", "dict[str, Value]", None]


class Segment:
    """A stretch of recording whose call numbers start at 0.

    A step is one segment. Where it is not yet known whether a stretch belongs to the step before it (alternating
    optimizers, see `capture.steps`), it is recorded as a segment of its own; joining it shifts its numbers by
    `offsets`, which is why names are made when a record is written and not when it is seen.
    """

    __slots__ = ("counters", "offsets")

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.offsets: dict[str, int] = {}

    def next_number(self, counter: str) -> int:
        """The number of this call among those of one name; the first is 0."""
        number = self.counters.get(counter, 0)
        self.counters[counter] = number + 1
        return number

    def join(self, earlier: Segment) -> None:
        """Continue the numbers of `earlier`, whose last call came before this segment's first."""
        self.offsets = {
            name: earlier.counters.get(name, 0) + earlier.offsets.get(name, 0)
            for name in (*earlier.counters, *earlier.offsets)
        }


class OpRef(Light):
    """One call: a name template with its number. `text` gives the op's name in the files."""

    template: NameTemplate
    number: int
    segment: Segment
    backward: bool = False
    _twin: OpRef | None = None

    @property
    def text(self) -> str:
        template = self.template
        number = self.number + self.segment.offsets.get(template.counter, 0)
        head, tail = template.backward if self.backward else template.forward
        return f"{head}{number}{tail}"

    def as_backward(self) -> OpRef:
        """The same call in the other direction."""
        if self.backward:
            return self
        twin = self._twin
        if twin is None:
            twin = self._twin = OpRef(self.template, self.number, self.segment, True)
        return twin

    def as_forward(self) -> OpRef:
        """The call itself, also of its backward direction."""
        return OpRef(self.template, self.number, self.segment) if self.backward else self


class CallRecord(Light):
    """One direction of one call.

    Forward: `inputs` positional, `kwargs` keyword, `outputs`, and for modules `parameters`. Backward: `inputs` are the
    gradients that came in (of the outputs), `outputs` those that went out (of the inputs). Parameter gradients:
    only `parameters`, and `is_grad`. `parent` is the enclosing module's call, `stack` an index of `capture.stacks`.
    `saves` is set where values of some calls are saved, and this is one of them.
    """

    op: OpRef
    inputs: list[Value] | None
    kwargs: dict[str, Value] | None
    outputs: list[Value] | None
    parameters: dict[str, Value] | None = None
    parent: OpRef | None = None
    stack: int = -1
    recompute: bool = False
    is_grad: bool = False
    saves: bool = False
