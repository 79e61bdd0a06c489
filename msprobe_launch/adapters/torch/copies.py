"""Device tensors of which all bytes are wanted: copied at once on the device, brought home later and together.

Nothing here waits for the device but `settle`, which makes one transfer per device. It runs at the session's flush, or
earlier where LIMIT bytes wait: that is what the copies may take of the device's memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LIMIT = 64 << 20  # a few activations of a large model; a job that runs close to the device's memory must not end by us


class Copies:
    """What waits to be brought home."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._bytes = 0

    def later(self, tensor: Tensor, done: Callable[[Tensor], None]) -> None:
        """Copy `tensor` as it is now; `done` gets it as a CPU tensor of the same dtype and shape."""
        copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        self._waiting.append((copy, done))
        self._bytes += copy.numel() * copy.element_size()
        if self._bytes >= LIMIT:
            self.settle()

    @property
    def waits(self) -> bool:
        """True where something is still on a device."""
        return bool(self._waiting)

    def settle(self) -> None:
        """Bring home what waits. Raises what `done` raises, after all have been called."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        by_device: dict[torch.device, list[tuple[Tensor, Callable[[Tensor], None]]]] = {}
        for entry in waiting:
            by_device.setdefault(entry[0].device, []).append(entry)
        for entries in by_device.values():
            joined = torch.cat([copy.reshape(-1).view(torch.uint8) for copy, _ in entries]).cpu()
            at = 0
            for copy, done in entries:
                size = copy.numel() * copy.element_size()
                # A clone: the joined bytes are at no address that suits a wider dtype.
                done(joined[at : at + size].clone().view(copy.dtype).reshape(copy.shape))
                at += size
