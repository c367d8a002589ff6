"""Where queues begin and end, what was stored when, and how much of it was not returned yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.client.consumer.starting import end_offset, first_offset, offset_at
from orbitmq.client.durations import Instant, epoch
from orbitmq.client.engine import Engine
from orbitmq.client.queue import Queue

if TYPE_CHECKING:
    from orbitmq.client.pullconsumer.core import PullCore

#: Asks a broker for an offset of a queue.
Find: TypeAlias = Callable[[Engine, Queue], Awaitable[int]]

FIRST: Find = first_offset
END: Find = end_offset


def at_time(time: Instant) -> Find:
    """The first message stored at or after a time; the end without one."""
    at = epoch(time, "time")
    return lambda engine, queue: offset_at(engine, queue, at)


async def find_offsets(core: PullCore, queues: Iterable[Queue], find: Find) -> dict[Queue, int]:
    """An offset of each queue, as their brokers say. Raises when one of them does not."""
    core.check_running()
    asked = tuple(queues)
    for topic in {queue.topic for queue in asked}:
        await core.engine.routes.get(topic)
    offsets = await asyncio.gather(*(find(core.engine, queue) for queue in asked))
    return dict(zip(asked, offsets, strict=True))


def lags(core: PullCore) -> dict[Queue, int]:
    """Messages that are in the assigned queues and were not returned, as the last pulls saw."""
    return {
        queue.owned.queue: max(0, queue.owned.max_offset - queue.returned)
        for queue in core.cache.queues
        if queue.owned.max_offset is not None and not queue.owned.is_draining
    }
