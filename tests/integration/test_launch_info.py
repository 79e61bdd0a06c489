"""`--info` in environments that work and in such that do not, each check really done."""

from __future__ import annotations

import sys
import venv
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

Launch = Callable[..., "CompletedProcess[str]"]
REPOSITORY = Path(__file__).resolve().parents[2]


def checks(done: CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Name of a check -> its mark and its text, folded lines and the remedy joined."""
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if line[:2].strip():
            name = line[4:18].strip()
            found[name] = (line[:2], line[20:])
        else:
            mark, text = found[name]
            found[name] = (mark, f"{text} {line.strip()}")
    return found


@pytest.fixture
def info(tmp_path: Path, run_cli: Launch) -> Launch:
    def ask(*argv: str | Path, **env: str) -> CompletedProcess[str]:
        # Of two frameworks that are installed each would be tried.
        tokens = ["-m", "msprobe_launch", "--info", "--backend", "torchrun", *argv]
        return run_cli(tokens, cwd=tmp_path, env={"PYTHONPATH": "", **env})

    return ask


def test_where_all_is_well(info: Launch, tmp_path: Path) -> None:
    done = info()
    assert done.returncode == 0, done.stdout
    found = checks(done)
    assert found["torch"] == ("ok", torch.__version__)
    assert found["injection"] == ("ok", "a child process recorded 4 calls")
    assert found["file locks"] == ("--", "work there")
    assert found["run directory"][0] == "ok"
    assert found["recording"] == ("ok", "works here")
    assert found["python"][1].endswith(sys.executable)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_sixty_columns_ascii_and_a_reader_who_goes_early(info: Launch, tmp_path: Path) -> None:
    done = info("--run-dir", "运行 a b", COLUMNS="60", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    # Only what must not be cut, a path, may be longer.
    assert [line for line in done.stdout.splitlines() if len(line) > 60 and "/" not in line] == []
    assert "\x1b" not in done.stdout
    assert not (tmp_path / "运行 a b").exists()


@pytest.mark.parametrize(
    ("argv", "env", "what", "found", "remedy"),
    [
        (["--run-dir", "/proc/no"], {}, "run directory", "/proc/no: the run directory cannot be made", "--run-dir DIR"),
        (["--run-dir", "taken"], {}, "run directory", "it holds file", "--run-dir DIR"),
        ([], {"MSPROBE_LAUNCH_RUN_DIR": "taken"}, "run directory", "it holds file", "--run-dir DIR"),
        (["--probe-level", "L7"], {}, "configuration", "unknown value 'L7'", ""),
        ([], {"PYTHON_EXEC": "isolated"}, "injection", "does not reach a child process", "msprobe-launch install-pth"),
        ([], {"PYTHON_EXEC": "absent"}, "injection", "cannot be run: No such file", "PYTHON_EXEC"),
        ([], {"PYTHONPATH": "broken"}, "torch", "OSError: libdevice.so: no such file", "shows the whole error"),
        ([], {"TMPDIR": "."}, "recording", "works here", ""),
    ],
)
def test_what_does_not_work_is_named_with_its_reason_and_remedy(
    info: Launch, tmp_path: Path, argv: list[str], env: dict[str, str], what: str, found: str, remedy: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    isolated = tmp_path / "isolated"
    isolated.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "$@"\n')
    isolated.chmod(0o755)
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise OSError('libdevice.so: no such file')\n")
    paths = {name: value if name == "MSPROBE_LAUNCH_RUN_DIR" else str(tmp_path / value) for name, value in env.items()}
    done = info(*argv, **paths)
    mark, text = checks(done)[what]
    assert found in text
    assert remedy in text
    assert (mark, done.returncode) == (("ok", 0) if what == "recording" else ("NO", 1))
    assert "Traceback" not in done.stdout + done.stderr
    verdict = "works here" if what == "recording" else f"will not work here: {what}"
    assert checks(done)["recording"][1].startswith(verdict)


def test_an_environment_without_torch(info: Launch, tmp_path: Path, run_cli: Launch) -> None:
    """A virtual environment with nothing but what the launcher itself needs."""
    import filelock

    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "filelock").symlink_to(Path(filelock.__file__).parent)
    code = f"import subprocess, sys; sys.exit(subprocess.call([{str(tmp_path / 'env/bin/python')!r}, *sys.argv[1:]]))"

    def ask(*argv: str) -> CompletedProcess[str]:
        tokens = ["-c", code, "-m", "msprobe_launch", "--info", *argv]
        return run_cli(tokens, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})

    done = ask()
    assert done.returncode == 1, done.stderr
    mark, text = checks(done)["torch"]
    assert mark == "NO"
    assert "pip install torch" in text
    assert checks(done)["injection"] == ("ok", "reaches a child process")
    # Another launcher's ranks may have an environment of their own.
    done = ask("--backend", "command")
    assert done.returncode == 0, done.stdout + done.stderr
    assert checks(done)["torch"][0] == "--"
