"""Stored values of tensors (`.pt` of torch.save, `.npy`), read in pieces from a mapping, without a training framework.

A `.pt` file is an uncompressed zip archive: a pickle that says which storages form the tensor, and the storages' raw
bytes. The pickle is read by an unpickler that knows a dozen names and calls nothing of the file's choosing; the bytes
are mapped where they lie. Pages are given back as the reader moves on, so that no tensor needs much memory.

Values come as float32 or float64, whichever holds them exactly: half, bfloat16 and float8 as float32 (by widening of
their bits), integers and truth values as float64 (exact below 2^53), complex numbers as their real or imaginary part.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class UnreadableValues(Exception):
    """The file holds no tensor that can be read; the text says why."""


CHUNK = 1 << 13
"""Elements that are looked at together: 64 KB as float64, so that what is computed of them stays in the cache; and
OpenBLAS takes products of up to 10,000 elements without waking its threads, which would cost ten times the work."""

PIECE_BYTES = 1 << 19
"""What the compiled pass takes of each side at a time: both fit into a core's second cache, since equal ones are read
twice, and to call it costs little beside."""

_KEPT_BYTES = 8 << 20  # mapped pages that may stay resident behind the reader

_BFLOAT16, _E4M3FN, _E4M3FNUZ, _E5M2, _E5M2FNUZ = "bfloat16", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"


def _float8(exponent_bits: int, bias: int, *, has_infinity: bool, nan_is_minus_zero: bool) -> npt.NDArray[np.float32]:
    """The 256 values of a float8 format (Micikevicius et al. 2022; the `fnuz` ones as in ONNX and LLVM)."""
    mantissa_bits = 7 - exponent_bits
    out = np.empty(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        scale = 2.0**mantissa_bits
        if exponent:
            value = sign * 2.0 ** (exponent - bias) * (1 + mantissa / scale)
        else:
            value = sign * 2.0 ** (1 - bias) * (mantissa / scale)
        if nan_is_minus_zero:
            value = math.nan if code == 0x80 else value
        elif has_infinity and exponent == (1 << exponent_bits) - 1:
            value = math.nan if mantissa else sign * math.inf
        elif not has_infinity and code & 0x7F == 0x7F:
            value = math.nan
        out[code] = value
    return out


_FLOAT8 = {
    _E4M3FN: _float8(4, 7, has_infinity=False, nan_is_minus_zero=False),
    _E4M3FNUZ: _float8(4, 8, has_infinity=False, nan_is_minus_zero=True),
    _E5M2: _float8(5, 15, has_infinity=True, nan_is_minus_zero=False),
    _E5M2FNUZ: _float8(5, 16, has_infinity=False, nan_is_minus_zero=True),
}

# How each dtype is stored: numpy's code, and the name of its bits where numpy has none.
_STORED: dict[str, tuple[str, str]] = {
    "float64": ("f8", ""),
    "float32": ("f4", ""),
    "float16": ("f2", ""),
    "bfloat16": ("u2", _BFLOAT16),
    "float8_e4m3fn": ("u1", _E4M3FN),
    "float8_e4m3fnuz": ("u1", _E4M3FNUZ),
    "float8_e5m2": ("u1", _E5M2),
    "float8_e5m2fnuz": ("u1", _E5M2FNUZ),
    "int64": ("i8", ""),
    "int32": ("i4", ""),
    "int16": ("i2", ""),
    "int8": ("i1", ""),
    "uint64": ("u8", ""),
    "uint32": ("u4", ""),
    "uint16": ("u2", ""),
    "uint8": ("u1", ""),
    "bool": ("?", ""),
    "complex64": ("c8", ""),
    "complex128": ("c16", ""),
}

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "",
}


class Elements(Protocol):
    """What a comparison needs of a tensor, which may be put together from several files (see `layouts.shards`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...

    @property
    def is_complex(self) -> bool: ...

    @property
    def computed_as(self) -> type[np.float32] | type[np.float64]: ...

    def chunks(self, *, imaginary: bool = False) -> Iterator[npt.NDArray[Any]]: ...


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor on disk. `array` is a view of the mapped file (of its bits, where numpy lacks the dtype)."""

    array: npt.NDArray[Any]
    bits: str
    mapping: mmap.mmap | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def size(self) -> int:
        return int(self.array.size)

    @property
    def is_complex(self) -> bool:
        return self.array.dtype.kind == "c"

    @property
    def computed_as(self) -> type[np.float32] | type[np.float64]:
        """The dtype of what `chunks` gives."""
        narrow = self.bits or self.array.dtype.kind == "f"
        return np.float32 if narrow and self.array.dtype.itemsize <= 4 else np.float64

    @property
    def plain(self) -> str:
        """The element type's name where the elements lie in memory as this machine reads them, else ''."""
        array = self.array
        if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
            return ""
        return self.bits or (array.dtype.name if array.dtype.kind == "f" else "")

    def chunks(self, *, imaginary: bool = False) -> Iterator[npt.NDArray[Any]]:
        """The elements in C order, CHUNK at a time. A chunk may be a view of the file: do not write to it."""
        for piece in self.pieces(CHUNK):
            yield self.widened(piece, imaginary=imaginary)

    def pieces(self, length: int) -> Iterator[npt.NDArray[Any]]:
        """The elements as they are stored, in C order, `length` at a time."""
        flat = self.array.reshape(-1) if self.array.flags.c_contiguous else None
        passed = 0
        for start in range(0, self.size, length):
            # `flat` of a strided view copies element by element: slower, but never more than a piece.
            part = flat[start : start + length] if flat is not None else self.array.flat[start : start + length]
            yield part
            passed += part.nbytes
            if passed >= _KEPT_BYTES:
                self.forget()
                passed = 0

    def forget(self) -> None:
        """Give the mapped pages back; they are read again where they are needed again."""
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def widened(self, part: npt.NDArray[Any], *, imaginary: bool = False) -> npt.NDArray[Any]:
        """Some of the stored elements (of `array`) as numbers."""
        if self.bits == _BFLOAT16:
            part = (part.astype(np.uint32) << 16).view(np.float32)
        elif self.bits:
            part = _FLOAT8[self.bits][part]
        if self.is_complex:
            part = part.imag if imaginary else part.real
        return np.ascontiguousarray(part, self.computed_as)


def open_values(path: Path) -> Values:
    """Map a tensor's file. Raises UnreadableValues with the reason in words."""
    try:
        if path.exists() and not path.is_file():
            raise UnreadableValues(f"{path.name} is no file")
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise UnreadableValues(f"{path.name} is empty (0 bytes)")
            head = file.read(6)
            if head == b"\x93NUMPY":
                return _npy(path, file)
            if head[:4] == b"PK\x03\x04":
                return _pt(path, file)
    except FileNotFoundError:
        raise UnreadableValues(f"{path.name} is missing") from None
    except OSError as error:
        raise UnreadableValues(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError, EOFError, AttributeError, struct.error) as error:
        # Of pickle and zipfile on bytes that are no tensor.
        raise UnreadableValues(f"{path.name} is damaged: {error}") from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, OverflowError, MemoryError) as error:
        raise UnreadableValues(f"{path.name} is damaged or cut ({size} bytes): {error}") from error
    raise UnreadableValues(f"{path.name} is neither a torch.save archive nor .npy (begins with {head!r})")


