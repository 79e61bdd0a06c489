"""Run a script with a Session started in this process, without a launcher.

python attached.py RUN_DIR LEVEL SCRIPT [ARG ...]       level `off`: nothing is attached; `mix+eval`: --probe-eval
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch  # noqa: F401 - the bootstrap attaches when torch has been imported

from msprobe_launch import adapters
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.config import Level, ProbeConfig

run_dir, level, script, *arguments = sys.argv[1:]
if level != "off":
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    name, _, evaluation = level.partition("+")
    config = ProbeConfig(run_dir=Path(run_dir), level=Level(name), eval=evaluation == "eval")
    adapters.start("torch", config, RankIdentity(rank, rank, size, "here", os.getpid()))
sys.argv = [script, *arguments]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
