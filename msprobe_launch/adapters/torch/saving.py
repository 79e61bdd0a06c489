"""Values of tensors to files (task tensor, tensor_list).

A CPU tensor is written at once, under a name that is not final (the op gets its own when its record is written), so a
later in-place change cannot alter it and no copy stays in memory. A device tensor is copied on its device and written
when it comes home. Values are plain dense tensors without gradients, as `torch.load(..., weights_only=True)` reads.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msprobe_launch.adapters.torch.checksums import packed
from msprobe_launch.adapters.torch.copies import Copies

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session
    from msprobe_launch.records.model import TensorValue


class TensorSaver:
    """Writes what the session wants saved (`session.saving`)."""

    def __init__(self, session: Session, copies: Copies) -> None:
        self._session = session
        self._copies = copies

    def keep(self, value: TensorValue, tensor: Tensor) -> None:
        """Save `tensor`, which `value` describes; `value.saved` is the file's path once it is written."""
        if tensor.is_cpu:
            self._write(value, tensor)
        elif not tensor.is_meta:
            self._copies.later(tensor, lambda home: self._write(value, home))

    def _write(self, value: TensorValue, tensor: Tensor) -> None:
        path = None
        try:
            path = self._session.value_file(tensor.numel() * tensor.element_size())
            if path is None:
                return
            data = packed(tensor.detach())
            if data.untyped_storage().nbytes() != data.numel() * data.element_size():
                data = data.clone()  # a view: torch.save would write all that it is a view of
            torch.save(data, path)
            value.saved = path
        except (OSError, RuntimeError, NotImplementedError) as error:
            # A full disk is a RuntimeError of torch's writer.
            self._session.value_lost(error)
            if path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path)
