"""Timer messages: delivered at their millisecond, recalled before, and never lost."""

from __future__ import annotations

import base64
import errno
import itertools
import struct
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.broker.settings import DelaySettings
from orbitmq.broker.timers import RecallHandle, decode_handle
from orbitmq.broker.writes import Draft
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.message.properties import property_value
from orbitmq.store.settings import FlushPolicy, RetentionSettings
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import RecallMessageRequest, RecallMessageResponse
from tests.support.broker import SMALL_STORE, RawClient, messages_in
from tests.support.delivery import HandBroker, hand_broker
from tests.support.store import FailingFiles, HandClock, with_policy, with_retention

TIMER = "rmq_sys_wheel_timer"
DAY = 86_400.0


async def recall(client: RawClient, handle: str | None, topic: str = "T") -> Command:
    header = RecallMessageRequest(topic=topic, recall_handle=handle or "", producer_group="makers")
    return await client.connection.request(RequestCode.RECALL_MESSAGE, header, timeout=10)


# Asking for a time.


@pytest.mark.parametrize(
    ("properties", "after"),
    [
        ({"TIMER_DELAY_SEC": "3"}, 3.0),
        ({"TIMER_DELAY_MS": "1234"}, 1.234),
        ({"TIMER_DELIVER_MS": "1700000002500"}, 2.5),
        ({"TIMER_DELAY_MS": "9000", "TIMER_DELAY_SEC": "3"}, 3.0),
        ({"TIMER_DELIVER_MS": "1700000009000", "TIMER_DELAY_MS": "1234"}, 1.234),
    ],
)
async def test_a_message_is_delivered_at_its_time_and_not_a_millisecond_before(
    hand, hand_client, properties, after
):
    answer = await hand_client.stored("T", b"later", properties=properties, queue_id=1)
    parked = hand.messages(TIMER)[0]

    hand.advance(after - 0.001)
    early = hand.bodies("T", 1)
    hand.advance(0.001)
    message = hand.messages("T", 1)[0]

    assert early == []
    assert message.body == b"later"
    assert message.unique_id == answer.transaction_id
    assert parked.properties["TIMER_OUT_MS"] == str(1_700_000_000_000 + round(after * 1000))
    assert (parked.properties["REAL_TOPIC"], parked.properties["REAL_QID"]) == ("T", "1")


async def test_a_delay_that_began_within_a_millisecond_does_not_end_before_it_is_over(
    hand, hand_client
):
    hand.advance(0.0007)
    await hand_client.stored("T", b"later", properties={"TIMER_DELAY_MS": "1000"})

    hand.advance(0.9995)
    early = hand.bodies("T")
    hand.advance(0.0008)

    assert early == []
    assert hand.bodies("T") == [b"later"]


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_MS": "0"},
        {"TIMER_DELAY_SEC": "-5"},
        {"TIMER_DELIVER_MS": "1700000000000"},
        {"TIMER_DELIVER_MS": "12"},
    ],
)
async def test_a_message_whose_time_has_come_is_an_ordinary_one(hand, hand_client, properties):
    answer = await hand_client.stored("T", properties=properties)

    assert answer.recall_handle is None
    assert len(hand.messages("T")) == 1


async def test_a_delay_level_counts_more_than_a_time(hand, hand_client):
    await hand_client.stored("T", properties={"DELAY": "1", "TIMER_DELAY_SEC": "100"})

    parked = hand.messages("SCHEDULE_TOPIC_XXXX", 0)[0]

    assert "TIMER_DELAY_SEC" not in parked.properties
    assert hand.messages(TIMER) == []


