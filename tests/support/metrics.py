"""A broker to which everything happens that there are metrics for."""

from __future__ import annotations

from orbitmq.broker.broker import Broker
from orbitmq.clock import milliseconds
from orbitmq.message.ids import decode_offset_id
from orbitmq.wire.bodies import SubscriptionData, SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode, TransactionState
from orbitmq.wire.headers import ConsumerSendBackRequest, CreateTopicRequest
from tests.support.broker import GROUP, RawClient
from tests.support.delivery import AskedProducer, HandBroker, end_header, send_half


async def use_in_every_way(hand: HandBroker, client: RawClient, producer: AskedProducer) -> None:
    """Everything that there are metrics for happens at least once."""
    header = CreateTopicRequest(
        topic="sagas",
        default_topic="TBW102",
        read_queue_nums=1,
        write_queue_nums=1,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    await client.connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
    await client.heartbeat("c", wanting("orders"))
    stored = await client.stored("orders", b"12345")
    for _ in range(2):
        await client.stored("dropped", properties={"__DEDUP_ID": "a"})
    now_ms = milliseconds(hand.clock.now())
    await client.stored("orders", b"later", properties={"TIMER_DELIVER_MS": str(now_ms + 1000)})
    await client.stored("orders", b"much later", properties={"TIMER_DELAY_SEC": "1000"})
    hand.advance(2)
    for state in (TransactionState.COMMIT, TransactionState.ROLLBACK):
        await producer.end(end_header(await send_half(producer, "sagas", b"x", hand), state))
    await send_half(producer, "sagas", b"open", hand)
    has_read(hand.broker, "orders", 0)
    await client.pull("orders", max_msg_nums=1)
    back = ConsumerSendBackRequest(
        offset=decode_offset_id(stored.msg_id).offset, group=GROUP, delay_level=-1
    )
    await client.connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, back)


def wanting(topic: str, expression: str = "*") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=expression, sub_version=1)


def has_read(broker: Broker, topic: str, offset: int, group: str = GROUP) -> None:
    """Let a group have progress in the first queue of a topic."""
    parts = broker.parts
    if group not in parts.groups:
        parts.groups.update(SubscriptionGroupConfig(group_name=group), now=0.0)
    parts.progress.reset(topic, group, 0, offset)
    parts.progress.take_reset(topic, group, 0)
