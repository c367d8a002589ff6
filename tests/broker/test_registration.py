"""When name servers are told again: after a lost connection, after failures, and not in a loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from orbitmq.broker import registration
from orbitmq.broker.broker import Broker
from orbitmq.broker.health import why_not_ready
from orbitmq.broker.settings import RegistrationSettings
from orbitmq.client.admin.cluster import runtime_info
from orbitmq.namesrv.server import NameServer
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher, Result
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import Address, ServerSettings
from orbitmq.wire.bodies import KVTable
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body
from tests.support.broker import until

#: Nothing in these tests is to come from the usual interval.
RARE = RegistrationSettings(interval=60.0, timeout=0.3)


class ListeningNameServer:
    """One of version 4 that counts registrations, and can be mute, refuse or end connections."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.is_mute = False
        self.is_refusing = False
        self.is_rude = False
        self._dispatcher = Dispatcher({RequestCode.REGISTER_BROKER: self._register})
        self._server = Server(self._dispatcher, ServerSettings())

    @property
    def address(self) -> Address:
        return self._server.address

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[ListeningNameServer]:
        await self._server.start()
        try:
            yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        await self._server.stop(grace=0)
        await self._dispatcher.stop()

    def end_connections(self) -> None:
        for connection in self._server.connections:
            connection.abort("ended by the test")

    def _register(self, connection: Connection, request: Command) -> Result:
        self.times.append(asyncio.get_running_loop().time())
        if self.is_mute:
            return LATER
        if self.is_refusing:
            return request.answer(ResponseCode.SYSTEM_ERROR, remark="not now")
        if self.is_rude:
            asyncio.get_running_loop().call_later(0.01, connection.abort, "rude")
        return request.answer(ResponseCode.SUCCESS)


@pytest.fixture
async def names():
    async with ListeningNameServer().serving() as made:
        yield made


async def test_a_broker_whose_connection_was_lost_registers_again_at_once(start_broker, names):
    broker = await start_broker(name_servers=(str(names.address),), registration=RARE)
    await until(lambda: broker.parts.registration.is_registered)

    names.end_connections()

    await until(lambda: len(names.times) == 2)
    await until(lambda: broker.parts.registration.is_registered)


async def test_a_name_server_that_was_silent_for_a_while_is_told_soon_after(start_broker, names):
    broker = await start_broker(name_servers=(str(names.address),), registration=RARE)
    registration = broker.parts.registration
    await until(lambda: registration.is_registered)
    names.is_mute = True
    names.end_connections()
    await until(lambda: registration.unreachable == (names.address,))

    names.is_mute = False

    await until(lambda: registration.is_registered)
    assert not registration.problems


async def test_a_name_server_that_refuses_is_asked_again_after_a_pause(start_broker, names):
    names.is_refusing = True
    await start_broker(name_servers=(str(names.address),), registration=RARE)

    await until(lambda: len(names.times) == 2)

    assert names.times[1] - names.times[0] >= 0.9


async def test_a_name_server_that_ends_every_connection_is_not_called_in_a_loop(
    start_broker, names
):
    names.is_rude = True
    await start_broker(name_servers=(str(names.address),), registration=RARE)

    await until(lambda: len(names.times) == 3)

    # The first loss may be chance; after that there are pauses.
    assert names.times[2] - names.times[1] >= 1.0


async def test_one_name_server_that_is_silent_does_not_keep_news_from_the_others(
    start_broker, names
):
    async with ListeningNameServer().serving() as silent:
        silent.is_mute = True
        slow = RegistrationSettings(interval=60.0, timeout=30.0)
        addresses = (str(silent.address), str(names.address))
        broker = await start_broker(name_servers=addresses, registration=slow)
        await until(lambda: len(names.times) == 1 and len(silent.times) == 1)

        broker.parts.registration.register_all()

        await until(lambda: len(names.times) == 2)
        assert len(silent.times) == 1
        await broker.stop(grace=0)


OURS, THEIRS = "10.0.0.1:10911", "10.0.0.2:10911"


def listed(server: NameServer) -> dict[int, str]:
    return dict(server.service.routes.members("DefaultCluster", "broker-a").broker_addrs)


async def registered(broker: Broker) -> None:
    await until(lambda: broker.parts.registration.is_registered, 10)


@pytest.fixture
def often(monkeypatch):
    """Brokers look all the time."""
    monkeypatch.setattr(registration, "LOOK", 0.02)
    monkeypatch.setattr(registration, "LOOK_CLOSELY", 0.02)


@pytest.mark.usefixtures("often")
async def test_a_broker_that_was_displaced_says_by_whom_and_is_back_when_that_one_goes(
    start_broker, open_client, name_server, caplog
):
    told = {"name_servers": (str(name_server.address),), "registration": RARE}
    first = await start_broker(root="one", **told)
    await registered(first)
    second = await start_broker(root="two", **told)
    other = str(second.address)
    await until(lambda: listed(name_server) == {0: other}, 10)

    await until(lambda: why_not_ready(first.parts), 10)
    (reason,) = why_not_ready(first.parts)
    client = await open_client(first)
    answer = await client.connection.request(RequestCode.GET_BROKER_RUNTIME_INFO)
    info = runtime_info(decode_body(KVTable, answer.body).table, answer.version)
    await second.stop()

    await until(lambda: listed(name_server) == {0: str(first.address)}, 10)
    await until(lambda: not why_not_ready(first.parts), 10)
    assert other in reason
    assert str(first.address) in reason
    assert "another broker.name" in reason
    assert any(reason in warning for warning in info.warnings)
    by_broker = [each for each in caplog.records if each.name == "orbitmq.broker.registration"]
    assert sum(each.levelno == logging.ERROR for each in by_broker) == 1
    (by_server,) = [each for each in caplog.messages if "two brokers claim" in each]
    assert str(first.address) in by_server
    assert other in by_server


@pytest.mark.usefixtures("often")
async def test_a_broker_that_a_name_server_has_lost_registers_at_once(start_broker, name_server):
    broker = await start_broker(name_servers=(str(name_server.address),), registration=RARE)
    await registered(broker)

    name_server.service.routes.unregister("DefaultCluster", str(broker.address), "broker-a")

    await until(lambda: listed(name_server) == {0: str(broker.address)}, 10)
    assert not why_not_ready(broker.parts)


@pytest.mark.usefixtures("often")
async def test_a_master_and_its_slave_are_no_rivals(start_broker, name_server):
    told = {"name_servers": (str(name_server.address),), "registration": RARE}
    master = await start_broker(root="one", **told)
    slave = await start_broker(root="two", broker_id=1, **told)
    await until(lambda: len(listed(name_server)) == 2, 10)
    looks = [0]
    members = name_server.service.routes.members

    def counted(cluster, broker):
        looks[0] += 1
        return members(cluster, broker)

    name_server.service.routes.members = counted
    await until(lambda: looks[0] >= 6, 10)

    assert master.parts.registration.conflicts == slave.parts.registration.conflicts == ()
