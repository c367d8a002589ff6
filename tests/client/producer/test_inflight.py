"""Who submits faster than is answered waits."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.client.producer.submit import InFlight
from orbitmq.errors import TooManyInFlight
from tests.support.remoting import DEADLINE


async def test_there_is_room_until_the_number_is_reached():
    flight = InFlight(2, 1000)
    await flight.enter(1, DEADLINE)
    await flight.enter(1, DEADLINE)

    third = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)

    assert not third.done()
    flight.leave(1)
    await third
    assert flight.count == 2


async def test_there_is_room_until_the_bytes_are_reached_but_always_for_one():
    flight = InFlight(10, 100)
    await flight.enter(5000, DEADLINE)

    small = asyncio.ensure_future(flight.enter(1, DEADLINE))
    await asyncio.sleep(0)

    assert not small.done()
    flight.leave(5000)
    await small


async def test_nobody_overtakes():
    flight = InFlight(10, 100)
    await flight.enter(60, DEADLINE)
    order: list[str] = []

    async def enter(name, size):
        await flight.enter(size, DEADLINE)
        order.append(name)

    large = asyncio.ensure_future(enter("large", 90))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(enter("small", 10))
    await asyncio.sleep(0)
    flight.leave(60)
    await asyncio.gather(large, small)

    assert order == ["large", "small"]


async def test_who_waits_too_long_is_told_and_holds_up_nobody():
    flight = InFlight(10, 100)
    await flight.enter(60, DEADLINE)
    late = asyncio.ensure_future(flight.enter(90, 0.02))
    await asyncio.sleep(0)
    behind = asyncio.ensure_future(flight.enter(40, DEADLINE))

    with pytest.raises(TooManyInFlight, match="1 submitted messages with 60 bytes"):
        await late

    await behind
    assert flight.count == 2


async def test_a_cancelled_one_holds_up_nobody():
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


async def test_one_cancelled_in_the_instant_of_its_turn_passes_it_on():
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


async def test_room_is_counted_across_threads_and_the_loop():
    flight = InFlight(3, 100)
    loop = asyncio.get_running_loop()
    most: list[int] = []

    def come_and_go():
        for _ in range(300):
            if not flight.try_enter(7):
                waiting = asyncio.run_coroutine_threadsafe(flight.enter(7, DEADLINE), loop)
                waiting.result(DEADLINE)
            most.append(flight.count)
            loop.call_soon_threadsafe(flight.leave, 7)

    await asyncio.gather(*(asyncio.to_thread(come_and_go) for _ in range(8)))
    await flight.until_empty()

    assert len(most) == 8 * 300
    assert max(most) <= 3
    assert (flight.count, flight.size) == (0, 0)
