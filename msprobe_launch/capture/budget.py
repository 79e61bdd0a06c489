"""How much one rank may write (`max_bytes`), and how much a run is about to write."""

from __future__ import annotations

import shutil

from msprobe_launch.capture.identity import RankIdentity
from msprobe_launch.config import ProbeConfig

# Bytes that a file of tensor values has besides the values; rounded up, so that the limit is never passed by much.
_FILE_OVERHEAD = 1200


class Budget:
    """This rank's part of `max_bytes`, and the bytes of values written so far. Bytes of records are the writer's."""

    def __init__(self, config: ProbeConfig, identity: RankIdentity) -> None:
        self.values = 0
        self.forecast = ""
        self.forecast_due = config.saves_values
        self._config = config
        self._identity = identity
        self.share = (
            None if config.max_bytes is None else config.max_bytes // max(config.ranks.count(identity.world_size), 1)
        )

    def exceeded(self, records: int) -> bool:
        """True where so many bytes of records, and the values, are more than the share."""
        return self.share is not None and records + self.values > self.share

    def takes(self, size: int, records: int) -> bool:
        """Count a tensor's values of `size` bytes; False where they are not to be written any more."""
        self.values += size + _FILE_OVERHEAD
        return not self.exceeded(records)

    def note(self, step: int) -> str:
        """What to say when the share is used up."""
        share = f"this rank's share of --probe-max-bytes {self._config.max_bytes:,}"
        return f"stopped in step {step}: {share} is used up ({self.share:,} bytes)"

    def make_forecast(self, forward: int, backward: bool) -> bool:
        """After the first recorded forward, of `forward` bytes: how much values will take.

        True where this rank is the one to say it. Raises OSError.
        """
        config, rank = self._config, self._identity.rank
        step = forward * (2 if backward else 1)  # gradients are as many as what they are gradients of
        ranks = config.ranks.count(self._identity.world_size)
        last = config.last_step
        steps = sum(map(config.selects, range(last + 1))) if last is not None else None
        whole = step * ranks * (steps or 1)
        span = f"{steps} steps" if steps is not None else "each step (no last step is set)"
        free = shutil.disk_usage(config.run_dir).free
        self.forecast = (
            f"values: {_size(forward)} in the first forward of rank {rank}, about {_size(whole)} for "
            f"{ranks} ranks and {span}; {_size(free)} are free in {config.run_dir}"
        )
        return not any(other in config.ranks for other in range(rank))


def _size(count: int) -> str:
    """Bytes as people read them."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
