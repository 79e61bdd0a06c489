"""Records -> files of one rank: bounded buffer, journal, atomic finish, error log.

Text is made in the training thread, at bounded intervals, and written by the disk's (`capture.disk`). An OSError (disk
full, quota) loses the records at hand, is counted, and the next flush tries again; what was complete stays complete
because the journal is cut back to its last whole record.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from io import FileIO
from pathlib import Path

from msprobe_launch.capture.disk import Disk
from msprobe_launch.capture.guard import Guard
from msprobe_launch.capture.stacks import ROOT, StackTable
from msprobe_launch.capture.values import ValueFiles
from msprobe_launch.config import ProbeConfig, Task
from msprobe_launch.records import journal
from msprobe_launch.records.codec import quote, record_line
from msprobe_launch.records.layout import RankFolder
from msprobe_launch.records.model import CallRecord, OpRef
from msprobe_launch.records.roster import write_all, write_atomically


class StepWriter:
    """The files of one step of one rank. Text is made at once; all that touches the files is a job of `disk`."""

    def __init__(
        self,
        folder: RankFolder,
        config: ProbeConfig,
        framework: str,
        stacks: StackTable,
        values: ValueFiles | None,
        disk: Disk,
        guard: Guard,
    ) -> None:
        self.folder = folder
        self.values = values
        self.began = False  # records have come, whatever became of them
        self.written = 0
        self.bytes = 0
        self._unwritten = 0  # counted by the disk's thread
        self._dropped = 0  # and by ours
        self._config = config
        self._framework = framework
        self._stacks = stacks
        self._disk = disk
        self._guard = guard
        self._context = journal.Context()
        self._journal: FileIO | None = None
        self._side: FileIO | None = None

    def begin(self) -> None:
        """Make the folder and an empty journal: from now on a crash leaves a step that says it is partial."""
        self._disk.submit(self._begin_once)

    def write(self, records: list[CallRecord], *, last: bool) -> None:
        """Append records to the journal. What cannot be written is counted; never raises.

        `last` says that `finish` follows: then stacks and parents need no journal of their own.
        """
        self.began = True
        if not self._disk.has_room():
            self._dropped += len(records)
            mega = self._config.buffer_bytes / 1e6
            slow = OSError(errno.ETIMEDOUT, f"too slow, more than {mega:g} MB wait to be written")
            self._guard.lose(f"write {self.folder.path}", slow, len(records))
            return
        lines, side = self._render(records, journaled=not last)
        if lines:
            data = (journal.RECORD_END.join(lines) + journal.RECORD_END).encode()
            context = ("\n".join(side) + "\n").encode() if side else b""
            self._disk.submit(lambda: self._store(data, context, len(lines)), len(data) + len(context))

    def finish(self, closed: Callable[[bool], None], *, complete: bool) -> None:
        """Make the files of a step out of the journal, or leave it as it is where the step is not `complete`.

        `closed` is told on the disk's thread whether all of the step is in its files.
        """

        def job() -> None:
            finished = self._finish() if complete else False
            self._close()
            closed(finished)

        self._disk.submit(job)

    # -- text

    def _render(self, records: list[CallRecord], *, journaled: bool) -> tuple[list[str], list[str]]:
        """Lines of the journal, and of the journal of stacks and parents."""
        lines: list[str] = []
        side: list[str] = []
        frames, ops = self._context.frames, self._context.ops
        parents: dict[OpRef | None, str | None] = {None: None}
        everything = self._config.task is Task.TENSOR
        for record in records:
            try:
                name = record.op.text
                if name in ops:
                    # Two values under one key would be read as one: the first is kept.
                    self._guard.miss("second record of one name")
                    continue
                values = self.values
                if values is not None and (everything or record.saves):
                    record = values.named(name, record)
                line = record_line(name, record)
            except Exception as error:  # noqa: BLE001 - one odd value must not take the other records with it
                self._guard.lose("encode", error)
                self._dropped += 1
                continue
            lines.append(line)
            if record.is_grad:
                continue
            stack = record.stack
            if stack != ROOT and stack not in frames:
                frames[stack] = self._stacks.frames_json(stack)
                if journaled:
                    side.append(f'{{"stack": {stack}, "frames": {frames[stack]}}}')
            enclosing = record.parent
            parent = parents.get(enclosing)
            if parent is None and enclosing is not None:
                parent = parents[enclosing] = enclosing.text
            ops[name] = (parent, stack)
            if journaled:
                side.append(
                    f'{{"op": {quote(name)}, "parent": {quote(parent) if parent else "null"}, "stack": {stack}}}'
                )
        return lines, side

    # -- files: on the disk's thread

    def _begin_once(self) -> None:
        try:
            self._begin()
        except OSError as error:
            self._guard.lose(f"write {self.folder.path}", error, 0)

    def _begin(self) -> None:
        if not _made(self.folder.path) and self.folder.dump.exists():
            # Two programs in turn as one rank, or a restart that kept its number: what is there is not ours.
            raise FileExistsError("an earlier process of this rank has recorded this step; it is kept")
        config = self._config
        data_dir = str(self.folder.tensors) if self.values is not None else None
        head = journal.header(config.task.value, config.level.value, self._framework, data_dir)
        handle = FileIO(self.folder.journal, "w")
        try:
            write_all(handle, head.encode())
        except OSError:
            handle.close()
            self.folder.journal.unlink(missing_ok=True)
            raise
        self._journal = handle

    def _store(self, data: bytes, context: bytes, count: int) -> None:
        try:
            if self._journal is None:
                self._begin()
            self._append(data)
        except OSError as error:
            self._unwritten += count
            self._guard.lose(f"write {self.folder.path}", error, count)
            return
        self.written += count
        self.bytes += len(data)
        if context:
            try:
                if self._side is None:
                    self._side = FileIO(self.folder.context_journal, "w")
                write_all(self._side, context)
            except OSError as error:
                self._guard.lose(f"write {self.folder.path}", error, 0)  # it is still in memory, for `finish`

    def _append(self, data: bytes) -> None:
        handle = self._journal
        assert handle is not None
        good = handle.tell()
        try:
            write_all(handle, data)
        except OSError:
            handle.truncate(good)
            handle.seek(good)
            raise

    def _finish(self) -> bool:
        """Journal -> dump.json, stack.json, construct.json. True where all of the step is in them."""
        handle = self._journal
        if handle is None:
            return self.complete
        try:
            if self.written:
                handle.seek(-len(journal.RECORD_END), os.SEEK_END)
                handle.truncate()
                write_all(handle, journal.CLOSE.encode())
            else:
                write_all(handle, journal.EMPTY_CLOSE.encode())
            with_parents = self._config.level.modules or self._config.task is Task.STRUCTURE
            stacks, parents = self._context.stack_json(), self._context.construct_json(with_parents=with_parents)
            write_atomically(self.folder.stack, stacks)
            write_atomically(self.folder.construct, parents)
            self.bytes += len(stacks) + len(parents)
            journaled = self._side is not None
            self._close()
            # Last: a reader that sees dump.json finds its companions.
            os.replace(self.folder.journal, self.folder.dump)
            if journaled:
                os.unlink(self.folder.context_journal)
        except OSError as error:
            # The journal stays as it is and is read as a partial step.
            self._guard.lose(f"finish {self.folder.path}", error, 0)
            return False
        return self.complete

    @property
    def complete(self) -> bool:
        """True where nothing of what came was lost."""
        return not self._unwritten and not self._dropped and (self.values is None or self.values.lost == 0)

    def _close(self) -> None:
        # The journal stays for a reader.
        for handle in (self._journal, self._side):
            if handle is not None:
                with contextlib.suppress(OSError):
                    handle.close()
        self._journal = self._side = None

    def log_error(self, message: str) -> None:
        """Append to dump_error_info.log, in the field's form. Never raises."""
        stamp = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
        calls = "".join(traceback.format_stack(limit=12)[:-2])
        text = f"[{stamp}] {message}\nCall stack (most recent call last):\n{calls}\n"

        def append() -> None:
            # The loss itself is counted by the guard.
            with contextlib.suppress(OSError):
                self.folder.path.mkdir(parents=True, exist_ok=True)
                with self.folder.errors.open("a", encoding="utf-8") as log:
                    log.write(text)

        self._disk.submit(append)


