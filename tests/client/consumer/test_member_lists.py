"""Brokers that list different members: nobody loses queues to it, and nobody keeps them by it.

Rounds by the timer are a minute apart in these tests, and a look again as well where nothing else
is said: whatever happens sooner came from news.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import cast

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.handover import OwnershipQuery, QueueClaim
from orbitmq.client.consumer.members import GroupMembers, Holdings, MemberSilent
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.consumer.strategies import Averagely
from orbitmq.client.routes import Queue
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.testing.cluster import MovableClock
from orbitmq.wire.bodies import TopicConfig
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from tests.support.broker import until
from tests.support.client import running_engine
from tests.support.rebalancing import GROUP, QUICK, TOPIC, Consumer, Group, OtherMember, answering

COUNT = 4
OLD = [Queue(TOPIC, "broker-a", place) for place in range(COUNT)]
NEW = [Queue(TOPIC, "broker-b", place) for place in range(COUNT)]
DEADLINE = 30.0
READ_WRITE = 6


@pytest.fixture
async def cluster():
    """Two brokers, of which the first has the topic."""
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        await grow(cluster, 0)
        yield cluster


@pytest.fixture
async def other():
    """A member that sorts before all of ours, and so has the first half of the queues."""
    member = OtherMember("0-other")
    yield member
    await member.leave()


async def grow(cluster: AsyncEmbeddedCluster, place: int) -> None:
    """Give one broker more the topic; returns when whoever asks finds it."""
    parts = cluster.brokers[place].parts
    config = TopicConfig(
        topic_name=TOPIC, read_queue_nums=COUNT, write_queue_nums=COUNT, perm=READ_WRITE
    )
    parts.topics.update(config, now=parts.clock.now())
    parts.registration.notice()
    names = [broker.parts.settings.name for broker in cluster.brokers[: place + 1]]
    await cluster._running.until_routed(TOPIC, names)


@pytest.fixture
def asked_first(monkeypatch):
    """Has everybody ask one broker before others, where any will do."""

    def ask_first(broker):
        usual = GroupMembers._brokers

        def ordered(self, route):
            return iter(sorted(usual(self, route), key=lambda each: each != broker.address))

        monkeypatch.setattr(GroupMembers, "_brokers", ordered)

    return ask_first


@contextmanager
def counted_lists(broker: Broker) -> Iterator[list[Command]]:
    """The questions for members that a broker is asked for the time of the block."""
    assert broker._dispatcher is not None
    usual = broker._dispatcher._handlers[RequestCode.GET_CONSUMER_LIST_BY_GROUP]
    asked: list[Command] = []

    def count(connection: Connection, request: Command) -> Command:
        asked.append(request)
        answer = usual(connection, request)
        assert isinstance(answer, Command)
        return answer

    with answering(broker, RequestCode.GET_CONSUMER_LIST_BY_GROUP, count):
        yield asked


async def settled(group: Group, queues: list[Queue]) -> None:
    await until(lambda: group.ledger.is_settled(queues), DEADLINE)


async def learn(consumer: Consumer) -> None:
    """Look at the routes, as is done every half minute otherwise."""
    await consumer.engine.routes.refresh()


async def pair(group: Group) -> tuple[Consumer, Consumer]:
    """Two members; the first of them has the first half of the queues."""
    members = [await group.join(), await group.join()]
    first, second = sorted(members, key=lambda member: member.client_id)
    return first, second


async def test_a_broker_that_does_not_know_everybody_yet_gives_nobody_the_queues_of_others(
    cluster, asked_first
):
    new = cluster.brokers[1]
    asked_first(new)
    async with Group(cluster.name_server) as group:
        early, late = await pair(group)
        await settled(group, OLD)
        theirs = late.owned
        await grow(cluster, 1)
        with counted_lists(new) as asked:
            await learn(early)
            # By the new route all old queues are its own, and the other one knows nothing of it.
            await until(lambda: early.rebalancer.claimed == theirs, DEADLINE)
            await until(lambda: len(asked) >= 5, DEADLINE)

        assert late.owned == theirs
        assert early.owned == set(OLD) - theirs
        await learn(late)
        await settled(group, OLD + NEW)

        assert group.ledger.overlaps == []
        assert early.rebalancer.counts.overdue == 0


async def test_a_newcomer_finds_those_whom_a_new_broker_does_not_know(cluster, asked_first):
    new = cluster.brokers[1]
    asked_first(new)
    async with Group(cluster.name_server) as group:
        there = await group.join()
        await settled(group, OLD)
        await grow(cluster, 1)
        with counted_lists(new) as asked:
            newcomer = await group.join()
            await until(lambda: len(asked) >= 3, DEADLINE)

        assert not newcomer.owned & there.owned
        await learn(there)
        await settled(group, OLD + NEW)

        assert group.ledger.overlaps == []


async def test_a_member_whom_only_one_broker_knows_gets_its_share_and_keeps_it(
    cluster, other, asked_first
):
    await grow(cluster, 1)
    asked_first(cluster.brokers[0])
    async with Group(cluster.name_server) as group:
        consumer = await group.join()
        await settled(group, OLD + NEW)
        await other.join(cluster.brokers[1], TOPIC)

        await until(lambda: consumer.owned == set(NEW), DEADLINE)
        rounds = consumer.rebalancer.counts.rounds
        consumer.rebalancer.wake()
        await until(lambda: consumer.rebalancer.counts.rounds > rounds + 1, DEADLINE)
        assert consumer.owned == set(NEW)
        await other.leave()

        await until(lambda: consumer.owned == {*OLD, *NEW}, DEADLINE)


async def test_a_java_member_that_a_new_broker_does_not_know_is_asked_as_java_through_the_old_one(
    cluster, other, asked_first
):
    await other.join(cluster.brokers[0], TOPIC, language=Language.JAVA)
    await grow(cluster, 1)
    asked_first(cluster.brokers[1])
    other.holds = {*OLD, *NEW}
    async with Group(cluster.name_server) as group:
        consumer = await group.join()
        await until(lambda: other.harmless_questions >= 3, DEADLINE)
        assert consumer.owned == set()
        assert consumer.rebalancer.claimed == set(NEW)
        other.holds = set(OLD)

        await until(lambda: consumer.owned == set(NEW), DEADLINE)
        assert other.questions == 0
        assert consumer.rebalancer.counts.overdue == 0


async def test_a_killed_member_of_two_brokers_is_let_go_as_soon_as_they_tell(cluster):
    await grow(cluster, 1)
    # No look again and no grace within the deadline: what helps is that both brokers tell.
    settings = replace(QUICK, retry=60.0, return_grace=60.0)
    async with Group(cluster.name_server, settings=settings) as group:
        early, late = await pair(group)
        await settled(group, OLD + NEW)

        await late.kill()
        await settled(group, OLD + NEW)
        assert early.owned == {*OLD, *NEW}
        again = await group.join()
        await settled(group, OLD + NEW)
        await early.stop()
        await settled(group, OLD + NEW)

        assert again.owned == {*OLD, *NEW}
        assert group.ledger.overlaps == []


async def test_a_broker_that_does_not_answer_keeps_nobody_in_the_group(cluster, asked_first):
    await grow(cluster, 1)
    asked_first(cluster.brokers[0])
    settings = replace(QUICK, answer=0.1, return_grace=0.3)
    async with Group(cluster.name_server, settings=settings) as group:
        early, late = await pair(group)
        await settled(group, OLD + NEW)
        hung = asyncio.Event()

        async def never(_, __):
            await hung.wait()

        with answering(cluster.brokers[1], RequestCode.GET_CONSUMER_LIST_BY_GROUP, never):
            await late.kill()
            await settled(group, OLD + NEW)

            assert early.owned == {*OLD, *NEW}
        hung.set()


# ---- an id that is listed twice


@asynccontextmanager
async def half_open(consumer: Consumer, broker: Broker) -> AsyncIterator[None]:
    """A second connection of a member, as one that a broker does not know to be dead yet."""
    connection = await connect(broker.address, owner=Dispatcher({}))
    try:
        body = consumer.engine._heartbeats._body()
        answer = await connection.request(RequestCode.HEART_BEAT, None, body=body, timeout=DEADLINE)
        assert answer.code == ResponseCode.SUCCESS
        yield
    finally:
        connection.close()
        await connection.wait_closed()


def listed_at(broker: Broker) -> list[str]:
    return sorted(member.client.id for member in broker.parts.consumers.members(GROUP))


async def seen(
    consumer: Consumer, cluster: AsyncEmbeddedCluster, ask_first: Callable[[Broker], None]
) -> set[tuple[str, ...] | None]:
    """What rounds make of the members, whichever broker they ask first: also quiet ones."""
    found: set[tuple[str, ...] | None] = set()
    survey = consumer.rebalancer._group_view
    for broker in (*cluster.brokers, *cluster.brokers):
        ask_first(broker)
        members = await survey.members(TOPIC, ())
        found.add(None if members is None else tuple(sorted(members)))
    return found


async def test_who_is_listed_twice_by_one_broker_is_one_member_whichever_is_asked(
    cluster, asked_first
):
    await grow(cluster, 1)
    async with Group(cluster.name_server) as group:
        early, late = await pair(group)
        await settled(group, OLD + NEW)
        both = (early.client_id, late.client_id)

        async with half_open(early, cluster.brokers[0]):
            assert listed_at(cluster.brokers[0]) == [both[0], *both]
            assert await seen(early, cluster, asked_first) == {both}
            assert await seen(late, cluster, asked_first) == {both}
            early.rebalancer.wake()
            late.rebalancer.wake()
            await settled(group, OLD + NEW)

        assert group.ledger.overlaps == []


async def test_beside_a_java_member_an_id_counts_as_often_as_any_broker_lists_it(
    cluster, other, asked_first
):
    await grow(cluster, 1)
    # It is connected to both brokers, so that their lists differ in nothing but the number.
    beside = OtherMember(other.client_id)
    await other.join(cluster.brokers[0], TOPIC, language=Language.JAVA)
    await beside.join(cluster.brokers[1], TOPIC, language=Language.JAVA)
    try:
        async with Group(cluster.name_server) as group:
            consumer = await group.join()
            await until(lambda: consumer.owned == set(NEW), DEADLINE)

            async with half_open(consumer, cluster.brokers[0]):
                own = consumer.client_id
                assert await seen(consumer, cluster, asked_first) == {(other.client_id, own, own)}
    finally:
        await beside.leave()


# ---- what it costs


TOPICS = tuple(f"topic-{number}" for number in range(12))


async def test_a_consumer_of_many_topics_asks_for_the_members_once_not_once_for_each(cluster):
    for topic in TOPICS:
        await cluster.create_topic(topic, queues=1)
    with counted_lists(cluster.brokers[0]) as one, counted_lists(cluster.brokers[1]) as two:
        async with Group(cluster.name_server, topics=TOPICS) as group:
            consumer = await group.join()
            await until(lambda: len(consumer.owned) == 2 * len(TOPICS), DEADLINE)
            # Some rounds, and a look after the claims of each.
            assert len(one) < len(TOPICS)
            assert len(two) < len(TOPICS)

            survey, own = consumer.rebalancer._group_view, (consumer.client_id,)

            async def questions():
                survey.happened()
                after, before = survey.asked, (len(one), len(two))
                asking = (survey.members(topic, own, after=after) for topic in TOPICS)
                assert await asyncio.gather(*asking) == [own] * len(TOPICS)
                return len(one) - before[0], len(two) - before[1]

            # What its start has caused may still be under way.
            async with asyncio.timeout(DEADLINE):
                while await questions() != (1, 1):
                    pass


async def test_one_answer_of_a_member_is_for_all_claims_that_were_made_before_it_was_asked(
    cluster, other
):
    for topic in TOPICS:
        await cluster.create_topic(topic, queues=1)
    await other.join(cluster.brokers[0], *TOPICS)
    other.holds = {Queue(TOPICS[0], "broker-a", 0)}
    async with running_engine(cluster.name_server) as engine:
        members = GroupMembers(engine, GROUP)
        after = members.asked
        asking = (members.holdings(other.client_id, topic, after=after) for topic in TOPICS)
        found = await asyncio.gather(*asking)

        assert found == [Holdings(frozenset(other.holds))] * len(TOPICS)
        assert other.questions == 1
        # A claim that is made now needs a newer one.
        await members.holdings(other.client_id, TOPICS[0], after=members.asked)
        assert other.questions == 2


# ---- who is overdue


@dataclass
class _Answers:
    """Members of which one says what a test wants it to say; None: nothing."""

    said: Holdings | None
    may_ask: bool = True
    asked: int = 0
    is_java: bool = False

    async def java(self, _topic: str, members: list[str], *, after: int) -> dict[str, bool]:
        assert after <= self.asked
        return dict.fromkeys(members, self.is_java)

    async def begun(self, client_id: str, topic: str) -> frozenset[Queue]:
        return (await self.holdings(client_id, topic, after=0)).held

    async def holdings(self, client_id: str, _topic: str, *, after: int) -> Holdings:
        assert after <= self.asked
        if self.said is None:
            raise MemberSilent(client_id)
        return self.said


class _Waiting:
    """A claim of a queue, made at 0 s, and the member "m" that stands against it."""

    def __init__(
        self, said: Holdings, me: str = "z", *, is_java: bool = False, route_refresh: float = 30.0
    ) -> None:
        self.other = _Answers(said, is_java=is_java)
        self._clock = _Stopped()
        self._query = OwnershipQuery(
            cast(GroupMembers, self.other),
            TOPIC,
            Averagely(),
            RebalanceSettings(handover=10.0, longest_wait=300.0),
            self._clock,
            me=me,
            route_refresh=route_refresh,
        )
        self._claim = QueueClaim(OLD[0], 0.0)

    async def is_overdue(self, seconds: float) -> bool:
        """Whether it is begun at that time although the other stands against it."""
        self._clock.at = seconds
        free, overdue = await self._query.free([self._claim], ["m"], OLD)
        assert free == []
        return overdue == [self._claim]


class _Stopped(MovableClock):
    at = 0.0

    def monotonic(self) -> float:
        return self.at


HELD = Holdings(frozenset(OLD))
LEAVING = Holdings(frozenset(OLD), leaving=frozenset(OLD))
CLAIMED = Holdings(frozenset(), claimed=frozenset(OLD))


async def test_who_holds_a_queue_and_says_so_keeps_it_for_the_longest_wait():
    waiting = _Waiting(HELD)

    assert [await waiting.is_overdue(at) for at in (11.5, 41.5, 299.0, 300.5)] == [
        False,
        False,
        False,
        True,
    ]


async def test_who_looks_at_routes_seldom_waits_until_others_have_heard_of_the_queue():
    waiting = _Waiting(HELD, route_refresh=200.0)

    assert [await waiting.is_overdue(at) for at in (300.5, 399.0, 400.5)] == [False, False, True]


@pytest.mark.parametrize(("route_refresh", "ends"), [(30.0, 60.0), (1.0, 11.0)])
async def test_a_java_member_is_not_believed_for_long_that_it_has_a_queue(route_refresh, ends):
    waiting = _Waiting(HELD, is_java=True, route_refresh=route_refresh)

    assert [await waiting.is_overdue(at) for at in (ends - 0.5, ends + 0.5)] == [False, True]


async def test_who_lets_go_is_overdue_a_handover_after_it_first_said_so():
    waiting = _Waiting(HELD)
    assert not await waiting.is_overdue(50.0)
    waiting.other.said = LEAVING

    assert [await waiting.is_overdue(at) for at in (60.0, 70.5, 71.5)] == [False, False, True]


async def test_who_holds_the_queue_anew_is_not_letting_go_of_it():
    waiting = _Waiting(LEAVING)
    assert not await waiting.is_overdue(0.0)
    waiting.other.said = HELD
    assert not await waiting.is_overdue(5.0)
    waiting.other.said = LEAVING

    assert [await waiting.is_overdue(at) for at in (8.0, 12.0, 19.5)] == [False, False, True]


async def test_who_held_a_queue_and_does_not_answer_once_is_not_overdue_by_that():
    waiting = _Waiting(HELD)
    assert not await waiting.is_overdue(100.0)
    waiting.other.said = None

    assert [await waiting.is_overdue(at) for at in (100.1, 110.5, 111.5)] == [False, False, True]


@pytest.mark.parametrize(("me", "begins"), [("a", True), ("z", False)])
async def test_of_two_that_claim_a_queue_without_end_one_begins_it(me, begins):
    waiting = _Waiting(CLAIMED, me)

    assert not await waiting.is_overdue(10.5)
    assert await waiting.is_overdue(11.5) is begins
