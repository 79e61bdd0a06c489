"""Who a rank's process is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One process of the job that owns a rank. `rank` is the global rank, `attempt` the launcher's restart count.

    `is_known` False: nobody has told this process a rank; its files go by its pid.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int
    attempt: int = 0
    is_known: bool = True
