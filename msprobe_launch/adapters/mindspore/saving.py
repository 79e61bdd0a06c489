"""Values of tensors to `.npy` files (task tensor, tensor_list), and the checksums of their bytes.

A value is written at once, under a name that is not final: the op gets its own when its record is written, and a later
in-place change cannot alter it. numpy's format has no bfloat16; its values are saved as float32, exactly.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from msprobe_launch import native
from msprobe_launch.adapters.mindspore.stats import widened
from msprobe_launch.records.codec import number_text

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session
    from msprobe_launch.records.model import TensorValue


def portable(array: Any) -> Any:
    """The array in a type that any numpy has, in row-major order."""
    if array.dtype.name == "bfloat16":
        array = widened(np.asarray(array, order="C"))
    return np.asarray(array, order="C")  # `ascontiguousarray` would give a scalar a dimension


class ArraySaver:
    """Writes what the session wants saved (`session.saving`)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def keep(self, value: TensorValue, array: Any) -> None:
        """Save `array`, which `value` describes; `value.saved` is the file's path once it is written."""
        path = None
        try:
            path = self._session.value_file(array.nbytes)
            if path is None:
                return
            with open(path, "wb") as handle:
                np.save(handle, portable(array), allow_pickle=False)
            value.saved = path
        except (OSError, ValueError) as error:
            self._session.value_lost(error)
            if path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path)


_CHECKSUMS = native.load_checksums()


def crc32_text(array: Any) -> str:
    """JSON text of the CRC-32 of an array's bytes, in row-major order."""
    array = np.ascontiguousarray(array)
    crc32 = _CHECKSUMS.get("crc32")
    if crc32 is None:
        return f'"{zlib.crc32(array.tobytes()):08x}"'
    return f'"{crc32(array.__array_interface__["data"][0], array.nbytes):08x}"'


def xor_text(array: Any) -> str:
    """JSON text of the XOR of its 8-byte words; of a scalar the value itself, as msprobe has it."""
    if not array.ndim:
        value = portable(array).item()
        return f'"{value}"' if isinstance(value, complex) else number_text(value)
    array = np.ascontiguousarray(array)
    xor = _CHECKSUMS.get("xor")
    if xor is not None:
        return f'"0x{xor(array.__array_interface__["data"][0], array.nbytes):016x}"'
    data = array.tobytes()
    whole = len(data) - len(data) % 8
    out = int(np.bitwise_xor.reduce(np.frombuffer(data[:whole], np.uint64))) if whole else 0
    return f'"0x{out ^ int.from_bytes(data[whole:], "little"):016x}"'
