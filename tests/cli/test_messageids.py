"""Which topics are asked for a message that is named by its unique id alone."""

from __future__ import annotations

import pytest

from orbitmq.cli import messages
from orbitmq.cli.main import CommandError, Misused
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client_admin import World

QUEUE = Queue("orders", "broker-a", 0)
ID = "7F00000100010000000000000000000A"
UNKNOWN = "7F00000100010000000000000000000B"


@pytest.fixture
async def admin():
    """Of a cluster with two topics of people, and four for retries and dead letters."""
    async with (
        AsyncEmbeddedCluster() as cluster,
        AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as admin,
    ):
        await cluster.create_topic("orders", queues=1)
        await cluster.create_topic("empty", queues=1)
        world = World(cluster, admin)
        try:
            for group in ("billing", "shipping"):
                await world.consumer(f"of-{group}", group=group)
                await world.die(QUEUE, b"other", group=group, UNIQ_KEY=f"{ID[:-1]}C")
            await world.die(QUEUE, b"dead", group="billing", UNIQ_KEY=ID)
            yield admin
        finally:
            await world.close()


async def test_topics_for_retries_and_dead_letters_do_not_count_among_those_of_people(
    admin, monkeypatch
):
    monkeypatch.setattr(messages, "FEW_TOPICS", 2)

    found = await messages.message_of(admin, [ID], None)
    with pytest.raises(CommandError, match=r"the 4 topics for retries and dead letters are too m"):
        await messages.message_of(admin, [UNKNOWN], None)

    assert found.queue.topic == "orders"


async def test_copies_are_asked_for_when_they_are_few(admin, monkeypatch):
    monkeypatch.setattr(messages, "FEW_TOPICS", 4)
    await admin.topics.delete("orders")

    found = await messages.message_of(admin, [ID], None)
    with pytest.raises(CommandError, match=r"no topic has one of this unique id$"):
        await messages.message_of(admin, [UNKNOWN], None)

    assert found.queue.topic == "%DLQ%billing"


async def test_too_many_topics_of_people_are_not_asked_one_by_one(admin, monkeypatch):
    monkeypatch.setattr(messages, "FEW_TOPICS", 1)

    with pytest.raises(Misused, match="--topic orders"):
        await messages.message_of(admin, [ID], None)
