"""Element types as dumps spell them, and how many bits their significands have."""

from __future__ import annotations

SIGNIFICAND_BITS: dict[str, int] = {
    "float64": 53,
    "float32": 24,
    "float16": 11,
    "bfloat16": 8,
    "complex128": 53,  # the statistics of complex tensors are those of the absolute values
    "complex64": 24,
    "float8_e4m3fn": 4,
    "float8_e4m3fnuz": 4,
    "float8_e5m2": 3,
    "float8_e5m2fnuz": 3,
}


def canonical_dtype(dtype: str) -> str:
    """`float32` for `torch.float32`, `mindspore.float32` and `Float32`; other texts as they are."""
    bare = dtype.removeprefix("torch.").removeprefix("mindspore.")
    return bare.lower() if bare[:1].isupper() else bare


INDICES = ("Int32", "torch.int64"), ("Int64", "torch.int32")
"""Types of ids and labels that stand for each other, MindSpore's against PyTorch's."""


def same_dtype(dtype: str, other: str) -> bool:
    """True where two dtypes are one but for the framework's spelling, or 32- and 64-bit integers of two frameworks:
    MindSpore's functions ask for int32 ids and labels where PyTorch's ask for int64."""
    return canonical_dtype(dtype) == canonical_dtype(other) or (dtype, other) in INDICES or (other, dtype) in INDICES


_TORCH_FLOATS = frozenset({"torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"})
_MINDSPORE_FLOATS = frozenset({"Float16", "BFloat16", "Float32", "Float64"})


def comparable(dtype: str, other: str) -> bool:
    """True where two dtypes may stand opposite each other: equal, equal but for the framework (`same_dtype`), or both
    floating.

    Anything else (an int opposite a float, a tensor opposite None) leaves the row unmatched in msprobe's table; our
    findings name it all the same.
    """
    if dtype == other:
        return True
    if dtype in _TORCH_FLOATS | _MINDSPORE_FLOATS and other in _TORCH_FLOATS | _MINDSPORE_FLOATS:
        return (dtype in _TORCH_FLOATS) == (other in _TORCH_FLOATS) or (
            canonical_dtype(dtype) == canonical_dtype(other)
        )
    if "N/A" in (dtype, other):
        return False
    both_tensors = not dtype.startswith("<") and not other.startswith("<")
    return both_tensors and same_dtype(dtype, other)
