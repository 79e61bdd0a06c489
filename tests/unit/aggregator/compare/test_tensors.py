"""Metrics of stored values: what msprobe 26.2 answered to the same planted tensors (observed), and reading of files."""

from __future__ import annotations

import math
import os
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator import native, tensors, values
from aggregator.values import UnreadableValues, open_values

NAN, INF = math.nan, math.inf
UNSUPPORTED = ("unsupported",) * 6


@pytest.fixture
def cells(tmp_path):
    """The six cells of two arrays that were stored as .npy."""

    def compare(target, bench, dtype=np.float32, bench_dtype=None):
        np.save(tmp_path / "t.npy", np.asarray(target, dtype))
        np.save(tmp_path / "b.npy", np.asarray(bench, bench_dtype or dtype))
        return tensors.compare_files(tmp_path / "t.npy", tmp_path / "b.npy").cells

    return compare


def single(error, relative):
    return ("unsupported", "unsupported", error, relative, "unsupported", "unsupported")


def along(cosine):
    return [cosine, math.sqrt(1 - cosine * cosine)], [1.0, 0.0]


@pytest.mark.parametrize(
    ("target", "bench", "dtype", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], "f4", (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)),
        # The dtype's epsilon is added to both sides where the bench has 0.
        ([1e-8, 1, 4], [0, 1, 4], "f4",
         (1.0, 9.99999993922529e-09, 1e-08, 0.083886027336, 0.666666666667, 0.666666666667)),
        ([2, 1, 4], [0, 1, 4], "f4", (0.899735410842, 2.0, 2.0, 16777215.0, 0.666666666667, 0.666666666667)),
        ([1e-17, 3], [0, 3], "f8", (1.0, 1e-17, 0.0, 0.045035996274, 0.5, 0.5)),
        ([1, 2, 3], [0, 2, 3], "f4", (0.963624111659, 1.0, 1.0, 8388608.0, 0.666666666667, 0.666666666667)),
        ([1, 2, 3], [0, 2, 3], "f2", (0.963624111659, 1.0, 1.0, 8388608.0, 0.666666666667, 0.666666666667)),
        ([1, 2, 3], [0, 2, 3], "f8", (0.963624111659, 1.0, 1.0, 2.0**52, 0.666666666667, 0.666666666667)),
        ([1, 2, 3], [0, 2, 3], "i8", (0.963624111659, 1.0, 1.0, 2.0**52, 0.666666666667, 0.666666666667)),
        ([1, 2, 3], [0, 2, 3], "c8", (0.963624111659, 1.0, 1.0, 2.0**52, 0.666666666667, 0.666666666667)),
        ([0, 0, 0, 0], [0, 0, 0, 0], "f4", (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)),
        ([0, 0, 0, 0], [1, 1, 1, 1], "f4", ("Nan", 2.0, 1.0, 1.0, 0.0, 0.0)),
        ([1, 0, 3, 4], [2, 255, 3, 5], "u1", (0.023834606027, 255.0039215384736, 255.0, 1.0, 0.25, 0.25)),
        ([2**31 - 1, 5], [-(2**31), 5], "i4", (-1.0, 4294967295.0, 4294967295.0, 1.999999999534, 0.5, 0.5)),
        ([True, False, True], [True, True, False], "?",
         (0.5, 1.4142135623730951, 1.0, 2.0**52, 0.333333333333, 0.333333333333)),
        # Differences in float64, relative errors in float32.
        ([3e38] * 3, [-3e38] * 3, "f4", (-1.0, 1.0392304864458048e39, 6.0000000109955115e38, INF, 0.0, 0.0)),
        ([1e200, 1e200], [1e200, 1e200], "f8", ("Nan", 0.0, 0.0, 0.0, 1.0, 1.0)),
        # Thresholds are not reached by what stands on them.
        ([1.001, 1.0009999, 1.0010001, 1.005, 1.0049999, 1.0050001], [1] * 6, "f4",
         (0.999998, 0.008831755145418889, 0.005000114441, 0.005000114441, 0.166666666667, 0.833333333333)),
        # NaN and infinities in the same places count as 0, whatever the sign; else nothing can be said.
        ([NAN, 1, 2], [NAN, 1, 2], "f4", (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)),
        ([-INF, 1, 2], [INF, 1, 2], "f4", (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)),
        ([-INF, 1, 2], [-INF, 1, 2.1], "f4",
         (0.999815140369, 0.09999990463256836, 0.099999904633, 0.047619003803, 0.666666666667, 0.666666666667)),
        ([NAN, 1, 2], [1, NAN, 2], "f4", ("N/A",) * 6),
        ([NAN, 1, 2], [INF, 1, 2], "f4", ("N/A",) * 6),
        ([1, 1, 2], [INF, 1, 2], "f4", ("N/A",) * 6),
        # One element has no direction.
        (1.01, 1.0, "f4", single(0.009999990463, 0.009999990463)),
        ([[1.01]], [0.0], "f4", single(1.009999990463, 8472494.0)),
        (2.0, 0.0, "f4", single(2.0, 16777215.0)),
        # Its error is computed in the stored type.
        (1, 3, "u1", single(254.0, 0.666666666667)),
        (2**31 - 1, -(2**31), "i4", single(1.0, 1.999999999534)),
        (2**53 + 1, 2**53, "i8", single(1.0, 0.0)),
        (6e4, -6e4, "f2", single(INF, 2.0)),
        (3 + 4j, 1 + 1j, "c8", single(3.605551242828, 2.0)),
        (NAN, NAN, "f4", single("Nan", "Nan")),
        (INF, 1.0, "f4", single(INF, INF)),
        (np.zeros((0, 3)), np.zeros((2, 3)), "f4", UNSUPPORTED),
        # Shapes are compared without lengths of 1.
        (np.ones((3, 1, 5)), np.ones((3, 5)), "f4", (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)),
        (np.ones((1, 5)), np.ones((5, 1)), "f4", (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)),
        (np.ones((3, 5)), np.ones((5, 3)), "f4", ("shape unmatched",) * 6),
        (np.ones((3, 5)), np.ones((1, 5)), "f4", ("shape unmatched",) * 6),
    ],
)  # fmt: skip
def test_cells(cells, target, bench, dtype, expected):
    assert cells(target, bench, dtype) == expected


