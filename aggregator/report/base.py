"""What a report says, as facts: the console and summary.json show the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path

from aggregator.alone import NonFinite, RankStatistics
from aggregator.analyse.attendance import MissingRank, RankNote
from aggregator.analyse.opsets import OpDifference
from aggregator.analyse.overall import OpCount
from aggregator.analyse.replicas import ParameterDifference
from aggregator.columns import Mode
from aggregator.model import Divergence, RankComparison, RankFailure
from aggregator.sources import LeftOut


class Task(str, Enum):
    """What was done with the input."""

    COMPARED = "compared"
    RESULTS = "results"
    ALONE = "alone"


class Exit(IntEnum):
    """Exit codes of msprobe-aggregate. Partial input wins over findings; the report then names both."""

    NOTHING_FOUND = 0
    FINDINGS = 1
    USAGE = 2
    PARTIAL = 3
    NOTHING_USABLE = 4


EXIT_MEANINGS = {
    Exit.NOTHING_FOUND: "nothing found",
    Exit.FINDINGS: "findings: something differs by more than rounding explains, or is not finite",
    Exit.USAGE: "usage: a flag, a path or a configuration is wrong",
    Exit.PARTIAL: "partial input: ranks, files or steps are missing, unusable or cut (there may be findings as well)",
    Exit.NOTHING_USABLE: "nothing usable: no rank could be read, or nothing of target and bench matches",
}


@dataclass(frozen=True, slots=True)
class Report:
    """All facts of one run of msprobe-aggregate. Tuples are in the order they are shown in.

    `expected` is the number of ranks that should have recorded, None where nothing says so. `first` is the overall
    first divergence; `common` is an earlier one that all ranks show alike and that did not spread (see
    analyse.overall). `first_nonfinite` takes their place for a run without a bench. `without_bench` counts msprobe's
    words of the rows that have no bench row. `verdict` is whose rules made `Result` (`verdict.Policy`).
    """

    task: Task
    inputs: tuple[Path, ...]
    bench: tuple[Path, ...]
    output: Path
    time: str
    mode: Mode
    tolerance: float | None = None
    verdict: str = "msprobe"
    compared: tuple[RankComparison, ...] = ()
    alone: tuple[RankStatistics, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    missing: tuple[MissingRank, ...] = ()
    missing_steps: tuple[int, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    expected: int | None = None
    allow_missing: bool = False
    first: Divergence | None = None
    common: Divergence | None = None
    first_nonfinite: NonFinite | None = None
    without_bench: Mapping[str, int] = field(default_factory=dict)
    worst_ops: tuple[OpCount, ...] = ()
    op_differences: tuple[OpDifference, ...] = ()
    parameter_differences: tuple[ParameterDifference, ...] = ()
    rank_notes: tuple[RankNote, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def usable(self) -> tuple[RankComparison | RankStatistics, ...]:
        return self.compared or self.alone

    @property
    def steps(self) -> tuple[int | None, ...]:
        return tuple(sorted({entry.step for entry in self.usable}, key=lambda s: (s is None, s or 0)))

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return tuple(sorted({entry.rank for entry in self.usable}, key=lambda r: (r is None, r or 0)))

    @property
    def first_on_all(self) -> int:
        """The number of ranks where two or more are in the first divergence's step and all begin to differ there."""
        first = self.first
        same = [entry for entry in self.compared if first is not None and entry.step == first.step]
        alike = all(entry.first is not None and first is not None and entry.first.item == first.item for entry in same)
        return len(same) if alike and len(same) > 1 else 0

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.usable)

    @property
    def matched(self) -> int:
        return sum(entry.matched for entry in self.compared)

    @property
    def findings(self) -> int:
        return sum(entry.findings for entry in self.usable)

    @property
    def results(self) -> dict[str, int]:
        """msprobe's words over all ranks; old files have '' where nothing was wrong."""
        total: Counter[str] = Counter()
        for entry in self.compared:
            total.update(entry.results)
        return dict(total)

    @property
    def partial_reasons(self) -> tuple[str, ...]:
        """Why the input counts as partial, in a few words each; empty where it is whole."""
        reasons: list[str] = []
        if self.failures:
            reasons.append(f"{len(self.failures)} unusable")
        if self.missing and not self.allow_missing:
            count = len({entry.rank for entry in self.missing})
            reasons.append(f"{count} {'rank' if count == 1 else 'ranks'} missing")
        if self.missing_steps and not self.allow_missing:
            count = len(self.missing_steps)
            reasons.append(f"{count} {'step' if count == 1 else 'steps'} missing")
        cut = sum(entry.partial for entry in self.usable)
        if cut:
            reasons.append(f"{cut} unfinished")
        return tuple(reasons)

    @property
    def exit(self) -> Exit:
        if not self.usable:
            return Exit.NOTHING_USABLE
        if self.partial_reasons:
            return Exit.PARTIAL
        return Exit.FINDINGS if self.findings else Exit.NOTHING_FOUND
