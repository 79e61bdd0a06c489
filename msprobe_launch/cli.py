"""The command `msprobe-launch`: flags -> ProbeConfig + LaunchPlan -> a backend -> what was recorded, exit code."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_launch import __version__
from msprobe_launch.config import DataMode, Level, ProbeConfig, StepOn, SummaryMode, Task, WhenFull
from msprobe_launch.config_sources import ENV_PREFIX, SETTINGS, Resolved, resolve
from msprobe_launch.errors import ConfigError, ProbeError, UsageError, near_miss
from msprobe_launch.launch import choice, roster
from msprobe_launch.launch.base import Launcher, LaunchPlan, RunOutcome
from msprobe_launch.launch.choice import Choice
from msprobe_launch.launch.commandline import CommandLine, OptionTable, cut, leading, refusing
from msprobe_launch.launch.rundir import check_bench, default_run_dir
from msprobe_launch.launch.settings import VARIABLES, ExitCode, add_options, resolve_settings
from msprobe_launch.launch.text import show, signal_name
from msprobe_launch.logs import configure, get_logger
from msprobe_launch.records.numbers import NumberSet
from msprobe_launch.records.roster import Manifest

if TYPE_CHECKING:
    from msprobe_launch.launch.follow import FollowPlan
    from msprobe_launch.launch.memory import MemoryGroup

# sysexits.h calls 70 "internal software error"; a training has no reason to end with it.
EXIT_NOT_RECORDED = 70

_CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
_BACKENDS = ("auto", "torchrun", "msrun", "command")

_USAGE = "msprobe-launch [options] SCRIPT [arguments]"
_EPILOG = """\
All options of the installed torchrun are accepted, in both
spellings (torchrun --help lists them), and PET_* variables;
for MindSpore those of the installed msrun (msrun --help).
Everything after SCRIPT belongs to the script.

Each --probe-NAME can be set by MSPROBE_LAUNCH_NAME as well.
Defaults < --probe-config < environment < flags.

exit codes:
  0        the training succeeded
  2        command line, configuration or run directory
  70       --probe-strict: it succeeded, a rank is missing
  128+N    signal N ended the first failing rank or us
  other    of the rank that failed first

Another launcher starts the ranks:
  msprobe-launch --backend command -- srun -n 16 python t.py
Where python -I or -E keeps PYTHONPATH out:
  msprobe-launch install-pth

example:
  msprobe-launch --nproc 8 --probe-level mix train.py --lr 1
  msprobe-aggregate msprobe_runs/20260131-120000-train