def _mapped(file: io.BufferedReader) -> mmap.mmap:
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        mapping.madvise(mmap.MADV_SEQUENTIAL)
    return mapping


# -- .npy


def _npy(path: Path, file: io.BufferedReader) -> Values:
    file.seek(0)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.kind not in "fiubc" or dtype.itemsize > 16:
        raise UnreadableValues(f"{path.name} holds {dtype}, which are no numbers")
    count = math.prod(shape)
    start = file.tell()
    there = path.stat().st_size - start
    if there < count * dtype.itemsize:
        raise UnreadableValues(f"{path.name} is cut: {there} bytes of {count * dtype.itemsize}")
    if count == 0:
        return Values(np.empty(shape, dtype), "", None)
    mapping = _mapped(file)
    array = np.frombuffer(mapping, dtype, count, start).reshape(shape, order="F" if fortran else "C")
    return Values(array, "", mapping)


# -- .pt


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage that the pickle refers to, by its name in the archive."""

    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class _Name:
    """Something of torch that the pickle names: a storage class or a dtype. Never called."""

    name: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def _rebuild_v2(storage: _Storage, offset: int, shape: Any, stride: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)), storage.dtype)


def _rebuild_v3(
    storage: _Storage, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: _Name, *_: Any
) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)), dtype.name)


def _parameter(data: _Tensor, *_: Any) -> _Tensor:
    return data


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("collections", "OrderedDict"): _nothing,
}


class _Unpickler(pickle.Unpickler):
    """Knows the names that a saved tensor needs, and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        known = _ALLOWED.get((module, name))
        if known is not None:
            return known
        if module in ("torch", "torch.storage") and (name in _STORAGES or name in _STORED):
            return _Name(name)
        raise UnreadableValues(f"holds {module}.{name}, which is no plain tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, *_ = pid
        return _Storage(str(key), _STORAGES[kind.name])


def _pt(path: Path, file: io.BufferedReader) -> Values:
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if "data.pkl" not in entries:
            raise UnreadableValues(
                f"{path.name} is a zip archive without data.pkl, which torch.save would have written"
            )
        try:
            tensor = _Unpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
        except UnreadableValues as error:
            raise UnreadableValues(f"{path.name} {error}") from None
        if not isinstance(tensor, _Tensor):
            raise UnreadableValues(f"{path.name} holds a {type(tensor).__name__}, not one tensor")
        order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
        code, bits = _STORED[tensor.dtype]
        dtype = np.dtype(code).newbyteorder(">" if order.strip() == b"big" else "<")
        if 0 in tensor.shape:
            return Values(np.empty(tensor.shape, dtype), bits, None)
        stored = entries[f"data/{tensor.storage.key}"]
        if stored.compress_type != zipfile.ZIP_STORED:
            raise UnreadableValues(f"{path.name} is compressed, which torch.save never does; write it again with torch")
    file.seek(stored.header_offset)
    local = file.read(30)
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    start = stored.header_offset + 30 + name_length + extra_length
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
    if min(tensor.offset, *tensor.stride, 0) < 0 or (last + 1) * dtype.itemsize > stored.file_size:
        raise UnreadableValues(
            f"{path.name} is damaged: its tensor reaches past its {stored.file_size} bytes of values"
        )
    mapping = _mapped(file)
    whole = np.frombuffer(mapping, dtype, last + 1 - tensor.offset, start + tensor.offset * dtype.itemsize)
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride)
    array = np.lib.stride_tricks.as_strided(whole, tensor.shape, strides, writeable=False)
    return Values(array, bits, mapping)
