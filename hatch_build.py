"""Compile what is in C when a wheel (also an editable one) is built.

Without a C compiler the build goes on, and without CPython's header files so does that of
`tensors.c` and `graph.c`: then
`msprobe_launch.native` has nothing to offer, statistics of CPU tensors are taken with the framework's own reductions,
and tensors are described by interpreted code, both several times slower; `aggregator.native` has nothing either, and
stored values are compared with numpy.
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

# Library -> sources beside it, and whether they need CPython's header files.
LIBRARIES = {
    "msprobe_launch/native/_statistics.so": (["statistics.c"], False),
    "msprobe_launch/native/_tensors.abi3.so": (["tensors.c", "statistics.c"], True),
    "msprobe_launch/native/_graph.abi3.so": (["graph.c"], True),
    "aggregator/native/_values.so": (["values.c"], False),
}


class NativeBuildHook(BuildHookInterface):
    """See the module's docstring. `CC` names another compiler."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler = shlex.split(os.environ.get("CC", "cc"))
        # No contraction: a fused multiply-add would give other last bits on machines that have it.
        command = [*compiler, "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        needs_python = False
        for library, (sources, python) in LIBRARIES.items():
            path = Path(self.root, library)
            headers = ["-I", sysconfig.get_paths()["include"]] if python else []
            files = [path.with_name(source) for source in sources]
            try:
                subprocess.run(
                    [*command, *headers, "-o", path, *files, "-lm"],
                    check=True,
                    capture_output=True,
                    text=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
                print(f"msprobe-launch: {library} not compiled, its work will be slower: {reason}", file=sys.stderr)
                path.unlink(missing_ok=True)  # one of an earlier build
                continue
            build_data["artifacts"].append(library)
            build_data["pure_python"] = False
            needs_python |= python
            build_data["tag"] = f"cp310-abi3-{platform}" if needs_python else f"py3-none-{platform}"
