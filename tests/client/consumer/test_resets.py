"""A reset counts, whatever the consumer believes to be put by and whatever else is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import MessageQueue, ResetOffsets
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import ResetOffsetRequest
from orbitmq.wire.javajson import encode_body
from tests.support.consumers import consumer_of, own_queues, send
from tests.support.consuming import DEADLINE, until
from tests.support.rebalancing import GROUP, QUICK, TOPIC, Group
from tests.support.slow_progress import FIRST, SECOND, Slow, consumed_five, repeated

#: Nothing is reported but what is told to be: progress goes along with pulls.
ONLY_PULLS = replace(QUICK, persist=3600.0, persist_idle=0.0)


@pytest.fixture
async def cluster() -> AsyncIterator[AsyncEmbeddedCluster]:
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        yield cluster


def at_the_broker(cluster: AsyncEmbeddedCluster, queue: Queue = FIRST) -> int | None:
    return cluster.progress(GROUP, TOPIC).get((queue.broker, queue.id))


# ---- what pulls have carried


async def push(cluster: AsyncEmbeddedCluster, queue: Queue, offset: int) -> None:
    """Tell the only member, as brokers of Apache do."""
    (member,) = cluster.brokers[0].parts.consumers.members(GROUP)
    assert isinstance(member.channel, Connection)
    known = MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id)
    answer = await member.channel.request(
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        ResetOffsetRequest(topic=queue.topic, group=GROUP, timestamp=0),
        body=encode_body(ResetOffsets(offset_table={known: offset})),
        timeout=DEADLINE,
    )
    assert answer.code == ResponseCode.SUCCESS


def noting(cluster: AsyncEmbeddedCluster, seen: list[int], **options: Any) -> AsyncConsumer:
    consumer = consumer_of(cluster, GROUP, rebalance=ONLY_PULLS, **options)

    @consumer.on(TOPIC)
    def note(message: ReceivedMessage) -> None:
        if message.queue == FIRST:
            seen.append(message.queue_offset)

    return consumer


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
async def test_a_pushed_reset_to_where_the_queue_was_begun_is_followed(
    cluster: AsyncEmbeddedCluster, ordered: bool
) -> None:
    seen: list[int] = []
    async with noting(cluster, seen, ordered=ordered) as consumer:
        await until(lambda: own_queues(consumer) == [FIRST, SECOND])
        await send(cluster, TOPIC, range(5), queue=FIRST)
        await until(lambda: len(seen) == 5)
        # The pull after that of the last message carries what was consumed.
        await send(cluster, TOPIC, ["more"], queue=FIRST)
        await until(lambda: (at_the_broker(cluster) or 0) >= 5)
        await until(lambda: len(seen) == 6)
        seen.clear()

        await push(cluster, FIRST, 0)

        await until(lambda: len(seen) == 6)
    assert sorted(seen) == list(range(6))


async def test_a_pushed_reset_to_a_position_that_was_reported_once_is_followed(
    cluster: AsyncEmbeddedCluster,
) -> None:
    seen: list[int] = []
    await send(cluster, TOPIC, range(3), queue=FIRST)
    async with noting(cluster, seen) as consumer:
        await until(lambda: consumer.positions().get(FIRST) == 3)
        await consumer._running.progress.persist([FIRST])
        assert at_the_broker(cluster) == 3
        await send(cluster, TOPIC, range(3), queue=FIRST)
        await until(lambda: len(seen) == 6)
        await send(cluster, TOPIC, ["more"], queue=FIRST)
        await until(lambda: (at_the_broker(cluster) or 0) >= 6)
        await until(lambda: len(seen) == 7)
        seen.clear()

        await push(cluster, FIRST, 3)

        await until(lambda: len(seen) == 4)
    assert sorted(seen) == [3, 4, 5, 6]


# ---- what is on its way


class Gated(MemoryProgress):
    """Takes positions of the second queue when the test lets it: all others wait behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.is_taking = False

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        if SECOND in changed and not self.gate.is_set():
            self.is_taking = True
            await self.gate.wait()
        return await super().store(changed)


async def test_a_queue_whose_reset_waits_for_its_turn_is_not_let_go_before(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Gated()
    progress.kept.update({FIRST: 0, SECOND: 0})
    await send(cluster, TOPIC, range(5), queue=FIRST)
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await group.join()
        await until(lambda: member.progress.read(FIRST) == 5)
        await until(lambda: member.owned == {FIRST, SECOND})
        await progress.persist([FIRST])
        progress.update(SECOND, 1)
        busy = asyncio.create_task(progress.persist([SECOND]))
        await until(lambda: progress.is_taking)
        before = member.rebalancer.owned[FIRST]

        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.read(FIRST) == 2)
        member.rebalancer.rebuild(before)
        await until(lambda: before.is_dropped)
        assert member.rebalancer.owned[FIRST] is before
        progress.gate.set()
        await asyncio.gather(busy, reset)

        await until(lambda: len(group.ledger.duplicates) == 3)
    assert sorted(offset for _, offset in group.ledger.duplicates) == [2, 3, 4]


