"""The Session: one object per rank that owns all recording state.

Adapters report what they see; the session decides what it means (steps, filters, parents, numbers) and hands records
to the writer. The attributes that adapters read on every call are plain: `listening`, `recording`, `in_backward`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Hashable
from datetime import datetime
from types import FrameType

from msprobe_launch.adapters.base import FrameworkAdapter
from msprobe_launch.capture.gate import Gate
from msprobe_launch.capture.guard import Guard
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.capture.stacks import ROOT
from msprobe_launch.capture.steps import Boundary, StepTracker
from msprobe_launch.capture.writer import Writer
from msprobe_launch.config import ProbeConfig
from msprobe_launch.records import roster
from msprobe_launch.records.codec import format_tensors
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.model import CallRecord, OpRef, Segment
from msprobe_launch.records.names import NameTemplate

MARK_INTERVAL = 1.0  # seconds between updates of the roster mark; a tiny step must not pay a rename each time


class ModuleCall:
    """A module call in progress: the parent of what runs inside, and the base of their stacks.

    `op` is None for a module that is no op of its own (the outermost one, where it only holds others).
    """

    __slots__ = ("frame", "op", "stack")

    def __init__(self, op: OpRef | None, frame: FrameType | None, stack: int) -> None:
        self.op = op
        self.frame = frame
        self.stack = stack


class Session:
    """Recording of one rank, from the framework's import to the end of the process."""

    def __init__(self, config: ProbeConfig, identity: RankIdentity, adapter: FrameworkAdapter) -> None:
        self.config = config
        self.identity = identity
        self.adapter = adapter
        self.guard = Guard()
        self.gate = Gate(config)
        self.layout = RunLayout(config.run_dir, identity.attempt)
        self.tracker = StepTracker(config.step_on, evaluation=config.eval)
        self.writer = Writer(config, self.layout, identity.rank, adapter.framework, self.guard)
        self.segment = Segment()
        self.modules: list[ModuleCall] = []
        # True while the next outermost forward matters to us: the only thing a module call asks when idle.
        self.listening = False
        self.recording = False
        self.in_backward = 0
        # True in a program that has called no module so far: its steps are cut at API calls.
        self.functional = False
        self.thread = threading.get_ident()
        self.step = 0
        self._begun = False
        self._opened = False
        self._done = False
        self._held_segment: Segment | None = None
        self._steps: list[int] = []
        self._partial: list[int] = []
        self._started = datetime.now().astimezone().isoformat(timespec="seconds")
        self._mark_at = 0.0
        self._pid = os.getpid()

    # -- life

    def install(self) -> None:
        """Hook the framework in and leave the rank's mark. Raises what the adapter or the file system raises."""
        selected = self.identity.rank in self.config.ranks
        self._save_mark(note="" if selected else "this rank is not among the ranks asked for", recording=selected)
        if not selected:
            self._done = True
            return
        self.adapter.install(self)
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self._at_exit)
        self.listening = True

    def _in_child(self) -> None:
        # A DataLoader worker or a fork of the user's own: rank N's files belong to rank N's process alone.
        if os.getpid() == self._pid:
            return
        self.listening = self.recording = False
        self._done = True
        self.writer.forget()
        self.modules = []
        try:
            self.adapter.leave_child()
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("fork", error, 0)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self._done:
            return
        try:
            # An uncaught exception leaves sys.last_value behind; then the open step is a part of one.
            clean = getattr(sys, "last_value", None) is None and self.tracker.closed_cleanly
            self.finish(clean=clean)
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("exit", error, 0)

    def finish(self, *, clean: bool) -> None:
        """End of recording: close the open step and write the last mark. A second call does nothing.

        `clean` False leaves the open step as a partial one.
        """
        if self._done:
            return
        self._done = True
        if self._opened:
            self._resolve_held(Boundary.SPLIT if self._held_segment is not None else Boundary.NONE)
            self._close_step(finish=clean)
        self._pause()
        self.listening = False
        for text in self.gate.unmatched():
            self.guard.miss(f"filter '{text}' matched nothing")
        self._save_mark(finished=clean)

    def _over(self) -> bool:
        return self._done

    # -- steps

    def outermost_forward(self, gradients: bool) -> bool:
        """An outermost forward begins. True where it is to be recorded; `forward_done` follows either way."""
        if self._done:
            self.listening = False
            return False
        try:
            decision = self.tracker.outermost_forward(gradients)
            if self._begun:
                self._resolve_held(decision.boundary)
                if decision.boundary in (Boundary.CUT, Boundary.JOIN_CUT):
                    self._next_step()
                if self._over():
                    return False
            if not decision.record:
                self._pause()
                return False
            self._begun = True
            if not self._opened and self.step in self.config.steps:
                self._opened = True
                self.writer.open_step(self.step)
            if self._opened:
                self._resume()
            return self._opened
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("step", error, 0)
            return False

    def forward_done(self) -> None:
        """An outermost forward has ended, by return or by exception."""
        if self._done:
            return
        if self._opened and not self.recording and not self.tracker.pending:
            self._resume()  # an evaluation inside a step: the step goes on
        self.listening = self.recording or self._watches_forwards

    @property
    def watches_calls(self) -> bool:
        """True where an API call outside all modules may begin a step, so that calls are observed while idle too."""
        return not self._done and (self.functional or not self._begun)

    @property
    def _watches_forwards(self) -> bool:
        """True where the next outermost forward can change anything."""
        return not self._begun or self.tracker.pending or self.tracker.every_forward_counts

    def functional_forward(self) -> None:
        """An API call outside all modules works on something that requires gradients.

        In a program that calls no modules such a call is what an outermost forward is to others.
        """
        if not self._begun:
            self.functional = True
            self.outermost_forward(True)
        elif self.functional and self.tracker.pending:
            self.outermost_forward(True)

    def optimizer_made(self, key: Hashable) -> None:
        self.tracker.optimizer_made(key)

    def optimizer_gone(self, key: Hashable) -> None:
        self.tracker.optimizer_gone(key)

    def optimizer_stepped(self, key: Hashable) -> None:
        """An optimizer has stepped, or a scaler has skipped it."""
        if self._done:
            return
        try:
            boundary = self.tracker.optimizer_stepped(key)
            if boundary is Boundary.SPLIT:
                self._resolve_held(boundary)
            self.adapter.forget_values()
            self.listening = True
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("optimizer", error, 0)

    def end_step(self) -> None:
        """The script says that its step ends here (`step_on` manual)."""
        if self._begun and not self._done:
            self._next_step()
            self.listening = not self._done

    def _resolve_held(self, boundary: Boundary) -> None:
        if boundary in (Boundary.JOIN, Boundary.JOIN_CUT, Boundary.JOIN_HOLD):
            self._held_segment_joins()
        elif boundary is Boundary.SPLIT and self._held_segment is not None:
            held_records = self.writer.take_held()
            held, self._held_segment = self.segment, None
            self._next_step()
            if not self._done:
                self.segment = held
                if self._opened:
                    for record in held_records:
                        self.writer.add(record)
        if boundary in (Boundary.HOLD, Boundary.JOIN_HOLD) and self._opened:
            self._settle()
            self.writer.hold()
            self._held_segment, self.segment = self.segment, Segment()

    def _held_segment_joins(self) -> None:
        earlier, self._held_segment = self._held_segment, None
        if earlier is None:
            return
        self.segment.join(earlier)
        self.writer.release()

    def _next_step(self) -> None:
        recording = self.recording
        if self._opened:
            self._close_step(finish=True)
        self.step += 1
        self.segment = Segment()
        self.gate.new_step()
        self.guard.new_step()
        last = self.config.steps.last
        if last is not None and self.step > last:
            # Nothing can be recorded any more: the rest of the job runs as if we were not there.
            self._pause()
            self.finish(clean=True)
            return
        if self.step in self.config.steps:
            self._opened = True
            self.writer.open_step(self.step)
        elif recording:
            self._pause()

    def _close_step(self, *, finish: bool) -> None:
        try:
            self.adapter.close_open_calls()
            self.adapter.close_step()
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("close open calls", error, 0)
        self._settle()
        self._opened = False
        had_records = self.writer.step_has_records
        complete = self.writer.close_step(finish=finish)
        self.adapter.forget_values()
        if had_records:
            (self._steps if complete else self._partial).append(self.step)
        now = time.monotonic()
        if now >= self._mark_at:
            self._mark_at = now + MARK_INTERVAL
            self._save_mark()

    def _resume(self) -> None:
        # Armed again each time: an optimizer that raised has left the adapter disarmed.
        self.recording = self.listening = True
        self.adapter.arm()

    def _pause(self) -> None:
        if self.recording:
            self.recording = False
            self.adapter.disarm()

    # -- backward

    def backward_begins(self) -> None:
        self.in_backward += 1

    def backward_ends(self) -> None:
        """A run of the backward engine is over; calls that still wait for a gradient have got all they will get."""
        self.in_backward -= 1
        if not self.in_backward and self.recording:
            try:
                self.adapter.close_open_calls()
            except Exception as error:  # noqa: BLE001 - a guest
                self.guard.lose("close open calls", error, 0)

    # -- calls

    def observes_this_thread(self) -> bool:
        """False in threads of the user's own; the backward engine's threads work for us."""
        return bool(self.in_backward) or threading.get_ident() == self.thread

    def open_call(self, template: NameTemplate) -> OpRef | None:
        """Number a call. None where the filters leave it out; its number is used up either way."""
        segment = self.segment
        op = OpRef(template, segment.next_number(template.counter), segment)
        gate = self.gate
        if gate.open or gate.enters(op.text, self._enclosing()):
            return op
        return None

    def close_call(self, op: OpRef) -> None:
        """A call has ended, for filters that bound a range."""
        if not self.gate.open:
            self.gate.leaves(op.text)

    def _enclosing(self) -> list[str]:
        return [call.op.text for call in self.modules if call.op is not None]

    @property
    def parent(self) -> OpRef | None:
        modules = self.modules
        return modules[-1].op if modules else None

    def stack_of(self, frame: FrameType | None) -> int:
        """Stack index of a caller's frame; inside a module call only the frames since that call are walked."""
        if self.modules:
            inner = self.modules[-1]
            return self.writer.stacks.index(frame, inner.frame, inner.stack)
        return self.writer.stacks.index(frame)

    def enter_module(self, op: OpRef | None, frame: FrameType | None = None) -> ModuleCall:
        """A module call begins; `frame` is that of the adapter's wrapper, under which its inside will run."""
        call = ModuleCall(op, frame, self.stack_of(frame.f_back) if frame is not None else ROOT)
        self.modules.append(call)
        return call

    def leave_module(self, call: ModuleCall) -> None:
        """A module call has ended, by return or by exception."""
        modules = self.modules
        while modules and modules.pop() is not call:
            pass  # calls above it were left by an exception that their own clean-up did not see
        call.frame = None

    def emit(self, record: CallRecord) -> None:
        """Hand a finished record to the writer."""
        if self.writer.add(record):
            self._settle()
            self.writer.flush()

    def _settle(self) -> None:
        try:
            format_tensors(self.adapter.settle())
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("settle", error, 0)

    # -- roster

    def _save_mark(self, *, finished: bool = False, note: str = "", recording: bool = True) -> None:
        identity = self.identity
        mark = roster.RankMark(
            rank=identity.rank,
            attached=True,
            host=identity.host,
            pid=identity.pid,
            local_rank=identity.local_rank,
            world_size=identity.world_size,
            attempt=identity.attempt,
            framework=self.adapter.framework,
            recording=recording,
            started=self._started,
            steps=tuple(self._steps),
            partial_steps=tuple(self._partial),
            calls=self.writer.calls,
            lost=dict(self.guard.lost),
            unseen=dict(self.guard.unseen),
            finished=finished,
            note=note,
        )
        try:
            roster.save(self.layout.roster_mark(identity.rank), mark)
        except OSError as error:
            self.guard.lose("roster", error, 0)
