"""Any Executor; results in the order of the jobs; a dead worker costs its own rank only."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from aggregator import pool
from aggregator.model import RankFailure
from msprobe_launch.errors import InputError, NothingUsable
from msprobe_launch.records.layout import RankFolder


def answer(folder, *, step, rank, wait=0.0):
    time.sleep(wait)
    return step, rank, os.getpid()


def die(folder, *, step, rank):
    os.kill(os.getpid(), signal.SIGKILL)


def stumble(folder, *, step, rank):
    raise ZeroDivisionError("of all things")


def refuse():
    raise NothingUsable("nothing here")


def jobs_of(*functions):
    return [partial(f, RankFolder(Path(f"rank{i}"), i), step=2, rank=i) for i, f in enumerate(functions)]


@pytest.fixture(scope="module")
def processes():
    with pool.LocalProcesses(2) as executor:
        yield executor


def test_results_have_the_order_of_the_jobs(processes):
    work = [partial(answer, None, step=0, rank=i, wait=0.2 if i == 0 else 0.0) for i in range(4)]
    found = pool.run(processes, work)
    assert [rank for _, rank, _ in found] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, _, pid in found}


class Shuffled(Executor):
    """Runs jobs only once all are there, in any order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future, partial]] = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.waiting.append((future, partial(fn, *args, **kwargs)))
        if len(self.waiting) == 5:
            random.Random(7).shuffle(self.waiting)
            for each, job in self.waiting:
                each.set_result(job())
        return future


EXECUTORS = {"in process": pool.InProcess, "threads": partial(ThreadPoolExecutor, 3), "shuffled": Shuffled}


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
def test_any_executor_gives_the_same(make):
    with make() as executor:
        found = pool.run(executor, [partial(answer, None, step=0, rank=i) for i in range(5)])
    assert [(step, rank) for step, rank, _ in found] == [(0, i) for i in range(5)]


def test_a_killed_worker_is_the_failure_of_its_rank(processes):
    found = pool.run(processes, jobs_of(answer, die, answer, answer, die, answer))
    failures = [entry for entry in found if isinstance(entry, RankFailure)]
    assert [(f.step, f.rank, f.source) for f in failures] == [(2, 1, Path("rank1")), (2, 4, Path("rank4"))]
    assert "died twice" in failures[0].reason
    assert "--jobs 1" in failures[0].reason
    assert [entry[1] for entry in found if not isinstance(entry, RankFailure)] == [0, 2, 3, 5]
    # And the pool can be used again.
    assert [entry[1] for entry in pool.run(processes, jobs_of(answer, answer))] == [0, 1]


def test_a_surprise_is_the_failure_of_its_rank():
    found = pool.run(pool.InProcess(), jobs_of(answer, stumble, answer))
    assert isinstance(found[1], RankFailure)
    assert found[1].reason.startswith("unexpected ZeroDivisionError: of all things")
    assert not isinstance(found[2], RankFailure)


def test_errors_for_a_person_pass_through():
    with pytest.raises(NothingUsable, match="nothing here"):
        pool.run(pool.InProcess(), [refuse])


def test_a_job_for_no_rank_raises(processes):
    with pytest.raises(InputError, match="a part of the work failed"):
        pool.run(processes, [partial(os.kill, os.getpid(), "no signal")])


def test_one_job_stays_in_this_process():
    assert isinstance(pool.local(count=1), pool.InProcess)
    assert isinstance(pool.local(count=8, jobs=1), pool.InProcess)
    many = pool.local(count=8, jobs=3)
    assert isinstance(many, pool.LocalProcesses)
    assert many.workers == 3


def test_workers_are_as_many_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(pool, "available_bytes", lambda: 4 * (pool.BASE_BYTES + 1000))
    assert pool.workers_for(100, 1000) == 4
    assert pool.workers_for(3, 1000) == 3
    assert pool.workers_for(100, 10**12) == 1
    monkeypatch.setattr(pool, "available_bytes", lambda: None)
    assert pool.workers_for(100, 1000) == 16


def test_available_memory_is_known_here():
    found = pool.available_bytes()
    assert found is None or found > 0
