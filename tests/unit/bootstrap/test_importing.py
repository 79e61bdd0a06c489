"""The import hook, with a toy framework in a folder on sys.path."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from msprobe_launch.bootstrap.importing import FrameworkFinder

NAME = "toy_framework_for_importing"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose first line looks at its own loader, as an import hook's guest would."""
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text("KEYS_AT_START = sorted(vars(__loader__)); from . import part\n")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = [*sys.meta_path]
    yield package
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_it_calls_back_once_when_the_import_is_done_and_leaves_no_trace(toy: Path) -> None:
    plain = importlib.util.find_spec(NAME)
    assert plain is not None
    seen: list[tuple[str, bool]] = []
    before = [*sys.meta_path]
    FrameworkFinder([NAME], lambda name: seen.append((name, f"{NAME}.part" in sys.modules))).install()
    # Asking for the spec (as packages do to see whether a framework is there) is not an import.
    assert importlib.util.find_spec(NAME) is not None
    assert seen == []
    module = importlib.import_module(f"{NAME}.part")
    module = sys.modules[NAME]
    assert seen == [(NAME, True)]
    assert sys.meta_path == before
    assert module.__spec__ is not None
    assert module.__spec__ == plain
    assert type(module.__spec__.loader) is type(plain.loader)
    assert module.__loader__ is module.__spec__.loader
    assert sorted(vars(module.__loader__)) == sorted(vars(plain.loader)) == module.KEYS_AT_START


def test_other_names_are_left_alone(toy: Path) -> None:
    finder = FrameworkFinder(["no_such_framework"], lambda name: pytest.fail(name))
    finder.install()
    importlib.import_module(NAME)
    assert finder.find_spec("no_such_framework") is None
    finder.remove()
    finder.remove()
    assert finder not in sys.meta_path


def test_a_framework_that_is_there_already_is_reported_at_once(toy: Path) -> None:
    importlib.import_module(NAME)
    seen: list[str] = []
    finder = FrameworkFinder([NAME], seen.append)
    finder.install()
    assert seen == [NAME]
    assert finder not in sys.meta_path


def test_an_import_that_fails_can_be_tried_again(toy: Path) -> None:
    seen: list[str] = []
    FrameworkFinder([NAME], seen.append).install()
    code = (toy / "__init__.py").read_text()
    (toy / "__init__.py").write_text("raise ImportError('no driver')\n")
    with pytest.raises(ImportError, match="no driver"):
        importlib.import_module(NAME)
    assert seen == []
    (toy / "__init__.py").write_text(code + "# of another size, so that no cached bytecode is taken\n")
    importlib.import_module(NAME)
    assert seen == [NAME]
