"""The report for a person, as text: one page, readable at 60 columns, in a pipe, in ASCII and without colour.

All words of ours are ASCII. Names of items and paths stand whole on a line of their own, and where a line is too
narrow they are broken behind a dot, a slash or a blank, never inside a part.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from aggregator.alone import NonFinite, RankStatistics
from aggregator.columns import Mode
from aggregator.model import Divergence, RankComparison
from aggregator.report.base import EXIT_MEANINGS, Exit, Report, Task
from aggregator.report.page import Line, Page, Surface
from aggregator.sources import number_ranges
from msprobe_launch.records.layout import step_number

if TYPE_CHECKING:
    from rich.console import Console

# Lists are cut here, with the number of what was left out; summary.json holds all of them.
MOST_ENTRIES = 20
WORST = 5

_FRAME = re.compile(r"^File (?P<path>.*?), line (?P<line>\d+), in (?P<function>.*?), \n ?(?P<source>.*)$", re.DOTALL)
# Where a frame of an installed package, of the standard library or of the frozen importer lies.
_NOT_THE_USERS = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<")


def show(report: Report, stream: TextIO) -> None:
    """Print the report to `stream`, with colours where it is a terminal that wants them (NO_COLOR is heeded)."""
    from rich.console import Console
    from rich.text import Text

    surface = Surface.of(stream)
    console: Console = Console(
        file=stream, width=surface.width, highlight=False, markup=False, emoji=False, soft_wrap=True
    )
    for line in render(report, surface):
        # Also a path that is no UTF-8, which Python holds as lone surrogates.
        text = line.text.encode("ascii" if surface.ascii_only else "utf-8", "backslashreplace").decode()
        console.print(Text(text, style=line.style))


def render(report: Report, surface: Surface) -> list[Line]:
    """The report's lines, none wider than the surface."""
    page = Page(surface.width)
    _head(page, report)
    if report.task is Task.ALONE:
        _nonfinite(page, report)
    else:
        _first(page, report)
        _counts(page, report)
    _worst(page, report)
    _differences(page, report)
    _unusable(page, report)
    _notes(page, report)
    _files(page, report)
    _next(page, report)
    _exit(page, report)
    return page.lines


# -- sections


def _head(page: Page, report: Report) -> None:
    titles = {
        Task.COMPARED: "msprobe-aggregate: a run compared with its bench",
        Task.RESULTS: "msprobe-aggregate: compare results merged",
        Task.ALONE: "msprobe-aggregate: a run without a bench",
    }
    page.heading(titles[report.task])
    for path in report.inputs:
        page.pair("input", str(path))
    for path in report.bench:
        page.pair("bench", str(path))
    if not report.usable:
        page.pair("used", "nothing: no rank could be used", style="bold red")
        return
    heights = sorted({entry.rows for entry in report.usable})
    items = f"{heights[0]:,}" if len(heights) == 1 else f"{heights[0]:,} to {heights[-1]:,}"
    ranks = len(report.ranks)
    of = f" of {report.expected}" if report.expected is not None else ""
    steps = report.steps
    page.pair(
        "used",
        f"{ranks}{of} {_plural(report.expected or ranks, 'rank')} x {len(steps)} {_plural(len(steps), 'step')} "
        f"x {items} items = {report.rows:,} rows",
    )
    if steps != (None,):
        page.pair("steps", number_ranges(steps))
    if report.ranks != (None,):
        page.pair("ranks", number_ranges(report.ranks))
    if report.task is not Task.ALONE:
        unmatched = report.rows - report.matched
        judged = "; verdict noise" if report.verdict == "noise" else ""
        page.pair("mode", report.mode.value + judged + (f"; {unmatched:,} rows have no bench row" if unmatched else ""))
        lone = sum(len(entry.bench_only) for entry in report.compared)
        if lone:
            example = next(op for entry in report.compared for op in entry.bench_only)
            page.pair("", f"{lone:,} ops are only in the bench, such as {example}")


def _first(page: Page, report: Report) -> None:
    if report.first is None:
        if report.usable:
            _none(page, report)
        return
    where = _where(report.first.rank, report.first.step)
    if report.first_on_all:
        step = "" if report.first.step is None else f", step {report.first.step}"
        page.heading(f"FIRST DIVERGENCE: all {report.first_on_all} ranks{step}", "bold red")
    else:
        page.heading(f"FIRST DIVERGENCE: {where}", "bold red")
    _divergence(page, report.first)
    if report.first_on_all:
        page.text(f"All ranks first differ at this item; the values are those of {_where(report.first.rank, None)}.")
    if report.common is not None:
        page.text("Earlier, but on all ranks alike, and what follows it agrees again:", style="bold")
        _divergence(page, report.common, brief=True)


