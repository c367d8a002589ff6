"""What a broker finds wrong with a group is told to its members, in their logs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of, new_group
from tests.support.consuming import until


@pytest.fixture
async def cluster():
    async with AsyncEmbeddedCluster(
        adjust=lambda settings: replace(settings, scan_interval=0.02)
    ) as running:
        await running.create_topic("orders", queues=2)
        yield running


def member(cluster: AsyncEmbeddedCluster, group: str, instance: str, tags: str) -> AsyncConsumer:
    consumer = consumer_of(
        cluster,
        group,
        client=quick_settings(cluster.name_server, instance=instance, heartbeat=0.05),
        rebalance=RebalanceSettings(interval=0.05, handover=0.01),
    )
    consumer.on("orders", tags=tags)(lambda message: None)
    return consumer


async def warnings(
    cluster: AsyncEmbeddedCluster,
    caplog: pytest.LogCaptureFixture,
    members: Sequence[tuple[str, str]],
) -> set[str]:
    """What members, each with instance and tags, say of their group; when they do."""
    group = new_group()
    said: set[str] = set()

    def hear() -> bool:
        said.update(
            each.getMessage()
            for each in caplog.records
            if each.name == "orbitmq.client.consumer.members" and each.levelname == "WARNING"
        )
        return bool(said)

    async with contextlib.AsyncExitStack() as stack:
        for instance, tags in members:
            await stack.enter_async_context(member(cluster, group, instance, tags))
        await until(hear)
    return said


async def test_members_hear_that_they_subscribe_differently(cluster, caplog):
    said = await warnings(cluster, caplog, [("one", "red"), ("two", "blue")])

    (text,) = said
    assert "subscribe differently to topic 'orders'" in text
    assert "@one with TAG 'red'" in text
    assert "@two with TAG 'blue'" in text


async def test_members_hear_that_they_have_one_client_id(cluster, caplog):
    said = await warnings(cluster, caplog, [("same", "red"), ("same", "red")])

    (text,) = said
    assert "has 2 consumers with the client id" in text
    assert "give each an instance name of its own" in text