@pytest.mark.parametrize(
    ("cosine", "shown"),
    [
        (0.9998999123456, 0.999899912346),
        (0.99990001234567, 0.9999),
        (0.9999996, 1.0),
        (-0.99995001234567, -0.999950012346),
    ],
)
def test_a_cosine_near_one_has_six_digits(cells, cosine, shown):
    assert cells(*along(cosine), "f8")[0] == shown


@pytest.mark.parametrize(("length", "cosine"), [(2.3e-16, 0.707106781187), (2.2e-16, "Nan")])
def test_a_norm_up_to_epsilon_has_no_direction(cells, length, cosine):
    assert cells([length, 0.0], [1.0, 1.0], "f8")[0] == cosine


def test_mixed_dtypes_are_compared_in_the_wider_one(cells):
    assert cells([1, 2], [0, 2], "f8", "f4")[3] == 2.0**52
    assert cells([1, 2], [0, 2], "f2", "f4")[3] == 2.0**23


def test_values_beyond_one_chunk(cells):
    """Whatever the place of a difference, and with NaN in a later chunk only."""
    n = 3 * values.CHUNK + 7
    bench = np.ones(n, np.float32)
    for place in (0, values.CHUNK - 1, values.CHUNK, n - 1):
        target = bench.copy()
        target[place] = 3.0
        found = cells(target, bench)
        assert found[1:5] == (2.0, 2.0, 2.0, round((n - 1) / n, 12))
    target[n - 1] = NAN
    assert cells(target, bench) == ("N/A",) * 6


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32)), min_size=2, max_size=40))
def test_distance_and_errors_are_those_of_numpy(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("values")
    t, b = np.array(pairs, np.float32).T
    np.save(folder / "t.npy", t)
    np.save(folder / "b.npy", b)
    found = tensors.compare_files(folder / "t.npy", folder / "b.npy").cells
    wide = t.astype(np.float64) - b.astype(np.float64)
    assert found[1] == pytest.approx(np.linalg.norm(wide), rel=1e-12)
    assert found[2] == round(float(np.abs(wide).max()), 12)
    eps = np.where(b == 0, np.float32(2**-23), np.float32(0))
    with np.errstate(all="ignore"):
        relative = np.abs((t + eps - (b + eps)) / (b + eps))
    assert found[4] == round(int((relative < 0.001).sum()) / len(t), 12)


def bits_of(array, kind):
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else array


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
def test_the_compiled_pass_says_what_numpy_says(kind, monkeypatch):
    """Zeros, subnormals, NaN, infinities, equal and unequal pieces; the last piece is no whole number of registers."""
    if not native.LIBRARY.exists():
        pytest.skip("aggregator/native/_values.so was not compiled here")
    dtype = np.float32 if kind == "bfloat16" else np.dtype(kind).type
    # Of 16-bit elements a few products at a time are added up in float.
    right_to = 2.4e-7 if kind in ("float16", "bfloat16") else 1e-12
    rng = np.random.default_rng(1)
    piece = values.PIECE_BYTES // (2 if kind == "bfloat16" else dtype().itemsize)
    b = (rng.standard_normal(3 * piece + 77) * 10.0 ** rng.integers(-6, 4, 3 * piece + 77)).astype(dtype)
    b[::7] = 0.0
    t = b.copy()
    t[piece:] *= dtype(1.002) if kind != "bfloat16" else dtype(1.02)
    t[piece + 7 :: 700] = 2.5
    t[piece + 14] = 1e-7
    pairs = [(t, b), (b, b)]
    for place, t_odd, b_odd in ((5, NAN, NAN), (piece + 1, INF, -INF), (-1, NAN, 1.0), (-2, INF, 1.0)):
        odd_t, odd_b = t.copy(), b.copy()
        odd_t[place], odd_b[place] = t_odd, b_odd
        pairs.append((odd_t, odd_b))
    ours, theirs = both_ways(pairs, kind, monkeypatch)
    assert_alike(ours, theirs, right_to)
    assert [one.cells[0] for one in ours].count("N/A") == 2


def both_ways(pairs, kind, monkeypatch):
    """Metrics by the compiled pass, and by numpy."""
    name = "bfloat16" if kind == "bfloat16" else ""
    stored = [[values.Values(bits_of(side, kind), name, None) for side in pair] for pair in pairs]
    with np.errstate(all="ignore"):
        ours = [tensors.compare_values(*pair) for pair in stored]
        monkeypatch.setattr(native, "kernels", lambda limits: {})
        return ours, [tensors.compare_values(*pair) for pair in stored]


def assert_alike(ours, theirs, right_to):
    for a, b in zip(ours, theirs, strict=True):
        assert [type(cell) for cell in a.cells] == [type(cell) for cell in b.cells]
        for x, y in zip(a.cells, b.cells, strict=True):
            assert x == (pytest.approx(y, rel=right_to) if isinstance(y, float) else y)
        assert (a.off, a.worst) == pytest.approx((b.off, b.worst), rel=right_to)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sums_in_float_are_not_trusted_where_they_lose(kind, monkeypatch):
    """Squares below float's range, products that cancel, equal roundings all the way, and overflow."""
    if not native.LIBRARY.exists():
        pytest.skip("aggregator/native/_values.so was not compiled here")
    dtype = np.float32 if kind == "bfloat16" else np.float16
    count = 3 * values.CHUNK + 5
    rng = np.random.default_rng(2)
    noise, other = rng.standard_normal((2, count)).astype(dtype)
    tiny = dtype(1e-25 if kind == "bfloat16" else 6e-8)
    huge = dtype(3e38 if kind == "bfloat16" else 65504)
    one_off = noise.copy()
    one_off[9] += tiny
    pairs = [
        (noise * tiny, other * tiny),
        (noise, other),
        (one_off * tiny, noise * tiny),
        (np.full(count, dtype(0.1)), np.full(count, dtype(0.11))),
        (np.zeros(count, dtype), np.zeros(count, dtype)),
        (np.full(count, huge), np.full(count, -huge)),
    ]
    ours, theirs = both_ways(pairs, kind, monkeypatch)
    assert_alike(ours, theirs, 5e-7)


def test_integers_that_float64_does_not_tell_apart_are_apart(cells, tmp_path):
    assert cells([2**53 + 1, 5], [2**53, 5], np.int64)[2] == 0.0
    assert tensors.compare_files(tmp_path / "t.npy", tmp_path / "b.npy").worst > 0.0


# -- what our findings look at


def test_elements_in_another_order_are_apart(cells, tmp_path):
    """No statistic sees a permutation; the values do."""
    cells([1, 2, 3, 4], [4, 3, 2, 1])
    found = tensors.compare_files(tmp_path / "t.npy", tmp_path / "b.npy")
    assert found.off == pytest.approx(math.sqrt(20 / 30))
    assert found.worst == pytest.approx(0.75)


def test_imaginary_parts_count_for_our_findings_only(cells, tmp_path):
    assert cells([1 + 2j, 2], [1 + 1j, 2], "c8") == (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert tensors.compare_files(tmp_path / "t.npy", tmp_path / "b.npy").off > 0.4


# -- files


def _file_of(tmp_path, data):
    (tmp_path / "x.pt").write_bytes(data)
    return tmp_path / "x.pt"


def test_files_that_are_no_tensor_say_why(tmp_path):
    with pytest.raises(UnreadableValues, match="missing"):
        open_values(tmp_path / "x.pt")
    with pytest.raises(UnreadableValues, match="empty"):
        open_values(_file_of(tmp_path, b""))
    with pytest.raises(UnreadableValues, match="neither"):
        open_values(_file_of(tmp_path, b"hello world"))
    with pytest.raises(UnreadableValues, match="damaged"):
        open_values(_file_of(tmp_path, b"PK\x03\x04" + b"\0" * 50))
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/other", b"1")
    with pytest.raises(UnreadableValues, match=r"without data\.pkl"):
        open_values(tmp_path / "x.pt")


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(_Evil()))
    with pytest.raises(UnreadableValues, match="mkdir"):
        open_values(tmp_path / "x.pt")
    assert not (tmp_path / "evil").exists()


def test_npy_that_is_cut_or_holds_objects(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(100.0))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-8])
    with pytest.raises(UnreadableValues, match="cut: 792 bytes of 800"):
        open_values(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.array(["a", "b"]))
    with pytest.raises(UnreadableValues, match="no numbers"):
        open_values(tmp_path / "x.npy")