"""


def own_parser() -> argparse.ArgumentParser:
    """Our own options. A field's flag has the field's name as `dest`, and None where it was not given."""
    parser = argparse.ArgumentParser(
        prog="msprobe-launch",
        usage=_USAGE,
        description="Start a distributed training as torchrun or msrun does,\nand record what every rank computes.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20, width=_columns()),
        add_help=False,
        allow_abbrev=False,
    )

    def one_of(kind: type[Level | Task | StepOn | DataMode | SummaryMode | WhenFull]) -> str:
        return ", ".join(member.value for member in kind)

    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this and exit")
    add("--version", action="store_true", help="show the version and exit")
    add("--nproc", metavar="N", help="ranks on this node: --nproc-per-node N, or msrun's two worker numbers")
    add("--run-dir", metavar="DIR", help="where the run is recorded; new or empty (default: msprobe_runs/TIME-SCRIPT)")
    add(
        "--backend",
        choices=_BACKENDS,
        default="auto",
        help="auto: the framework that SCRIPT imports, torchrun, msrun, or command: another launcher does it",
    )
    add("--dry-run", action="store_true", help="show what would be started, with which settings, and exit")
    add("--info", action="store_true", help="check whether recording will work here, and exit")
    add("--probe-config", metavar="FILE", help="settings in msprobe's config.json format, or the same in YAML")
    add("--probe-level", metavar="LEVEL", dest="level", help=f"{one_of(Level)} (default: L1)")
    add("--probe-task", metavar="TASK", dest="task", help=f"{one_of(Task)} (default: statistics)")
    add("--probe-steps", metavar="0,2,5-8", dest="steps", help="steps to record (default: all)")
    add("--probe-ranks", metavar="0,2,5-8", dest="ranks", help="ranks that record (default: all)")
    add("--probe-scope", metavar="FROM,TO", dest="scope", help="record from one op to another, by full names")
    add("--probe-list", metavar="A,B", dest="list", help="record ops whose name holds one of these texts")
    add("--probe-data-mode", metavar="MODES", dest="data_mode", help=f"{one_of(DataMode)} (default: all)")
    add(
        "--probe-summary-mode", metavar="MODE", dest="summary_mode", help=f"{one_of(SummaryMode)} (default: statistics)"
    )
    add("--probe-tensor-list", metavar="A,B", dest="tensor_list", help="save the values of these ops beside statistics")
    add("--probe-max-bytes", metavar="20GB", dest="max_bytes", help="stop recording when the run's files reach this")
    add(
        "--probe-buffer-bytes",
        metavar="64MB",
        dest="buffer_bytes",
        help="what may wait to be written on a slow file system, per rank (default: 64MB)",
    )
    add(
        "--probe-when-full",
        metavar="WHAT",
        dest="when_full",
        help=f"what becomes of records beyond that: {one_of(WhenFull)} (default: drop)",
    )
    add("--probe-every", metavar="K", dest="every", help="record every K-th step (default: 1)")
    add("--probe-start", metavar="N", dest="start", help="first step to record (default: 0)")
    add("--probe-stop", metavar="N", dest="stop", help="last step to record (default: none)")
    add("--probe-step-on", metavar="WHAT", dest="step_on", help=f"what ends a step: {one_of(StepOn)} (default: auto)")
    add(
        "--probe-eval",
        action="store_const",
        const=True,
        dest="eval",
        help="record forwards without gradients during training too",
    )
    add("--probe-bench", metavar="RUN_DIR", dest="bench", help="trusted run: each step is compared with it as it ends")
    add_options(add, EXIT_NOT_RECORDED)
    return parser


def _columns() -> int:
    """Columns to write in; 80 in a pipe."""
    import shutil

    return min(shutil.get_terminal_size((80, 24)).columns, 100)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    _open_closed_streams()
    logger = configure("msprobe")
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except ProbeError as error:
        for line in str(error).splitlines():
            logger.error(line)
        return error.exit_code
    except KeyboardInterrupt:  # before the ranks have started, or after
        logger.error("stopped by %s", signal_name(signal.SIGINT))
        return 128 + signal.SIGINT


def _open_closed_streams() -> None:
    """Standard streams that are closed lead to nowhere.

    The next file to be opened would have their numbers, in each rank too, and what is printed would be written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            os.set_inheritable(number, True)


def _main(tokens: list[str]) -> int:
    parser = own_parser()
    if not tokens or tokens[0] in ("-h", "--help"):
        # The usual way to ask, answered before a framework is imported.
        print(parser.format_help(), end="", file=sys.stdout if tokens else sys.stderr)
        return 0 if tokens else UsageError.exit_code
    if tokens[0] == "--version":
        print(f"msprobe-launch {__version__}")
        return 0
    if tokens[0] in ("install-pth", "uninstall-pth"):
        from msprobe_launch.launch import pth

        print(pth.command(tokens))
        return 0
    refusing(parser)
    table = OptionTable(parser)
    given = parser.parse_args(leading(tokens, table))
    if given.info:
        return _info(given)  # before a framework is imported, which is what may be amiss
    launcher, line, chosen = _launcher(given.backend, tokens, table)
    given = parser.parse_args(line.ours)
    if given.help or given.version:
        return _main(["--help" if given.help else "--version"])
    if given.info:
        return _info(given)
    if not line.target:
        raise UsageError("no script was named.", hint=f"usage: {_USAGE}")
    if not line.target[0].strip():
        raise UsageError("the script's name is empty. Is it a variable that is not set?", hint=f"usage: {_USAGE}")
    if (given.backend == "command") != (launcher.name == "command"):
        raise UsageError("--backend command knows no options of torchrun, and stands before all others.")
    if given.backend not in ("auto", launcher.name):  # it stood behind an option that is not ours
        launcher, line, chosen = _launcher(given.backend, tokens, table)
    started = datetime.now(timezone.utc).astimezone()
    resolved = _resolved(given, os.environ, line.target[0], started)
    settings, sources = resolve_settings(given, os.environ)
    if settings.stop_at_divergence is not None and resolved.config.bench is None:
        raise ConfigError(f"{sources['stop_at_divergence']} needs --probe-bench RUN_DIR: what to compare with.")
    if given.nproc is not None and launcher.name == "command":
        raise UsageError("--nproc says how many ranks we start; with --backend command the command starts them.")
    numbers = _workers if launcher.name == "msrun" else _nproc
    options = [*numbers(given.nproc, line.backend), *line.backend]
    plan = LaunchPlan(
        options=tuple(options),
        target=line.target,
        config=None if settings.off else resolved.config,
        run_dir_is_default="run_dir" not in resolved.sources,
        manifest=_manifest(tokens, line.target[0], launcher.name, started, resolved.config),
        settings=settings,
    )
    if given.dry_run:
        from msprobe_launch.launch import dryrun

        show(dryrun.lines(plan, launcher, {**resolved.sources, **sources}, chosen))
        return 0
    if chosen is not None and (chosen.is_guess or launcher.name == "msrun"):
        get_logger().info("backend %s", chosen.text)
    from msprobe_launch.launch.memory import MemoryGroup
    from msprobe_launch.launch.supervision import Supervision

    supervision, before = Supervision(settings, _follow(plan)), MemoryGroup.read()
    with supervision.running():
        outcome = launcher.launch(plan, supervision)
        memory = (before, MemoryGroup.read())
        compared = supervision.end_following(hurry=outcome.signal is not None)
    return _finish(outcome, plan, memory, compared)


