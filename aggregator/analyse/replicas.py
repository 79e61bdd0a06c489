"""Parameters that are not the same on all ranks, as far as their statistics tell.

Replicas of data-parallel training must agree; parts of a tensor-parallel or pipeline-parallel model need not. So this
is told, never a finding that decides the exit code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aggregator import columns, merge
from aggregator.merge import MergePlan
from msprobe_launch.records.names import Role

_STATISTICS = (columns.NPU_STATISTICS[0], columns.NPU_STATISTICS[1], columns.NPU_STATISTICS[3])
"""Maximum, minimum and norm: a mean is close to zero in most weights and says least."""


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    """In one step: how many of the parameters recorded by two ranks or more differ, the first one and who deviates.

    A rank deviates where its value is not the one that most ranks hold; with two ranks nobody knows who is right.
    """

    step: int | None
    differing: int
    compared: int
    item: str
    ranks: tuple[int | None, ...]


def differences(step: int | None, plan: MergePlan) -> ParameterDifference | None:
    """Exact comparison over ranks; None where all agree or fewer than two ranks hold parameters."""
    if len(plan.ranks) < 2 or plan.height == 0:
        return None
    is_parameter = _parameters(plan)
    if not is_parameter.any():
        return None
    deviates = np.zeros((plan.height, len(plan.ranks)), dtype=bool)
    shared = np.zeros(plan.height, dtype=bool)
    for statistic in _STATISTICS:
        for block in merge.blocks(plan, statistic):
            rows = slice(block.start, block.start + len(block.names))
            values = np.stack([_numbers(column.numbers) for column in block.columns], axis=1)
            here = ~np.isnan(values)
            shared[rows] |= here.sum(axis=1) >= 2
            # NaN sorts last; the middle of what is there is what most ranks hold, where most hold one value.
            ordered = np.sort(values, axis=1)
            middle = np.maximum(here.sum(axis=1) - 1, 0) // 2
            usual = np.take_along_axis(ordered, middle[:, None], axis=1)
            deviates[rows] |= here & (values != usual)
    deviates &= (is_parameter & shared)[:, None]
    differing = np.flatnonzero(deviates.any(axis=1))
    if not len(differing):
        return None
    first = int(differing[0])
    return ParameterDifference(
        step,
        len(differing),
        int(np.count_nonzero(is_parameter & shared)),
        plan.names[first].as_py(),
        tuple(rank.rank for rank, off in zip(plan.ranks, deviates[first], strict=True) if off),
    )


def _parameters(plan: MergePlan) -> npt.NDArray[np.bool_]:
    mask = np.zeros(plan.height, dtype=bool)
    for block in merge.blocks(plan, "role"):
        rows = slice(block.start, block.start + len(block.names))
        for column in block.columns:
            found = np.asarray(column.texts.to_numpy(zero_copy_only=False), dtype=object)
            mask[rows] |= found == Role.PARAMETERS.value
    return mask


def _numbers(numbers: pa.Array) -> npt.NDArray[np.float64]:
    return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)
