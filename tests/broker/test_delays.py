"""Delay levels: parked, delivered when due, in order, and never lost."""

from __future__ import annotations

import errno
import itertools
import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.broker.metrics import Metrics
from orbitmq.broker.settings import DelaySettings
from orbitmq.broker.writes import Draft
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.wire.codes import RequestCode, ResponseCode, TransactionState
from orbitmq.wire.headers import TopicRequest
from tests.support.broker import RawClient, until
from tests.support.delivery import (
    AskedProducer,
    HandBroker,
    end_header,
    hand_broker,
    send_half,
    with_levels,
)
from tests.support.prometheus import parse_metrics
from tests.support.store import FailingFiles, HandClock


async def test_what_is_delivered_is_the_message_that_was_sent(hand, hand_client):
    answer = await hand_client.stored(
        "T", b"x", properties={"DELAY": "1", "TAGS": "a", "KEYS": "k"}, queue_id=1, flag=7
    )
    parked = hand.messages("SCHEDULE_TOPIC_XXXX", 0)[0]
    hand.advance(1)
    message = hand.messages("T", 1)[0]

    assert (answer.queue_id, answer.queue_offset) == (1, 0)
    assert parked.properties["REAL_TOPIC"] == "T"
    assert parked.properties["REAL_QID"] == "1"
    assert message.properties == parked.properties
    assert (message.tags, message.keys, message.flag) == ("a", "k", 7)
    assert message.unique_id == answer.transaction_id
    assert (message.born_ms, message.born_host) == (parked.born_ms, parked.born_host)
    assert message.store_ms == milliseconds(hand.clock.now())


@pytest.mark.parametrize(
    ("level", "code", "parked"),
    [
        ("99", ResponseCode.SUCCESS, ["18"]),
        ("0", ResponseCode.SUCCESS, []),
        ("-1", ResponseCode.SUCCESS, []),
        ("soon", ResponseCode.MESSAGE_ILLEGAL, []),
    ],
)
async def test_a_level_is_the_highest_at_most_and_must_be_a_number(
    hand, hand_client, level, code, parked
):
    answer = await hand_client.send("T", properties={"DELAY": level})

    assert answer.code == code
    found = [each.properties["DELAY"] for each in hand.messages("SCHEDULE_TOPIC_XXXX", 17)]
    assert found == parked


@settings(max_examples=15)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 4)),
            st.tuples(st.just("wait"), st.integers(1, 3000)),
            st.tuples(st.just("restart"), st.just(0)),
        ),
        max_size=30,
    )
)
async def test_each_message_is_delivered_once_in_order_and_at_its_time(steps):
    """Against a model, across stops: nothing is lost, early, late, twice or out of order."""
    delays = (0.5, 1.0, 2.5, 7.0)
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        async with hand_broker(Path(folder), store=with_levels(*delays)) as (broker, _):
            due: list[tuple[int, int, bytes]] = []
            for what, amount in steps:
                if what == "send":
                    body = b"%d" % next(numbers)
                    put(broker, amount, body)
                    begin_ms = milliseconds_up(broker.clock.now())
                    due.append((begin_ms + round(delays[amount - 1] * 1000), amount, body))
                elif what == "wait":
                    broker.advance(amount / 1000)
                else:
                    await broker.restart()
                    broker.step()
                now_ms = milliseconds(broker.clock.now())
                for level in range(1, 5):
                    expected = [body for at, of, body in due if of == level and at <= now_ms]
                    assert broker.bodies("T", level) == expected


def put(broker: HandBroker, level: int, body: bytes) -> None:
    """Put a delayed message without a connection; its queue says its level."""
    properties = b"DELAY\x01%d\x02" % level
    draft = Draft("T", level, body, properties, 0, broker.parts.store_host)
    broker.parts.writes.put(draft)
    broker.parts.writes.finish()


async def test_after_a_crash_what_was_not_saved_is_delivered_again_and_nothing_is_lost(hand):
    for number in range(3):
        put(hand, 1, b"%d" % number)
    hand.advance(1)
    put(hand, 1, b"3")

    await hand.crash()
    hand.advance(1)

    assert hand.bodies("T", 1) == [b"0", b"1", b"2", b"0", b"1", b"2", b"3"]


async def test_progress_is_saved_every_few_seconds(tmp_path):
    delays = DelaySettings(save_interval=0.01)
    async with hand_broker(tmp_path, delays=delays) as (broker, _):
        put(broker, 1, b"once")
        broker.advance(1)
        file = tmp_path / "config" / "delayOffset.json"
        await until(lambda: file.exists() and b'"1":1' in file.read_bytes())

        await broker.crash()
        broker.step()

        assert broker.bodies("T", 1) == [b"once"]


