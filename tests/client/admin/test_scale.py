"""Big clusters: 1,000 topics and 2,500 groups are a handful of requests."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin
from orbitmq.client.admin.groups import GroupState
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import SubscriptionGroupConfig, TopicConfig
from tests.support.broker import until
from tests.support.client_admin import World

TOPICS = 1000
GROUPS = 2500
#: Generous: on an idle machine it takes about a second.
DEADLINE = 30.0


def _fill(broker: Broker) -> None:
    parts = broker.parts
    now = parts.clock.now()
    for number in range(TOPICS):
        config = TopicConfig(
            topic_name=f"topic-{number}", read_queue_nums=4, write_queue_nums=4, perm=6
        )
        parts.topics.update(config, now=now)
    for number in range(GROUPS):
        parts.groups.update(SubscriptionGroupConfig(group_name=f"group-{number}"), now=now)
        for queue_id in range(4):
            parts.progress.reset(f"topic-{number % TOPICS}", f"group-{number}", queue_id, 0)


async def test_listing_a_big_cluster_takes_few_requests():
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        for broker in cluster.brokers:
            _fill(broker)
        async with AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as admin:
            world = World(cluster, admin)
            try:
                for name in ("broker-a", "broker-b"):
                    for _ in range(3):
                        await world.send(Queue("topic-7", name, 1))

                topics = await admin.topics.list()
                groups = await admin.groups.list()
                requests = admin.requests
                aged = await admin.groups.list(times=True)
                asked_for_ages = admin.requests - requests
            finally:
                await world.close()

    assert sum(topic.name.startswith("topic-") for topic in topics) == TOPICS
    assert len(groups) == GROUPS
    # The brokers' addresses twice; then two tables of each broker for topics, two for groups.
    assert requests == 2 + 2 * 2 + 2 * 2
    behind = {each.group: each.lag for each in groups if each.lag}
    assert behind == {"group-7": 6, "group-1007": 6, "group-2007": 6}
    # Only the groups that are behind are asked about times: three of them, on two brokers.
    assert asked_for_ages == 1 + 2 * 2 + 3 * 2
    ages = {each.group: each.lag_seconds for each in aged if each.lag}
    assert all(age is not None and age < 600 for age in ages.values())


async def test_members_of_all_groups_are_asked_for_with_a_limit_at_once():
    async with AsyncEmbeddedCluster(brokers=1) as cluster:
        (broker,) = cluster.brokers
        now = broker.parts.clock.now()
        for number in range(300):
            config = SubscriptionGroupConfig(group_name=f"group-{number}")
            broker.parts.groups.update(config, now=now)
        async with AsyncAdmin(
            name_server=cluster.name_server, settings=AdminSettings(at_once=5)
        ) as admin:
            world = World(cluster, admin)
            most = 0
            under_way = 0
            right = admin._engine.ask

            async def counted(*args, **kwargs):
                nonlocal most, under_way
                under_way += 1
                most = max(most, under_way)
                try:
                    return await right(*args, **kwargs)
                finally:
                    under_way -= 1

            admin._engine.ask = counted  # type: ignore[method-assign]
            try:
                await world.consumer("c1", group="group-5", subscriptions={"TBW102": "*"})
                groups = await admin.groups.list(members=True)
            finally:
                await world.close()

    assert most == 5
    online = [each.group for each in groups if each.state is GroupState.ONLINE]
    assert online == ["group-5"]
    assert len(groups) == 300


async def test_a_cancelled_listing_leaves_nothing_behind():
    async with AsyncEmbeddedCluster(brokers=1) as cluster:
        _fill(cluster.brokers[0])
        async with AsyncAdmin(name_server=cluster.name_server) as admin:
            listing = asyncio.create_task(admin.groups.list(members=True))
            await until(lambda: admin.requests >= 20, 10.0)
            listing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listing

            assert _tasks_of_admin() == []
            assert len(await admin.topics.list()) >= TOPICS


def _tasks_of_admin() -> list[str]:
    """What still runs of ours; the cluster has tasks of its own on this loop."""
    coroutines = (task.get_coro() for task in asyncio.all_tasks() if not task.done())
    files = (each.cr_code.co_filename for each in coroutines if inspect.iscoroutine(each))
    return [file for file in files if "/client/admin/" in file and "test_" not in file]


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(SettingError, match=r"admin\.at_once"):
        AdminSettings(at_once=0)
    with pytest.raises(SettingError, match=r"admin\.timeout"):
        AdminSettings(timeout=0)
