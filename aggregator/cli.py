"""msprobe-aggregate: flags -> Request -> Report -> text and exit code. The only print and the only exit code.

Heavy imports stand in `main`, behind the parsing: `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msprobe_launch.errors import ProbeError, UsageError

if TYPE_CHECKING:
    from aggregator import noise
    from aggregator.report.base import Report
    from msprobe_launch.records.numbers import NumberSet

FORMATS = ("csv", "xlsx", "parquet")
VERDICTS = ("msprobe", "noise")

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
  70 the command itself failed: a defect of ours, or stdout cannot be written
"""

FAULT = 70
_REPORT = "This is a defect of msprobe-aggregate. Please report it to its maintainers with this text and --version."


class _Parser(argparse.ArgumentParser):
    """Says which flag a mistyped one may have meant."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            from msprobe_launch.errors import near_miss

            known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            for word in message.removeprefix("unrecognized arguments: ").split():
                if word.startswith("-"):
                    message += near_miss(word.split("=")[0], known)
                    break
        super().error(message)

    def print_help(self, file: Any = None) -> None:
        # argparse drops what cannot be written, and the exit code would be 0.
        if sys.stdout is not None:
            sys.stdout.write(self.format_help())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(
        prog="msprobe-aggregate",
        allow_abbrev=False,
        description="Compare each rank with a trusted run, merge the ranks, name the first culprit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action=_Version, help="print the version and exit")
    made.add_argument("dirs", nargs="+", type=_path, metavar="DIR", help="what to aggregate")
    made.add_argument(
        "--bench",
        action="append",
        default=[],
        type=_path,
        metavar="DIR",
        help="the trusted run (default: the one the run's manifest remembers); may be given per node; with --verdict "
        "noise a second trusted run of the same ranks",
    )
    made.add_argument(
        "--config", type=_path, metavar="FILE", help="merge.yaml with api and compare_index, as msprobe's"
    )
    made.add_argument(
        "-o", "--output", type=_path, metavar="DIR", help="new folder to write to (default: DIR/aggregate/<time>)"
    )
    made.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="relative difference that counts as a finding, such as 0.001 or 0.1%% (default: by dtype)",
    )
    made.add_argument(
        "--verdict",
        type=_verdict,
        default="msprobe",
        metavar="RULES",
        help="whose rules say what is an error: msprobe (default), or noise: what rounding does not explain, nor, with "
        "--bench A --bench B, what two trusted runs differ by",
    )
    made.add_argument(
        "--thresholds", type=_path, metavar="FILE", help="for --verdict noise: YAML of thresholds, also per op pattern"
    )
    made.add_argument(
        "--fuzzy-match",
        action="store_true",
        help="also match calls of one API and shape whose numbers differ, by aligning their sequences",
    )
    for kind, what in MAPPINGS.items():
        made.add_argument(
            f"--{kind}-mapping", type=_path, metavar="FILE", help=f"{what} of the target and of the bench, as msprobe's"
        )
    made.add_argument(
        "--layout",
        type=_layout,
        metavar="FILE",
        help="put ranks together first, for runs with other tensor, data or pipeline parallel sizes; auto: as far as "
        "the dumps say how",
    )
    made.add_argument("--attempt", type=int, metavar="K", help="restart to read (default: the last)")
    made.add_argument("--steps", type=_numbers, metavar="LIST", help="such as 0,2,5-8")
    made.add_argument("--ranks", type=_numbers, metavar="LIST", help="such as 0,2,5-8")
    made.add_argument(
        "--format",
        type=_formats,
        default=frozenset(FORMATS),
        metavar="LIST",
        help=f"files of the merged tables, out of {','.join(FORMATS)} (default: all)",
    )
    made.add_argument(
        "--allow-missing", action="store_true", help="ranks and steps that left nothing are known: not partial input"
    )
    made.add_argument("--jobs", type=_positive, metavar="N", help="processes (default: as cores and memory allow)")
    return made  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    _keep_standard_streams()
    if argv is None:
        _in_utf8()
    try:
        return _guarded(argv)
    except SystemExit as end:  # argparse's --help and usage errors: stdout may be full there as well
        code = 0 if end.code is None else end.code
        return int(code) if _flushed() else FAULT


def _keep_standard_streams() -> None:
    """Where one of them is closed, its number must not become that of a file of ours."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _in_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has another encoding and a path is beyond it.

    Arrow takes the names of files as UTF-8 whatever the locale, so Python has to see them in the same way.
    """
    beyond = any(not text.isascii() for text in (*sys.argv, os.getcwd()))
    if beyond and sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        environment = {"PYTHONIOENCODING": "ascii:backslashreplace", **os.environ, "PYTHONUTF8": "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _guarded(argv: Sequence[str] | None) -> int:
    try:
        options = parser().parse_args(argv)
    except OSError as error:
        return 0 if isinstance(error, BrokenPipeError) and _flushed() else _not_printed(error)
    try:
        return _run(options)
    except ProbeError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except Exception as error:  # noqa: BLE001 - a traceback would exit with 1, which means findings
        _complain(_told(error))
        return FAULT


def _told(error: Exception) -> str:
    """One line on an error nobody foresaw, where it came from, and where to report it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    text = " ".join(str(error).split())
    return f"internal error: {type(error).__name__}: {text}{where}\n{_REPORT}"


