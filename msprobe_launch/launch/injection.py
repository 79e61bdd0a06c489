"""The environment that turns a worker into a rank that records. The launcher's own environment stays as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msprobe_launch import bootstrap
from msprobe_launch.bootstrap import variables
from msprobe_launch.config import ProbeConfig
from msprobe_launch.errors import UsageError

SITE = Path(os.path.abspath(bootstrap.__file__)).parent / "site"


def worker_environment(config: ProbeConfig, environ: Mapping[str, str], site: Path = SITE) -> dict[str, str]:
    """Variables to set in a worker whose environment would otherwise be `environ`.

    Raises UsageError where our own folder cannot stand on PYTHONPATH.
    """
    if os.pathsep in str(site):
        raise UsageError(
            f"{site}: a path with '{os.pathsep}' cannot be put on PYTHONPATH, so nothing can be recorded.",
            hint="Install msprobe-launch in a directory without it.",
        )
    users = environ.get("PYTHONPATH")
    added = {
        "PYTHONPATH": f"{site}{os.pathsep}{users}" if users else str(site),
        variables.CONFIG: config.to_json(),
    }
    if users == "":
        added[variables.PYTHONPATH_WAS_EMPTY] = "1"
    return added
