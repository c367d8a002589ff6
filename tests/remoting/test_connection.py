"""A connection: turns, requests in both directions, deadlines, and its end."""

from __future__ import annotations

import asyncio
import random

import pytest

from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher
from orbitmq.remoting.settings import (
    ConnectionLost,
    ConnectionSettings,
    RequestTimedOut,
    TooManyRequests,
)
from orbitmq.wire.codes import ResponseCode, Serialization
from orbitmq.wire.command import Command, encode_command
from tests.support.remoting import DEADLINE, FakeTransport, RawPeer, serving, until

ECHO = 10
HOLD = 11


def _echo(_: Connection, request: Command) -> Command:
    return request.answer(0, body=request.body, extra={"code": str(request.code)})


def _open(
    owner: Dispatcher, settings: ConnectionSettings | None = None
) -> tuple[Connection, FakeTransport]:
    connection = Connection(owner, settings=settings)
    transport = FakeTransport()
    transport.protocol = connection
    connection.connection_made(transport)
    return connection, transport


def _requests(count: int, *, code: int = ECHO, body: bytes = b"") -> bytes:
    return b"".join(
        encode_command(Command.request(code, opaque=number, body=body)) for number in range(count)
    )


async def test_requests_are_answered_however_their_bytes_are_cut():
    chance = random.Random(7)
    bodies = [chance.randbytes(chance.choice([0, 1, 100, 70_000])) for _ in range(40)]
    stream = b"".join(
        encode_command(Command.request(ECHO, opaque=number, body=body))
        for number, body in enumerate(bodies)
    )
    async with serving({ECHO: _echo}) as server, RawPeer.connected(server.address) as peer:
        at = 0
        sender = asyncio.create_task(_send_in_chunks(peer, stream, chance))
        for number, body in enumerate(bodies):
            answer = await peer.receive()
            at += 1

            assert (answer.opaque, answer.is_response) == (number, True)
            assert bytes(answer.body) == body
        await sender

    assert at == len(bodies)


async def _send_in_chunks(peer: RawPeer, stream: bytes, chance: random.Random) -> None:
    at = 0
    while at < len(stream):
        size = chance.choice([1, 2, 3, 7, 500, 65_536, 200_000])
        await peer.send(stream[at : at + size])
        at += size
        await asyncio.sleep(0)


async def test_answers_may_come_in_any_order():
    held: list[Command] = []

    def hold(connection, request):
        held.append(request)
        if len(held) == 50:
            for each in reversed(held):
                connection.reply(each, each.answer(0, body=each.body))
        return LATER

    async with serving({HOLD: hold}) as server:
        connection = await connect(server.address)
        answers = await asyncio.gather(
            *(connection.request(HOLD, body=b"%d" % n, timeout=DEADLINE) for n in range(50))
        )
        connection.close()

    assert [bytes(answer.body) for answer in answers] == [b"%d" % n for n in range(50)]


@pytest.mark.parametrize("serialization", list(Serialization))
async def test_an_answer_has_the_serialization_of_its_request(serialization):
    async with serving({ECHO: _echo}) as server, RawPeer.connected(server.address) as peer:
        for code in (ECHO, 9999):
            answer = await peer.ask(Command.request(code, opaque=5, serialization=serialization))

            assert answer.serialization is serialization
            assert answer.opaque == 5


# Deadlines and ends


async def test_deadlines_are_kept_in_whatever_order_they_were_given():
    async with serving({HOLD: lambda _, __: LATER, ECHO: _echo}) as server:
        connection = await connect(server.address)
        ended: list[float] = []

        async def wait(timeout):  # noqa: ASYNC109  # what is under test
            with pytest.raises(RequestTimedOut):
                await connection.request(HOLD, timeout=timeout)
            ended.append(timeout)

        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(wait(0.2), wait(0.05), wait(0.12))
        # Many that are answered do not disturb those that are not.
        async with asyncio.timeout(DEADLINE):
            late = asyncio.create_task(wait(0.1))
            for _ in range(600):
                await connection.request(ECHO, timeout=DEADLINE)
            await late
        connection.close()

    assert ended == [0.05, 0.12, 0.2, 0.1]


async def test_nothing_is_written_after_a_write_that_failed():
    connection, transport = _open(Dispatcher({HOLD: lambda _, __: LATER}))
    connection.data_received(_requests(3, code=HOLD))
    transport.abort()  # as asyncio does when the socket refuses a write

    request = Command.request(HOLD, opaque=1)
    connection.reply(request, request.answer(0))
    await asyncio.sleep(0)

    assert transport.written == []
    assert not connection.is_open


