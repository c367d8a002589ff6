"""Consumers whose broker is a process that freezes, or is killed and started again.

The name server and `broker-a` live in another process and are well all the time; `broker-b` is the
one that things happen to. A broker that is frozen keeps its connections and answers nothing, like a
machine that was unplugged.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.command import Started
from tests.support.consumers import consumer_of, fill, own_queues, send
from tests.support.consuming import DEADLINE, until

GROUP = "billing"
HERE = Queue("orders", "broker-a", 0)
THERE = Queue("orders", "broker-b", 0)

#: Rounds follow each other quickly.
OFTEN = RebalanceSettings(interval=0.1, retry=0.05, persist=0.05)


class BrokerApart:
    """`broker-b`, a process of its own with a folder that outlives it."""

    def __init__(self, folder: Path, name_server: str) -> None:
        self._folder = folder
        self._name_server = name_server
        self._port = "0"
        self._started: Started | None = None

    async def start(self) -> None:
        """Start it, or start it again where it was."""
        words = ("broker", "--name", "broker-b", "--data", str(self._folder / "broker-b"))
        where = ("--port", self._port, "--name-server", self._name_server)
        self._started = await asyncio.to_thread(Started, *words, *where)
        self._port = self._started.address("broker-b").rpartition(":")[2]

    def freeze(self) -> None:
        self._process.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it at this instant, also when it is frozen or has ended."""
        started, self._started = self._started, None
        if started is not None:
            await asyncio.to_thread(started.stop, signal.SIGKILL)

    @property
    def _process(self) -> Started:
        assert self._started is not None
        return self._started


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as running:
        yield running


@pytest.fixture
async def apart(cluster, tmp_path):
    broker = BrokerApart(tmp_path, cluster.name_server)
    try:
        await broker.start()
        yield broker
    finally:
        await broker.kill()


async def make_topic(cluster: AsyncEmbeddedCluster, *brokers: str, queues: int = 1) -> None:
    async with AsyncAdmin(name_server=cluster.name_server) as admin, asyncio.timeout(DEADLINE):
        # A broker is ready before the name server knows it.
        while set(brokers) - await registered(admin):  # noqa: ASYNC110  # is asked for
            await asyncio.sleep(0.01)
        await admin.topics.create("orders", queues=queues, brokers=brokers)


async def registered(admin: AsyncAdmin) -> set[str]:
    return {each.node.broker for each in (await admin.cluster()).brokers}


def impatient(cluster: AsyncEmbeddedCluster, **options: Any) -> AsyncConsumer:
    """A consumer that waits for no answer for long."""
    client = quick_settings(cluster.name_server, request_timeout=0.2, route_refresh=0.2)
    return consumer_of(cluster, GROUP, client=client, rebalance=OFTEN, **options)


# ---- the members of a group


@pytest.mark.feature("A12")
async def test_members_that_the_broker_of_their_topic_does_not_list_keep_their_queues(
    cluster, apart, caplog
):

    def told():
        return [line for line in caplog.messages if "share of orders stays as it is" in line]

    seen: list[int] = []
    await make_topic(cluster, "broker-b", queues=4)
    async with contextlib.AsyncExitStack() as group:
        members = [impatient(cluster) for _ in range(2)]
        for member in members:
            member.on("orders")(lambda message: seen.append(message.queue.id))
            await group.enter_async_context(member)
        await until(lambda: [len(own_queues(member)) for member in members] == [2, 2])
        await until(lambda: not any(member.statistics().troubles for member in members))
        shares = [own_queues(member) for member in members]

        apart.freeze()
        await until_failed(members, rounds=2)  # one may have been under way
        assert told()
        caplog.clear()
        await until_failed(members, rounds=3)
        assert not told(), "told again, although nothing has changed"
        assert all("orders stays" in str(member.statistics().troubles) for member in members)
        assert [own_queues(member) for member in members] == shares

        apart.thaw()
        await until(lambda: not any(member.statistics().troubles for member in members))
        assert [own_queues(member) for member in members] == shares
        for number in range(4):
            await send(cluster, "orders", ["x"], queue=Queue("orders", "broker-b", number))
        await until(lambda: sorted(seen) == [0, 1, 2, 3])


async def until_failed(members: list[AsyncConsumer], *, rounds: int) -> None:
    """Wait until so many more rounds of each have failed, of its topic and of its retry topic."""
    wanted = max(map(_failures, members)) + 2 * rounds
    await until(lambda: min(map(_failures, members)) >= wanted)


def _failures(member: AsyncConsumer) -> int:
    core: Any = member._core  # what is told to users is that rounds fail, not how often
    count: int = core.rebalancer.counts.failed_rounds
    return count


# ---- where a queue begins


@pytest.mark.feature("A14")
async def test_a_queue_whose_beginning_is_not_told_waits_and_then_begins_where_it_should(
    cluster, apart, caplog
):
    seen: dict[Queue, list[int]] = {HERE: [], THERE: []}
    await make_topic(cluster, "broker-a", "broker-b")
    for queue in seen:
        await fill(cluster, "orders", 4, queue=queue)
    since = cluster.clock.now()
    await until(lambda: cluster.clock.now() > since + 0.01)
    for queue in seen:
        await fill(cluster, "orders", 6, queue=queue)
    # Strict: of a topic as young as this one, brokers would else say that it begins at 0.
    consumer = impatient(cluster, consume_from=since + 0.005, strict_last=True)
    consumer.on("orders")(lambda message: seen[message.queue].append(message.queue_offset))

    apart.freeze()
    async with consumer:
        # Both queues are begun together, so that by now the other broker was asked as well.
        await until(lambda: len(seen[HERE]) == 6)
        await apart.kill()
        await until(lambda: f"where {THERE} begins cannot be read" in caplog.text)
        assert own_queues(consumer) == [HERE]

        await apart.start()
        await until(lambda: len(seen[THERE]) == 6)
        assert own_queues(consumer) == [HERE, THERE]

    assert [sorted(offsets) for offsets in seen.values()] == [[4, 5, 6, 7, 8, 9]] * 2
