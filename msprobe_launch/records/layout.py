"""Names of all files and folders of a run: the only code that knows them.

RUN_DIR/
  manifest.json             one per run, by the first node
  events.jsonl              what the launchers noticed while the ranks ran
  roster/rank<R>.json       one per rank; rank<R>.claim-<host>-<pid>.json of a second process of that number
  hang/<n>/                 where every rank was when no step ended (--probe-hang-timeout)
  logs/                     per-rank stdout and stderr, as the backend lays them out
  step<N>/rank<R>/...       one folder per step and rank
  attempt<K>/               attempt K >= 1 of the launcher: the same roster, logs and steps once more
  aggregate/<time>/         what msprobe-aggregate writes
  aggregate/inrun/          the same, as far as it was compared while the run went on (--probe-bench)
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"^step(\d+)$")
_RANK = re.compile(r"^rank(\d+)$")
_PROC = re.compile(r"^proc(\d+)$")
_ATTEMPT = re.compile(r"^attempt(\d+)$")
_ROSTER = re.compile(r"^rank(\d+)\.json$")
_CLAIM = re.compile(r"^rank(\d+)\.claim-.+\.json$")


MAX_FILE_NAME = 255  # bytes, on every file system in use


def value_file_name(item: str, ending: str) -> str:
    """File name of an item's values. A longer one than file systems take is cut and told apart by its CRC-32."""
    name = item.replace("/", "_").replace("\0", "_").lstrip(".")
    if len(name.encode()) + len(ending) > MAX_FILE_NAME:
        whole = name.encode()
        name = f"{whole[:200].decode(errors='ignore')}.{zlib.crc32(whole):08x}"
    return name + ending


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The folder of one rank in one step. `rank` is None for `rank` and `proc<pid>` (one process, no rank known)."""

    path: Path
    rank: int | None

    @property
    def dump(self) -> Path:
        return self.path / "dump.json"

    @property
    def debug(self) -> Path:
        return self.path / "debug.json"

    @property
    def stack(self) -> Path:
        return self.path / "stack.json"

    @property
    def construct(self) -> Path:
        return self.path / "construct.json"

    @property
    def journal(self) -> Path:
        """The growing dump.json of an unfinished step (see `records.journal`)."""
        return self.path / "dump.json.partial"

    @property
    def context_journal(self) -> Path:
        """Stacks and parents of an unfinished step, one JSON line each (see `records.journal`)."""
        return self.path / "context.jsonl.partial"

    @property
    def errors(self) -> Path:
        return self.path / "dump_error_info.log"

    @property
    def tensors(self) -> Path:
        return self.path / "dump_tensor_data"

    @property
    def is_finished(self) -> bool:
        """True where the step was closed by the rank itself."""
        return self.dump.exists() and not self.journal.exists()

    @classmethod
    def at(cls, path: Path) -> RankFolder | None:
        """The rank folder at `path` by its name, or None where the name is not one."""
        match = _RANK.match(path.name)
        if match:
            return cls(path, int(match[1]))
        if path.name == "rank" or _PROC.match(path.name):
            return cls(path, None)
        return None


def run_directory_of(rank_folder: Path) -> Path | None:
    """The run directory of msprobe-launch that a rank folder lies in, with or without an attempt's between them."""
    for folder in list(rank_folder.absolute().parents)[1:3]:
        layout = RunLayout(folder)
        if layout.manifest.is_file() or layout.roster.is_dir():  # without the launcher there is no manifest
            return folder
    return None


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Where everything of one attempt of one run lies. Nothing here touches the disk except the listings."""

    root: Path
    attempt: int = 0

    @property
    def base(self) -> Path:
        """Attempt 0 lies in the run directory itself."""
        return self.root if self.attempt == 0 else self.root / f"attempt{self.attempt}"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def manifest_lock(self) -> Path:
        return self.root / ".manifest.lock"

    @property
    def roster(self) -> Path:
        return self.base / "roster"

    def roster_mark(self, rank: int) -> Path:
        return self.roster / f"rank{rank}.json"

    @property
    def logs(self) -> Path:
        return self.base / "logs"

    @property
    def events(self) -> Path:
        """What the launcher noticed while the ranks ran, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def aggregate(self) -> Path:
        return self.root / "aggregate"

    @property
    def earlier(self) -> Path:
        """Where a script that runs again without the launcher finds what its earlier runs left."""
        return self.root / "earlier"

    @property
    def control(self) -> Path:
        """What a running job rereads between steps."""
        return self.root / "control.yaml"

    def step(self, step: int) -> Path:
        return self.base / f"step{step}"

    def kernel_config(self, step: int, rank: int) -> Path:
        """What tells the framework's own dump of kernels (level L2) what to write in this step."""
        return self.step(step) / f"kernel_config_{rank}.json"

    def rank_folder(self, step: int, rank: int) -> RankFolder:
        return RankFolder(self.step(step) / f"rank{rank}", rank)

    def process_folder(self, step: int, pid: int) -> RankFolder:
        """The folder of a process that knows no rank."""
        return RankFolder(self.step(step) / f"proc{pid}", None)

    # -- what is there

    def attempts(self) -> list[int]:
        """All attempts on disk, ascending; attempt 0 is always listed."""
        return [0, *sorted(_numbers(self.root, _ATTEMPT))]

    def steps(self) -> list[int]:
        """Numbers of the step folders on disk, ascending."""
        return sorted(_numbers(self.base, _STEP))

    def rank_folders(self, step: int) -> list[RankFolder]:
        """Rank folders of one step, ranks ascending, folders without a rank last."""
        return rank_folders(self.step(step))

    def pulse(self, rank: int) -> Path:
        """The step a rank is in, as text, where hangs are looked for."""
        return self.roster / f"rank{rank}.step"

    def hang_question(self, number: int) -> Path:
        """A file that asks all ranks where they are, for the `number`-th time."""
        return self.base / "hang" / str(number) / "question"

    def hang_answer(self, number: int, rank: int) -> Path:
        """Where a rank is; its stacks lie beside it, in .txt."""
        return self.base / "hang" / str(number) / f"rank{rank}.json"

    def claims(self) -> list[Path]:
        """Marks of processes that came second to a rank, by name. They recorded nothing."""
        try:
            return sorted(path for path in self.roster.iterdir() if _CLAIM.match(path.name))
        except OSError:
            return []

    def roster_ranks(self) -> list[int]:
        """Ranks that have a roster mark, ascending."""
        return sorted(_numbers(self.roster, _ROSTER))


def step_number(path: Path) -> int | None:
    """N of a folder named `step<N>`, else None."""
    match = _STEP.match(path.name)
    return int(match[1]) if match else None


def rank_folders(step_folder: Path) -> list[RankFolder]:
    """Rank folders inside one step folder, ranks ascending, folders without a rank last."""
    found = [folder for path in _folders(step_folder) if (folder := RankFolder.at(path)) is not None]
    return sorted(found, key=lambda f: (f.rank is None, f.rank or 0, f.path.name))


def _folders(path: Path) -> Iterator[Path]:
    try:
        entries = list(path.iterdir())
    except OSError:
        return
    yield from (entry for entry in entries if entry.is_dir())


def _numbers(path: Path, pattern: re.Pattern[str]) -> Iterator[int]:
    try:
        names = [entry.name for entry in path.iterdir()]
    except OSError:
        return
    yield from (int(match[1]) for name in names if (match := pattern.match(name)))
