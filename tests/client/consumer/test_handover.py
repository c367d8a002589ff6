"""Queues change hands: never in two, never lost, soon, and with the progress of the one before.

Rounds by the timer are a minute apart in these tests: whatever happens sooner came from news.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Self

import pytest

from orbitmq.client.consumer.members import MOST_UNANSWERED, GroupMembers, Holdings
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import ConsumerList
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import RawClient, until
from tests.support.rebalancing import (
    GROUP,
    QUICK,
    TOPIC,
    Begun,
    Consumer,
    Group,
    OtherMember,
    answering,
    refusing,
)
from tests.support.tries import TRIES

COUNT = 16
QUEUES = [Queue(TOPIC, "broker-a", place) for place in range(COUNT)]
DEADLINE = 30.0


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
async def other(cluster):
    """A member that sorts before all of ours, and so has the first half of the queues."""
    member = OtherMember("0-java")
    yield member
    await member.leave()


class Load:
    """Sends a message to every queue, again and again, until it is ended."""

    def __init__(self, cluster: AsyncEmbeddedCluster, pause: float = 0.01) -> None:
        self._cluster = cluster
        self._pause = pause
        self._is_over = asyncio.Event()
        self.sent = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        client = await RawClient.open(self._cluster.brokers[0])
        while not self._is_over.is_set():
            await _send_round(client)
            self.sent += COUNT
            await asyncio.sleep(self._pause)
        await client.close()


async def send(cluster: AsyncEmbeddedCluster, rounds: int) -> None:
    """Send a message to every queue, so many times."""
    client = await RawClient.open(cluster.brokers[0])
    for _ in range(rounds):
        await _send_round(client)
    await client.close()


async def _send_round(client: RawClient) -> None:
    await asyncio.gather(*(client.stored(TOPIC, queue_id=queue.id) for queue in QUEUES))


async def settled(group: Group) -> None:
    await until(lambda: group.ledger.is_settled(QUEUES), DEADLINE)


def takes(seconds: float) -> Callable[[Consumer, ReceivedMessage], Awaitable[None]]:
    async def handler(_: Consumer, __: ReceivedMessage) -> None:
        await asyncio.sleep(seconds)

    return handler


def begun_by(group: Group, consumer: Consumer) -> list[Begun]:
    return [begun for begun in group.ledger.begun if begun.client_id == consumer.client_id]


@pytest.mark.feature("A1")
@pytest.mark.feature("A13")
async def test_joins_and_leaves_under_load_cause_no_duplicate_no_gap_and_no_overlap(cluster, group):
    async with Load(cluster) as load:
        consumers = [await group.join(handler=takes(0.005)) for _ in range(2)]
        await settled(group)
        for _ in range(3):
            consumers.append(await group.join(handler=takes(0.005)))
            await settled(group)
        for leaver in (consumers[0], consumers[3]):
            await leaver.stop()
            await settled(group)
        before = load.sent
        await until(lambda: load.sent > before + 10 * COUNT, DEADLINE)
    await until(lambda: len(group.ledger.consumed) == load.sent, DEADLINE)

    assert group.ledger.overlaps == []
    assert group.ledger.duplicates == {}
    # Where each owner began is where the one before had ended, to the message.
    assert [begun.offset - begun.done for begun in group.ledger.begun] == [
        0 for _ in group.ledger.begun
    ]
    assert sorted(group.ledger.owners()) == QUEUES
    await group.end()
    assert sum(cluster.progress(GROUP, TOPIC).values()) == load.sent


@pytest.mark.feature("A10")
async def test_a_queue_that_changes_hands_is_consumed_again_within_a_second(cluster, group):
    best = dict.fromkeys(("join", "leave", "kill"), math.inf)
    count = 0
    async with Load(cluster, pause=0.005):
        await group.join()
        await settled(group)
        for turn in range(2 * TRIES):
            for change in ("join", "leave" if turn % 2 else "kill"):
                since = asyncio.get_running_loop().time()
                if change == "join":
                    await group.join()
                elif change == "leave":
                    await group.living[0].stop()
                else:
                    await group.living[0].kill()
                await settled(group)
                moved = [each for each in group.ledger.begun if each.at > since]
                pauses = [await _resumed(group, begun, since) for begun in moved]
                best[change] = min(best[change], max(pauses))
                count += len(pauses)
            if turn >= 3 and max(best.values()) < 1.0:
                break

    # Every queue that moved, each time. What the machine is late with is not the hand-over's: of
    # each kind of change, one that was not disturbed is enough.
    assert count >= 2 * COUNT
    assert max(best.values()) < 1.0, best


async def _resumed(group: Group, begun: Begun, since: float) -> float:
    """The longest time without a message of a queue after a change, until its new owner has one."""
    times = group.ledger.times
    await until(lambda: any(at > begun.at for at in times.get(begun.queue, ())), DEADLINE)
    later = [at for at in times[begun.queue] if at > since]
    points = [since, *later]
    return max(after - before for before, after in itertools.pairwise(points))


async def test_a_queue_stays_with_its_owner_until_its_handler_is_done(cluster, group):
    await send(cluster, 1)
    gate = asyncio.Event()

    async def waits(_, __):
        await gate.wait()

    first = await group.join(handler=waits)
    await until(lambda: sum(group.ledger.running.values()) == COUNT, DEADLINE)
    second = await group.join()
    lost = await _lost_by(first)
    await until(lambda: second.rebalancer.claimed == lost, DEADLINE)
    said = await GroupMembers(second.engine, GROUP).holdings(first.client_id, TOPIC)

    assert second.owned == set()
    assert first.owned == set(QUEUES)
    assert said == Holdings(frozenset(QUEUES), leaving=frozenset(lost))
    gate.set()
    await settled(group)

    assert second.owned == lost
    assert group.ledger.duplicates == {}
    assert group.ledger.overlaps == []
    assert {begun.offset for begun in begun_by(group, second)} == {1}


async def _lost_by(consumer: Consumer) -> set[Queue]:
    """Half of the queues, once the consumer has begun to give them up."""

    def draining() -> set[Queue]:
        owned = consumer.rebalancer.owned
        return {queue for queue, each in owned.items() if each.is_draining}

    await until(lambda: len(draining()) == COUNT // 2, DEADLINE)
    return draining()


@pytest.mark.feature("A15")
async def test_a_handler_that_outlives_the_loss_of_its_queue_is_not_committed_and_counted(cluster):
    await send(cluster, 1)
    gate = asyncio.Event()
    settings = RebalanceSettings(interval=60.0, handover=0.2)

    async def waits(consumer, _):
        if consumer.client_id == first.client_id:
            await gate.wait()

    async with Group(cluster.name_server, settings=settings, handler=waits) as group:
        first = await group.join()
        await until(lambda: sum(group.ledger.running.values()) == COUNT, DEADLINE)
        second = await group.join()
        await until(lambda: len(group.ledger.consumed) == COUNT // 2, DEADLINE)
        assert {queue for queue, _ in group.ledger.consumed} == second.owned
        await second.progress.persist(second.owned)
        progress = cluster.progress(GROUP, TOPIC)
        gate.set()
        await until(lambda: len(group.ledger.duplicates) == COUNT // 2, DEADLINE)

        assert first.rebalancer.counts.abandoned == COUNT // 2
        assert second.rebalancer.counts.overdue == 0
        for queue in second.owned:
            assert first.progress.read(queue) is None
            assert progress[queue.broker, queue.id] == 1


async def test_another_member_that_still_holds_a_queue_is_waited_for(cluster, group, other):
    await other.join(cluster.brokers[0], TOPIC)
    other.holds = set(QUEUES)
    consumer = await group.join()
    own = set(QUEUES[COUNT // 2 :])
    await until(lambda: other.questions >= 3, DEADLINE)
    assert consumer.owned == set()
    assert consumer.rebalancer.claimed == own

    other.holds = set(QUEUES[: COUNT // 2 + 1])
    await until(lambda: len(consumer.owned) == COUNT // 2 - 1, DEADLINE)
    assert consumer.rebalancer.claimed == {QUEUES[COUNT // 2]}
    other.holds = set()
    await until(lambda: consumer.owned == own, DEADLINE)

    assert consumer.rebalancer.counts.overdue == 0


async def test_a_claim_of_another_member_is_respected_like_a_holding(cluster, group, other):
    await other.join(cluster.brokers[0], TOPIC)
    contested = QUEUES[-1]
    other.claims = {contested}
    consumer = await group.join()

    await until(lambda: len(consumer.owned) == COUNT // 2 - 1, DEADLINE)
    assert consumer.rebalancer.claimed == {contested}
    other.claims = set()

    await until(lambda: contested in consumer.owned, DEADLINE)


@pytest.mark.parametrize("says_that_it_lets_go", [True, False])
async def test_a_member_that_never_lets_go_is_not_waited_for_without_end(
    cluster, other, *, says_that_it_lets_go
):
    await other.join(cluster.brokers[0], TOPIC)
    other.holds = set(QUEUES)
    if says_that_it_lets_go:
        other.leaves = set(QUEUES)
        settings = RebalanceSettings(interval=60.0, handover=0.1)
    else:
        settings = RebalanceSettings(interval=60.0, handover=0.1, longest_wait=0.2)
    client = {"route_refresh": 0.1}
    async with Group(cluster.name_server, settings=settings, client=client) as group:
        consumer = await group.join()
        await until(lambda: len(consumer.owned) == COUNT // 2, DEADLINE)

        assert consumer.rebalancer.counts.overdue == COUNT // 2


async def test_a_member_that_does_not_answer_is_not_pressed(cluster, other):
    other.holds = None
    await other.join(cluster.brokers[0], TOPIC)
    settings = RebalanceSettings(interval=60.0, handover=0.5, answer=0.1, silence=60.0)

    async with Group(cluster.name_server, settings=settings) as group:
        consumer = await group.join()
        await until(lambda: len(consumer.owned) == COUNT // 2, DEADLINE)

        assert other.questions == 1


async def test_a_java_member_is_asked_only_what_it_answers_from_memory(cluster, group, other):
    await other.join(cluster.brokers[0], TOPIC, language=Language.JAVA)
    other.holds = set(QUEUES)
    consumer = await group.join()
    own = set(QUEUES[COUNT // 2 :])
    await until(lambda: other.harmless_questions >= 3, DEADLINE)
    assert consumer.owned == set()
    assert consumer.rebalancer.claimed == own

    other.holds = set(QUEUES[: COUNT // 2 + 1])
    await until(lambda: len(consumer.owned) == COUNT // 2 - 1, DEADLINE)
    other.holds = set(QUEUES[: COUNT // 2])
    await until(lambda: consumer.owned == own, DEADLINE)

    assert other.questions == 0
    assert consumer.rebalancer.counts.overdue == 0


async def test_a_java_member_that_never_answers_is_asked_a_few_times_only(cluster, other, caplog):
    other.holds = None
    await other.join(cluster.brokers[0], TOPIC, language=Language.JAVA)
    settings = RebalanceSettings(interval=60.0, handover=1.0, answer=0.1, silence=0.0)

    async with Group(cluster.name_server, settings=settings) as group:
        consumer = await group.join()
        await until(lambda: len(consumer.owned) == COUNT // 2, DEADLINE)
        assert other.harmless_questions == MOST_UNANSWERED
        assert caplog.text.count("is not asked any more") == 1
        # Queues change hands again, more than once.
        for _ in range(2):
            second = await group.join()
            await until(lambda: second.owned and not second.rebalancer.claimed, DEADLINE)  # noqa: B023
            await second.stop()
            await until(lambda: len(consumer.owned) == COUNT // 2, DEADLINE)

    assert other.harmless_questions <= 3 * MOST_UNANSWERED
    told = [each for each in caplog.records if "is not asked any more" in each.getMessage()]
    assert len(told) <= 3, "one of each of us"


async def test_a_queue_that_a_java_member_had_and_does_not_name_is_begun_a_moment_later(
    cluster, group, other
):
    await other.join(cluster.brokers[0], TOPIC, language=Language.JAVA)
    monotonic = asyncio.get_running_loop().time
    before = monotonic()

    consumer = await group.join()
    await until(lambda: len(consumer.owned) == COUNT // 2, DEADLINE)

    assert monotonic() - before >= 0.3
    assert other.questions == 0


async def test_members_that_may_not_be_asked_are_waited_for_no_longer_than_an_answer(
    cluster, caplog
):
    def forbid(_, request):
        return request.answer(ResponseCode.NO_PERMISSION, remark="no Get for you")

    settings = RebalanceSettings(interval=60.0, handover=3600.0, answer=0.2)
    with answering(cluster.brokers[0], RequestCode.GET_CONSUMER_RUNNING_INFO, forbid):
        async with Group(cluster.name_server, settings=settings) as group:
            first = await group.join()
            await until(lambda: len(first.owned) == COUNT, DEADLINE)
            second = await group.join()
            await until(lambda: len(second.owned) == COUNT // 2, DEADLINE)

    told = [each for each in caplog.records if "may not ask each other" in each.getMessage()]
    assert len(told) == 1
    assert "no Get for you" in told[0].getMessage()


async def test_a_member_that_does_not_answer_holds_up_only_the_queues_that_it_had(cluster, other):
    other.holds = None
    settings = RebalanceSettings(interval=60.0, handover=60.0, answer=0.2)

    async with Group(cluster.name_server, settings=settings) as group:
        first = await group.join()
        await settled(group)
        await other.join(cluster.brokers[0], TOPIC)
        await until(lambda: first.owned == set(QUEUES[COUNT // 2 :]), DEADLINE)
        second = await group.join()
        # Of three, the first has six queues. Of the ten others, two were the silent member's.
        early, late = sorted((first, second), key=lambda member: member.client_id)
        await until(lambda: late.owned == set(QUEUES[11:]), DEADLINE)
        await until(lambda: early.owned == set(QUEUES[8:11]), DEADLINE)

        assert early.rebalancer.claimed == set(QUEUES[6:8])
        assert late.rebalancer.claimed == set()
        assert group.ledger.overlaps == []


async def test_a_restart_of_the_broker_moves_no_queue(cluster, group):
    for _ in range(3):
        await group.join()
    await settled(group)
    owners = group.ledger.owners()
    begun = len(group.ledger.begun)

    await cluster.restart_broker()
    await send(cluster, 10)
    await until(lambda: len(group.ledger.consumed) == 10 * COUNT, DEADLINE)

    assert group.ledger.owners() == owners
    assert len(group.ledger.begun) == begun
    assert group.ledger.duplicates == {}


async def test_progress_that_cannot_be_reported_at_first_is_reported_before_the_queue_goes(
    cluster, group
):
    await send(cluster, 1)
    first = await group.join()
    await until(lambda: len(group.ledger.consumed) == COUNT, DEADLINE)
    with refusing(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET):
        second = await group.join()
        lost = await _lost_by(first)
        await until(lambda: second.rebalancer.claimed == lost, DEADLINE)
        assert second.owned == set()

    await settled(group)
    assert {begun.offset for begun in begun_by(group, second)} == {1}
    assert group.ledger.duplicates == {}


async def test_a_slow_loss_does_not_take_back_what_the_next_owner_has_reported(
    cluster, group, monkeypatch
):
    monkeypatch.setattr("orbitmq.client.consumer.handover._LONG", 0.0)
    await send(cluster, 1)
    gate = asyncio.Event()

    async def waits(_, __):
        await gate.wait()

    consumer = await group.join(handler=waits, pulls_report=False)
    await until(lambda: sum(group.ledger.running.values()) == COUNT, DEADLINE)
    stopping = asyncio.create_task(consumer.stop())
    await until(lambda: all(each.is_draining for each in consumer.rebalancer.owned.values()))
    client = await RawClient.open(cluster.brokers[0])
    await client.report(TOPIC, 7, queue_id=3)
    await client.close()
    gate.set()
    await stopping

    progress = cluster.progress(GROUP, TOPIC)
    assert progress["broker-a", 3] == 7
    assert progress["broker-a", 4] == 1


async def test_members_that_a_broker_does_not_know_again_yet_are_waited_for(cluster, other):
    grace = 1.5
    await other.join(cluster.brokers[0], TOPIC)
    other.holds = set(QUEUES[: COUNT // 2])
    settings = replace(QUICK, return_grace=grace)
    async with Group(cluster.name_server, settings=settings) as group:
        consumer = await group.join()
        await until(lambda: len(consumer.owned) == COUNT // 2, DEADLINE)
        where = cluster.brokers[0].address
        lost = consumer.engine.open_connection(where)
        assert lost is not None
        lost_at = consumer.engine.clock.monotonic()
        lost.close()
        await until(lambda: consumer.engine.open_connection(where) not in (None, lost), DEADLINE)
        await until(lambda: consumer.rebalancer._group_view._returned_at >= lost_at, DEADLINE)

        await other.leave()
        await until(lambda: len(consumer.owned) > COUNT // 2, DEADLINE)

        assert consumer.engine.clock.monotonic() >= lost_at + grace


async def test_members_are_read_once_more_after_claiming(cluster, group, other):
    await other.join(cluster.brokers[0], TOPIC)
    other.holds = set(QUEUES)
    broker = cluster.brokers[0]
    assert broker._dispatcher is not None
    usual = broker._dispatcher._handlers[RequestCode.GET_CONSUMER_LIST_BY_GROUP]
    lists: list[tuple[str, ...]] = []

    def first_without_the_other(connection, request):
        answer = usual(connection, request)
        assert isinstance(answer, Command)
        found = decode_body(ConsumerList, answer.body).consumer_id_list
        if not lists:
            found = tuple(member for member in found if member != other.client_id)
            answer = request.answer(
                ResponseCode.SUCCESS, body=encode_body(ConsumerList(consumer_id_list=found))
            )
        lists.append(found)
        return answer

    with answering(broker, RequestCode.GET_CONSUMER_LIST_BY_GROUP, first_without_the_other):
        consumer = await group.join()
        await until(lambda: other.questions >= 1, DEADLINE)

        assert lists[0] == (consumer.client_id,)
        assert group.ledger.begun == []
