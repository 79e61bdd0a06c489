"""Columns of a per-rank compare result, by mode, in the field's order (MindStudio Probe 26.2), and what each one holds.

In memory and in parquet a column that can hold numbers is two columns: `<name>` is float64 (null where the cell is no
number) and `<name>:text` is a string, set only where the cell is not a plain number (`N/A`, `Nan`, `None`, ` inf`,
`True`, `[0, 1]`, `RedOpType.SUM`, `unsupported`). A relative error is kept as a percentage, without its `%`.
"""

from __future__ import annotations

from enum import Enum

TEXT_SUFFIX = ":text"

NPU_NAME = "NPU Name"
BENCH_NAME = "Bench Name"
RESULT = "Result"
ERR_MESSAGE = "Err_message"
STACK = "NPU_Stack_Info"
DATA_NAME = "Data_name"
GRAD_CONSISTENT = "Requires_grad Consistent"

IDENTITY = (
    NPU_NAME,
    BENCH_NAME,
    "NPU Dtype",
    "Bench Dtype",
    "NPU Tensor Shape",
    "Bench Tensor Shape",
    "NPU Requires_grad",
    "Bench Requires_grad",
)
DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
RELATIVE_ERRORS = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
TENSOR_METRICS = (
    "Cosine",
    "EucDist",
    "MaxAbsErr",
    "MaxRelativeErr",
    "One Thousandth Err Ratio",
    "Five Thousandths Err Ratio",
)
NPU_STATISTICS = ("NPU max", "NPU min", "NPU mean", "NPU l2norm")
BENCH_STATISTICS = ("Bench max", "Bench min", "Bench mean", "Bench l2norm")
CHECKSUMS = ("NPU MD5", "BENCH MD5")
LAYOUT, OUR_REASON = "layout", "finding"
"""Columns that only `layouts.compare` writes: which ranks make a row and how, and what was found where its cells do not
show it."""
VERDICT = (GRAD_CONSISTENT, RESULT, ERR_MESSAGE, STACK)


class Mode(str, Enum):
    """What kind of values two dumps are compared by."""

    STATISTICS = "statistics"
    MD5 = "md5"
    TENSOR = "tensor"
    STRUCTURE = "structure"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The numeric metrics, in sheet order."""
        if self is Mode.STATISTICS:
            return DIFFERENCES + RELATIVE_ERRORS
        return TENSOR_METRICS if self is Mode.TENSOR else ()

    @property
    def statistics(self) -> tuple[str, ...]:
        """Columns of both sides' own statistics."""
        return NPU_STATISTICS + BENCH_STATISTICS if self in (Mode.STATISTICS, Mode.TENSOR) else ()

    @property
    def header(self) -> tuple[str, ...]:
        """All columns of the mode's csv and xlsx files, in order."""
        middle = CHECKSUMS if self is Mode.MD5 else self.metrics + self.statistics
        return IDENTITY + middle + VERDICT + ((DATA_NAME,) if self is Mode.TENSOR else ())

    @property
    def numeric(self) -> tuple[str, ...]:
        """Columns that are kept as a number and a text."""
        return self.metrics + self.statistics

    def is_percentage(self, column: str) -> bool:
        """True where the file writes the number with a `%` sign (tensor mode's MaxRelativeErr is a ratio)."""
        return self is Mode.STATISTICS and column in RELATIVE_ERRORS
