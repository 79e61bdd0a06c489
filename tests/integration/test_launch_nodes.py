"""Several agents on one machine: shared and separate run directories, static and c10d rendezvous, nodes that come."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark, load

sys.path[:0] = [str(Path(__file__).parent)]
from launching import started  # noqa: E402

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

STEPS = """
import os, sys, time, torch
rank = int(os.environ["RANK"])
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
step()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_nodes(tmp_path: Path, code: str, *options: str, run_dirs: tuple[str, str], static: bool = False) -> list[str]:
    """Both agents to their end; their stderr. `--node-rank` is added for the static rendezvous."""
    (tmp_path / "script.py").write_text(STEPS + code)
    port = free_port()
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    errors = []
    with contextlib.ExitStack() as stack:
        nodes = []
        for node, run_dir in enumerate(run_dirs):
            if static:
                meet = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            argv = ["--nnodes", "2", "--nproc", "1", "--run-dir", run_dir, *meet, *options, "script.py"]
            nodes.append(stack.enter_context(started(tmp_path, *argv)))
        for node in nodes:
            code_, _, err = node.finish()
            assert code_ == 0, err
            errors.append(err)
    return errors


@pytest.mark.slow
def test_a_restart_on_two_nodes_with_separate_run_directories(tmp_path: Path) -> None:
    """c10d; rank 1's failure restarts both, and the aggregator reads both nodes' last attempts together."""
    # Each rank leaves a trace, as torch's restart count differs between the two nodes afterwards. Rank 1 goes down only
    # once rank 0 is there: a node whose rank has ended well cannot be asked to restart it.
    code = "mine = f'seen{rank}'\nif not os.path.exists(mine):\n    open(mine, 'w').close()\n"
    code += "    while not os.path.exists('seen0'):\n        time.sleep(0.1)\n"
    code += "    if rank == 1:\n        sys.exit(3)\n    time.sleep(600)\n"
    two_nodes(tmp_path, code, "--max-restarts", "1", run_dirs=("a", "b"))
    found: dict[tuple[int, int], RankMark] = {}
    for name in ("a", "b"):
        for attempt in RunLayout(tmp_path / name).attempts():
            layout = RunLayout(tmp_path / name, attempt)
            for rank in layout.roster_ranks():
                found[attempt, rank] = load(layout.roster_mark(rank), RankMark)
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[1, 0].ended == found[1, 1].ended == "finished"
    starts = {load(RunLayout(tmp_path / name).manifest, Manifest).started for name in ("a", "b")}
    assert len(starts) == 1
    done = subprocess.run(
        [sys.executable, "-m", "aggregator", "a", "b"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode in (0, 1), done.stderr
    assert "2 of 2 ranks" in done.stdout + done.stderr or "ranks 0-1" in done.stdout + done.stderr


def test_static_rendezvous_and_one_shared_run_directory(tmp_path: Path) -> None:
    two_nodes(tmp_path, "", run_dirs=("run", "run"), static=True)
    layout = RunLayout(tmp_path / "run")
    assert layout.roster_ranks() == [0, 1]
    assert load(layout.manifest, Manifest).world_size == 2


@pytest.mark.slow
def test_a_node_that_comes_later_changes_the_world_and_gets_a_new_attempt(tmp_path: Path) -> None:
    """`--nnodes 1:2`: torch starts all anew without counting it as a restart.

    torch 2.13 shares its store between agent and ranks, and a node that stays number 0 does not tell a newcomer where
    it is: torchrun itself waits in vain then. The variable switches that off.
    """
    alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code = "open(f\"up{os.environ['WORLD_SIZE']}-{rank}\", 'w').close()\n"
    code += "time.sleep(600 if os.environ['WORLD_SIZE'] == '1' else 0)\n"
    (tmp_path / "script.py").write_text(STEPS + code)
    endpoint = f"127.0.0.1:{free_port()}"
    argv = ["--nnodes", "1:2", "--nproc", "1", "--max-restarts", "3", "--run-dir", "run", "--shutdown-timeout", "5"]
    argv += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "job",
        "--rdzv-conf",
        "last_call_timeout=1",
    ]
    with started(tmp_path, *argv, "script.py", **alone) as first:
        first.await_(lambda: (tmp_path / "up1-0").exists())
        with started(tmp_path, *argv, "script.py", **alone) as second:
            assert [node.finish()[0] for node in (first, second)] == [0, 0], (
                first.err.read_text(),
                second.err.read_text(),
            )
    worlds = {}
    for attempt in RunLayout(tmp_path / "run").attempts():
        layout = RunLayout(tmp_path / "run", attempt)
        worlds[attempt] = [load(layout.roster_mark(rank), RankMark).world_size for rank in layout.roster_ranks()]
    assert worlds == {0: [1], 1: [2, 2]}
    events = [json.loads(line) for line in RunLayout(tmp_path / "run").events.read_text().splitlines()]
    assert "attempt 1: the world has 2 ranks now, before it had 1" in [event["text"] for event in events]


@pytest.mark.slow
def test_two_network_namespaces(tmp_path: Path) -> None:
    """Each node with its own network, joined by a pair of virtual cards."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8) to make network namespaces")
    names = [f"msprobe{os.getpid()}{side}" for side in "ab"]

    def ip(*argv: str) -> bool:
        return subprocess.run(["ip", *argv], capture_output=True).returncode == 0

    try:
        made = all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", "name", f"v{os.getpid()}a", "netns", names[0], "type", "veth", "peer",
                           "name", f"v{os.getpid()}b", "netns", names[1])  # fmt: skip
        for side, name in zip("ab", names, strict=True):
            card, address = f"v{os.getpid()}{side}", f"10.99.7.{1 if side == 'a' else 2}/24"
            made = (
                made
                and ip("-n", name, "addr", "add", address, "dev", card)
                and ip("-n", name, "link", "set", card, "up")
            )
            made = made and ip("-n", name, "link", "set", "lo", "up")
        if not made:
            pytest.skip("this machine makes no network namespaces")
        code = (
            "import torch.distributed as dist\ndist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\n"
            "assert x.item() == 2\ndist.destroy_process_group()\n"
        )
        (tmp_path / "script.py").write_text(STEPS + code)
        (tmp_path / "hosts").mkdir()
        with contextlib.ExitStack() as stack:
            nodes: list[subprocess.Popen[bytes]] = []
            for side, name in zip("ab", names, strict=True):
                argv = [
                    sys.executable,
                    "-m",
                    "msprobe_launch",
                    "--nnodes",
                    "2",
                    "--nproc",
                    "1",
                    "--run-dir",
                    f"run{side}",
                ]
                argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.99.7.1:29411", "--rdzv-id", "job"]
                # The host's name does not resolve to the addresses here, by which torch tells whose the endpoint is.
                argv += ["--rdzv-conf", f"is_host={side == 'a'}"]
                argv += ["--local-addr", "10.99.7.1" if side == "a" else "10.99.7.2", "script.py"]
                env = {**os.environ, "GLOO_SOCKET_IFNAME": f"v{os.getpid()}{side}", "OMP_NUM_THREADS": "1"}
                node = subprocess.Popen(["ip", "netns", "exec", name, *argv], cwd=tmp_path, env=env)
                stack.callback(node.wait)
                stack.callback(node.send_signal, signal.SIGTERM)
                nodes.append(node)
            assert [node.wait(timeout=120) for node in nodes] == [0, 0]
        assert RunLayout(tmp_path / "runa").roster_ranks() + RunLayout(tmp_path / "runb").roster_ranks() in (
            [0, 1],
            [1, 0],
        )
    finally:
        for name in names:
            ip("netns", "delete", name)
