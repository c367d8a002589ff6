"""Where a queue begins: at the group's progress, or else where `consume_from` says.

A start without progress is the group's progress from then on: a group that begins at "last" skips
nothing that is stored after its first look at a queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.progress import (
    BrokerProgress,
    MemoryProgress,
    StartOffsets,
    consume_from,
    message_at,
    wire_name,
)
from orbitmq.client.consumer.resets import pending_reset
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, SettingError
from orbitmq.parsing import Place, Position
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import ConsumeFromWhere
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import OffsetResponse
from tests.support.broker import RawClient
from tests.support.client import quick_settings, running_engine
from tests.support.consumers import consumer_of, own_queues, send
from tests.support.consuming import until
from tests.support.polling import BY_HAND, NO_TIMER, poll_until
from tests.support.polling import consumer as pull_consumer
from tests.support.rebalancing import GROUP, TOPIC, Group, answering, refusing, slipping_in

RETRY = f"%RETRY%{GROUP}"
ORDINARY = Queue(TOPIC, "broker-a", 0)
OF_RETRY = Queue(RETRY, "broker-a", 0)


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await cluster.create_topic(RETRY, queues=1)
        yield cluster


@pytest.fixture
async def engine(cluster):
    async with running_engine(cluster.name_server) as engine:
        for topic in (TOPIC, RETRY):
            engine.routes.track(topic)
            await engine.routes.get(topic)
        yield engine


@pytest.fixture
async def times(cluster):
    """When the first of each pair was stored, of ten in each of the two topics, a minute apart."""
    client = await RawClient.open(cluster.brokers[0])
    stored = []
    for _ in range(5):
        for topic in (TOPIC, RETRY) * 2:
            await client.stored(topic)
        stored.append(cluster.messages(TOPIC)[-2].store_ms / 1000)
        cluster.advance(60)
    await client.close()
    return stored


def starting(engine: Engine, begin: Position) -> StartOffsets:
    return StartOffsets(engine, BrokerProgress(engine, GROUP, strict_last=True), begin)


# ---- the rules


@pytest.mark.feature("G8")
@pytest.mark.feature("F9")
async def test_a_queue_without_progress_begins_where_the_table_says(engine, times):
    a_time = Position(Place.TIME, times[2])
    begins = {
        begin: (
            await starting(engine, begin).offset(ORDINARY),
            await starting(engine, begin).offset(OF_RETRY),
        )
        for begin in (Position.LAST, Position.FIRST, a_time)
    }

    assert begins == {Position.LAST: (10, 0), Position.FIRST: (0, 0), a_time: (4, 10)}
    # As Apache's brokers do, a broker answers 0 for a young queue unless it is asked not to.
    as_apache = StartOffsets(engine, BrokerProgress(engine, GROUP), Position.LAST)
    assert await as_apache.offset(ORDINARY) == 0


async def test_progress_comes_before_every_rule(engine, times):
    progress = MemoryProgress({ORDINARY: 3, OF_RETRY: 0})

    for begin in (Position.LAST, Position.FIRST, Position(Place.TIME, times[2])):
        start = StartOffsets(engine, progress, begin)
        assert (await start.offset(ORDINARY), await start.offset(OF_RETRY)) == (3, 0)


@pytest.mark.feature("G9")
async def test_a_time_is_the_first_message_at_or_after_it(cluster, engine, times):
    async def at(given):
        return await starting(engine, consume_from(given)).offset(ORDINARY)

    stored = cluster.messages(TOPIC)[4].store_ms / 1000

    assert await at(stored) == 4
    assert await at(stored + 10) == 6
    assert await at(stored - 10) == 4
    assert await at(datetime.fromtimestamp(stored + 10, UTC)) == 6
    assert await at(f"{datetime.fromtimestamp(stored + 10):%Y%m%d%H%M%S}") == 6  # noqa: DTZ006
    assert await at(0.0) == 0
    assert await at(times[-1] + 3600) == 10


@pytest.mark.parametrize(
    ("begin", "code"),
    [
        (Position.LAST, RequestCode.QUERY_CONSUMER_OFFSET),
        (Position.LAST, RequestCode.GET_MAX_OFFSET),
        (Position.FIRST, RequestCode.GET_MIN_OFFSET),
        (Position(Place.TIME, 0.0), RequestCode.SEARCH_OFFSET_BY_TIMESTAMP),
    ],
)
async def test_a_request_that_is_refused_is_an_error(cluster, engine, begin, code):
    with refusing(cluster.brokers[0], code), pytest.raises(BrokerRefused):
        await starting(engine, begin).offset(ORDINARY)


async def test_first_is_the_first_message_that_is_still_there(cluster, engine):
    def six(_, request):
        return request.answer(0, OffsetResponse(offset=6))

    def forbid(_, request):
        return request.answer(ResponseCode.NO_PERMISSION, remark="only Sub")

    first = starting(engine, Position.FIRST)
    with answering(cluster.brokers[0], RequestCode.GET_MIN_OFFSET, six):
        assert await first.offset(ORDINARY) == 6
    # An account that may only consume begins at 0, as Java clients do.
    with answering(cluster.brokers[0], RequestCode.GET_MIN_OFFSET, forbid):
        assert await first.offset(ORDINARY) == 0


@pytest.mark.usefixtures("inside", "times")
@pytest.mark.feature("A14")
async def test_a_queue_whose_start_cannot_be_read_begins_later(cluster, caplog):
    async with Group(cluster.name_server) as group:
        with refusing(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET):
            consumer = await group.join()
            await until(lambda: consumer.rebalancer.counts.postponed >= 3)
            assert consumer.rebalancer.claimed == {ORDINARY}
            assert group.ledger.begun == []

        await until(lambda: len(group.ledger.consumed) == 10)

    assert caplog.text.count("where orders@broker-a:0 begins") == 1


@pytest.mark.usefixtures("times")
async def test_a_look_at_a_message_takes_no_pending_reset_away(cluster, engine):
    async with Group(cluster.name_server) as group:
        await group.join()  # so that the broker knows the group
    found = await message_at(engine, GROUP, ORDINARY, 4)
    assert found is not None
    assert found.queue_offset == 4
    assert await message_at(engine, GROUP, ORDINARY, 10) is None

    async with AsyncAdmin(name_server=cluster.name_server) as admin:
        await admin.progress.reset(GROUP, TOPIC, ResetTo.by_queue({ORDINARY: 1}))

    assert await message_at(engine, GROUP, ORDINARY, 4) is None
    assert await pending_reset(engine, GROUP, ORDINARY, 4) == 1


# ---- the start in user input and in heartbeats

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("latest", Position.LATEST),
        ("last", Position.LATEST),
        ("End", Position.LATEST),
        ("CONSUME_FROM_LAST_OFFSET", Position.LAST),
        ("earliest", Position.EARLIEST),
        ("first", Position.EARLIEST),
        ("begin", Position.EARLIEST),
        ("CONSUME_FROM_FIRST_OFFSET", Position.FIRST),
        (Position.FIRST, Position.FIRST),
        (NOON, Position(Place.TIME, NOON.timestamp())),
        (1.0, Position(Place.TIME, 1.0)),
        (1500, Position(Place.OFFSET, offset=1500)),
        ("1500", Position(Place.OFFSET, offset=1500)),
        # As Java reads it: in local time.
        ("20260131120001", Position(Place.TIME, datetime(2026, 1, 31, 12, 0, 1).timestamp())),  # noqa: DTZ001
    ],
)
def test_a_start_is_given_in_every_form_that_users_know(given, expected):
    assert consume_from(given) == expected


@pytest.mark.parametrize(
    "given", ["", "newest", "20261331120000", -1, "-1", None, True, float("nan"), 1_700_000_000]
)
def test_a_wrong_start_is_refused_by_name(given):
    with pytest.raises(SettingError, match="begin_at"):
        consume_from(given, "begin_at")


@pytest.mark.parametrize("ago", ["-10m", "10m", timedelta(minutes=10), timedelta(minutes=-10)])
def test_an_age_counts_back_from_now(ago):
    found = consume_from(ago)

    assert found.time == pytest.approx(time.time() - 600, abs=5)


def test_heartbeats_name_the_rule_as_apache_does():
    rules = (Position.LAST, Position.FIRST, Position(Place.TIME, 0.0))

    assert [wire_name(each) for each in rules] == [
        ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        ConsumeFromWhere.CONSUME_FROM_TIMESTAMP,
    ]


# ---- a start at the end is committed


@asynccontextmanager
async def with_old_messages(*, strict_last: bool = True) -> AsyncIterator[AsyncEmbeddedCluster]:
    """A cluster with three messages; `strict_last`: its broker names the end of a young queue."""

    def adjust(settings: BrokerSettings) -> BrokerSettings:
        progress = replace(settings.progress, zero_for_empty=False, strict_last=strict_last)
        return replace(settings, progress=progress)

    async with AsyncEmbeddedCluster(adjust=adjust) as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, ["old"] * 3)
        yield cluster


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where broadcasting keeps its progress."""
    monkeypatch.setenv("HOME", str(tmp_path))


