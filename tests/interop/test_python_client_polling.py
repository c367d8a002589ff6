"""Our pull consumer with Apache's broker: shared queues or assigned ones, positions, columns."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings, PullConsumer
from orbitmq.client.routes import Queue
from tests.interop.beside import Beside, eventually, number_in, until
from tests.interop.session import body

if TYPE_CHECKING:
    from orbitmq.client.message import ReceivedMessage

#: The row is a list of what works; it is shown when every test of these files has passed.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300), pytest.mark.feature("J4")]

MANUAL = PollSettings(auto_commit=False)


def _consumer(beside: Beside, group: str, polling: PollSettings = MANUAL) -> AsyncPullConsumer:
    return AsyncPullConsumer(group, client=beside.settings(), polling=polling, consume_from="first")


async def _poll(consumer: AsyncPullConsumer, count: int) -> list[ReceivedMessage]:
    """Polls until so many messages have come."""
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.poll(1.0)
    return found


async def test_what_java_sent_is_polled_and_committed(beside):
    await beside.create_topic("OurPolled", queues=3)
    sent = await beside.java_send("OurPolled", 100, tag="red,green", keys="k")

    async with _consumer(beside, "our-pollers") as consumer:
        consumer.subscribe("OurPolled")
        found = await _poll(consumer, 100)
        committed = await consumer.commit()
        ends = await consumer.end_offsets()
        stored = {queue: await consumer.committed(queue) for queue in consumer.assignment()}
        queues = await consumer.queues("OurPolled")

    assert Counter(number_in(message.text()) for message in found) == Counter(range(100))
    assert {message.msg_id for message in found} == {line["msgId"] for line in sent}
    by_queue: dict[Queue, list[int]] = defaultdict(list)
    for message in found:
        by_queue[message.queue].append(message.queue_offset)
    assert all(offsets == list(range(len(offsets))) for offsets in by_queue.values())
    assert committed == ends == stored == {queue: len(by_queue[queue]) for queue in queues}
    # Java's consumer of the same group goes on from there.
    await beside.java_send("OurPolled", 3, prefix="more-")
    lines = await beside.java("lite-pull", topic="OurPolled", group="our-pollers", count=3)
    assert Counter(map(body, lines)) == Counter(f"more-{number}" for number in range(3))


async def test_polling_goes_on_where_java_committed(beside):
    await beside.create_topic("OurHandedOver", queues=3)
    await beside.java_send("OurHandedOver", 30)
    await beside.java("lite-pull", topic="OurHandedOver", group="our-heirs", count=30)
    await beside.java_send("OurHandedOver", 10, prefix="more-")

    async with _consumer(beside, "our-heirs") as consumer:
        consumer.subscribe("OurHandedOver")
        found = await _poll(consumer, 10)
        rest = await consumer.poll(0.5)

    assert Counter(each.text() for each in found) == Counter(f"more-{n}" for n in range(10))
    assert rest == []


async def test_only_what_is_asked_for_is_polled(beside):
    await beside.create_topic("OurChosen", queues=2)
    await beside.java_send("OurChosen", 40, tag="red,green", property="colour:blau")

    async with (
        _consumer(beside, "our-tag-pollers") as by_tags,
        _consumer(beside, "our-sql-pollers") as by_sql,
    ):
        by_tags.subscribe("OurChosen", "green")
        by_sql.subscribe("OurChosen", sql="colour = 'blau' AND number >= 35")
        green = await _poll(by_tags, 20)
        late = await _poll(by_sql, 5)

    assert Counter(number_in(message.text()) for message in green) == Counter(range(1, 40, 2))
    assert Counter(number_in(message.text()) for message in late) == Counter(range(35, 40))


async def test_assigned_queues_are_read_from_where_the_application_says(beside):
    await beside.create_topic("OurAssigned", queues=2)
    await beside.java_send("OurAssigned", 20, queue=0)
    await beside.java_send("OurAssigned", 20, queue=1, prefix="other-")
    first, second = (Queue("OurAssigned", "broker-a", number) for number in range(2))

    async with _consumer(beside, "our-assigned") as consumer:
        await consumer.assign([first, second])
        await consumer.seek(first, 15)
        await consumer.seek_to_end(second)
        tail = await _poll(consumer, 5)
        times = {message.queue_offset: message.stored_at for message in tail}
        at = await consumer.offsets_for_time(times[17], [first])
        await consumer.seek_to_begin(second)
        others = await _poll(consumer, 20)
        consumer.pause(second)
        await consumer.seek(second, 0)
        assert await consumer.poll(0.3) == []
        consumer.resume(second)
        again = await _poll(consumer, 20)
        await consumer.seek_to_time(times[17], first)
        since = await _poll(consumer, 20 - at[first])
        positions = {queue: consumer.position(queue) for queue in (first, second)}
        # Whoever reads assigned queues belongs to no group, as far as others can see.
        nobody = await consumer.committed(first)

    assert [message.queue_offset for message in tail] == list(range(15, 20))
    # Of several of the same time, old brokers name any.
    assert at[first] <= 17
    assert times.get(at[first], times[17]) == times[17]
    assert [message.queue_offset for message in others] == list(range(20))
    assert [message.queue_offset for message in again] == list(range(20))
    assert [message.queue_offset for message in since] == list(range(at[first], 20))
    assert positions == {first: 20, second: 20}
    assert not nobody


async def test_columns_have_what_the_messages_have(beside):
    await beside.create_topic("OurColumns", queues=2)
    # Also such that are compressed, and such that lie together in one frame.
    sent = await beside.java_send("OurColumns", 40, tag="red,green", keys="k", size=6000)
    sent += await beside.java_send("OurColumns", 40, batch=10, prefix="batch-")

    async with _consumer(beside, "our-columns") as consumer, _consumer(beside, "our-rows") as rows:
        consumer.subscribe("OurColumns")
        rows.subscribe("OurColumns")
        batches: list[Any] = []
        async with asyncio.timeout(60):
            while sum(batch.num_rows for batch in batches) < 80:
                batches.append(await consumer.poll_arrow(1.0, min_messages=80))
        await consumer.commit()
        messages = await _poll(rows, 80)

    found = [row for batch in batches for row in batch.to_pylist()]
    by_place = {(row["queueId"], row["queueOffset"]): row for row in found}
    assert len(by_place) == len(found) == 80
    for message in messages:
        row = by_place[message.queue.id, message.queue_offset]
        assert row["body"] == message.body
        assert row["msgId"] == message.msg_id
        assert row["topic"] == "OurColumns"
        assert row["tags"] == message.tags
    ids = {msg_id for line in sent for msg_id in line["msgId"].split(",")}
    assert {row["msgId"] for row in found} == ids
    await beside.until_all_consumed("our-columns", "OurColumns")


async def test_polled_messages_are_committed_by_themselves(beside):
    await beside.create_topic("OurAuto", queues=2)
    await beside.java_send("OurAuto", 20)

    polling = PollSettings(auto_commit_interval=0.2)
    async with _consumer(beside, "our-auto", polling) as consumer:
        consumer.subscribe("OurAuto")
        found = await _poll(consumer, 20)
        rest = await consumer.poll(0.1)

        async def is_committed():
            offsets = [await consumer.committed(queue) for queue in consumer.assignment()]
            return sum(offset or 0 for offset in offsets) == 20

        assert Counter(each.text() for each in found) == Counter(f"body-{n}" for n in range(20))
        assert rest == []
        await eventually(is_committed)


async def test_two_share_the_queues_of_a_topic(beside):
    await beside.create_topic("OurSplit", queues=6)
    async with _consumer(beside, "our-halves") as first, _consumer(beside, "our-halves") as second:
        for consumer in (first, second):
            consumer.subscribe("OurSplit")
        await until(lambda: len(first.assignment()) == len(second.assignment()) == 3)
        mine, other = set(first.assignment()), set(second.assignment())
        await beside.java_send("OurSplit", 60)
        found = await _poll(first, 30) + await _poll(second, 30)

    assert not mine & other
    assert Counter(number_in(message.text()) for message in found) == Counter(range(60))


def test_programs_without_a_loop_poll(beside):
    asyncio.run(beside.create_topic("OurBlockingPolls", queues=2))
    beside.session.run("send", {"topic": "OurBlockingPolls", "count": 20})

    with PullConsumer(
        "our-blocking-pollers", client=beside.settings(), polling=MANUAL, consume_from="first"
    ) as consumer:
        consumer.subscribe("OurBlockingPolls")
        found = []
        for message in consumer:
            found.append(message.text())
            if len(found) == 20:
                break
        consumer.commit()

    assert Counter(found) == Counter(f"body-{number}" for number in range(20))
    asyncio.run(beside.until_all_consumed("our-blocking-pollers", "OurBlockingPolls"))
