"""Who a rank's process is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One process of the job that owns a rank. `rank` is the global rank, `attempt` the launcher's restart count."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int
    attempt: int = 0
