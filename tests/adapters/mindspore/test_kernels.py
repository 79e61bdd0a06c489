"""Level L2: what MindSpore's own dump is told, with its switches replaced; there is no Ascend here.

MindSpore reads the file also on the CPU, and refuses one that it does not understand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os
from pathlib import Path
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn
from msprobe_launch import adapters
from msprobe_launch.adapters.mindspore import kernels
from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.config import Level, ProbeConfig, Task
from msprobe_launch.errors import ConfigError

ms.set_device("CPU")
config = ProbeConfig(run_dir=Path("run"), level=Level.L2, task=Task.TENSOR, list=("MatMul-op1",))
identity = RankIdentity(3, 0, 4, "here", os.getpid())
try:
    adapters.start("mindspore", config, identity)
except ConfigError as error:
    print(error)
calls = []
kernels.on_host = lambda: False
kernels._dump_set_dynamic = lambda: calls.append("dynamic")
kernels._dump_start = lambda: calls.append("start " + os.environ["MINDSPORE_DUMP_CONFIG"])
kernels._dump_stop = lambda: calls.append("stop")
session = adapters.start("mindspore", config, identity)
net = nn.Dense(2, 2)
optimizer = nn.SGD(net.trainable_params(), 0.1)
step = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
for _ in range(2):
    optimizer(step(Tensor(np.ones((1, 2), np.float32)))[1])
session.finish(clean=True)
print(json.dumps(calls))
"""


def test_the_dump_is_told_per_step_and_the_cpu_is_refused(run_mindspore: Any, tmp_path: Any) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run_mindspore([script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    refused, calls = done.stdout.splitlines()
    assert refused.startswith("level L2 (kernels) is not available on the CPU")
    paths = [str(tmp_path / f"run/step{step}/kernel_config_3.json") for step in range(2)]
    assert json.loads(calls) == ["dynamic", f"start {paths[0]}", "stop", f"start {paths[1]}", "stop"]
    settings = json.loads(Path(paths[1]).read_text())["common_dump_settings"]
    assert settings["path"] == str(tmp_path / "run/kernels")
    assert (settings["saved_data"], settings["dump_mode"], settings["kernels"]) == ("tensor", 1, ["MatMul-op1"])
    assert json.loads((tmp_path / "run/step0/rank3/dump.json").read_text())["data"] == {}
