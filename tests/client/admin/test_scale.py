"""Big clusters: 1,000 topics and 2,500 groups are a handful of requests."""

from __future__ import annotations

from orbitmq.broker.broker import Broker
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import SubscriptionGroupConfig, TopicConfig
from tests.support.client_admin import World

TOPICS = 1000
GROUPS = 2500


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