async def test_a_delivery_that_the_disk_refuses_is_tried_again_without_spinning(tmp_path):
    files = FailingFiles()
    async with hand_broker(tmp_path, files=files) as (broker, _):
        put(broker, 1, b"a")
        put(broker, 1, b"b")
        files.fail("pwrite", errno.ENOSPC)
        broker.advance(1)
        refused = broker.bodies("T", 1)
        again = broker.parts.delays.step(broker.clock.now())
        files.heal()

        broker.advance(0.099)
        too_soon = broker.bodies("T", 1)
        broker.advance(0.001)

        assert refused == []
        assert again == pytest.approx(broker.clock.now(), abs=0.002)
        assert too_soon == []
        assert broker.bodies("T", 1) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("topic", "properties"),
    [
        ("SCHEDULE_TOPIC_XXXX", b""),
        ("SCHEDULE_TOPIC_XXXX", b"REAL_TOPIC\x01RMQ_SYS_TRANS_HALF_TOPIC\x02REAL_QID\x010\x02"),
        ("rmq_sys_wheel_timer", b""),
    ],
    ids=["no place", "a place of the broker", "no time"],
)
async def test_a_parked_message_that_cannot_be_delivered_does_not_stop_the_others(
    hand, caplog, topic, properties
):
    stray = Draft(topic, 0, b"stray", properties, 0, hand.parts.store_host)
    hand.parts.writes.put(stray, transform=False)
    put(hand, 1, b"good")

    hand.advance(2)

    assert hand.bodies("T", 1) == [b"good"]
    assert any(record.levelname == "ERROR" for record in caplog.records)


async def test_a_saved_offset_outside_of_the_queue_is_corrected(tmp_path):
    file = tmp_path / "config" / "delayOffset.json"
    file.parent.mkdir()
    file.write_text('{"offsetTable":{1:77,2:0}}')

    async with hand_broker(tmp_path) as (broker, _):
        put(broker, 1, b"a")
        broker.advance(1)

        assert broker.bodies("T", 1) == [b"a"]


async def test_a_message_stored_by_a_clock_that_was_ahead_does_not_wait_for_it(tmp_path):
    clock = HandClock()
    async with hand_broker(tmp_path, clock) as (broker, _):
        clock.advance(86_400)
        put(broker, 2, b"from tomorrow")
        clock.advance(-86_400)

        broker.step()

        assert broker.bodies("T", 2) == [b"from tomorrow"]


async def test_a_clock_set_back_a_little_delivers_nothing_early(hand):
    put(hand, 2, b"x")

    hand.advance(-0.5)
    at_once = hand.bodies("T", 2)
    hand.advance(5.4)
    before = hand.bodies("T", 2)
    hand.advance(0.1)

    assert at_once == before == []
    assert hand.bodies("T", 2) == [b"x"]


#: Of a message that is due in a second, by a delay level and by a timer.
DELAYED = [{"DELAY": "1"}, {"TIMER_DELAY_SEC": "1"}]
IDS = ["level", "timer"]


async def delete(client: RawClient) -> None:
    answer = await client.connection.request(
        RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic="orders")
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


def has_queues(hand: HandBroker) -> bool:
    return any(queue.topic == "orders" for queue in hand.parts.store.queues())


@pytest.mark.parametrize("properties", DELAYED, ids=IDS)
async def test_a_deleted_topic_does_not_come_back_with_what_was_parked_for_it(
    hand, hand_client, properties, caplog
):
    for _ in range(3):
        await hand_client.stored("orders", properties=properties)
    await hand_client.stored("others", b"stays", properties=properties)
    await delete(hand_client)

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
async def test_after_a_deletion_and_a_crash_a_topic_gets_only_what_was_sent_to_it_since(
    hand, hand_client, properties
):
    await hand_client.stored("orders", b"before", properties=properties)
    await delete(hand_client)
    await hand_client.stored("orders", b"after", properties=properties)

    await hand.crash()
    hand.advance(2)

    assert hand.bodies("orders") == [b"after"]
    assert await dropped(hand) == 1


@pytest.mark.parametrize("properties", DELAYED, ids=IDS)
async def test_a_topic_that_a_crash_made_forgotten_is_made_again_for_what_was_parked(
    hand, hand_client, properties
):
    await hand_client.stored("orders", b"answered", queue_id=2, properties=properties)

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
async def test_the_commit_of_a_half_message_does_not_bring_a_deleted_topic_back(
    hand, hand_client, is_asked
):
    producer = await AskedProducer.join(hand.broker)
    await hand_client.stored("orders")
    half = await send_half(producer, "orders", b"half", hand)
    await delete(hand_client)

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
