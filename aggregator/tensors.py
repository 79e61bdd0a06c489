"""Metrics of stored values, in msprobe's six columns: one pass over both tensors, a chunk at a time.

Read off what MindStudio Probe 26.2 answers to some 150 pairs of planted tensors (docs/compatibility.md). With t and b
the elements of target and bench, in float32 where both sides fit it and in float64 otherwise; sums in float64, those of
16-bit formats to 6e-7 (`native/values.c`):

    Cosine                      t.b / (|t| |b|); 1 where both norms are at most 2^-52, `Nan` where one is
    EucDist                     |t - b|
    MaxAbsErr                   max |t - b|, in float32 for 16-bit formats and in float64 for others
    MaxRelativeErr              max |(t - b) / b|, with the dtype's epsilon added to both where b is 0
    One Thousandth Err Ratio    share of elements whose relative error is below 0.001; Five Thousandths: 0.005

    a side has no values, or no element      unsupported
    other shape, lengths of 1 left out       shape unmatched
    one element                              unsupported, but for MaxAbsErr, in the stored type, and MaxRelativeErr
    NaN or infinities in other places        N/A; where they stand in the same places, those elements count as 0

Beside them `off` and `worst`: how far the values are apart for our own findings, imaginary parts included, unrounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aggregator import native
from aggregator.values import CHUNK, PIECE_BYTES, Elements, UnreadableValues, Values, open_values

if TYPE_CHECKING:
    import numpy.typing as npt

UNSUPPORTED, SHAPE_UNMATCHED, NOT_APPLICABLE, NAN = "unsupported", "shape unmatched", "N/A", "Nan"

ONE_THOUSANDTH, FIVE_THOUSANDTHS = 0.001, 0.005

NO_LENGTH = float(np.finfo(np.float64).eps)  # a norm up to this counts as zero: it has no direction

ALMOST_ONE = 0.9999  # a cosine above it is rounded to 6 digits, any other to 12
DIGITS, DIGITS_ALMOST_ONE = 12, 6

Cell = float | str


@dataclass(frozen=True, slots=True)
class TensorMetrics:
    """The six cells of a row (a number or a word), and what our findings look at.

    `off`: |t - b| over the larger norm; `worst`: largest |t - b| over the largest |b|; both 0 for equal
    values, infinite where NaN or infinities stand in other places, NaN where nothing was compared.
    `reason` says why values were not compared, where they should have been.
    """

    cells: tuple[Cell, Cell, Cell, Cell, Cell, Cell]
    off: float = math.nan
    worst: float = math.nan
    reason: str = ""


def _all(word: str, reason: str = "", apart: float = math.nan) -> TensorMetrics:
    return TensorMetrics((word,) * 6, apart, apart, reason)


NO_VALUES = _all(UNSUPPORTED)


def compare_files(target: Path, bench: Path) -> TensorMetrics:
    """Metrics of two stored tensors. A file that cannot be read gives `unsupported` and the reason."""
    try:
        side = "target"
        t = open_values(target)
        side = "bench"
        b = open_values(bench)
    except UnreadableValues as error:
        return _all(UNSUPPORTED, f"{side}: {error}")
    found = compare_values(t, b)
    t.forget()
    b.forget()
    return found


def compare_values(target: Elements, bench: Elements) -> TensorMetrics:
    """Metrics of two tensors; memory is bounded by the chunk, whatever their size."""
    if target.size == 0 or bench.size == 0:
        return NO_VALUES
    if _squeezed(target.shape) != _squeezed(bench.shape):
        return _all(SHAPE_UNMATCHED)
    dtype = np.result_type(target.computed_as, bench.computed_as)
    with np.errstate(all="ignore"):
        if target.size == 1:
            return _single(target, bench, dtype)
        sums = _Sums(dtype)
        if not sums.add_all(target, bench):
            return _all(NOT_APPLICABLE, apart=math.inf)
        found = sums.metrics(target.size)
        if target.is_complex and bench.is_complex:
            found = _with_imaginary(found, target, bench)
    return found


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def _single(target: Elements, bench: Elements, dtype: npt.DTypeLike) -> TensorMetrics:
    """One element: an error, but no direction, no length and no share."""
    t, b = (next(side.chunks()).astype(dtype).reshape(-1) for side in (target, bench))
    error = np.abs(t - b)
    sides = [side for side in (target, bench) if isinstance(side, Values) and not side.bits]
    stored = [side.array.reshape(-1) for side in sides if side.array.dtype.kind in "iufc"]
    if len(stored) == 2:
        # In the stored type, as msprobe has it: 1 - 3 is 254 in uint8, and 2^53 + 1 - 2^53 is 1.
        error = np.abs(stored[0] - stored[1])
    relative = _relative(t, b)
    cells = (
        UNSUPPORTED,
        UNSUPPORTED,
        _shown(float(error[0])),
        _shown(float(relative[0])),
        UNSUPPORTED,
        UNSUPPORTED,
    )
    x, y = float(t[0]), float(b[0])
    if x == y or (math.isnan(x) and math.isnan(y)):
        # Integers above 2^53 may differ by what float64 does not hold.
        apart = 0.0 if error[0] == 0 or not math.isfinite(x) else 1.0 / abs(x)
        return TensorMetrics(cells, apart, apart)
    top = max(abs(x), abs(y))
    apart = abs(x - y) / top if math.isfinite(x) and math.isfinite(y) else math.inf
    return TensorMetrics(cells, apart, apart)


def _relative(t: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """|(t - b) / b| element by element; the type's epsilon is added to both where b is 0."""
    eps = np.where(b == 0, np.finfo(b.dtype).eps, b.dtype.type(0))
    t, b = t + eps, b + eps
    relative: npt.NDArray[Any] = np.abs((t - b) / b)
    return relative


