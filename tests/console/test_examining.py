"""One thorough look: what it calls a fault, and what it leaves unjudged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.engine import Engine
from orbitmq.client.errors import GroupNotFound
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock, SystemClock
from orbitmq.console import checks
from orbitmq.console.checks import (
    PATIENCE,
    ClockWatch,
    Examination,
    Fault,
    compare_clocks,
    examine,
    find_faults,
)
from orbitmq.console.collect import STALLED_AFTER
from orbitmq.console.history import REPORT_INTERVAL
from orbitmq.console.resends import ResentLetters
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode
from tests.support.client import quick_settings
from tests.support.client_admin import World

QUEUE = Queue("orders", "broker-a", 0)
DEADLINE = 30.0


@dataclass
class Practice:
    """Where a doctor works: a cluster, and what it is examined with."""

    cluster: AsyncEmbeddedCluster
    engine: Engine
    admin: AsyncAdmin
    world: World

    async def examine(self, **options: float) -> Examination:
        async with asyncio.timeout(DEADLINE):
            return await examine(self.engine, self.admin, self.cluster.clock, **options)  # type: ignore[arg-type]  # all are numbers


@pytest.fixture
async def practice():
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(AsyncEmbeddedCluster())
        await cluster.create_topic("orders", queues=1)
        client = quick_settings(cluster.name_server)
        engine = await stack.enter_async_context(Engine(client, clock=cluster.clock))
        admin = AsyncAdmin.on(engine)
        world = World(cluster, admin)
        stack.push_async_callback(world.close)
        yield Practice(cluster, engine, admin, world)


@contextlib.asynccontextmanager
async def hanging(practice: Practice) -> AsyncIterator[None]:
    """A group that was given messages long ago and never finished one."""
    client = quick_settings(practice.cluster.name_server)
    impatient = RebalanceSettings(handover=0.2)
    has_begun = asyncio.Event()
    consumer = AsyncConsumer("hanging", client=client, consume_from="first", rebalance=impatient)

    @consumer.on("orders")
    async def hang(_: ReceivedMessage) -> None:
        has_begun.set()
        await asyncio.Event().wait()

    # Subscribed to a topic that is not there, too.
    @consumer.on("missing")
    async def ignore(_: ReceivedMessage) -> None:
        """Never called."""

    async with consumer:
        for _ in range(2):
            await practice.world.send(QUEUE)
        async with asyncio.timeout(DEADLINE):
            await has_begun.wait()
        practice.cluster.advance(STALLED_AFTER + 30)
        yield


def stalled(found: Examination) -> list[Fault]:
    return [fault for fault in find_faults(found.seen) if fault.kind == "stalled"]


async def test_a_group_whose_handlers_hang_is_found_although_it_never_finished_anything(practice):
    async with hanging(practice):
        found = await practice.examine(watch=0.6, patience=0.5)

    (fault,) = stalled(found)
    assert "none was finished for" in fault.text
    assert "2 messages wait" in fault.text
    assert fault.command == "orbitmq group member hanging --stack"
    assert found.watched == {"hanging"}
    assert found.seconds >= 0.6


async def test_no_group_is_called_stalled_before_two_of_its_reports_could_have_come(practice):
    async with hanging(practice):
        found = await practice.examine(watch=0.5)

    assert PATIENCE >= 2 * REPORT_INTERVAL
    assert stalled(found) == []
    assert found.watched == {"hanging"}
    assert found.seconds < PATIENCE


async def test_a_group_whose_member_says_that_it_has_finished_something_is_slow_and_not_stalled(
    practice,
):
    await practice.world.send(QUEUE)
    await practice.world.consumer("client-1")
    await practice.world.report(QUEUE, 0)
    practice.cluster.advance(STALLED_AFTER + 30)

    found = await practice.examine(watch=0.5, patience=0.4)

    assert found.watched == {"billing"}
    assert found.seen.snapshot.groups["billing"].still >= 0.4
    assert stalled(found) == []


async def test_a_group_that_no_broker_knows_is_refused(practice):
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(GroupNotFound, match="tpyo"):
            await examine(
                practice.engine, practice.admin, practice.cluster.clock, watch=0, only=("tpyo",)
            )


async def test_clocks_are_compared_by_the_topics_that_can_be_read(practice, caplog):
    sealed = [f"sealed-{number}" for number in range(4)]
    for topic in sealed:
        await practice.cluster.create_topic(topic, queues=1)
        await practice.world.send(Queue(topic, "broker-a", 0))
        await practice.admin.topics.update(topic, permission="w")
    topics = [*sealed, "gone", "orders"]
    # By the clock of this machine the broker's messages come from the future.
    practice.cluster.advance(3600.0)
    await practice.world.send(QUEUE)
    clock: Clock = SystemClock()

    async with asyncio.timeout(DEADLINE):
        found = await compare_clocks(practice.admin, topics, clock)
        watch = ClockWatch(practice.admin, lambda: topics, clock)
        await watch.look(topics)
        await watch.look(topics)

    assert found.left_out.keys() == {*sealed, "gone"}
    assert "ahead of this machine's" in found.found["broker-a"]
    assert found.looked == 1
    assert watch.skews.found.keys() == {"broker-a"}
    # Each is named once, and not with every look.
    named = [each for each in caplog.messages if "without topic" in each]
    assert len(named) == 5


@pytest.fixture
def lookups(monkeypatch):
    """The topics that were asked for copies of letters."""
    asked: list[str] = []
    usual = Engine.ask

    async def noted(self, where, code, header=None, **more):
        if code == RequestCode.QUERY_MESSAGE:
            asked.append(header.topic)
        return await usual(self, where, code, header, **more)

    monkeypatch.setattr(Engine, "ask", noted)
    return asked


async def letters(practice: Practice, group: str, count: int) -> None:
    for number in range(count):
        unique_id = f"7F00000100000000{sum(group.encode()):08X}{number:08X}"
        await practice.world.die(QUEUE, b"x", group=group, UNIQ_KEY=unique_id)


async def test_dead_letters_of_all_groups_together_are_looked_up_within_one_bound(
    practice, lookups, monkeypatch
):
    monkeypatch.setattr(checks, "_LETTERS", 12)
    groups = ("billing", "shipping", "archive")
    for group in groups:
        await practice.world.consumer(f"of-{group}", group=group)
        await letters(practice, group, 10)

    snapshot = (await practice.examine(watch=0)).seen.snapshot

    assert all(0 < snapshot.groups[group].open_letters < 10 for group in groups)
    assert snapshot.open_letters + snapshot.unknown_letters == snapshot.dead_letters == 30
    # Each letter is looked for in two topics.
    assert len(lookups) == 2 * snapshot.open_letters <= 2 * 12


async def test_of_dead_letters_those_of_the_last_hour_are_looked_up_and_once(
    practice, lookups, monkeypatch
):
    looked: list[set[str]] = []
    usual = ResentLetters.look

    async def noted(self, groups, *more):
        looked.append(set(groups))
        return await usual(self, groups, *more)

    monkeypatch.setattr(ResentLetters, "look", noted)
    await practice.world.consumer("client-1")
    await practice.world.consumer("client-2", group="archive")
    await letters(practice, "archive", 2)
    await letters(practice, "billing", 5)
    practice.cluster.advance(7200.0)
    await practice.world.die(QUEUE, b"x", UNIQ_KEY="7F00000100000000FFFFFFFF00000000")
    await practice.world.report(QUEUE, 0)
    practice.cluster.advance(STALLED_AFTER + 30)

    found = await practice.examine(watch=0.1)

    # There was a second look, for groups that seemed to stand still.
    assert "billing" in found.watched
    assert looked == [{"billing"}]
    assert sorted(lookups) == ["%RETRY%billing", "orders"]
    group = found.seen.snapshot.groups["billing"]
    assert (group.open_letters, group.open_last_hour, group.unknown_letters) == (1, 1, 5)
