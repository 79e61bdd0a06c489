"""Checksums of a tensor's bytes, in row-major order of its elements: CRC-32 (summary mode md5) and XOR (mode xor).

Both are taken at once, for the reason statistics are. Equal to msprobe's, so that dumps of both can be compared.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from msprobe_launch import native
from msprobe_launch.records.codec import number_text

# Bytes of a plain CPU tensor -> JSON text of its checksum. `data` may be empty.
TextOf = Callable[[Tensor], str]


def _zlib_crc32(address: int, size: int) -> int:
    return zlib.crc32((ctypes.c_char * size).from_address(address)) if size else 0


def _python_xor(address: int, size: int) -> int:
    data = (ctypes.c_char * size).from_address(address) if size else b""
    whole = size - size % 8
    out = 0
    for word in memoryview(data).cast("B")[:whole].cast("Q"):
        out ^= word
    return out ^ int.from_bytes(bytes(data)[whole:], "little")


def packed(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy, with its bytes in row-major order and no lazy sign or conjugation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def checksums(kernels: dict[str, native.Checksum]) -> tuple[TextOf, TextOf]:
    """(CRC-32, XOR). With `kernels` empty they are taken without the C library: several times slower, equal results."""
    crc32 = kernels.get("crc32", _zlib_crc32)
    xor = kernels.get("xor", _python_xor)

    def crc32_text(tensor: Tensor) -> str:
        whole = packed(tensor)
        return f'"{crc32(whole.data_ptr(), whole.numel() * whole.element_size()):08x}"'

    def xor_text(tensor: Tensor) -> str:
        if not tensor.dim():  # msprobe writes the one value itself
            return _scalar_text(tensor.item())
        whole = packed(tensor)
        return f'"0x{xor(whole.data_ptr(), whole.numel() * whole.element_size()):016x}"'

    return crc32_text, xor_text


def _scalar_text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, complex) else number_text(value)


CRC32, XOR = checksums(native.load_checksums())
