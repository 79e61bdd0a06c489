"""One rank's process as the launcher starts it, without the launcher: what it sees, leaves and hides."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from msprobe_launch.config import ProbeConfig
from msprobe_launch.launch.injection import worker_environment
from msprobe_launch.records.layout import RunLayout
from msprobe_launch.records.roster import RankMark, load, save

Rank = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def rank(tmp_path: Path, run_cli: Rank) -> Rank:
    """Run code as rank 1 of a run in `tmp_path/run`; `pythonpath` is the user's."""

    def start(code: str, *flags: str, pythonpath: str | None = None, bare: bool = False) -> CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(code)
        users = {} if pythonpath is None else {"PYTHONPATH": pythonpath}
        added = {} if bare else worker_environment(ProbeConfig(run_dir=tmp_path / "run"), users)
        numbers = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
        return run_cli([*flags, script], env={**users, **added, **numbers}, cwd=tmp_path)

    return start


def mark_in(tmp_path: Path) -> RankMark:
    return load(RunLayout(tmp_path / "run").roster_mark(1), RankMark)


LOOK = """
import json, os, subprocess, sys
def look():
    return {"pythonpath": os.environ.get("PYTHONPATH"), "path": sys.path, "meta": len(sys.meta_path),
            "ours": sorted(k for k in os.environ if k.startswith("MSPROBE")),
            "user": getattr(sys.modules.get("sitecustomize"), "RUNS", None)}
if __name__ == "__main__":
    child = subprocess.run([sys.executable, "-c", "import json, script; print(json.dumps(script.look()))"],
                           capture_output=True, text=True, check=True)
    print(json.dumps([look(), json.loads(child.stdout)]))
"""


@pytest.mark.parametrize("pythonpath", [None, "", "users", "users:", "users:other"])
def test_the_script_and_its_children_see_what_they_would_without_us(
    rank: Rank, tmp_path: Path, pythonpath: str | None
) -> None:
    site = tmp_path / "users"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins\nRUNS = builtins.RUNS = getattr(builtins, 'RUNS', 0) + 1\n")
    ours, bare = (json.loads(rank(LOOK, pythonpath=pythonpath, bare=bare).stdout) for bare in (False, True))
    # The finder that waits for a framework is the one thing to see, and in the rank only.
    assert ours[0].pop("meta") == bare[0].pop("meta") + 1
    assert ours == bare


def test_an_exception_of_the_users_sitecustomize_is_reported_as_python_does(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('the user is wrong')\n")
    code = "import sys; print('sitecustomize' in sys.modules)"
    ours, bare = (rank(code, pythonpath=str(tmp_path), bare=bare) for bare in (False, True))
    assert (ours.returncode, ours.stdout, ours.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert "the user is wrong" in ours.stderr


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    raise ValueError('no')\nf()",
        "import sys\nsys.excepthook = lambda *a: print('mine', a[1], file=sys.stderr)\n1/0",
        "import sys\nsys.exit('goodbye')",
        "import sys\nsys.exit(7)",
        "raise KeyboardInterrupt",
        "x = ",
    ],
)
def test_what_the_user_sees_of_an_end_is_the_same(rank: Rank, code: str) -> None:
    ours, bare = (rank(code, bare=bare) for bare in (False, True))
    assert (ours.returncode, ours.stdout, ours.stderr) == (bare.returncode, bare.stdout, bare.stderr)


@pytest.mark.parametrize(
    ("code", "exception"),
    [
        ("def f():\n    raise ValueError('no')\nf()", "ValueError: no"),
        ("import sys\nsys.excepthook = lambda *a: None\n1/0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(7)", ""),
    ],
)
def test_a_rank_that_never_imports_a_framework_says_so(rank: Rank, tmp_path: Path, code: str, exception: str) -> None:
    rank(code)
    mark = mark_in(tmp_path)
    assert (mark.attached, mark.note) == (False, "script.py never imported torch or mindspore")
    assert mark.exception.partition("\n")[0] == exception


