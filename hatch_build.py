"""Compile the statistics kernel when a wheel (also an editable one) is built.

Without a C compiler the build goes on: `msprobe_launch.native` then says that there is no kernel, and statistics of CPU
tensors are taken with the framework's own reductions, which are several times slower.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "msprobe_launch/native/statistics.c"
LIBRARY = "msprobe_launch/native/_statistics.so"


class NativeBuildHook(BuildHookInterface):
    """See the module's docstring. `CC` names another compiler."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        # No contraction: a fused multiply-add would give other last bits on machines that have it.
        command = [*compiler, "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
        try:
            subprocess.run(
                [*command, "-o", root / LIBRARY, root / SOURCE, "-lm"], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
            print(f"msprobe-launch: no statistics kernel, statistics will be slower: {reason}", file=sys.stderr)
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
