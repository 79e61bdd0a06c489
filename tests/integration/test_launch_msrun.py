"""Backend msrun. Most launches use a small stand-in for MindSpore and take a second; the last use MindSpore."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from msprobe_launch.cli import main
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import Manifest, RankMark, load

sys.path[:0] = [str(Path(__file__).parent)]
import fake_mindspore  # noqa: E402
from launching import Started, started  # noqa: E402

Launch = Callable[..., "CompletedProcess[str]"]
REPOSITORY = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()

# Says who it is before and after `init`, then does what the test adds.
SCRIPT = """
import json, os, signal, sys, time
import mindspore
from mindspore.communication import get_rank, init
names = ("RANK_ID", "MS_NODE_ID", "DEVICE_ID", "RANK_SIZE", "MS_WORKER_NUM", "MS_ROLE", "MS_SCHED_HOST",
         "RANK_TABLE_FILE", "MS_TOPO_TIMEOUT", "MS_SIMULATION_LEVEL")
environ = {name: os.environ.get(name) for name in names}
if os.environ.get("MS_ROLE"):
    init()
rank = get_rank()
number = os.environ["RANK_ID"] if rank is None else rank
with open(f"env{number}.json", "w") as file:
    json.dump({**environ, "rank": rank, "python": sys.executable, "argv": sys.argv[1:], "stdin": os.isatty(0)}, file)
print("up", rank)
"""


@pytest.fixture
def package(tmp_path: Path) -> str:
    """PYTHONPATH with the stand-in."""
    return f"{fake_mindspore.make(tmp_path / 'package')}{os.pathsep}{REPOSITORY}"


@pytest.fixture
def launch(tmp_path: Path, package: str, run_cli: Launch) -> Launch:
    """`msprobe-launch` with the script, and the test's own code after its init."""

    def start(*argv: str | Path, code: str = "", script: str = "script.py", **env: str) -> CompletedProcess[str]:
        (tmp_path / "script.py").write_text(SCRIPT + code)
        tokens = ["-m", "msprobe_launch", *argv, script]
        return run_cli(tokens, cwd=tmp_path, env={"PYTHONPATH": package, "IMPORTS": str(tmp_path / "imports"), **env})

    return start


def environment(tmp_path: Path, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / f"env{rank}.json").read_text())
    return found


def mark(run_dir: Path, rank: int) -> RankMark:
    return load(RunLayout(run_dir).roster_mark(rank), RankMark)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- one node


