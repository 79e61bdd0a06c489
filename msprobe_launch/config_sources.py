"""Where a ProbeConfig comes from: defaults < file < environment < flags. An unknown key or value is an error.

A file follows msprobe's config.json (or the same in YAML). What msprobe knows and we do not do yet is accepted at the
value that means "off" and refused at any other, so that nobody believes in a setting that has no effect.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from msprobe_launch.config import DataMode, Level, ProbeConfig, StepOn, SummaryMode, Task, WhenFull
from msprobe_launch.errors import ConfigError, near_miss
from msprobe_launch.records.names import OpName, regex_of
from msprobe_launch.records.numbers import NumberSet

ENV_PREFIX = "MSPROBE_LAUNCH_"

_E = TypeVar("_E", bound=Enum)

# msprobe's values that are right there and not done here yet.
_UNSUPPORTED: dict[type[Enum], tuple[str, ...]] = {
    Task: ("acc_check", "diff_check", "exception_dump", "nan_check", "free_benchmark", "overflow_check"),
}


def _member(kind: type[_E], text: str) -> _E:
    try:
        return kind(text)
    except ValueError:
        known = [str(member.value) for member in kind]
        choices = f"Known: {', '.join(known)}."
        if text in _UNSUPPORTED.get(kind, ()):
            raise ValueError(f"'{text}' is not supported yet. {choices}") from None
        raise ValueError(f"unknown value '{text}'.{near_miss(text, known)} {choices}") from None


def _modes(names: Iterable[str]) -> frozenset[DataMode]:
    modes = frozenset(_member(DataMode, name) for name in names) or frozenset({DataMode.ALL})
    if DataMode.ALL in modes and len(modes) > 1:
        others = ", ".join(sorted(mode.value for mode in modes - {DataMode.ALL}))
        raise ValueError(f"'all' already includes {others}. Leave out one or the other.")
    return modes


def _names(names: Iterable[str]) -> tuple[str, ...]:
    for name in names:
        if (pattern := regex_of(name)) is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{name}' is no regular expression: {error}.") from None
    return tuple(names)


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.ASCII | re.IGNORECASE)


def byte_count(text: str) -> int:
    """`500M`, `2.5GB`, `64GiB` or a number of bytes. Raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"'{text}' is no number of bytes such as 500M, 20GB or 64GiB.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _bytes(value: object) -> int:
    if isinstance(value, str):
        return byte_count(value)
    return _integer(value, 0)


def _integer(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"must be a whole number of at least {least}, not {json.dumps(value)}.")
    return value


def _integer_text(text: str, least: int) -> int:
    return _integer(int(text) if text.strip().isdecimal() else text, least)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def truth(text: str) -> bool:
    """A switch in the environment. Raises ValueError."""
    try:
        return _TRUTH[text.strip().lower()]
    except KeyError:
        raise ValueError(f"unknown value '{text}'. Known: {', '.join(_TRUTH)}.") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text, not {json.dumps(value)}.")
    return value


def _path(text: str) -> Path:
    """A path; an empty text (`--run-dir "$UNSET"`) would silently be the current directory."""
    if not text.strip():
        raise ValueError("must not be empty.")
    return Path(text)


def _number_text(text: str) -> NumberSet:
    """Numbers and ranges; an empty text (`--probe-steps "$UNSET"`) would silently be all of them."""
    if not text.strip(" ,"):
        raise ValueError("must not be empty; where it is left out, all are meant.")
    return NumberSet.parse(text)


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise ValueError(f'must be a list of texts such as ["conv2d"], not {json.dumps(value)}.')
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {json.dumps(value)}.")
    return value


