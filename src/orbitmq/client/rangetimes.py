"""The first message of a queue that was stored at a time or later, exactly.

Brokers search by time, but not all of them for the same message. Those of RocketMQ 4 give the one
nearest to the time, which may be older, give the last one when all are older, and of several stored
in the same millisecond any. What a broker says is therefore only where the search begins: two looks
confirm it where it is right, and where it is not, the right place is found from there by steps that
double, and by halves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.landmarks import look
from orbitmq.client.consumer.starting import end_offset, first_offset, offset_at
from orbitmq.clock import milliseconds
from orbitmq.message.stored import decode_messages
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.pull import PullMessageResponse

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue

_OUTCOMES: Final = frozenset(
    map(
        int,
        (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        ),
    )
)


async def first_at(engine: Engine, queue: Queue, time: float, group: str) -> int | None:
    """The first message stored at a time or later; None when no message is that young."""
    guess, low, high = await asyncio.gather(
        offset_at(engine, queue, time), first_offset(engine, queue), end_offset(engine, queue)
    )
    wanted = milliseconds(time)

    async def is_young(offset: int) -> bool:
        return await _is_young(engine, queue, offset, wanted, group)

    found = await search(max(0, low), high, guess, is_young)
    return found if found < high else None


async def search(
    low: int, high: int, guess: int, is_young: Callable[[int], Awaitable[bool]]
) -> int:
    """The first offset in [low, high) that is young, as all behind it are; `high` if none is.

    Throughout, everything before `low` is known to be old, and everything from `high` on young.
    """
    guess = min(max(guess, low), high)
    step = 1
    while low < guess and await is_young(guess - 1):
        high = guess - 1
        guess = max(low, high - step)
        step *= 2
    low = max(low, guess)
    step = 1
    while low < high:
        probe = min(low + step, high) - 1
        if await is_young(probe):
            high = probe
            break
        low = probe + 1
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if await is_young(middle):
            high = middle
        else:
            low = middle + 1
    return high


async def _is_young(engine: Engine, queue: Queue, offset: int, wanted: int, group: str) -> bool:
    header = look(group, queue, offset)
    answer = await engine.ask(
        engine.routes.master(queue.broker), RequestCode.PULL_MESSAGE, header, accept=_OUTCOMES
    )
    if answer.code == ResponseCode.SUCCESS:
        for message in decode_messages(answer.body):
            return message.store_ms >= wanted
    # Nothing is there any more: it has expired, or the end has been cut off meanwhile.
    return offset >= answer.header(PullMessageResponse).max_offset
