"""Order locks: one owner at a time, however long anybody is paused."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orbitmq.broker.broker import Broker
from orbitmq.broker.groups import LONGEST_ID
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue, SubscriptionData, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import GROUP, RawClient
from tests.support.store import HandClock

ORDERS = SubscriptionData(topic="orders", sub_string="*", sub_version=1)


def has_queues(broker: Broker, topic: str, count: int) -> None:
    config = TopicConfig(topic_name=topic, read_queue_nums=count, write_queue_nums=count)
    broker.parts.topics.update(config, now=broker.parts.clock.now())


def at(topic: str, *numbers: int, broker: str = "broker-a") -> tuple[MessageQueue, ...]:
    return tuple(
        MessageQueue(broker_name=broker, queue_id=number, topic=topic) for number in numbers
    )


def batch(queues: Sequence[MessageQueue], group: str = GROUP, client_id: str = "me") -> bytes:
    return encode_body(LockBatch(client_id=client_id, consumer_group=group, mq_set=tuple(queues)))


async def ask(
    client: RawClient, queues: Sequence[MessageQueue], group: str = GROUP, client_id: str = "me"
) -> Command:
    return await client.connection.request(
        RequestCode.LOCK_BATCH_MQ, body=batch(queues, group, client_id), timeout=30
    )


async def lock(
    client: RawClient, *queues: MessageQueue, group: str = GROUP, client_id: str = "me"
) -> tuple[MessageQueue, ...]:
    answer = await ask(client, queues, group, client_id)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return decode_body(LockedQueues, answer.body).lock_ok_mq_set


async def test_order_locks_are_granted_after_the_pause_of_a_start(start_broker, open_client):
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock}, lock_pause=30)
    has_queues(broker, "orders", 4)
    client = await open_client(broker)
    queue = at("orders", 0)

    too_early = await lock(client, *queue)
    clock.advance(30)
    granted = [await lock(client, *queue, client_id=who) for who in ("me", "you")]
    clock.advance(61)

    assert (too_early, granted) == ((), [queue, ()])
    assert await lock(client, *queue, client_id="you") == queue


async def test_only_queues_of_this_broker_are_locked(broker, client):
    has_queues(broker, "orders", 4)
    there = at("orders", 0, 3)

    granted = await lock(
        client,
        *at("orders", -1, 4, 2**31 - 1),
        *at("nothing", 0),
        *at("orders", 0, broker="broker-b"),
        *at("%RETRY%somebody", 0),
        *there,
    )

    assert granted == there
    assert len(broker.parts.locks) == 2


async def test_locks_are_renewed_after_a_restart_before_the_first_heartbeat(
    start_broker, open_client
):
    first = await start_broker()
    client = await open_client(first)
    await client.heartbeat("me", ORDERS)
    await client.stored("orders")
    queues = (*at("orders", 0), *at("%RETRY%" + GROUP, 0))
    before = await lock(client, *queues)
    await client.close()
    await first.stop()

    client = await open_client(await start_broker(auto_create_group=False))

    assert before == queues
    assert await lock(client, *queues) == queues


async def test_a_group_that_is_not_there_and_may_not_be_made_locks_nothing(
    start_broker, open_client
):
    broker = await start_broker(auto_create_group=False)
    has_queues(broker, "orders", 4)
    client = await open_client(broker)

    absent = await ask(client, at("orders", 0))
    impossible = await ask(client, at("orders", 0), "no such\n" * 1000)

    assert absent.code == impossible.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert f"orbitmq group create {GROUP}" in (absent.remark or "")
    assert len(broker.parts.locks) == 0
    assert len(impossible.remark or "") < 2_000


async def test_too_many_locks_are_logged(start_broker, open_client, caplog):
    caplog.set_level(logging.WARNING)
    broker = await start_broker(max_order_locks=2)
    has_queues(broker, "orders", 4)
    client = await open_client(broker)

    first = await lock(client, *at("orders", 0, 1, 2))
    other = await lock(client, *at("orders", 0), group="others")
    renewed = await lock(client, *at("orders", 1))

    assert (first, other, renewed) == (at("orders", 0, 1), (), at("orders", 1))
    assert [text for text in caplog.messages if "max_order_locks" in text] == [
        "2 queues are locked, and more are not granted (max_order_locks, time 1)"
    ]


async def test_a_request_for_locks_has_limits(broker, client):
    has_queues(broker, "orders", 4)
    longest, longer = "x" * LONGEST_ID, "x" * (LONGEST_ID + 1)

    granted = await lock(client, *at("orders", 0), client_id=longest)
    queues = at("orders", *range(16_385))
    many = await ask(client, queues)
    given_back = await client.connection.request(
        RequestCode.UNLOCK_BATCH_MQ, body=batch(queues, client_id="them"), timeout=30
    )
    refused = [
        await ask(client, at("orders", 1), client_id=longer),
        await client.connection.request(
            RequestCode.UNLOCK_BATCH_MQ, body=batch(at("orders", 0), client_id=longer), timeout=30
        ),
    ]

    assert granted == at("orders", 0)
    assert "16384 are allowed" in (many.remark or "")
    assert given_back.code == ResponseCode.SUCCESS, given_back.remark
    assert {answer.code for answer in refused} == {ResponseCode.INVALID_PARAMETER}
    assert len(broker.parts.locks) == 1