def test_fortran_order_is_read_in_c_order(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    np.save(tmp_path / "x.npy", np.asfortranarray(array))
    assert np.concatenate(list(open_values(tmp_path / "x.npy").chunks())).tolist() == array.reshape(-1).tolist()


# -- torch.save's own files


@pytest.mark.torch
@pytest.mark.parametrize(
    "dtype",
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "int64 int32 int16 int8 uint8 uint16 bool".split(),
)  # fmt: skip
def test_every_dtype_is_exact(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    if dtype.startswith("float8"):
        tensor = torch.arange(256, dtype=torch.uint8).view(kind)
    elif dtype == "bfloat16":
        tensor = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(kind)
    elif dtype == "bool":
        tensor = torch.tensor([True, False, True])
    else:
        tensor = (torch.arange(1000, dtype=torch.float64) * 0.37 % 251).to(kind)
    torch.save(tensor, tmp_path / "x.pt")
    read = np.concatenate(list(open_values(tmp_path / "x.pt").chunks()))
    np.testing.assert_array_equal(read, tensor.to(torch.float64).numpy())


@pytest.mark.torch
def test_views_parameters_and_complex_numbers(tmp_path):
    torch = pytest.importorskip("torch")
    base = torch.arange(24.0).reshape(6, 4)
    for tensor in (base.t()[1:3], base[2:, 1], base.expand(3, 6, 4), torch.nn.Parameter(base), torch.tensor(3.5)):
        torch.save(tensor, tmp_path / "x.pt")
        found = open_values(tmp_path / "x.pt")
        assert found.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(
            np.concatenate(list(found.chunks())), tensor.detach().contiguous().numpy().reshape(-1)
        )
    torch.save(torch.complex(base, -base), tmp_path / "x.pt")
    assert np.concatenate(list(open_values(tmp_path / "x.pt").chunks(imaginary=True)))[5] == -5.0


@pytest.mark.torch
def test_pt_that_is_cut_or_holds_something_else(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.ones(1000), tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(whole[:2000])
    with pytest.raises(UnreadableValues, match="damaged or cut"):
        open_values(tmp_path / "x.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(UnreadableValues, match="holds a dict"):
        open_values(tmp_path / "x.pt")
    torch.save(torch.ones(2), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnreadableValues, match="neither"):
        open_values(tmp_path / "x.pt")


@pytest.mark.slow
def test_memory_of_a_large_pair(tmp_path):
    """A pair of 1 GB is compared with less than 300 MB for the whole process."""
    import subprocess
    import sys

    rng = np.random.default_rng(0)
    for name in ("t", "b"):
        array = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (1 << 27,))
        for start in range(0, 1 << 27, 1 << 20):
            array[start : start + (1 << 20)] = rng.random(1 << 20, np.float32)
        del array
    program = (
        "import resource, sys; from pathlib import Path; from aggregator import tensors\n"
        "tensors.compare_files(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "t.npy", tmp_path / "b.npy"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 300 * 1024
