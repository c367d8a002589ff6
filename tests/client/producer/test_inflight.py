"""Who submits faster than is answered waits."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import FrameType

import pytest

from orbitmq.client.producer import submit
from orbitmq.client.producer.submit import BlockingInFlight, InFlight
from orbitmq.errors import TooManyInFlight
from tests.support.remoting import DEADLINE, until


async def test_there_is_room_until_the_number_is_reached() -> None:
    flight = InFlight(2, 1000)
    await flight.enter(1, DEADLINE)
    await flight.enter(1, DEADLINE)

    third = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)

    assert not third.done()
    flight.leave(1)
    await third
    assert flight.count == 2


async def test_there_is_room_until_the_bytes_are_reached_but_always_for_one() -> None:
    flight = InFlight(10, 100)
    await flight.enter(5000, DEADLINE)

    small = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)

    assert not small.done()
    flight.leave(5000)
    await small


async def test_nobody_overtakes() -> None:
    flight = InFlight(10, 100)
    await flight.enter(60, DEADLINE)
    order: list[str] = []

    async def enter(name: str, size: int) -> None:
        await flight.enter(size, DEADLINE)
        order.append(name)

    large = asyncio.ensure_future(enter("large", 90))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(enter("small", 10))
    await asyncio.sleep(0)
    flight.leave(60)
    await asyncio.gather(large, small)

    assert order == ["large", "small"]


async def test_who_waits_too_long_is_told_and_holds_up_nobody() -> None:
    flight = InFlight(10, 100)
    await flight.enter(60, DEADLINE)
    late = asyncio.ensure_future(flight.enter(90, 0.02))
    await asyncio.sleep(0)
    behind = asyncio.ensure_future(flight.enter(40, DEADLINE))

    with pytest.raises(TooManyInFlight, match="1 submitted messages with 60 bytes"):
        await late

    await behind
    assert flight.count == 2


async def test_a_cancelled_one_holds_up_nobody() -> None:
    flight = InFlight(1, 100)
    await flight.enter(1, DEADLINE)
    first = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)

    first.cancel()
    flight.leave(1)
    await second

    assert flight.count == 1
    flight.leave(1)
    await flight.until_empty()


async def test_one_cancelled_in_the_instant_of_its_turn_passes_it_on() -> None:
    flight = InFlight(1, 100)
    await flight.enter(1, DEADLINE)
    first = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)

    flight.leave(1)
    first.cancel()
    await asyncio.wait_for(second, DEADLINE)

    assert first.cancelled()
    assert flight.count == 1


async def test_a_thread_waits_for_room() -> None:
    flight = BlockingInFlight(1, 100)
    flight.enter(1, DEADLINE)
    entered = threading.Event()

    def enter() -> None:
        flight.enter(1, DEADLINE)
        entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    with pytest.raises(TooManyInFlight):
        flight.enter(1, 0.02)
    assert not entered.is_set()
    flight.leave(1)
    thread.join(DEADLINE)

    assert entered.is_set()
    assert not flight.until_empty(0.01)
    flight.leave(1)
    assert flight.until_empty(DEADLINE)
    await until(lambda: flight.count == 0)


def test_what_is_in_flight_is_waited_for_until_the_last_of_it_has_had_its_time() -> None:
    flight = BlockingInFlight(10, 100)
    now = time.monotonic()
    flight.enter(1, DEADLINE, now + DEADLINE)
    flight.enter(1, DEADLINE, now + 0.01)
    is_over: list[bool] = []
    waiting = threading.Thread(target=lambda: is_over.append(flight.until_over(0.0)))
    waiting.start()
    flight.leave(1)
    flight.leave(1)
    waiting.join(DEADLINE)

    assert is_over == [True]
    late = BlockingInFlight(10, 100)
    late.enter(1, DEADLINE, now)
    assert not late.until_over(0.01)


class Interrupt(BaseException):
    """What strikes a thread, as Ctrl-C does."""


def test_wherever_a_thread_is_interrupted_it_holds_neither_room_nor_the_lock() -> None:
    flight = BlockingInFlight(1, 100)
    place, has_struck = 0, True

    while has_struck:
        has_struck = False
        left = place

        def strike(frame: FrameType, event: str, _: object) -> None:
            nonlocal left, has_struck
            if event in ("call", "c_return") and frame.f_code.co_filename == submit.__file__:
                left -= 1
                if left == -1:
                    has_struck = True
                    raise Interrupt

        sys.setprofile(strike)
        try:
            flight.enter(10, 10.0)
        except Interrupt:
            assert flight.count == 0, place
        finally:
            sys.setprofile(None)
        if not has_struck:
            flight.leave(10)
        assert flight.until_empty(0.0)
        place += 1

    assert place >= 5


def test_a_thread_that_is_held_up_while_it_enters_holds_up_nobody_who_leaves_or_waits() -> None:
    flight = BlockingInFlight(10, 100)
    flight.enter(1, DEADLINE, time.monotonic() + DEADLINE)
    is_over: list[bool] = []
    leaving = threading.Thread(target=lambda: flight.leave(1), daemon=True)
    waiting = threading.Thread(target=lambda: is_over.append(flight.until_over(0)), daemon=True)

    with flight._lock:  # as a signal handler finds it
        leaving.start()
        leaving.join(DEADLINE)
        waiting.start()
        waiting.join(DEADLINE)
        is_held_up = leaving.is_alive() or waiting.is_alive()

    assert not is_held_up
    assert is_over == [True]
    assert flight.count == 0


def test_room_is_taken_and_given_back_by_many_threads() -> None:
    flight = BlockingInFlight(3, 100)
    most: list[int] = []

    def come_and_go() -> None:
        for _ in range(300):
            flight.enter(7, DEADLINE)
            most.append(flight._entered - flight._gone - len(flight._left))
            flight.leave(7)

    threads = [threading.Thread(target=come_and_go, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert not any(thread.is_alive() for thread in threads)
    assert len(most) == 8 * 300
    assert flight.until_empty(DEADLINE)
    assert not flight._gates
