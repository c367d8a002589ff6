"""Where handlers run: threads and tasks, how many, and how their ends are told."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orbitmq.client.consumer.workers import TaskWorkers, ThreadWorkers
from tests.support.consuming import DEADLINE, until
from tests.support.scarcethreads import refuse_threads, threads_of

LABEL: contextvars.ContextVar[str] = contextvars.ContextVar("LABEL", default="none")


class Job:
    """Does what a test says, in a thread or on the loop."""

    waiting = None
    took = 1.0

    def __init__(
        self, work: Callable[[], Any] = lambda: None, work_async: Callable[[], Any] | None = None
    ) -> None:
        self._work = work
        self._work_async = work_async
        self.result: Any = None

    def run_in(self, context: contextvars.Context, workers: ThreadWorkers) -> bool:
        self.result = context.copy().run(self._work)
        return False

    async def run_async(self) -> None:
        self.result = self._work() if self._work_async is None else await self._work_async()


class Pool:
    """Workers, and what they have told."""

    def __init__(self, kind: type[ThreadWorkers | TaskWorkers], size: int) -> None:
        self.done: list[Job] = []
        self.rounds = 0
        self.workers = kind(size, self._finished, name="test")

    def _finished(self, jobs: list[Any]) -> None:
        self.done += jobs
        self.rounds += 1

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.workers.submit(job)

    async def until_done(self, count: int) -> None:
        await until(lambda: len(self.done) >= count)


@asynccontextmanager
async def pool(kind: type[ThreadWorkers | TaskWorkers], size: int) -> AsyncIterator[Pool]:
    running = Pool(kind, size)
    try:
        yield running
    finally:
        assert await running.workers.stop(DEADLINE) == 0


both = pytest.mark.parametrize("kind", [ThreadWorkers, TaskWorkers], ids=["threads", "tasks"])
Kind = type[ThreadWorkers | TaskWorkers]


class _Gate:
    """Holds jobs until it is opened, and counts those that are in."""

    def __init__(self, kind: Kind) -> None:
        self._opened = threading.Event()
        self._opened_async = asyncio.Event()
        self._lock = threading.Lock()
        self.inside = 0
        self.most = 0

    def job(self) -> Job:
        return Job(self._wait, self._wait_async)

    def open(self) -> None:
        self._opened.set()
        self._opened_async.set()

    def _enter(self, change: int) -> None:
        with self._lock:
            self.inside += change
            self.most = max(self.most, self.inside)

    def _wait(self) -> None:
        self._enter(1)
        self._opened.wait(DEADLINE)
        self._enter(-1)

    async def _wait_async(self) -> None:
        self._enter(1)
        await self._opened_async.wait()
        self._enter(-1)


@pytest.mark.feature("D1")
@both
async def test_the_number_of_workers_changes_at_run_time(kind):
    first, second, third = _Gate(kind), _Gate(kind), _Gate(kind)
    async with pool(kind, 2) as running:
        running.submit(*(first.job() for _ in range(8)))
        await until(lambda: first.inside == 2)

        running.workers.resize(6)
        await until(lambda: first.inside == 6)

        running.workers.resize(1)
        first.open()
        await running.until_done(8)
        running.submit(*(second.job() for _ in range(4)))
        await until(lambda: second.inside == 1)
        second.open()
        await running.until_done(12)
        assert second.most == 1

        running.workers.resize(3)
        running.submit(*(third.job() for _ in range(4)))
        await until(lambda: third.inside == 3)
        third.open()
        await running.until_done(16)
        assert running.workers.size == 3


@both
async def test_stopping_does_not_begin_what_waits(kind):
    gate, begun = _Gate(kind), []
    running = Pool(kind, 1)
    running.submit(gate.job(), *(Job(lambda: begun.append(1)) for _ in range(5)))
    await until(lambda: gate.inside == 1)

    stopping = asyncio.create_task(running.workers.stop(DEADLINE))
    await asyncio.sleep(0)
    gate.open()

    assert await stopping == 0
    assert not begun
    assert len(running.done) == 1


async def test_a_thread_that_does_not_end_is_counted_and_left():
    gate = _Gate(ThreadWorkers)
    running = Pool(ThreadWorkers, 1)
    running.submit(gate.job())
    await until(lambda: gate.inside == 1)

    late = await running.workers.stop(0.05)
    gate.open()

    assert late == 1
    await until(lambda: len(running.done) == 1)


def test_an_interrupt_in_a_job_reaches_the_program_and_the_job_is_told():
    running: Pool | None = None

    async def interrupt():
        raise KeyboardInterrupt

    async def main():
        nonlocal running
        running = Pool(TaskWorkers, 1)
        running.submit(Job(work_async=interrupt))
        await asyncio.sleep(DEADLINE)

    async def rest():
        assert running is not None
        await running.until_done(1)
        await running.workers.stop(DEADLINE)

    with asyncio.Runner() as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.run(main())
        runner.run(rest())


async def test_missing_threads_start_by_themselves_once_there_are_threads_again(
    monkeypatch, caplog
):
    monkeypatch.setattr("orbitmq.client.consumer.workers.TRY_AGAIN", 0.001)
    refused = refuse_threads(monkeypatch, "test-", times=3, after=2)

    async with pool(ThreadWorkers, 5) as running:
        await until(lambda: running.workers.size == 5)
        assert len(threads_of("test-")) == 5

    assert len(refused) == 3
    assert caplog.text.count("can't start new thread") == 1, "one line for a lasting shortage"
