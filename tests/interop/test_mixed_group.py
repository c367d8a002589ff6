"""One group of two Java consumers and three of ours over sixteen queues, under load.

Members come and go in order while messages are sent without a pause. After every change all members
are asked, through the broker, what they hold: each queue is held by exactly one of them, the one
that the strategy names. In the end every message was consumed, and the group's progress is the end
of every queue. At our broker and at Apache's, with both strategies that people use.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Self

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.strategies import share, strategy_named
from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError
from orbitmq.testing import EmbeddedCluster
from tests.interop.beside import Beside, Taken, eventually, until
from tests.interop.session import Session

if TYPE_CHECKING:
    from orbitmq.client.consumer.consumer import AsyncConsumer
    from orbitmq.client.producer.producer import AsyncProducer
    from tests.interop.session import Running

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

COUNT = 16
#: Messages on their way at a time, and seconds between those of each sender.
SENDERS = 4
PAUSE = 0.005
#: Seconds that our handlers take, so that queues change hands while some of them run.
WORK = 0.005
Place = tuple[int, int]


@pytest.fixture(scope="module", params=["our broker", "Apache's broker"])
def place(request, release, tmp_path_factory):
    if request.param == "Apache's broker":
        yield request.getfixturevalue("beside")
        return
    home = tmp_path_factory.mktemp("mixed")
    with (
        EmbeddedCluster() as cluster,
        Session.running(release, home, cluster.name_server) as session,
    ):
        yield Beside(release, cluster.name_server, session)


class Load:
    """Messages to all queues in turn, until it is left."""

    def __init__(self, producer: AsyncProducer, queues: list[Queue]) -> None:
        self._producer = producer
        self._queues = itertools.cycle(queues)
        self.sent: set[Place] = set()
        self._is_wanted = True
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._send()) for _ in range(SENDERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_wanted = False
        await asyncio.gather(*self._tasks)

    async def _send(self) -> None:
        while self._is_wanted:
            queue = next(self._queues)
            sent = await self._producer.send(queue.topic, b"hello", queue=queue)
            self.sent.add((sent.queue.id, sent.queue_offset))
            await asyncio.sleep(PAUSE)


class MixedGroup:
    """The members of both kinds, and what they got."""

    def __init__(self, place: Beside, admin: AsyncAdmin, name: str, strategy: str) -> None:
        self.name = name
        self.queues = [Queue(name, "broker-a", number) for number in range(COUNT)]
        self._place = place
        self._admin = admin
        self._strategy = strategy
        self._java: dict[str, Running] = {}
        self._ours: dict[str, AsyncConsumer] = {}
        self._everybody: list[Running | Taken] = []

    @property
    def members(self) -> list[str]:
        return [*self._java, *self._ours]

    def join_java(self, name: str) -> str:
        settings = {
            "topic": self.name,
            "group": self.name,
            "strategy": self._strategy,
            "instance": name,
            "hold": "",
            "deadline": 240,
        }
        running = self._place.session.start("consume", settings)
        self._everybody.append(running)
        client_id = f"127.0.0.1@{name}"
        self._java[client_id] = running
        return client_id

    async def join_ours(self) -> str:
        taken = Taken(pause=WORK)
        self._everybody.append(taken)
        consumer = self._place.consumer(self.name, self.name, taken, strategy=self._strategy)
        await consumer.start()
        self._ours[consumer.client_id] = consumer
        return consumer.client_id

    async def leave(self, client_id: str) -> None:
        """In order, as every program should."""
        if client_id in self._java:
            await asyncio.to_thread(self._java.pop(client_id).release)
        else:
            await self._ours.pop(client_id).stop()

    async def leave_all(self) -> None:
        await asyncio.gather(*(self.leave(client_id) for client_id in self.members))

    async def settles(self) -> None:
        """Returns when everybody holds what the strategy gives him, and nothing else."""
        strategy = strategy_named(self._strategy)
        ids = self.members
        shares = {each: set(share(strategy, self.queues, ids, each)) for each in ids}
        assert sorted(itertools.chain.from_iterable(shares.values())) == self.queues

        held: dict[str, set[Queue] | None] = {}

        async def is_settled() -> bool:
            held.update({each: await self._held_by(each) for each in ids})
            return held == shares

        try:
            # As many questions at once as it has processors block a Java client (see `handover`):
            # one at a time, and not too often.
            await eventually(is_settled, pause=0.5)
        except TimeoutError:
            assert held == shares
            raise

    async def _held_by(self, client_id: str) -> set[Queue] | None:
        try:
            info = await self._admin.consumers.running_info(self.name, client_id)
        except OrbitError:
            return None  # the broker has not heard of it yet
        return {each.queue for each in info.queues if each.queue.topic == self.name}

    def consumed(self) -> Counter[Place]:
        """How often each message was."""
        found: Counter[Place] = Counter()
        for member in self._everybody:
            if isinstance(member, Taken):
                found.update((each.queue.id, each.queue_offset) for each in member.messages)
            else:
                found.update((line["queueId"], line["queueOffset"]) for line in list(member.lines))
        return found


@pytest.mark.feature("J5")
@pytest.mark.parametrize("strategy", ["AVG", "CONSISTENT_HASH"])
async def test_two_java_and_three_python_consumers_share_without_overlap_and_gap(place, strategy):
    topic = f"mixed-group-{strategy}"
    await place.create_topic(topic, queues=COUNT)
    async with contextlib.AsyncExitStack() as stack:
        admin = await stack.enter_async_context(place.admin())
        producer = await stack.enter_async_context(place.producer())
        group = MixedGroup(place, admin, topic, strategy)
        stack.push_async_callback(group.leave_all)
        load = Load(producer, group.queues)
        async with load:
            first_java = group.join_java("java-1")
            first = await group.join_ours()
            await group.settles()
            group.join_java("java-2")
            await group.join_ours()
            await group.join_ours()
            await group.settles()
            assert len(group.members) == 5
            await group.leave(first_java)
            await group.settles()
            await group.leave(first)
            await group.settles()
            # And both at once.
            await asyncio.gather(*(group.leave(each) for each in group.members[:2]))
            group.join_java("java-3")
            group.join_java("java-4")
            await asyncio.gather(group.join_ours(), group.join_ours())
            await group.settles()
            assert len(group.members) == 5
        await until(lambda: load.sent <= set(group.consumed()))
        await group.leave_all()

    consumed = group.consumed()
    assert set(consumed) == load.sent
    # Java's members begin a queue without asking who has it, and do not wait for what they run when
    # they lose one; between ours nothing comes twice (`tests/client/consumer`).
    repeated = sum(count > 1 for count in consumed.values())
    print(
        f"{len(load.sent)} messages; {repeated} came again when a Java member took or lost a queue"
    )
    await place.until_all_consumed(topic, topic)
