"""Python runs this at the start of every interpreter whose PYTHONPATH holds this folder.

It sees to the rank (if this process is to be one) and gives way to the user's own sitecustomize. Both halves leave the
process as it would be without us: the folder out of sys.path, this module out of sys.modules.
"""

import os
import sys


def _see_to_the_rank() -> None:
    site = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != site]
    sys.path_importer_cache.pop(site, None)
    # The launcher's configuration and something that may be a rank's number, or this is some other process.
    could_number = ("RANK", "SLURM_PROCID", "MS_NODE_ID", "MS_ROLE", "RANK_ID", "MSPROBE_RANK_FROM")
    if "MSPROBE_RANK_CONFIG" not in os.environ or not any(name.endswith(could_number) for name in os.environ):
        return
    # Our package as the launcher runs it, also where this interpreter has none of its own.
    root = os.path.dirname(os.path.dirname(os.path.dirname(site)))
    sys.path.insert(0, root)
    try:
        from msprobe_launch.bootstrap import variables

        if variables.rank_source(os.environ) is None:
            return
        from msprobe_launch.bootstrap import activate
    finally:
        sys.path.remove(root)
    activate.activate(site)


try:
    _see_to_the_rank()
except Exception as error:  # noqa: BLE001  # a guest never stops the training
    sys.stderr.write(f"[msprobe] this process is not recorded: {error!r}\n")

# The user's own, as Python itself would import it. What it raises, and that there is none, goes up to `site`, which
# reports the first and passes over the second just as without us.
sys.modules.pop("sitecustomize", None)
__import__("sitecustomize")
