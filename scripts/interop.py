"""What interop_read and interop_msprobe share: recording a small program, and running msprobe's compare."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TENSOR_LIST = "tensor_list"

Case = tuple[str, str, str]
"""(task, summary mode or the setting beside the first one or '', level)."""

_COMPLAINT = re.compile(r"\[(WARNING|ERROR|CRITICAL)\]|Traceback|Exception|Error:")
# What msprobe says whatever it is given.
_ALWAYS = re.compile(r"CANN environment|input data belongs to you")


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # Not resolved: an environment's interpreter is a link.
    program = os.path.abspath(command[0]) if os.sep in command[0] else command[0]
    command = [program, *command[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def record(interpreter: str, program: str, case: Case, folder: Path, arguments: Sequence[str] = ()) -> Path:
    """Run a program, whose first argument is a configuration for `case`; the last step's folder, its rank as rank0.

    Ends this process, with the reason, where the program fails or records nothing.
    """
    task, mode, level = case
    folder.mkdir(parents=True)
    section: dict[str, object] = {"scope": [], "list": [], "data_mode": ["all"]}
    if mode == TENSOR_LIST:  # calls whose values are saved beside the statistics
        section["tensor_list"] = ["fc"] if level == "L0" else ["linear"]
    elif mode:
        section["summary_mode"] = mode
    config = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": level, task: section}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "program.py").write_text(program)
    done = run([interpreter, "program.py", "config.json", *arguments], folder)
    if done.returncode:
        sys.exit(f"{folder}, {case}: the program failed:\n{done.stderr[-3000:]}")
    steps = sorted((folder / "dump").glob("step*"), key=lambda path: int(path.name.removeprefix("step")))
    ranks = list(steps[-1].glob("*")) if steps else []
    if not ranks:
        sys.exit(f"{folder}, {case}: nothing was recorded")
    ranks[0].rename(steps[-1] / "rank0")
    values = [path for path in steps[-1].glob("rank0/dump_tensor_data/*") if path.suffix in (".pt", ".npy")]
    if bool(values) is not (task == "tensor" or mode == TENSOR_LIST):
        sys.exit(f"{folder}, {case}: {len(values)} files of values")
    return steps[-1]


_MAIN = "import sys; sys.path.append({packages!r}); sys.argv[0] = 'msprobe'; from msprobe.msprobe import main; main()"


def msprobe_compare(
    peer: str, target: Path, bench: Path, out: Path, options: Sequence[str] = (), within: str = ""
) -> list[str]:
    """Run msprobe's compare, its files into `out`; the lines of its log that complain.

    `within`: an interpreter that lends it what `peer` lacks (its compare of MindSpore's dumps imports mindspore).
    """
    out.mkdir(parents=True)
    tool = Path(peer).with_name("msprobe")
    command = [peer, str(tool)] if tool.exists() else [peer, "-m", "msprobe"]
    if within:
        packages = run([peer, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], out).stdout.strip()
        command = [within, "-c", _MAIN.format(packages=packages)]
    done = run([*command, "compare", "-tp", str(target), "-gp", str(bench), "-o", str(out), *options], out)
    said = (done.stdout + done.stderr).splitlines()
    complaints = [line for line in said if _COMPLAINT.search(line) and not _ALWAYS.search(line)]
    if done.returncode:
        complaints.append(f"exit code {done.returncode}")
    return complaints
