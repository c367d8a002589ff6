"""How long handlers take, by the account of consumers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.members import FindingKind, RunningInfo, TopicConsumption
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.console.members import MOST_MEMBERS, HandlerTimes, MemberPoller, times_of
from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.command import Command
from tests.support.client import quick_settings
from tests.support.client_admin import FakeConsumer, World


async def ignore(_message: ReceivedMessage) -> None:
    """Consumes a message."""


def info(**topics: tuple[float, float, float]) -> RunningInfo:
    """A consumer, by its topics: messages that went well and failed each second, and the time."""
    return RunningInfo(
        "billing",
        "client-1",
        (),
        (),
        {
            name.replace("retry_", "%RETRY%"): TopicConsumption(1.0, 0.05, well, failed, took, 0)
            for name, (well, failed, took) in topics.items()
        },
        {},
    )


def timed(*seconds: float) -> TopicConsumption:
    return TopicConsumption(1.0, 0.05, 1.0, 0.0, 0.5, 0, CallTimes.of(seconds))


def test_percentiles_are_those_of_all_members_together_that_tell():
    slow = replace(info(), topics={"orders": timed(*[0.001] * 5, *[8.0] * 5)})
    quick = replace(info(), topics={"orders": timed(*[0.001] * 90)})
    other = info(orders=(5.0, 0.5, 0.010))

    found, alone = times_of([slow, quick, other]), times_of([other])

    assert found is not None
    assert alone is not None
    # Not what one makes of 8 and 0.001, the percentiles of each.
    assert (found.p99, found.longest) == (8.0, 8.0)
    assert found.p50 == found.p95 == pytest.approx(0.001, rel=0.07)
    assert (alone.p50, alone.p95, alone.p99, alone.longest) == (None, None, None, None)
    assert alone.median == 0.010


def test_the_middle_and_the_slowest_of_all_consumers_are_told():
    infos = [info(orders=(5.0, 0.5, 0.010)), info(orders=(5.0, 0.0, 0.030), idle=(0.0, 0.0, 9.0)),
             info(orders=(0.1, 1.0, 2.0), retry_billing=(1.0, 0.0, 50.0))]  # fmt: skip

    # Each of five topics is pulled from once a second.
    assert times_of(infos) == HandlerTimes(
        median=0.030, slowest=2.0, ok_rate=11.1, failed_rate=1.5, pull_rate=5.0, pull_time=0.05
    )
    assert times_of([info(idle=(0.0, 0.0, 9.0))]) is None
    assert times_of([]) is None


@pytest.mark.feature("D11")
async def test_rates_and_times_of_consumers_are_shown_by_group_and_topic_and_kept_over_time(desk):
    client = quick_settings(desk.cluster.name_server)
    kinds = ("ok", "failed", "pulled", "pull", "median", "slowest", "p50", "p95", "p99")
    names = [f"group/billing/{kind}" for kind in kinds]
    consumer = AsyncConsumer("billing", client=client, consume_from="first")

    @consumer.on("orders")
    async def bill(message: ReceivedMessage) -> None:
        if message.queue_offset == 0:
            raise ValueError("no account")

    async with consumer:
        await desk.world.fill(Queue("orders", "broker-a", 0), 5)

        def has_worked(found):
            times = found["handlers"]
            return bool(times and times["failed_rate"]) and has_all(times)

        def has_all(rates):
            """Four went well and one failed, of five that were pulled, within the same time."""
            wanted = pytest.approx(4 * rates["failed_rate"], rel=0.2)
            return bool(rates["ok_rate"] == wanted and rates["pull_rate"] > rates["ok_rate"])

        def has_points(found):
            return all(found["series"][name] for name in names)

        page = desk.browser
        handlers = (await page.until("/groups/billing", has_worked))["handlers"]
        query = "&".join(f"series={name}" for name in names)
        curves = (await page.until(f"/charts?{query}", has_points))["series"]
        member = await page.get(f"/groups/billing/members/{consumer.client_id}")

    assert 0 < handlers["pull_time"] < 60
    assert 0 <= handlers["median"] <= handlers["slowest"] < 60
    assert all(value > 0 for name in names[:4] for _, value in curves[name][-1:])
    topic = member["topics"]["orders"]
    assert topic["ok_rate"] == pytest.approx(4 * topic["failed_rate"], rel=0.2)
    assert topic["pull_rate"] > topic["ok_rate"]
    assert topic["pull_time"] > 0
    assert topic["failed_last_hour"] == 1
    for times in (handlers, topic):
        found = [times[name] for name in ("p50", "p95", "p99", "longest")]
        assert found == sorted(found)
        assert 0 < found[0] <= found[-1] < 60


async def test_a_group_that_retries_for_ever_is_a_fault_with_a_remedy(desk):
    client = quick_settings(desk.cluster.name_server)
    consumer = AsyncConsumer("strict", client=client, ordered=True)
    consumer.on("orders")(ignore)
    async with consumer:

        def is_found(found):
            return any(each["kind"] == "endless retries" for each in found["faults"])

        faults = (await desk.browser.until("/faults", is_found))["faults"]
        shown = await desk.browser.until("/groups/strict", is_found)

    (fault,) = [each for each in faults if each["kind"] == "endless retries"]
    assert fault["subject"] == "strict"
    assert "stops its queue" in fault["text"]
    assert "max_retries" in fault["remedy"]
    assert fault["command"] == f"orbitmq group member strict{desk.aim}"
    assert [each["kind"] for each in shown["faults"]] == ["endless retries"]


class CountedConsumer(FakeConsumer):
    """Counts how often it is asked what it does."""

    asked = 0

    def running_info(self, connection: Connection, request: Command) -> Command:
        self.asked += 1
        return super().running_info(connection, request)


@pytest.mark.parametrize("most", [MOST_MEMBERS, 100])
async def test_members_of_a_group_are_asked_once_each_and_no_more_than_the_limit(most):
    async with (
        AsyncEmbeddedCluster() as cluster,
        AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as admin,
    ):
        await cluster.create_topic("orders", queues=1)
        world = World(cluster, admin)
        queue = Queue("orders", "broker-a", 0)
        await world.send(queue)
        members = [CountedConsumer(f"client-{number:02}") for number in range(MOST_MEMBERS + 3)]
        try:
            for member in members:
                await member.start(broker.address for broker in cluster.brokers)
            await world.report(queue, 0)
            clients = {"billing": tuple(member.client_id for member in members)}
            behind: list[str] = []
            handlers = MemberPoller(
                admin, lambda: clients, lambda: behind, cluster.clock, budget=9, members=most
            )

            await handlers.poll()
            first = handlers.findings["billing"]
            behind.append("billing")
            await handlers.poll()
            second = handlers.findings["billing"]
        finally:
            for member in members:
                await member.stop()
            await world.close()

    asked = min(most, len(members))
    assert [member.asked for member in members] == [2] * asked + [0] * (len(members) - asked)
    assert first.findings == ()
    # Whether nobody has a queue is known when all have said what they have.
    kinds = [each.kind for each in second.findings]
    assert kinds == ([FindingKind.UNOWNED_QUEUE] if asked == len(members) else [])


@pytest.mark.feature("L6")
async def test_members_that_disagree_are_named_with_what_to_do(desk):
    await desk.world.consumer("client-1", subscriptions={"orders": "a"})
    await desk.world.consumer("client-2", subscriptions={"orders": "b"})

    shown = await desk.browser.until("/groups/billing", lambda found: found["findings"])

    (finding,) = [each for each in shown["findings"] if each["variants"]]
    assert "client-1" in finding["text"]
    assert "client-2" in finding["text"]
    assert "subscribe alike" in finding["remedy"]
    assert finding["command"].startswith("orbitmq group clone billing ")
