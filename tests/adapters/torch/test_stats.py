"""Statistics against float64 references, by the kernel and by torch's own reductions."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from msprobe_launch import native  # noqa: E402
from msprobe_launch.adapters.torch.stats import measures  # noqa: E402

pytestmark = pytest.mark.torch

KERNELS = native.load()
WAYS = [
    pytest.param(
        measures(KERNELS), id="kernel", marks=pytest.mark.skipif(not KERNELS, reason="no C compiler at build time")
    ),
    pytest.param(measures({}), id="torch"),
]


def reference(tensor: Any) -> tuple[float, float, float, float]:
    wide = tensor.abs().double() if tensor.is_complex() else tensor.double()
    return wide.max().item(), wide.min().item(), wide.mean().item(), torch.linalg.vector_norm(wide).item()


def layouts() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(6, 40, 96)
    return {
        "one": torch.tensor([-2.5]),
        "few": torch.randn(7),
        "block": torch.randn(4096 * 3 + 17),
        "large": torch.randn(3, 70_001),
        "transposed": base.transpose(0, 2),
        "slice": base[:, :, 32:64],
        "heads": base[:, :, :32].view(6, 40, 4, 8).transpose(1, 2),
        "every_other": base[:, ::2, ::3],
        "expanded": torch.randn(5, 1).expand(5, 9),
        "offset": base.view(-1)[3:5000],
        "negative": torch.complex(torch.randn(9), torch.randn(9)).conj().imag,
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("layout", list(layouts()))
def test_every_layout_and_dtype(way: Any, dtype: str, layout: str) -> None:
    tensor = layouts()[layout].to(getattr(torch, dtype)) if dtype != "float32" else layouts()[layout]
    expected = reference(tensor)
    high, low, mean, norm = way[tensor.dtype](tensor)
    assert (high, low) == expected[:2]
    scale = expected[3] / math.sqrt(tensor.numel()) or 1.0
    assert mean == pytest.approx(expected[2], abs=scale * 1e-5)
    assert norm == pytest.approx(expected[3], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [2, 100, 40_000])
def test_values_that_are_not_finite(way: Any, n: int) -> None:
    tensor = torch.ones(n)
    tensor[n // 2] = math.nan
    assert all(math.isnan(x) for x in way[torch.float32](tensor))
    tensor[n // 2] = math.inf
    assert way[torch.float32](tensor) == (math.inf, 1.0, math.inf, math.inf)
    tensor[0] = -math.inf
    high, low, mean, norm = way[torch.float32](tensor)
    assert (high, low, norm) == (math.inf, -math.inf, math.inf)
    assert math.isnan(mean)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [3, 40_000])
def test_no_overflow_in_float32(way: Any, n: int) -> None:
    high, low, mean, norm = way[torch.float32](torch.full((n,), 3e38))
    assert (high, low) == (torch.tensor(3e38).item(),) * 2
    assert mean == pytest.approx(3e38)
    assert norm == pytest.approx(3e38 * math.sqrt(n))


@pytest.mark.skipif(not KERNELS, reason="no C compiler at build time")
def test_the_kernel_sees_tiny_values() -> None:
    high, low, mean, norm = measures(KERNELS)[torch.float32](torch.full((1000,), 1e-25))
    assert norm == pytest.approx(1e-25 * math.sqrt(1000), rel=1e-6)
    assert mean == pytest.approx(1e-25, rel=1e-6)
    assert high == low


def test_a_float_sum_over_many_elements_stays_exact_enough() -> None:
    tensor = torch.full((1 << 22,), 0.1)
    for way in (measures(KERNELS), measures({})):
        assert way[torch.float32](tensor)[2] == pytest.approx(torch.tensor(0.1).item(), rel=1e-6)