@pytest.mark.parametrize(
    ("properties", "changes", "code", "text"),
    [
        ({"TIMER_DELAY_SEC": "soon"}, {}, ResponseCode.MESSAGE_ILLEGAL, "soon"),
        ({"TIMER_DELAY_MS": "1_000"}, {}, ResponseCode.MESSAGE_ILLEGAL, "1_000"),
        ({"TIMER_DELAY_MS": "9" * 40}, {}, ResponseCode.MESSAGE_ILLEGAL, "number"),
        ({"TIMER_DELAY_SEC": "259201"}, {}, ResponseCode.MESSAGE_ILLEGAL, "259200"),
        (
            {"TIMER_DELAY_SEC": "3601"},
            {"store": with_retention(SMALL_STORE, RetentionSettings(keep=3600))},
            ResponseCode.MESSAGE_ILLEGAL,
            "3600",
        ),
        ({"TIMER_DELAY_SEC": "1"}, {"timer": False}, ResponseCode.SYSTEM_ERROR, "not enabled"),
        (
            {"TIMER_DELAY_SEC": "-1", "TIMER_DEL_UNIQKEY": "T_x"},
            {},
            ResponseCode.MESSAGE_ILLEGAL,
            "recall",
        ),
    ],
)
async def test_a_time_that_cannot_be_is_refused(tmp_path, properties, changes, code, text):
    async with hand_broker(tmp_path, **changes) as (broker, client):
        answer = await client.send("T", properties=properties)

        assert answer.code == code
        assert text in (answer.remark or "")
        assert broker.messages(TIMER) == []


async def test_too_many_pending_messages_are_refused(tmp_path):
    delays = DelaySettings(timer_max_pending=2)
    async with hand_broker(tmp_path, delays=delays) as (broker, client):
        for _ in range(2):
            await client.stored("T", properties={"TIMER_DELAY_SEC": "1"})
        broker.step()

        refused = await client.send("T", properties={"TIMER_DELAY_SEC": "1"})
        broker.advance(1)
        again = await client.send("T", properties={"TIMER_DELAY_SEC": "1"})

        assert refused.code == ResponseCode.SYSTEM_ERROR
        assert "flow control" in (refused.remark or "")
        assert again.code == ResponseCode.SUCCESS


# Recalling.


async def test_a_recalled_message_is_not_delivered_and_others_of_its_time_are(hand, hand_client):
    kept = await hand_client.stored("T", b"kept", properties={"TIMER_DELAY_SEC": "5"})
    taken = await hand_client.stored("T", b"taken", properties={"TIMER_DELAY_SEC": "5"})

    answer = await recall(hand_client, taken.recall_handle)
    hand.advance(5)

    assert answer.code == ResponseCode.SUCCESS
    assert answer.header(RecallMessageResponse).msg_id == taken.transaction_id
    assert kept.recall_handle != taken.recall_handle
    assert hand.bodies("T") == [b"kept"]
    assert hand.parts.timers.pending == 0


def test_a_handle_is_written_as_apache_does():
    handle = RecallHandle("T", "broker-a", 1_700_000_002_999, "ABCD")

    text = handle.encode()

    assert base64.urlsafe_b64decode(text) == b"v1 T broker-a 1700000003000 ABCD"
    assert decode_handle(text) == handle
    assert decode_handle(text.rstrip("=")) == handle


def handle_of(topic: str = "T", broker: str = "broker-a", after_ms: int = 5000) -> str:
    return RecallHandle(topic, broker, 1_700_000_000_000 + after_ms, "ABCD").encode()