def _none(page: Page, report: Report) -> None:
    if report.mode is Mode.STRUCTURE:
        page.heading("Names only")
        page.text("Names were compared, no values: at least one side was recorded with task structure.")
        return
    page.heading("No divergence", "bold green")
    if report.mode is Mode.MD5:
        page.text("No checksum differs from its bench's.")
    else:
        page.text("Nothing differs by more than rounding of its dtype explains.")


def _divergence(page: Page, found: Divergence, *, brief: bool = False) -> None:
    page.name(found.item, style="bold" if not brief else "")
    if found.bench_item not in ("", found.item, "N/A"):
        page.pair("bench's", found.bench_item)
    if found.parent:
        page.pair("inside", found.parent)
    page.pair("differs", found.reason)
    if brief:
        return
    if found.npu_max or found.bench_max:  # neither in md5 mode; the reason then holds both checksums
        page.pair("target", f"max {found.npu_max or 'N/A'}  norm {found.npu_norm or 'N/A'}")
        page.pair("bench", f"max {found.bench_max or 'N/A'}  norm {found.bench_norm or 'N/A'}")
    page.pair("call", f"number {found.position + 1} of its step")
    _stack(page, found.stack)


def _stack(page: Page, frames: Sequence[str]) -> None:
    frame = user_frame(frames)
    if frame is None:
        return
    match = _FRAME.match(frame)
    if match is None:
        page.pair("at", frame)
        return
    page.pair("at", f"{match['path']}:{match['line']} in {match['function']}")
    if match["source"].strip() not in ("", "None"):
        page.pair("", match["source"].strip())


def user_frame(frames: Sequence[str]) -> str | None:
    """The innermost frame that lies in no installed package; the innermost of all where there is none."""
    for frame in frames:
        path = frame.removeprefix("File ").split(", line ")[0]
        if not _NOT_THE_USERS.search(path):
            return frame
    return frames[0] if frames else None


def _counts(page: Page, report: Report) -> None:
    if not report.usable:
        return
    page.heading("Counts")
    words = {word: count - report.without_bench.get(word, 0) for word, count in report.results.items()}
    named = [f"{word} {words.pop(word, 0):,}" for word in ("pass", "warning", "error")]
    # Files of 1.2 and 8.1 say `Warning`, and nothing where nothing was wrong.
    named += [f"{word or 'no word'} {count:,}" for word, count in sorted(words.items()) if count]
    if report.without_bench:
        named.append(f"without a bench row {sum(report.without_bench.values()):,}")
    page.pair(report.verdict, ", ".join(named))
    rule = " by more than rounding explains" if report.tolerance is None else f" by more than {report.tolerance:g}"
    if report.mode is Mode.STRUCTURE:
        page.pair("ours", f"{report.rows:,} names compared, no values")
        return
    if report.mode is Mode.MD5:
        rule = ""
    page.pair("ours", f"{report.findings:,} of {report.rows:,} rows differ{rule}")


def _nonfinite(page: Page, report: Report) -> None:
    if not report.usable:
        return
    found = report.first_nonfinite
    if not any(entry.metrics for entry in report.alone):
        page.heading("Names only")
        page.text("The run recorded no values (task structure), so nothing is said about NaN and infinity.")
    elif found is None:
        page.heading("No NaN, no infinity", "bold green")
    else:
        page.heading(f"FIRST NON-FINITE VALUE: {_where(found.rank, found.step)}", "bold red")
        _first_nonfinite(page, found)
        page.pair("in all", f"{report.findings:,} of {report.rows:,} items are not finite")
    asked = sum(entry.asked_for for entry in report.alone)
    if asked:
        hold = "item holds" if asked == 1 else "items hold"
        page.text(f"{asked:,} {hold} infinities that the script itself passed in (masks); not counted.")


def _first_nonfinite(page: Page, found: NonFinite) -> None:
    page.name(found.item, style="bold")
    if found.parent:
        page.pair("inside", found.parent)
    page.pair("is", f"{found.kind} (max {found.npu_max}, min {found.npu_min})")
    if found.argument:
        page.pair("made", f"here: the script passes it to this call as {found.argument.removeprefix(found.op + '.')}")
    elif found.made_here:
        page.pair("made", "here: all inputs of this call are finite")
    else:
        page.pair("made", "before: it came in from outside")
    page.pair("call", f"number {found.position + 1} of its step")
    _stack(page, found.stack)


