"""A peer can make us hold a bounded amount, whatever it sends and however slowly it reads."""

from __future__ import annotations

import asyncio
import socket

from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher
from orbitmq.remoting.settings import KIB, MIB, ConnectionSettings, ServerSettings
from orbitmq.wire.command import Command, encode_command
from tests.support.remoting import FakeTransport, RawPeer, serving, until

BIG = 10
HOLD = 11
ECHO = 12

BODY = memoryview(bytes(256 * KIB))


def _big(_: Connection, request: Command) -> Command:
    return request.answer(0, body=BODY)


def _echo(_: Connection, request: Command) -> Command:
    return request.answer(0)


def _open(
    owner: Dispatcher, settings: ConnectionSettings, room: int
) -> tuple[Connection, FakeTransport]:
    connection = Connection(owner, settings=settings)
    transport = FakeTransport(room)
    transport.protocol = connection
    connection.connection_made(transport)
    return connection, transport


def _requests(count: int, code: int) -> bytes:
    return b"".join(encode_command(Command.request(code, opaque=n)) for n in range(count))


async def test_a_peer_that_reads_nothing_gets_no_more_than_a_bounded_amount_prepared():
    settings = ConnectionSettings(slow_bytes=1 * MIB, unwritten_bytes=16 * MIB)
    answered = 0

    def count(connection, request):
        nonlocal answered
        answered += 1
        return _big(connection, request)

    server_settings = ServerSettings(connection=settings)
    asked = 400  # for 100 MiB
    async with serving({BIG: count, ECHO: _echo}, server_settings) as server:
        loop = asyncio.get_running_loop()
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        lazy.setblocking(False)
        await loop.sock_connect(lazy, tuple(server.address))
        await loop.sock_sendall(lazy, _requests(asked, BIG))
        await until(lambda: any(each.unwritten > 1 * MIB for each in server.connections))
        (connection,) = server.connections
        # Others are served meanwhile, and nothing more is prepared for the lazy one.
        prepared = answered
        async with RawPeer.connected(server.address) as peer:
            for number in range(200):
                assert (await peer.ask(Command.request(ECHO, opaque=number))).opaque == number

        assert connection.is_open
        assert answered == prepared < asked / 4
        assert connection.unwritten < 1 * MIB + 2 * len(BODY) + settings.flush_bytes

        # Once it reads, it gets everything.
        received = 0
        async with asyncio.timeout(20):
            while received < asked * len(BODY):
                received += len(await loop.sock_recv(lazy, 1 << 20))
        await until(lambda: answered == asked)
        lazy.close()


async def test_the_backlog_of_a_slow_peer_is_answered_in_order_when_it_reads_again():
    settings = ConnectionSettings(flush_bytes=1, slow_bytes=1000, resume_bytes=10)
    seen: list[int] = []

    def note(_, request):
        seen.append(request.opaque)
        return request.answer(0, body=bytes(500))

    connection, transport = _open(Dispatcher({BIG: note}), settings, room=0)

    connection.data_received(_requests(20, BIG))
    after_first_read = list(seen)
    connection.data_received(_requests(1, ECHO))
    while_paused = list(seen)
    transport.unwritten, transport.room = 0, 1 << 30
    connection.resume_writing()
    await asyncio.sleep(0)

    assert after_first_read == while_paused == [0, 1]
    assert seen == list(range(20))
    assert transport.is_reading_now


async def test_a_connection_with_too_much_unwritten_is_aborted(caplog):
    settings = ConnectionSettings(slow_bytes=1000, resume_bytes=100, unwritten_bytes=5000)
    connection, transport = _open(Dispatcher({HOLD: lambda _, __: LATER}), settings, room=0)
    connection.data_received(_requests(20, HOLD))

    # Answers to requests that were open before the peer became slow cannot be held back.
    request = Command.request(HOLD, opaque=1)
    for _ in range(20):
        connection.reply(request, request.answer(0, body=bytes(400)))
        connection.flush()

    assert transport.was_aborted
    assert not connection.is_open
    assert transport.unwritten < 6500
    assert "bytes unread" in caplog.text


async def test_a_peer_with_many_requests_open_is_not_read_from_until_some_are_answered():
    settings = ConnectionSettings(open_requests=5)
    held: list[Command] = []

    def hold(_, request):
        held.append(request)
        return LATER

    connection, transport = _open(Dispatcher({HOLD: hold}), settings, room=1 << 30)

    connection.data_received(_requests(12, HOLD))
    at_first = [request.opaque for request in held]
    was_reading = transport.is_reading_now
    for request in held[:3]:
        connection.reply(request, request.answer(0))
    await asyncio.sleep(0)

    assert at_first == [0, 1, 2, 3, 4]
    assert not was_reading
    assert [request.opaque for request in held] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert connection.open_requests == 5
    for request in held[3:]:
        connection.release(request)
    await asyncio.sleep(0)
    assert [request.opaque for request in held] == list(range(12))
    assert transport.is_reading_now