async def test_a_late_answer_is_dropped_and_the_connection_goes_on():
    held: list[tuple[Connection, Command]] = []

    def hold(connection, request):
        held.append((connection, request))
        return LATER

    async with serving({HOLD: hold, ECHO: _echo}) as server:
        connection = await connect(server.address)
        with pytest.raises(RequestTimedOut):
            await connection.request(HOLD, timeout=0.02)
        await until(lambda: bool(held))
        server_side, request = held[0]
        server_side.reply(request, request.answer(0, body=b"too late"))
        answer = await connection.request(ECHO, body=b"still here", timeout=DEADLINE)
        connection.close()

    assert bytes(answer.body) == b"still here"


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_every_waiting_request_fails_at_once_when_the_connection_ends(end):
    async with serving({HOLD: lambda _, __: LATER}) as server:
        connection = await connect(server.address)
        waiting = [
            asyncio.create_task(connection.request(HOLD, timeout=DEADLINE)) for _ in range(20)
        ]
        await until(lambda: sum(each.open_requests for each in server.connections) == 20)
        for each in server.connections:
            getattr(each, end)()
        async with asyncio.timeout(DEADLINE / 2):
            results = await asyncio.gather(*waiting, return_exceptions=True)

        assert all(isinstance(each, ConnectionLost) and each.retriable for each in results)
        assert len({id(each) for each in results}) == 20
        assert not connection.is_open
        with pytest.raises(ConnectionLost):
            await connection.request(ECHO)
        with pytest.raises(ConnectionLost):
            connection.notify(ECHO)


async def test_more_requests_than_allowed_are_refused_before_they_are_sent():
    settings = ConnectionSettings(pending_requests=3)
    async with serving({HOLD: lambda _, __: LATER}) as server:
        connection = await connect(server.address, settings=settings)
        waiting = [asyncio.create_task(connection.request(HOLD)) for _ in range(3)]
        await until(lambda: connection.pending_requests == 3)
        with pytest.raises(TooManyRequests, match="3 requests already wait"):
            await connection.request(HOLD)
        connection.abort()
        await asyncio.gather(*waiting, return_exceptions=True)


# Turns


async def test_the_answers_of_one_read_are_written_at_once():
    connection, transport = _open(Dispatcher({ECHO: _echo}))

    connection.data_received(_requests(30))

    assert len(transport.written) == 1
    assert connection.bytes_in == len(_requests(30))
    assert connection.bytes_out == len(transport.written[0])


async def test_the_owner_can_answer_all_requests_of_a_turn_when_it_is_done():
    collected: list[Command] = []
    turns: list[int] = []

    def collect(_, request):
        collected.append(request)
        return LATER

    def answer_all(connection):
        turns.append(len(collected))
        for request in collected:
            connection.reply(request, request.answer(0))
        collected.clear()

    connection, transport = _open(Dispatcher({ECHO: collect}, turn_done=answer_all))

    connection.data_received(_requests(16))
    connection.data_received(_requests(2))

    assert turns == [16, 2]
    assert len(transport.written) == 2
    assert connection.open_requests == 0


async def test_a_request_with_no_other_in_flight_is_written_at_once():
    connection, transport = _open(Dispatcher({}))

    first = connection.submit(ECHO, None, lambda _: None)
    alone = len(transport.written)
    connection.submit(ECHO, None, lambda _: None)
    connection.submit(ECHO, None, lambda _: None)
    before = len(transport.written)
    await asyncio.sleep(0)
    together = len(transport.written)
    for opaque in range(first, first + 3):
        connection.data_received(encode_command(Command.request(ECHO, opaque=opaque).answer(0)))
    connection.submit(ECHO, None, lambda _: None)

    assert (alone, before, together) == (1, 1, 2)
    assert len(transport.written) == 3
    connection.abort()


async def test_nothing_is_ever_written_for_a_one_way_request():
    refused: list[int] = []

    def refuse(connection, request):
        refused.append(request.code)
        connection.reply(request, request.answer(0))
        return LATER

    def fail(_, __):
        refused.append(0)
        raise ValueError("this handler fails")

    connection, transport = _open(Dispatcher({ECHO: _echo, HOLD: refuse, 12: fail}))

    for code in (ECHO, HOLD, 12, 9999):
        connection.data_received(encode_command(Command.request(code, opaque=code, one_way=True)))
    await asyncio.sleep(0)

    assert transport.written == []
    assert refused == [HOLD, 0]
    assert connection.open_requests == 0


async def test_answers_to_what_was_asked_just_before_the_peer_stops_sending_are_written():
    held: list[tuple[Connection, Command]] = []

    def hold(connection, request):
        held.append((connection, request))
        return LATER

    async with (
        serving({ECHO: _echo, HOLD: hold}) as server,
        RawPeer.connected(server.address) as peer,
    ):
        await peer.send(Command.request(ECHO, opaque=1, body=b"last"))
        peer.writer.write_eof()

        assert bytes((await peer.receive()).body) == b"last"


async def test_an_unknown_code_is_answered_as_apache_does():
    async with serving({}) as server, RawPeer.connected(server.address) as peer:
        answer = await peer.ask(Command.request(4242, opaque=9))

    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert answer.remark == " request type 4242 not supported"
