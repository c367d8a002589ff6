"""A reset counts, whatever is committed, owned, claimed or being released meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from orbitmq.client.consumer import handover
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
from tests.support.rebalancing import GROUP, QUICK, TOPIC, Consumer, Group
from tests.support.slow_progress import (
    FIRST,
    PATIENT,
    SECOND,
    Busy,
    Slow,
    busy_with_the_sixth,
    consumed_five,
    repeated,
)

#: Nothing is reported but what is told to be: progress goes along with pulls.
ONLY_PULLS = replace(QUICK, persist=3600.0, persist_idle=0.0)


@pytest.fixture
async def cluster():
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
async def test_a_pushed_reset_to_where_the_queue_was_begun_is_followed(cluster, ordered):
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


async def test_a_queue_whose_reset_waits_for_its_turn_is_not_let_go_before(cluster):
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


# ---- queues in any state

STATES = pytest.mark.parametrize("is_claimed", [False, True], ids=["owned", "claimed"])


async def ready(
    cluster: AsyncEmbeddedCluster, group: Group, progress: Slow, *, is_claimed: bool
) -> Consumer:
    """A member that has consumed five messages and owns the first queue, or claims it again."""
    member = await consumed_five(cluster, group, progress, client={"instance": "b"})
    if is_claimed:
        progress.answers = asyncio.Event()
        member.rebalancer.rebuild(member.rebalancer.owned[FIRST])
        await until(lambda: progress.has_read and FIRST in member.rebalancer.claimed)
    return member


async def begun_reset(
    member: Consumer, progress: Slow, offset: int = 2
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A reset of the first queue, and what its commit waits for."""
    (turn,) = progress.turns[:] = [asyncio.Event()]
    reset = asyncio.create_task(member.rebalancer.reset({FIRST: offset}))
    await until(lambda: progress.waiting == 1)
    return reset, turn


def let_answer(progress: Slow) -> None:
    if progress.answers is not None:
        progress.answers.set()


@STATES
@pytest.mark.parametrize("is_orderly", [False, True], ids=["concurrent", "in order"])
async def test_a_queue_begins_where_it_was_reset_to(cluster, is_claimed, is_orderly):
    progress = Slow()
    async with Group(
        cluster.name_server, settings=PATIENT, progress=progress, is_orderly=is_orderly
    ) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)

        await member.rebalancer.reset({FIRST: 2})

        let_answer(progress)
        await until(lambda: repeated(group) == [2, 3, 4] and progress.read(FIRST) == 5)


@STATES
async def test_a_reset_that_fails_leaves_no_queue_behind_whose_progress_stands_still(
    cluster, is_claimed, caplog
):
    progress = Slow()
    async with Group(cluster.name_server, settings=ONLY_PULLS, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)
        progress.refuses.add(FIRST)
        with pytest.raises(BrokerUnavailable):
            await member.rebalancer.reset({FIRST: 2, SECOND: 7})
        assert progress.kept == {FIRST: 5, SECOND: 7}

        progress.refuses.clear()
        let_answer(progress)
        await send(cluster, TOPIC, range(20), queue=FIRST)

        await until(lambda: progress.read(FIRST) == 25)
        await progress.persist([FIRST])
        assert progress.kept[FIRST] == 25
    assert f"in {FIRST} could not be reset to 2" in caplog.text


async def test_a_store_that_does_not_take_one_reset_takes_the_others(cluster, monkeypatch):
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        usual = progress.freeze

        def freeze(queue, offset):
            if queue == FIRST:
                raise BrokerUnavailable(queue.broker, "no")
            usual(queue, offset)

        monkeypatch.setattr(progress, "freeze", freeze)
        with pytest.raises(BrokerUnavailable):
            await member.rebalancer.reset({FIRST: 2, SECOND: 7})

        assert progress.kept[SECOND] == 7


@STATES
async def test_of_two_resets_of_a_queue_the_newer_one_counts(cluster, is_claimed):
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)
        older, turn = await begun_reset(member, progress)

        newer = asyncio.create_task(member.rebalancer.reset({FIRST: 4}))
        await until(lambda: progress.read(FIRST) == 4)
        turn.set()
        await asyncio.gather(older, newer)

        let_answer(progress)
        await until(lambda: repeated(group) == [4] and progress.read(FIRST) == 5)
    assert repeated(group) == [4]


@STATES
async def test_a_reset_goes_on_when_its_caller_is_cancelled(cluster, is_claimed):
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)
        reset, turn = await begun_reset(member, progress)

        reset.cancel()
        turn.set()

        let_answer(progress)
        await until(lambda: repeated(group) == [2, 3, 4])