def _numbers(value: object) -> NumberSet:
    if not isinstance(value, list) or not all(isinstance(n, (int, str)) and not isinstance(n, bool) for n in value):
        raise ValueError(f'must be a list of numbers and ranges such as [0, "5-8"], not {json.dumps(value)}.')
    return NumberSet.parse(",".join(map(str, value)))


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of ProbeConfig as it is written in a flag or variable (text) and in a file (a JSON value)."""

    field: str
    key: str
    from_text: Callable[[str], object]
    from_value: Callable[[Any], object]

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.field.upper()


_TOP = (
    Setting("run_dir", "dump_path", _path, lambda v: _path(_text(v))),
    Setting("level", "level", lambda t: _member(Level, t), lambda v: _member(Level, _text(v))),
    Setting("task", "task", lambda t: _member(Task, t), lambda v: _member(Task, _text(v))),
    Setting("steps", "step", _number_text, _numbers),
    Setting("ranks", "rank", _number_text, _numbers),
    Setting("step_on", "step_on", lambda t: _member(StepOn, t), lambda v: _member(StepOn, _text(v))),
    Setting("eval", "eval", truth, _bool),
    Setting("bench", "bench", _path, lambda v: _path(_text(v))),
    Setting("max_bytes", "max_bytes", byte_count, _bytes),
    Setting("buffer_bytes", "buffer_bytes", byte_count, _bytes),
    Setting("when_full", "when_full", lambda text: _member(WhenFull, text), lambda v: _member(WhenFull, _text(v))),
    Setting("every", "step_every", lambda t: _integer_text(t, 1), lambda v: _integer(v, 1)),
    Setting("start", "step_start", lambda t: _integer_text(t, 0), lambda v: _integer(v, 0)),
    Setting("stop", "step_stop", lambda t: _integer_text(t, 0), lambda v: _integer(v, 0)),
)
_SECTION = (
    Setting("scope", "scope", lambda t: tuple(_split(t)), lambda v: tuple(_texts(v))),
    Setting("list", "list", lambda t: _names(_split(t)), lambda v: _names(_texts(v))),
    Setting("data_mode", "data_mode", lambda t: _modes(_split(t)), lambda v: _modes(_texts(v))),
    Setting(
        "summary_mode", "summary_mode", lambda t: _member(SummaryMode, t), lambda v: _member(SummaryMode, _text(v))
    ),
    Setting("tensor_list", "tensor_list", lambda t: _names(_split(t)), lambda v: _names(_texts(v))),
)
SETTINGS = {setting.field: setting for setting in (*_TOP, *_SECTION)}

# Keys of msprobe 26.2 and before -> the values at which they change nothing. `null` is neutral everywhere.
_NEUTRAL_TOP: dict[str, tuple[object, ...]] = {
    "dump_enable": (True,),
    "extra_info": (True,),
    "enable_dataloader": (False,),
    "async_dump": (False,),
    "seed": (),
    "is_deterministic": (False,),
    "precision": ("low",),
    "risk_level": ("ALL",),
    "custom_op_namespaces": ([],),
    "load": (),
}
_NEUTRAL_SECTION: dict[str, tuple[object, ...]] = {
    "slice": ([],),
    "request_id": (),
    "diff_nums": (1,),
    "bench_path": (),
    "file_format": (),
}
# Sections of a file that hold one task's settings. Only the chosen task's section is read, as msprobe does.
_TASK_SECTIONS = frozenset({*(task.value for task in Task), *_UNSUPPORTED[Task]})


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and, per field that is not at its default, where its value came from."""

    config: ProbeConfig
    sources: dict[str, str]


