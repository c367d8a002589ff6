"""The cluster as a whole."""

from __future__ import annotations

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.cluster import runtime_info
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import PartlyDone
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import SubscriptionGroupConfig, TopicConfig
from tests.support.client_admin import World

A0 = Queue("orders", "broker-a", 0)


async def test_all_brokers_and_name_servers_are_shown_with_their_state(world):
    await world.fill(A0, 3)

    status = await world.admin.cluster()

    assert [str(each.node) for each in status.brokers] == ["broker-a", "broker-b"]
    assert [each.node.address for each in status.brokers] == [
        broker.address for broker in world.cluster.brokers
    ]
    assert status.clusters == ("DefaultCluster",)
    assert status.is_healthy, status.warnings
    (server,) = status.name_servers
    assert str(server.address) == world.cluster.name_server
    assert server.brokers == ("broker-a", "broker-b")
    assert server.config
    runtime = status.brokers[0].runtime
    assert runtime is not None
    assert runtime.version == "5.3.3"
    assert runtime.is_orbitmq
    assert runtime.in_today == 3
    assert runtime.log_end is not None
    assert runtime.log_end > 0
    assert runtime.dispatch_behind == 0
    assert runtime.disk_used is not None
    assert 0 < runtime.disk_used < 1


async def test_a_broker_that_cannot_be_reached_is_shown_and_hides_nothing(world):
    await world.register_ghost("broker-g")

    status = await world.admin.cluster()

    assert [(str(each.node), each.is_up) for each in status.brokers] == [
        ("broker-a", True),
        ("broker-b", True),
        ("broker-g", False),
    ]
    (warning,) = status.warnings
    assert warning.startswith("broker-g: it is registered and cannot be reached")
    topics = await world.admin.topics.list()
    groups = await world.admin.groups.list()
    for listing in (topics, groups):
        assert not listing.is_complete
        assert [each.server for each in listing.unreachable] == ["broker-g"]
    assert "orders" in [topic.name for topic in topics]


async def test_a_change_that_one_broker_does_not_take_names_it_and_those_that_did(world):
    await world.register_ghost("broker-g")

    with pytest.raises(PartlyDone, match="done on broker-a, broker-b and failed on broker-g"):
        await world.admin.groups.create("new")

    assert set(await world.admin.groups.settings("new")) == {"broker-a", "broker-b"}


async def test_a_name_server_that_does_not_answer_is_named(world):
    dead = "127.0.0.1:1"
    client = ClientSettings(name_servers=(world.cluster.name_server, dead))
    async with AsyncAdmin(client=client) as admin:
        status = await admin.cluster()

    assert [str(each.address) for each in status.name_servers if not each.is_up] == [dead]
    assert any(dead in text for text in status.warnings)
    assert status.in_rate == status.out_rate == 0.0


async def test_one_broker_is_found_by_name_or_address(world):
    by_name = await world.admin.runtime("broker-b")
    by_address = await world.admin.runtime(str(world.cluster.brokers[1].address))

    assert by_name.started_at == by_address.started_at


def test_runtime_information_of_other_releases_is_read_as_far_as_it_goes():
    raw = {
        "putTps": "1.5 2.5 3.5",
        "getTransferedTps": "9 8 7",
        "earliestMessageTimeStamp": "-1",
        "commitLogDiskRatio": "0.91",
        "dispatchBehindBytes": "not a number",
        "brokerVersionDesc": "V4_9_8",
    }

    info = runtime_info(raw, 409)

    assert (info.version, info.in_rate, info.out_rate) == ("4.9.8", 1.5, 9.0)
    assert (info.earliest_message_at, info.dispatch_behind) == (None, None)
    assert not info.is_orbitmq
    assert info.findings == ()
    (warning,) = info.warnings
    assert "91%" in warning


# Settings.


async def test_settings_of_a_broker_are_changed_and_read_back(world):
    config = world.admin.config
    before = await config.broker("broker-a")

    after = await config.update_broker("broker-a", {"maxMessageSize": "1000000"})

    assert before["maxMessageSize"] != "1000000"
    assert after["maxMessageSize"] == "1000000"
    assert (await config.broker("broker-a"))["maxMessageSize"] == "1000000"
    assert (await config.broker("broker-b"))["maxMessageSize"] == before["maxMessageSize"]
    assert await config.name_server() == await config.name_server(world.cluster.name_server)


async def test_texts_by_key_are_kept_and_forgotten(world):
    config = world.admin.config

    await config.put_value("places", "here", "there")

    assert await config.value("places", "here") == "there"
    assert await config.values("places") == {"here": "there"}
    await config.delete_value("places", "here")
    assert await config.value("places", "here") is None
    assert await config.values("nowhere") == {}


async def test_cleaning_is_done_on_all_brokers_or_those_named(world):
    config = world.admin.config

    assert await config.clean_expired_queues() == ("broker-a", "broker-b")
    assert await config.clean_unused_topics("broker-b") == ("broker-b",)
    assert await config.delete_expired_log() == ("broker-a", "broker-b")


async def test_a_broker_is_taken_out_of_the_routes_of_producers_and_back(world):
    config = world.admin.config

    wiped = await config.set_writable("broker-a", False)

    route = await world.admin.topics.route("orders")
    letters = {part.broker: part.permission.letters for part in route.brokers}
    assert wiped > 0
    assert letters == {"broker-a": "r", "broker-b": "rw"}
    assert await config.set_writable("broker-a", True) > 0
    route = await world.admin.topics.route("orders")
    assert {part.permission.letters for part in route.brokers} == {"rw"}


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