def _made(folder: Path) -> bool:
    """Make a rank's folder in a step's; False where it may have been there. Raises OSError.

    Most steps are new and the run's folder is there: two system calls.
    """
    with contextlib.suppress(OSError):
        os.mkdir(folder.parent)
    try:
        os.mkdir(folder)
    except (FileExistsError, FileNotFoundError):
        os.makedirs(folder, exist_ok=True)
        return False
    return True


class Writer:
    """The bounded buffer in front of the step's files."""

    def __init__(
        self,
        config: ProbeConfig,
        folder_of: Callable[[int], RankFolder],
        framework: str,
        guard: Guard,
        value_ending: str,
    ) -> None:
        self.stacks = StackTable()
        self.calls = 0
        self.last_op = ""
        self.config = config
        self.folder_of = folder_of
        self.disk = Disk(config.buffer_bytes, config.when_full, guard)
        # Called on the disk's thread, with a step that had records and whether all of it is in its files.
        self.on_closed: Callable[[int, bool], None] = lambda _step, _complete: None
        self._number = 0
        self._value_ending = value_ending
        self._values: tuple[int, ValueFiles] | None = None
        self._stale: list[ValueFiles] = []
        self._carries = False
        self._steps_bytes = 0
        self._framework = framework
        self._guard = guard
        self._step: StepWriter | None = None
        self._buffer: list[CallRecord] = []
        self._held: list[CallRecord] | None = None
        self._flush_at = 0.0
        self._limit = config.flush_records
        # Held while records change hands: the idle flusher is another thread. It may be taken again by a signal
        # handler of the program's own that runs in the middle of us.
        self.lock = threading.RLock()
        guard.on_error = self._log_error

    def open_step(self, step: int) -> None:
        """Records that follow belong to this step."""
        values = self.values_of(step) if self.config.saves_values else None
        self._number = step
        self._step = StepWriter(
            self.folder_of(step), self.config, self._framework, self.stacks, values, self.disk, self._guard
        )
        self._step.begin()
        self.disk.catch_up()  # whatever ends the process now, it has begun this step
        self._flush_at = time.monotonic() + self.config.flush_seconds

    def values_of(self, step: int) -> ValueFiles:
        """The files of tensor values of a step, which need not be open (a script may save without recording)."""
        known = self._values
        if known is not None and known[0] == step:
            return known[1]
        self._clean_values()
        values = ValueFiles(self.folder_of(step).tensors, self._value_ending)
        self._values = (step, values)
        return values

    def _clean_values(self) -> None:
        """Remove values that never got a name, unless records that wait for their step may still give them one."""
        if self._values is not None:
            self._stale.append(self._values[1])
            self._values = None
        if self._held is None and not self._carries:
            for values in self._stale:
                values.finish()
            self._stale.clear()

    @property
    def bytes(self) -> int:
        """Bytes of records written so far, in all steps."""
        step = self._step
        return self._steps_bytes + (step.bytes if step is not None else 0)

    def hurry(self) -> None:
        """Let the next record be the last of its flush."""
        self._limit = 0

    def add(self, record: CallRecord) -> bool:
        """Take one record; True where a flush is due."""
        with self.lock:
            if self._held is not None:
                self._held.append(record)
                return False
            buffer = self._buffer
            buffer.append(record)
        return len(buffer) >= self._limit or (not len(buffer) & 15 and time.monotonic() >= self._flush_at)

    def flush(self, *, last: bool = False) -> None:
        """Write the buffer. The caller has brought device statistics home. `last`: the step is finished next."""
        with self.lock:
            self._flush_at = time.monotonic() + self.config.flush_seconds
            records, self._buffer = self._buffer, []
            if records and self._step is not None:
                self.calls += len(records)
                self.last_op = records[-1].op.text
                self._step.write(records, last=last)
                if not last:
                    self.disk.catch_up()

    @property
    def has_old_records(self) -> bool:
        """True where something has waited for its flush longer than it should."""
        return bool(self._buffer) and time.monotonic() >= self._flush_at

    def hold(self) -> None:
        """Keep what follows in memory until `release` says to which step it belongs."""
        self._held = []

    def release(self) -> None:
        """What was held joins the records of the open step."""
        held, self._held = self._held or [], None
        self._buffer.extend(held)

    def take_held(self) -> list[CallRecord]:
        """What was held, for the step that comes next."""
        held, self._held = self._held or [], None
        self._carries = bool(held)
        return held

    def carried(self) -> None:
        """What was taken has been added to its step."""
        self._carries = False

    def close_step(self, *, finish: bool) -> None:
        """Flush and finish the open step; with `finish` False its journal is left as a partial step.

        `on_closed` is told when that is done.
        """
        with self.lock:
            self.flush(last=finish)
            step, self._step = self._step, None
        if step is None:
            return
        number = self._number

        def closed(complete: bool) -> None:
            self._steps_bytes += step.bytes
            if step.began:
                self.on_closed(number, complete)

        step.finish(closed, complete=finish)
        self.disk.catch_up()
        if self._values is not None:
            self._clean_values()

    def forget(self) -> None:
        """In a forked child: the files are the parent's. Close nothing that would flush into them."""
        self.disk.forget()
        self._step, self._buffer, self._held = None, [], None
        self._values = None
        self._stale.clear()

    def _log_error(self, message: str) -> None:
        if self._step is not None:
            self._step.log_error(message)
