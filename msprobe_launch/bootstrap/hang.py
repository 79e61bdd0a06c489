"""A rank's answer to "where are you": with --probe-hang-timeout a thread tells the step and, when asked, the stacks.

The thread wakes once a second and reads; it never touches what it reads. A rank that holds the interpreter lock cannot
answer, which the launcher says.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from msprobe_launch.bootstrap.activate import RankProcess
from msprobe_launch.bootstrap.exceptions import _installed
from msprobe_launch.config import ProbeConfig
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import write_atomically

PERIOD_SECONDS = 1.0


def start(process: RankProcess) -> None:
    """Start the thread that answers."""
    threading.Thread(target=_answer, args=(process,), name="msprobe-hang", daemon=True).start()


def _answer(process: RankProcess) -> None:
    layout = RunLayout(ProbeConfig.from_json(process.config).run_dir, process.attempt)
    pulse, told, asked = layout.pulse(process.rank), "", 0
    while process.is_this_process:
        try:
            text = _pulse(process.session)
            if text != told:
                write_atomically(pulse, text)
                told = text
            if layout.hang_question(asked).exists():
                answer(process, layout.hang_answer(asked, process.rank))
                asked += 1
        except Exception as error:  # noqa: BLE001  # a guest
            sys.stderr.write(f"[msprobe rank {process.rank}] hang watch failed, the training goes on: {error!r}\n")
            return
        time.sleep(PERIOD_SECONDS)


def _pulse(session: Any) -> str:
    """The step's number, or `over` where steps are counted no more."""
    return "over" if session is None or session._done else str(session.step)


def answer(process: RankProcess, path: Path) -> None:
    """Write the stacks of all threads, and as JSON where the main thread is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".txt").open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    session: Any = process.session
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    counters = {} if session is None else dict(session.segment.counters)
    begun = {name.partition(".")[2]: count for name, count in counters.items() if name.startswith("Distributed.")}
    collective = "" if session is None else session.adapter.waits_in(frame, list(begun))
    where = {
        "rank": process.rank,
        "step": None if session is None else session.step,
        "last_op": "" if session is None else session.writer.last_op,
        "collective": collective,
        "collectives": sum(begun.values()),
        "at": _place(frame),
    }
    write_atomically(path, json.dumps(where) + "\n")


def _place(frame: FrameType | None) -> str:
    """`FILE:LINE in FUNCTION` of the innermost frame of the user's own code."""
    first = frame
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_installed()):
            break
        frame = frame.f_back
    frame = frame or first
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
