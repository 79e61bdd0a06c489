"""The Session: one object per rank that owns all recording state.

Adapters report what they see; the session decides what it means (steps, filters, parents, numbers) and hands records
to the writer. The attributes that adapters read on every call are plain: `listening`, `recording`, `in_backward`.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import threading
from collections.abc import Hashable
from types import FrameType

from msprobe_launch.adapters.base import FrameworkAdapter
from msprobe_launch.capture.budget import Budget
from msprobe_launch.capture.control import Control
from msprobe_launch.capture.gate import Gate
from msprobe_launch.capture.guard import Guard
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.capture.idle import IdleFlusher
from msprobe_launch.capture.manual import ManualControl
from msprobe_launch.capture.marks import Marks
from msprobe_launch.capture.stacks import ROOT
from msprobe_launch.capture.steps import Boundary, StepTracker
from msprobe_launch.capture.writer import Writer
from msprobe_launch.config import ProbeConfig, Task
from msprobe_launch.errors import ConfigError
from msprobe_launch.logs import get_logger
from msprobe_launch.records.codec import format_tensors
from msprobe_launch.records.layout import RankFolder, RunLayout
from msprobe_launch.records.model import CallRecord, OpRef, Segment
from msprobe_launch.records.names import NameTemplate

# How long the end of a process may wait for what is still to be written.
DRAIN_SECONDS = 60.0


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
        self._flusher = IdleFlusher(self._flush_if_old, config.flush_seconds)
        self.layout = RunLayout(config.run_dir, identity.attempt)
        self.tracker = StepTracker(config.step_on, evaluation=config.eval)
        self.writer = Writer(config, self.folder, adapter.framework, self.guard, adapter.value_ending)
        self.budget = Budget(config, identity)
        self.marks = Marks(self.layout, identity, adapter.framework, self.writer, self.guard, self.budget)
        self.manual = ManualControl(self)
        self.writer.on_closed = self._step_closed
        self.control = Control(self.layout.control, config.control_seconds)
        # True while the values of what is described are to be saved; `tensor_list` sets it call by call.
        self.saving = config.task is Task.TENSOR
        self.takes_modules = config.level.modules
        self.takes_apis = config.level.apis
        # Calls of this step that `tensor_list` picks, by segment, name and number.
        self._chosen: set[tuple[int, str, int]] = set()
        self._graphs = 0  # captures of a device's graph under way
        self._before_graph = (False, False)
        self._past_end = False  # past the last step asked for
        self._level, self._tensor_list = config.level, config.tensor_list  # as it was started
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
        self.opened = False  # a step's files are open
        self._looked = False  # some step was opened
        self._done = False
        self._held_segment: Segment | None = None
        self._pid = os.getpid()

    def folder(self, step: int) -> RankFolder:
        """This rank's folder in a step."""
        identity = self.identity
        if identity.is_known:
            return self.layout.rank_folder(step, identity.rank)
        return self.layout.process_folder(step, identity.pid)

    # -- life

    def install(self) -> None:
        """Hook the framework in and leave the rank's mark. Raises what the adapter or the file system raises."""
        selected = self.identity.rank in self.config.ranks
        self.marks.save(note="" if selected else "this rank is not among the ranks asked for", recording=selected)
        if not selected:
            self._done = True
            return
        self.adapter.install(self)
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self._at_exit)
        self._flusher.start()
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
        if os.getpid() != self._pid:
            return
        try:
            # An uncaught exception leaves sys.last_value behind; then the open step is a part of one.
            clean = getattr(sys, "last_value", None) is None and self.tracker.closed_cleanly
            self.finish(clean=clean)
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("exit", error, 0)

    def finish(self, *, clean: bool, wait: bool = True) -> None:
        """End of recording: close the open step and write the last mark. A second call only waits.

        `clean` False leaves the open step as a partial one. `wait` until all is on the disk, DRAIN_SECONDS at most.
        """
        if not self._done:
            self._finish(clean)
        if wait and not self.writer.disk.drain(DRAIN_SECONDS):
            text = "%d bytes were still to be written %g s after the end, and are lost"
            get_logger().warning("rank %d: " + text, self.identity.rank, self.writer.disk.waiting, DRAIN_SECONDS)

    def _finish(self, clean: bool) -> None:
        self._done = True
        self._flusher.stop()
        partial = self.opened and not clean
        if self.opened:
            self._resolve_held(Boundary.SPLIT if self._held_segment is not None else Boundary.NONE)
            self._close_step(finish=clean)
        self.manual.write(last=True)
        self._pause()
        self.listening = False
        self._say_unmatched()
        finished = clean or (self._past_end and not partial)
        self.writer.disk.submit(lambda: self.marks.save(finished=finished))

    def _say_unmatched(self) -> None:
        config = self.config
        if self._looked:
            for text in self.gate.unmatched():
                self.guard.miss(text)
        elif self._begun and not self.marks.note and not config.selects(self.step):
            rules = {"steps": str(config.steps), "every": config.every, "start": config.start, "stop": config.stop}
            asked = ", ".join(f"{name} {value}" for name, value in rules.items() if value not in ("", None, 0, 1))
            self.guard.miss(f"filter '{asked}' matched nothing. The program ended in step {self.step}.")

    @property
    def is_over(self) -> bool:
        """True where nothing is recorded any more."""
        return self._done

    # -- steps

    def outermost_forward(self, gradients: bool) -> bool:
        """An outermost forward begins. True where it is to be recorded; `forward_done` follows either way."""
        if self._done:
            self.listening = False
            return False
        if self.manual.taken:
            return self.manual.on and self.opened
        try:
            decision = self.tracker.outermost_forward(gradients)
            if self._begun:
                self._resolve_held(decision.boundary)
                if decision.boundary in (Boundary.CUT, Boundary.JOIN_CUT):
                    self._next_step()
                if self.is_over:
                    return False
            if not decision.record:
                self._pause()
                return False
            if not self._begun:
                self._begun = True
                self.take_orders()
            if not self.opened and self.selects(self.step):
                self.open_step()
            if self.opened:
                self.resume()
            return self.opened
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("step", error, 0)
            return False

    def forward_done(self) -> None:
        """An outermost forward has ended, by return or by exception."""
        if self._done:
            return
        if self.budget.forecast_due and self.recording:
            self._make_forecast()
        if self.manual.taken:
            self.listening = self.recording
            return
        if self.opened and not self.recording and not self.tracker.pending:
            self.resume()  # an evaluation inside a step: the step goes on
        self.listening = self.recording or self._watches_forwards

    @property
    def watches_calls(self) -> bool:
        """True where an API call outside all modules may begin a step, so that calls are observed while idle too."""
        return not self._done and not self.manual.taken and (self.functional or not self._begun)

    @property
    def _watches_forwards(self) -> bool:
        """True where the next outermost forward can change anything."""
        return not self._begun or self.tracker.pending or self.tracker.every_forward_counts

    def functional_forward(self) -> None:
        """An API call outside all modules works on something that requires gradients.

        In a program that calls no modules such a call is what an outermost forward is to others.
        """
        if self.manual.taken:
            return
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
        if self.manual.taken:
            self._forget_values()
            return
        try:
            boundary = self.tracker.optimizer_stepped(key)
            if boundary is Boundary.SPLIT:
                self._resolve_held(boundary)
            self.adapter.forget_values()
            self.listening = True
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("optimizer", error, 0)

    def _forget_values(self) -> None:
        try:
            self.adapter.forget_values()
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("forget values", error, 0)

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
                if self.opened:
                    for record in held_records:
                        self.writer.add(record)
                self.writer.carried()
        if boundary in (Boundary.HOLD, Boundary.JOIN_HOLD) and self.opened:
            self.settle()
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
        self.end_this_step()
        if self._done:
            return
        self.take_orders()
        last = self.config.last_step
        if last is not None and self.step > last and not self.control.orders.more_may_come:
            self._pause()
            if self.functional:
                # To notice new orders, calls would have to be observed: the rest runs as if we were not there.
                self.finish(clean=True, wait=False)
            elif not self._past_end:
                self._past_end = True
                self._say_unmatched()
                self.writer.disk.submit(lambda: self.marks.save(finished=True))
                self.writer.disk.catch_up()
            return
        if self.selects(self.step):
            self.open_step()
        elif recording:
            self._pause()

    def end_this_step(self) -> None:
        """Finish the open step, if there is one; what follows is numbered anew, in the next."""
        if self.opened:
            self._close_step(finish=True)
        self.manual.write(last=True)
        if self.budget.exceeded(self.writer.bytes):
            self._stop_at_budget()
        self.step += 1
        self.segment = Segment()
        self.gate.new_step()
        self._chosen.clear()
        self.guard.new_step()

    def open_step(self) -> None:
        """Records that follow belong to the step under way, which gets its files."""
        self.opened = self._looked = True
        self.writer.open_step(self.step)

    def selects(self, step: int) -> bool:
        """True where a step is to be recorded, by the configuration or by newer orders."""
        return self.control.orders.selects(step, self.config)

    def take_orders(self) -> None:
        """Look at control.yaml, between two steps."""
        try:
            if not self.control.poll():
                return
        except (ConfigError, OSError) as error:
            self.guard.miss(f"control.yaml is not followed: {error}".partition("\n")[0])
            get_logger().warning(
                "rank %d: control.yaml is not followed, recording goes on as it was: %s", self.identity.rank, error
            )
            return
        level = self.control.orders.level or self._level
        if level is not self.config.level:
            self.config = self.writer.config = dataclasses.replace(self.config, level=level)
            self.takes_modules, self.takes_apis = level.modules, level.apis
            self.adapter.disarm()
        self._order_values()
        self._past_end = False

    def _order_values(self) -> None:
        """Save the values of the ops that the orders name, or of those asked for at the start."""
        ordered = self.control.orders.tensor_list
        names = self._tensor_list if ordered is None else ordered
        if names == self.config.tensor_list:
            return
        if self.config.task is not Task.STATISTICS:
            if self.config.task is Task.STRUCTURE:
                self.guard.miss("tensor_list in control.yaml: task structure saves no values")
            return
        if names:
            self.adapter.save_values()
        self.config = self.writer.config = dataclasses.replace(self.config, tensor_list=names)
        self.gate.save(names, ordered=ordered is not None)
        self.saving = False

    def _close_step(self, *, finish: bool) -> None:
        try:
            self.adapter.close_open_calls()
            self.adapter.close_step()
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("close open calls", error, 0)
        self.settle()
        self.opened = False
        self.writer.close_step(finish=finish)
        self._forget_values()

    def _step_closed(self, step: int, complete: bool) -> None:
        # On the disk's thread, which is the one that writes marks while the rank runs.
        self.marks.step_ended(step, complete=complete)
        if self.marks.due():
            self.marks.save()

    def resume(self) -> None:
        """Record from here on."""
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

    # -- graphs of a device

    def graph_begins(self) -> None:
        """Work is captured into a graph from now on: whatever we launched would be part of it."""
        self._graphs += 1
        if self._graphs == 1 and not self._done:
            self._before_graph = (self.recording, self.listening)
            self.settle()  # waiting for the device would end the capture with an error
            self._pause()
            self.listening = False
            self.guard.miss("captured graph of a device: nothing inside is recorded")

    def graph_ends(self) -> None:
        """The graph is complete."""
        self._graphs -= 1
        if not self._graphs and not self._done:
            recording, self.listening = self._before_graph
            if recording:
                self.resume()

    # -- calls

    def observes_this_thread(self) -> bool:
        """False in threads of the user's own but the one that trains; the backward engine's threads work for us."""
        ident = threading.get_ident()
        if ident == self.thread:
            return True
        # Native threads are not among Python's own, or among them as dummies only.
        return bool(self.in_backward) and not any(
            thread.ident == ident and type(thread) is not threading._DummyThread for thread in threading.enumerate()
        )

    def follow_this_thread(self) -> bool:
        """True where this thread is observed from now on: the first one that trains is the one we follow."""
        if self._begun or not self.listening:
            return False
        self.thread = threading.get_ident()
        return True

    def open_call(self, template: NameTemplate) -> OpRef | None:
        """Number a call. None where the filters leave it out; its number is used up either way."""
        segment = self.segment
        op = OpRef(template, segment.next_number(template.counter), segment)
        if self.gate.open or self._enters(op):
            return op
        return None

    def _enters(self, op: OpRef) -> bool:
        enclosing = self._enclosing()
        if self.config.tensor_list:
            self.saving = self.gate.saves([op.text, op.as_backward().text, *enclosing])
            if self.saving:
                self._chosen.add((id(op.segment), op.template.counter, op.number))
        return self.gate.enters(op.text, enclosing)

    def attend(self, op: OpRef | None) -> None:
        """What is described from now on belongs to this call: are its values to be saved?

        Adapters say so where other calls may have come between: at the end of a module call, and in backward.
        """
        if self.config.tensor_list:
            self.saving = op is not None and (id(op.segment), op.template.counter, op.number) in self._chosen

    def attend_to(self, template: NameTemplate) -> None:
        """The same for what is described before its call is opened (gradients of parameters)."""
        if self.config.tensor_list:
            self.saving = self.gate.saves([template.forward[0]])

    def close_call(self, op: OpRef) -> None:
        """A call has ended, for filters that bound a range."""
        if not self.gate.open:
            self.gate.leaves(op.text)

    def _enclosing(self) -> list[str]:
        return [call.op.text for call in self.modules if call.op is not None]

    @property
    def names_modules(self) -> bool:
        """True where the names of module calls matter: to records of their own, to parents in the files, to filters.

        Level L1 has no parents in its files, as msprobe's has none, unless the task is structure.
        """
        return self.takes_modules or not self.gate.open or self.gate.names_only

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
        if not self.gate.open:
            self.attend(call.op)

    def emit(self, record: CallRecord) -> None:
        """Hand a finished record to the writer."""
        gate = self.gate
        if gate.watches_all and not gate.keeps(record.op.text, record.op.as_forward().text, record.op.backward):
            return
        if not gate.open:
            self.attend(record.op)
            record.saves = self.saving
        if self.writer.add(record):
            self.settle()
            self.writer.flush()
            if self.budget.exceeded(self.writer.bytes):
                self._stop_at_budget()

    def _flush_if_old(self) -> None:
        """From the idle flusher's thread: write what has waited too long because nothing more came."""
        try:
            writer = self.writer
            if self.recording and writer.has_old_records and self.adapter.settles_at_once:
                with writer.lock:
                    self.settle()
                    writer.flush()
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("idle flush", error, 0)

    def settle(self) -> None:
        """Bring statistics home from a device, and make the texts of all that came since the last time."""
        try:
            format_tensors(self.adapter.settle())
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("settle", error, 0)

    # -- how much is written

    def value_file(self, size: int) -> str | None:
        """Path for a tensor's values of so many bytes, or None where they are not to be written any more.

        Raises OSError.
        """
        path = self.writer.values_of(self.step).fresh()
        if self.budget.takes(size, self.writer.bytes):
            return path
        self.writer.hurry()  # the next flush finds the limit passed
        return None

    def value_lost(self, error: BaseException) -> None:
        """A tensor's values could not be written: its record stays, and the step is a partial one."""
        self.writer.values_of(self.step).lost += 1
        self.guard.lose("write tensor values", error, 0)
        self.guard.miss("tensor whose values could not be written")

    def _stop_at_budget(self) -> None:
        self.marks.note = self.budget.note(self.step)
        get_logger().warning("rank %d: recording %s; training goes on", self.identity.rank, self.marks.note)
        self.finish(clean=False, wait=False)

    def _make_forecast(self) -> None:
        self.budget.forecast_due = False
        try:
            if self.budget.make_forecast(self.writer.bytes + self.budget.values, self.gate.backward):
                get_logger().warning(self.budget.forecast)
        except Exception as error:  # noqa: BLE001 - a guest
            self.guard.lose("forecast", error, 0)

    # -- the script in control

    def hand_over(self) -> bool:
        """End the automatic steps, for `ManualControl`. False where recording is over."""
        if self._done:
            return False
        self._pause()
        if self.opened:
            self._close_step(finish=True)
            self.step += 1
            self.segment = Segment()
        self._begun, self.functional = True, False
        self.listening = False
        self.adapter.disarm()
        return True

    def stop_short(self) -> None:
        """Record no more in the step under way; what came so far is written."""
        if self.recording:
            try:
                self.adapter.close_open_calls()
            except Exception as error:  # noqa: BLE001 - a guest
                self.guard.lose("close open calls", error, 0)
            self.settle()
            self.writer.flush()
        self._pause()
        self.listening = False