@STATES
async def test_a_queue_of_a_topic_that_is_no_longer_subscribed_keeps_its_reset(cluster, is_claimed):
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)
        reset, turn = await begun_reset(member, progress)

        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: SECOND not in member.owned)
        turn.set()
        await reset

        await until(lambda: not member.owned)
        assert progress.kept[FIRST] == 2
        assert progress.read(FIRST) is None
        let_answer(progress)


@STATES
async def test_a_queue_that_goes_to_another_member_waits_for_its_reset(cluster, is_claimed):
    progress, shared = Slow(), Slow()
    shared.kept = progress.kept
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)
        reset, turn = await begun_reset(member, progress)

        other = await group.join(progress=shared, client={"instance": "a"})
        await until(lambda: FIRST in other.rebalancer.claimed)
        members = other.rebalancer._members
        assert members is not None
        asked = members.asked
        await until(lambda: members.asked >= asked + 4)
        assert FIRST not in other.owned
        turn.set()
        await reset

        await until(lambda: other.owned == {FIRST})
        await until(lambda: repeated(group) == [2, 3, 4])
        let_answer(progress)


async def test_a_reset_during_a_release_is_committed_once(cluster, monkeypatch):
    # As after a release that took long: the store is asked before the last commit.
    monkeypatch.setattr(handover, "_LONG", -1.0)
    progress, handler = Slow(), Busy()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await busy_with_the_sixth(cluster, group, progress, handler)
        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: member.rebalancer.owned[FIRST].is_draining)

        await member.rebalancer.reset({FIRST: 2})
        assert progress.kept[FIRST] == 2
        assert not handler.may_end.is_set()

        # An owner that does not wait, as Apache's, has gone on from there.
        progress.kept[FIRST] = 9
        handler.may_end.set()
        await until(lambda: FIRST not in member.owned)
        assert progress.kept[FIRST] == 9


async def test_a_reset_counts_while_a_release_asks_for_the_committed_offset(cluster, monkeypatch):
    monkeypatch.setattr(handover, "_LONG", -1.0)
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        progress.answers = asyncio.Event()
        member.subscriptions.remove(TOPIC)
        member.rebalancer.wake()
        await until(lambda: progress.has_read)

        await member.rebalancer.reset({FIRST: 2})
        progress.answers.set()
        await until(lambda: FIRST not in member.owned)

        assert progress.kept[FIRST] == 2


async def test_every_member_that_is_broadcast_to_follows_a_reset(cluster):
    progress, handler = Slow(), Busy()
    settings = replace(PATIENT, handover=0.1)
    async with Group(
        cluster.name_server, settings=settings, progress=progress, is_broadcasting=True
    ) as group:
        member = await busy_with_the_sixth(cluster, group, progress, handler)

        await member.rebalancer.reset({FIRST: 2})

        assert progress.kept[FIRST] == 2
        await until(lambda: repeated(group) == [2, 3, 4])
        handler.may_end.set()
        await until(lambda: progress.read(FIRST) == 6)


# ---- resets and stops


@STATES
async def test_a_stop_waits_for_a_reset(cluster, is_claimed):
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)
        reset, turn = await begun_reset(member, progress)

        stop = asyncio.create_task(member.stop())
        await until(lambda: SECOND not in member.owned)
        turn.set()
        await asyncio.gather(reset, stop)

        assert progress.kept[FIRST] == 2


@STATES
async def test_a_stop_does_not_wait_for_a_reset_without_end(
    cluster, monkeypatch, caplog, is_claimed
):
    monkeypatch.setattr(handover, "_LAST_REPORT", 0.2)
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=is_claimed)
        reset, _ = await begun_reset(member, progress)

        async with asyncio.timeout(DEADLINE):
            await member.stop()

        with pytest.raises(BrokerUnavailable, match=r"not taken within 0\.2 s"):
            await reset
    assert f"in {FIRST} could not be reset to 2" in caplog.text


async def test_a_reset_that_outlives_a_stop_that_was_cut_short_is_committed(cluster):
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await consumed_five(cluster, group, progress)
        reset, turn = await begun_reset(member, progress)

        stop = asyncio.create_task(member.rebalancer.stop())
        await until(lambda: SECOND not in member.owned)
        stop.cancel()
        with suppress(asyncio.CancelledError):
            await stop
        turn.set()
        await reset

        assert progress.kept[FIRST] == 2


async def test_a_reset_that_ends_with_the_client_is_reported_as_failed(cluster, caplog):
    progress = Slow()
    async with Group(cluster.name_server, settings=PATIENT, progress=progress) as group:
        member = await ready(cluster, group, progress, is_claimed=True)
        reset, _ = await begun_reset(member, progress)

        await member.kill()

        with pytest.raises(asyncio.CancelledError):
            await reset
    assert f"in {FIRST} could not be reset to 2" in caplog.text