def _follow(plan: LaunchPlan) -> FollowPlan | None:
    """What the run is compared with while it goes on, None for nothing."""
    from msprobe_launch.launch.follow import FollowPlan

    if plan.config is None or plan.config.bench is None:
        return None
    return FollowPlan(plan.config.bench, plan.settings.stop_at_divergence)


def _info(given: argparse.Namespace) -> int:
    from msprobe_launch.launch import info

    now = datetime.now(timezone.utc).astimezone()
    config: ProbeConfig | ProbeError
    try:
        config = _resolved(given, os.environ, "info", now).config
    except ProbeError as error:
        config = error
    found: list[info.Check] = []

    def lines() -> Iterator[str]:
        columns = _columns()
        for check in info.checks(config, given.backend):
            found.append(check)
            yield from check.lines(columns)
        yield from info.verdict(found).lines(columns)

    show(lines())
    return 1 if any(check.works is False for check in found) else 0


def _launcher(backend: str, tokens: Sequence[str], ours: OptionTable) -> tuple[Launcher, CommandLine, Choice | None]:
    """The backend, the command line as it reads it, and where it was left to us, why it is this one."""
    if backend != "auto":
        launcher = _of_name(backend)
        return launcher, cut(tokens, ours, OptionTable(launcher.parser())), None
    present = choice.installed()
    if "mindspore" not in present:
        # The usual case pays for nothing: torchrun's parser is needed in any case.
        launcher = _of_name("torchrun")
        line = cut(tokens, ours, OptionTable(launcher.parser()))
        if present and choice.needs_only(line.target, "mindspore"):
            _of_name("msrun").parser()  # which says that MindSpore is not there
        return launcher, line, None
    msrun = _of_name("msrun")
    table = OptionTable(msrun.parser())
    try:
        # An option that both have takes a value in both, so the script's name is the same one to both.
        line = cut(tokens, ours, table)
    except UsageError:
        if "torch" not in present or choice.own_option(tokens, table.names):
            raise
        chosen = Choice("torchrun", "an option is not msrun's")
    else:
        chosen = choice.choose(line.target, present, choice.own_option(line.backend, table.names))
        if chosen.backend == "msrun":
            return msrun, line, chosen
    launcher = _of_name(chosen.backend)
    return launcher, cut(tokens, ours, OptionTable(launcher.parser())), chosen


def _of_name(backend: str) -> Launcher:
    if backend == "command":
        from msprobe_launch.launch.command import CommandLauncher

        return CommandLauncher()
    if backend == "msrun":
        from msprobe_launch.launch.msrun import MsrunLauncher

        return MsrunLauncher()
    from msprobe_launch.launch.torchrun import TorchrunLauncher

    return TorchrunLauncher()


def _nproc(nproc: str | None, backend: Sequence[str]) -> list[str]:
    """torchrun's words for --nproc."""
    names = ("--nproc-per-node", "--nproc_per_node")
    return [] if nproc is None or _says_twice(nproc, names, backend) else [names[0], nproc]


