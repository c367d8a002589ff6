"""A cluster whose brokers have not registered yet takes no changes, and says so."""

from __future__ import annotations

import pytest

from orbitmq import AsyncAdmin
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings


@pytest.fixture
async def admin():
    server = NameServer(NameServerSettings(server=ServerSettings(port=0)))
    await server.start()
    try:
        async with AsyncAdmin(name_server=str(server.address)) as made:
            yield made
    finally:
        await server.stop()


async def test_a_topic_that_no_broker_takes_is_not_made(admin):
    with pytest.raises(BrokerUnavailable, match="none is registered"):
        await admin.topics.create("orders", exist_ok=True)


async def test_a_group_that_no_broker_takes_is_not_made(admin):
    with pytest.raises(BrokerUnavailable, match="none is registered"):
        await admin.groups.create("billing")


async def test_there_is_nothing_to_see_and_no_error(admin):
    assert list(await admin.topics.list()) == []