def _shown(value: float, digits: int = DIGITS) -> Cell:
    return NAN if math.isnan(value) else round(value, digits) if math.isfinite(value) else value


class _Sums:
    """What one pass over chunks of both sides gathers; `dtype` is that of the chunks."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.tt = self.bb = self.tb = self.ee = 0.0
        self.largest = self.error = self.relative = 0.0
        self.near = self.nearer = 0
        self.unlike = False
        # Reused, since to allocate costs as much as to compute: float64 forms of both sides, and their difference.
        self._wide = [np.empty(CHUNK) for _ in range(3)]
        self._relative = np.empty(CHUNK, self.dtype)

    def add_all(self, target: Elements, bench: Elements) -> bool:
        """Add all elements; False where NaN or infinities stand in other places on the two sides."""
        if isinstance(target, Values) and isinstance(bench, Values):
            # A tensor of one chunk is as quickly done with numpy, to the last digit as msprobe does it.
            if target.size > CHUNK and target.plain and target.plain == bench.plain:
                kernel = native.kernels((FIVE_THOUSANDTHS, ONE_THOUSANDTH)).get(target.plain)
                if kernel is not None:
                    return self._add_plain(kernel, target, bench)
            # Integers above 2^53 may differ by what float64 does not hold.
            if all(side.array.dtype.kind in "iu" and side.array.dtype.itemsize == 8 for side in (target, bench)):
                pieces = zip(target.pieces(CHUNK), bench.pieces(CHUNK), strict=True)
                self.unlike = not all(np.array_equal(t, b) for t, b in pieces)
        return all(
            self.add(t.astype(self.dtype, copy=False), b.astype(self.dtype, copy=False))
            for t, b in zip(target.chunks(), bench.chunks(), strict=True)
        )

    def _add_plain(self, kernel: native.Kernel, target: Values, bench: Values) -> bool:
        """Add elements that lie in memory as the compiled pass reads them."""
        length = PIECE_BYTES // target.array.itemsize
        for t, b in zip(target.pieces(length), bench.pieces(length), strict=True):
            part = kernel(t.ctypes.data, b.ctypes.data, len(t))
            if part is not None:
                self._add_part(part)
                continue
            for start in range(0, len(t), CHUNK):
                place = slice(start, start + CHUNK)
                if not self.add(target.widened(t[place]), bench.widened(b[place])):
                    return False
        return True

    def _add_part(self, part: native.Apart) -> None:
        self.tt, self.bb, self.tb, self.ee = (
            self.tt + part.tt,
            self.bb + part.bb,
            self.tb + part.tb,
            self.ee + part.squares,
        )
        self.largest = max(self.largest, part.largest)
        self.error = max(self.error, part.error)
        self.relative = max(self.relative, part.relative)
        self.near += part.below[0]
        self.nearer += part.below[1]

    def add(self, t: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
        """Add a chunk; False where NaN or infinities stand in other places on the two sides."""
        wide_t, wide_b, difference = (buffer[: len(t)] for buffer in self._wide)
        np.copyto(wide_b, b)
        bb = float(np.dot(wide_b, wide_b))
        if math.isfinite(bb) and np.array_equal(t, b):
            # The usual case of two good runs: nothing else to compute.
            self.tt, self.bb, self.tb = self.tt + bb, self.bb + bb, self.tb + bb
            self._grown(b)
            self.near += len(b)
            self.nearer += len(b)
            return True
        np.copyto(wide_t, t)
        tt = float(np.dot(wide_t, wide_t))
        if not (math.isfinite(tt) and math.isfinite(bb)):
            if not np.array_equal(np.isnan(t), np.isnan(b)) or not np.array_equal(np.isinf(t), np.isinf(b)):
                return False
            odd = ~np.isfinite(b)
            t, b = np.where(odd, self.dtype.type(0), t), np.where(odd, self.dtype.type(0), b)
            wide_t[odd] = wide_b[odd] = 0.0
            tt, bb = float(np.dot(wide_t, wide_t)), float(np.dot(wide_b, wide_b))
        self.tt += tt
        self.bb += bb
        self.tb += float(np.dot(wide_t, wide_b))
        self._grown(b)
        np.subtract(wide_t, wide_b, out=difference)
        self.ee += float(np.dot(difference, difference))
        self.error = max(self.error, float(np.maximum.reduce(difference)), -float(np.minimum.reduce(difference)))
        relative = self._relative[: len(t)]
        np.subtract(t, b, out=relative)
        np.divide(relative, b, out=relative)
        np.abs(relative, out=relative)
        largest = float(np.maximum.reduce(relative))
        if not math.isfinite(largest):
            # A bench element of 0 (cheaper to notice here than to look for), or an overflow, which stays.
            relative = _relative(t, b)
            largest = float(np.maximum.reduce(relative))
        self.relative = max(self.relative, largest)
        self.near += int(np.count_nonzero(relative < FIVE_THOUSANDTHS))
        self.nearer += int(np.count_nonzero(relative < ONE_THOUSANDTH))
        return True

    def _grown(self, b: npt.NDArray[Any]) -> None:
        self.largest = max(self.largest, float(np.maximum.reduce(b)), -float(np.minimum.reduce(b)))

    def metrics(self, size: int) -> TensorMetrics:
        distance = math.sqrt(self.ee)
        norm = math.sqrt(max(self.tt, self.bb))
        return TensorMetrics(
            (
                self._cosine(),
                distance if not math.isnan(distance) else NAN,
                _shown(self.error),
                _shown(self.relative),
                round(self.nearer / size, DIGITS),
                round(self.near / size, DIGITS),
            ),
            off=_ratio(distance, norm),
            worst=_ratio(self.error or float(self.unlike), self.largest),
        )

    def _cosine(self) -> Cell:
        norms = math.sqrt(self.tt), math.sqrt(self.bb)
        if norms[0] <= NO_LENGTH and norms[1] <= NO_LENGTH:
            return 1.0
        if norms[0] <= NO_LENGTH or norms[1] <= NO_LENGTH:
            return NAN
        value = self.tb / (norms[0] * norms[1])
        return _shown(value, DIGITS_ALMOST_ONE if value > ALMOST_ONE else DIGITS)


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole > 0.0 and math.isfinite(part) and math.isfinite(whole) else math.inf


def _with_imaginary(real: TensorMetrics, target: Elements, bench: Elements) -> TensorMetrics:
    """msprobe compares real parts only; what our findings look at covers both."""
    sums = _Sums(np.float64)
    for t, b in zip(target.chunks(imaginary=True), bench.chunks(imaginary=True), strict=True):
        if not sums.add(t, b):
            return TensorMetrics(real.cells, math.inf, math.inf)
    other = sums.metrics(target.size)
    return TensorMetrics(real.cells, max(real.off, other.off), max(real.worst, other.worst))