def _workers(nproc: str | None, backend: Sequence[str]) -> list[str]:
    """msrun's words for --nproc: ranks on this node, which are all there are unless --worker_num says more."""
    if nproc is None or _says_twice(nproc, ("--local_worker_num",), backend):
        return []
    names = {token.partition("=")[0] for token in backend}
    total = [] if "--worker_num" in names else ["--worker_num", nproc]
    return [*total, "--local_worker_num", nproc]


def _says_twice(nproc: str, names: Sequence[str], backend: Sequence[str]) -> bool:
    """False, or UsageError where an option of the backend's says as well how many ranks there are."""
    twice = next((token for token in backend if token.partition("=")[0] in names), None)
    if twice is not None:
        raise UsageError(f"--nproc {nproc} and {twice} both say how many ranks to start. Leave out one of them.")
    return False


def _resolved(given: argparse.Namespace, environ: Mapping[str, str], script: str, started: datetime) -> Resolved:
    variables = {setting.variable for setting in SETTINGS.values()} | {
        _CONFIG_VARIABLE,
        *VARIABLES.values(),
    }
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in variables:
            raise ConfigError(f"unknown variable {name}.{near_miss(name, variables)}")
    file = given.probe_config or environ.get(_CONFIG_VARIABLE)
    flags = {field: getattr(given, field) for field in SETTINGS}
    resolved = resolve(flags, environ, Path(file) if file else None, default_run_dir=default_run_dir(script, started))
    if resolved.config.bench is not None:
        check_bench(resolved.config.bench, resolved.sources["bench"])
    return resolved


def _manifest(tokens: Sequence[str], script: str, backend: str, started: datetime, config: ProbeConfig) -> Manifest:
    from importlib import metadata

    versions = {"python": platform.python_version(), "msprobe_launch": __version__}
    for package in ("torch", "mindspore", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Manifest(
        command=("msprobe-launch", *tokens),
        script=script,
        backend=backend,
        started=started.isoformat(timespec="microseconds"),
        bench=None if config.bench is None else str(config.bench),
        config=config.as_dict(),
        versions=versions,
        host=socket.gethostname(),
    )


def _finish(
    outcome: RunOutcome, plan: LaunchPlan, memory: tuple[MemoryGroup, MemoryGroup], compared: Sequence[str]
) -> int:
    """Complete the roster, say what was recorded and who failed, and return the exit code."""
    logger = get_logger()
    if outcome.failure is not None:
        # Whole, for whoever looks into torch; the last lines are for the user.
        traceback.print_exception(outcome.failure)
    marks = roster.complete(outcome, plan, memory)
    asked = NumberSet() if plan.config is None else plan.config.ranks
    if plan.config is None:
        logger.info("probe off: nothing was injected")
    else:
        for line in roster.recorded_lines(outcome, marks, asked):
            logger.info(line)
        for line in compared:
            logger.info(line)
        for line in roster.next_lines(outcome, marks):
            logger.info(line)
    if outcome.attempt:
        times = "once" if outcome.attempt == 1 else f"{outcome.attempt} times"
        logger.info("restarted %s, earlier attempts are kept beside it", times)
    first = roster.culprit(outcome, marks)
    if first is not None:
        for line in roster.failure_lines(outcome, marks, first):
            logger.error(line)
    if outcome.failure is not None:
        logger.error("torch's agent failed: %s: %s", type(outcome.failure).__name__, outcome.failure)
        return 1
    if outcome.signal is not None:
        logger.error("stopped by %s", signal_name(outcome.signal))
        return 128 + outcome.signal
    if outcome.exit_code:
        return outcome.exit_code if outcome.exit_code > 0 else 128 - outcome.exit_code
    if first is not None and first.exit_code:
        if plan.settings.exit_code is ExitCode.TORCHRUN:
            return 1
        return first.exit_code if first.exit_code > 0 else 128 - first.exit_code
    if outcome.failed:
        return 1
    is_complete = roster.is_complete(marks, asked) and not roster.claims(outcome)
    if plan.settings.strict and plan.config is not None and not is_complete:
        logger.error("--probe-strict: not every rank recorded, exit code %d", EXIT_NOT_RECORDED)
        return EXIT_NOT_RECORDED
    return 0