def resolve(
    flags: Mapping[str, str | bool | None],
    environ: Mapping[str, str],
    file: Path | None,
    *,
    default_run_dir: Path,
    names: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve once. `flags` maps a field to its text (None: not given); `names` says what flags are called.

    Raises ConfigError.
    """
    values: dict[str, object] = {"run_dir": default_run_dir}
    sources: dict[str, str] = {}
    texts = {field: text for field, text in flags.items() if text is not None}
    task_text = texts.get("task", environ.get(SETTINGS["task"].variable))
    if file is not None:
        for field, (value, source) in _file_values(file, task_text).items():
            values[field], sources[field] = value, source
    for setting in SETTINGS.values():
        text = environ.get(setting.variable, "")
        if text:
            values[setting.field] = _parsed(setting.from_text, text, setting.variable)
            sources[setting.field] = setting.variable
    for field, given in texts.items():
        flag = names[field] if names is not None else flag_of(field)
        values[field] = given if isinstance(given, bool) else _parsed(SETTINGS[field].from_text, given, flag)
        sources[field] = flag
    config = ProbeConfig(**values)  # type: ignore[arg-type]  # each value has passed its setting's parser
    # Ranks may change their working directory.
    config = dataclasses.replace(
        config, run_dir=config.run_dir.absolute(), bench=None if config.bench is None else config.bench.absolute()
    )
    if config.bench is not None and not config.bench.is_dir():
        beside = config.bench.parent
        there = [entry.name for entry in beside.iterdir() if entry.is_dir()] if beside.is_dir() else []
        miss = near_miss(config.bench.name, there)
        raise ConfigError(f"{sources['bench']}: there is no directory {config.bench}.{miss}")
    _check_scope(config, sources)
    _check_combinations(config, sources)
    return Resolved(config, sources)


def flag_of(field: str) -> str:
    """The command line's name of a field."""
    return "--run-dir" if field == "run_dir" else f"--probe-{field.replace('_', '-')}"


def _parsed(parse: Callable[[Any], object], value: object, source: str) -> object:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _check_combinations(config: ProbeConfig, sources: Mapping[str, str]) -> None:
    """What cannot be meant together."""
    for field, set_to in (
        ("summary_mode", config.summary_mode is not SummaryMode.STATISTICS),
        ("tensor_list", config.tensor_list),
    ):
        if set_to and config.task is not Task.STATISTICS:
            raise ConfigError(
                f"{sources[field]}: goes with task statistics, not with task {config.task.value}.",
                hint=f"Leave out {sources[field]}, or {sources.get('task', 'the task')}.",
            )
    if config.stop is not None and config.stop < config.start:
        raise ConfigError(f"{sources['stop']}: step {config.stop} comes before the first one, {config.start}.")


def _check_scope(config: ProbeConfig, sources: Mapping[str, str]) -> None:
    """`scope` is a first and a last op, by full names of the kind that the level records."""
    if not config.scope:
        return
    source = sources["scope"]
    if len(config.scope) != 2:
        raise ConfigError(
            f"{source}: scope needs two names, the first and the last op to record, not {len(config.scope)}.",
            hint="To pick ops by a part of their name, use --probe-list.",
        )
    for name in config.scope:
        try:
            op = OpName.parse(name)
        except ValueError:
            raise ConfigError(
                f"{source}: '{name}' is not a full op name.",
                hint="Full names look like Functional.linear.0.forward or Module.fc.Linear.forward.0.",
            ) from None
        if op.is_module and not config.level.modules:
            raise ConfigError(f"{source}: '{name}' is a module, and level {config.level.value} records APIs only.")
        if not op.is_module and not config.level.apis:
            raise ConfigError(f"{source}: '{name}' is an API, and level {config.level.value} records modules only.")


# -- the file


def _file_values(path: Path, task_text: str | bool | None) -> dict[str, tuple[object, str]]:
    raw = _load(path)
    known = {setting.key for setting in _TOP} | set(_NEUTRAL_TOP) | _TASK_SECTIONS
    _refuse_unknown(raw, known, path.name)
    _refuse_unsupported(raw, _NEUTRAL_TOP, path.name)
    found = _read(raw, _TOP, path.name)
    # msprobe reads the section of the task that runs: a flag's or variable's task, else the file's, else the default.
    task = str(task_text or raw.get("task") or Task.STATISTICS.value)
    section = raw.get(task)
    if section is None:
        return found
    where = f"'{task}' of {path.name}"
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: must be an object with keys such as 'list', not {json.dumps(section)}.")
    _refuse_unknown(section, {setting.key for setting in _SECTION} | set(_NEUTRAL_SECTION), where)
    _refuse_unsupported(section, _NEUTRAL_SECTION, where)
    return found | _read(section, _SECTION, where)


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}", hint="Check the path after --probe-config.") from None
    if path.suffix.lower() in (".yaml", ".yml"):
        import yaml

        try:
            raw = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from None
    else:
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold an object with keys such as 'level', not {type(raw).__name__}.")
    return {str(key): value for key, value in raw.items()}


def _read(raw: Mapping[str, Any], settings: Iterable[Setting], where: str) -> dict[str, tuple[object, str]]:
    return {
        setting.field: (
            _parsed(setting.from_value, value, f"'{setting.key}' in {where}"),
            f"'{setting.key}' in {where}",
        )
        for setting in settings
        if (value := raw.get(setting.key)) is not None
    }


def _refuse_unknown(raw: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise ConfigError(f"unknown key '{key}' in {where}.{near_miss(key, known)}")


def _refuse_unsupported(raw: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], where: str) -> None:
    for key, accepted in neutral.items():
        value = raw.get(key)
        # `is` would miss equal lists, and == alone takes 1 for True.
        if value is None or any(value == good and type(value) is type(good) for good in accepted):
            continue
        allowed = "".join(f"Use {json.dumps(good)}, or l" for good in accepted) or "L"
        raise ConfigError(f"'{key}' in {where}: {json.dumps(value)} is not supported yet. {allowed}eave it out.")