@pytest.mark.parametrize(
    ("handle", "topic", "changes", "code"),
    [
        (handle_of(), "T", {"delays": DelaySettings(recall=False)}, ResponseCode.NO_PERMISSION),
        (handle_of(), "T", {"broker_id": 1}, ResponseCode.SLAVE_NOT_AVAILABLE),
        (handle_of(), "T", {"permission": 4}, ResponseCode.SERVICE_NOT_AVAILABLE),
        (handle_of("other"), "unknown", {}, ResponseCode.TOPIC_NOT_EXIST),
        (handle_of("other"), "T", {}, ResponseCode.ILLEGAL_OPERATION),
        (handle_of(broker="broker-b"), "T", {}, ResponseCode.ILLEGAL_OPERATION),
        (handle_of(after_ms=0), "T", {}, ResponseCode.ILLEGAL_OPERATION),
        (handle_of(after_ms=round(DAY * 4 * 1000)), "T", {}, ResponseCode.ILLEGAL_OPERATION),
        ("not base64!", "T", {}, ResponseCode.ILLEGAL_OPERATION),
        ("", "T", {}, ResponseCode.ILLEGAL_OPERATION),
        (base64.b64encode(b"v2 T b 1 x").decode(), "T", {}, ResponseCode.ILLEGAL_OPERATION),
        (base64.b64encode(b"v1 T broker-a x ABCD").decode(), "T", {}, 604),
        (base64.b64encode(b"\xff\xfe v1").decode(), "T", {}, ResponseCode.ILLEGAL_OPERATION),
    ],
)
async def test_a_recall_that_cannot_be_is_refused(hand, hand_client, handle, topic, changes, code):
    await hand_client.stored("T", b"so that the topic exists")
    await hand.restart(**changes)
    again = await RawClient.open(hand.broker)

    answer = await recall(again, handle, topic)
    await again.close()

    assert answer.code == code
    assert "recall" in (answer.remark or "")
    assert hand.messages(TIMER) == []


# What a stop, a crash and a wrong clock do.


def put(broker: HandBroker, body: bytes, after_ms: int) -> str | None:
    """Put a timer message without a connection; what it can be recalled with."""
    unique_id = b"ID" + body
    properties = b"UNIQ_KEY\x01%b\x02TIMER_DELAY_MS\x01%d\x02" % (unique_id, after_ms)
    draft = Draft("T", 0, body, properties, 0, broker.parts.store_host)
    broker.parts.writes.put(draft)
    broker.parts.writes.finish()
    return draft.recall_handle


def take_back(broker: HandBroker, handle: str) -> None:
    """Recall without a connection."""
    meant = decode_handle(handle)
    key = f"{meant.topic}_{meant.unique_id}".encode()
    properties = b"UNIQ_KEY\x01%b\x02TIMER_DEL_UNIQKEY\x01%b\x02" % (meant.unique_id.encode(), key)
    draft = Draft(meant.topic, 0, b"0", properties, 0, broker.parts.store_host)
    broker.parts.timers.park_until(draft, meant.due_ms)
    broker.parts.writes.put(draft, transform=False)
    broker.parts.writes.finish()


