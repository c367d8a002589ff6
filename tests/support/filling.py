"""Fills topics for tests that read them: many messages in few requests, without our producer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from orbitmq.broker.settings import BrokerSettings
from orbitmq.message.properties import encode_properties
from orbitmq.message.stored import encode_batch
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.testing.cluster import EmbeddedCluster
from orbitmq.wire.codes import RequestCode
from tests.support.broker import send_header

#: Bytes of one batch send, well below what brokers take.
_BATCH_BYTES = 512 * 1024


class Sent(NamedTuple):
    """A message to send."""

    body: bytes
    queue_id: int = 0
    properties: Mapping[str, str] = {}  # never changed


def fill(address: str, topic: str, messages: Iterable[Sent | bytes]) -> None:
    """Send everything to one broker; messages of one queue keep their order."""
    asyncio.run(_fill(address, topic, messages))


def make_topic(cluster: EmbeddedCluster, topic: str, count: int, *, queues: int = 1) -> None:
    """Create a topic whose messages are numbers, dealt out over its queues in turn."""
    cluster.create_topic(topic, queues=queues)
    fill(cluster.broker_addresses[0], topic, numbered(count, queues=queues))


def numbered(count: int, *, queues: int = 1, first: int = 0, size: int = 0) -> list[Sent]:
    """Messages whose bodies are numbers, dealt out over queues in turn."""
    return [
        Sent(b"%d" % number + b"." * size, number % queues, {"UNIQ_KEY": f"id-{number}"})
        for number in range(first, first + count)
    ]


def send_one(
    address: str, topic: str, body: bytes, *, queue_id: int = 0, sys_flag: int = 0
) -> None:
    """Send a message as it is, whatever its system flag says about it."""

    async def send() -> None:
        connection = await connect(address)
        try:
            header = send_header(topic, queue_id, sys_flag=sys_flag)
            answer = await connection.request(
                RequestCode.SEND_MESSAGE_V2, header, body=body, timeout=30
            )
            assert answer.code == 0, answer.remark
        finally:
            connection.close()
            await connection.wait_closed()

    asyncio.run(send())


async def _fill(address: str, topic: str, messages: Iterable[Sent | bytes]) -> None:
    connection = await connect(address)
    by_queue: dict[int, list[Sent]] = defaultdict(list)
    for message in messages:
        sent = message if isinstance(message, Sent) else Sent(message)
        by_queue[sent.queue_id].append(sent)
    try:
        await asyncio.gather(
            *(_fill_queue(connection, topic, queue, sent) for queue, sent in by_queue.items())
        )
    finally:
        connection.close()
        await connection.wait_closed()


async def _fill_queue(
    connection: Connection, topic: str, queue_id: int, messages: list[Sent]
) -> None:
    at = 0
    while at < len(messages):
        size, end = 0, at
        while end < len(messages) and (end == at or size < _BATCH_BYTES):
            size += len(messages[end].body) + 200
            end += 1
        body = encode_batch(
            (each.body, 0, encode_properties(each.properties)) for each in messages[at:end]
        )
        answer = await connection.request(
            RequestCode.SEND_BATCH_MESSAGE,
            send_header(topic, queue_id, batch=True),
            body=body,
            timeout=30,
        )
        assert answer.code == 0, answer.remark
        at = end


def with_small_files(settings: BrokerSettings) -> BrokerSettings:
    """A broker that keeps little: what is old goes when `forget_old` says so."""
    store = replace(
        settings.store,
        file_size=1024 * 1024,
        queue_file_entries=500,
        retention=replace(settings.store.retention, max_bytes=1024 * 1024, files_per_run=100),
    )
    return replace(settings, store=store)


def stop_broker(cluster: EmbeddedCluster, place: int) -> None:
    """Stop one of several brokers."""
    cluster.run(cluster.brokers[place].stop())


def members(cluster: EmbeddedCluster, group: str) -> list[str]:
    """The client ids of a group's members, as the first broker knows them."""
    consumers = cluster.brokers[0].parts.consumers
    return cluster.call(lambda: [each.client.id for each in consumers.members(group)])


def forget_old(cluster: EmbeddedCluster, topic: str, queue_id: int = 0) -> int:
    """Have the only broker delete its oldest files; where a queue begins then."""

    def clean() -> int:
        store = cluster.brokers[0].parts.store
        store.settle()
        store.clean()
        return store.min_offset(topic, queue_id)

    return cluster.call(clean)
