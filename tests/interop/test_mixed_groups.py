"""One group, Java's consumers and ours, over sixteen queues, while members come and go.

At our broker and at Apache's, with both strategies that people use. When everybody knows of a
change, each queue is consumed by exactly the member that the strategy names, whatever it is written
in; and nothing that was sent is missed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.consumer.allocation import Strategy, share, strategy_named
from orbitmq.client.engine import Engine
from orbitmq.client.errors import NoRoute
from orbitmq.client.names import AUTO_CREATE_TOPIC
from orbitmq.client.producer.asyncproducer import AsyncProducer
from orbitmq.client.queue import Queue
from orbitmq.testing import EmbeddedCluster
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.topics import CreateTopicRequest
from tests.interop.apache import Broker, NameServer, Release
from tests.interop.session import Running, Session
from tests.support.broker import until
from tests.support.client import quick_settings
from tests.support.rebalancing import Consumer, Group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

COUNT = 16
DEADLINE = 60.0
Place = tuple[Queue, int]


@pytest.fixture(scope="module", params=["our broker", "Apache's broker"])
def name_server_address(
    request: pytest.FixtureRequest, release: Release, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Where a name server is, that knows a broker."""
    if request.param == "our broker":
        with EmbeddedCluster() as cluster:
            yield cluster.name_server
    else:
        home = tmp_path_factory.mktemp("mixed")
        with (
            NameServer.running(release, home / "names") as names,
            Broker.running(release, home / "broker", names.address),
        ):
            yield names.address


class Mixed:
    """A group of both kinds, and what its members got."""

    def __init__(
        self, session: Session, group: Group, producer: AsyncProducer, topic: str, strategy: str
    ) -> None:
        self._session = session
        self._group = group
        self._producer = producer
        self._topic = topic
        self._strategy = strategy
        self.queues = [Queue(topic, "broker-a", place) for place in range(COUNT)]
        self.java: dict[str, Running] = {}
        self._gone: list[tuple[str, Running]] = []
        self.sent: list[Place] = []

    def join_java(self, name: str) -> None:
        self.java[f"127.0.0.1@{name}"] = self._session.start(
            "consume",
            {
                "topic": self._topic,
                "group": self._topic,
                "strategy": self._strategy,
                "instance": name,
                "hold": "",
                "deadline": 240,
            },
        )

    async def leave_java(self, name: str) -> None:
        running = self.java.pop(f"127.0.0.1@{name}")
        self._gone.append((name, running))
        await asyncio.to_thread(running.release)

    async def join(self) -> Consumer:
        return await self._group.join(
            topics=(self._topic,), group=self._topic, strategy=strategy_named(self._strategy)
        )

    async def send(self) -> list[Place]:
        """A message to every queue."""
        results = await asyncio.gather(
            *(self._producer.send(self._topic, b"hello", queue=queue) for queue in self.queues)
        )
        places = [(result.queue, result.queue_offset) for result in results]
        self.sent += places
        return places

    def consumed(self) -> dict[Place, list[str]]:
        """Who got each message."""
        found = {place: list(who) for place, who in self._group.ledger.by.items()}
        for client_id, running in (*self.java.items(), *self._gone):
            for line in list(running.lines):
                if "queueOffset" in line:
                    queue = Queue(self._topic, "broker-a", line["queueId"])
                    found.setdefault((queue, line["queueOffset"]), []).append(client_id)
        return found

    def owners(self) -> dict[Queue, str]:
        """Who each queue belongs to, by the strategy."""
        strategy: Strategy = strategy_named(self._strategy)
        ids = [*self.java, *(member.client_id for member in self._group.living)]
        return {
            queue: member for member in ids for queue in share(strategy, self.queues, ids, member)
        }

    async def settles(self) -> None:
        """Messages come to their owners; and then do so every time, once."""
        async with asyncio.timeout(DEADLINE):
            while not await self._come_to_their_owners():  # noqa: ASYNC110  # nobody could set one
                await asyncio.sleep(0.1)
        for _ in range(5):
            assert await self._come_to_their_owners()

    async def _come_to_their_owners(self) -> bool:
        places = await self.send()
        await until(lambda: set(places) <= set(self.consumed()), DEADLINE)
        consumed, owners = self.consumed(), self.owners()
        return all(consumed[place] == [owners[place[0]]] for place in places)


@pytest.mark.parametrize("strategy", ["AVG", "CONSISTENT_HASH"])
async def test_members_in_both_languages_share_without_overlap_and_gap(
    release: Release, name_server_address: str, tmp_path: Path, strategy: str
) -> None:
    name_server = name_server_address
    topic = f"mixed-{strategy}"
    async with contextlib.AsyncExitStack() as stack:
        session = stack.enter_context(Session.running(release, tmp_path, name_server))
        engine = await stack.enter_async_context(Engine(quick_settings(name_server)))
        await _make_topic(engine, topic)
        producer = await stack.enter_async_context(AsyncProducer.on(engine, "makers"))
        group = await stack.enter_async_context(Group(name_server))
        mixed = Mixed(session, group, producer, topic, strategy)

        mixed.join_java("java-1")
        ours = await mixed.join()
        await mixed.settles()
        mixed.join_java("java-2")
        await mixed.join()
        await mixed.settles()
        await mixed.leave_java("java-1")
        await mixed.settles()
        await ours.stop()
        await mixed.join()
        await mixed.settles()
        await group.end()
        await mixed.settles()

        got = mixed.consumed()
        assert set(got) == set(mixed.sent)
        repeated = sum(len(who) > 1 for who in got.values())
        print(f"{len(mixed.sent)} messages, {repeated} of them came again in a hand-over")
        assert group.ledger.overlaps == []
        await mixed.leave_java("java-2")


async def _make_topic(engine: Engine, topic: str) -> None:
    header = CreateTopicRequest(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=COUNT,
        write_queue_nums=COUNT,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    broker = await engine.routes.broker_of(AUTO_CREATE_TOPIC)
    await engine.ask(broker, RequestCode.UPDATE_AND_CREATE_TOPIC, header)
    engine.routes.track(topic)
    async with asyncio.timeout(DEADLINE):
        while len(await _queues(engine, topic)) < COUNT:  # noqa: ASYNC110  # likewise
            await asyncio.sleep(0.05)


async def _queues(engine: Engine, topic: str) -> tuple[Queue, ...]:
    try:
        return (await engine.routes.get(topic, refresh=True)).subscribe_queues
    except NoRoute:
        return ()