def listening(cluster: AsyncEmbeddedCluster, **options: Any) -> tuple[AsyncConsumer, list[bytes]]:
    seen: list[bytes] = []
    consumer = consumer_of(cluster, GROUP, consume_from="last", **options)
    consumer.on(TOPIC)(lambda message: seen.append(message.body))
    return consumer, seen


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
async def test_what_is_sent_between_two_lives_of_a_consumer_comes_in_the_second(model):
    async with with_old_messages() as cluster:
        first, _ = listening(cluster, model=model)
        async with first:
            await until(lambda: own_queues(first) == [ORDINARY])
        await send(cluster, TOPIC, ["between"])
        second, seen = listening(cluster, model=model)
        async with second:
            await until(lambda: seen)

    assert seen == [b"between"]


async def test_a_message_in_work_when_its_consumer_is_killed_comes_to_the_next_one():
    taken: list[bytes] = []

    async def stuck(_, message):
        taken.append(message.body)
        await asyncio.Event().wait()

    async with (
        with_old_messages() as cluster,
        Group(cluster.name_server, consume_from=Position.LAST) as group,
    ):
        first = await group.join(handler=stuck)
        await until(lambda: first.owned == {ORDINARY})
        # It was committed before the first pull.
        assert cluster.progress(GROUP, TOPIC) == {("broker-a", 0): 3}
        await send(cluster, TOPIC, ["in work"])
        await until(lambda: taken)
        await first.kill()
        await group.join()
        await until(lambda: (ORDINARY, 3) in group.ledger.consumed)

    assert group.ledger.consumed == {(ORDINARY, 3): 1}


