"""A package `mindspore` that has what a launch touches: msrun's options, and a cluster with a scheduler.

With it launches are tested in seconds and where MindSpore is not installed. The scheduler numbers workers as they come
where nobody else has, and goes when all have left; a worker tries until the scheduler is there. Every import leaves a
line in the file IMPORTS, so that a test sees who imported the package.
"""

from __future__ import annotations

from pathlib import Path

_INIT = """
import os, sys
__version__ = "2.10.0"
if "IMPORTS" in os.environ:
    with open(os.environ["IMPORTS"], "a") as file:
        file.write(f"{os.environ.get('MS_ROLE')} {os.environ.get('MSPROBE_RANK_CONFIG')}\\n")
def set_device(name):
    assert name == "CPU"
"""

_COMMUNICATION = """
import json, os, socket, time

class _Here:
    rank = None
    line = None

def _schedule(address, size):
    server = socket.create_server(address)
    lines = []
    taken = set()
    while len(lines) < size:
        line = server.accept()[0].makefile("rw")
        asked = line.readline().strip()
        rank = int(asked) if asked else min(set(range(size)) - taken)
        taken.add(rank)
        lines.append((rank, line))
    for rank, line in lines:
        line.write(f"{rank}\\n")
        line.flush()
    for _, line in lines:
        line.readline()  # until it has left

def init():
    address = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
    if os.environ["MS_ROLE"] == "MS_SCHED":
        return _schedule(address, int(os.environ["MS_WORKER_NUM"]))
    deadline = time.monotonic() + int(os.environ["MS_TOPO_TIMEOUT"])
    while True:
        try:
            _Here.line = socket.create_connection(address).makefile("rw")
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    _Here.line.write(os.environ.get("MS_NODE_ID", "") + "\\n")
    _Here.line.flush()
    _Here.rank = int(_Here.line.readline())

def get_rank():
    return _Here.rank
"""

# In the style of MindSpore's: what it needs of its package to run is imported, and not needed to make the parser.
_RUN = """
import ast
from argparse import REMAINDER, ArgumentParser
from .process_entity import _ProcessManager
import mindspore.log as logger

def get_args():
    parser = ArgumentParser()
    for name, default in (("--worker_num", 8), ("--local_worker_num", 8), ("--master_port", 8118), ("--node_rank", -1),
                          ("--cluster_time_out", 600), ("--sim_level", -1), ("--sim_rank_id", -1)):
        parser.add_argument(name, default=default, type=int)
    for name, default in (("--master_addr", "127.0.0.1"), ("--log_dir", ""), ("--rank_table_file", ""),
                          ("--worker_log_name", ""), ("--tail_worker_log", "-1")):
        parser.add_argument(name, default=default, type=str)
    parser.add_argument("--join", default=False, type=ast.literal_eval, choices=[True, False])
    parser.add_argument("--bind_core", default=False, type=ast.literal_eval)
    parser.add_argument("--bind_numa", default=False, type=ast.literal_eval)
    parser.add_argument("--of_a_later_release", default="", type=str)
    parser.add_argument("task_script", type=str)
    parser.add_argument("task_script_args", nargs=REMAINDER)
    return parser.parse_args()
"""

_FILES = {
    "mindspore/__init__.py": _INIT,
    "mindspore/communication.py": _COMMUNICATION,
    "mindspore/parallel/__init__.py": "",
    "mindspore/parallel/cluster/__init__.py": "",
    "mindspore/parallel/cluster/run.py": _RUN,
}


def make(folder: Path) -> Path:
    """Write the package; the folder belongs on PYTHONPATH."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def distribution(folder: Path, package: str, version: str) -> None:
    """Write what says that a version of a package is installed in `folder`."""
    path = folder / f"{package}-{version}.dist-info" / "METADATA"
    path.parent.mkdir(parents=True)
    path.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
