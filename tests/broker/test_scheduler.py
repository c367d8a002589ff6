"""How the turns are shared when pulls ask for more than a turn may send."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from orbitmq.broker import scheduler
from orbitmq.broker.scheduler import CALLS, Alarm, Pacing
from orbitmq.clock import SystemClock
from tests.support.broker import until
from tests.support.store import HandClock


class StepLoop:
    """A loop that makes one step when it is told to."""

    def __init__(self) -> None:
        self._ready: deque[Callable[[], None]] = deque()

    def call_soon(self, call: Callable[[], None]) -> None:
        self._ready.append(call)

    def step(self) -> bool:
        """Run what is ready; whether there was anything."""
        ready, self._ready = self._ready, deque()
        for call in ready:
            call()
        return bool(ready)


@pytest.fixture
def loop():
    return StepLoop()


@pytest.fixture
def pacing(loop):
    return Pacing(cast(Any, loop), limit=100)


class OneEnd:
    """As much of a connection as pacing needs."""

    is_slow = False


def connection() -> Any:
    return OneEnd()


def spending(pacing: Pacing, done: list[str], name: str, size: int) -> Callable[[], None]:
    def work() -> None:
        pacing.spent += size
        done.append(name)

    return work


def finish(loop: StepLoop) -> None:
    while loop.step():
        pass


@pytest.mark.parametrize(
    ("limit", "sizes", "turns"),
    [
        (256 * 1024, [0] * (2 * CALLS + 1), [CALLS, 2 * CALLS, 2 * CALLS + 1]),
        (100, [60] * 5, [2, 4, 5]),
        (100, [1000, 1000, 1], [1, 2, 3]),
    ],
    ids=["answers", "bytes", "large answers"],
)
def test_a_turn_ends_after_a_number_of_answers_or_bytes(loop, limit, sizes, turns):
    pacing = Pacing(cast(Any, loop), limit=limit)
    done: list[str] = []
    one, other = connection(), connection()
    for size in sizes:
        pacing.later(one, spending(pacing, done, "x", size))
    waits = pacing.must_wait(one), pacing.must_wait(other)

    seen = []
    while loop.step():
        seen.append(len(done))

    assert waits == (True, False)
    assert seen == turns
    assert len(pacing) == 0


def test_connections_take_turns(pacing, loop):
    done: list[str] = []
    first, second = connection(), connection()
    for number in range(3):
        pacing.later(first, spending(pacing, done, f"a{number}", 100))
    pacing.later(second, spending(pacing, done, "b0", 100))

    finish(loop)

    assert done == ["a0", "b0", "a1", "a2"]


def test_work_of_a_connection_keeps_its_order(pacing, loop):
    done: list[str] = []
    one = connection()

    def adds_more():
        spending(pacing, done, "first", 100)()
        pacing.later(one, spending(pacing, done, "last", 10))

    pacing.later(one, adds_more)
    pacing.later(one, spending(pacing, done, "second", 10))
    finish(loop)

    assert done == ["first", "second", "last"]


def test_what_a_closed_connection_asked_for_is_dropped(pacing, loop):
    done: list[str] = []
    gone, here = connection(), connection()
    pacing.later(gone, spending(pacing, done, "gone", 1))
    pacing.later(here, spending(pacing, done, "here", 1))

    pacing.forget(gone)
    finish(loop)

    assert done == ["here"]


def test_work_that_fails_does_not_stop_the_rest(pacing, loop, caplog):
    done: list[str] = []
    one = connection()

    def fail():
        raise RuntimeError("a bug")

    pacing.later(one, fail)
    pacing.later(one, spending(pacing, done, "next", 1))
    finish(loop)

    assert done == ["next"]
    assert "waited for its turn failed" in caplog.text


class Steps:
    """A step that notes when it was called, and answers what it is told."""

    def __init__(self, *answers: float | None) -> None:
        self.answers = list(answers)
        self.calls: list[float] = []

    def __call__(self, now: float) -> float | None:
        self.calls.append(now)
        return self.answers.pop(0) if self.answers else None


async def test_a_step_is_called_at_its_time_or_when_it_is_woken():
    asked = time.time() + 0.05
    steps = Steps(asked, time.time() + 1000)
    alarm = Alarm(asyncio.get_running_loop(), SystemClock(), steps, idle=60)

    alarm.start()
    await until(lambda: len(steps.calls) == 2)
    alarm.wake()
    alarm.wake()
    await until(lambda: len(steps.calls) == 3)
    alarm.stop()

    assert steps.calls[1] >= asked
    assert len(steps.calls) == 3


async def test_a_clock_that_is_set_forward_is_noticed():
    clock = HandClock()
    steps = Steps(clock.now() + 3600, None)
    alarm = Alarm(asyncio.get_running_loop(), clock, steps, idle=0.01)
    alarm.start()
    await until(lambda: steps.calls)

    clock.advance(3600)
    await until(lambda: clock.now() in steps.calls)
    alarm.stop()

    assert steps.calls[0] == clock.now() - 3600


async def test_a_step_that_fails_is_tried_again_and_does_not_spin(monkeypatch, caplog):
    monkeypatch.setattr(scheduler, "AFTER_FAILURE", 0.02)
    calls: list[float] = []

    def fail(_):
        calls.append(time.monotonic())
        raise RuntimeError("as the test says")

    alarm = Alarm(asyncio.get_running_loop(), SystemClock(), fail, idle=60)
    alarm.start()
    await until(lambda: len(calls) == 3)
    alarm.stop()

    assert calls[2] - calls[0] >= 0.03
    assert "as the test says" in caplog.text
