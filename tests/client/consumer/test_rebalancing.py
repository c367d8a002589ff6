"""When shares are worked out, and what happens when they cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.consumer.strategies import AveragelyByCircle
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import ConsumerRunningInfo, TopicConfig
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetConsumerListRequest, GetConsumerRunningInfoRequest
from orbitmq.wire.javajson import decode_body
from tests.support.broker import RawClient, until
from tests.support.rebalancing import GROUP, QUICK, TOPIC, Consumer, Group, answering, refusing
from tests.support.tries import TRIES

COUNT = 4
QUEUES = [Queue(TOPIC, "broker-a", place) for place in range(COUNT)]
DEADLINE = 20.0


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic(TOPIC, queues=COUNT)
        yield cluster


@pytest.fixture
async def group(cluster):
    async with Group(cluster.name_server) as group:
        yield group


@pytest.fixture
async def client(cluster):
    client = await RawClient.open(cluster.brokers[0])
    yield client
    await client.close()


async def settled(group: Group, queues: Sequence[Queue] = QUEUES) -> None:
    await until(lambda: group.ledger.is_settled(queues), DEADLINE)


# ---- when


@pytest.mark.feature("A9")
async def test_the_first_pull_comes_within_a_second_of_the_start_and_rounds_go_on(cluster, client):
    assert RebalanceSettings().interval == 20.0
    assert RebalanceSettings().retry == 1.0
    pulled_after: list[float] = []
    for number in range(TRIES):
        async with Group(cluster.name_server, group=f"{GROUP}-{number}") as group:
            started = asyncio.get_running_loop().time()
            consumer = await group.join(settings=replace(QUICK, interval=0.05))
            await settled(group)
            pulled_after.append(group.ledger.begun[-1].at - started)
            await _goes_on(consumer)
        if number >= 2 and min(pulled_after) < 1.0:
            break

    # What the machine is late with is not the consumer's: one that was not disturbed is enough.
    assert min(pulled_after) < 1.0


async def _goes_on(consumer: Consumer) -> None:
    before = consumer.rebalancer.counts.rounds
    await until(lambda: consumer.rebalancer.counts.rounds > before + 3, DEADLINE)


async def test_a_round_that_left_something_undone_is_repeated_soon(cluster):
    settings = RebalanceSettings(interval=60.0, retry=0.02)
    async with Group(cluster.name_server, settings=settings) as group:
        with refusing(cluster.brokers[0], RequestCode.GET_CONSUMER_LIST_BY_GROUP):
            consumer = await group.join()
            await until(lambda: consumer.rebalancer.counts.failed_rounds >= 3, DEADLINE)
            assert consumer.owned == set()

        await until(lambda: consumer.owned == set(QUEUES), DEADLINE)


async def test_many_notices_at_once_are_few_rounds(cluster, group):
    consumer = await group.join(settings=replace(QUICK, spacing=0.05))
    await settled(group)
    counts = consumer.rebalancer.counts
    before = counts.rounds
    began = asyncio.get_running_loop().time()

    notices = 0
    while counts.rounds < before + 5:
        consumer.rebalancer.wake()
        notices += 1
        await asyncio.sleep(0)

    assert notices > 20
    # Five rounds have four pauses between them.
    assert asyncio.get_running_loop().time() - began >= 4 * 0.05


@pytest.mark.feature("A11")
async def test_a_topic_that_grows_and_shrinks_loses_nothing_and_needs_no_restart(cluster, client):
    sent = 0

    async def send(queues):
        nonlocal sent
        for number in range(5 * queues):
            await client.stored(TOPIC, queue_id=number % queues)
            sent += 1

    async with Group(cluster.name_server, client={"route_refresh": 0.05}) as group:
        for _ in range(2):
            await group.join()
        await settled(group)
        await send(4)
        await cluster.create_topic(TOPIC, queues=8)
        await send(8)
        eight = [Queue(TOPIC, "broker-a", place) for place in range(8)]
        await settled(group, eight)
        await send(8)
        await until(lambda: len(group.ledger.consumed) == sent, DEADLINE)
        await cluster.create_topic(TOPIC, queues=4)
        await settled(group)
        await send(4)
        await until(lambda: len(group.ledger.consumed) == sent, DEADLINE)

        assert group.ledger.duplicates == {}
        assert group.ledger.overlaps == []
        assert set(group.ledger.owners()) == set(QUEUES)


# ---- what cannot be worked out


@pytest.mark.usefixtures("inside")
@pytest.mark.feature("A12")
async def test_members_that_cannot_be_read_leave_the_shares_as_they_are(
    cluster, group, client, caplog
):
    asked: list[str] = []
    first, second = [await group.join(settings=replace(QUICK, retry=0.02)) for _ in range(2)]
    await settled(group)
    owners = group.ledger.owners()
    with refusing(cluster.brokers[0], RequestCode.GET_CONSUMER_LIST_BY_GROUP):
        before = first.rebalancer.counts.failed_rounds
        first.rebalancer.wake()
        second.rebalancer.wake()
        await until(lambda: first.rebalancer.counts.failed_rounds > before + 5, DEADLINE)
        for queue in QUEUES:
            await client.stored(TOPIC, queue_id=queue.id)
        await until(lambda: len(group.ledger.consumed) == COUNT, DEADLINE)
        assert group.ledger.owners() == owners
    told = [line for line in caplog.messages if f"the share of {TOPIC} stays as it is" in line]
    assert len(told) == 2  # once for each of the two

    def note(_, request):
        asked.append(request.header(GetConsumerListRequest).consumer_group)
        return request.answer(1, remark="not now")

    with answering(cluster.brokers[0], RequestCode.GET_CONSUMER_LIST_BY_GROUP, note):
        await until(lambda: len(asked) >= 1, DEADLINE)
        assert set(asked) == {GROUP}


async def test_a_broker_that_knows_nobody_of_the_group_hears_of_us_and_is_asked_again(
    cluster, group
):
    refused: list[Command] = []
    handlers = cluster.brokers[0]._dispatcher
    assert handlers is not None
    usual = handlers._handlers[RequestCode.GET_CONSUMER_LIST_BY_GROUP]

    def refuse_once(connection, request):  # as the broker answers
        if refused:
            return usual(connection, request)
        refused.append(request)
        return request.answer(1, remark="no consumer for this group, billing")

    with answering(cluster.brokers[0], RequestCode.GET_CONSUMER_LIST_BY_GROUP, refuse_once):
        consumer = await group.join(settings=replace(QUICK, retry=60.0))
        await until(lambda: consumer.owned == set(QUEUES), DEADLINE)

    assert refused
    assert consumer.rebalancer.counts.failed_rounds == 0


@pytest.mark.feature("A12")
async def test_members_are_read_from_a_broker_that_has_the_topic():
    def note(_, request):
        asked.append(request.header(GetConsumerListRequest).consumer_group)
        return request.answer(1, remark="not here")

    asked: list[str] = []
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        await cluster.create_topic("everywhere", queues=1)
        one, two = cluster.brokers
        config = TopicConfig(topic_name=TOPIC, read_queue_nums=4, write_queue_nums=4, perm=6)
        one.parts.topics.update(config, now=cluster.clock.now())
        one.parts.registration.notice()
        settings = replace(QUICK, retry=0.05, interval=0.05)
        with answering(two, RequestCode.GET_CONSUMER_LIST_BY_GROUP, note):
            async with Group(cluster.name_server, settings=settings) as group:
                consumer = await group.join(topics=(TOPIC, "everywhere"))
                await until(lambda: set(QUEUES) <= consumer.owned, DEADLINE)
                # The topic that is on both brokers is asked about at either, sooner or later.
                await until(lambda: asked, DEADLINE)

                counts = consumer.rebalancer.counts
                before = counts.rounds
                consumer.subscriptions.remove("everywhere")
                await until(lambda: counts.rounds > before + 1, DEADLINE)
                asked.clear()
                before = counts.rounds
                await until(lambda: counts.rounds > before + 20, DEADLINE)
                assert asked == []


@pytest.mark.feature("A19")
async def test_a_strategy_that_raises_leaves_the_shares_as_they_are_and_is_named(
    cluster, group, caplog
):
    is_broken = False

    def moody(queues, ids, me):
        if is_broken:
            raise ZeroDivisionError
        return AveragelyByCircle()(queues, ids, me)

    consumer = await group.join(strategy=moody, settings=replace(QUICK, retry=0.02))
    await until(lambda: consumer.owned == set(QUEUES), DEADLINE)
    is_broken = True
    newcomer = await group.join(strategy=moody, settings=replace(QUICK, retry=0.02))
    failed = consumer.rebalancer.counts
    await until(lambda: failed.failed_rounds >= 3, DEADLINE)
    assert consumer.owned == set(QUEUES)
    assert newcomer.owned == set()
    assert "moody': ZeroDivisionError" in caplog.text

    is_broken = False
    await until(lambda: len(newcomer.owned) == 2, DEADLINE)
    assert len(consumer.owned) == 2


@pytest.mark.feature("A16")
async def test_a_queue_whose_pull_has_stalled_is_begun_anew(cluster, group, client):
    assert RebalanceSettings().stalled == 120.0
    consumer = await group.join(settings=replace(QUICK, stalled=60.0))
    await settled(group)
    stalled = consumer.rebalancer.owned[QUEUES[2]]
    consumer.puller.end(stalled)
    await client.stored(TOPIC, queue_id=2)
    stalled.last_pull -= 61.0
    consumer.rebalancer.wake()

    await until(lambda: len(group.ledger.consumed) == 1, DEADLINE)

    assert stalled.is_dropped
    assert consumer.rebalancer.owned[QUEUES[2]] is not stalled
    assert consumer.rebalancer.counts.stalled == 1
    assert [begun.queue for begun in group.ledger.begun].count(QUEUES[2]) == 2


# ---- who is told


@pytest.mark.feature("A18")
async def test_the_application_hears_of_every_change_of_its_queues(cluster, group, caplog):
    heard: list[tuple[str, tuple[Queue, ...], tuple[Queue, ...]]] = []
    heard_async: list[tuple[Queue, ...]] = []

    def listen(topic, queues, own):
        heard.append((topic, queues, own))
        raise ValueError("a listener's own trouble")

    async def listen_later(_, __, own):
        await asyncio.sleep(0)
        heard_async.append(own)

    first = await group.join(listener=listen)
    await until(lambda: heard and heard[-1][2] == tuple(QUEUES), DEADLINE)
    second = await group.join(listener=listen_later)
    await settled(group)
    await until(lambda: set(heard[-1][2]) == first.owned, DEADLINE)
    await until(lambda: heard_async and set(heard_async[-1]) == second.owned, DEADLINE)
    await second.stop()
    await until(lambda: heard[-1][2] == tuple(QUEUES), DEADLINE)

    assert {(topic, queues) for topic, queues, _ in heard} == {(TOPIC, tuple(QUEUES))}
    assert heard_async[-1] == ()
    assert "the assignment listener of group billing failed on orders" in caplog.text


async def test_others_are_told_what_a_consumer_holds(cluster, group, client):
    gate = asyncio.Event()

    async def waits(_, __):
        await gate.wait()

    consumer = await group.join(handler=waits)
    await settled(group)
    for _ in range(3):
        await client.stored(TOPIC, queue_id=1)
    await until(lambda: sum(group.ledger.running.values()) == 3, DEADLINE)

    header = GetConsumerRunningInfoRequest(consumer_group=GROUP, client_id=consumer.client_id)
    answer = await client.connection.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    info = decode_body(ConsumerRunningInfo, answer.body)
    gate.set()

    assert {(queue.topic, queue.queue_id) for queue in info.mq_table} == {
        (TOPIC, place) for place in range(COUNT)
    }
    (busy,) = [each for queue, each in info.mq_table.items() if queue.queue_id == 1]
    assert (busy.cached_msg_count, busy.cached_msg_min_offset, busy.cached_msg_max_offset) == (
        3,
        0,
        2,
    )
    now = cluster.clock.now() * 1000
    assert now - 60_000 < busy.last_pull_timestamp <= now
    assert not busy.is_dropped


def test_settings_that_cannot_work_are_refused_by_name():
    wrong: list[dict[str, Any]] = [
        {"interval": 0},
        {"retry": -1.0},
        {"persist": True},
        {"handover": -0.1},
        {"answer": "1"},
    ]
    for given in wrong:
        with pytest.raises(SettingError, match=f"rebalance.{next(iter(given))} must be"):
            RebalanceSettings(**given)
    assert RebalanceSettings(handover=0, return_grace=0, spacing=0).handover == 0
