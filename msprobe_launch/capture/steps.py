"""Where one step ends and the next begins, found without help from the script.

Events come from the adapter; the answer is only ever given at an outermost forward, so that whatever a script does
after its optimizer (logging, all-reducing a metric) still belongs to the step it follows.

AUTO:
1. An optimizer's step, or a gradient scaler's that skips it, marks the step as pending. The next outermost forward
   with gradients closes it. Accumulation thus stays one step, and N optimizers in a row count once.
2. Several optimizers that alternate with forwards between them (a GAN) make one step per cycle. The cycle is over
   when all live optimizers have stepped, or when one steps again: then the cut was before the forward that preceded
   that second step. Until it is known the stretch is *held*, and JOINed or SPLIT afterwards.
3. Where no optimizer was ever made, each outermost forward is a step.
4. Outermost forwards without gradients in a program that trains are evaluation and left out unless asked for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto

from msprobe_launch.config import StepOn


class Boundary(Enum):
    """What an outermost forward means for the stretch recorded so far."""

    NONE = auto()  # goes on
    CUT = auto()  # the open step ends here
    HOLD = auto()  # a stretch of its own begins here; JOIN or SPLIT follows
    JOIN = auto()  # the held stretch belonged to the open step
    SPLIT = auto()  # the open step ended where the held stretch began
    JOIN_CUT = auto()  # JOIN, then CUT
    JOIN_HOLD = auto()  # JOIN, then HOLD


@dataclass(frozen=True, slots=True)
class Decision:
    """Answer to an outermost forward: the boundary before it, and whether it is recorded."""

    boundary: Boundary
    record: bool


class StepTracker:
    """Pure state machine over the events of one rank. Keys of optimizers are any hashable identity."""

    def __init__(self, step_on: StepOn, *, evaluation: bool) -> None:
        self._step_on = step_on
        self._evaluation = evaluation
        self._live: set[Hashable] = set()
        self._ever_stepped = False
        self._trained = False
        self._begun = False
        self._stepped: list[Hashable] = []  # in the open step, before any held stretch, in order
        self._pending: list[Hashable] = []  # since the last outermost forward with gradients
        self._held = False
        self._closer: Hashable | None = None
        self._cycle: list[Hashable] = []  # who stepped, in order, in the last complete step

    @property
    def pending(self) -> bool:
        """True where an optimizer has stepped since the last training forward."""
        return bool(self._pending)

    @property
    def every_forward_counts(self) -> bool:
        """True where an outermost forward may end a step although no optimizer has stepped."""
        if self._step_on is StepOn.FORWARD:
            return True
        return self._step_on is StepOn.AUTO and not self._live and not self._ever_stepped

    @property
    def closed_cleanly(self) -> bool:
        """True where the program may end here without the open step being a part of one."""
        return not self._ever_stepped or self.pending

    def optimizer_made(self, key: Hashable) -> None:
        self._live.add(key)

    def optimizer_gone(self, key: Hashable) -> None:
        self._live.discard(key)
        if key == self._closer:
            self._closer = None

    def optimizer_stepped(self, key: Hashable) -> Boundary:
        """Mark the step pending. SPLIT where this ends the wait over a held stretch, else NONE."""
        self._ever_stepped = True
        self._live.add(key)
        repeats = key in self._stepped and key not in self._pending
        answer = Boundary.NONE
        if self._held and repeats:
            self._closer, self._cycle = self._stepped[-1], self._stepped
            self._stepped = []
            self._held = False
            answer = Boundary.SPLIT
        elif repeats and self._closer is not None and self._closer not in self._stepped:
            self._closer = key  # the cycle has changed
        if key not in self._pending:
            self._pending.append(key)
        return answer

    def outermost_forward(self, gradients: bool) -> Decision:
        """Decide at the start of an outermost forward, with or without gradients enabled."""
        if self._step_on is StepOn.MANUAL:
            return Decision(Boundary.NONE, True)
        if not gradients:
            return self._without_gradients()
        first, self._begun, self._trained = not self._begun, True, True
        if first:
            return Decision(Boundary.NONE, True)
        if self._step_on is StepOn.FORWARD:
            return Decision(Boundary.CUT, True)
        if self._step_on is StepOn.OPTIMIZER:
            return Decision(self._take_pending(Boundary.CUT), True)
        if not self._live and not self._ever_stepped:
            return Decision(Boundary.CUT, True)
        return Decision(self._auto() if self._pending else Boundary.NONE, True)

    def _without_gradients(self) -> Decision:
        training = self._trained or bool(self._live) or self._ever_stepped
        if training and not self._evaluation:
            return Decision(Boundary.NONE, False)
        first, self._begun = not self._begun, True
        cut = not first and (self._step_on is StepOn.FORWARD or not training)
        return Decision(Boundary.CUT if cut else Boundary.NONE, True)

    def _take_pending(self, boundary: Boundary) -> Boundary:
        if not self._pending:
            return Boundary.NONE
        self._pending = []
        return boundary

    def _auto(self) -> Boundary:
        stepped = self._stepped + [key for key in self._pending if key not in self._stepped]
        self._pending = []
        if self._closer is not None:
            complete = self._closer in stepped
        else:
            complete = self._live <= set(stepped)
            if complete:
                self._closer = stepped[-1]
        held, self._held = self._held, False
        if complete:
            self._stepped, self._cycle = [], stepped
            return Boundary.JOIN_CUT if held else Boundary.CUT
        self._stepped = stepped
        if self._closer is not None and stepped == self._cycle[: len(stepped)]:
            return Boundary.JOIN if held else Boundary.NONE  # the known cycle is under way
        self._held = True
        return Boundary.JOIN_HOLD if held else Boundary.HOLD