@settings(max_examples=25)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 5000)),
            st.tuples(st.just("recall"), st.integers(0, 100)),
            st.tuples(st.just("wait"), st.integers(1, 2500)),
            st.tuples(st.just("set back"), st.integers(1, 5000)),
            st.tuples(st.just("restart"), st.just(0)),
            st.tuples(st.just("crash"), st.just(0)),
        ),
        max_size=30,
    )
)
async def test_each_message_is_delivered_at_its_time_unless_it_was_recalled(steps):
    """Against a model: nothing is lost or early, and without a crash nothing comes twice."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        async with hand_broker(Path(folder)) as (broker, _):
            due: dict[bytes, int] = {}
            handles: dict[bytes, str] = {}
            delivered: set[bytes] = set()
            crashed = False
            for what, amount in steps:
                now_ms = milliseconds(broker.clock.now())
                if what == "send":
                    body = b"%d" % next(numbers)
                    handles[body] = put(broker, body, amount) or ""
                    due[body] = milliseconds_up(broker.clock.now()) + amount
                elif what == "recall":
                    open_ones = [body for body in due if body not in delivered]
                    if open_ones and due[open_ones[amount % len(open_ones)]] > now_ms:
                        body = open_ones[amount % len(open_ones)]
                        take_back(broker, handles[body])
                        del due[body]
                elif what == "wait":
                    broker.advance(amount / 1000)
                elif what == "set back":
                    broker.advance(-amount / 1000)
                elif what == "restart":
                    await broker.restart()
                    broker.step()
                else:
                    await broker.crash()
                    broker.step()
                    crashed = True
                now_ms = milliseconds(broker.clock.now())
                delivered |= {body for body, at in due.items() if at <= now_ms}
                found = broker.bodies("T")
                assert set(found) == delivered
                if not crashed:
                    assert len(found) == len(delivered)


async def test_after_a_clock_that_was_ahead_new_messages_are_not_taken_for_delivered(tmp_path):
    clock = HandClock()
    async with hand_broker(tmp_path, clock) as (broker, _):
        clock.advance(DAY)
        put(broker, b"tomorrow", 1000)
        broker.advance(1)
        clock.advance(-DAY)
        put(broker, b"today", 5000)
        broker.step()

        await broker.restart()
        broker.advance(10)

        assert broker.bodies("T") == [b"tomorrow", b"today"]


async def test_a_delivery_that_the_disk_refuses_is_tried_again(tmp_path):
    files = FailingFiles()
    async with hand_broker(tmp_path, files=files) as (broker, _):
        put(broker, b"a", 1000)
        put(broker, b"b", 1001)
        files.fail("pwrite", errno.ENOSPC)
        broker.advance(2)
        refused = broker.bodies("T")
        files.heal()

        await broker.restart()
        broker.advance(0.2)

        assert refused == []
        assert broker.bodies("T") == [b"a", b"b"]


async def test_a_queue_that_lost_its_end_is_read_anew(tmp_path):
    file = tmp_path / "config" / "timerOffset.json"
    file.parent.mkdir()
    file.write_text('{"firstPending":900,"scanned":1000,"deliveredMs":1900000000000}')

    async with hand_broker(tmp_path) as (broker, _):
        put(broker, b"a", 1000)
        broker.advance(1)

        assert broker.bodies("T") == [b"a"]


async def test_a_store_of_apaches_does_not_deliver_everything_again(tmp_path):
    async with hand_broker(tmp_path) as (broker, _):
        for seconds in (100, 200, 300):
            put(broker, b"%d" % seconds, seconds * 1000)
        await broker.restart()
        (tmp_path / "config" / "timerOffset.json").unlink()
        # Its wheel was read up to 215 s, and the queue up to the second message.
        checkpoint = struct.pack(">qqqq", 1_700_000_215_000, 0, 2, 2)
        (tmp_path / "config" / "timercheck").write_bytes(checkpoint.ljust(4096, b"\0"))

        await broker.crash()
        broker.advance(1000)

        assert broker.bodies("T") == [b"300"]


# In real time.


@pytest.mark.parametrize("policy", list(FlushPolicy))
async def test_a_message_arrives_within_100_ms_of_its_time_at_best_and_never_before(
    start_broker, open_client, policy
):
    broker = await start_broker(store=with_policy(SMALL_STORE, policy))
    client = await open_client(broker)
    consumer = await open_client(broker)
    await client.stored("T", b"so that the topic exists")
    # An alarm for later is set, and an earlier one has to go before it.
    await client.stored("T", properties={"TIMER_DELAY_SEC": "1000"})
    lateness_ms: list[float] = []

    for number in range(1, 40):
        due_ms = int(time.time() * 1000) + 100 + 10 * number
        await client.stored("T", properties={"TIMER_DELIVER_MS": str(due_ms)})
        answer = await consumer.pull("T", 0, number, hold=10)
        lateness_ms.append(time.time() * 1000 - due_ms)
        message = messages_in(answer)[0]
        assert property_value(message.raw_properties, "TIMER_OUT_MS") == str(due_ms)
        assert message.store_ms >= due_ms
        if number > 6 and min(lateness_ms) < 100:
            break

    assert min(lateness_ms) < 100
