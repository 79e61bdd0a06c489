"""Who numbers a process: its launcher's variables, or MindSpore when the process joins the cluster."""

from __future__ import annotations

import sys
import types

import pytest

from msprobe_launch.bootstrap import numbering
from msprobe_launch.bootstrap.activate import RankProcess
from msprobe_launch.bootstrap.variables import INHERITED, NUMBERED_LATER, RANK_FROM, rank_source

WORKER = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "DEVICE_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MS_ROLE": "MS_SCHED", "RANK_ID": "0", "RANK": "0"}, None),
        # A cluster's pod may say RANK as well, and msrun leaves the scheduler's RANK_ID in its workers.
        ({**WORKER, "MS_NODE_ID": "3", "RANK": "0", "RANK_ID": "0"}, "MS_NODE_ID"),
        ({**WORKER, "RANK_ID": "0", "RANK": "0"}, ""),
        ({**WORKER, "MS_NODE_ID": "worker_a"}, ""),
        ({**WORKER, "MS_NODE_ID": "3", INHERITED: "MS_NODE_ID=3/4/1"}, None),
        ({"RANK_ID": "3", "RANK_SIZE": "8"}, "RANK_ID"),
        ({"RANK_ID": "3", "RANK": "1"}, "RANK"),
        ({"MS_NODE_ID": "0", "RANK_ID": "5", RANK_FROM: "RANK_ID"}, "RANK_ID"),
    ],
)
def test_what_numbers_a_process_of_mindspores(environ: dict[str, str], expected: str | None) -> None:
    source = rank_source(environ)
    assert (None if source is None else source[0]) == expected
    assert expected != "" or source == NUMBERED_LATER


class Numbered(RankProcess):
    def __init__(self) -> None:
        super().__init__("{}", rank=-1, local_rank=0, world_size=2, attempt=0)
        self.joined: list[bool] = []

    def on_numbered(self, framework: str) -> None:
        self.joined.append(sys.modules[f"{framework}.communication.management"].inited)  # type: ignore[attr-defined]


def test_the_process_is_told_once_it_has_joined_and_nothing_of_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    home = types.ModuleType("toy.communication.management")
    package = types.ModuleType("toy.communication")
    stranger = types.ModuleType("other")
    home.inited = False  # type: ignore[attr-defined]

    def init(backend: str = "") -> str:
        """Joins."""
        if backend == "wrong":
            raise ValueError(backend)
        home.inited = True  # type: ignore[attr-defined]
        return "joined"

    for module in (home, package, stranger):
        module.init = init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    process = Numbered()
    numbering.wait(process, "toy")
    assert stranger.init is init  # type: ignore[attr-defined]
    joins = package.init  # type: ignore[attr-defined]
    assert (joins.__name__, joins.__doc__, joins is init) == ("init", "Joins.", False)
    with pytest.raises(ValueError, match="wrong"):
        joins("wrong")
    assert process.joined == []
    assert joins() == "joined"
    assert process.joined == [True]
    assert package.init is home.init is init  # type: ignore[attr-defined]


def test_where_the_framework_has_another_shape_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "toy.communication.management", raising=False)
    with pytest.raises(RuntimeError, match="rank cannot be learned"):
        numbering.wait(Numbered(), "toy")