async def test_a_reset_of_a_queue_that_is_not_subscribed_to_by_then_is_put_by_for_its_next_owner(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Gated()
    progress.kept.update({FIRST: 0, SECOND: 0})
    await send(cluster, TOPIC, range(5), queue=FIRST)
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await group.join()
        await until(lambda: member.progress.read(FIRST) == 5)
        await until(lambda: member.owned == {FIRST, SECOND})
        await progress.persist([FIRST])
        progress.update(SECOND, 1)
        busy = asyncio.create_task(progress.persist([SECOND]))
        await until(lambda: progress.is_taking)

        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.read(FIRST) == 2)
        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: member.rebalancer.owned[SECOND].is_draining)
        progress.gate.set()
        await asyncio.gather(busy, reset)
        await until(lambda: not member.owned)

        assert progress.kept[FIRST] == 2
        assert progress.read(FIRST) is None


# ---- queues that come and go meanwhile


@pytest.mark.parametrize("is_claimed", [False, True], ids=["owned", "claimed"])
async def test_a_reset_that_fails_leaves_no_queue_behind_whose_progress_stands_still(
    cluster: AsyncEmbeddedCluster, is_claimed: bool
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        if is_claimed:
            progress.answers = asyncio.Event()
            member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
            await until(lambda: progress.has_read)
        progress.refuses.add(FIRST)
        with pytest.raises(BrokerUnavailable):
            await member.rebalancer.reset({FIRST: 2})

        progress.refuses.clear()
        if progress.answers is not None:
            progress.answers.set()
        await send(cluster, TOPIC, range(20), queue=FIRST)

        await until(lambda: progress.read(FIRST) == 25)
        await progress.persist([FIRST])
        assert progress.kept[FIRST] == 25


async def test_a_queue_that_is_gained_before_its_reset_is_put_by_begins_there(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        with monkeypatch.context() as patched:
            # Let go of, and not yet seen to be missing.
            patched.setattr(member.rebalancer._acquisition, "claim", lambda *_: None)
            member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
            await until(lambda: FIRST not in member.owned)
            (turn,) = progress.turns[:] = [asyncio.Event()]
            reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
            await until(lambda: progress.waiting == 1)
        progress.answers = asyncio.Event()
        member.rebalancer.wake()
        await until(lambda: progress.has_read)
        turn.set()
        await reset

        assert progress.kept[FIRST] == 2
        progress.answers.set()
        await until(lambda: len(repeated(group)) == 3)
    assert repeated(group) == [2, 3, 4]


async def test_a_queue_whose_progress_was_read_just_before_a_reset_begins_where_that_says(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        progress.answers = asyncio.Event()
        member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
        await until(lambda: progress.has_read)

        await member.rebalancer.reset({FIRST: 2})

        assert progress.kept[FIRST] == 2
        progress.answers.set()
        await until(lambda: len(repeated(group)) == 3)
        await until(lambda: progress.read(FIRST) == 5)
    assert repeated(group) == [2, 3, 4]


async def test_a_reset_of_a_queue_that_is_claimed_no_more_is_put_by_for_its_next_owner(
    cluster: AsyncEmbeddedCluster,
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        progress.answers = asyncio.Event()
        member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
        await until(lambda: progress.has_read)
        (turn,) = progress.turns[:] = [asyncio.Event()]
        reset = asyncio.create_task(member.rebalancer.reset({FIRST: 2}))
        await until(lambda: progress.waiting == 1)

        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: FIRST not in member.rebalancer.claimed)
        turn.set()
        await reset

        assert progress.kept[FIRST] == 2
        assert progress.read(FIRST) is None
        progress.answers.set()


async def test_a_reset_that_cannot_be_put_by_does_not_keep_another_from_it(
    cluster: AsyncEmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Slow()
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        progress.refuses.add(FIRST)

        with pytest.raises(BrokerUnavailable):
            await member.rebalancer.reset({FIRST: 2, SECOND: 7})

        assert progress.kept == {FIRST: 5, SECOND: 7}
    assert f"in {FIRST} could not be reset to 2" in caplog.text
