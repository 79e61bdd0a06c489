"""What an earlier run of a script has left in its dump_path, which the launcher would refuse."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from msprobe_launch.logs import get_logger
from msprobe_launch.records.layout import RunLayout


def set_aside(root: Path, rank: int) -> None:
    """Move what an earlier process of this rank has recorded in `root` into `root/earlier/<time>`. Raises OSError."""
    layout = RunLayout(root)
    folders = [folder.path for step in layout.steps() for folder in layout.rank_folders(step) if folder.rank == rank]
    if not folders:
        return
    stamp = datetime.fromtimestamp(max(folder.stat().st_mtime for folder in folders)).strftime("%Y%m%d-%H%M%S")
    for folder in folders:
        target = layout.earlier / stamp / folder.parent.name / folder.name
        os.makedirs(target.parent, exist_ok=True)
        os.replace(folder, target)
    get_logger().warning("rank %d: what an earlier run left in %s is now in %s", rank, root, layout.earlier / stamp)
