"""Polled messages as record batches."""

from __future__ import annotations

import sys

import pyarrow as pa
import pytest

from orbitmq.client.pullconsumer.cache import chunks_to_arrow
from orbitmq.errors import MissingExtra
from orbitmq.message.arrow import MESSAGE_SCHEMA
from orbitmq.message.record import BodyCorrupt, ColumnUnknown
from tests.support.broker import RawClient
from tests.support.polling import DEADLINE, TOPIC, consumer, progress, queue, send
from tests.support.pulling import Found, ScriptedBroker, record

BROKER_COUNT = QUEUE_COUNT = 2


@pytest.fixture
async def senders(cluster):
    clients = [await RawClient.open(broker) for broker in cluster.brokers]
    yield clients
    for client in clients:
        await client.close()


async def test_pulls_of_several_queues_and_brokers_are_joined_into_one_batch(cluster, senders):
    for client in senders:
        await send(client, 100, queues=2)

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        batch = await reader.poll_arrow(DEADLINE, max_messages=1000, min_messages=200)

    assert isinstance(batch, pa.RecordBatch)
    assert batch.schema == MESSAGE_SCHEMA
    assert batch.num_rows == 200
    rows = batch.select(["brokerName", "queueId", "queueOffset", "body"]).to_pylist()
    for broker in ("broker-a", "broker-b"):
        for number in (0, 1):
            mine = [r for r in rows if (r["brokerName"], r["queueId"]) == (broker, number)]
            assert [row["queueOffset"] for row in mine] == list(range(50))
            assert [row["body"] for row in mine] == [b"%d" % n for n in range(number, 100, 2)]


async def test_only_the_asked_columns_are_made(cluster, senders):
    for tag in ("Aa", "BB", "Aa"):
        await senders[0].stored(TOPIC, tag.encode(), properties={"TAGS": tag})

    async with consumer(cluster) as reader:
        await reader.assign([queue(0)], "Aa")
        batch = await reader.poll_arrow(DEADLINE, columns=["body"])
        with pytest.raises(ColumnUnknown, match="no column 'price'"):
            chunks_to_arrow([], ["price"])

    assert batch.schema.names == ["body"], "tags were looked at, and are not shown"
    assert batch.column("body").to_pylist() == [b"Aa", b"Aa"]


async def test_the_number_of_rows_and_bytes_is_bounded_and_nothing_is_lost(cluster, senders):
    await send(senders[0], 50)
    one = cluster.messages(TOPIC)[0].size

    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        offsets: list[int] = []
        sizes: list[int] = []
        while len(offsets) < 50:
            batch = await reader.poll_arrow(DEADLINE, max_messages=7, max_bytes=5 * one)
            sizes.append(batch.num_rows)
            offsets += batch.column("queueOffset").to_pylist()

    assert offsets == list(range(50))
    assert max(sizes) == 5


async def test_batches_and_messages_may_be_polled_in_turn_and_committed(cluster, senders):
    await send(senders[0], 9)

    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        first = await reader.poll(DEADLINE, max_messages=2)
        second = await reader.poll_arrow(DEADLINE, max_messages=3)
        third = await anext(reader)
        fourth = await reader.poll_arrow(DEADLINE, max_messages=100)

    offsets = [message.queue_offset for message in first]
    offsets += second.column("queueOffset").to_pylist()
    offsets += [third.queue_offset, *fourth.column("queueOffset").to_pylist()]
    assert offsets == list(range(9))
    assert progress(cluster)[0] == 9


async def test_a_damaged_body_raises_and_comes_again_or_is_null():
    damaged = bytearray(record(1, b"good"))
    damaged[damaged.index(b"good")] = ord("b")
    given = [Found(2, record(0, b"fine") + bytes(damaged))]

    async with (
        ScriptedBroker(lambda _: given.pop() if given else None) as broker,
        consumer(broker) as reader,
    ):
        await reader.assign([queue(0)])
        for _ in range(2):
            with pytest.raises(BodyCorrupt, match="offset 1"):
                await reader.poll_arrow(DEADLINE)
            assert reader.position(queue(0)) == 0

        batch = await reader.poll_arrow(DEADLINE, null_bad_bodies=True)

        assert batch.column("body").to_pylist() == [b"fine", None]
        assert reader.position(queue(0)) == 2


def test_without_the_libraries_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(MissingExtra, match=r"pip install '.*\[arrow\]'"):
        chunks_to_arrow([])
