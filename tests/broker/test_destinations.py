"""What was parked for a topic that is deleted meanwhile, or that a crash made forgotten."""

from __future__ import annotations

import logging

import pytest

from orbitmq.broker.metrics import Metrics
from orbitmq.wire.codes import RequestCode, ResponseCode, TransactionState
from orbitmq.wire.headers import TopicRequest
from tests.support.broker import RawClient, until
from tests.support.delivery import AskedProducer, HandBroker, end_header, hand_broker, send_half
from tests.support.prometheus import parse_metrics

#: Of a message that is due in a second, by a delay level and by a timer.
DELAYED = [{"DELAY": "1"}, {"TIMER_DELAY_SEC": "1"}]
IDS = ["level", "timer"]


async def delete(client: RawClient, topic: str = "orders") -> None:
    answer = await client.connection.request(
        RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic=topic)
    )
    assert answer.code == ResponseCode.SUCCESS


async def dropped(hand: HandBroker) -> float:
    page = parse_metrics(b"".join(await Metrics(hand.parts).text()))
    return page["orbitmq_parked_dropped_total"].value()


def look(hand: HandBroker, producer: AskedProducer) -> bool:
    """Have open half messages looked at; whether the producer was asked about one."""
    hand.parts.transactions.step(hand.clock.now())
    hand.parts.writes.finish()
    return bool(producer.questions)


def has_queues(hand: HandBroker, topic: str = "orders") -> bool:
    return any(queue.topic == topic for queue in hand.parts.store.queues())


@pytest.mark.parametrize("properties", DELAYED, ids=IDS)
async def test_a_deleted_topic_does_not_come_back_with_what_was_parked_for_it(
    tmp_path, properties, caplog
):
    async with hand_broker(tmp_path) as (hand, client):
        for _ in range(3):
            await client.stored("orders", properties=properties)
        await client.stored("others", b"stays", properties=properties)
        await delete(client)

        with caplog.at_level(logging.WARNING):
            hand.advance(2)

        assert "orders" not in hand.parts.topics
        assert not has_queues(hand)
        assert hand.bodies("others") == [b"stays"]
        assert await dropped(hand) == 3
        told = [record for record in caplog.records if "topic was deleted" in record.getMessage()]
        assert [record.__dict__["topic"] for record in told] == ["orders"]
        await hand.restart()
        hand.advance(2)
        assert "orders" not in hand.parts.topics
        assert not has_queues(hand)


@pytest.mark.parametrize("properties", DELAYED, ids=IDS)
async def test_a_topic_that_is_made_again_gets_what_was_sent_to_it_since(tmp_path, properties):
    async with hand_broker(tmp_path) as (hand, client):
        await client.stored("orders", b"before", properties=properties)
        await delete(client)
        await client.stored("orders", b"after", properties=properties)

        hand.advance(2)

        assert hand.bodies("orders") == [b"after"]
        assert await dropped(hand) == 1


@pytest.mark.parametrize("properties", DELAYED, ids=IDS)
async def test_a_deletion_is_remembered_by_a_broker_that_was_killed(tmp_path, properties):
    async with hand_broker(tmp_path) as (hand, client):
        await client.stored("orders", properties=properties)
        await delete(client)

        await hand.crash()
        hand.advance(2)

        assert not has_queues(hand)
        assert await dropped(hand) == 1


@pytest.mark.parametrize("properties", DELAYED, ids=IDS)
async def test_a_topic_that_a_crash_made_forgotten_is_made_again_for_what_was_parked(
    tmp_path, properties
):
    async with hand_broker(tmp_path) as (hand, client):
        await client.stored("orders", b"answered", queue_id=2, properties=properties)

        # The table of topics was not saved.
        await hand.crash()
        assert "orders" not in hand.parts.topics
        hand.advance(2)

        topic = hand.parts.topics.get("orders")
        assert topic is not None
        assert topic.read_queue_nums == 3
        assert hand.bodies("orders", 2) == [b"answered"]
        assert await dropped(hand) == 0


@pytest.mark.parametrize("is_asked", [False, True], ids=["not asked about", "asked about"])
async def test_the_commit_of_a_half_message_does_not_bring_a_deleted_topic_back(tmp_path, is_asked):
    async with hand_broker(tmp_path) as (hand, client):
        producer = await AskedProducer.join(hand.broker)
        await client.stored("orders")
        half = await send_half(producer, "orders", b"half", hand)
        await delete(client)

        if is_asked:
            # Whoever is asked about a half message ends a copy of it, which is younger.
            hand.clock.advance(60)
            await until(lambda: look(hand, producer))
            answer = await producer.answer_question(producer.questions[0], TransactionState.COMMIT)
        else:
            answer = await producer.end(end_header(half, TransactionState.COMMIT))

        assert answer.code == ResponseCode.SUCCESS
        assert "orders" not in hand.parts.topics
        assert not has_queues(hand)
        assert await dropped(hand) == 1
        await producer.close()
