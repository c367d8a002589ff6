"""Work that is done again and again."""

from __future__ import annotations

import asyncio
import logging

from tests.support.client import running_engine
from tests.support.remoting import until

NOBODY = "127.0.0.1:1"
#: Longer than any test: only a wake-up ends it.
FOREVER = 3600.0


async def test_a_wake_up_during_the_work_makes_it_run_once_more_and_never_twice_at_a_time():
    running = 0
    done: list[int] = []
    go_on = asyncio.Event()

    async def work():
        nonlocal running
        running += 1
        done.append(running)
        await go_on.wait()
        running -= 1

    async with running_engine(NOBODY) as engine:
        periodic = engine.every(FOREVER, work, first=0, name="work")
        await until(lambda: len(done) == 1)
        for _ in range(5):
            periodic.wake()
        go_on.set()

        await until(lambda: len(done) == 2 and running == 0)
        assert done == [1, 1]


async def test_an_error_is_logged_and_does_not_end_the_repetition(caplog):
    done: list[int] = []

    async def work():
        done.append(1)
        raise KeyError("missing")

    with caplog.at_level(logging.ERROR):
        async with running_engine(NOBODY) as engine:
            engine.every(0.001, work, name="counting")
            await until(lambda: len(done) > 2)

    assert "counting failed" in caplog.text
    assert "KeyError: 'missing'" in caplog.text


async def test_stopped_work_is_cancelled_and_not_begun_again():
    ended: list[str] = []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with running_engine(NOBODY) as engine:
        periodic = engine.every(FOREVER, work, first=0, name="work")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        periodic.stop()
        await until(lambda: ended == ["cancelled"])
        periodic.wake()
        await asyncio.sleep(0)

    assert ended == ["cancelled"]
