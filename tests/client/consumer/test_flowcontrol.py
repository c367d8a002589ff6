"""How far fetching runs ahead of consuming."""

from __future__ import annotations

import logging

import pytest

from orbitmq.client.consumer.pull import EVERY, PullDelay, PullDelayCounts
from orbitmq.client.consumer.settings import FlowLimits, FlowReason, FlowSettings, PullSettings
from orbitmq.client.consumer.window import Window
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.message.stored import StoredMessage
from orbitmq.wire.headers import PullMessageRequest
from tests.support.broker import RawClient, until
from tests.support.pulling import TOPIC, Found, Taker, pulling, record, records, scripted

DEADLINE = 20.0
MIB = 1024 * 1024
QUEUE = Queue(TOPIC, "broker-a", 0)
#: 50 ms are the default, which these tests do not wait for a thousand times.
QUICK = PullSettings(hold=1.0, timeout=5.0, flow_delay=0.001)


def window_of(*offsets: int, body: bytes = b"") -> Window:
    window = Window()
    window.add(
        [
            ReceivedMessage(
                StoredMessage.build(topic=TOPIC, stored_body=body, queue_offset=offset), QUEUE
            )
            for offset in offsets
        ]
    )
    return window


def endless(pull: PullMessageRequest) -> Found:
    """One message more, whatever is asked."""
    return Found(pull.queue_offset + 1, records(pull.queue_offset))


@pytest.mark.feature("C1")
def test_more_than_a_thousand_cached_messages_are_too_many():
    limits = FlowSettings().limits(1)

    assert limits.exceeded_by(window_of(*range(1000))) is None
    assert limits.exceeded_by(window_of(*range(1001))) is FlowReason.MESSAGES


@pytest.mark.feature("C2")
def test_more_than_a_hundred_mib_of_cached_messages_are_too_much():
    window = window_of(1, body=b"x" * 1000)
    size = window.size

    assert FlowSettings().limits(1).size == 100 * MIB
    assert FlowLimits(messages=10, size=size, span=10).exceeded_by(window) is None
    assert FlowLimits(messages=10, size=size - 1, span=10).exceeded_by(window) is FlowReason.BYTES


@pytest.mark.feature("C3")
def test_a_span_of_more_than_two_thousand_offsets_is_too_much_unless_in_order():
    limits = FlowSettings().limits(1)

    assert limits.exceeded_by(window_of(0, 2000)) is None
    assert limits.exceeded_by(window_of(0, 2001)) is FlowReason.SPAN
    assert FlowSettings().limits(1, is_orderly=True).exceeded_by(window_of(0, 9999)) is None


def test_limits_of_a_topic_are_shared_by_the_queues_of_the_consumer():
    settings = FlowSettings(max_cached_messages_per_topic=100, max_cached_bytes_per_topic=MIB)

    assert settings.limits(4) == FlowLimits(25, MIB // 4, 2000)
    assert settings.limits(1000).messages == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_cached_messages", 0),
        ("max_cached_messages", 65_536),
        ("max_cached_bytes", 1025 * MIB),
        ("max_span", 0),
        ("max_cached_messages_per_topic", 0),
        ("max_cached_bytes_per_topic", -1),
    ],
)
def test_a_limit_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(SettingError, match=f"flow.{name} must be 1 to"):
        FlowSettings(**{name: value})


@pytest.mark.feature("C1")
async def test_a_queue_with_too_many_cached_messages_is_put_off_until_some_are_done():
    flow = FlowSettings(max_cached_messages=10)
    async with scripted(endless, taker=Taker(finishes=False), flow=flow, settings=QUICK) as (
        broker,
        member,
    ):
        owned = member.own(QUEUE)
        held = (QUEUE, PullDelay.CACHED_MESSAGES)
        await until(lambda: member.puller.counts().get(held, 0) > 3, DEADLINE)
        assert len(member.taker.messages) == 11
        assert len(broker.pulls) == 11, "put off, not refused by the broker"

        member.taker.finish(owned, range(5))

        await until(lambda: len(member.taker.messages) == 16, DEADLINE)


