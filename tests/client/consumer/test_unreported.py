"""Progress that could not be reported when a queue was given up, and is when its broker is back."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.consumer.handover import Ownership, QueueClaim
from orbitmq.client.consumer.progress import (
    BrokerProgress,
    ConsumeFrom,
    Landmark,
    StartOffsets,
    Unreported,
    landmark_at,
)
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import OffsetResponse, PullMessageResponse, QueryConsumerOffsetRequest
from tests.support.broker import RawClient
from tests.support.client import ScriptedNameServer, running_engine, topic_route
from tests.support.consumers import fill
from tests.support.consuming import until
from tests.support.rebalancing import (
    GROUP,
    TOPIC,
    Consumer,
    Group,
    Ledger,
    answering,
    refusing,
)

HERE = Queue(TOPIC, "broker-a", 0)
THERE = Queue(TOPIC, "broker-b", 0)
NOWHERE = Queue(TOPIC, "broker-z", 0)
DEADLINE = 30.0

#: Nothing is reported but when a queue is given up, and then not for long.
RARELY = RebalanceSettings(
    interval=0.1, retry=0.05, persist=3600.0, persist_idle=0.0, handover=0.1, return_grace=0.1
)


# ---- a consumer that lives on


async def test_a_consumer_goes_on_where_it_was_after_its_broker_was_away_for_longer_than_it_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        AsyncEmbeddedCluster(brokers=2) as cluster,
        Group(
            cluster.name_server,
            settings=RARELY,
            pulls_report=False,
            client={"route_refresh": 0.1},
        ) as group,
    ):
        await cluster.create_topic(TOPIC, queues=1)
        await fill(cluster, TOPIC, 20, queue=THERE)
        member = await group.join()
        await until(lambda: len(group.ledger.consumed) == 20)

        async with away(cluster, 1):
            await until(lambda: member.owned == {HERE})
            assert "could not be reported, and is when its broker is back" in caplog.text
        await until(lambda: member.owned == {HERE, THERE})

        assert cluster.progress(GROUP, TOPIC)["broker-b", 0] == 20
        await fill(cluster, TOPIC, 1, queue=THERE)
        await until(lambda: (THERE, 20) in group.ledger.consumed)
        assert [each.offset for each in group.ledger.begun if each.queue == THERE] == [0, 20]
        assert not group.ledger.duplicates


@pytest.mark.parametrize("handover", [0.1, 30.0], ids=["given up", "being given up"])
async def test_messages_that_got_the_numbers_of_lost_ones_are_not_passed_over(
    tmp_path: Path, handover: float
) -> None:
    """A broker has lost the last 10 of 20 messages, and got 15 new ones before it is seen again."""
    async with (
        AsyncEmbeddedCluster(brokers=2) as cluster,
        Group(
            cluster.name_server,
            settings=replace(RARELY, handover=handover, persist=0.05),
            pulls_report=False,
            client={"route_refresh": 0.1},
        ) as group,
    ):
        await cluster.create_topic(TOPIC, queues=1)
        await fill(cluster, TOPIC, 10, queue=THERE)
        async with away(cluster, 1) as settings:
            older = shutil.copytree(settings.root, tmp_path / "older")
        await fill(cluster, TOPIC, 10, queue=THERE)
        member = await group.join()
        await until(lambda: len(group.ledger.consumed) == 20)

        async with away(cluster, 1, older) as settings:
            await until(lambda: is_given_up(member) == (handover < 1))
            unseen = Broker(replace(settings, root=older, name_servers=()), clock=cluster.clock)
            await unseen.start()
            try:
                client = await RawClient.open(unseen)
                for number in range(15):
                    assert (await client.stored(TOPIC, b"new")).queue_offset == 10 + number
                await client.close()
            finally:
                await unseen.stop()

        await until(lambda: (THERE, 24) in group.ledger.consumed)
        taken = group.ledger.consumed
        assert [offset for offset in range(10, 20) if taken[THERE, offset] < 2] == []


def is_given_up(member: Consumer) -> bool | None:
    """Whether the queue is; None as long as nobody has begun to."""
    owned = member.rebalancer.owned.get(THERE)
    if owned is None:
        return True
    return False if owned.is_dropped else None


@contextlib.asynccontextmanager
async def away(
    cluster: AsyncEmbeddedCluster, place: int, root: Path | None = None
) -> AsyncIterator[BrokerSettings]:
    """A broker is gone for the time of the block, and was told nothing before.

    It comes back with what is in `root`, if given.
    """
    broker = cluster.brokers[place]
    settings, port = broker.parts.settings, broker.address.port
    with refusing(broker, RequestCode.UPDATE_CONSUMER_OFFSET):
        await broker.stop(grace=0.0)
    yield settings
    server = replace(settings.server, port=port)
    again = replace(settings, server=server, root=root or settings.root)
    cluster._running.brokers[place] = restarted = Broker(again, clock=cluster.clock)
    await restarted.start()


# ---- what is kept


@pytest.fixture
async def cluster() -> AsyncIterator[AsyncEmbeddedCluster]:
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await fill(cluster, TOPIC, 10)
        yield cluster


@pytest.fixture
async def engine(cluster: AsyncEmbeddedCluster) -> AsyncIterator[Engine]:
    """Of a group that has come to 3."""
    async with running_engine(cluster.name_server) as engine:
        engine.routes.track(TOPIC)
        await engine.routes.get(TOPIC)
        async with Group(cluster.name_server) as group:
            await group.join()  # so that the broker knows the group
        await reported(engine, 3)
        yield engine


async def reported(engine: Engine, offset: int) -> None:
    """Some other member of the group says that it is there."""
    other = BrokerProgress(engine, GROUP)
    other.update(HERE, offset)
    await other.persist([HERE])


def unreported(
    engine: Engine,
    ownership: Ownership | None = None,
    most: int = 10,
    begin: ConsumeFrom = ConsumeFrom.FIRST,
) -> Unreported:
    progress = BrokerProgress(engine, GROUP, strict_last=True)
    starting = StartOffsets(engine, progress, begin)
    return Unreported(engine, GROUP, progress, ownership or Ownership(), starting, most=most)


async def mark(engine: Engine, offset: int) -> Landmark:
    """By which the message at an offset is known."""
    found = await landmark_at(engine, GROUP, HERE, offset)
    assert found is not None
    return found


def at_the_broker(cluster: AsyncEmbeddedCluster) -> int:
    return cluster.progress(GROUP, TOPIC)["broker-a", 0]


async def test_a_broker_is_told_what_it_lacks_and_nothing_is_taken_back(
    cluster: AsyncEmbeddedCluster, engine: Engine
) -> None:
    kept = unreported(engine)

    # It has less.
    kept.keep(HERE, 5, await mark(engine, 4))
    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (5, 0)

    # Somebody else has the queue by now, and has come further.
    kept.keep(HERE, 6, await mark(engine, 5))
    await reported(engine, 8)
    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (8, 0)

    # The messages are not there any more: other ones get their numbers.
    lost = replaced(await mark(engine, 9), offset=10)
    kept.keep(HERE, 11, lost)
    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (8, 0)

    # Somebody has reset the progress, which is not undone.
    kept.keep(HERE, 9, await mark(engine, 8))
    kept.drop([HERE])
    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (8, 0)

    # A broker that does not want it is not asked for ever.
    kept.keep(HERE, 9, await mark(engine, 8))
    with refusing(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET):
        await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (8, 0)


async def test_a_reset_while_a_position_is_being_proven_is_not_undone(
    cluster: AsyncEmbeddedCluster, engine: Engine
) -> None:
    kept = unreported(engine)
    kept.keep(HERE, 5, await mark(engine, 4))
    dispatcher = cluster.brokers[0]._dispatcher
    assert dispatcher is not None
    usual = dispatcher._handlers[RequestCode.PULL_MESSAGE]

    def is_reset(connection: Connection, request: Command) -> Any:
        kept.drop([HERE])
        return usual(connection, request)

    with answering(cluster.brokers[0], RequestCode.PULL_MESSAGE, is_reset):
        await kept.settle(HERE)

    assert (at_the_broker(cluster), len(kept)) == (3, 0)


async def test_a_reset_while_a_position_waits_for_its_turn_is_not_undone(
    cluster: AsyncEmbeddedCluster, engine: Engine
) -> None:
    progress = BrokerProgress(engine, GROUP, strict_last=True)
    starting = StartOffsets(engine, progress, ConsumeFrom.FIRST)
    kept = Unreported(engine, GROUP, progress, Ownership(), starting)
    kept.keep(HERE, 5, await mark(engine, 4))

    async with progress._turns.setdefault(HERE.broker, asyncio.Lock()):
        settling = asyncio.create_task(kept.settle(HERE))
        await until(lambda: progress.read(HERE) == 5)
        kept.drop([HERE])
    await asyncio.wait_for(settling, DEADLINE)

    assert (at_the_broker(cluster), len(kept)) == (3, 0)


@pytest.mark.parametrize(
    "header",
    [
        None,
        PullMessageResponse(
            suggest_which_broker_id=0, next_begin_offset=5, min_offset=0, max_offset=10
        ),
    ],
    ids=["header", "record"],
)
async def test_an_answer_that_cannot_be_read_proves_nothing_and_holds_nothing_up(
    cluster: AsyncEmbeddedCluster, engine: Engine, header: PullMessageResponse | None
) -> None:
    kept = unreported(engine)
    kept.keep(HERE, 5, await mark(engine, 4))

    def nonsense(_: Connection, request: Command) -> Command:
        return request.answer(ResponseCode.SUCCESS, header, body=b"no record at all")

    with answering(cluster.brokers[0], RequestCode.PULL_MESSAGE, nonsense):
        await kept.settle(HERE)

    assert (at_the_broker(cluster), len(kept)) == (3, 0)


async def test_a_queue_of_which_nothing_can_be_said_keeps_no_other_from_being_reported(
    cluster: AsyncEmbeddedCluster, engine: Engine
) -> None:
    strange = Queue("strange", "broker-a", 0)
    kept = unreported(engine)
    kept.keep(strange, 5, None)
    kept.keep(HERE, 5, await mark(engine, 4))
    dispatcher = cluster.brokers[0]._dispatcher
    assert dispatcher is not None
    usual = dispatcher._handlers[RequestCode.QUERY_CONSUMER_OFFSET]

    def nonsense(connection: Connection, request: Command) -> Any:
        if request.header(QueryConsumerOffsetRequest).topic == strange.topic:
            return request.answer(ResponseCode.SUCCESS, OffsetResponse(offset=-1))
        return usual(connection, request)

    with answering(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET, nonsense):
        await kept.report()

    assert (at_the_broker(cluster), len(kept)) == (5, 1)


@pytest.mark.parametrize(
    "code", [RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET], ids=["look", "report"]
)
async def test_a_broker_that_is_busy_is_told_later(
    cluster: AsyncEmbeddedCluster, engine: Engine, code: RequestCode
) -> None:
    kept = unreported(engine)
    kept.keep(HERE, 5, await mark(engine, 4))

    def busy(_: Connection, request: Command) -> Command:
        return request.answer(ResponseCode.SYSTEM_BUSY, remark="not now")

    with answering(cluster.brokers[0], code, busy):
        await kept.report()
        assert (at_the_broker(cluster), len(kept)) == (3, 1)
        with pytest.raises(BrokerRefused, match="not now"):
            await kept.settle(HERE)
    await kept.report()

    assert (at_the_broker(cluster), len(kept)) == (5, 0)


async def test_while_only_a_slave_is_there_a_queue_begins_where_it_says(
    cluster: AsyncEmbeddedCluster, engine: Engine
) -> None:
    """What was kept is not used later either: the queue has gone on from elsewhere."""
    landmark, slave = await mark(engine, 4), {1: cluster.brokers[0].address}
    ledger = Ledger()
    async with ScriptedNameServer().serving() as name_server:
        name_server.routes[TOPIC] = topic_route({"broker-a": slave}, queues=1)
        async with running_engine(name_server.address) as alone:
            consumer = Consumer(alone, ledger, settings=RARELY)
            consumer.rebalancer._unreported.keep(HERE, 5, landmark)
            await consumer.start()
            try:
                await until(lambda: consumer.owned == {HERE})
                still_kept = len(consumer.rebalancer._unreported)
            finally:
                await consumer.stop()

    assert [each.offset for each in ledger.begun] == [3]
    assert still_kept == 0


async def test_a_position_counts_as_far_as_a_message_proves_it(
    cluster: AsyncEmbeddedCluster, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    kept = unreported(engine)
    there = await mark(engine, 5)

    # Another message has the number: an older one by its time, or just another one.
    for other in (replaced(there, store_ms=there.store_ms - 1), replaced(there, crc=1)):
        kept.keep(HERE, 6, other)
        await kept.report()
        assert (at_the_broker(cluster), len(kept)) == (3, 0)
    assert "the messages before that may be other ones now" in caplog.text

    # None was ever seen.
    kept.keep(HERE, 6, None)
    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (3, 0)

    # What the filter left out behind the last one that was seen is not proven.
    kept.keep(HERE, 9, there)
    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (6, 0)

    # One that is still unfinished proves what lies before it.
    kept.keep(HERE, 8, await mark(engine, 8))
    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (8, 0)


def replaced(landmark: Landmark, **changes: int) -> Landmark:
    return msgspec.structs.replace(landmark, **changes)


@pytest.mark.parametrize(
    ("begin", "expected"), [(ConsumeFrom.LAST, {("broker-a", 0): 6}), (ConsumeFrom.FIRST, {})]
)
async def test_a_group_that_would_begin_behind_its_position_needs_no_proof_of_it(
    cluster: AsyncEmbeddedCluster,
    engine: Engine,
    begin: ConsumeFrom,
    expected: dict[tuple[str, int], int],
) -> None:
    await cluster.create_topic("young", queues=1)
    await fill(cluster, "young", 10)
    await engine.routes.get("young")
    kept = unreported(engine, begin=begin)

    kept.keep(Queue("young", "broker-a", 0), 6, None)
    await kept.report()

    assert (cluster.progress(GROUP, "young"), len(kept)) == (expected, 0)


async def test_a_queue_that_is_about_to_be_ours_is_settled_by_whoever_begins_it(
    cluster: AsyncEmbeddedCluster, engine: Engine
) -> None:
    ownership = Ownership()
    kept = unreported(engine, ownership)
    kept.keep(NOWHERE, 5, None)  # away for good: keeps nobody else from being told
    kept.keep(HERE, 5, await mark(engine, 4))
    ownership.claims[HERE] = QueueClaim(HERE, 0.0, ())

    await kept.report()
    assert (at_the_broker(cluster), len(kept)) == (3, 2)

    await kept.settle(HERE)
    assert (at_the_broker(cluster), len(kept)) == (5, 1)


async def test_of_very_many_the_oldest_is_forgotten(
    cluster: AsyncEmbeddedCluster, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    kept = unreported(engine, most=2)

    for number, queue in enumerate([HERE, THERE, NOWHERE], start=4):
        kept.keep(queue, number, await mark(engine, number - 1))

    assert len(kept) == 2
    assert f"in {HERE} is forgotten" in caplog.text
    await kept.report()
    assert at_the_broker(cluster) == 3
