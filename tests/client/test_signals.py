"""Signals that end a program reach all who listen, and belong to their host again afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from itertools import permutations

import pytest

from orbitmq.client.signals import ENDINGS, GracefulExit, Latch, stop_requested
from tests.support.store import HandClock

DEADLINE = 20.0


class Noted:
    """An event that can be looked at."""

    def __init__(self) -> None:
        self.count = 0

    def set(self) -> None:
        self.count += 1


@pytest.fixture(autouse=True)
def handlers():
    """The host's own handlers, which say what they were called with."""
    called: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: called.append(number))
        for number in ENDINGS
    }
    yield called
    for number, handler in before.items():
        signal.signal(number, handler)


def in_force() -> list[object]:
    return [signal.getsignal(number) for number in ENDINGS]


def test_the_handlers_of_the_host_are_called_and_are_there_again(handlers):
    hosts, noted = in_force(), Noted()

    with GracefulExit(noted.set):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)

    assert noted.count == 1
    assert handlers == [signal.SIGTERM, signal.SIGINT]
    assert in_force() == hosts


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_that_are_active_hear_a_signal_in_whatever_order_they_end(handlers, order):
    hosts = in_force()
    noted = [Noted() for _ in range(3)]
    listening = [GracefulExit(each.set) for each in noted]
    for each in listening:
        each.__enter__()

    listening[order[0]].__exit__()
    signal.raise_signal(signal.SIGTERM)
    for which in order[1:]:
        listening[which].__exit__()
    signal.raise_signal(signal.SIGTERM)

    assert [each.count for each in noted] == [int(which != order[0]) for which in range(3)]
    assert len(handlers) == 2
    assert in_force() == hosts


def test_default_actions_wait_until_nobody_listens():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    noted = Noted()

    with GracefulExit(noted.set):
        signal.raise_signal(signal.SIGINT)
    assert noted.count == 1

    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_spark_does_at_ctrl_c_waits_until_nobody_listens():
    """A session's own handler cancels all jobs and raises."""

    def handler(number, frame):
        raise KeyboardInterrupt

    handler.__module__ = "pyspark.core.context"
    signal.signal(signal.SIGINT, handler)
    noted = Noted()

    with GracefulExit(noted.set):
        signal.raise_signal(signal.SIGINT)
    assert noted.count == 1

    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


async def test_a_handler_that_the_host_gave_to_its_loop_is_called_during_and_after(handlers):
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[str] = asyncio.Queue()
    loop.add_signal_handler(signal.SIGTERM, heard.put_nowait, "host")
    try:
        async with asyncio.timeout(DEADLINE):
            with stop_requested() as requested:
                signal.raise_signal(signal.SIGTERM)
                await requested.wait()
                assert await heard.get() == "host"
            signal.raise_signal(signal.SIGTERM)
            assert await heard.get() == "host"
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def test_ctrl_c_ends_what_asyncio_runs_gracefully_and_not_by_a_cancellation():
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def main():
        async with asyncio.timeout(DEADLINE):
            with stop_requested() as requested:
                signal.raise_signal(signal.SIGINT)
                await requested.wait()
        return "gracefully"

    with asyncio.Runner() as runner:
        assert runner.run(main()) == "gracefully"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_in_the_middle_of_a_wait_is_heard(number):
    latch = Latch()
    with GracefulExit(latch.set):
        # As from a terminal; `raise_signal` would interrupt the timer's thread only.
        threading.Timer(0.01, os.kill, [os.getpid(), number]).start()

        assert latch.wait(DEADLINE)
    assert latch.is_set()


def test_a_second_signal_is_the_same_request_for_a_moment_and_later_acts_as_before():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    noted, clock = Noted(), HandClock()

    with GracefulExit(noted.set, monotonic=clock.monotonic):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        clock.advance(1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert noted.count == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_that_were_installed_since_are_replaced_again():
    noted = Noted()
    with GracefulExit(noted.set) as graceful:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        graceful.reinstall()
        signal.raise_signal(signal.SIGINT)

    assert noted.count == 1


def test_signals_are_left_alone_on_other_threads(handlers):
    hosts, found = in_force(), []

    def listen():
        with GracefulExit(Noted().set):
            found.extend(in_force())

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(DEADLINE)

    assert found == hosts
