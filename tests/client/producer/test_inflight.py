"""Who submits faster than is answered waits."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import FrameType

import pytest

from orbitmq.client.producer import inflight
from orbitmq.client.producer.inflight import BlockingInFlight, InFlight, TooManyInFlight
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
            if event in ("call", "c_return") and frame.f_code.co_filename == inflight.__file__:
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
