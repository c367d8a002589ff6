"""Pulling from a broker that answers as the test says: what real ones do rarely."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from orbitmq.client.consumer.pull import (
    AFTER_POLLED_PULL,
    AFTER_PULL,
    PullDelay,
    PullStatus,
    Subscription,
)
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.message.properties import TAGS, encode_properties
from orbitmq.message.record import INNER_BATCH, NEED_UNWRAP
from orbitmq.message.stored import encode_batch
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Credentials
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
QUEUE = Queue(TOPIC, "broker-a", 0)


def hold(_: PullMessageRequest) -> None:
    """Never answer."""


class Sequence:
    """Answers one after the other, then holds."""

    def __init__(self, *answers: Found | int) -> None:
        self._answers = list(answers)

    def __call__(self, _: PullMessageRequest) -> Found | int | None:
        return self._answers.pop(0) if self._answers else None


# ---- when it is asked


@pytest.mark.parametrize(
    ("max_offset", "order"),
    [(2, ["handled", "asked"]), (3, ["asked", "handled"])],
    ids=["nothing more is there", "more is there"],
)
async def test_handlers_begin_before_a_pull_that_will_be_held_and_after_one_that_finds_more(
    monkeypatch, max_offset, order
):
    taker = Taker()
    async with scripted(hold, taker=taker) as (broker, member):
        member.own(QUEUE)
        await until(lambda: broker.pulls, DEADLINE)
        events: list[str] = []
        loop = asyncio.get_running_loop()
        # As workers are woken.
        taker.on_accept = lambda: loop.call_soon(events.append, "handled")
        requests = member.puller.requests
        encoder = requests.encoder

        def noted(owned, subscription, broker_id, connection, hold):
            events.append("asked")
            return encoder(owned, subscription, broker_id, connection, hold)

        monkeypatch.setattr(requests, "encoder", noted)

        broker.answer_held(Found(2, records(0, 1), max_offset=max_offset))
        await until(lambda: len(broker.pulls) == 2, DEADLINE)

    assert events == order
    assert broker.pulls[1].queue_offset == 2


# ---- what is asked


@pytest.mark.feature("B11")
async def test_a_pull_asks_for_32_messages_and_256_kib_and_to_be_held_15_seconds():
    async with scripted(hold, settings=PullSettings()) as (broker, member):
        member.own(QUEUE, 7)
        await until(lambda: broker.pulls, DEADLINE)

    (pull,) = broker.pulls
    assert (pull.max_msg_nums, pull.max_msg_bytes) == (32, 256 * 1024)
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


async def test_a_signed_pull_says_the_same_as_one_that_is_not():
    async with scripted(hold) as (broker, member):
        member.progress.update(QUEUE, 4)
        member.subscriptions.put(Subscription.by_tags(TOPIC, "a"))
        member.own(QUEUE, 7)
        await until(lambda: broker.pulls, DEADLINE)
        plain = broker.fields

    signer = Credentials(access_key="reader", secret_key="secret-of-the-reader")  # noqa: S106  # of nobody
    async with scripted(hold, credentials=signer) as (broker, member):
        member.progress.update(QUEUE, 4)
        member.subscriptions.put(Subscription.by_tags(TOPIC, "a"))
        member.own(QUEUE, 7)
        await until(lambda: broker.pulls, DEADLINE)
        signed = broker.fields

    assert signed.pop("AccessKey") == "reader"
    assert signed.pop("Signature")
    assert plain.pop("subVersion") <= signed.pop("subVersion")
    assert signed == plain
    assert (plain["queueOffset"], plain["commitOffset"]) == ("7", "4")


# ---- what follows from answers


@pytest.mark.feature("B7")
def test_every_outcome_has_a_step():
    assert set(AFTER_PULL) == set(AFTER_POLLED_PULL) == set(PullStatus)


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
        member.progress.update(QUEUE, 500)
        owned = member.own(QUEUE, 500)
        await until(lambda: member.rebuilt, DEADLINE)
        member.taker.finish(owned, [500, 501])  # a handler that was still running

        assert member.rebuilt == [owned]
        assert owned.is_dropped
        assert member.puller.queues == ()
        assert member.progress.read(QUEUE) == 20, "progress moved back, and stays there"
        assert await member.progress.stored(QUEUE) == 20


@pytest.mark.feature("B8")
async def test_corrections_of_one_queue_are_spaced_after_the_first():
    moved = Found(20, code=ResponseCode.PULL_OFFSET_MOVED, min_offset=20, max_offset=30)
    spaced = replace(FAST, correction_delay=0.3)
    monotonic = asyncio.get_running_loop().time
    async with scripted(lambda _: moved, settings=spaced) as (_, member):
        began = monotonic()
        member.own(QUEUE, 500)
        await until(lambda: len(member.rebuilt) == 1, DEADLINE)
        member.own(QUEUE, 500)
        await until(lambda: len(member.rebuilt) == 2, DEADLINE)

        assert monotonic() - began >= 0.3
    assert PullSettings().correction_delay == 10.0


@pytest.mark.feature("B16")
async def test_a_next_offset_that_goes_back_is_reported_once_and_counted(caplog):
    back = [Found(2, records(10)), Found(1, records(2)), Found(0, records(1))]
    async with scripted(Sequence(*back)) as (broker, member):
        member.own(QUEUE, 10)
        await until(lambda: len(broker.pulls) == 4, DEADLINE)

        assert member.puller.counts()[QUEUE, PullDelay.WENT_BACK] == 3
    warnings = [each for each in caplog.records if "goes back" in each.message]
    assert len(warnings) == 1
    assert "asked for offset 10 it names 2" in warnings[0].message
    assert warnings[0].__dict__["queue"] == str(QUEUE)
    assert warnings[0].__dict__["broker"] == broker.name_server


async def test_a_broker_that_names_the_same_offset_again_is_not_asked_in_circles():
    asked: list[int] = []

    def stuck(pull):
        asked.append(pull.queue_offset)
        return Found(0, code=ResponseCode.PULL_NOT_FOUND)

    async with scripted(stuck) as (_, member):
        member.own(QUEUE)
        await until(
            lambda: member.puller.counts().get((QUEUE, PullDelay.NOT_HELD), 0) > 3, DEADLINE
        )

        assert len(asked) <= member.puller.counts()[QUEUE, PullDelay.NOT_HELD] + 1


# ---- surviving


@pytest.mark.feature("B14")
async def test_an_answer_that_cannot_be_read_is_asked_for_again_and_never_skipped(caplog):
    torn = records(0, 1)[:-3]
    answers = Sequence(Found(2, torn), Found(2, b"\x00" * 200), Found(2, records(0, 1)))
    async with scripted(answers) as (broker, member):
        member.own(QUEUE)
        await until(lambda: member.taker.messages, DEADLINE)

        assert [pull.queue_offset for pull in broker.pulls[:3]] == [0, 0, 0]
        assert member.taker.offsets == [0, 1]
        assert member.puller.counts()[QUEUE, PullDelay.UNREADABLE] == 2
    assert [each.levelno for each in caplog.records if "unreadable" in each.message] == [
        logging.WARNING
    ]


async def test_a_broker_is_unreached_until_it_answers_and_not_only_until_it_is_connected():
    async with scripted(hold, settings=PullSettings(error_delay=0.02)) as (broker, member):
        owned = member.own(QUEUE)
        await until(lambda: broker.pulls, DEADLINE)

        broker.drop_connections()
        await until(lambda: len(broker.pulls) == 2, DEADLINE)
        (trouble,) = member.puller.troubles
        owned.is_paused = True
        assert member.puller.troubles == (), "nothing is wanted of the broker"
        owned.is_paused = False
        broker.answer_held(Found(0, code=ResponseCode.PULL_NOT_FOUND))
        await until(lambda: len(broker.pulls) == 3, DEADLINE)

        assert "gets nothing from broker-a until it answers" in trouble
        assert member.puller.troubles == ()
    assert [pull.suspend_timeout_millis for pull in broker.pulls] == [15_000, 100, 15_000]


@pytest.mark.feature("B4")
async def test_a_pull_that_is_never_answered_is_repeated_when_its_time_is_up():
    impatient = PullSettings(hold=0.05, timeout=0.1, error_delay=0.01)
    async with scripted(hold, settings=impatient) as (broker, member):
        member.own(QUEUE)
        await until(lambda: len(broker.pulls) >= 3, DEADLINE)

        assert member.puller.counts()[QUEUE, PullDelay.NO_ANSWER] >= 2


@pytest.mark.feature("B4")
async def test_refusals_are_followed_by_another_pull_after_a_delay_for_ever():
    refusals = [int(ResponseCode.SYSTEM_ERROR)] * 30
    async with scripted(Sequence(*refusals, Found(1, records(0)))) as (_, member):
        member.own(QUEUE)
        await until(lambda: member.taker.messages, DEADLINE)

        assert member.puller.counts()[QUEUE, PullDelay.REFUSED] == 30


async def test_a_broker_without_a_code_for_polled_pulls_is_asked_in_the_usual_way():
    found = Sequence(*(Found(offset + 1, records(offset)) for offset in range(3)))
    patient = PullSettings(error_delay=60.0)
    async with scripted(found, is_polled=True, is_before_5=True, settings=patient) as (_, member):
        member.own(QUEUE)
        await until(lambda: len(member.taker.messages) == 3, DEADLINE)

        # It says so once and is believed.
        assert member.puller.counts() == {}
        assert member.taker.offsets == [0, 1, 2]


async def test_a_broker_that_knows_no_pulls_at_all_is_not_asked_in_circles():
    unknown = int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
    never = Sequence(*[unknown] * 1000)
    slow = PullSettings(error_delay=60.0)
    async with scripted(never, is_polled=True, is_before_5=True, settings=slow) as (broker, member):
        member.own(QUEUE)
        await until(member.puller.counts, DEADLINE)

        assert member.puller.counts() == {(QUEUE, PullDelay.REFUSED): 1}
        assert len(broker.pulls) == 1


async def test_a_busy_broker_is_asked_again_sooner_than_one_that_fails():
    slow_after_errors = PullSettings(error_delay=60.0, busy_delay=0.01)
    busy = Sequence(int(ResponseCode.FLOW_CONTROL), Found(1, records(0)))
    async with scripted(busy, settings=slow_after_errors) as (_, member):
        member.own(QUEUE)
        await until(lambda: member.taker.messages, DEADLINE)

        assert member.puller.counts() == {(QUEUE, PullDelay.BROKER_BUSY): 1}


async def test_a_broker_that_sends_us_away_is_asked_on_a_new_connection():
    away = Sequence(int(ResponseCode.GO_AWAY), Found(1, records(0)))
    async with scripted(away) as (_, member):
        address = member.engine.routes.master("broker-a")
        before = member.engine.open_connection(address)
        member.own(QUEUE)
        await until(lambda: member.taker.messages, DEADLINE)

        assert member.engine.open_connection(address) is not before
        assert member.puller.counts() == {}


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


async def test_a_broker_that_is_not_there_is_looked_for_and_found():
    async with scripted(hold) as (broker, member):
        elsewhere = Queue(TOPIC, "broker-z", 0)
        before = broker.routes_asked
        member.own(elsewhere)

        await until(
            lambda: member.puller.counts().get((elsewhere, PullDelay.NO_BROKER), 0) > 2, DEADLINE
        )
        await until(lambda: broker.routes_asked > before, DEADLINE)


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


async def test_a_pull_that_begins_inside_a_batch_gets_the_rest_of_it():
    batch = encode_batch([(b"one", 0, b""), (b"two", 0, b"")])
    body = record(10, batch, sys_flag=INNER_BATCH | NEED_UNWRAP)
    async with scripted(Sequence(Found(12, body))) as (_, member):
        member.own(QUEUE, 11)
        await until(lambda: member.taker.messages, DEADLINE)

    assert member.taker.bodies == [b"two"]


async def test_a_static_topic_is_refused_with_a_reason(caplog):
    shifted = Found(1, records(0), offset_delta=100)
    async with scripted(Sequence(shifted)) as (broker, member):
        member.own(QUEUE)
        await until(lambda: len(broker.pulls) == 2, DEADLINE)

        assert member.taker.messages == []
    assert "static topic" in caplog.text
