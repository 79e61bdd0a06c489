"""summary.json: the facts of a report for machines. Keys are only ever added; `format_version` counts breaks."""

from __future__ import annotations

import dataclasses
import json
import math
from enum import Enum
from pathlib import Path
from typing import Any

from aggregator.report.base import EXIT_MEANINGS, Report
from aggregator.report.console import next_command
from msprobe_launch.records.roster import write_atomically

FILE = "summary.json"
FORMAT_VERSION = 1


def write(report: Report) -> Path:
    """Write summary.json into the report's output folder. Raises OSError."""
    path = report.output / FILE
    text = json.dumps(facts(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # A path that is no UTF-8 holds lone surrogates; their backslash form is JSON's own escape.
    write_atomically(path, text.encode("utf-8", "backslashreplace").decode())
    return path


def facts(report: Report) -> dict[str, Any]:
    """The report as plain values: paths as texts, NaN and infinities as the texts `nan`, `inf`, `-inf`."""
    every = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    plain: dict[str, Any] = {"format_version": FORMAT_VERSION, **_plain(every)}
    plain["exit_code"] = report.exit.value
    plain["exit_meaning"] = EXIT_MEANINGS[report.exit]
    plain["partial"] = list(report.partial_reasons)
    plain["totals"] = {
        "ranks": len(report.ranks),
        "expected_ranks": report.expected,
        "steps": list(report.steps),
        "rows": report.rows,
        "matched": report.matched,
        "findings": report.findings,
        "results": report.results,
        "without_bench": dict(report.without_bench),
    }
    plain["next"] = list(next_command(report))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(part) for part in value)
    return value
