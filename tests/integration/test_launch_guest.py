"""A guest of the file system, a rank that hangs, and the line that tells how far the ranks are."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, load

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

Launch = Callable[..., "CompletedProcess[str]"]

# Eight steps; the files of a process may not grow in steps 3 to 5. Prints a hash of all that training has computed.
TRAINS = """
import hashlib, os, resource, signal, sys, torch
torch.manual_seed(int(os.environ["RANK"]))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for step in range(8):
    if "full" in sys.argv and step in (3, 6):
        limit = 0 if step == 3 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
parts = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
os.write(1, f"{os.environ['RANK']} {digest}\\n".encode())  # in one piece: two ranks share the console
"""


def hashes(done: CompletedProcess[str]) -> list[str]:
    return sorted(line for line in done.stdout.splitlines() if re.fullmatch(r"\d [0-9a-f]{64}", line))


def mark(run_dir: Path, rank: int) -> RankMark:
    return load(RunLayout(run_dir).roster_mark(rank), RankMark)


def test_a_disk_that_is_full_for_three_steps(tmp_path: Path, run_cli: Launch) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    argv = ["-m", "msprobe_launch", "--nproc", "2"]
    done = run_cli([*argv, "--run-dir", "run", "trains.py", "full"], cwd=tmp_path)
    bare = run_cli([*argv, "--probe-off", "trains.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(hashes(bare)) == 2
    assert hashes(done) == hashes(bare)
    for rank in (0, 1):
        found = mark(tmp_path / "run", rank)
        assert set(found.steps) | set(found.partial_steps) == set(range(8)), found
        assert {0, 1, 6, 7} <= set(found.steps)  # recording has resumed
        assert {3, 4} <= {*found.partial_steps}
        assert sum(found.lost.values()) > 0
        assert list(found.lost) == ["file system: File too large"]
        assert found.kept == found.calls - sum(found.lost.values()) > 0
        warnings = [
            line for line in done.stderr.splitlines() if line.startswith(f"[msprobe rank {rank}] could not record")
        ]
        assert len(warnings) == 1, done.stderr
    marks = [mark(tmp_path / "run", rank) for rank in (0, 1)]
    kept, lost = sum(found.kept for found in marks), sum(sum(found.lost.values()) for found in marks)
    assert f", {kept:,} calls -> {tmp_path / 'run'}" in done.stderr
    assert f"[msprobe] lost: {lost:,} calls: file system: File too large" in done.stderr
    report = run_cli(["-m", "aggregator", "run"], cwd=tmp_path)
    assert report.returncode == 3, report.stdout + report.stderr
    assert "lost" in report.stdout + report.stderr


def test_a_small_file_system_that_fills_up(tmp_path: Path, run_cli: Launch) -> None:
    """A real ENOSPC, on a tmpfs of 200 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        (tmp_path / "trains.py").write_text(TRAINS.replace("range(8)", "range(60)"))
        argv = ["-m", "msprobe_launch", "--nproc", "2"]
        done = run_cli([*argv, "--run-dir", disk / "run", "trains.py"], cwd=tmp_path)
        bare = run_cli([*argv, "--probe-off", "trains.py"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert hashes(done) == hashes(bare) != []
        marks = [mark(disk / "run", rank) for rank in (0, 1)]
        # The marks were written when there was no room any more: what was lost is told by rank and launcher alike.
        full = "file system: No space left on device"
        assert [(found.finished, found.exit_code, list(found.lost)) for found in marks] == [(True, 0, [full])] * 2
        assert marks[0].calls == marks[1].calls > 60 * 10
        assert [{*found.steps, *found.partial_steps} for found in marks] == [set(range(60))] * 2
        lines = done.stderr.splitlines()
        assert f"[msprobe] lost: {sum(found.lost[full] for found in marks):,} calls: {full}" in lines
        kept, some = sum(found.kept for found in marks), [found for found in marks if found.kept]
        assert any(f"recorded by {len(some)} of 2 ranks, " in line and f" {kept:,} calls -> " in line for line in lines)
        assert ("missing: rank" in done.stderr) == (len(some) < 2)
        assert sum("cannot be written" in line for line in lines) == 0
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_run_directory_that_cannot_be_written(tmp_path: Path, run_cli: Launch) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "file").touch()
    done = run_cli(["-m", "msprobe_launch", "--run-dir", "file/run", "trains.py"], cwd=tmp_path)
    assert done.returncode == 2
    assert "the run directory cannot be made" in done.stderr
    assert "--run-dir DIR" in done.stderr
    assert done.stdout == ""


NAMES = {"blanks and ++": "a b/c++ d", "CJK": "运行/実験", "255 bytes": f"{'语' * 85}"}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_odd_names_of_directories_and_scripts(tmp_path: Path, run_cli: Launch, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    script = folder / f"{name.rpartition('/')[2][:80]}.py"
    script.write_text("import torch\nm = torch.nn.Linear(3, 2)\nm(torch.ones(1, 3)).sum().backward()\n")
    done = run_cli(["-m", "msprobe_launch", "--run-dir", folder / "r", script], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "recorded by 1 of 1 ranks" in done.stderr
    default = run_cli(["-m", "msprobe_launch", script], cwd=folder)
    assert default.returncode == 0, default.stderr
    assert "recorded by 1 of 1 ranks" in default.stderr


HANGS = """
import datetime, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def load():
    time.sleep(100)
for step in range(5):
    x = model(torch.ones(1, 2)).sum()
    x.backward()
    optimizer.step()
    if step == 3 and rank == 1:
        load()
    dist.all_reduce(x.detach())
"""


def test_a_hang_names_who_waits_and_who_did_not_come(tmp_path: Path, run_cli: Launch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    options = ["--probe-hang-timeout", "8", "--probe-hang-kill", "--probe-status", "1", "--shutdown-timeout", "2"]
    done = run_cli(["-m", "msprobe_launch", "--nproc", "3", "--run-dir", "run", *options, script], cwd=tmp_path)
    assert done.returncode == 143
    lines = done.stderr.splitlines()
    assert f"[msprobe] ranks 0, 2 wait in all_reduce (collective 1 of step 3) at {script}:15 in <module>" in lines
    assert f"[msprobe] rank 1 did not come: in step 3 at {script}:8 in load" in lines
    stacks = (RunLayout(tmp_path / "run").hang_answer(0, 1).with_suffix(".txt")).read_text()
    assert f'File "{script}", line 8 in load' in stacks
    events = [json.loads(line) for line in RunLayout(tmp_path / "run").events.read_text().splitlines()]
    assert {event["event"] for event in events} == {"hang"}
    status = [
        line for line in lines if re.search(r"\[msprobe\] step \d.*, 3 of 3 ranks record, [\d,]+ calls/s, ", line)
    ]
    assert status


def test_on_a_terminal_the_line_is_the_last_row_and_the_scripts_lines_stay_whole(tmp_path: Path) -> None:
    """A pseudo-terminal of 24 rows; the script draws a progress bar with carriage returns."""
    import pty

    code = TRAINS.replace(
        "for step in range(8):",
        "import time\nfor step in range(8):\n    time.sleep(0.5)\n    print(f'\\rbar {step}/8', end='', flush=True)",
    )
    (tmp_path / "trains.py").write_text(code)
    master, slave = pty.openpty()
    argv = [sys.executable, "-m", "msprobe_launch", "--run-dir", "run", "trains.py"]
    env = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        seen = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            if not piece:
                break
            seen += piece
        assert process.wait(timeout=60) == 0
    os.close(master)
    text = seen.decode(errors="replace")
    assert re.search(r"\x1b7\x1b\[\d+;0f\x1b\[2K\[msprobe\] .*1 of 1 ranks record.*\x1b8", text)
    # Every redraw of the bar is whole, and the region is given back.
    assert re.findall(r"\rbar (\d)/8", text) == [str(step) for step in range(8)]
    assert re.search(r"\x1b\[0;\d+r\x1b\[\d+;0f\x1b\[2K\x1b8(?!.*\x1b\[0;\d+r)", text, re.S)


def test_a_closed_stderr_stops_nobody(tmp_path: Path) -> None:
    """`2>&-`: what is opened next would get its number, and be written into."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\n"
        "net = torch.nn.Linear(2, 2)\n"
        "net(torch.ones(1, 2)).sum().backward()\n"
        "os.write(2, b'to stderr')\n"
        "print('through', flush=True)\n"
    )
    command = shlex.join(
        [sys.executable, "-m", "msprobe_launch", "--nproc", "1", "--run-dir", str(tmp_path / "run"), str(script)]
    )
    done = subprocess.run(
        ["sh", "-c", f"{command} 2>&-"], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "through\n")
    dump = (tmp_path / "run" / "step0" / "rank0" / "dump.json").read_text()
    assert "to stderr" not in dump
    assert "Functional.linear.0.forward" in json.loads(dump)["data"]