@pytest.mark.feature("C2")
async def test_a_queue_with_too_many_cached_bytes_is_put_off_until_some_are_done():
    body = b"x" * MIB

    def large(pull):
        return Found(pull.queue_offset + 1, record(pull.queue_offset, body))

    flow = FlowSettings(max_cached_bytes=4 * MIB)
    async with scripted(large, taker=Taker(finishes=False), flow=flow, settings=QUICK) as (
        _,
        member,
    ):
        owned = member.own(QUEUE)
        held = (QUEUE, PullDelay.CACHED_BYTES)
        await until(lambda: member.puller.counts().get(held, 0) > 3, DEADLINE)
        assert len(member.taker.messages) == 4

        member.taker.finish(owned, [0])

        await until(lambda: len(member.taker.messages) == 5, DEADLINE)


@pytest.mark.feature("C3")
async def test_one_stuck_message_stops_its_queue_and_not_the_others(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        sender = await RawClient.open(cluster.brokers[0])
        for number in range(100):
            await sender.stored(TOPIC, queue_id=number % 2)  # 50 in each queue
        taker = Taker(finishes=False)
        flow = FlowSettings(max_span=20)
        few = PullSettings(batch_size=1, hold=1.0, timeout=5.0, flow_delay=0.001)
        async with pulling(cluster.name_server, taker=taker, flow=flow, settings=few) as member:
            stuck, flowing = (member.own(Queue(TOPIC, "broker-a", place)) for place in (0, 1))

            def finish_all_but_the_first():
                taker.finish(stuck, range(1, 50))
                taker.finish(flowing, range(50))
                held = member.puller.counts().get((stuck.queue, PullDelay.OFFSET_SPAN), 0)
                return flowing.next_offset == 50 and held > 3

            await until(finish_all_but_the_first, DEADLINE)

            assert stuck.next_offset == 22, "offset 0 is unfinished, and 21 was one too far"
            assert (flowing.queue, PullDelay.OFFSET_SPAN) not in member.puller.counts()
            taker.finishes = True
            taker.finish(stuck, range(50))
            await until(lambda: stuck.next_offset == 50, DEADLINE)
        await sender.close()


@pytest.mark.feature("C4")
async def test_a_pull_is_put_off_by_50_ms_counted_and_logged_the_first_and_the_thousandth_time(
    caplog,
):
    caplog.set_level(logging.INFO, "orbitmq.client.consumer")
    flow = FlowSettings(max_cached_messages=1)
    held = (QUEUE, PullDelay.CACHED_MESSAGES)
    async with scripted(endless, taker=Taker(finishes=False), flow=flow, settings=QUICK) as (
        _,
        member,
    ):
        member.own(QUEUE)
        await until(lambda: member.puller.counts().get(held, 0) > EVERY + 10, 60)

    told = [line for line in caplog.messages if "put off: cached messages (" in line]
    assert [line.rpartition(", ")[2] for line in told] == ["1 so far", f"{EVERY + 1} so far"]
    assert PullSettings().flow_delay == 0.05


async def test_room_that_is_told_of_is_used_without_waiting_for_the_timer():
    flow = FlowSettings(max_cached_messages=5)
    never = PullSettings(hold=1.0, timeout=5.0, flow_delay=3600.0)
    async with scripted(endless, taker=Taker(finishes=False), flow=flow, settings=never) as (
        _,
        member,
    ):
        owned = member.own(QUEUE)
        await until(member.puller.counts, DEADLINE)
        member.puller.has_room(owned)  # there is none
        assert member.puller.counts() == {(QUEUE, PullDelay.CACHED_MESSAGES): 1}

        member.taker.finish(owned, [0, 1, 2])
        member.puller.has_room(owned)

        await until(lambda: len(member.taker.messages) == 9, DEADLINE)


def test_failures_in_a_row_are_told_from_failures_now_and_then():
    counts = PullDelayCounts()

    told = [counts.note(PullDelay.NO_ANSWER) for _ in range(3)]
    counts.served()
    told += [counts.note(PullDelay.NO_ANSWER) for _ in range(2)]

    assert told == [1, 0, 0, 1, 0]
    assert counts.totals() == {PullDelay.NO_ANSWER: 5}
