"""Run one function per rank on any `concurrent.futures.Executor`: local processes by default, a Dask cluster as well.

    with pool.local(count=len(jobs), job_bytes=...) as executor:
        results = pool.run(executor, jobs)

A worker that dies (SIGKILL, out of memory) takes down a whole process pool. The jobs that were lost with it are then
run again one at a time, so that only the job that kills its worker is given up, as a RankFailure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from aggregator.model import RankFailure
from msprobe_launch.errors import InputError, ProbeError

_T = TypeVar("_T")

BASE_BYTES = 200 << 20
"""Memory of a worker whatever it reads: numpy and pyarrow (74 MB), and text on its way into a file."""

_DIED = "the worker process that worked on it died twice (killed, or out of memory); run with fewer workers (--jobs 1)"


class InProcess(Executor):
    """Runs each job at once, in this process: for one rank, for debugging, for tests."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a Future carries any error to whoever asks for the result
            future.set_exception(error)
        return future


class LocalProcesses(Executor):
    """A process pool that can be used again after one of its workers died."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return self._alive().submit(fn, *args, **kwargs)
        except BrokenExecutor:
            self.shutdown()
            return self._alive().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)
            self._pool = None

    def _alive(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not fork: Arrow has threads, which a forked child would miss.
            self._pool = ProcessPoolExecutor(self.workers, mp_context=get_context("spawn"), initializer=_one_thread)
        return self._pool


def _one_thread() -> None:
    """Workers share the cores already; Arrow's own threads would only take turns with theirs."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def local(*, count: int, jobs: int | None = None, job_bytes: int = 0) -> Executor:
    """An executor for `count` jobs on this machine, to be used in a `with`.

    `jobs` is what the user asked for (None: as many as cores and memory allow), `job_bytes` the memory that the
    largest job adds to a bare worker.
    """
    workers = min(count, jobs) if jobs is not None else workers_for(count, job_bytes)
    return LocalProcesses(workers) if workers > 1 else InProcess()


def workers_for(count: int, job_bytes: int) -> int:
    """Workers that this machine's cores (those given to this process) and free memory allow, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    free = available_bytes()
    by_memory = cores if free is None else free // (BASE_BYTES + job_bytes)
    return max(1, min(count, cores, by_memory))


def available_bytes() -> int | None:
    """Memory that can be used now: what is free, and what the control group leaves. None where nothing tells."""
    found: list[int] = []
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        found.append(max(0, limit - used))
    return min(found, default=None)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def run(executor: Executor, jobs: Iterable[Callable[[], _T]]) -> list[_T | RankFailure]:
    """Results of all jobs, in the order of the jobs, whatever the order in which they end.

    A job is a `functools.partial` that travels to a worker. Where it names its step and rank (as arguments, or as
    attributes of its first one), a dead worker or an unexpected error is a RankFailure in its place; other jobs raise
    InputError. Errors that a person should read (ProbeError) are raised as they are.
    """
    work = list(jobs)
    results: dict[int, _T | RankFailure] = {}
    lost: list[int] = []
    for i, future in enumerate([_submitted(executor, job) for job in work]):
        try:
            results[i] = _result(work[i], future)
        except BrokenExecutor:
            lost.append(i)
    for i in lost:
        try:
            results[i] = _result(work[i], _submitted(executor, work[i]))
        except BrokenExecutor:
            results[i] = _failure(work[i], _DIED)
    return [results[i] for i in range(len(work))]


def _submitted(executor: Executor, job: Callable[[], _T]) -> Future[_T]:
    try:
        return executor.submit(job)
    except BrokenExecutor as error:
        future: Future[_T] = Future()
        future.set_exception(error)
        return future


def _result(job: Callable[[], _T], future: Future[Any]) -> _T | RankFailure:
    try:
        result: _T = future.result()
    except (BrokenExecutor, ProbeError):
        raise
    except Exception as error:  # noqa: BLE001 - one rank's surprise must not cost the other thousand
        return _failure(
            job, f"unexpected {type(error).__name__}: {error} (a fault of msprobe-aggregate; please report)"
        )
    return result


def _failure(job: Callable[[], Any], reason: str) -> RankFailure:
    """The failure of the rank that a job is for. Raises InputError where the job is for no rank."""
    given = job.keywords if isinstance(job, partial) else {}
    subject: Any = job.args[0] if isinstance(job, partial) and job.args else None
    if "rank" in given:
        step, rank = given.get("step"), given["rank"]
    elif hasattr(subject, "rank"):
        step, rank = getattr(subject, "step", None), subject.rank
    else:
        raise InputError(f"a part of the work failed: {reason}")
    return RankFailure(step, rank, _path_of(subject), reason)


def _path_of(subject: Any) -> Path:
    """Where a job's subject lies: a path, or something with a path or a folder."""
    while not isinstance(subject, Path):
        subject = getattr(subject, "path", None) or getattr(subject, "folder", None)
        if subject is None:
            return Path()
    return subject
