"""Jobs that come together: a row is shared by all workers, each job is done once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from orbitmq.client.consumer.workers import TaskWorkers, ThreadWorkers
from tests.support.consuming import DEADLINE, until


class Job:
    """Calls a function in a thread, or on the loop."""

    is_urgent = False

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def run(self) -> None:
        self._work()

    async def run_async(self) -> None:
        self._work()


@pytest.mark.parametrize("kind", [ThreadWorkers, TaskWorkers])
async def test_every_job_of_many_rows_is_done_once(kind: type[ThreadWorkers | TaskWorkers]) -> None:
    done: list[Job] = []
    calls: Counter[int] = Counter()
    workers = kind(8, done.extend, name="test")
    rows = [
        [Job(lambda number=row * 32 + place: calls.update([number])) for place in range(32)]  # type: ignore[misc]  # a default binds it
        for row in range(50)
    ]

    for row in rows:
        workers.submit_row(row)
        await asyncio.sleep(0)
    await until(lambda: len(done) >= 1600)
    assert await workers.stop(DEADLINE) == 0

    assert set(done) == {job for row in rows for job in row}
    assert len(done) == 1600
    assert calls == Counter(range(1600))


async def test_jobs_of_a_row_begin_in_their_order() -> None:
    order: list[int] = []
    done: list[Job] = []
    workers = ThreadWorkers(1, done.extend, name="test")

    workers.submit_row([Job(lambda number=number: order.append(number)) for number in range(100)])  # type: ignore[misc]
    await until(lambda: len(done) == 100)
    await workers.stop(DEADLINE)

    assert order == list(range(100))


async def test_a_row_of_jobs_that_wait_fills_all_threads() -> None:
    done: list[Job] = []
    workers = ThreadWorkers(6, done.extend, name="test")
    # Nobody gets past it before six are there: with fewer threads at work it would break.
    meeting = threading.Barrier(6, timeout=DEADLINE)

    workers.submit_row([Job(meeting.wait) for _ in range(6)])
    await until(lambda: len(done) == 6)

    assert not meeting.broken
    assert await workers.stop(DEADLINE) == 0


async def test_a_row_that_waits_lets_another_one_through() -> None:
    done: list[Job] = []
    workers = ThreadWorkers(2, done.extend, name="test")
    gate = threading.Event()
    other = [Job(lambda: None)]

    workers.submit_row([Job(lambda: gate.wait(DEADLINE)), Job(lambda: None)])
    workers.submit_row(other)
    await until(lambda: other[0] in done)

    gate.set()
    await until(lambda: len(done) == 3)
    assert await workers.stop(DEADLINE) == 0


async def test_a_row_outlives_the_threads_that_had_begun_it() -> None:
    done: list[Job] = []
    workers = ThreadWorkers(4, done.extend, name="test")
    gate = threading.Event()
    workers.submit_row([Job(lambda: gate.wait(DEADLINE)) for _ in range(40)])

    workers.resize(1)
    gate.set()
    await until(lambda: len(done) == 40)

    await until(lambda: len(workers.threads()) == 1)
    assert await workers.stop(DEADLINE) == 0


async def test_what_is_left_of_a_row_is_not_begun_after_a_stop() -> None:
    done: list[Job] = []
    workers = ThreadWorkers(1, done.extend, name="test")
    begun = threading.Event()
    gate = threading.Event()
    late: list[int] = []

    def wait() -> None:
        begun.set()
        gate.wait(DEADLINE)

    workers.submit_row([Job(wait), *(Job(lambda: late.append(1)) for _ in range(10))])
    await until(begun.is_set)
    stopping = asyncio.create_task(workers.stop(DEADLINE))
    await until(lambda: workers.size == 0)
    gate.set()

    assert await stopping == 0
    assert not late
