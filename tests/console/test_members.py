"""What the members of groups report: times of handlers, and queues that are shared unevenly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.members import (
    GroupSubscription,
    OwnedQueueInfo,
    RunningInfo,
    TopicConsumption,
)
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.client.consumer.strategies import NAMED, share
from orbitmq.client.routes import Queue
from orbitmq.console import collect
from orbitmq.console.collect import UNEVEN_AFTER, MemberPoller, times_of, uneven_topics
from orbitmq.console.faults import Check, examine, find_faults
from orbitmq.wire.bodies import ProcessQueueInfo
from tests.console.conftest import QUEUE
from tests.support.client import quick_settings

QUEUES = [Queue("orders", "broker-a", number) for number in range(4)]


def info(**topics):
    """A consumer, by its topics: messages that went well and failed each second, and the time."""
    consumption = {
        name.replace("retry_", "%RETRY%"): TopicConsumption(1.0, 0.05, well, failed, took, 0)
        for name, (well, failed, took) in topics.items()
    }
    return RunningInfo("billing", "client-1", (), (), consumption, {})


def timed(*seconds):
    times = TopicConsumption(1.0, 0.05, 1.0, 0.0, 0.5, 0, CallTimes.of(seconds))
    return replace(info(), topics={"orders": times})


def test_percentiles_are_those_of_all_members_together_that_report_them():
    slow, quick = timed(*[0.001] * 5, *[8.0] * 5), timed(*[0.001] * 90)
    other = info(orders=(5.0, 0.5, 0.010))

    found, alone = times_of([slow, quick, other]), times_of([other])

    assert found is not None
    assert alone is not None
    assert (found.p99, found.longest) == (8.0, 8.0)
    assert found.p50 == found.p95 == pytest.approx(0.001, rel=0.07)
    assert (alone.p50, alone.p95, alone.p99, alone.longest) == (None, None, None, None)
    assert alone.median == 0.010


@pytest.mark.feature("D11")
async def test_rates_and_times_of_consumers_are_shown_by_group_and_topic_and_kept_over_time(desk):
    kinds = ("ok", "failed", "pulled", "pull", "median", "slowest", "p50", "p95", "p99")
    names = [f"group/billing/{kind}" for kind in kinds]
    client = quick_settings(desk.cluster.name_server)
    consumer = AsyncConsumer("billing", client=client, consume_from="first")

    @consumer.on("orders")
    async def bill(message):
        if message.queue_offset == 0:
            raise ValueError("no account")

    def has_all(rates):
        """Four went well and one failed, of five that were pulled, within the same time."""
        wanted = pytest.approx(4 * rates["failed_rate"], rel=0.2)
        return bool(rates["ok_rate"] == wanted and rates["pull_rate"] > rates["ok_rate"])

    def has_worked(found):
        times = found["handlers"]
        return bool(times and times["failed_rate"]) and has_all(times)

    async with consumer:
        await desk.world.fill(QUEUE, 5)
        page = desk.browser
        handlers = (await page.until("/groups/billing", has_worked))["handlers"]
        query = "&".join(f"series={name}" for name in names)
        curves = await page.until(f"/charts?{query}", lambda found: all(found["series"].values()))
        member = await page.get(f"/groups/billing/members/{consumer.client_id}")

    assert 0 < handlers["pull_time"] < 60
    assert 0 <= handlers["median"] <= handlers["slowest"] < 60
    assert all(value > 0 for name in names[:4] for _, value in curves["series"][name][-1:])
    topic = member["topics"]["orders"]
    assert has_all(topic)
    assert topic["pull_time"] > 0
    assert topic["failed_last_hour"] == 1
    for times in (handlers, topic):
        found = [times[name] for name in ("p50", "p95", "p99", "longest")]
        assert found == sorted(found)
        assert 0 < found[0] <= found[-1] < 60


async def test_a_group_that_retries_without_a_limit_is_a_fault_with_a_remedy(desk):
    client = quick_settings(desk.cluster.name_server)
    consumer = AsyncConsumer("strict", client=client, ordered=True)

    @consumer.on("orders")
    async def ignore(_):
        """Consumes a message."""

    def is_found(found):
        return any(each["kind"] == "endless retries" for each in found["faults"])

    async with consumer:
        faults = (await desk.browser.until("/faults", is_found))["faults"]
        shown = await desk.browser.until("/groups/strict", is_found)

    (fault,) = [each for each in faults if each["kind"] == "endless retries"]
    assert fault["subject"] == "strict"
    assert "stops its queue" in fault["text"]
    assert "max_retries" in fault["remedy"]
    assert fault["command"] == f"orbitmq group member strict{desk.aim}"
    assert [each["kind"] for each in shown["faults"]] == ["endless retries"]


def owned(queue, *, is_dropped=False):
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


def member(client_id, queues=(), *, topics=("orders",), dropped=(), strategy=None):
    return RunningInfo(
        "billing",
        client_id,
        (*map(owned, queues), *(owned(each, is_dropped=True) for each in dropped)),
        tuple(GroupSubscription(each, "*", "TAG") for each in topics),
        {},
        {} if strategy is None else {"allocateMessageQueueStrategy": strategy},
    )


def uneven(*members):
    return list(uneven_topics({each.client_id: each for each in members}))


RETRIES = [Queue("%RETRY%billing", "broker-a", number) for number in range(3)]


@pytest.mark.parametrize(
    "members",
    [
        (),
        (member("a", QUEUES),),
        (member("a", QUEUES[:2]), member("b", QUEUES[2:])),
        (member("a", QUEUES[:1]), member("b", QUEUES[1:2]), member("c")),
        # Released already, of a retry topic, and of a topic that one does not subscribe to.
        (member("a", QUEUES[:2], dropped=QUEUES[2:]), member("b", QUEUES[2:])),
        (member("a", RETRIES, topics=("%RETRY%billing",)), member("b", topics=("%RETRY%billing",))),
        (member("a", QUEUES), member("b", topics=("others",))),
    ],
)
def test_queues_that_are_shared_as_evenly_as_possible_are_no_finding(members):
    assert uneven(*members) == []


@pytest.mark.parametrize(
    ("strategy", "is_judged"),
    [
        (None, True),
        ("AVG", True),
        ("org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely@1b2c", True),
        ("CONSISTENT_HASH", False),
        ("MACHINE_ROOM_NEARBY-AVG", False),
        ("org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig@77", False),
    ],
)
def test_strategies_that_are_uneven_on_purpose_are_not_judged(strategy, is_judged):
    members = (member("a", QUEUES, strategy=strategy), member("b", strategy=strategy))

    assert bool(uneven(*members)) is is_judged


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from(["AVG", "AVG_BY_CIRCLE"]))
def test_what_the_usual_strategies_allocate_is_never_uneven(queues, members, strategy):
    all_queues = [Queue("orders", "broker-a", number) for number in range(queues)]
    ids = [f"client-{number:02}" for number in range(members)]

    shares = [
        member(each, share(NAMED[strategy], all_queues, ids, each), strategy=strategy)
        for each in ids
    ]

    assert uneven(*shares) == []


def holding(*queues):
    return {queue: ProcessQueueInfo() for queue in queues}


class Moving:
    """A clock that a test moves ahead."""

    def __init__(self, clock):
        self._clock = clock
        self.passed = 0.0

    def now(self):
        return self._clock.now() + self.passed

    def monotonic(self):
        return self._clock.monotonic() + self.passed


async def test_uneven_queues_are_a_finding_when_it_lasts_until_they_are_shared_evenly(watch):
    clock = Moving(watch.cluster.clock)
    greedy = await watch.world.consumer("client-1", owns=holding(*QUEUES))
    idle = await watch.world.consumer("client-2")
    poller = MemberPoller(watch.admin, clock)

    async def found(*clients):
        await poller.poll({"billing": clients}, ())
        return [each.counts for each in poller.findings["billing"].uneven]

    both = ("client-1", "client-2")
    assert await found(*both) == []
    clock.passed = UNEVEN_AFTER
    # Between two polls that are far apart the members may have rebalanced.
    assert await found(*both) == []
    assert await found(*both) == [(("client-1", 4), ("client-2", 0))]
    # With other counts the members rebalance: the time begins again.
    greedy.owns, idle.owns = holding(*QUEUES[:3]), holding(*QUEUES[3:])
    assert await found(*both) == []
    assert await found(*both) == []
    assert await found(*both) == []
    clock.passed += UNEVEN_AFTER
    assert await found(*both) == [(("client-1", 3), ("client-2", 1))]
    # A member that was not polled may have the rest.
    assert await found("client-1") == []
    greedy.owns, idle.owns = holding(*QUEUES[:2]), holding(*QUEUES[2:])
    assert await found(*both) == []
    assert poller.uneven == {}


async def test_the_doctor_finds_uneven_queues_when_it_watches_for_long_enough(watch, monkeypatch):
    monkeypatch.setattr(collect, "UNEVEN_AFTER", 0.05)
    await watch.world.consumer("client-1", owns=holding(*QUEUES))
    await watch.world.consumer("client-2")
    clock = watch.cluster.clock

    long = await examine(watch.engine, watch.admin, clock, watch=0.06)
    short = await examine(watch.engine, watch.admin, clock, watch=0.0)

    (fault,) = [each for each in find_faults(long.seen) if each.check is Check.UNBALANCED]
    assert fault.subject == "billing"
    assert "client-1 has 4 of its queues and client-2 has none" in fault.text
    assert "one allocation strategy" in fault.remedy
    assert fault.command == "orbitmq group show billing"
    assert all(each.check is not Check.UNBALANCED for each in find_faults(short.seen))
    assert short.uneven == {"billing"}