def test_workers_get_msruns_environment_and_the_scheduler_never_sees_the_script(launch: Launch, tmp_path: Path) -> None:
    done = launch(
        "--nproc", "2", "--run-dir", "run", "--join=True", "--of_a_later_release", "x", RANK="5", MS_NODE_ID="9"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "[msprobe] backend msrun: script.py imports mindspore"
    # The stand-in is nothing that can be recorded, which is said and stops nobody.
    shown = [line for line in done.stdout.splitlines() if "not recorded, the training goes on" not in line]
    assert sorted(shown) == [f"[{HOST} rank 0]: up 0", f"[{HOST} rank 1]: up 1"]
    for rank in (0, 1):
        assert environment(tmp_path, rank) == {
            "RANK_ID": str(rank),
            "MS_NODE_ID": str(rank),
            "DEVICE_ID": str(rank),
            "RANK_SIZE": "2",
            "MS_WORKER_NUM": "2",
            "MS_ROLE": "MS_WORKER",
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_TOPO_TIMEOUT": "600",
            "RANK_TABLE_FILE": None,
            "MS_SIMULATION_LEVEL": None,
            "rank": rank,
            "python": sys.executable,
            "argv": [],
            "stdin": False,
        }
    layout = RunLayout(tmp_path / "run")
    assert sorted(path.name for path in layout.logs.iterdir()) == ["scheduler.log", "worker_0.log", "worker_1.log"]
    assert (layout.logs / "worker_1.log").read_text().endswith("up 1\n")
    manifest = load(layout.manifest, Manifest)
    assert (manifest.backend, manifest.world_size, manifest.nnodes) == ("msrun", 2, "1")
    assert layout.roster_ranks() == [0, 1]
    # Three processes have imported the package, the launcher is none of them, and the scheduler has nothing of ours.
    imports = (tmp_path / "imports").read_text().splitlines()
    assert sorted(imports) == ["MS_SCHED None", "MS_WORKER None", "MS_WORKER None"]


def test_a_script_without_init_ends_the_job_and_the_scheduler_with_it(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import mindspore\nopen('ran', 'a').write('x')\n")
    done = launch("--nproc", "2", "--probe-off", "--log_dir", "logs", script="plain.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").read_text() == "xx"


def test_the_words_after_the_script_are_its_own_and_python_is_this_python(launch: Launch, tmp_path: Path) -> None:
    done = launch("--worker_num=1", "--local_worker_num=1", "--probe-off", "python", script="script.py")
    assert done.returncode == 0, done.stderr
    assert environment(tmp_path, 0)["python"] == sys.executable
    # msrun's own place for logs without --log_dir.
    assert (tmp_path / "worker_0.log").read_text() == "up 0\n"


def test_a_failing_worker_is_the_culprit_and_the_others_are_asked_to_end_first(launch: Launch, tmp_path: Path) -> None:
    code = """
if rank == 1:
    time.sleep(1)
    print("no newline at the end", end="")
    raise SystemExit(7)
def farewell(*_):
    print("farewell", rank)
    sys.exit(0)
if rank == 0:
    signal.signal(signal.SIGTERM, farewell)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
    begin = time.monotonic()
    done = launch("--nproc", "3", "--run-dir", "run", "--shutdown-timeout", "1", code=code)
    assert done.returncode == 7
    assert time.monotonic() - begin < 30
    lines = done.stdout.splitlines()
    assert f"[{HOST} rank 0]: farewell 0" in lines
    assert f"[{HOST} rank 1]: no newline at the end" in lines
    marks = [mark(tmp_path / "run", rank) for rank in range(3)]
    assert [m.ended for m in marks] == ["stopped by launcher", "exited 7", "stopped by launcher"]
    assert [m.exit_code for m in marks] == [0, 7, -signal.SIGKILL]
    assert [m.role for m in marks] == ["", "culprit", ""]
    said = done.stderr.splitlines()
    assert said[-2] == "[msprobe] ranks 0, 2: stopped by launcher"
    assert said[-1].startswith(f"[msprobe] rank 1 on {HOST} failed first: exited 7")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, package: str, number: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + "time.sleep(600)\n")
    argv = ["--nproc", "2", "--probe-off", "--log_dir", "logs", "script.py"]
    with started(tmp_path, *argv, PYTHONPATH=package) as job:
        job.await_(lambda: (tmp_path / "env0.json").exists() and (tmp_path / "env1.json").exists())
        time.sleep(1)  # the guardian looks around four times a second
        job.process.send_signal(number)
        code, _, err = job.finish()
        assert job.gone_within(10)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert err.splitlines()[-1] == f"[msprobe] stopped by {signal.Signals(number).name}"


def test_what_the_console_shows_and_how_logs_are_named(launch: Launch, tmp_path: Path) -> None:
    code = "sys.stdout.write('10%\\r50%\\r100%\\n')\nprint('to stderr', file=sys.stderr)\n"
    options = ["--tail_worker_log=1", "--worker_log_name", "w_{ip}_{hostname}", "--rank_table_file", "t.json"]
    done = launch("--nproc", "2", "--probe-off", "--log_dir", "logs", "--cluster_time_out=99", *options, code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[{HOST} rank 1]: {text}" for text in ("up 1", "100%", "to stderr")]
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["scheduler.log", f"w_127.0.0.1_{HOST}_0.log", f"w_127.0.0.1_{HOST}_1.log"]
    assert environment(tmp_path, 0)["RANK_TABLE_FILE"] == "t.json"
    assert environment(tmp_path, 0)["MS_TOPO_TIMEOUT"] == "99"


def test_a_simulation_has_no_scheduler(launch: Launch, tmp_path: Path) -> None:
    done = launch("--worker_num=8", "--local_worker_num=8", "--sim_level=1", "--sim_rank_id=5", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    found = environment(tmp_path, 5)
    assert (found["MS_SIMULATION_LEVEL"], found["RANK_SIZE"], found["MS_ROLE"]) == ("1", "8", None)
    layout = RunLayout(tmp_path / "run")
    assert [path.name for path in layout.logs.iterdir()] == ["worker_0.log"]
    assert (layout.roster_ranks(), mark(tmp_path / "run", 5).world_size) == ([5], 8)


def test_jobs_side_by_side_have_ports_of_their_own(tmp_path: Path, package: str, launch: Launch) -> None:
    code = "time.sleep(600 if len(sys.argv) > 1 else 2)\n"
    (tmp_path / "script.py").write_text(SCRIPT + code)
    port = free_port()
    with contextlib.ExitStack() as stack:

        def job(name: str, *argv: str) -> Started:
            tokens = ["--nproc", "1", "--probe-off", "--log_dir", name, *argv]
            return stack.enter_context(started(tmp_path, *tokens, PYTHONPATH=package))

        held = job("held", f"--master_port={port}", "script.py", "for long")
        held.await_(lambda: "up" in held.out.read_text())
        jobs = [job(f"job{number}", "script.py") for number in range(3)]
        second = launch("--nproc", "1", "--probe-off", f"--master_port={port}", code=code)
        assert second.returncode == 2
        assert f"--master_port {port}: another msprobe-launch has its scheduler there." in second.stderr
        assert [each.finish()[0] for each in jobs] == [0, 0, 0]


# -- several nodes


def nodes(tmp_path: Path, package: str, argvs: list[list[str]], code: str = "") -> list[tuple[int, str, str]]:
    """Launchers side by side on this machine; the last is started first."""
    (tmp_path / "script.py").write_text(SCRIPT + code)
    with contextlib.ExitStack() as stack:
        jobs = []
        for argv in reversed(argvs):
            jobs.append(stack.enter_context(started(tmp_path, *argv, "script.py", PYTHONPATH=package)))
            time.sleep(0.3)
        return [job.finish() for job in reversed(jobs)]


def test_two_nodes_share_a_run_directory_and_one_scheduler(tmp_path: Path, package: str, launch: Launch) -> None:
    common = ["--worker_num=4", "--nproc", "2", f"--master_port={free_port()}", "--run-dir", "run"]
    argvs = [[*common, "--node_rank=0"], [*common, "--node_rank=1"]]
    for code, _, err in nodes(tmp_path, package, argvs):
        assert code == 0, err
    layout = RunLayout(tmp_path / "run")
    expected = ["scheduler.log", *(f"worker_{rank}.log" for rank in range(4))]
    assert sorted(path.name for path in layout.logs.iterdir()) == expected
    assert layout.roster_ranks() == [0, 1, 2, 3]
    assert [environment(tmp_path, rank)["DEVICE_ID"] for rank in range(4)] == ["0", "1", "0", "1"]
    manifest = load(layout.manifest, Manifest)
    assert (manifest.world_size, manifest.nnodes) == (4, "2")
    # The same line once more is another run, which must not be written over.
    again = launch(*argvs[1])
    assert again.returncode == 2
    assert "a run started" in again.stderr


def test_a_failure_on_one_node_ends_the_scheduler_and_with_it_the_other(tmp_path: Path, package: str) -> None:
    code = "if rank == 0:\n    sys.exit(3)\nfrom mindspore.communication import _Here\n"
    code += "assert _Here.line.readline(), 'connection closed by peer'\n"
    common = ["--worker_num=2", "--nproc", "1", f"--master_port={free_port()}"]
    argvs = [[*common, "--node_rank=0", "--run-dir", "a"], [*common, "--node_rank=1", "--run-dir", "b"]]
    (tmp_path / "script.py").write_text(SCRIPT + code)
    with started(tmp_path, *argvs[0], "script.py", PYTHONPATH=package) as here:
        here.await_(lambda: (tmp_path / "a/logs/scheduler.log").exists())
        with started(tmp_path, *argvs[1], "script.py", PYTHONPATH=package) as there:
            first, second = here.finish(), there.finish()
    assert (first[0], second[0]) == (3, 1)
    assert "rank 0 on " in first[2].splitlines()[-1]


def test_without_a_node_rank_the_framework_numbers_the_workers(tmp_path: Path, package: str) -> None:
    common = ["--worker_num=2", "--nproc", "1", f"--master_port={free_port()}", "--probe-off", "--log_dir"]
    for code, out, err in nodes(tmp_path, package, [[*common, "a"], [*common, "b"]]):
        assert code == 0, err
        assert out.startswith(f"[{HOST} worker 0]: up ")
    for rank in (0, 1):
        found = environment(tmp_path, rank)
        assert (found["MS_NODE_ID"], found["RANK_ID"], found["rank"]) == (None, None, rank)


# -- what is refused

REFUSED = {
    "more here than there are": (["--local_worker_num=4", "--worker_num=2"], "is more than --worker_num 2."),
    "no worker": (["--nproc", "0"], "0 and 0 workers; at least 1"),
    "a rank beyond the last": (["--worker_num=4", "--nproc=2", "--node_rank=2"], "would be ranks 4-5, but"),
    "said twice": (["--nproc=2", "--local_worker_num=2"], "both say how many ranks to start"),
    "no number": (["--worker_num=two"], "argument --worker_num: invalid int value: 'two'"),
    "no value": (["--join=a b", "--nproc=1"], "msrun's options: invalid syntax"),
    "a port that is not for users": (["--nproc=1", "--master_port=80"], "msrun takes 1024 to 65535"),
    "a host that is not there": (["--nproc=1", "--master_addr=no.such.host.invalid"], "this name has no address"),
    "ranks that are not there": (["--nproc=2", "--probe-ranks=5"], "picks none of the ranks 0-1."),
    "lines of no rank": (["--nproc=2", "--tail_worker_log=one"], "ranks such as 0,2"),
    "an option of nobody's": (["--worker_num=2", "--worker_nun=2"], "Did you mean '--worker_num'?"),
    "logs in a file": (["--nproc=1", "--log_dir=script.py"], "script.py cannot be used: File exists"),
}


@pytest.mark.parametrize(("argv", "expected"), REFUSED.values(), ids=REFUSED)
def test_one_error_exit_code_2_and_nothing_made(
    argv: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(fake_mindspore.make(tmp_path / "package"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    before = dict(os.environ)
    assert main(["--backend", "msrun", "--run-dir", "run", *argv, "script.py"]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "script.py"]
    assert dict(os.environ) == before


def test_a_port_in_use_and_a_script_that_is_not_there(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = launch("--nproc", "1", "--probe-off", f"--master_port={port}")
        assert done.returncode == 2
        assert f"--master_port {port}: another program listens on 127.0.0.1." in done.stderr
    done = launch("--backend", "msrun", "--nproc", "1", "--probe-off", script="no.py")
    assert done.returncode == 2
    assert "no.py: there is no such file, seen from " in done.stderr


def test_numpy_2_is_refused_by_name_at_the_start(launch: Launch, tmp_path: Path) -> None:
    launch("--nproc", "1", "--dry-run")  # makes the package
    for package, version in (("mindspore", "2.10.0"), ("numpy", "2.3.1")):
        fake_mindspore.distribution(tmp_path / "package", package, version)
    for more in ([], ["--dry-run"], ["--probe-msrun", "exec"]):
        done = launch("--nproc", "1", "--run-dir", "run", *more)
        assert done.returncode == 2
        assert "MindSpore 2.10.0 does not work with numpy 2.3.1: it needs numpy<2." in done.stderr
        assert done.stderr.splitlines()[-1] == "[msprobe] pip install 'numpy<2'"
    assert not (tmp_path / "run").exists()


def test_info_names_the_numpy_that_breaks_mindspore(tmp_path: Path, package: str, run_cli: Launch) -> None:
    for name, version in (("mindspore", "2.10.0"), ("numpy", "2.3.1")):
        fake_mindspore.distribution(tmp_path / "package", name, version)
    done = run_cli(["-m", "msprobe_launch", "--info", "--backend", "msrun"], cwd=tmp_path, env={"PYTHONPATH": package})
    assert done.returncode == 1
    assert "NO  numpy           MindSpore 2.10.0 does not work with numpy 2.3.1" in done.stdout
    assert "-> pip install 'numpy<2'" in done.stdout
    assert done.stdout.splitlines()[-1] == "NO  recording       will not work here: numpy"


# -- with MindSpore

# Data parallel by hand; every rank ends with the same parameters, whose hash it prints.
TRAINS = """
import hashlib, os, sys
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
ms.set_device("CPU")
init()
ms.set_seed(1)
rank, size = get_rank(), get_group_size()
net = nn.Dense(4, 3)
optimizer = nn.SGD(net.trainable_params(), 0.1)
reduce = ops.AllReduce()
train = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
for step in range(3):
    if os.environ.get("FAILS") == str(rank) and step == 2:
        raise ValueError("planted")
    _, gradients = train(Tensor(np.full((2, 4), rank + 1, np.float32)))
    optimizer(tuple(reduce(gradient) / size for gradient in gradients))
digest = hashlib.md5(b"".join(p.asnumpy().tobytes() for p in net.trainable_params())).hexdigest()
sys.stdout.write(f"hash {digest}\\n")  # in one piece: plain msrun gives both workers one pipe
"""


@pytest.fixture
def train(tmp_path: Path, run_mindspore: Launch) -> Launch:
    (tmp_path / "train.py").write_text(TRAINS)

    def start(*argv: str, **env: str) -> CompletedProcess[str]:
        tokens = ["-m", "msprobe_launch", *argv, "train.py"]
        return run_mindspore(tokens, cwd=tmp_path, env={"GLOG_v": "3", **env})

    return start


def hashes(out: str) -> list[str]:
    return [line.rpartition("hash ")[2] for line in out.splitlines() if "hash " in line]


def test_a_worker_that_raises_at_step_2_is_the_last_thing_said(train: Launch, tmp_path: Path) -> None:
    done = train("--nproc", "2", "--run-dir", "run", FAILS="1")
    assert done.returncode == 1
    layout = RunLayout(tmp_path / "run")
    first, second = (mark(layout.root, rank) for rank in (0, 1))
    assert (first.ended, second.ended, second.role) == ("stopped by launcher", "exited 1", "culprit")
    lines = done.stderr.splitlines()
    assert any("rank 0: stopped by launcher" in line for line in lines)
    assert any(line.startswith(f"[msprobe] rank 1 on {HOST} failed first: exited 1") for line in lines)
    assert lines[-2:] == ["[msprobe] ValueError: planted", f"[msprobe]   at {tmp_path}/train.py:17 in <module>"]
    for folder in (layout.rank_folder(step, rank) for step in (0, 1) for rank in (0, 1)):
        # The step that was under way is a journal: the dump without its end.
        assert ".forward" in (folder.dump if folder.dump.exists() else folder.journal).read_text()
    names = {folder.path.name for step in layout.steps() for folder in layout.rank_folders(step)}
    assert names <= {"rank0", "rank1"}


@pytest.mark.slow
def test_info_records_with_mindspore(tmp_path: Path, run_mindspore: Launch) -> None:
    done = run_mindspore(["-m", "msprobe_launch", "--info", "--backend", "msrun"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "ok  mindspore       2." in done.stdout
    assert "ok  injection       a child process recorded" in done.stdout


@pytest.mark.slow
def test_a_signal_leaves_nothing_of_the_installed_msrun(tmp_path: Path, mindspore_python: Path) -> None:
    """On its own it would end and leave its scheduler, its workers and their `tail -f` running."""
    (tmp_path / "train.py").write_text(TRAINS + "print('trained', flush=True)\nimport time\ntime.sleep(600)\n")
    argv = ["--probe-msrun", "exec", "--nproc", "2", f"--master_port={free_port()}", "--probe-off", "--log_dir", "logs"]
    env = {"GLOG_v": "3", "PATH": path_of(mindspore_python)}
    with started(tmp_path, *argv, "train.py", python=mindspore_python, **env) as job:
        job.await_(lambda: job.out.read_text().count("trained") == 2)
        assert len(job.tree()) >= 6
        job.process.send_signal(signal.SIGTERM)
        code, _, err = job.finish()
        assert (code, err.splitlines()[-1]) == (143, "[msprobe] stopped by SIGTERM")
        assert job.gone_within(10)


@pytest.mark.slow
def test_who_waits_in_which_collective_and_who_did_not_come(train: Launch, tmp_path: Path) -> None:
    source = TRAINS.replace("    _, gradients", "    if rank == 1 and step == 2:\n        load()\n    _, gradients")
    head = "import time\ndef load():\n    time.sleep(600)\n"
    (tmp_path / "train.py").write_text(head + source)
    # Longer than a step takes on a machine that has other things to do.
    done = train("--nproc", "2", "--run-dir", "run", "--probe-hang-timeout", "20", "--probe-hang-kill")
    assert done.returncode == 143
    lines = done.stderr.splitlines()
    assert any("rank 0 wait in all_reduce (collective 1 of step 2) at " in line for line in lines), done.stderr
    assert any("rank 1 did not come: in step " in line and "train.py:3 in load" in line for line in lines)


@pytest.mark.slow
def test_own_spawn_and_the_installed_msrun_train_alike(train: Launch, tmp_path: Path, mindspore_python: Path) -> None:
    own = train("--nproc", "2", "--run-dir", "own")
    port = f"--master_port={free_port()}"
    real = train("--nproc", "2", "--run-dir", "real", "--probe-msrun", "exec", port)
    command = [
        str(mindspore_python.with_name("msrun")),
        "--worker_num=2",
        "--local_worker_num=2",
        "--join=True",
        f"--master_port={free_port()}",
    ]
    env = {**os.environ, "GLOG_v": "3", "PATH": path_of(mindspore_python)}
    plain = subprocess.run([*command, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert (own.returncode, real.returncode, plain.returncode) == (0, 0, 0)
    found = [hashes(done.stdout) for done in (own, real, plain)]
    assert len(found[0]) == 2
    assert len({tuple(each) for each in found}) == 1
    for name in ("own", "real"):
        layout = RunLayout(tmp_path / name)
        expected = ["scheduler.log", "worker_0.log", "worker_1.log"]
        assert sorted(path.name for path in layout.logs.iterdir()) == expected
        assert layout.roster_ranks() == [0, 1]


@pytest.mark.slow
def test_two_nodes_whose_workers_mindspore_numbers(tmp_path: Path, mindspore_python: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    argv = ["--worker_num=2", "--nproc", "1", f"--master_port={free_port()}", "--run-dir"]
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(started(tmp_path, *argv, name, "train.py", python=mindspore_python, GLOG_v="3"))
            for name in ("a", "b")
        ]
        for job in jobs:
            code, _, err = job.finish()
            assert code == 0, err
            assert "1 of 1 ranks" in err
    found = sorted(rank for name in ("a", "b") for rank in RunLayout(tmp_path / name).roster_ranks())
    assert found == [0, 1]


def path_of(python: Path) -> str:
    """PATH on which `python` and `msrun` are that environment's."""
    return f"{python.parent}{os.pathsep}{os.environ['PATH']}"
