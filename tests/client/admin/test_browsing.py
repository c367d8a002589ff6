"""Walking through queues in memory: pages of any size are the whole, each message once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.messages import (
    ALL,
    Cursor,
    Pulled,
    QueueReader,
    Walk,
    Wanted,
    whole_topic,
)
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.message.stored import StoredMessage
from orbitmq.remoting.settings import Address

HERE = Address("127.0.0.1", 1)


class MemoryReading(QueueReader):
    """Queues of messages, some of which a filter leaves out, and pulls that bring a few."""

    def __init__(self, queues: Mapping[Queue, Sequence[StoredMessage]], most: int) -> None:
        self._queues = queues
        self._most = most

    async def pull(
        self, where: Address, queue: Queue, offset: int, wanted: Wanted = ALL, most: int = 32
    ) -> Pulled:
        records = self._queues[queue]
        seen = records[offset : offset + min(most, self._most)]
        found = tuple(ReceivedMessage(each, queue) for each in seen if each.tags != "hidden")
        return Pulled(found, offset + len(seen))


@st.composite
def topics(draw: st.DrawFn) -> dict[Queue, list[StoredMessage]]:
    """Up to four queues whose messages were stored one after the other."""
    made: dict[Queue, list[StoredMessage]] = {}
    for number in range(draw(st.integers(1, 4))):
        queue = Queue("orders", f"broker-{number % 2}", number)
        steps = draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80))
        now = 0
        made[queue] = []
        for offset, (step, is_hidden) in enumerate(steps):
            now += step
            made[queue].append(
                StoredMessage.build(
                    topic="orders",
                    stored_body=b"%d" % offset,
                    properties={"TAGS": "hidden"} if is_hidden else {},
                    queue_id=queue.id,
                    queue_offset=offset,
                    physical_offset=number * 1000 + offset,
                    store_ms=now,
                )
            )
    return made


@given(topics(), st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1), st.booleans())
def test_pages_of_any_size_are_the_whole_walk(queues, most, sizes, is_backwards):
    reading = MemoryReading(queues, most)
    addresses = {queue.broker: HERE for queue in queues}
    bounds = {queue: (0, len(records)) for queue, records in queues.items()}
    cursor = whole_topic("orders", bounds, ALL, backwards=is_backwards)

    async def paged():
        found: list[ReceivedMessage] = []
        place: str | None = cursor.text
        turn = 0
        while place is not None:
            size = sizes[turn % len(sizes)]
            page = await Walk(reading, addresses, Cursor.of(place)).page(size)
            assert len(page.messages) == size or page.cursor is None
            found += page.messages
            place = page.cursor
            turn += 1
        return found

    async def whole():
        return [message async for message in Walk(reading, addresses, cursor).messages()]

    found = asyncio.run(paged())

    assert found == asyncio.run(whole())
    times = [message.stored.store_ms for message in found]
    assert times == sorted(times, reverse=is_backwards)
    for queue, records in queues.items():
        wanted = [each.queue_offset for each in records if each.tags != "hidden"]
        offsets = [message.queue_offset for message in found if message.queue == queue]
        assert offsets == (wanted[::-1] if is_backwards else wanted)
