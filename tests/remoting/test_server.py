"""Whom a server lets in, how long it keeps them, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from orbitmq.errors import SettingError
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher
from orbitmq.remoting.server import Capacity, Server
from orbitmq.remoting.settings import (
    Address,
    ChannelSettings,
    ConnectFailed,
    ConnectionSettings,
    ListenFailed,
    ServerSettings,
)
from orbitmq.wire.command import Command, encode_command
from tests.support.remoting import DEADLINE, RawPeer, serving, until

CODE = 10
HOLD = 11


def _fine(_: Connection, request: Command) -> Command:
    return request.answer(0)


def _huge(_: Connection, request: Command) -> Command:
    return request.answer(0, body=bytes(8 << 20))


async def test_a_port_in_use_is_refused_with_the_address_and_the_reason():
    async with serving({}) as server:
        second = Server(Dispatcher({}), ServerSettings(port=server.address.port))
        with pytest.raises(ListenFailed, match=f"127.0.0.1:{server.address.port}.*in use"):
            await second.start()


async def test_an_idle_connection_is_closed_and_a_busy_one_is_kept():
    settings = ServerSettings(idle=1.0, sweep=0.05)
    async with serving({CODE: _fine}, settings) as server:
        busy = await connect(server.address)
        await busy.request(CODE, timeout=DEADLINE)
        async with RawPeer.connected(server.address) as idle:
            await idle.ask(Command.request(CODE, opaque=1))
            closed = asyncio.create_task(idle.is_closed_by_the_other_side())
            while not closed.done():
                await busy.request(CODE, timeout=DEADLINE)
                await asyncio.sleep(0.01)

            assert await closed
        assert busy.is_open
        await until(lambda: len(server.connections) == 1)
        busy.close()


async def test_a_peer_that_stopped_reading_is_aborted_when_idle():
    settings = ServerSettings(
        idle=0.2, sweep=0.05, connection=ConnectionSettings(slow_bytes=1000, resume_bytes=100)
    )
    async with (
        serving({CODE: _huge}, settings) as server,
        RawPeer.connected(server.address, limit=1024) as lazy,
    ):
        await lazy.send(Command.request(CODE, opaque=1), Command.request(CODE, opaque=2))
        await until(lambda: any(each.unwritten for each in server.connections))

        await until(lambda: not server.connections, "the end of the lazy connection")


async def test_a_peer_that_says_nothing_is_closed():
    async with (
        serving({CODE: _fine}, ServerSettings(first_byte=0.05)) as server,
        RawPeer.connected(server.address) as silent,
    ):
        assert await silent.is_closed_by_the_other_side()


async def test_connections_above_the_limit_are_refused_until_one_leaves(caplog):
    async with serving({CODE: _fine}, ServerSettings(connections=2)) as server:
        first, second = await connect(server.address), await connect(server.address)
        for each in (first, second):
            await each.request(CODE, timeout=DEADLINE)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                async with RawPeer.connected(server.address) as third:
                    assert await third.is_closed_by_the_other_side()
        refusals = [each for each in caplog.records if "refused" in each.getMessage()]
        first.close()
        await until(lambda: len(server.connections) == 1)
        third_time = await connect(server.address)

        assert (await third_time.request(CODE, timeout=DEADLINE)).code == 0
        assert len(refusals) == 1
        second.close()
        third_time.close()


async def test_a_host_may_have_a_part_of_the_connections_only(caplog):
    async with serving({CODE: _fine}, ServerSettings(host_connections=2)) as server:
        first, second = await connect(server.address), await connect(server.address)
        for each in (first, second):
            await each.request(CODE, timeout=DEADLINE)
        async with RawPeer.connected(server.address) as third:
            assert await third.is_closed_by_the_other_side()
        from_elsewhere = await _connect_from("127.0.0.2", server.address)
        try:
            from_elsewhere.sendall(encode_command(Command.request(CODE, opaque=1)))
            assert await asyncio.to_thread(from_elsewhere.recv, 1)
        finally:
            from_elsewhere.close()
        first.close()
        second.close()

    assert "server.host_connections" in caplog.text


async def _connect_from(host: str, address: Address) -> socket.socket:
    """A connection from another address of this machine."""
    peer = socket.socket()
    peer.settimeout(DEADLINE)
    try:
        peer.bind((host, 0))
        await asyncio.to_thread(peer.connect, tuple(address))
    except OSError as error:
        peer.close()
        pytest.skip(f"this machine has no second address: {error}")
    return peer


async def test_servers_that_share_a_capacity_have_one_limit_and_give_back_what_they_took():
    settings = ServerSettings(connections=3, first_byte=60.0)
    capacity = Capacity(settings)
    dispatcher = Dispatcher({CODE: _fine})
    doors = [Server(dispatcher, settings, capacity=capacity) for _ in range(2)]
    for door in doors:
        await door.start()
    try:
        one = await connect(doors[0].address)
        two = await connect(doors[1].address)
        for each in (one, two):
            await each.request(CODE, timeout=DEADLINE)
        async with RawPeer.connected(doors[0].address) as silent:
            await until(lambda: capacity.connections == 3)
            for door in doors:
                async with RawPeer.connected(door.address) as refused:
                    assert await refused.is_closed_by_the_other_side()
            silent.writer.transport.abort()
        await until(lambda: capacity.connections == 2)
        one.close()
        await until(lambda: capacity.connections == 1)
        async with RawPeer.connected(doors[1].address) as peer:
            assert (await peer.ask(Command.request(CODE, opaque=1))).code == 0
    finally:
        for door in doors:
            await door.stop(grace=0.0)
    await until(lambda: capacity.connections == 0)


async def test_a_stop_answers_what_is_open_and_takes_nothing_new():
    held: list[tuple[Connection, Command]] = []

    def hold(connection, request):
        held.append((connection, request))
        return LATER

    async with serving({HOLD: hold, CODE: _fine}) as server:
        connection = await connect(server.address)
        waiting = asyncio.create_task(connection.request(HOLD, timeout=DEADLINE))
        await until(lambda: bool(held))
        stopping = asyncio.create_task(server.stop(grace=DEADLINE))
        await until(lambda: not _accepts(server.address))
        assert not stopping.done()
        server_side, request = held[0]
        server_side.reply(request, request.answer(0, body=b"in time"))
        answer = await waiting
        await stopping

    assert bytes(answer.body) == b"in time"
    await connection.wait_closed()


@pytest.mark.parametrize(("version", "code"), [(475, 0), (476, 1500), (513, 1500)])
async def test_while_it_stops_new_requests_are_sent_away_where_the_peer_understands_it(
    version, code
):
    held: list[tuple[Connection, Command]] = []

    def hold(connection, request):
        held.append((connection, request))
        return LATER

    async with (
        serving({HOLD: hold, CODE: _fine}) as server,
        RawPeer.connected(server.address) as peer,
    ):
        await peer.send(Command.request(HOLD, opaque=1))
        await until(lambda: bool(held))
        stopping = asyncio.create_task(server.stop(grace=DEADLINE))
        await until(lambda: not _accepts(server.address))
        answer = await peer.ask(Command(CODE, 2, version=version))
        server_side, request = held[0]
        server_side.reply(request, request.answer(0))
        last = await peer.receive()
        await stopping

    assert answer.code == code
    assert last.opaque == 1


def _accepts(address: Address) -> bool:
    with socket.socket() as probe:
        probe.settimeout(DEADLINE)
        return probe.connect_ex(tuple(address)) == 0


async def test_a_stop_does_not_wait_longer_than_its_grace():
    async with serving({HOLD: lambda _, __: LATER}) as server:
        connection = await connect(server.address)
        waiting = asyncio.create_task(connection.request(HOLD, timeout=DEADLINE))
        await until(lambda: any(each.open_requests for each in server.connections))
        async with asyncio.timeout(DEADLINE / 2):
            await server.stop(grace=0.05)

        assert not server.connections
        with pytest.raises(Exception, match="ended"):
            await waiting


async def test_connecting_has_a_deadline():
    with socket.socket() as full:
        # A listener whose backlog is full answers no further handshake.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = Address("127.0.0.1", full.getsockname()[1])
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(tuple(address))
        try:
            with pytest.raises(ConnectFailed, match=r"no connection within 0\.1 s"):
                await connect(address, timeout=0.1)
        finally:
            for each in waiting:
                each.close()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ServerSettings(connections=0), "server.connections must be positive, got 0"),
        (lambda: ServerSettings(port=70000), "server.port must be 0 to 65535, got 70000"),
        (lambda: ServerSettings(grace=-1), "server.grace must not be negative"),
        (lambda: ConnectionSettings(read_size=0), "connection.read_size must be positive"),
        (lambda: ConnectionSettings(slow_bytes=1), "resume_bytes 262144, slow_bytes 1"),
        (lambda: ChannelSettings(jitter=1.0), "channel.jitter must be from 0 to below 1"),
        (lambda: ChannelSettings(longest_pause=0.01), "first_pause 0.1, longest_pause 0.01"),
    ],
)
def test_a_setting_that_cannot_work_is_named(make, named):
    with pytest.raises(SettingError, match=named):
        make()