def _worst(page: Page, report: Report) -> None:
    _ranks(page, report)
    if report.worst_ops:
        page.heading("Worst ops")
        for op in report.worst_ops:
            who = f"{op.ranks} {_plural(op.ranks, 'rank')}"
            far = "NaN, shape, dtype or value" if op.excess == float("inf") else f"{op.excess:,.3g} x tolerance"
            page.name(op.op)
            page.text(f"{op.findings:,} {_plural(op.findings, 'finding')} on {who}; worst: {far}", indent=4)


def _ranks(page: Page, report: Report) -> None:
    """The ranks with findings: most first, or without a bench the earliest first, since NaN spreads to all ranks."""
    by_rank: dict[int | None, list[RankComparison | RankStatistics]] = defaultdict(list)
    for entry in report.usable:
        if entry.findings:
            by_rank[entry.rank].append(entry)
    if len(by_rank) < 2:
        return
    rows = [(rank, sum(e.findings for e in entries), _first_of(entries, report)) for rank, entries in by_rank.items()]
    alone = report.task is Task.ALONE
    rows.sort(key=lambda row: (*((row[2][0], row[2][1]) if alone else (-row[1],)), row[0] is None, row[0] or 0))
    page.heading("Ranks, earliest first" if alone else "Worst ranks")
    for rank, count, (step, _, item) in rows[:WORST]:
        what = _plural(count, "non-finite item" if alone else "finding")
        where = "" if step == _UNKNOWN_STEP else f", in step {step},"
        page.text(f"{_where(rank, None)}: {count:,} {what}; the first{where} is")
        page.name(item, indent=4)
    if len(rows) > WORST:
        page.text(f"... and {len(rows) - WORST} more (summary.json)")


_UNKNOWN_STEP = -1


def _first_of(entries: Sequence[RankComparison | RankStatistics], report: Report) -> tuple[int, int, str]:
    """(step, call order, item) of a rank's first finding.

    Where a difference that all ranks share was put second, the rank's own is what counts.
    """
    firsts = [entry.first for entry in entries if entry.first is not None]
    if report.common is not None and report.first is not None and entries[0].rank == report.first.rank:
        firsts = [report.first]
    found = [(_UNKNOWN_STEP if f.step is None else f.step, f.position, f.item) for f in firsts]
    return min(found, default=(_UNKNOWN_STEP, 0, ""))


def _differences(page: Page, report: Report) -> None:
    if report.op_differences:
        page.heading("Ranks whose ops differ from most")
        for entry in report.op_differences[:MOST_ENTRIES]:
            page.text(
                f"{_where_ranks(entry.ranks, entry.step)}: {entry.ops:,} ops, most have {entry.usual:,}; "
                f"{entry.only_here:,} only here, {entry.lacking:,} lacking, such as"
            )
            page.name(entry.example, indent=4)
        _more(page, len(report.op_differences))
    if report.parameter_differences:
        page.heading("Parameters that are not the same on all ranks")
        page.text("(as they should be in data-parallel training; not with tensor or pipeline parallel parts)")
        for difference in report.parameter_differences[:MOST_ENTRIES]:
            page.text(
                f"{_where_ranks(difference.ranks, difference.step)}: "
                f"{difference.differing:,} of {difference.compared:,}, the first is"
            )
            page.name(difference.item, indent=4)
        _more(page, len(report.parameter_differences))


def _unusable(page: Page, report: Report) -> None:
    if report.failures:
        page.heading(f"NOT USED: {len(report.failures)}", "bold yellow")
        for failure in report.failures[:MOST_ENTRIES]:
            page.text(f"{_where(failure.rank, failure.step)}: {failure.reason}")
            page.name(str(failure.source), indent=4)
        _more(page, len(report.failures))
    if report.missing:
        count = len({entry.rank for entry in report.missing})
        page.heading(f"MISSING: {count} {_plural(count, 'rank')}", "bold yellow")
        by_rank: dict[tuple[int, str], list[int | None]] = defaultdict(list)
        for entry in report.missing:
            by_rank[(entry.rank, entry.reason)].append(entry.step)
        for (rank, reason), steps in list(by_rank.items())[:MOST_ENTRIES]:
            where = "" if steps == [None] else f" in step {number_ranges(steps)}"
            page.text(f"rank {rank} left nothing{where}" + (f": {reason}" if reason else ""))
        _more(page, len(by_rank))
    if report.missing_steps:
        count = len(report.missing_steps)
        page.heading(f"MISSING: {count} {_plural(count, 'step')}", "bold yellow")
        page.text(
            f"{_plural(count, 'step')} {number_ranges(report.missing_steps)}: recorded according to the roster, "
            "and no folder is there"
        )
    cut = [entry for entry in report.usable if entry.partial]
    if cut:
        page.heading(f"UNFINISHED: {len(cut)}", "bold yellow")
        for rank_entry in cut[:MOST_ENTRIES]:
            page.text(
                f"{_where(rank_entry.rank, rank_entry.step)} is partial: the step was never finished, "
                f"{rank_entry.rows:,} items were read"
            )
        _more(page, len(cut))


