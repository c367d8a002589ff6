"""Who submits faster than is answered waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
from concurrent.futures import Future

import pytest

from orbitmq.client.producer.send import Draft, Sending, SendResult
from orbitmq.client.producer.submit import InFlight
from orbitmq.errors import TooManyInFlight
from tests.support.remoting import DEADLINE


def _sending(size: int, timeout: float = DEADLINE) -> Sending:
    return Sending(Draft("orders", bytes(size), "", "id"), 0.0, timeout)


async def _entered(flight: InFlight, size: int) -> Future[SendResult]:
    """What is in flight from now on."""
    sent: Future[SendResult] = concurrent.futures.Future()
    await flight.enter(sent, _sending(size))
    return sent


async def _waiting(flight: InFlight, size: int) -> asyncio.Task[Future[SendResult]]:
    task = asyncio.ensure_future(_entered(flight, size))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_there_is_room_until_the_number_is_reached():
    flight = InFlight(2, 1000)
    await _entered(flight, 1)
    second = await _entered(flight, 1)
    third = await _waiting(flight, 1)

    flight.leave(second)

    await third
    assert flight.count == 2


async def test_there_is_room_until_the_bytes_are_reached_but_always_for_one():
    flight = InFlight(10, 100)
    large = await _entered(flight, 5000)
    small = await _waiting(flight, 1)

    assert flight.leave(large) is not None
    assert flight.leave(large) is None

    await small


async def test_none_overtakes():
    flight = InFlight(10, 100)
    first = await _entered(flight, 60)
    order: list[str] = []
    large, small = await _waiting(flight, 90), await _waiting(flight, 10)
    large.add_done_callback(lambda _: order.append("large"))
    small.add_done_callback(lambda _: order.append("small"))

    flight.leave(first)
    await asyncio.gather(large, small)

    assert order == ["large", "small"]


async def test_one_that_waits_too_long_gets_an_error_and_holds_up_no_other():
    flight = InFlight(10, 100)
    await _entered(flight, 60)
    late = asyncio.ensure_future(flight.enter(concurrent.futures.Future(), _sending(90, 0.02)))
    await asyncio.sleep(0)
    behind = await _waiting(flight, 40)

    with pytest.raises(TooManyInFlight, match="1 submitted messages with 60 bytes"):
        await late

    await behind
    assert flight.count == 2


@pytest.mark.parametrize("is_its_turn", [False, True])
async def test_one_that_is_cancelled_holds_up_no_other(is_its_turn):
    flight = InFlight(1, 100)
    only = await _entered(flight, 1)
    first, second = await _waiting(flight, 1), await _waiting(flight, 1)

    if is_its_turn:
        flight.leave(only)
    first.cancel()
    flight.leave(only)
    sent = await asyncio.wait_for(second, DEADLINE)

    assert first.cancelled()
    assert flight.count == 1
    flight.leave(sent)
    await flight.until_empty()


async def test_room_is_counted_across_threads_and_the_loop():
    flight = InFlight(3, 100)
    loop = asyncio.get_running_loop()
    most: list[int] = []

    def come_and_go():
        for _ in range(300):
            sent: Future[SendResult] = concurrent.futures.Future()
            sending = _sending(7)
            if not flight.try_enter(sent, sending):
                asyncio.run_coroutine_threadsafe(flight.enter(sent, sending), loop).result(DEADLINE)
            most.append(flight.count)
            loop.call_soon_threadsafe(flight.leave, sent)

    await asyncio.gather(*(asyncio.to_thread(come_and_go) for _ in range(8)))
    await flight.until_empty()

    assert len(most) == 8 * 300
    assert max(most) <= 3
    assert "0 submitted messages with 0 bytes" in str(flight.full(0.0))
