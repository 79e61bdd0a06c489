"""Kernels (L2): on Ascend MindSpore dumps them itself; we write the file that tells it what, and say when.

Per step `step<N>/kernel_config_<rank>.json`, to which MINDSPORE_DUMP_CONFIG points. MindSpore 2.10 reads the first one
only, when the device is first used, so all have one path: `RUN_DIR/kernels`, under which MindSpore makes
`rank_<R>/Net/<graph>/<iteration>`. Nothing else is recorded at this level.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from mindspore._c_expression import _dump_set_dynamic, _dump_start, _dump_stop

from msprobe_launch.adapters.mindspore.runtime import on_host
from msprobe_launch.config import SummaryMode, Task
from msprobe_launch.errors import ConfigError
from msprobe_launch.records.roster import write_atomically

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

VARIABLE = "MINDSPORE_DUMP_CONFIG"
# Set, it would have CANN dump in another way, and MindSpore not at all.
OTHER_VARIABLE = "MS_ACL_DUMP_CFG_PATH"


class KernelDumps:
    """MindSpore's own dump, on in the steps that are recorded. Raises ConfigError where there is no such dump."""

    def __init__(self, session: Session) -> None:
        if on_host():
            raise ConfigError(
                "level L2 (kernels) is not available on the CPU: MindSpore dumps kernels on Ascend. "
                "Known there: L0, L1, mix, debug."
            )
        self._session = session
        self._step: int | None = None
        # The file is read when the device is first used, and the dump waits for `_dump_start`.
        self._write(0)
        _dump_set_dynamic()

    def begin(self) -> None:
        """A step is recorded from here on; a second call in one step does nothing."""
        step = self._session.step
        if self._step == step:
            return
        self.end()
        self._step = step
        self._write(step)
        _dump_start()

    def end(self) -> None:
        """The step is over."""
        if self._step is not None:
            self._step = None
            _dump_stop()

    def _write(self, step: int) -> None:
        session = self._session
        path = session.layout.kernel_config(step, session.identity.rank).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(self.settings(), indent=1))
        os.environ[VARIABLE] = str(path)
        os.environ.pop(OTHER_VARIABLE, None)

    def settings(self) -> dict[str, Any]:
        """Content of the file, as MindSpore's documentation of its dump has it."""
        session = self._session
        config = session.config
        picked = list(config.list)
        return {
            "common_dump_settings": {
                "op_debug_mode": 0,
                "dump_mode": 1 if picked else 0,
                # MindSpore refuses a path that is not absolute.
                "path": str(session.layout.base.absolute() / "kernels"),
                "net_name": "Net",
                "iteration": "all",
                "saved_data": "tensor" if config.task is Task.TENSOR else "statistic",
                "input_output": 0,
                "kernels": picked,
                "support_device": list(range(8)),
                "statistic_category": ["hash:md5"]
                if config.summary_mode is SummaryMode.MD5
                else ["max", "min", "avg", "l2norm"],
            },
            "e2e_dump_settings": {"enable": True, "trans_flag": True},
        }
