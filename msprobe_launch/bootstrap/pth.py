"""What the line in msprobe_launch.pth runs at the start of an interpreter that a configured launch has started.

`install-pth` puts the line where `python -I` and `-E` find it too; they ignore PYTHONPATH and with it our
sitecustomize. Where both reach a process this one comes first, and leaves sitecustomize nothing to do.
"""

import os
import sys


def see_to_the_rank(file: str) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(file)))
    sys.path.insert(0, root)
    try:
        from msprobe_launch.bootstrap import variables

        if variables.rank_source(os.environ) is None:
            return
        from msprobe_launch.bootstrap import activate
    finally:
        sys.path.remove(root)
    activate.activate(os.path.join(os.path.dirname(file), "site"))


try:
    see_to_the_rank(os.path.abspath(__file__))
except Exception as error:  # noqa: BLE001  # a guest never stops the training
    sys.stderr.write(f"[msprobe] this process is not recorded: {error!r}\n")
