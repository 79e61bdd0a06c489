"""Lines that the launcher copies to the console say host and global rank; torchrun's log options do what they did."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from msprobe_launch.records.layout import RunLayout

sys.path[:0] = [str(Path(__file__).parent)]
from launching import started  # noqa: E402

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

Launch = Callable[..., "CompletedProcess[str]"]
HOST = socket.gethostname()

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
for number in range(3):
    os.write(1, f"out {number} of {rank}\\n".encode())
os.write(2, f"err of {rank}\\n".encode())
"""


@pytest.fixture
def launch(tmp_path: Path, run_cli: Launch) -> Launch:
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(*argv: str | Path, **env: str) -> CompletedProcess[str]:
        tokens = ["-m", "msprobe_launch", "--nproc", "2", "--run-dir", "run", *argv, "script.py"]
        return run_cli(tokens, cwd=tmp_path, env=env)

    return start


def of_ranks(text: str) -> list[str]:
    """The script's lines in the order of the ranks."""
    lines = [line for line in text.splitlines() if " of " in line and not line.startswith("[msprobe]")]
    return sorted(lines, key=lambda line: line[-1])


def written(folder: Path) -> dict[str, str]:
    """Log files by `<local rank>/<name>`, without the two folders of torch's that name the attempt."""
    return {f"{p.parent.name}/{p.name}": p.read_text() for p in folder.glob("*/attempt_0/*/*.log")}


def out(rank: int, prefix: str = "") -> list[str]:
    return [f"{prefix}out {number} of {rank}" for number in range(3)]


def test_without_options_lines_go_straight_to_the_console(launch: Launch, tmp_path: Path) -> None:
    done = launch()
    assert of_ranks(done.stdout) == [*out(0), *out(1)]
    assert of_ranks(done.stderr) == ["err of 0", "err of 1"]


def test_tee_copies_with_host_and_global_rank_and_the_files_hold_the_bare_lines(launch: Launch, tmp_path: Path) -> None:
    done = launch("--tee", "3")
    assert of_ranks(done.stdout) == [line for rank in (0, 1) for line in out(rank, f"[{HOST} rank {rank}]: ")]
    assert of_ranks(done.stderr) == [f"[{HOST} rank {rank}]: err of {rank}" for rank in (0, 1)]
    files = written(RunLayout(tmp_path / "run").logs)
    assert files["0/stdout.log"].splitlines() == out(0)
    assert files["1/stderr.log"] == "err of 1\n"


def test_redirects_log_dir_and_filters_are_torchruns(launch: Launch, tmp_path: Path) -> None:
    done = launch("--redirects", "1:3", "--log-dir", "elsewhere", "--tee", "0:1")
    assert of_ranks(done.stdout) == out(0, f"[{HOST} rank 0]: ")
    assert of_ranks(done.stderr) == ["err of 0"]
    files = written(tmp_path / "elsewhere")
    assert set(files) == {"0/stdout.log", "1/stdout.log", "1/stderr.log"}
    assert not RunLayout(tmp_path / "run").logs.exists()


def test_only_the_local_ranks_asked_for_are_copied(launch: Launch) -> None:
    done = launch("--tee", "3", "--local-ranks-filter", "1")
    assert of_ranks(done.stdout) == out(1, f"[{HOST} rank 1]: ")


def test_lines_that_hold_a_text_are_kept_in_one_file(launch: Launch, tmp_path: Path) -> None:
    launch("--tee", "3", "--duplicate-stdout-filters", "out 2")
    (kept,) = RunLayout(tmp_path / "run").logs.glob("*/attempt_0/filtered_stdout.log")
    assert of_ranks(kept.read_text()) == [f"[{HOST} rank {rank}]: out 2 of {rank}" for rank in (0, 1)]


def test_the_variable_of_torchs_still_decides(launch: Launch) -> None:
    done = launch("--tee", "1", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name}${local_rank}>")
    assert of_ranks(done.stdout) == [*out(0, "<default0>"), *out(1, "<default1>")]


def test_the_control_run_writes_the_same_lines(launch: Launch) -> None:
    done = launch("--probe-off", "--tee", "1")
    assert of_ranks(done.stdout) == [line for rank in (0, 1) for line in out(rank, f"[{HOST} rank {rank}]: ")]


def test_on_two_nodes_the_rank_is_the_global_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = ["--nnodes", "2", "--nproc", "1", "--tee", "1", "--run-dir", "run"]
    argv += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(started(tmp_path, *argv, str(node), "script.py")) for node in (0, 1)]
        for rank, node in enumerate(nodes):
            code, text, err = node.finish()
            assert code == 0, err
            assert of_ranks(text) == out(rank, f"[{HOST} rank {rank}]: ")


def test_a_progress_bar_on_a_terminal_stays_as_the_script_draws_it(tmp_path: Path) -> None:
    """Without --tee a rank writes to the terminal itself, and sees that it is one."""
    import pty
    import subprocess

    code = "import os, sys\nos.write(1, f'{sys.stdout.isatty()}|'.encode())\n"
    code += "for n in range(5):\n    os.write(1, f'\\rbar {n}/4'.encode())\nos.write(1, b'\\r\\n')\n"
    (tmp_path / "bar.py").write_text(code)
    master, slave = pty.openpty()
    argv = [sys.executable, "-m", "msprobe_launch", "--run-dir", "run", "--probe-status", "0", "bar.py"]
    env = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    seen = b""
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=slave, stdout=slave, stderr=slave):
        os.close(slave)
        with contextlib.suppress(OSError):  # the last writer has gone
            while piece := os.read(master, 65536):
                seen += piece
    os.close(master)
    bars = re.search(r"(\w+)\|((?:\rbar \d/4)+)\r", seen.decode())
    assert bars is not None, seen
    assert bars[1] == "True"
    assert bars[2] == "".join(f"\rbar {number}/4" for number in range(5))
