"""What a poll says when nothing could ever be consumed: a wrong address, topic or group."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.errors import GroupRefused, NoNameServer
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.producer.producer import Producer
from orbitmq.client.pullconsumer import consumer as pullconsumer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PullConsumer
from orbitmq.errors import BrokerRefused, NoRoute, WrongUse
from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster
from orbitmq.wire.codes import RequestCode, ResponseCode
from tests.support.broker import RawClient
from tests.support.polling import DEADLINE, GROUP, TOPIC, consumer, poll_count, queue, send
from tests.support.rebalancing import answering

QUEUE_COUNT = 1

#: What is not there is looked for often.
LOOKS = RebalanceSettings(persist=3600.0, spacing=0.02, retry=0.02, interval=0.1)


def _makes_no_groups(settings: BrokerSettings) -> BrokerSettings:
    return replace(settings, max_auto_groups=1)


@pytest.fixture
async def full_cluster():
    async with AsyncEmbeddedCluster(adjust=_makes_no_groups) as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        client = await RawClient.open(cluster.brokers[0])
        await send(client, 2)
        await client.close()
        yield cluster


async def test_a_poll_at_a_wrong_address_says_which_one(dead):
    async with AsyncPullConsumer(GROUP, name_server=dead) as pulled:
        pulled.subscribe(TOPIC)

        with pytest.raises(NoNameServer, match=dead):
            await _polled_until_an_error(pulled)


async def test_a_poll_of_a_topic_that_is_not_there_names_it_and_what_was_perhaps_meant(cluster):
    async with consumer(cluster, rebalance=LOOKS) as pulled:
        pulled.subscribe("ordesr")

        with pytest.raises(NoRoute) as error:
            await _polled_until_an_error(pulled)

    assert f"topic 'ordesr' according to {cluster.name_server}" in str(error.value)
    assert "do you mean 'orders'?" in str(error.value)
    assert "orbitmq topic create ordesr" in str(error.value)


async def test_an_outage_while_it_runs_passes_without_an_error(cluster):
    async with consumer(cluster, rebalance=LOOKS) as pulled:
        pulled.subscribe(TOPIC)
        client = await RawClient.open(cluster.brokers[0])
        await send(client, 1)
        await client.close()
        await poll_count(pulled, 1)

        await cluster.stop()

        assert await pulled.poll(0.3) == []


@pytest.mark.parametrize("way", ["subscribed", "assigned"])
async def test_a_group_beyond_the_brokers_limit_is_told_so_until_somebody_creates_it(
    full_cluster, way
):
    async with consumer(full_cluster, rebalance=LOOKS) as pulled:
        if way == "assigned":
            await pulled.assign([queue()])
        else:
            pulled.subscribe(TOPIC)

        with pytest.raises(GroupRefused) as error:
            await _polled_until_an_error(pulled)
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


# ---- what is not an error of a poll


async def test_a_broker_of_apaches_that_lists_nobody_after_several_heartbeats_has_no_such_group(
    cluster,
):
    asked: list[int] = []

    def nobody(_, request):
        asked.append(request.code)
        return request.answer(
            ResponseCode.SYSTEM_ERROR, remark=f"no consumer for this group, {GROUP}"
        )

    async with consumer(cluster, rebalance=LOOKS) as pulled:
        with answering(cluster.brokers[0], RequestCode.GET_CONSUMER_LIST_BY_GROUP, nobody):
            pulled.subscribe(TOPIC)

            with pytest.raises(GroupRefused, match=f"orbitmq group create {GROUP}"):
                await _polled_until_an_error(pulled)

    assert len(asked) >= 6  # twice in a round: before the heartbeat, and after it


async def test_an_assigned_queue_whose_start_is_not_known_yet_is_read_later(cluster, sender):
    def busy(_, request):
        return request.answer(ResponseCode.SYSTEM_BUSY, remark="in a moment")

    await send(sender, 2)
    async with consumer(cluster, rebalance=LOOKS) as pulled:
        with answering(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET, busy):
            await pulled.assign([queue()])
            (trouble,) = pulled.statistics().troubles
            with pytest.raises(BrokerRefused, match="in a moment"):
                pulled.position(queue())
        found = await poll_count(pulled, 2)

    assert "orders@broker-a:0 cannot be started" in trouble
    assert [message.body for message in found] == [b"0", b"1"]


async def _polled_until_an_error(pulled: AsyncPullConsumer) -> None:
    until = pulled.clock.monotonic() + DEADLINE
    while pulled.clock.monotonic() < until:
        assert await pulled.poll(0.05) == []


# ---- iterations


def test_an_iteration_goes_on_after_an_error(monkeypatch):
    monkeypatch.setattr(pullconsumer, "A_WHILE", 0.1)
    with (
        EmbeddedCluster() as cluster,
        Producer("makers", name_server=cluster.name_server) as producer,
        PullConsumer(
            GROUP, name_server=cluster.name_server, consume_from="first", rebalance=LOOKS
        ) as pulled,
    ):
        pulled.subscribe("invoices")
        messages = iter(pulled)

        for _ in range(2):
            with pytest.raises(NoRoute, match="invoices"):
                next(messages)
        cluster.create_topic("invoices", queues=1)
        producer.send("invoices", b"1")
        found = None
        until = time.monotonic() + DEADLINE
        while found is None:
            assert time.monotonic() < until
            try:
                found = next(messages)
            except NoRoute:
                continue  # not found out yet
        pulled.stop()
        rest = list(messages)

    assert found.body == b"1"
    assert rest == []


def test_a_poll_without_a_topic_or_queues_says_what_is_missing():
    with (
        EmbeddedCluster() as cluster,
        PullConsumer(GROUP, name_server=cluster.name_server) as idle,
        pytest.raises(WrongUse, match=r"subscribe\(topic\) or assign\(queues\)"),
    ):
        idle.poll(0.1)
