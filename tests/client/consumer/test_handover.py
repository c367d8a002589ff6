"""Hand-over of queues: no overlap, no loss, within a second, and from the offset of the last owner.

Rounds by the timer are a minute apart in these tests: what happens sooner is caused by an event.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from orbitmq.client.consumer import handover
from orbitmq.client.consumer.members import MOST_UNANSWERED
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import ConsumerList
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
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
    usual_handler,
)
from tests.support.tries import TRIES

QUEUE_COUNT = 16
QUEUES = [Queue(TOPIC, "broker-a", place) for place in range(QUEUE_COUNT)]
#: Of two members, the one with the greater client id has these.
SECOND_HALF = set(QUEUES[QUEUE_COUNT // 2 :])
DEADLINE = 30.0


@pytest.fixture
async def group(cluster):
    async with Group(cluster.name_server) as group:
        yield group


@pytest.fixture
async def other():
    """A member that sorts before all of ours, and so has the first half of the queues."""
    member = OtherMember("0-other")
    yield member
    await member.leave()


async def send(cluster: AsyncEmbeddedCluster, rounds: int) -> None:
    """Send messages to every queue."""
    client = await RawClient.open(cluster.brokers[0])
    for _ in range(rounds):
        await asyncio.gather(*(client.stored(TOPIC, queue_id=queue.id) for queue in QUEUES))
    await client.close()


async def report(cluster: AsyncEmbeddedCluster, offset: int) -> None:
    """Commit an offset of the queue with the number 3, as another member does."""
    client = await RawClient.open(cluster.brokers[0])
    await client.report(TOPIC, offset, queue_id=3)
    await client.close()


@asynccontextmanager
async def under_load(cluster: AsyncEmbeddedCluster) -> AsyncIterator[list[int]]:
    """Sends to every queue for the time of the block; yields a list that grows with each round."""
    rounds: list[int] = []
    is_over = asyncio.Event()

    async def run() -> None:
        while not is_over.is_set():
            await send(cluster, 1)
            rounds.append(QUEUE_COUNT)
            await asyncio.sleep(0.005)

    sending = asyncio.create_task(run())
    try:
        yield rounds
    finally:
        is_over.set()
        await sending


async def settled(group: Group) -> None:
    await until(lambda: group.ledger.is_settled(QUEUES), DEADLINE)


async def owns(consumer: Consumer, queues: set[Queue]) -> None:
    await until(lambda: consumer.owned == queues, DEADLINE)


async def lost_by(consumer: Consumer) -> set[Queue]:
    """Half of the queues, once the consumer has begun to give them up."""

    def draining() -> set[Queue]:
        owned = consumer.rebalancer.owned
        return {queue for queue, each in owned.items() if each.is_draining}

    await until(lambda: len(draining()) == QUEUE_COUNT // 2, DEADLINE)
    return draining()


def starts_of(group: Group, consumer: Consumer) -> set[int]:
    """The offsets at which a member has begun its queues."""
    return {each.offset for each in group.ledger.begun if each.client_id == consumer.client_id}


@pytest.mark.feature("A1")
@pytest.mark.feature("A13")
async def test_joins_and_leaves_under_load_cause_no_duplicate_no_gap_and_no_overlap(cluster, group):
    async def handler(_, __):
        await asyncio.sleep(0.005)

    async with under_load(cluster) as rounds:
        consumers = [await group.join(handler=handler) for _ in range(2)]
        await settled(group)
        for _ in range(3):
            consumers.append(await group.join(handler=handler))
            await settled(group)
        for leaver in (consumers[0], consumers[3]):
            await leaver.stop()
            await settled(group)
    await until(lambda: len(group.ledger.consumed) == sum(rounds), DEADLINE)

    assert group.ledger.overlaps == []
    assert group.ledger.duplicates == {}
    # Each owner has begun where the one before had ended, to the message.
    assert all(begun.offset == begun.done for begun in group.ledger.begun)
    await group.end()
    assert sum(cluster.progress(GROUP, TOPIC).values()) == sum(rounds)


@pytest.mark.feature("A10")
async def test_a_queue_that_changes_hands_is_consumed_again_within_a_second(cluster, group):
    best = dict.fromkeys(("join", "leave", "kill"), math.inf)
    async with under_load(cluster):
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
                pauses = [await _longest_pause(group, begun, since) for begun in moved]
                best[change] = min(best[change], max(pauses))
            if turn >= 3 and max(best.values()) < 1.0:
                break

    # One change of each kind that the machine did not disturb is enough.
    assert max(best.values()) < 1.0, best


async def _longest_pause(group: Group, begun: Begun, since: float) -> float:
    """The longest time without a message of a queue, from a change until its new owner has one."""
    times = group.ledger.times
    await until(lambda: any(at > begun.at for at in times.get(begun.queue, ())), DEADLINE)
    points = [since, *(at for at in times[begun.queue] if at > since)]
    return max(after - before for before, after in itertools.pairwise(points))


@pytest.mark.feature("A15")
async def test_a_handler_that_outlives_the_loss_of_its_queue_is_not_committed_and_counted(cluster):
    await send(cluster, 1)
    gate = asyncio.Event()

    async def waits(consumer, _):
        if consumer.client_id == first.client_id:
            await gate.wait()

    settings = replace(QUICK, handover=0.2)
    async with Group(cluster.name_server, settings=settings, handler=waits) as group:
        first = await group.join()
        await until(lambda: sum(group.ledger.running.values()) == QUEUE_COUNT, DEADLINE)
        second = await group.join()
        await until(lambda: len(group.ledger.consumed) == QUEUE_COUNT // 2, DEADLINE)
        await second.progress.persist(second.owned)
        progress = cluster.progress(GROUP, TOPIC)
        gate.set()
        await until(lambda: len(group.ledger.duplicates) == QUEUE_COUNT // 2, DEADLINE)

        assert first.rebalancer.counts.abandoned == QUEUE_COUNT // 2
        assert second.rebalancer.counts.overdue == 0
        for queue in second.owned:
            assert first.progress.read(queue) is None
            assert progress[queue.broker, queue.id] == 1


@pytest.mark.parametrize(
    ("what", "language"),
    [("holds", Language.OTHER), ("claims", Language.OTHER), ("holds", Language.JAVA)],
    ids=["held", "claimed", "held by a Java client"],
)
async def test_a_queue_that_another_member_names_is_waited_for(
    cluster, group, other, what, language
):
    await other.join(cluster.brokers[0], TOPIC, language=language)
    setattr(other, what, set(QUEUES))
    consumer = await group.join()
    await until(lambda: other.questions + other.harmless_questions >= 3, DEADLINE)
    assert consumer.owned == set()
    assert consumer.rebalancer.claimed == SECOND_HALF

    setattr(other, what, set(QUEUES[: QUEUE_COUNT // 2 + 1]))
    await owns(consumer, SECOND_HALF - {QUEUES[QUEUE_COUNT // 2]})
    setattr(other, what, set())
    await owns(consumer, SECOND_HALF)

    assert consumer.rebalancer.counts.overdue == 0
    # Java clients are asked only what they answer from memory.
    assert (other.questions == 0) == (language is Language.JAVA)


@pytest.mark.parametrize("is_leaving", [True, False])
async def test_a_member_that_never_lets_go_is_not_waited_for_indefinitely(
    cluster, other, is_leaving
):
    await other.join(cluster.brokers[0], TOPIC)
    other.holds = set(QUEUES)
    if is_leaving:
        other.leaves = set(QUEUES)
    longest = 300.0 if is_leaving else 0.2
    settings = RebalanceSettings(interval=60.0, handover=0.1, longest_wait=longest)

    client = {"route_refresh": 0.1}
    async with Group(cluster.name_server, settings=settings, client=client) as group:
        consumer = await group.join()
        await owns(consumer, SECOND_HALF)

        assert consumer.rebalancer.counts.overdue == QUEUE_COUNT // 2


async def test_a_java_member_that_never_answers_is_asked_a_few_times_only(cluster, other, caplog):
    other.holds = None
    await other.join(cluster.brokers[0], TOPIC, language=Language.JAVA)
    settings = RebalanceSettings(interval=60.0, handover=1.0, answer=0.1, silence=0.0)

    async with Group(cluster.name_server, settings=settings) as group:
        consumer = await group.join()
        await owns(consumer, SECOND_HALF)

    assert other.harmless_questions == MOST_UNANSWERED
    assert caplog.text.count("is not asked any more") == 1


async def test_a_queue_that_a_java_member_had_and_does_not_name_is_begun_a_moment_later(
    cluster, group, other
):
    await other.join(cluster.brokers[0], TOPIC, language=Language.JAVA)
    began = asyncio.get_running_loop().time()

    consumer = await group.join()
    await owns(consumer, SECOND_HALF)

    assert asyncio.get_running_loop().time() - began >= 0.3


async def test_members_that_may_not_be_asked_are_waited_for_no_longer_than_an_answer(
    cluster, caplog
):
    def forbid(_, request):
        return request.answer(ResponseCode.NO_PERMISSION, remark="no Get for you")

    settings = RebalanceSettings(interval=60.0, handover=3600.0, answer=0.2)
    with answering(cluster.brokers[0], RequestCode.GET_CONSUMER_RUNNING_INFO, forbid):
        async with Group(cluster.name_server, settings=settings) as group:
            first = await group.join()
            await until(lambda: len(first.owned) == QUEUE_COUNT, DEADLINE)
            second = await group.join()
            await until(lambda: len(second.owned) == QUEUE_COUNT // 2, DEADLINE)

    assert caplog.text.count("may not ask each other") == 1


async def test_a_restart_of_the_broker_moves_no_queue(cluster, group):
    for _ in range(3):
        await group.join()
    await settled(group)
    owners, begun = group.ledger.owners(), len(group.ledger.begun)

    await cluster.restart_broker()
    await send(cluster, 10)
    await until(lambda: len(group.ledger.consumed) == 10 * QUEUE_COUNT, DEADLINE)

    assert (group.ledger.owners(), len(group.ledger.begun)) == (owners, begun)
    assert group.ledger.duplicates == {}


async def test_an_offset_that_is_refused_at_first_is_committed_before_the_queue_goes(
    cluster, group
):
    await send(cluster, 1)
    first = await group.join()
    await until(lambda: len(group.ledger.consumed) == QUEUE_COUNT, DEADLINE)
    with refusing(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET):
        second = await group.join()
        lost = await lost_by(first)
        await until(lambda: second.rebalancer.claimed == lost, DEADLINE)
        assert second.owned == set()

    await settled(group)
    assert starts_of(group, second) == {1}
    assert group.ledger.duplicates == {}


async def test_a_slow_release_does_not_take_back_what_the_next_owner_has_committed(
    cluster, group, monkeypatch
):
    monkeypatch.setattr(handover, "_LONG", 0.0)
    await send(cluster, 1)
    gate = asyncio.Event()

    async def waits(_, __):
        await gate.wait()

    consumer = await group.join(handler=waits, pulls_report=False)
    await until(lambda: sum(group.ledger.running.values()) == QUEUE_COUNT, DEADLINE)
    stopping = asyncio.create_task(consumer.stop())
    await until(lambda: all(each.is_draining for each in consumer.rebalancer.owned.values()))
    await report(cluster, 7)
    gate.set()
    await stopping

    progress = cluster.progress(GROUP, TOPIC)
    assert (progress["broker-a", 3], progress["broker-a", 4]) == (7, 1)


async def test_a_stop_commits_again_what_a_former_owner_has_moved_back(cluster, group):
    await send(cluster, 1)
    consumer = await group.join(pulls_report=False)
    await until(lambda: len(group.ledger.consumed) == QUEUE_COUNT, DEADLINE)
    for _ in range(3):
        await consumer.progress.persist(QUEUES)
    await report(cluster, 0)

    await consumer.stop()

    assert cluster.progress(GROUP, TOPIC)["broker-a", 3] == 1


async def test_members_are_read_once_more_after_claiming(cluster, group, other):
    await other.join(cluster.brokers[0], TOPIC)
    other.holds = set(QUEUES)
    code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
    usual = usual_handler(cluster.brokers[0], code)
    lists: list[tuple[str, ...]] = []

    def first_without_the_other(connection, request):
        answer = usual(connection, request)
        found = decode_body(ConsumerList, answer.body).consumer_id_list
        if not lists:
            found = tuple(member for member in found if member != other.client_id)
            body = encode_body(ConsumerList(consumer_id_list=found))
            answer = request.answer(ResponseCode.SUCCESS, body=body)
        lists.append(found)
        return answer

    with answering(cluster.brokers[0], code, first_without_the_other):
        consumer = await group.join()
        await until(lambda: other.questions >= 1, DEADLINE)

        assert lists[0] == (consumer.client_id,)
        assert group.ledger.begun == []