def test_a_forked_child_leaves_the_mark_alone(rank: Rank, tmp_path: Path) -> None:
    code = "import os, sys\npid = os.fork()\nif pid == 0:\n    raise ValueError('child')\nos.waitpid(pid, 0)\n"
    assert rank(code).returncode == 0
    assert mark_in(tmp_path).exception == ""


def test_a_broken_configuration_is_one_line_and_the_training_goes_on(run_cli: Rank, tmp_path: Path) -> None:
    env = worker_environment(ProbeConfig(run_dir=tmp_path), {})
    done = run_cli(["-c", "print('trained')"], env={**env, "RANK": "one"})
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("[msprobe] this process is not recorded: ValueError(")


@pytest.mark.parametrize("flag", ["-s", "-P", "-B", "-u", "-Werror", "-Xdev"])
def test_interpreter_flags_that_keep_pythonpath_keep_us(rank: Rank, tmp_path: Path, flag: str) -> None:
    if flag == "-P" and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    done = rank("print('trained')", flag)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert mark_in(tmp_path).note == "script.py never imported torch or mindspore"


torch_only = pytest.mark.torch


@torch_only
def test_importing_torch_attaches_and_leaves_torch_as_it_is(rank: Rank, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    look = (
        "import json, sys\nbefore = len(sys.meta_path)\nimport torch\n"
        "spec = torch.__spec__\n"
        "print(json.dumps([spec.name, spec.origin, type(spec.loader).__name__, sorted(vars(spec.loader)),"
        " torch.__loader__ is spec.loader, sorted(vars(spec)), sys.excepthook.__name__]))\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
    )
    ours, bare = (rank(look, bare=bare) for bare in (False, True))
    assert (ours.returncode, ours.stdout, ours.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    mark = mark_in(tmp_path)
    assert (mark.attached, mark.rank, mark.local_rank, mark.world_size) == (True, 1, 1, 2)
    assert mark.calls > 0


@torch_only
def test_an_interrupt_ends_a_recording_rank_as_it_would_without_us(rank: Rank, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = "import torch\nraise KeyboardInterrupt\n"
    ours, bare = (rank(code, bare=bare) for bare in (False, True))
    assert (ours.returncode, ours.stdout, ours.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert mark_in(tmp_path).exception.startswith("KeyboardInterrupt\n")


@torch_only
def test_a_users_sitecustomize_that_imports_torch_is_no_obstacle(rank: Rank, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text("import torch\n")
    done = rank("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n", pythonpath=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert mark_in(tmp_path).calls > 0


@torch_only
def test_the_second_process_of_a_rank_does_not_record(rank: Rank, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import socket

    first = RankMark(rank=1, attached=True, host=socket.gethostname(), pid=os.getpid(), calls=5)
    save(RunLayout(tmp_path / "run").roster_mark(1), first)
    done = rank("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n1/0\n")
    assert f"not recorded: process {os.getpid()} already records this rank" in done.stderr
    assert mark_in(tmp_path) == first
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["roster"]


@torch_only
def test_an_exception_is_kept_beside_what_was_recorded(rank: Rank, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = (
        "import torch\nm = torch.nn.Linear(2, 3)\nm(torch.ones(1, 2))\ndef f():\n    return m(torch.ones(1, 9))\nf()\n"
    )
    assert rank(code).returncode == 1
    what, place, *_ = mark_in(tmp_path).exception.splitlines()
    assert what.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert place == f"at {tmp_path / 'script.py'}:5 in f"
    assert mark_in(tmp_path).attached


@torch_only
def test_an_attach_that_fails_is_harmless_and_told(rank: Rank, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "roster").touch()  # a file where the roster's folder should be
    done = rank("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n")
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 2])\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("[msprobe rank 1] attach failed, the training goes on: ")
