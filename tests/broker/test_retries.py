"""Failed messages: the schedule of their retries, and what becomes a dead letter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.parked import copied, park
from orbitmq.broker.retries import DLQ_REASON, PUT_OFF, Failure
from orbitmq.broker.settings import SendSettings
from orbitmq.message.properties import decode_properties
from orbitmq.message.record import MAX_PROPERTIES
from orbitmq.message.stored import StoredMessage
from orbitmq.wire.bodies import MessageQueue, SubscriptionGroupConfig
from orbitmq.wire.codes import ResponseCode
from tests.support.broker import GROUP, RawClient
from tests.support.delivery import HandBroker, hand_broker, send_back
from tests.support.store import FailingFiles

RETRY = "%RETRY%" + GROUP
DEAD = "%DLQ%" + GROUP


@pytest.mark.feature("F2")
async def test_a_copy_is_stored_for_the_group_and_the_message_stays_as_it_is(hand, hand_client):
    sent = await hand_client.stored(
        "orders", b"bad", properties={"TAGS": "a", "KEYS": "k1 k2", "mine": "x"}, queue_id=3
    )
    original = hand.messages("orders", 3)[0]
    record = original.encode()

    answer = await send_back(hand_client, original)
    parked = hand.messages("SCHEDULE_TOPIC_XXXX", 2)[0]
    hand.advance(10)
    copy = hand.messages(RETRY)[0]

    assert answer.code == ResponseCode.SUCCESS
    assert (parked.reconsume_times, parked.properties["DELAY"]) == (1, "3")
    assert copy.reconsume_times == 1
    assert copy.body == b"bad"
    assert copy.unique_id == sent.transaction_id
    assert copy.properties["RETRY_TOPIC"] == "orders"
    assert copy.properties["ORIGIN_MESSAGE_ID"] == sent.msg_id
    assert copy.properties["WAIT"] == "false"
    assert {name: copy.properties[name] for name in ("TAGS", "KEYS", "mine")} == {
        "TAGS": "a",
        "KEYS": "k1 k2",
        "mine": "x",
    }
    assert (copy.born_ms, copy.born_host) == (original.born_ms, original.born_host)
    assert hand.messages("orders", 3)[0].encode() == record


@pytest.mark.feature("F6")
@pytest.mark.parametrize(
    ("by_group", "by_consumer", "allowed"), [(16, None, 16), (2, None, 2), (2, 5, 5), (16, 0, 0)]
)
async def test_the_group_and_the_consumer_say_after_how_many_attempts_a_message_is_dead(
    hand, hand_client, by_group, by_consumer, allowed
):
    hand.parts.groups.update(
        SubscriptionGroupConfig(group_name=GROUP, retry_max_times=by_group), now=0
    )
    await hand_client.stored("orders", b"bad")
    message = hand.messages("orders")[0]

    for _ in range(allowed):
        await send_back(hand_client, message, max_reconsume_times=by_consumer)
        hand.advance(7200)
        message = hand.messages(RETRY)[-1]
    alive = hand.messages(DEAD)
    await send_back(hand_client, message, max_reconsume_times=by_consumer)

    assert alive == []
    assert [dead.body for dead in hand.messages(DEAD)] == [b"bad"]
    topic = hand.parts.topics.get(DEAD)
    assert topic is not None
    assert (topic.read_queue_nums, topic.perm) == (1, 6)


async def test_a_consumer_may_name_a_delay(hand, hand_client):
    await hand_client.stored("orders", b"bad")

    hand.advance(0.0007)
    await send_back(hand_client, hand.messages("orders")[0], extra={"delayMs": "1234"})
    hand.advance(1.2335)
    early = hand.bodies(RETRY)
    hand.advance(0.0008)

    assert early == []
    assert hand.bodies(RETRY) == [b"bad"]
    assert hand.messages(RETRY)[0].reconsume_times == 1


async def test_a_consumer_may_give_up_at_once_and_say_why(hand, hand_client):
    await hand_client.stored("orders", b"bad")

    await send_back(
        hand_client,
        hand.messages("orders")[0],
        level=-1,
        extra={"reason": "ValueError: no such\tcustomer\n  at line 3\x02DELAY\x011"},
    )
    dead = hand.messages(DEAD)[0]

    assert dead.properties[DLQ_REASON] == "ValueError: no such customer at line 3 DELAY 1"
    assert dead.properties["DELAY"] == "0"
    assert dead.properties["DLQ_ORIGIN_TOPIC"] == "orders"


LONG_REASON = "ValueError: " + "é" * 900


async def large(broker: HandBroker, client: RawClient, size: int) -> StoredMessage:
    """A message of which the stored properties take so many bytes."""
    await client.stored("orders", b"bad", properties={"mine": "x"})
    overhead = len(broker.messages("orders")[-1].raw_properties) - 1
    await client.stored("orders", b"bad", properties={"mine": "x" * (size - overhead)})
    found = broker.messages("orders")[-1]
    assert len(found.raw_properties) == size
    return found


@pytest.mark.parametrize("size", [32_700, MAX_PROPERTIES - 1, MAX_PROPERTIES])
@pytest.mark.parametrize("extra", [{}, {"delayMs": "5000"}])
async def test_a_message_without_room_for_a_retry_is_a_dead_letter(hand, hand_client, size, extra):
    message = await large(hand, hand_client, size)

    answer = await send_back(hand_client, message, extra={"reason": LONG_REASON} | extra)
    hand.advance(60)

    assert answer.code == ResponseCode.SUCCESS
    assert hand.messages(RETRY) == []
    (dead,) = hand.messages(DEAD)
    assert dead.properties["mine"] == message.properties["mine"]
    assert len(dead.raw_properties) <= MAX_PROPERTIES


@given(
    size=st.integers(MAX_PROPERTIES - 400, MAX_PROPERTIES),
    reason=st.text(max_size=1200),
    topic=st.text("abc", min_size=1, max_size=120),
    level=st.sampled_from([-1, 0, 3]),
)
def test_whatever_a_message_carries_there_is_a_copy_of_it_that_fits(size, reason, topic, level):
    raw = b"mine\x01" + b"x" * (size - 6) + b"\x02"
    message = StoredMessage.build(
        topic=topic, stored_body=b"bad", properties=decode_properties(raw)
    )
    failure = Failure(message, level, 16, reason).for_retry_in(RETRY)

    draft = failure.dead_letter(DEAD) if failure.is_final else failure.retry(RETRY, 0)
    if not failure.is_final:
        park(draft, "SCHEDULE_TOPIC_XXXX", 2)
        found = decode_properties(draft.properties)
        assert (found["RETRY_TOPIC"], found["DELAY"]) == (topic, str(level or 3))

    assert len(draft.properties) <= MAX_PROPERTIES
    assert decode_properties(draft.properties)["mine"] == "x" * (size - 6)


async def test_a_group_without_retry_queues_stores_nothing(hand, hand_client):
    hand.parts.groups.update(SubscriptionGroupConfig(group_name=GROUP, retry_queue_nums=0), now=0)
    await hand_client.stored("orders", b"bad")
    end = hand.parts.store.statistics().log_end

    answer = await send_back(hand_client, hand.messages("orders")[0])

    assert answer.code == ResponseCode.SUCCESS
    assert hand.parts.store.statistics().log_end == end
    assert RETRY not in hand.parts.topics


@pytest.mark.parametrize(
    ("said", "kept"),
    [(None, "its consumer, in order, gave it up"), ("out of stock", "out of stock")],
)
async def test_a_message_that_a_consumer_in_order_gives_up_keeps_its_origin(
    hand, hand_client, said, kept
):
    queue = MessageQueue(topic="orders", broker_name="broker-a", queue_id=0)
    hand.parts.locks.lock(GROUP, "consumer@1", [queue], hand.clock.monotonic())

    await hand_client.stored(
        RETRY,
        b"bad",
        properties={"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "AB", DLQ_REASON: said},
    )
    dead = hand.messages(DEAD)[0]

    assert dead.properties["DLQ_ORIGIN_TOPIC"] == "orders"
    assert dead.properties["DLQ_ORIGIN_MESSAGE_ID"] == "AB"
    assert dead.properties[DLQ_REASON] == kept
    assert hand.messages(RETRY) == []


async def test_a_message_that_nobody_has_tried_waits_also_if_its_group_consumes_in_order(
    hand, hand_client
):
    queue = MessageQueue(topic="orders", broker_name="broker-a", queue_id=0)
    hand.parts.locks.lock(GROUP, "consumer@1", [queue], hand.clock.monotonic())
    properties = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "AB", PUT_OFF: "true"}

    await hand_client.stored(RETRY, b"held", properties=properties, reconsume_times=3)
    await hand_client.stored(
        RETRY, b"tried", properties=properties, reconsume_times=9, max_reconsume_times=8
    )
    (waits,), (dead,) = hand.messages(RETRY), hand.messages(DEAD)

    assert (waits.body, waits.reconsume_times) == (b"held", 3)
    assert dead.body == b"tried"
    assert PUT_OFF not in waits.properties
    assert PUT_OFF not in dead.properties


@pytest.mark.parametrize(
    ("changes", "fields", "code"),
    [
        ({"broker_id": 1}, {}, ResponseCode.SYSTEM_ERROR),
        ({"permission": 4}, {}, ResponseCode.NO_PERMISSION),
        ({"auto_create_group": False}, {}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({}, {"group": "not a group"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
    ],
)
async def test_what_cannot_be_sent_back_is_refused(hand, hand_client, changes, fields, code):
    await hand_client.stored("orders", b"bad")
    message = hand.messages("orders")[0]
    await hand.restart(**changes)
    again = await RawClient.open(hand.broker)

    answer = await send_back(again, message, **fields)
    await again.close()

    assert answer.code == code
    assert hand.messages("SCHEDULE_TOPIC_XXXX", 2) == []


async def test_a_send_back_that_the_disk_refuses_is_answered_with_the_status(tmp_path):
    files = FailingFiles()
    async with hand_broker(tmp_path, files=files) as (broker, client):
        await client.stored("orders", b"bad")
        message = broker.messages("orders")[0]
        files.fail("pwrite")

        answer = await send_back(client, message)
        files.heal()

        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert (answer.remark or "").startswith("SERVICE_NOT_AVAILABLE")


async def test_a_committed_message_that_fails_is_retried_like_any_other(tmp_path):
    """Its properties still say that it was a half message once."""
    async with hand_broker(tmp_path, send=SendSettings()) as (broker, client):
        await client.stored("orders", b"x")
        original = broker.messages("orders")[0]
        committed = client_copy(broker, original)

        retried = await send_back(client, committed)
        dead = await send_back(client, committed, level=-1)
        broker.advance(10)

        assert (retried.code, dead.code) == (0, 0)
        assert broker.bodies(RETRY) == [b"x"]
        assert broker.bodies(DEAD) == [b"x"]
        assert broker.messages("RMQ_SYS_TRANS_HALF_TOPIC") == []


def client_copy(broker: HandBroker, original: StoredMessage) -> StoredMessage:
    """The message as a transaction would have committed it."""
    draft = copied(original, "orders", 1)
    draft.properties += b"TRAN_MSG\x01true\x02"
    draft.sys_flag |= 8
    broker.parts.writes.put(draft, transform=False)
    return broker.messages("orders", 1)[0]
