"""Compile what is in C when a wheel (also an editable one) is built.

Without a C compiler the build goes on, and without CPython's header files so does that of `tensors.c`: then
`msprobe_launch.native` has nothing to offer, statistics of CPU tensors are taken with the framework's own reductions,
and tensors are described by interpreted code, both several times slower.
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

FOLDER = "msprobe_launch/native"
# Library -> sources, and whether they need CPython's header files.
LIBRARIES = {
    "_statistics.so": (["statistics.c"], False),
    "_tensors.abi3.so": (["tensors.c", "statistics.c"], True),
}


class NativeBuildHook(BuildHookInterface):
    """See the module's docstring. `CC` names another compiler."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root, FOLDER)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        # No contraction: a fused multiply-add would give other last bits on machines that have it.
        command = [*compiler, "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        for library, (sources, python) in LIBRARIES.items():
            headers = ["-I", sysconfig.get_paths()["include"]] if python else []
            files = [folder / source for source in sources]
            try:
                subprocess.run(
                    [*command, *headers, "-o", folder / library, *files, "-lm"],
                    check=True,
                    capture_output=True,
                    text=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
                print(f"msprobe-launch: {library} not compiled, recording will be slower: {reason}", file=sys.stderr)
                (folder / library).unlink(missing_ok=True)  # one of an earlier build
                continue
            build_data["artifacts"].append(f"{FOLDER}/{library}")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp310-abi3-{platform}" if python else f"py3-none-{platform}"