def _notes(page: Page, report: Report) -> None:
    if report.left_out:
        page.heading(f"Left out: {len(report.left_out)}")
        for entry in report.left_out[:MOST_ENTRIES]:
            page.text(f"{entry.path.name}: {entry.reason}")
        _more(page, len(report.left_out))
    if report.notes or report.rank_notes:
        page.heading("Notes")
        for note in report.notes:
            page.text(note)
        by_text: dict[str, list[int | None]] = defaultdict(list)
        for rank_note in report.rank_notes:
            by_text[rank_note.text].append(rank_note.rank)
        for text, ranks in list(by_text.items())[:MOST_ENTRIES]:
            page.text(f"{_where_ranks(ranks, None)}: {text}")
        _more(page, len(by_text))


def _files(page: Page, report: Report) -> None:
    page.heading("Written")
    page.name(str(report.output))
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    steps: dict[tuple[str, str], set[int | None]] = defaultdict(set)
    for path in report.files:
        try:
            parts = path.parent.relative_to(report.output).parts
        except ValueError:
            parts = path.parent.parts
        step = step_number(Path(parts[0])) if parts else None
        folder = "/".join(parts if step is None else ("step{}", *parts[1:]))
        groups[(folder, path.suffix)].append(path)
        steps[(folder, path.suffix)].add(step)
    for (folder, suffix), paths in groups.items():
        numbered = folder.replace("step{}", f"step{number_ranges(steps[(folder, suffix)])}", 1)
        prefix = f"{numbered}/" if folder else ""
        shown = paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more {suffix}"
        page.text(f"{prefix}{shown}", indent=4)
    page.text("summary.json", indent=4)


def _next(page: Page, report: Report) -> None:
    command = next_command(report)
    if command:
        page.heading("Next")
        for line in command:
            page.text(line)


def next_command(report: Report) -> tuple[str, ...]:
    """What to type next, for what was found."""
    given = shlex.join(str(path) for path in report.inputs)
    if not report.usable:
        return ("Look at the reasons above; nothing was compared.",)
    if report.task is Task.ALONE:
        return (
            "To compare it: record a run you trust with the same msprobe-launch line, then",
            f"msprobe-aggregate {given} --bench TRUSTED_RUN",
        )
    if report.first is not None:
        tables = [path for path in report.files if path.suffix == ".csv" and path.parent.name == "merged"]
        if tables:
            step = "" if report.first.step is None else f"step{report.first.step}/"
            files = f"{shlex.quote(str(report.output))}/{step}merged/*.csv"
            return ("That item over all ranks:", f"grep -F {shlex.quote(report.first.item)} {files}")
    if (report.missing or report.missing_steps) and not report.allow_missing:
        bench = "".join(f" --bench {shlex.quote(str(path))}" for path in report.bench)
        return ("To take what is missing as known:", f"msprobe-aggregate {given}{bench} --allow-missing")
    return ()


def _exit(page: Page, report: Report) -> None:
    code = report.exit
    style = {Exit.NOTHING_FOUND: "bold green", Exit.PARTIAL: "bold yellow"}.get(code, "bold red")
    text = f"Exit code {code.value}: {EXIT_MEANINGS[code].split(':')[0].split(' (')[0]}"
    if code is Exit.PARTIAL:
        text += f" ({', '.join(report.partial_reasons)}); " + (
            f"findings as well: {report.findings:,}" if report.findings else "nothing found in the rest"
        )
    page.heading(text, style)


# -- words


def _where(rank: int | None, step: int | None) -> str:
    parts = ["one process" if rank is None else f"rank {rank}", "" if step is None else f"step {step}"]
    return ", ".join(part for part in parts if part)


def _where_ranks(ranks: Sequence[int | None], step: int | None) -> str:
    known = [rank for rank in ranks if rank is not None]
    who = f"{_plural(len(known), 'rank')} {number_ranges(known)}" if known else "one process"
    return who + ("" if step is None else f", step {step}")


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _more(page: Page, count: int) -> None:
    if count > MOST_ENTRIES:
        page.text(f"... and {count - MOST_ENTRIES} more (summary.json)")
