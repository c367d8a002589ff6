"""Messages by which it is seen that a queue still holds what it held."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.progress import Landmark, landmark_at
from orbitmq.client.consumer.pull import Pulled, PullStatus, Subscription, decode_pulled
from orbitmq.client.consumer.resets import reset_told
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.cache import chunk_of
from orbitmq.client.routes import Queue
from orbitmq.message.record import BORN_HOST_V6, INNER_BATCH, NEED_UNWRAP, STORE_HOST_V6
from orbitmq.message.stored import StoredMessage, encode_batch
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import running_engine
from tests.support.consumers import consumer_of, send

TOPIC = "orders"
QUEUE = Queue(TOPIC, "broker-a", 0)
EVERYTHING = Subscription.by_tags(TOPIC)


def stored(offset: int, body: bytes = b"x", sys_flag: int = 0) -> StoredMessage:
    return StoredMessage.build(
        topic=TOPIC, stored_body=body, queue_offset=offset, sys_flag=sys_flag, store_ms=5
    )


def owned_queue() -> OwnedQueue:
    return OwnedQueue(QUEUE, 0, now=0.0)


@given(
    body=st.binary(max_size=50),
    offset=st.integers(0, 1 << 60),
    born_ms=st.integers(0, 1 << 45),
    store_ms=st.integers(0, 1 << 45),
    has_v6_producer=st.booleans(),
    has_v6_broker=st.booleans(),
)
def test_a_message_is_known_by_its_record_as_by_its_object(
    *,
    body: bytes,
    offset: int,
    born_ms: int,
    store_ms: int,
    has_v6_producer: bool,
    has_v6_broker: bool,
) -> None:
    message = StoredMessage.build(
        topic=TOPIC,
        stored_body=body,
        queue_offset=offset,
        born_ms=born_ms,
        store_ms=store_ms,
        sys_flag=BORN_HOST_V6 * has_v6_producer | STORE_HOST_V6 * has_v6_broker,
        born_host=("::1" if has_v6_producer else "127.0.0.1", 5000),
        store_host=("::2" if has_v6_broker else "127.0.0.2", 10911),
    )
    before = stored(1).encode()

    found = Landmark.in_records(before + message.encode(), len(before))

    assert found == Landmark.of(message)
    assert (found.offset, found.born_ms, found.store_ms) == (offset, born_ms, store_ms)


def test_a_pull_that_is_polled_leaves_its_last_message_as_a_landmark() -> None:
    last = stored(9, b"last")
    owned = owned_queue()
    body = stored(3).encode() + last.encode()

    chunk_of(owned, Pulled(PullStatus.FOUND, 3, 40, 0, 100, 0, body, False), EVERYTHING)

    assert owned.landmark == Landmark.of(last)


def test_a_message_inside_of_a_batch_is_a_landmark_of_its_own() -> None:
    several = encode_batch([(b"a", 0, b""), (b"b", 0, b"")])
    batch = stored(4, several, INNER_BATCH | NEED_UNWRAP)
    owned = owned_queue()
    pulled = Pulled(PullStatus.FOUND, 4, 6, 0, 100, 0, batch.encode(), False)

    chunk_of(owned, pulled, EVERYTHING)

    last = decode_pulled(pulled)[-1]
    assert (owned.landmark, last.queue_offset) == (Landmark.of(last), 5)


def test_the_first_unfinished_message_is_a_better_landmark_than_the_last_one() -> None:
    owned = owned_queue()
    messages = [ReceivedMessage(stored(offset), QUEUE) for offset in (3, 4, 5)]
    owned.last_fetched = Landmark.of(messages[-1].stored)
    owned.window.add(messages)

    owned.window.take(2)
    assert owned.landmark == Landmark.of(messages[0].stored)
    owned.window.commit()
    assert owned.landmark == Landmark.of(messages[2].stored)
    owned.window.finish([5])
    assert owned.landmark == owned.last_fetched


async def test_a_broker_shows_the_message_at_an_offset_and_none_where_it_has_none() -> None:
    async with (
        AsyncEmbeddedCluster() as cluster,
        running_engine(cluster.name_server) as engine,
    ):
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, [b"first", b"other one"], tags="paid")
        await engine.routes.get(TOPIC)
        consumer = consumer_of(cluster, "billing")
        consumer.on(TOPIC)(lambda _: None)
        async with consumer:
            pass  # so that the broker knows the group

        first = await landmark_at(engine, "billing", QUEUE, 0)
        other = await landmark_at(engine, "billing", QUEUE, 1)
        assert first is not None
        assert other is not None
        assert (first.offset, other.offset) == (0, 1)
        assert other.size - first.size == len("other one") - len("first")
        assert await landmark_at(engine, "billing", QUEUE, 2) is None


async def test_a_look_at_a_landmark_takes_no_reset_away() -> None:
    """Who is to follow it would never hear of it."""
    async with (
        AsyncEmbeddedCluster() as cluster,
        running_engine(cluster.name_server) as engine,
    ):
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, [b"first", b"other one"])
        await engine.routes.get(TOPIC)

        def reset() -> None:
            with Admin(name_server=cluster.name_server) as admin:
                admin.groups.create("billing")
                admin.progress.reset("billing", TOPIC, ResetTo.by_queue({QUEUE: 1}))

        await asyncio.to_thread(reset)
        found = await landmark_at(engine, "billing", QUEUE, 0)

        # What is where the group no longer stands proves nothing.
        assert found is None
        assert await reset_told(engine, "billing", QUEUE, 0) == 1