async def test_a_queue_whose_start_cannot_be_committed_begins_later():
    class Reluctant(MemoryProgress):
        is_away = True

        async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
            if self.is_away:
                raise BrokerUnavailable("broker-a", "the test says so")
            return await super().store(changed)

    progress = Reluctant()
    async with (
        with_old_messages() as cluster,
        Group(cluster.name_server, consume_from=Position.LAST, progress=progress) as group,
    ):
        member = await group.join()
        await until(lambda: member.rebalancer.counts.postponed >= 2)
        assert member.owned == set()
        await send(cluster, TOPIC, ["new"])

        progress.is_away = False
        # From 3 on: there the end was at the first look.
        await until(lambda: (ORDINARY, 3) in group.ledger.consumed)


@pytest.mark.parametrize("is_assigned", [False, True], ids=["subscribed", "assigned"])
@pytest.mark.parametrize(("polling", "expected"), [(NO_TIMER, {("broker-a", 0): 3}), (BY_HAND, {})])
async def test_a_pull_consumer_commits_its_start_unless_it_commits_by_hand(
    polling, expected, is_assigned
):
    async with (
        with_old_messages() as cluster,
        pull_consumer(cluster, polling=polling, consume_from="last") as consumer,
    ):
        if is_assigned:
            await consumer.assign([ORDINARY])
        else:
            consumer.subscribe(TOPIC)
        await until(lambda: consumer.assignment() == (ORDINARY,))

        assert cluster.progress(GROUP, TOPIC) == expected
        # A commit of the positions before the first poll is the start, too.
        at = {queue: consumer.position(queue) for queue in consumer.assignment()}
        assert await consumer.commit(at) == {ORDINARY: 3}


# ---- what is stored between the requests of a start


async def by_handler(cluster: AsyncEmbeddedCluster, **options: Any) -> list[bytes]:
    consumer, seen = listening(cluster, **options)
    async with consumer:
        await until(lambda: own_queues(consumer) == [ORDINARY])
        await send(cluster, TOPIC, ["end"])
        await until(lambda: b"end" in seen)
    return seen


async def by_polls(cluster: AsyncEmbeddedCluster, *, is_assigned: bool) -> list[bytes]:
    async with pull_consumer(cluster, consume_from="last", polling=NO_TIMER) as consumer:
        if is_assigned:
            await consumer.assign([ORDINARY])
        else:
            consumer.subscribe(TOPIC)
        await until(lambda: consumer.assignment() == (ORDINARY,))
        await send(cluster, TOPIC, ["end"])
        found = await poll_until(consumer, lambda found: any(each.body == b"end" for each in found))
    return [message.body for message in found]


READERS: dict[str, Callable[[AsyncEmbeddedCluster], Awaitable[list[bytes]]]] = {
    "handler": by_handler,
    "in order": partial(by_handler, ordered=True),
    "broadcasting": partial(by_handler, model="broadcasting"),
    "polls": partial(by_polls, is_assigned=False),
    "assigned": partial(by_polls, is_assigned=True),
}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
async def test_a_message_that_is_stored_between_the_requests_of_a_start_is_consumed(read):
    async with with_old_messages() as cluster:
        with slipping_in(cluster.brokers[0], TOPIC):
            seen = await read(cluster)

    assert seen == [b"slipped in", b"end"]


@pytest.mark.parametrize(
    "code", [RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET]
)
async def test_a_message_that_is_stored_while_the_broker_of_a_start_restarts_is_consumed(code):
    reached = asyncio.Event()

    async def silent(_, __):
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with with_old_messages() as cluster:
        consumer, seen = listening(cluster)
        with answering(cluster.brokers[0], code, silent):
            await consumer.start()
            await until(reached.is_set)
            await send(cluster, TOPIC, ["meanwhile"])
            await cluster.restart_broker()
        await until(lambda: seen)
        await consumer.stop()

    assert seen == [b"meanwhile"]


async def test_queues_that_a_topic_gets_later_are_consumed_from_their_beginning():
    async with with_old_messages(strict_last=False) as cluster:
        client = quick_settings(cluster.name_server, route_refresh=0.5)
        consumer, seen = listening(cluster, client=client)
        async with consumer:
            await until(lambda: own_queues(consumer) == [ORDINARY])
            await cluster.create_topic(TOPIC, queues=2)
            await send(cluster, TOPIC, ["grown"], queue=Queue(TOPIC, "broker-a", 1))
            await until(lambda: b"grown" in seen)
