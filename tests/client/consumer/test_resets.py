"""A reset counts, pushed by a broker of Apache or answered to the next pull by ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.members import LEAVING, queues_text
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import MessageQueue, ResetOffsets
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import PullMessageRequest, ResetOffsetRequest
from orbitmq.wire.javajson import encode_body
from tests.support.broker import RawClient
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of, own_queues, send
from tests.support.consuming import DEADLINE, until
from tests.support.rebalancing import GROUP, QUICK, TOPIC, Consumer, Group, answering, usual_handler

QUEUE_COUNT = 2

#: Handlers are waited for longer than a test lasts; only pulls carry progress.
PATIENT = replace(QUICK, handover=4 * DEADLINE, persist=3600.0, persist_idle=0.0)
FIRST, SECOND = (Queue(TOPIC, "broker-a", number) for number in range(2))


# ---- owned queues, with a store that a test can hold up


class Slow(MemoryProgress):
    """Commits the offset of the first queue when the test lets it."""

    def __init__(self, kept: dict[Queue, int] | None = None) -> None:
        super().__init__({FIRST: 0, SECOND: 0} if kept is None else kept)
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.is_committing = False

    async def persist(self, queues: Iterable[Queue]) -> None:
        queues = list(queues)
        if FIRST in queues and not self.may_commit.is_set():
            self.is_committing = True
            await self.may_commit.wait()
        await super().persist(queues)


@pytest.fixture
def progress():
    return Slow()


@pytest.fixture(params=[False, True], ids=["owned", "in order"])
async def group(cluster, progress, request):
    """A group whose only member has consumed five messages of the first queue."""
    async with Group(
        cluster.name_server,
        settings=PATIENT,
        progress=progress,
        client={"instance": "b"},
        is_orderly=request.param,
    ) as group:
        await send(cluster, TOPIC, range(5), queue=FIRST)
        member = await group.join()
        await until(lambda: progress.read(FIRST) == 5 and member.owned == {FIRST, SECOND})
        await progress.persist([FIRST])
        yield group


@pytest.fixture
def member(group):
    (member,) = group.living
    return member


async def begun_reset(member: Consumer, progress: Slow, offset: int) -> asyncio.Task[None]:
    """A reset of the first queue whose commit waits."""
    progress.may_commit.clear()
    reset = asyncio.create_task(member.rebalancer.reset({FIRST: offset}))
    await until(lambda: progress.is_committing)
    return reset


def repeated(group: Group) -> list[int]:
    """The messages of the first queue that were consumed more than once."""
    return sorted(offset for queue, offset in group.ledger.duplicates if queue == FIRST)


async def test_a_queue_that_goes_to_another_member_waits_for_its_reset(group, member, progress):
    reset = await begun_reset(member, progress, 2)
    other = await group.join(progress=Slow(progress.kept), client={"instance": "a"})
    await until(lambda: FIRST in other.rebalancer.claimed)
    rounds = other.rebalancer.counts.rounds
    other.rebalancer.wake()
    await until(lambda: other.rebalancer.counts.rounds > rounds)
    assert FIRST not in other.owned

    progress.may_commit.set()
    await reset

    await until(lambda: other.owned == {FIRST} and repeated(group) == [2, 3, 4])
    assert progress.read(FIRST) is None, "the former owner has forgotten it"


async def test_a_stop_waits_for_a_reset(member, progress):
    reset = await begun_reset(member, progress, 2)

    stop = asyncio.create_task(member.stop())
    await until(lambda: SECOND not in member.owned)
    progress.may_commit.set()
    await asyncio.gather(reset, stop)

    assert progress.kept[FIRST] == 2


# ---- pushed by brokers of Apache, or answered to the next pull by ours


class Handler:
    """Notes the messages of the first queue; one message waits until it may end."""

    def __init__(self, slow: tuple[Queue, int] | None = None) -> None:
        self._slow = slow
        self.seen: list[int] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, message: ReceivedMessage) -> None:
        if message.queue == FIRST:
            self.seen.append(message.queue_offset)
        if (message.queue, message.queue_offset) == self._slow:
            self.has_begun.set()
            self.may_end.wait(DEADLINE)


@asynccontextmanager
async def consuming(
    cluster: AsyncEmbeddedCluster, handler: Handler, name: str = "b", *, ordered: bool = False
) -> AsyncIterator[AsyncConsumer]:
    """A member of the group; shares go by the names."""
    client = quick_settings(cluster.name_server, instance=name)
    consumer = consumer_of(cluster, GROUP, ordered=ordered, rebalance=PATIENT, client=client)
    consumer.on(TOPIC)(handler)
    async with consumer:
        try:
            yield consumer
        finally:
            handler.may_end.set()


async def push(cluster: AsyncEmbeddedCluster, offsets: Mapping[Queue, int]) -> None:
    """Reset the only member, as brokers of Apache do."""
    (member,) = cluster.brokers[0].parts.consumers.members(GROUP)
    assert isinstance(member.channel, Connection)
    table = {
        MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id): offset
        for queue, offset in offsets.items()
    }
    answer = await member.channel.request(
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        ResetOffsetRequest(topic=TOPIC, group=GROUP, timestamp=0),
        body=encode_body(ResetOffsets(offset_table=table)),
        timeout=DEADLINE,
    )
    assert answer.code == ResponseCode.SUCCESS


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
async def test_a_queue_is_reset_to_its_start_while_a_handler_works_on_another_queue(
    cluster, ordered
):
    handler = Handler(slow=(SECOND, 0))
    async with consuming(cluster, handler, ordered=ordered) as consumer:
        await until(lambda: own_queues(consumer) == [FIRST, SECOND])
        await send(cluster, TOPIC, range(5), queue=FIRST)
        await until(lambda: consumer.positions().get(FIRST) == 5)
        # The next pull carries what was consumed.
        await send(cluster, TOPIC, ["more"], queue=FIRST)
        await until(lambda: cluster.progress(GROUP, TOPIC)["broker-a", FIRST.id] >= 5)
        await send(cluster, TOPIC, ["slow"], queue=SECOND)
        await asyncio.to_thread(handler.has_begun.wait, DEADLINE)
        handler.seen.clear()

        pushing = asyncio.create_task(push(cluster, {FIRST: 0, SECOND: 0}))

        await until(lambda: sorted(handler.seen) == list(range(6)))
        assert not handler.may_end.is_set()
        handler.may_end.set()
        await pushing


async def test_a_reset_is_followed_although_its_report_is_lost_with_the_connection(cluster):
    broker, handler = cluster.brokers[0], Handler()
    usual = usual_handler(broker, RequestCode.PULL_MESSAGE)
    lost: list[PullMessageRequest] = []

    def lose(connection, request):
        pull = request.header(PullMessageRequest)
        if (pull.topic, pull.queue_id, lost) == (TOPIC, FIRST.id, []):
            lost.append(pull)
            broker.parts.progress.reset(TOPIC, GROUP, FIRST.id, 2)
            connection.abort()
        return usual(connection, request)

    async with consuming(cluster, handler) as consumer:
        await until(lambda: own_queues(consumer) == [FIRST, SECOND])
        await send(cluster, TOPIC, range(5), queue=FIRST)
        await until(lambda: consumer.positions().get(FIRST) == 5)
        with answering(broker, RequestCode.PULL_MESSAGE, lose):
            await send(cluster, TOPIC, ["more"], queue=FIRST)
            await until(lambda: lost)

        await until(lambda: sorted(handler.seen) == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5])


async def test_a_reset_of_a_queue_that_is_being_released_is_not_undone_by_the_last_commit(cluster):
    handler, other = Handler(slow=(FIRST, 5)), Handler()
    async with consuming(cluster, handler) as consumer:
        await until(lambda: own_queues(consumer) == [FIRST, SECOND])
        await send(cluster, TOPIC, range(6), queue=FIRST)
        await asyncio.to_thread(handler.has_begun.wait, DEADLINE)
        async with consuming(cluster, other, "a"):
            await until(lambda: is_leaving(consumer))

            # Reported to the pull that the broker holds for the former owner.
            client = await RawClient.open(cluster.brokers[0])
            asked = ResetOffsetRequest(
                topic=TOPIC, group=GROUP, timestamp=-1, queue_id=FIRST.id, offset=2, is_force=True
            )
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            answer = await client.connection.request(code, asked, timeout=DEADLINE)
            await client.close()
            handler.may_end.set()

            assert answer.code == ResponseCode.SUCCESS
            await until(lambda: sorted(other.seen) == [2, 3, 4, 5])


def is_leaving(consumer: AsyncConsumer) -> bool:
    """Whether the first queue is being released, as the running info of the consumer shows."""
    return queues_text([FIRST]) in consumer.running_info().properties.get(LEAVING, "")
