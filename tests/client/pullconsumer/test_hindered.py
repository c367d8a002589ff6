"""What a poll says when nothing could ever be consumed: a wrong address, topic or group."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
from orbitmq.client.errors import GroupRefused, NoNameServer, NoRoute, WrongUse
from orbitmq.client.pullconsumer import asyncpullconsumer
from orbitmq.client.pullconsumer.asyncpullconsumer import AsyncPullConsumer
from orbitmq.client.pullconsumer.pullconsumer import PullConsumer
from orbitmq.client.received import ReceivedMessage
from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster
from orbitmq.wire.codes import ResponseCode
from tests.support.broker import RawClient
from tests.support.polling import (
    DEADLINE,
    GROUP,
    TOPIC,
    consumer,
    poll_count,
    queue,
    send,
)

#: What is not there is looked for often.
LOOKS = RebalanceSettings(persist=3600.0, spacing=0.02, retry=0.02, interval=0.1)


def _makes_no_groups(settings: BrokerSettings) -> BrokerSettings:
    return replace(settings, max_auto_groups=1)


@pytest.fixture
async def cluster() -> AsyncIterator[AsyncEmbeddedCluster]:
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        yield cluster


@pytest.fixture
async def full_cluster() -> AsyncIterator[AsyncEmbeddedCluster]:
    async with AsyncEmbeddedCluster(adjust=_makes_no_groups) as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        client = await RawClient.open(cluster.brokers[0])
        await send(client, 2)
        await client.close()
        yield cluster


@contextmanager
def _where_nobody_listens() -> Iterator[str]:
    with socket.socket() as taken:  # bound, so that nobody else gets it, and not listened on
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


async def test_a_poll_at_a_wrong_address_says_which_one() -> None:
    with _where_nobody_listens() as address:
        async with AsyncPullConsumer(GROUP, name_server=address) as pulled:
            pulled.subscribe(TOPIC)

            with pytest.raises(NoNameServer, match=address):
                await pulled.poll(0.2)


def test_the_blocking_face_says_so_as_well() -> None:
    with _where_nobody_listens() as address, PullConsumer(GROUP, name_server=address) as pulled:
        pulled.subscribe(TOPIC)

        for _ in range(2):
            with pytest.raises(NoNameServer, match=address):
                pulled.poll(0.2)


async def test_a_poll_of_a_topic_that_is_not_there_names_it_and_what_was_perhaps_meant(
    cluster: AsyncEmbeddedCluster,
) -> None:
    async with consumer(cluster, rebalancing=LOOKS) as pulled:
        pulled.subscribe("ordesr")

        with pytest.raises(NoRoute) as error:
            await pulled.poll(0.2)

    assert f"topic 'ordesr' according to {cluster.name_server}" in str(error.value)
    assert "do you mean 'orders'?" in str(error.value)
    assert "orbitmq topic create ordesr" in str(error.value)


async def test_a_topic_that_comes_later_is_polled_by_the_same_consumer(
    cluster: AsyncEmbeddedCluster,
) -> None:
    async with consumer(cluster, rebalancing=LOOKS) as pulled:
        pulled.subscribe("invoices")
        with pytest.raises(NoRoute, match="topic 'invoices'") as error:
            await pulled.poll(0.1)
        client = await RawClient.open(cluster.brokers[0])
        await cluster.create_topic("invoices", queues=1)
        await send(client, 3, topic="invoices")
        await client.close()

        found: list[bytes] = []
        until = pulled.clock.monotonic() + DEADLINE
        while len(found) < 3:
            assert pulled.clock.monotonic() < until
            try:
                found += [message.body for message in await pulled.poll(0.2)]
            except NoRoute:
                continue  # not found out yet
        # From now on there may be nothing, and that is no error.
        assert await pulled.poll(0.05) == []

    assert error.value.similar is None
    assert found == [b"0", b"1", b"2"]


async def test_an_iteration_does_not_wait_for_ever_for_a_topic_that_is_not_there(
    cluster: AsyncEmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncpullconsumer, "A_WHILE", 0.1)
    async with consumer(cluster, rebalancing=LOOKS) as pulled:
        pulled.subscribe("ordesr")

        with pytest.raises(NoRoute, match="ordesr"):
            await anext(pulled)


async def test_an_outage_while_it_runs_passes_without_an_error(
    cluster: AsyncEmbeddedCluster,
) -> None:
    async with consumer(cluster, rebalancing=LOOKS) as pulled:
        pulled.subscribe(TOPIC)
        client = await RawClient.open(cluster.brokers[0])
        await send(client, 1)
        await client.close()
        await poll_count(pulled, 1)

        await cluster.stop()

        assert await pulled.poll(0.3) == []


@pytest.mark.parametrize("way", ["subscribed", "assigned"])
async def test_a_group_beyond_the_brokers_limit_is_told_so_until_somebody_creates_it(
    full_cluster: AsyncEmbeddedCluster, way: str
) -> None:
    async with consumer(full_cluster, rebalancing=LOOKS) as pulled:
        if way == "assigned":
            await pulled.assign([queue()])
        else:
            pulled.subscribe(TOPIC)

        with pytest.raises(GroupRefused) as error:
            await pulled.poll(0.3)
        async with AsyncAdmin(name_server=full_cluster.name_server) as admin:
            await admin.groups.create(GROUP)
        found: list[ReceivedMessage] = []
        until = pulled.clock.monotonic() + DEADLINE
        while len(found) < 2:
            assert pulled.clock.monotonic() < until
            try:
                found += await pulled.poll(0.2)
            except GroupRefused:
                continue  # not found out yet

    assert error.value.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert f"group {GROUP!r} gets nothing" in str(error.value)
    assert "max_auto_groups is 1" in str(error.value)
    assert f"orbitmq group create {GROUP}" in str(error.value)


def test_a_poll_without_a_topic_or_queues_says_what_is_missing() -> None:
    with (
        EmbeddedCluster() as cluster,
        PullConsumer(GROUP, name_server=cluster.name_server) as idle,
        pytest.raises(WrongUse, match=r"subscribe\(topic\) or assign\(queues\)"),
    ):
        idle.poll(0.1)
