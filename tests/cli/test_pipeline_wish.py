"""A running pipeline hears of Ctrl-C and SIGTERM, whatever its thread is doing at that moment."""

from __future__ import annotations

import signal
import threading

import pytest

from orbitmq.client.signals import StopWish
from tests.support.store import HandClock

DEADLINE = 20.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_wait_is_heard(number: signal.Signals) -> None:
    with StopWish() as wish:
        # Where the thread that waits is for an instant, again and again.
        with wish.event._cond:  # type: ignore[attr-defined]
            signal.raise_signal(number)

        assert wish.event.wait(DEADLINE)


@pytest.mark.timeout(60)
def test_a_second_signal_at_once_is_the_same_wish_and_a_later_one_is_as_before() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    clock = HandClock()
    try:
        with StopWish(clock) as wish:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert wish.event.wait(DEADLINE)
            clock.advance(1.0)

            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_pipeline_that_ended_by_itself_leaves_nothing_behind() -> None:
    threads = set(threading.enumerate())
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with StopWish():
        (fresh,) = set(threading.enumerate()) - threads

    fresh.join(DEADLINE)
    assert not fresh.is_alive()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
