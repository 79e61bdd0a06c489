"""msprobe-aggregate: flags -> Request -> Report -> text and exit code. The only print and the only exit code.

Heavy imports stand in `main`, behind the parsing: `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from msprobe_launch.errors import ProbeError, UsageError

FORMATS = ("csv", "xlsx", "parquet")

MAPPINGS = {
    "data": "which items belong together",
    "cell": "which modules",
    "api": "which APIs, and which of their inputs and outputs",
    "layer": "what submodules are called, by class",
}

_EPILOG = """\
DIR is a run directory of msprobe-launch, one of its step or rank folders, a
rank's dump.json, or a folder of compare_result_rank<R>_<time>.csv or .xlsx
(ours, or msprobe's 1.2 to 26.2). Several DIR of one job, such as one per node,
are taken together. Bad files are listed with the reason; the rest goes on.

example:
  msprobe-aggregate runs/suspect --bench runs/trusted
  msprobe-aggregate runs/suspect --steps 0-2 --format csv -o report

exit codes:
  0  nothing found
  1  findings: something differs by more than rounding explains, or is
     not finite
  2  usage: a flag, a path or a configuration is wrong
  3  partial input: ranks, files or steps are missing, unusable or cut
     (wins over 1; the report names the findings as well)
  4  nothing usable: no rank could be read, or nothing matches
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="msprobe-aggregate",
        description="Compare each rank with a trusted run, merge the ranks, name the first culprit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("dirs", nargs="+", type=Path, metavar="DIR", help="what to aggregate")
    made.add_argument(
        "--bench",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="the trusted run (default: the one the run's manifest remembers); may be given per node",
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="merge.yaml with api and compare_index, as msprobe's")
    made.add_argument("-o", "--output", type=Path, metavar="DIR", help="where to write (default: DIR/aggregate/<time>)")
    made.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="relative difference that counts as a finding, such as 0.001 or 0.1%% (default: by dtype)",
    )
    made.add_argument(
        "--fuzzy-match",
        action="store_true",
        help="also match calls of one API and shape whose numbers differ, by aligning their sequences",
    )
    for kind, what in MAPPINGS.items():
        made.add_argument(
            f"--{kind}-mapping", type=Path, metavar="FILE", help=f"{what} of the target and of the bench, as msprobe's"
        )
    made.add_argument("--attempt", type=int, metavar="K", help="restart to read (default: the last)")
    made.add_argument("--steps", type=_numbers, default=frozenset(), metavar="LIST", help="such as 0,2,5-8")
    made.add_argument("--ranks", type=_numbers, default=frozenset(), metavar="LIST", help="such as 0,2,5-8")
    made.add_argument(
        "--format",
        type=_formats,
        default=frozenset(FORMATS),
        metavar="LIST",
        help=f"files of the merged tables, out of {','.join(FORMATS)} (default: all)",
    )
    made.add_argument(
        "--allow-missing", action="store_true", help="ranks that left nothing are known: not partial input"
    )
    made.add_argument("--jobs", type=_positive, metavar="N", help="processes (default: as cores and memory allow)")
    return made  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        return _run(options)
    except ProbeError as error:
        print(f"msprobe-aggregate: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader, such as head, has enough. Point stdout elsewhere, or Python complains once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(options: argparse.Namespace) -> int:
    from concurrent.futures import Executor
    from datetime import datetime

    from aggregator import mapping, match, merge_config, pipeline, pool
    from aggregator.report import console, summary
    from aggregator.report.table import Format

    request = pipeline.Request(
        inputs=tuple(options.dirs),
        time=datetime.now().strftime("%Y%m%d%H%M%S"),
        bench=tuple(options.bench),
        output=options.output,
        config=merge_config.load(options.config) if options.config else merge_config.MergeConfig(),
        tolerance=options.tolerance,
        matching=match.Options(
            fuzzy=options.fuzzy_match,
            mappings=mapping.load(
                options.data_mapping, options.cell_mapping, options.api_mapping, options.layer_mapping
            ),
        ),
        attempt=options.attempt,
        steps=options.steps,
        ranks=options.ranks,
        formats=frozenset(Format(name) for name in options.format),
        allow_missing=options.allow_missing,
    )

    def executors(count: int, job_bytes: int) -> Executor:
        return pool.local(count=count, jobs=options.jobs, job_bytes=job_bytes)

    try:
        report = pipeline.aggregate(request, executors)
        summary.write(report)
    except OSError as error:
        where = error.filename or request.output or request.inputs[0]
        raise UsageError(f"{where}: {error.strerror or error}", hint="Write elsewhere with -o FOLDER.") from error
    console.show(report, sys.stdout)
    sys.stdout.flush()
    return report.exit.value


# -- values of flags


def _numbers(text: str) -> frozenset[int]:
    """`0,2,5-8` -> the numbers, both ends of a range included."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor a range such as 5-8")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise argparse.ArgumentTypeError(f"the range {part!r} runs backwards")
        found.update(range(low, high + 1))
    return frozenset(found)


def _tolerance(text: str) -> float:
    """`0.001` or `0.1%`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    # `not <`: NaN fails as well.
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number such as 0.001 or 0.1%")
    return value


def _formats(text: str) -> frozenset[str]:
    from msprobe_launch.errors import near_miss

    names = [part.strip().lower() for part in text.split(",")]
    for name in names:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"unknown format {name!r}.{near_miss(name, FORMATS)} Known: {FORMATS}")
    return frozenset(names)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