def _complain(text: str) -> None:
    """Print to stderr, where there is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"msprobe-aggregate: {text}\n".encode("utf-8", "backslashreplace").decode())
        sys.stderr.flush()


def _flushed() -> bool:
    """False, with the reason on stderr, where what was printed did not arrive; a reader that left is no fault."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    except (OSError, ValueError) as error:
        _not_printed(error)
        return False
    return True


def _not_printed(error: OSError | ValueError, report: Report | None = None) -> int:
    _drop_stdout()
    where = "" if report is None else f"; the report is in {report.output}"
    _complain(f"stdout cannot be written: {getattr(error, 'strerror', None) or error}{where}")
    return FAULT


def _drop_stdout() -> None:
    """Point stdout elsewhere, or Python complains once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _printed(report: Report) -> int:
    """Show the report; the exit code it deserves, whether or not a reader such as head stays to the end."""
    from aggregator.report import console

    if sys.stdout is None:
        _complain(f"stdout is closed; the report is in {report.output}")
        return FAULT
    try:
        console.show(report, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    except (OSError, ValueError) as error:
        return _not_printed(error, report)
    return report.exit.value


def _run(options: argparse.Namespace) -> int:
    from concurrent.futures import Executor
    from datetime import datetime

    from aggregator import mapping, match, merge_config, pipeline, pool
    from aggregator.report import summary
    from aggregator.report.table import Format
    from aggregator.request import Request
    from aggregator.sources import Picked
    from msprobe_launch.records.numbers import EVERY

    request = Request(
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
        picked=Picked(options.steps or EVERY, options.ranks or EVERY),
        formats=frozenset(Format(name) for name in options.format),
        allow_missing=options.allow_missing,
        policy=_policy(options),
        layout=options.layout,
    )

    def executors(count: int, job_bytes: int) -> Executor:
        return pool.local(count=count, jobs=options.jobs, job_bytes=job_bytes)

    try:
        report = pipeline.aggregate(request, executors)
        summary.write(report)
    except OSError as error:
        where = error.filename or request.output or request.inputs[0]
        raise UsageError(f"{where}: {error.strerror or error}", hint="Write elsewhere with -o FOLDER.") from error
    return _printed(report)


def _policy(options: argparse.Namespace) -> noise.Policy | None:
    """How `--verdict noise` judges; None for msprobe's rules. Raises UsageError."""
    if options.verdict != "noise":
        if options.thresholds is not None:
            raise UsageError("--thresholds goes with --verdict noise.", hint="Add --verdict noise.")
        return None
    if options.tolerance is not None:
        raise UsageError(
            "--tolerance and --verdict noise both say what counts as a finding.",
            hint="Leave out one, or set it by op: --thresholds FILE with  ops: {'*': {tolerance: 0.001}}",
        )
    from aggregator import noise, thresholds

    return noise.Policy(thresholds.DEFAULT if options.thresholds is None else thresholds.load(options.thresholds))


# -- values of flags


class _Version(argparse.Action):
    """The version, looked up only where asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from msprobe_launch import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty text is no path (is a variable of the shell empty?)")
    return Path(text)


def _layout(text: str) -> Path | str:
    return text if text == "auto" else _path(text)


def _numbers(text: str) -> NumberSet:
    """`0,2,5-8`, both ends of a range included."""
    from msprobe_launch.records.numbers import NumberSet

    try:
        found = NumberSet.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found.ranges:
        raise argparse.ArgumentTypeError("an empty text picks nothing; to take all, leave the flag out")
    return found


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


def _verdict(text: str) -> str:
    from msprobe_launch.errors import near_miss

    if text not in VERDICTS:
        known = ", ".join(VERDICTS)
        raise argparse.ArgumentTypeError(f"unknown rules {text!r}.{near_miss(text, VERDICTS)} Known: {known}")
    return text


def _formats(text: str) -> frozenset[str]:
    from msprobe_launch.errors import near_miss

    names = [part.strip().lower() for part in text.split(",")]
    for name in names:
        if name not in FORMATS:
            known = ", ".join(FORMATS)
            raise argparse.ArgumentTypeError(f"unknown format {name!r}.{near_miss(name, FORMATS)} Known: {known}")
    return frozenset(names)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
