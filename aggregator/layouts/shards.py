"""Stored values of the whole, read from the parts' files in chunks: memory is bounded whatever their size.

A joined tensor is walked in C order: for each index before the joined dimension one run of elements from each part.
Runs that are short are read many at a time, so that a chunk costs one copy. A sum adds the same chunk of every part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aggregator.values import CHUNK, UnreadableValues, Values, open_values

if TYPE_CHECKING:
    import numpy.typing as npt


_KEPT_BYTES = 8 << 20  # values that were read before their mapped pages are given back


@dataclass(frozen=True, slots=True)
class Joined:
    """Several stored tensors as one along `dim`; None: one after the other, as flat lists of elements."""

    parts: tuple[Values, ...]
    dim: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return (self.size,)
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def is_complex(self) -> bool:
        return any(part.is_complex for part in self.parts)

    @property
    def computed_as(self) -> type[np.float32] | type[np.float64]:
        return _widest(self.parts)

    def chunks(self, *, imaginary: bool = False) -> Iterator[npt.NDArray[Any]]:
        """The elements in C order, CHUNK at a time (the last chunk is what is left)."""
        passed = 0
        for chunk in _rechunked(self._pieces(imaginary), self.computed_as):
            yield chunk
            passed += chunk.nbytes
            if passed >= _KEPT_BYTES:
                self.forget()
                passed = 0

    def forget(self) -> None:
        """Give the mapped pages back."""
        for part in self.parts:
            part.forget()

    def _pieces(self, imaginary: bool) -> Iterator[npt.NDArray[Any]]:
        if self.dim is None:
            for part in self.parts:
                yield from part.chunks(imaginary=imaginary)
            return
        dtype = self.computed_as
        rows = math.prod(self.parts[0].shape[: self.dim])
        widths = [math.prod(part.shape[self.dim :]) for part in self.parts]
        width = sum(widths)
        if width == 0:
            return
        if width <= CHUNK:
            step = max(1, CHUNK // width)
            for row in range(0, rows, step):
                count = min(step, rows - row)
                block = np.empty((count, width), dtype)
                at = 0
                for part, own in zip(self.parts, widths, strict=True):
                    run = _elements(part, row * own, count * own, imaginary, dtype)
                    block[:, at : at + own] = run.reshape(count, own)
                    at += own
                yield block.reshape(-1)
            return
        for row in range(rows):
            for part, own in zip(self.parts, widths, strict=True):
                for start in range(0, own, CHUNK):
                    yield _elements(part, row * own + start, min(CHUNK, own - start), imaginary, dtype)


@dataclass(frozen=True, slots=True)
class Summed:
    """Several stored tensors of one shape as their sum, added in float64."""

    parts: tuple[Values, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def is_complex(self) -> bool:
        return any(part.is_complex for part in self.parts)

    @property
    def computed_as(self) -> type[np.float32] | type[np.float64]:
        return _widest(self.parts)

    def chunks(self, *, imaginary: bool = False) -> Iterator[npt.NDArray[Any]]:
        """The elements in C order, CHUNK at a time."""
        for pieces in zip(*(part.chunks(imaginary=imaginary) for part in self.parts), strict=True):
            yield np.sum([piece.astype(np.float64) for piece in pieces], axis=0).astype(self.computed_as)

    def forget(self) -> None:
        """Give the mapped pages back."""
        for part in self.parts:
            part.forget()


Whole = Values | Joined | Summed


def open_joined(paths: Sequence[Path], dim: int | None) -> Whole:
    """The parts as one tensor. Raises UnreadableValues where they are none, or do not fit together."""
    parts = tuple(open_values(path) for path in paths)
    if len(parts) == 1:
        return parts[0]
    if dim is not None:
        cut = [part.shape[:dim] + part.shape[dim + 1 :] for part in parts]
        if any(len(part.shape) <= dim for part in parts) or any(shape != cut[0] for shape in cut):
            told = ", ".join(f"{path.name} {list(part.shape)}" for path, part in zip(paths, parts, strict=True))
            raise UnreadableValues(f"the parts cannot be joined along dimension {dim}: {told}")
    return Joined(parts, dim)


def open_summed(paths: Sequence[Path]) -> Whole:
    """The parts' sum. Raises UnreadableValues where they are none, or have other shapes."""
    parts = tuple(open_values(path) for path in paths)
    if any(part.shape != parts[0].shape for part in parts):
        told = ", ".join(f"{path.name} {list(part.shape)}" for path, part in zip(paths, parts, strict=True))
        raise UnreadableValues(f"the parts cannot be added: {told}")
    return Summed(parts)


def _widest(parts: Sequence[Values]) -> type[np.float32] | type[np.float64]:
    return np.float64 if any(part.computed_as is np.float64 for part in parts) else np.float32


def _elements(part: Values, start: int, count: int, imaginary: bool, dtype: Any) -> npt.NDArray[Any]:
    """A run of elements in C order, as `dtype`."""
    array = part.array
    flat = array.reshape(-1)[start : start + count] if array.flags.c_contiguous else array.flat[start : start + count]
    return part.widened(flat, imaginary=imaginary).astype(dtype, copy=False)


def _rechunked(pieces: Iterator[npt.NDArray[Any]], dtype: Any) -> Iterator[npt.NDArray[Any]]:
    """The same elements, CHUNK at a time."""
    kept: list[npt.NDArray[Any]] = []
    held = 0
    for piece in pieces:
        kept.append(piece.astype(dtype, copy=False))
        held += len(piece)
        if held < CHUNK:
            continue
        whole = np.concatenate(kept) if len(kept) > 1 else kept[0]
        cut = held - held % CHUNK
        for start in range(0, cut, CHUNK):
            yield whole[start : start + CHUNK]
        kept, held = ([whole[cut:]], held - cut) if cut < held else ([], 0)
    if held:
        yield np.concatenate(kept) if len(kept) > 1 else kept[0]
