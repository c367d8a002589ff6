"""Queues that members of a group do not share evenly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.members import GroupSubscription, OwnedQueueInfo, RunningInfo
from orbitmq.client.consumer.strategies import NAMED, share
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock
from orbitmq.console.checks import Check, examine, find_faults
from orbitmq.console.members import UNEVEN_AFTER, UNEVEN_LOOKS, MemberPoller, Uneven, uneven_topics
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import ProcessQueueInfo
from tests.support.client_admin import World
from tests.support.consoles import settings_for

QUEUES = [Queue("orders", "broker-a", number) for number in range(4)]


def owned(queue: Queue, *, is_dropped: bool = False) -> OwnedQueueInfo:
    return OwnedQueueInfo(
        queue=queue,
        commit_offset=0,
        cached_messages=0,
        cached_mib=0,
        cached_min_offset=0,
        cached_max_offset=0,
        is_locked=False,
        is_dropped=is_dropped,
        last_pull_at=None,
        last_consume_at=None,
        last_lock_at=None,
    )


def member(
    client_id: str,
    queues: Iterable[Queue] = (),
    *,
    topics: Iterable[str] = ("orders",),
    dropped: Iterable[Queue] = (),
    strategy: str | None = None,
) -> RunningInfo:
    return RunningInfo(
        "billing",
        client_id,
        (*map(owned, queues), *(owned(each, is_dropped=True) for each in dropped)),
        tuple(GroupSubscription(each, "*", "TAG") for each in topics),
        {},
        {} if strategy is None else {"allocateMessageQueueStrategy": strategy},
    )


def found(*members: RunningInfo) -> list[Uneven]:
    return list(uneven_topics({each.client_id: each for each in members}))


def test_a_member_with_two_more_than_another_is_found_with_who_has_how_many():
    (one,) = found(member("a", QUEUES[:3]), member("b", QUEUES[3:]), member("c"))

    assert one == Uneven("orders", (("a", 3), ("b", 1), ("c", 0)))
    assert one.text == "a has 3 of its queues and c has none"


def test_what_is_shared_as_well_as_it_can_be_is_not():
    retries = [Queue("%RETRY%billing", "broker-a", number) for number in range(3)]
    cases = (
        (),
        (member("a", QUEUES),),
        (member("a", QUEUES[:2]), member("b", QUEUES[2:])),
        (member("a", QUEUES[:1]), member("b", QUEUES[1:2]), member("c")),
        # Given away already, and for retries.
        (member("a", QUEUES[:2], dropped=QUEUES[2:]), member("b", QUEUES[2:])),
        (member("a", retries, topics=("%RETRY%billing",)), member("b", topics=("%RETRY%billing",))),
        # Whoever does not subscribe gets none; that is another fault.
        (member("a", QUEUES), member("b", topics=("others",))),
    )
    for case in cases:
        assert found(*case) == []


@pytest.mark.parametrize(
    ("strategy", "is_judged"),
    [
        (None, True),
        ("AVG", True),
        ("AVG_BY_CIRCLE", True),
        ("org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely@1b2c", True),
        ("CONSISTENT_HASH", False),
        ("CONFIG", False),
        ("MACHINE_ROOM_NEARBY-AVG", False),
        ("org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig@77", False),
    ],
)
def test_strategies_that_are_uneven_on_purpose_are_left_alone(strategy, is_judged):
    members = (member("a", QUEUES, strategy=strategy), member("b", strategy=strategy))

    assert bool(found(*members)) is is_judged


@given(
    queues=some.integers(1, 40),
    members=some.integers(1, 12),
    strategy=some.sampled_from(["AVG", "AVG_BY_CIRCLE"]),
)
def test_what_the_usual_strategies_allocate_is_never_uneven(queues, members, strategy):
    all_queues = [Queue("orders", "broker-a", number) for number in range(queues)]
    ids = [f"client-{number:02}" for number in range(members)]

    shares = [
        member(each, share(NAMED[strategy], all_queues, ids, each), strategy=strategy)
        for each in ids
    ]

    assert found(*shares) == []


class Moving:
    """A clock that stands still until it is moved."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.passed = 0.0

    def now(self) -> float:
        return self._clock.now() + self.passed

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.passed


def holding(*queues: Queue) -> Mapping[Queue, ProcessQueueInfo]:
    return {queue: ProcessQueueInfo() for queue in queues}


async def test_it_is_a_fault_when_it_lasts_and_is_gone_when_it_is_mended():
    async with (
        AsyncEmbeddedCluster() as cluster,
        AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as admin,
    ):
        await cluster.create_topic("orders", queues=4)
        world, clock = World(cluster, admin), Moving(cluster.clock)
        try:
            greedy = await world.consumer("client-1", owns=holding(*QUEUES))
            idle = await world.consumer("client-2")
            clients: dict[str, tuple[str, ...]] = {"billing": ("client-1", "client-2")}
            handlers = MemberPoller(admin, lambda: clients, lambda: (), clock, budget=9)

            await handlers.poll()
            at_first = handlers.findings["billing"].uneven
            clock.passed = UNEVEN_AFTER
            await handlers.poll()
            in_two_looks = handlers.findings["billing"].uneven
            await handlers.poll()
            later = handlers.findings["billing"].uneven
            # Uneven in another way: they share anew, and the time begins again.
            greedy.owns, idle.owns = dict(holding(*QUEUES[:3])), dict(holding(*QUEUES[3:]))
            for _ in range(UNEVEN_LOOKS):
                await handlers.poll()
            otherwise = handlers.findings["billing"].uneven
            clock.passed += UNEVEN_AFTER
            await handlers.poll()
            lasting = handlers.findings["billing"].uneven
            # Who has come meanwhile and was not asked may have the rest.
            clients["billing"] = ("client-1",)
            await handlers.poll()
            unknown = handlers.findings["billing"].uneven
            clients["billing"] = ("client-1", "client-2")
            greedy.owns, idle.owns = dict(holding(*QUEUES[:2])), dict(holding(*QUEUES[2:]))
            await handlers.poll()
            mended = handlers.findings["billing"].uneven
        finally:
            await world.close()

    assert at_first == in_two_looks == otherwise == unknown == mended == ()
    assert lasting == (Uneven("orders", (("client-1", 3), ("client-2", 1))),)
    assert later == (Uneven("orders", (("client-1", 4), ("client-2", 0))),)
    assert handlers.uneven == {}


async def test_the_doctor_finds_it_too_when_it_watches_for_long_enough():
    async with (
        AsyncEmbeddedCluster() as cluster,
        Engine(settings_for(cluster).client, clock=cluster.clock) as engine,
    ):
        admin = AsyncAdmin.on(engine)
        await cluster.create_topic("orders", queues=4)
        world = World(cluster, admin)
        try:
            await world.consumer("client-1", owns=holding(*QUEUES))
            await world.consumer("client-2")
            long = await examine(engine, admin, cluster.clock, watch=0.06, uneven_after=0.05)
            short = await examine(engine, admin, cluster.clock, watch=0.0)
        finally:
            await world.close()

    (fault,) = [each for each in find_faults(long.seen) if each.check is Check.UNBALANCED]
    assert fault.subject == "billing"
    assert "client-1 has 4 of its queues and client-2 has none" in fault.text
    assert "one allocation strategy" in fault.remedy
    assert fault.command == "orbitmq group show billing"
    # Not judged, and said to be so.
    assert all(each.check is not Check.UNBALANCED for each in find_faults(short.seen))
    assert short.uneven == {"billing"}
