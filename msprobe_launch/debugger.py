"""`PrecisionDebugger`: recording under the script's own control, with msprobe's calls.

    from msprobe_launch import PrecisionDebugger, seed_all

Under `msprobe-launch` the calls take over from the automatic steps, and the launcher's settings stand. Without it the
debugger starts a session of its own in the process that calls it. Nothing here imports a framework before `start` or
`save`, and no call raises because of recording: only wrong arguments are errors.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_launch.config import ProbeConfig
from msprobe_launch.config_sources import SETTINGS, resolve
from msprobe_launch.errors import ConfigError, UsageError
from msprobe_launch.logs import get_logger

if TYPE_CHECKING:
    from msprobe_launch.capture.session import Session

DEFAULT_SEED = 1234  # msprobe's


class PrecisionDebugger:
    """One per process: constructing it again with the same arguments gives the same object, with others is an error.

    Its methods may be called on the class as well (`PrecisionDebugger.start()`), as msprobe's scripts do.
    """

    _instance: PrecisionDebugger | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionDebugger:
        if cls._instance is None:
            made = super().__new__(cls)
            made._arguments = None
            return made
        return cls._instance

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: list[int | str] | None = None,
    ) -> None:
        """Check the arguments; nothing is recorded before `start` or `save`. Raises ConfigError.

        Arguments win over the file. `step` is a list such as `[0, "5-8"]`.
        """
        given: dict[str, Any] = {
            "config_path": None if config_path is None else os.path.abspath(config_path),
            "task": task,
            "dump_path": None if dump_path is None else os.path.abspath(dump_path),
            "level": level,
            "step": step,
        }
        if self._arguments is not None:
            _refuse_others(self._arguments, given)
            return
        self._config = _configuration(given)
        self._arguments: dict[str, Any] | None = given
        self._session: Session | None = None
        self._failed = False
        self._init_step = 0
        self._custom: list[tuple[Any, str, str]] = []
        type(self)._instance = self

    # -- the calls of a script

    @classmethod
    def start(cls, model: Any = None) -> None:
        """Record from here on. `model` need not be given; several models in a list are named by their index."""
        self = cls._made("start")
        session = self._attached(model)
        if session is None:
            return
        if isinstance(model, (list, tuple)) and len(model) > 1:
            session.adapter.name_models(model)
        session.manual.start()

    @classmethod
    def stop(cls) -> None:
        """Record no more until the next `start`."""
        session = cls._made("stop")._session
        if session is not None:
            session.manual.stop()

    @classmethod
    def forward_backward_dump_end(cls) -> None:
        """Record no more in this step, where a part of a step is all that is wanted. The same as `stop`."""
        cls.stop()

    @classmethod
    def step(cls) -> None:
        """The step ends here; the next `start` records the following one."""
        self = cls._made("step")
        if self._session is not None:
            self._session.manual.step()
        else:
            self._init_step += 1

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Put `variable` into the step's debug.json as `<name>.<count>.debug`, and its gradient as `<name>_grad...`.

        A variable is a tensor, a number, a text, or lists, tuples and dicts of these.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"save: the name must be a text, not {name!r}.")
        if not isinstance(save_backward, bool):
            raise UsageError(f"save: save_backward must be True or False, not {save_backward!r}.")
        session = cls._made("save")._attached()
        if session is not None:
            session.manual.save(name, variable, save_backward)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Number the step under way `step`; to be called before anything was recorded."""
        self = cls._made("set_init_step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UsageError(f"set_init_step: the step must be a whole number of at least 0, not {step!r}.")
        self._init_step = step
        if self._session is not None:
            self._session.manual.set_step(step)

    @classmethod
    def register_custom_api(cls, module: Any, api: str, api_prefix: str | None = None) -> None:
        """Record calls of `module.api`, a function of your own, as `<api_prefix>.<api>` (default: the module's name).

        To be called before or after `start`; levels L1 and mix.
        """
        self = cls._made("register_custom_api")
        if not isinstance(api, str) or not callable(getattr(module, api, None)):
            raise UsageError(f"register_custom_api: {_name_of(module)} has no function {api!r}.")
        if api_prefix is not None and not isinstance(api_prefix, str):
            raise UsageError(f"register_custom_api: api_prefix must be a text, not {api_prefix!r}.")
        entry = (module, api, api_prefix or _name_of(module))
        self._custom.append(entry)
        if self._session is not None:
            self._session.adapter.register_api(*entry)

    @classmethod
    def restore_custom_api(cls, module: Any = None, api: str | None = None) -> None:
        """Put back the functions that were registered: all, or that one."""
        self = cls._made("restore_custom_api")
        kept = [] if module is None else [e for e in self._custom if e[0] is not module or api not in (None, e[1])]
        if self._session is not None:
            self._session.adapter.restore_apis()
            for entry in kept:
                self._session.adapter.register_api(*entry)
        self._custom = kept

    # -- the session

    @classmethod
    def _made(cls, call: str) -> PrecisionDebugger:
        if cls._instance is None:
            raise UsageError(f"PrecisionDebugger.{call} was called before PrecisionDebugger was constructed.")
        return cls._instance

    def _attached(self, model: Any = None) -> Session | None:
        """This process's session, started where there is none; None where it cannot be."""
        if self._session is not None or self._failed:
            return self._session
        from msprobe_launch.capture import active

        framework = _framework(model)
        if framework not in sys.modules:
            __import__(framework)  # under the launcher this attaches
        session = active.session()
        if session is None:
            session = self._start_alone(framework)
            if session is None:
                return None
        else:
            _say_what_stands(session.config, self._config)
        session.manual.take()
        if self._init_step:
            session.manual.set_step(self._init_step)
        for entry in self._custom:
            session.adapter.register_api(*entry)
        self._session = session
        return session

    def _start_alone(self, framework: str) -> Session | None:
        from msprobe_launch import adapters
        from msprobe_launch.capture import earlier
        from msprobe_launch.capture.identity import RankIdentity

        rank, world, is_known = _rank(adapters.known_rank(framework))
        identity = RankIdentity(
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK") or os.environ.get("DEVICE_ID") or "0"),
            world_size=world,
            host=socket.gethostname(),
            pid=os.getpid(),
            is_known=is_known,
        )
        try:
            if is_known:
                earlier.set_aside(self._config.run_dir, rank)
            return adapters.start(framework, self._config, identity)
        except Exception as error:  # noqa: BLE001 - a guest, whatever is wrong with us
            get_logger().warning("not recorded, the training goes on: %s: %s", type(error).__name__, error)
            self._failed = True
            return None


def seed_all(
    seed: int = DEFAULT_SEED, mode: bool = False, rm_dropout: bool = False, *, deterministic: bool | None = None
) -> None:
    """Seed Python, numpy and the framework (both, where both are imported).

    `mode` (or `deterministic`) asks for deterministic algorithms.

    Raises UsageError. `rm_dropout`, which would change what is computed, is not done.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UsageError(f"seed_all: the seed must be a whole number from 0 to 2**32 - 1, not {seed!r}.")
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout), ("deterministic", deterministic)):
        if not isinstance(value, bool) and not (name == "deterministic" and value is None):
            raise UsageError(f"seed_all: {name} must be True or False, not {value!r}.")
    if rm_dropout:
        raise UsageError("seed_all: rm_dropout would change the model, which this tool never does. Set p=0 yourself.")
    from msprobe_launch import adapters

    for framework in [name for name in adapters.ADAPTERS if name in sys.modules] or [_framework(None)]:
        adapters.seed(framework, seed, mode if deterministic is None else deterministic)


def _framework(model: Any) -> str:
    """Import name of the framework: the model's, else the one that is imported, else the one that is installed.

    Where both are imported and no model says more, it is PyTorch: MindSpore's programs give theirs to `start`.
    """
    from msprobe_launch.adapters import ADAPTERS

    one = model[0] if isinstance(model, (list, tuple)) and model else model
    for base in type(one).__mro__:
        top = base.__module__.partition(".")[0]
        if top in ADAPTERS:
            return top
    loaded = [name for name in ADAPTERS if name in sys.modules]
    installed = [name for name in ADAPTERS if importlib.util.find_spec(name) is not None]
    return next(iter((*loaded, *installed, *ADAPTERS)))


def _configuration(given: Mapping[str, Any]) -> ProbeConfig:
    """Arguments over the file over defaults. Raises ConfigError."""
    for name in ("task", "level"):
        if given[name] is not None and not isinstance(given[name], str):
            raise ConfigError(f"PrecisionDebugger: {name} must be a text, not {given[name]!r}.")
    step = given["step"]
    if step is not None and not isinstance(step, (list, tuple)):
        raise ConfigError(f'PrecisionDebugger: step must be a list such as [0, "5-8"], not {step!r}.')
    flags: dict[str, str | bool | None] = {
        "run_dir": given["dump_path"],
        "task": given["task"],
        "level": given["level"],
        "steps": ",".join(map(str, step)) if step else None,
    }
    path = given["config_path"]
    named = {"run_dir": "dump_path", "steps": "step"}
    where = {field: f"PrecisionDebugger({named.get(field, field)}=...)" for field in flags}
    found = resolve(flags, {}, Path(path) if path else None, default_run_dir=Path("dump_path"), names=where)
    if "run_dir" not in found.sources and not os.environ.get("TORCHELASTIC_RUN_ID"):
        raise ConfigError(
            "PrecisionDebugger: no dump_path was given.", hint="Give dump_path, or a config_path whose file has one."
        )
    return found.config


def _refuse_others(before: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A second construction: without arguments, or with those of the first."""
    differing = [name for name, value in given.items() if value is not None and value != before[name]]
    if differing:
        shown = ", ".join(f"{name}={given[name]!r} (first: {before[name]!r})" for name in differing)
        raise UsageError(
            f"PrecisionDebugger has been constructed in this process with other arguments: {shown}.",
            hint="There is one per process. Use the first one, or construct it once with what is needed.",
        )


def _say_what_stands(stands: ProbeConfig, asked: ProbeConfig) -> None:
    """Under the launcher: which of the script's settings are not in effect."""
    ours, theirs = stands.as_dict(), asked.as_dict()
    differing = [
        field for field in SETTINGS if field not in ("run_dir", "bench", "step_on") and ours[field] != theirs[field]
    ]
    if differing:
        shown = ", ".join(f"{field} {ours[field]!r} instead of {theirs[field]!r}" for field in differing)
        get_logger().warning("msprobe-launch's settings stand, not the script's: %s", shown)


def _rank(known: tuple[int, int] | None) -> tuple[int, int, bool]:
    """(rank, world size, whether anybody has told us)."""
    if known is not None:
        return (*known, True)
    for rank, world in (("RANK", "WORLD_SIZE"), ("MS_NODE_ID", "MS_WORKER_NUM")):
        try:
            return int(os.environ[rank]), int(os.environ[world]), True
        except (KeyError, ValueError):
            continue
    return 0, 1, False


def _name_of(module: Any) -> str:
    return str(getattr(module, "__name__", type(module).__name__)).rpartition(".")[2]
