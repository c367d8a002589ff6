"""Brokers that list different members of a group, and how long a member is waited for.

Rounds by the timer are a minute apart in these tests: what happens sooner is caused by an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.handover import OwnershipQuery, QueueClaim
from orbitmq.client.consumer.members import GroupMembers, Holdings, MemberSilent
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.consumer.strategies import Averagely
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.testing.cluster import MovableClock
from orbitmq.wire.bodies import ConsumerList, TopicConfig
from orbitmq.wire.codes import Language, RequestCode
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import until
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of, new_group
from tests.support.rebalancing import (
    QUICK,
    TOPIC,
    Consumer,
    Group,
    OtherMember,
    answering,
    usual_handler,
)

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


async def grow(cluster: AsyncEmbeddedCluster, place: int) -> None:
    """Give one more broker the topic; returns when clients can find it."""
    parts = cluster.brokers[place].parts
    config = TopicConfig(
        topic_name=TOPIC, read_queue_nums=COUNT, write_queue_nums=COUNT, perm=READ_WRITE
    )
    parts.topics.update(config, now=parts.clock.now())
    parts.registration.notice()
    names = [broker.parts.settings.name for broker in cluster.brokers[: place + 1]]
    await cluster.running.until_routed(TOPIC, names)


class First(Random):
    """Puts one broker before the others, wherever a client chooses any."""

    def __init__(self, broker: str) -> None:
        super().__init__(0)
        self._broker = broker

    def shuffle(self, names: Any) -> None:
        names.sort(key=lambda name: name != self._broker)


def group_of(cluster: AsyncEmbeddedCluster, first: str = "broker-a", **options: Any) -> Group:
    """A group whose members ask one broker before the other."""
    return Group(cluster.name_server, chance=First(first), **options)


@contextmanager
def counted(broker: Broker, code: int = RequestCode.GET_CONSUMER_LIST_BY_GROUP) -> Iterator[Any]:
    """The requests of one kind that a broker gets for the time of the block."""
    usual, asked = usual_handler(broker, code), []

    def count(connection, request):
        asked.append(request)
        return usual(connection, request)

    with answering(broker, code, count):
        yield asked


async def settled(group: Group, queues: list[Queue]) -> None:
    await until(lambda: group.ledger.is_settled(queues), DEADLINE)


async def pair(group: Group) -> tuple[Consumer, Consumer]:
    """Two members; the first of them has the first half of the queues."""
    members = [await group.join(), await group.join()]
    first, second = sorted(members, key=lambda member: member.client_id)
    return first, second


async def test_a_broker_that_does_not_know_all_members_yet_gives_none_the_queues_of_others(cluster):
    async with group_of(cluster, "broker-b") as group:
        early, late = await pair(group)
        await settled(group, OLD)
        theirs = late.owned
        await grow(cluster, 1)
        with counted(cluster.brokers[1]) as asked:
            await early.engine.routes.refresh()
            # By the new route all old queues are its own, and the other one does not know of it.
            await until(lambda: early.rebalancer.claimed == theirs, DEADLINE)
            await until(lambda: len(asked) >= 5, DEADLINE)

        assert late.owned == theirs
        await late.engine.routes.refresh()
        await settled(group, OLD + NEW)
        assert group.ledger.overlaps == []
        assert early.rebalancer.counts.overdue == 0


async def test_a_killed_member_of_two_brokers_has_left_as_soon_as_both_report_it(cluster):
    await grow(cluster, 1)
    # No later round and no grace within the deadline: both brokers send a notice.
    settings = replace(QUICK, retry=60.0, return_grace=60.0)
    async with group_of(cluster, settings=settings) as group:
        early, late = await pair(group)
        await settled(group, OLD + NEW)

        await late.kill()
        await settled(group, OLD + NEW)

        assert early.owned == {*OLD, *NEW}


async def test_a_broker_that_does_not_answer_keeps_no_member_in_the_group(cluster):
    await grow(cluster, 1)
    settings = replace(QUICK, answer=0.1, return_grace=0.3)
    async with group_of(cluster, settings=settings) as group:
        early, late = await pair(group)
        await settled(group, OLD + NEW)
        hung = asyncio.Event()

        async def never(_, __):
            await hung.wait()

        with answering(cluster.brokers[1], RequestCode.GET_CONSUMER_LIST_BY_GROUP, never):
            await late.kill()
            await settled(group, OLD + NEW)
        hung.set()

        assert early.owned == {*OLD, *NEW}


@pytest.mark.parametrize(
    ("language", "times"),
    [(Language.JAVA, 2), (Language.PYTHON, 1)],
    ids=["beside a Java member", "among ours"],
)
async def test_an_id_that_a_broker_lists_twice_counts_as_all_members_count_it(
    cluster, language, times
):
    other, seen = OtherMember("0-other"), []
    usual = usual_handler(cluster.brokers[0], RequestCode.GET_CONSUMER_LIST_BY_GROUP)

    def twice(connection, request):
        found = decode_body(ConsumerList, usual(connection, request).body).consumer_id_list
        ours = [each for each in found if each != other.client_id]
        return request.answer(0, body=encode_body(ConsumerList(consumer_id_list=(*found, *ours))))

    def noted(queues, ids, me):
        seen.append(ids)
        return Averagely()(queues, ids, me)

    await other.join(cluster.brokers[0], TOPIC, language=language)
    with answering(cluster.brokers[0], RequestCode.GET_CONSUMER_LIST_BY_GROUP, twice):
        async with group_of(cluster, strategy=noted) as group:
            consumer = await group.join()
            await until(lambda: seen, DEADLINE)
    await other.leave()

    assert seen[0] == [other.client_id, *[consumer.client_id] * times]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (
            [("one", "red"), ("two", "blue")],
            ["subscribe differently to topic 'orders'", "@one with TAG 'red'"],
        ),
        (
            [("same", "red"), ("same", "red")],
            ["has 2 consumers with the client id", "give each an instance name of its own"],
        ),
    ],
    ids=["different subscriptions", "one client id"],
)
async def test_members_log_what_their_broker_finds_wrong_with_the_group(members, expected, caplog):
    group = new_group()

    def reported() -> str:
        mine = [each for each in caplog.records if each.name == "orbitmq.client.consumer.members"]
        return "".join(each.getMessage() for each in mine)

    def adjust(settings):
        return replace(settings, scan_interval=0.02)

    async with AsyncEmbeddedCluster(adjust=adjust) as cluster, contextlib.AsyncExitStack() as stack:
        await cluster.create_topic("orders", queues=2)
        for instance, tags in members:
            consumer = consumer_of(
                cluster,
                group,
                client=quick_settings(cluster.name_server, instance=instance, heartbeat=0.05),
                rebalance=RebalanceSettings(interval=0.05, handover=0.01),
            )
            consumer.on("orders", tags=tags)(lambda message: None)
            await stack.enter_async_context(consumer)
        await until(reported)

    assert all(text in reported() for text in expected)


# ---- how long a member is waited for


class Answers:
    """The members of a group, of which one answers what a test lets it; None: nothing."""

    may_ask = True
    asked = 0
    reported: Holdings | None = None

    def __init__(self, *, is_java: bool) -> None:
        self._is_java = is_java

    async def java(self, _: str, members: list[str], *, after: int) -> dict[str, bool]:
        return dict.fromkeys(members, self._is_java)

    async def begun(self, client_id: str, topic: str) -> frozenset[Queue]:
        return (await self.holdings(client_id, topic, after=0)).held

    async def holdings(self, client_id: str, _: str, *, after: int) -> Holdings:
        if self.reported is None:
            raise MemberSilent(client_id)
        return self.reported


class Stopped(MovableClock):
    at = 0.0

    def monotonic(self) -> float:
        return self.at


HELD = Holdings(frozenset(OLD))
LEAVING = Holdings(frozenset(OLD), leaving=frozenset(OLD))
CLAIMED = Holdings(frozenset(), claimed=frozenset(OLD))


@pytest.mark.parametrize(
    ("reports", "overdue_at", "options"),
    [
        ([(0, HELD)], 300, {}),
        ([(0, HELD)], 400, {"route_refresh": 200.0}),
        ([(0, HELD)], 60, {"is_java": True}),
        ([(0, HELD)], 11, {"is_java": True, "route_refresh": 1.0}),
        ([(0, HELD), (60, LEAVING)], 71, {}),
        ([(0, LEAVING), (5, HELD), (8, LEAVING)], 19, {}),
        ([(0, HELD), (100, HELD), (101, None)], 111, {}),
        ([(0, CLAIMED)], 11, {"me": "a"}),
    ],
    ids=[
        "holds the queue",
        "longer where routes are read seldom",
        "a Java member: two reads of routes",
        "a Java member: at least a hand-over",
        "a hand-over after it began to release",
        "releases again",
        "a hand-over after its last answer",
        "of two that claim, the smaller id begins",
    ],
)
async def test_a_member_is_waited_for_until_it_is_overdue(reports, overdue_at, options):
    options = {"me": "z", "is_java": False, "route_refresh": 30.0} | options
    answers, clock = Answers(is_java=options["is_java"]), Stopped()
    query = OwnershipQuery(
        cast(GroupMembers, answers),
        TOPIC,
        Averagely(),
        RebalanceSettings(handover=10.0, longest_wait=300.0),
        clock,
        me=options["me"],
        route_refresh=options["route_refresh"],
    )
    claim = QueueClaim(OLD[0], 0.0)

    async def is_overdue(at: float) -> bool:
        clock.at = at
        free, overdue = await query.free([claim], ["m"], OLD)
        assert free == []
        return bool(overdue)

    for at, report in reports:
        answers.reported = report
        assert not await is_overdue(at)
    assert not await is_overdue(overdue_at - 0.5)
    assert await is_overdue(overdue_at + 0.5)


async def test_of_two_that_claim_a_queue_the_greater_client_id_goes_on_waiting():
    answers, clock = Answers(is_java=False), Stopped()
    settings = RebalanceSettings(handover=10.0)
    members = cast(GroupMembers, answers)
    query = OwnershipQuery(members, TOPIC, Averagely(), settings, clock, me="z", route_refresh=30.0)
    answers.reported = CLAIMED

    clock.at = 11.5

    assert await query.free([QueueClaim(OLD[0], 0.0)], ["m"], OLD) == ([], [])
