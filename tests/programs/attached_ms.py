"""Run a MindSpore script with a Session started in this process, without a launcher.

python attached_ms.py CONFIG SCRIPT [ARG ...]      CONFIG is a ProbeConfig as JSON, or `off`: nothing is attached
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import mindspore  # noqa: F401 - the bootstrap attaches when mindspore has been imported

from msprobe_launch import adapters
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.config import ProbeConfig

config, script, *arguments = sys.argv[1:]
if config != "off":
    rank, size = int(os.environ.get("MS_NODE_ID", "0")), int(os.environ.get("MS_WORKER_NUM", "1"))
    adapters.start("mindspore", ProbeConfig.from_json(config), RankIdentity(rank, rank, size, "here", os.getpid()))
sys.argv = [script, *arguments]
sys.path[0] = str(Path(script).parent)
# Not by runpy: MindSpore's tracing wants the source of every frame, and runpy's are frozen.
main = sys.modules["__main__"] = ModuleType("__main__")
main.__file__ = script
exec(compile(Path(script).read_text(), script, "exec"), main.__dict__)
