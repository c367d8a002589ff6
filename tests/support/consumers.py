"""Consumers and producers of a cluster in the process, for tests of whole consumers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from typing import Any

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.message import Message
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.routes import Queue
from orbitmq.names import is_retry_topic
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.consuming import until

_numbers = itertools.count(1)


def new_group(name: str = "group") -> str:
    """A group that no other test has."""
    return f"{name}-{next(_numbers)}"


def consumer_of(
    cluster: AsyncEmbeddedCluster, group: str | None = None, **options: Any
) -> AsyncConsumer:
    """A consumer that begins with the first message, unless told otherwise."""
    options = {"consume_from": "first"} | options
    client = options.pop("client", None) or quick_settings(cluster.name_server)
    return AsyncConsumer(group or new_group(), client=client, **options)


@contextlib.asynccontextmanager
async def producer_of(cluster: AsyncEmbeddedCluster) -> AsyncIterator[AsyncProducer]:
    """A producer for the time of the block."""
    async with AsyncProducer(client=quick_settings(cluster.name_server)) as producer:
        yield producer


async def send(
    cluster: AsyncEmbeddedCluster,
    topic: str,
    bodies: Iterable[object],
    *,
    queue: Queue | None = None,
    **fields: Any,
) -> None:
    """Send messages with these bodies, one after the other."""
    async with producer_of(cluster) as producer:
        for body in bodies:
            text = body if isinstance(body, bytes) else str(body)
            await producer.send(Message(topic, text, **fields), queue=queue)


async def fill(
    cluster: AsyncEmbeddedCluster, topic: str, count: int, *, queue: Queue | None = None
) -> None:
    """Send messages "0", "1", ... quickly."""
    async with producer_of(cluster) as producer:
        for begin in range(0, count, 200):
            some = [Message(topic, str(at)) for at in range(begin, min(begin + 200, count))]
            await producer.send_batch(some, queue=queue)


def own_queues(consumer: AsyncConsumer) -> list[Queue]:
    """The queues of a consumer, without those of its retry topic."""
    return sorted(queue for queue in consumer.assignment() if not is_retry_topic(queue.topic))


async def until_owned(consumer: AsyncConsumer, count: int) -> None:
    """Wait until a consumer has so many queues, beside its retry topic's."""
    await until(lambda: len(own_queues(consumer)) == count)


async def until_retry_is_owned(consumer: AsyncConsumer) -> None:
    """Wait until the retry topic is consumed as well, which is made with the first member."""
    await until(lambda: any(is_retry_topic(queue.topic) for queue in consumer.assignment()))


def committed(cluster: AsyncEmbeddedCluster, group: str, topic: str) -> int:
    """How many messages of a topic a group has finished, by what brokers know."""
    return sum(cluster.progress(group, topic).values())


def done_here(consumer: AsyncConsumer, topic: str = "orders") -> int:
    """How many messages of a topic a consumer has finished, by what it knows itself."""
    return sum(offset for queue, offset in consumer.positions().items() if queue.topic == topic)
