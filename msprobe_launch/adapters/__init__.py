"""One sub-package per framework; `start` is the only place that maps a framework's name to its adapter."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msprobe_launch.capture.identity import RankIdentity
    from msprobe_launch.capture.session import Session
    from msprobe_launch.config import ProbeConfig

# Import name of the framework (what the bootstrap waits for) -> module that has `create_adapter()`.
ADAPTERS = {
    "torch": "msprobe_launch.adapters.torch.adapter",
    "mindspore": "msprobe_launch.adapters.mindspore.adapter",
}


def start(framework: str, config: ProbeConfig, identity: RankIdentity) -> Session:
    """Build this rank's Session for a framework that has just been imported, and install its hooks.

    Writes the rank's roster mark. May raise; the caller (`bootstrap.attach`) is the guard.
    """
    from msprobe_launch.capture import active
    from msprobe_launch.capture.session import Session

    module = importlib.import_module(ADAPTERS[framework])
    session = Session(config, identity, module.create_adapter())
    session.install()
    active.put(session)
    return session


def known_rank(framework: str) -> tuple[int, int] | None:
    """(rank, world size) where the framework's distributed part has been initialised, else None."""
    rank: tuple[int, int] | None = importlib.import_module(ADAPTERS[framework]).known_rank()
    return rank


def seed(framework: str, number: int, deterministic: bool) -> None:
    """Seed Python, numpy where it is installed, and the framework on all its devices."""
    importlib.import_module(ADAPTERS[framework]).seed(number, deterministic)
