"""Where queues begin: the table, for every rule, and that nothing is ever guessed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.progress import (
    Begin,
    BrokerProgress,
    ConsumeFrom,
    MemoryProgress,
    StartOffsets,
    consume_from,
    message_at,
)
from orbitmq.client.consumer.resets import pending_reset
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, SettingError
from orbitmq.remoting.dispatch import LATER
from orbitmq.remoting.settings import RequestTimedOut
from orbitmq.wire.bodies import ConsumeFromWhere
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import OffsetResponse
from tests.support.broker import RawClient, until
from tests.support.client import running_engine
from tests.support.rebalancing import GROUP, TOPIC, Group, answering, refusing

RETRY = f"%RETRY%{GROUP}"
ORDINARY = Queue(TOPIC, "broker-a", 0)
OF_RETRY = Queue(RETRY, "broker-a", 0)
DEADLINE = 20.0


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
        for _ in range(2):
            for topic in (TOPIC, RETRY):
                await client.stored(topic)
        stored.append(cluster.messages(TOPIC)[-2].store_ms / 1000)
        cluster.advance(60)
    await client.close()
    return stored


def starting(engine: Engine, begin: ConsumeFrom) -> StartOffsets:
    return StartOffsets(engine, BrokerProgress(engine, GROUP, strict_last=True), begin)


@pytest.mark.feature("G8")
@pytest.mark.feature("F9")
async def test_a_queue_without_progress_begins_where_the_table_says(engine, times):
    a_time = ConsumeFrom(Begin.TIME, times[2])
    begins = {
        begin: (
            await starting(engine, begin).offset(ORDINARY),
            await starting(engine, begin).offset(OF_RETRY),
        )
        for begin in (ConsumeFrom.LAST, ConsumeFrom.FIRST, a_time)
    }

    assert begins == {ConsumeFrom.LAST: (10, 0), ConsumeFrom.FIRST: (0, 0), a_time: (4, 10)}


async def test_progress_comes_before_every_rule(engine, times):
    progress = MemoryProgress({ORDINARY: 3, OF_RETRY: 0})

    for begin in (ConsumeFrom.LAST, ConsumeFrom.FIRST, ConsumeFrom(Begin.TIME, times[2])):
        assert await StartOffsets(engine, progress, begin).offset(ORDINARY) == 3
        assert await StartOffsets(engine, progress, begin).offset(OF_RETRY) == 0


@pytest.mark.usefixtures("times")
async def test_a_queue_released_during_an_outage_begins_there_if_its_broker_lost_the_progress(
    engine,
):
    progress = MemoryProgress()
    start = StartOffsets(engine, progress, ConsumeFrom.LAST)

    start.remember(ORDINARY, 7)
    start.remember(ORDINARY, 8)
    assert await start.begin(ORDINARY) == 7
    assert progress.kept == {ORDINARY: 7}

    start.remember(ORDINARY, 3)
    assert await start.offset(ORDINARY) == 7, "committed progress counts"
    progress.kept.clear()
    start.remember(ORDINARY, 3)
    start.forget(ORDINARY)
    assert await start.offset(ORDINARY) == 10


@pytest.mark.usefixtures("times")
async def test_a_look_at_a_message_takes_no_pending_reset_away(cluster, engine):
    async with Group(cluster.name_server) as group:
        await group.join()  # so that the broker knows the group
    found = await message_at(engine, GROUP, ORDINARY, 4)
    assert found is not None
    assert found.queue_offset == 4
    assert await message_at(engine, GROUP, ORDINARY, 10) is None

    def reset():
        with Admin(name_server=cluster.name_server) as admin:
            admin.progress.reset(GROUP, TOPIC, ResetTo.by_queue({ORDINARY: 1}))

    await asyncio.to_thread(reset)

    assert await message_at(engine, GROUP, ORDINARY, 4) is None
    assert await pending_reset(engine, GROUP, ORDINARY, 4) == 1


async def test_first_is_the_first_message_that_is_still_there(cluster, engine, times):
    def six(_, request):
        return request.answer(0, OffsetResponse(offset=6))

    with answering(cluster.brokers[0], RequestCode.GET_MIN_OFFSET, six):
        found = await starting(engine, ConsumeFrom.FIRST).offset(ORDINARY)

    assert found == 6


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


@pytest.mark.feature("G9")
async def test_of_many_messages_with_one_time_the_first_is_meant(cluster, engine):
    client = await RawClient.open(cluster.brokers[0])
    for _ in range(5):
        # Sent together, stored in the same turn of the broker, and so at the same time.
        await asyncio.gather(*(client.stored(TOPIC) for _ in range(20)))
        cluster.advance(1)
    await client.close()
    stored = [message.store_ms for message in cluster.messages(TOPIC)]
    assert len(set(stored)) < len(stored) == 100

    for millis in set(stored):
        begin = ConsumeFrom(Begin.TIME, millis / 1000)
        assert await starting(engine, begin).offset(ORDINARY) == stored.index(millis)


async def test_a_young_topic_is_read_from_its_first_message_as_with_apache(engine, times):
    as_apache = StartOffsets(engine, BrokerProgress(engine, GROUP), ConsumeFrom.LAST)

    assert await as_apache.offset(ORDINARY) == 0


async def test_strictly_last_means_the_end_of_a_young_topic_too(engine, times):
    assert await starting(engine, ConsumeFrom.LAST).offset(ORDINARY) == 10


@pytest.mark.parametrize(
    ("begin", "code"),
    [
        (ConsumeFrom.LAST, RequestCode.QUERY_CONSUMER_OFFSET),
        (ConsumeFrom.LAST, RequestCode.GET_MAX_OFFSET),
        (ConsumeFrom.FIRST, RequestCode.GET_MIN_OFFSET),
        (ConsumeFrom(Begin.TIME, 0.0), RequestCode.SEARCH_OFFSET_BY_TIMESTAMP),
    ],
)
async def test_a_question_that_is_not_answered_is_an_error(cluster, engine, begin, code):
    with refusing(cluster.brokers[0], code), pytest.raises(BrokerRefused):
        await starting(engine, begin).offset(ORDINARY)


async def test_a_group_with_progress_begins_although_the_end_is_not_told_in_time(cluster):
    def silent(_, __):
        return LATER

    async with running_engine(cluster.name_server, request_timeout=0.2) as engine:
        await engine.routes.get(TOPIC)
        with answering(cluster.brokers[0], RequestCode.GET_MAX_OFFSET, silent):
            known = StartOffsets(engine, MemoryProgress({ORDINARY: 3}))
            assert await known.offset(ORDINARY) == 3
            with pytest.raises(RequestTimedOut):
                await StartOffsets(engine, MemoryProgress()).offset(ORDINARY)


@pytest.mark.usefixtures("inside")
@pytest.mark.feature("A14")
async def test_a_start_that_cannot_be_worked_out_postpones_the_queue_and_is_never_guessed(
    cluster, times, caplog
):
    async with Group(cluster.name_server) as group:
        with refusing(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET):
            consumer = await group.join()
            await until(lambda: consumer.rebalancer.counts.postponed >= 3, DEADLINE)
            assert consumer.owned == set()
            assert consumer.rebalancer.claimed == {ORDINARY}
            assert group.ledger.begun == []

        await until(lambda: len(group.ledger.consumed) == 10, DEADLINE)

    told = [line for line in caplog.messages if "where orders@broker-a:0 begins" in line]
    assert len(told) == 1


def test_beginnings_are_read_in_every_form_users_know():
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)

    assert consume_from("last") == consume_from("CONSUME_FROM_LAST_OFFSET") == ConsumeFrom.LAST
    assert consume_from("first") == consume_from("CONSUME_FROM_FIRST_OFFSET") == ConsumeFrom.FIRST
    assert consume_from(noon) == ConsumeFrom(Begin.TIME, noon.timestamp())
    assert consume_from(noon.timestamp()) == consume_from(noon)
    assert consume_from(1) == ConsumeFrom(Begin.TIME, 1.0)
    # As Java reads it: in local time.
    local = datetime(2026, 1, 31, 12, 0, 1)  # noqa: DTZ001
    assert consume_from("20260131120001").time == local.timestamp()
    assert consume_from(ConsumeFrom.FIRST) is ConsumeFrom.FIRST


async def test_who_may_consume_and_not_ask_begins_at_0_as_java_clients_do(cluster, engine):
    def forbid(_, request):
        return request.answer(ResponseCode.NO_PERMISSION, remark="only Sub")

    with answering(cluster.brokers[0], RequestCode.GET_MIN_OFFSET, forbid):
        assert await starting(engine, ConsumeFrom.FIRST).offset(ORDINARY) == 0
    with (
        answering(cluster.brokers[0], RequestCode.GET_MAX_OFFSET, forbid),
        pytest.raises(BrokerRefused),
    ):
        await starting(engine, ConsumeFrom.LAST).offset(ORDINARY)


@pytest.mark.parametrize(
    "given", ["", "latest", "20261331120000", "2026", None, True, float("nan"), timedelta(1)]
)
def test_what_is_no_beginning_is_refused_by_name(given):
    with pytest.raises(SettingError, match="begin_at must be"):
        consume_from(given, "begin_at")


def test_heartbeats_name_the_rule_as_apache_does():
    assert ConsumeFrom.LAST.wire_name is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    assert ConsumeFrom.FIRST.wire_name is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    assert ConsumeFrom(Begin.TIME, 0.0).wire_name is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
