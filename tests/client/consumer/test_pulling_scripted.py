"""Pulling from a broker that answers as the test says: what real ones do rarely."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from orbitmq.client.consumer.pull import EVERY, PullDelay
from orbitmq.client.consumer.settings import FlowLimits, FlowSettings, PullSettings
from orbitmq.client.consumer.subscriptions import Subscription
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.message.properties import TAGS, encode_properties
from orbitmq.message.record import INNER_BATCH, NEED_UNWRAP
from orbitmq.message.stored import encode_batch
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.headers import PullFlag, PullMessageRequest
from tests.support.broker import until
from tests.support.pulling import (
    FAST,
    TOPIC,
    Found,
    ScriptedBroker,
    Taker,
    pulling,
    record,
    records,
    scripted,
)

DEADLINE = 20.0
QUEUE_COUNT = 2
QUEUE = Queue(TOPIC, "broker-a", 0)


def hold(_: PullMessageRequest) -> None:
    """Never answer."""


class Sequence:
    """Answers one after the other, then holds."""

    def __init__(self, *answers: Found | int) -> None:
        self._answers = list(answers)

    def __call__(self, _: PullMessageRequest) -> Found | int | None:
        return self._answers.pop(0) if self._answers else None


# ---- what is asked


@pytest.mark.feature("B11")
async def test_a_pull_asks_for_256_messages_and_512_kib_and_to_be_held_15_seconds():
    async with scripted(hold, settings=PullSettings()) as (broker, member):
        member.own(QUEUE, 7)
        await until(lambda: broker.pulls, DEADLINE)

    (pull,) = broker.pulls
    assert (pull.max_msg_nums, pull.max_msg_bytes) == (256, 512 * 1024)
    assert pull.suspend_timeout_millis == 15_000
    assert (pull.topic, pull.queue_id, pull.queue_offset) == (TOPIC, 0, 7)


async def test_a_pull_with_a_filter_is_held_briefly_until_something_has_matched():
    wanted = Subscription.by_tags(TOPIC, "paid")
    async with (
        ScriptedBroker(hold) as broker,
        pulling(broker.name_server, wanted, settings=PullSettings()) as member,
    ):
        member.own(QUEUE)
        await until(lambda: broker.pulls, DEADLINE)
        broker.answer_held(
            Found(1, record(0, properties=encode_properties({TAGS: "paid"})), max_offset=1)
        )
        await until(lambda: len(broker.pulls) == 2, DEADLINE)

    assert [pull.suspend_timeout_millis for pull in broker.pulls] == [3000, 15_000]


async def test_a_filter_that_has_matched_nothing_is_reported_when_all_was_read():
    unmatched = Found(3, code=ResponseCode.PULL_RETRY_IMMEDIATELY, max_offset=3)
    matched = Found(4, record(3, properties=encode_properties({TAGS: "paid"})), max_offset=4)
    async with scripted(Sequence(unmatched), Subscription.by_tags(TOPIC, "paid")) as (
        broker,
        member,
    ):
        member.own(QUEUE)
        await until(lambda: member.puller.troubles, DEADLINE)
        (trouble,) = member.puller.troubles
        broker.answer_held(matched)
        await until(lambda: member.taker.messages, DEADLINE)

        assert "of 3 messages none has matched the tags 'paid'" in trouble
        assert member.puller.troubles == ()


@pytest.mark.feature("B13")
async def test_a_pull_carries_the_version_of_the_subscription_and_its_text_if_so_set():
    async with ScriptedBroker(hold) as broker:
        wanted = Subscription.by_tags(TOPIC, "a || b")
        async with pulling(broker.name_server, wanted) as member:
            member.own(QUEUE)
            await until(lambda: broker.pulls, DEADLINE)
            version = next(iter(member.subscriptions)).version
        posting = PullSettings(post_subscription=True, hold=1.0, timeout=5.0)
        async with pulling(broker.name_server, wanted, settings=posting) as member:
            member.own(QUEUE)
            await until(lambda: len(broker.pulls) == 2, DEADLINE)

    plain, posted = broker.pulls
    assert plain.sys_flag == PullFlag.SUSPEND
    assert (plain.subscription, plain.sub_version) == (None, version)
    assert plain.expression_type == "TAG"
    assert posted.sys_flag == PullFlag.SUSPEND | PullFlag.SUBSCRIPTION
    assert posted.subscription == "a || b"


@pytest.mark.parametrize(
    "refusal",
    [
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    ],
)
@pytest.mark.feature("B13")
async def test_a_broker_that_does_not_know_the_subscription_is_told_at_once(refusal):
    async with scripted(Sequence(int(refusal), Found(1, records(0)))) as (broker, member):
        before = broker.heartbeats
        member.own(QUEUE)
        await until(lambda: member.taker.messages, DEADLINE)

        assert broker.heartbeats > before


@pytest.mark.feature("B12")
async def test_progress_goes_with_a_pull_to_a_master_and_not_to_a_slave():
    def master(pull):
        return Found(5, records(4), suggested=1) if pull.queue_offset == 4 else None

    async with scripted(master, slave=hold) as (broker, member):
        member.progress.update(QUEUE, 4)
        member.own(QUEUE, 4)
        await until(lambda: broker.slave_pulls, DEADLINE)

    (first,), (second,) = broker.pulls, broker.slave_pulls
    assert (first.sys_flag & PullFlag.COMMIT_OFFSET, first.commit_offset) == (1, 4)
    assert second.sys_flag & PullFlag.COMMIT_OFFSET == 0
    assert second.queue_offset == 5


# ---- what follows from answers


@pytest.mark.feature("B7")
@pytest.mark.parametrize("code", [ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY])
async def test_an_empty_answer_leads_to_the_offset_that_it_names(code):
    async with scripted(Sequence(Found(50, code=code))) as (broker, member):
        member.own(QUEUE, 3)
        await until(lambda: len(broker.pulls) == 2, DEADLINE)

        assert broker.pulls[1].queue_offset == 50
        assert member.progress.read(QUEUE) == 50


async def test_an_empty_answer_does_not_move_progress_past_unfinished_messages():
    empty = Found(50, code=ResponseCode.PULL_RETRY_IMMEDIATELY)
    async with scripted(Sequence(Found(2, records(0, 1)), empty), taker=Taker(finishes=False)) as (
        broker,
        member,
    ):
        owned = member.own(QUEUE)
        await until(lambda: len(broker.pulls) == 3, DEADLINE)
        assert member.progress.read(QUEUE) is None

        member.taker.finish(owned, [1])
        assert member.progress.read(QUEUE) == 0
        member.taker.finish(owned, [0])
        assert member.progress.read(QUEUE) == 50


@pytest.mark.feature("B8")
async def test_an_illegal_offset_drops_the_queue_and_freezes_the_corrected_progress():
    moved = Found(20, code=ResponseCode.PULL_OFFSET_MOVED, min_offset=20, max_offset=30)
    first = Found(502, records(500, 501))
    at_once = replace(FAST, correction_delay=3600.0)
    taker = Taker(finishes=False)
    async with scripted(Sequence(first, moved), settings=at_once, taker=taker) as (_, member):
        await member.progress.store({QUEUE: 500})
        member.progress.update(QUEUE, 500)
        owned = member.own(QUEUE, 500)
        await until(lambda: member.rebuilt, DEADLINE)
        member.taker.finish(owned, [500, 501])  # a handler that was still running

        assert member.rebuilt == [owned]
        assert owned.is_dropped
        assert member.puller.queues == ()
        assert member.progress.read(QUEUE) == 20, "progress moved back, and stays there"
        assert await member.progress.stored(QUEUE) == 20


@pytest.mark.parametrize(
    ("committed", "then"), [(30, 20), (4, 4), (None, None)], ids=["beyond", "before", "none"]
)
async def test_the_end_of_a_queue_that_lost_messages_is_committed_only_over_a_greater_offset(
    committed, then, monkeypatch
):
    moved = Found(20, code=ResponseCode.PULL_OFFSET_MOVED, max_offset=20)
    async with scripted(Sequence(moved)) as (_, member):
        if committed is not None:
            await member.progress.store({QUEUE: committed})
        member.progress.update(QUEUE, 500)
        may_read, stored = asyncio.Event(), member.progress.stored

        async def late(queue: Queue) -> int | None:
            await may_read.wait()
            return await stored(queue)

        monkeypatch.setattr(member.progress, "stored", late)
        owned = member.own(QUEUE, 500)
        await until(lambda: owned.is_dropped, DEADLINE)
        # As a stop does, before the committed offset is known.
        await member.progress.persist([QUEUE])
        assert await stored(QUEUE) == committed
        may_read.set()
        await until(lambda: member.rebuilt, DEADLINE)

        assert await stored(QUEUE) == then


@pytest.mark.feature("B16")
async def test_a_next_offset_that_goes_back_is_reported_once_and_counted(caplog):
    back = [Found(2, records(10)), Found(1, records(2)), Found(0, records(1))]
    async with scripted(Sequence(*back)) as (broker, member):
        member.own(QUEUE, 10)
        await until(lambda: len(broker.pulls) == 4, DEADLINE)

        assert member.puller.counts()[QUEUE, PullDelay.WENT_BACK] == 3
    warnings = [each for each in caplog.records if "moved orders@broker-a:0 back" in each.message]
    assert len(warnings) == 1
    assert "after a pull at 10 it returned 2" in warnings[0].message
    assert warnings[0].__dict__["queue"] == str(QUEUE)
    assert warnings[0].__dict__["broker"] == broker.name_server


# ---- surviving


async def test_a_slave_that_was_suggested_and_is_gone_gives_way_to_the_master():
    suggest = Sequence(Found(1, records(0), suggested=1), Found(2, records(1)))
    async with ScriptedBroker(suggest, slave=hold) as broker:
        impatient = PullSettings(hold=0.05, timeout=1.0, error_delay=0.01)
        async with pulling(broker.name_server, settings=impatient) as member:
            member.own(QUEUE)
            await until(lambda: member.taker.offsets == [0, 1], DEADLINE)

            assert [pull.queue_offset for pull in broker.slave_pulls] == [1]


@pytest.mark.feature("B14")
async def test_a_bug_in_whoever_takes_messages_does_not_end_the_pulls(caplog):
    class BrokenOnce(Taker):
        is_broken = True

        def accept(self, owned: OwnedQueue, messages: list[ReceivedMessage]) -> None:
            if self.is_broken:
                self.is_broken = False
                raise ZeroDivisionError("a bug")
            super().accept(owned, messages)

    answers = Sequence(Found(2, records(0, 1)), Found(2, records(0, 1)))
    async with scripted(answers, taker=BrokenOnce()) as (broker, member):
        member.own(QUEUE)
        await until(lambda: len(broker.pulls) == 3, DEADLINE)

        assert member.puller.counts()[QUEUE, PullDelay.FAILED] == 1
        assert member.taker.offsets == [0, 1], "what was not taken comes again"
        assert member.progress.read(QUEUE) == 2
    assert any(each.exc_info for each in caplog.records if "failed; trying again" in each.message)


@pytest.mark.feature("E6")
async def test_a_queue_whose_lock_is_not_held_is_pulled_later():
    class Lock:
        held = False

        def is_held(self, now: float) -> bool:
            return self.held

    lock = Lock()
    async with scripted(hold) as (broker, member):
        member.own(QUEUE, lock=lock)
        await until(
            lambda: member.puller.counts().get((QUEUE, PullDelay.NOT_LOCKED), 0) > 2, DEADLINE
        )
        assert broker.pulls == []

        lock.held = True

        await until(lambda: broker.pulls, DEADLINE)


@pytest.mark.parametrize("state", ["is_draining", "is_dropped", "ended"])
async def test_an_answer_that_comes_after_the_queue_was_given_up_is_ignored(state):
    other = Queue(TOPIC, "broker-a", 1)
    async with scripted(hold) as (broker, member):
        owned = member.own(QUEUE)
        member.own(other)
        await until(lambda: len(broker.pulls) == 2, DEADLINE)
        if state == "ended":
            member.puller.end(owned)
        else:
            setattr(owned, state, True)

        broker.answer_held(Found(1, records(0)))

        await until(lambda: len(broker.pulls) == 3, DEADLINE)
        assert {each.queue for each in member.taker.messages} == {other}
        assert owned.next_offset == 0
        assert member.progress.read(QUEUE) is None


#: The pull of a queue goes on after each of these, with the counts of delays that follow it.
TRANSIENT: dict[str, tuple[list[Found | int], dict[PullDelay, int]]] = {
    "errors": ([int(ResponseCode.SYSTEM_ERROR)] * 30, {PullDelay.REFUSED: 30}),
    "busy": ([int(ResponseCode.FLOW_CONTROL)], {PullDelay.BROKER_BUSY: 1}),
    "sent away": ([int(ResponseCode.GO_AWAY)], {}),
    "torn": ([Found(2, records(0, 1)[:-3])], {PullDelay.UNREADABLE: 1}),
    "no record": ([Found(2, b"\x00" * 200)], {PullDelay.UNREADABLE: 1}),
    "static topic": ([Found(1, records(0), offset_delta=100)], {PullDelay.UNREADABLE: 1}),
    "no progress": ([Found(0, code=ResponseCode.PULL_NOT_FOUND)], {PullDelay.NOT_HELD: 1}),
}


@pytest.mark.feature("B4")
@pytest.mark.feature("B14")
@pytest.mark.parametrize("kind", TRANSIENT)
async def test_after_every_failure_the_same_offset_is_pulled_again(kind):
    answers, delays = TRANSIENT[kind]
    soon = PullSettings(error_delay=0.01, busy_delay=0.01)
    async with scripted(Sequence(*answers, Found(2, records(0, 1))), settings=soon) as (
        broker,
        member,
    ):
        member.own(QUEUE)
        await until(lambda: member.taker.offsets == [0, 1], DEADLINE)

        assert {pull.queue_offset for pull in broker.pulls[: len(answers) + 1]} == {0}
        assert member.puller.counts() == {(QUEUE, why): count for why, count in delays.items()}


@pytest.mark.feature("B4")
async def test_a_pull_that_is_never_answered_is_repeated_after_its_timeout():
    impatient = PullSettings(hold=0.05, timeout=0.1, error_delay=0.01)
    async with scripted(hold, settings=impatient) as (broker, member):
        member.own(QUEUE)
        await until(lambda: len(broker.pulls) >= 3, DEADLINE)

        assert member.puller.counts()[QUEUE, PullDelay.NO_ANSWER] >= 2


# ---- records that hold several messages


async def test_a_batch_that_was_stored_as_one_record_is_taken_apart():
    batch = encode_batch([(b"one", 1, b"TAGS\x01a\x02"), (b"two", 2, b"")])
    body = record(10, batch, sys_flag=INNER_BATCH | NEED_UNWRAP) + record(12, b"three")
    async with scripted(Sequence(Found(13, body))) as (_, member):
        member.own(QUEUE, 10)
        await until(lambda: member.taker.messages, DEADLINE)

    assert member.taker.bodies == [b"one", b"two", b"three"]
    assert member.taker.offsets == [10, 11, 12]
    assert member.taker.messages[0].tags == "a"


# ---- flow control


MIB = 1024 * 1024
#: 50 ms are the default, which these tests do not wait for a thousand times.
QUICK = PullSettings(hold=1.0, timeout=5.0, flow_delay=0.001)


def endless(pull: PullMessageRequest) -> Found:
    """One message more, whatever is asked."""
    return Found(pull.queue_offset + 1, records(pull.queue_offset))


def large(pull: PullMessageRequest) -> Found:
    return Found(pull.queue_offset + 1, record(pull.queue_offset, b"x" * MIB))


def test_limits_are_those_of_java_clients_and_may_be_shared_by_the_queues_of_a_topic():
    shared = FlowSettings(max_cached_messages_per_topic=100, max_cached_bytes_per_topic=MIB)

    assert FlowSettings().limits(1) == FlowLimits(1000, 100 * MIB, 2000)
    assert FlowSettings().limits(1, is_orderly=True).span is None
    assert shared.limits(4) == FlowLimits(25, MIB // 4, 2000)


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


@pytest.mark.parametrize(
    ("flow", "script", "reason", "fetched"),
    [
        pytest.param(
            FlowSettings(max_cached_messages=10),
            endless,
            PullDelay.CACHED_MESSAGES,
            11,
            marks=pytest.mark.feature("C1"),
        ),
        pytest.param(
            FlowSettings(max_cached_bytes=4 * MIB),
            large,
            PullDelay.CACHED_BYTES,
            4,
            marks=pytest.mark.feature("C2"),
        ),
    ],
    ids=["messages", "bytes"],
)
async def test_a_queue_with_too_much_cached_is_not_pulled_until_some_is_done(
    flow, script, reason, fetched
):
    taker = Taker(finishes=False)
    async with scripted(script, taker=taker, flow=flow, settings=QUICK) as (broker, member):
        owned = member.own(QUEUE)
        await until(lambda: member.puller.counts().get((QUEUE, reason), 0) > 3, DEADLINE)
        assert len(taker.messages) == len(broker.pulls) == fetched

        taker.finish(owned, [0, 1])

        await until(lambda: len(taker.messages) == fetched + 2, DEADLINE)


@pytest.mark.feature("C3")
async def test_one_stuck_message_stops_its_queue_and_not_the_others(cluster, sender):
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
