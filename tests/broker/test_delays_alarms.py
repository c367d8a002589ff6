"""Alarms ring when a step asked for it, whatever happens to the clock and to the step."""

from __future__ import annotations

import asyncio
import time

from orbitmq.broker import scheduler
from orbitmq.broker.scheduler import Alarm
from orbitmq.clock import SystemClock
from tests.support.broker import until
from tests.support.store import HandClock


class Steps:
    """A step that notes when it was called, and answers what it is told."""

    def __init__(self, *answers: float | None) -> None:
        self.answers = list(answers)
        self.calls: list[float] = []

    def __call__(self, now: float) -> float | None:
        self.calls.append(now)
        return self.answers.pop(0) if self.answers else None


async def test_a_step_is_called_at_the_time_it_asked_for_and_not_before():
    asked = time.time() + 0.05
    steps = Steps(asked)
    alarm = Alarm(asyncio.get_running_loop(), SystemClock(), steps, idle=60)

    alarm.start()
    await until(lambda: len(steps.calls) == 2)
    alarm.stop()

    assert steps.calls[1] >= asked


async def test_a_step_with_more_to_do_is_called_in_every_step_of_the_loop():
    steps = Steps(0.0, 0.0, 0.0, None)
    alarm = Alarm(asyncio.get_running_loop(), SystemClock(), steps, idle=60)

    alarm.start()
    for _ in range(5):
        await asyncio.sleep(0)
    alarm.stop()

    assert len(steps.calls) == 4


async def test_whoever_comes_earlier_wakes_the_alarm():
    steps = Steps(time.time() + 1000)
    alarm = Alarm(asyncio.get_running_loop(), SystemClock(), steps, idle=60)
    alarm.start()
    await until(lambda: steps.calls)

    alarm.wake()
    alarm.wake()
    await until(lambda: len(steps.calls) == 2)
    alarm.stop()

    assert len(steps.calls) == 2


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


async def test_nothing_is_called_after_the_end():
    steps = Steps(0.0, 0.0)
    alarm = Alarm(asyncio.get_running_loop(), SystemClock(), steps)
    alarm.start()

    alarm.stop()
    alarm.wake()
    for _ in range(3):
        await asyncio.sleep(0)

    assert steps.calls == []
