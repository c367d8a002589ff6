"""Threads that ask and block while the loop reads: frames stay whole, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from orbitmq.remoting.blocking import BlockingSide
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher, Result
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import (
    ConnectionLost,
    ConnectionSettings,
    RemotingError,
    RequestTimedOut,
    ServerSettings,
    TooManyRequests,
)
from orbitmq.remoting.tls import ClientTls, ServerTls
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import Bytes, FrameReader
from tests.support.askingthreads import ask, begin, encoding, in_threads
from tests.support.remoting import DEADLINE, serving, until

#: Self-signed, for localhost and 127.0.0.1.
TLS = Path(__file__).resolve().parents[1] / "data" / "tls"

ECHO = 10
HOLD = 11


def _echo(_: Connection, request: Command) -> Command:
    return request.answer(0, body=request.body)


def _hold(_: Connection, request: Command) -> Result:
    return LATER


def _ask(side: BlockingSide, body: bytes, code: int = ECHO, timeout: float = DEADLINE) -> bytes:
    return ask(side, code, body, timeout)


@contextlib.asynccontextmanager
async def _connected(
    server: Server, settings: ConnectionSettings | None = None, *, buffer: int | None = None
) -> AsyncIterator[Connection]:
    connection = await connect(server.address, settings=settings)
    if buffer is not None:
        # Small, so that writes are cut short all the time.
        raw = connection._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


async def test_a_thread_is_answered() -> None:
    async with serving({ECHO: _echo}) as server, _connected(server) as connection:
        side = connection.for_threads()

        (answer,) = await in_threads(lambda: _ask(side, b"hello"))

        assert answer == b"hello"
        assert connection.pending_requests == 0
        assert connection.bytes_out == len(b"".join(encoding(ECHO, b"hello")(1)))


async def test_a_thread_writes_without_the_help_of_the_loop() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(DEADLINE)
    arrived = threading.Event()
    got: list[Command] = []

    def peer() -> None:
        accepted, _ = listening.accept()
        with accepted:
            accepted.settimeout(DEADLINE)
            got.extend(map(decode_command, FrameReader().feed(accepted.recv(65536))))
            arrived.set()

    waiting = threading.Thread(target=peer)
    waiting.start()
    connection = await connect(f"127.0.0.1:{listening.getsockname()[1]}")
    side = connection.for_threads()
    asking = threading.Thread(target=lambda: side.tell(encoding(ECHO, b"now", one_way=True)))

    asking.start()
    came = arrived.wait(DEADLINE)  # the loop does nothing meanwhile

    assert came
    assert bytes(got[0].body) == b"now"
    asking.join()
    waiting.join()
    listening.close()
    connection.abort()
    await connection.wait_closed()


@pytest.mark.parametrize("buffer", [None, 2048])
async def test_frames_of_threads_and_of_the_loop_stay_whole(buffer: int | None) -> None:
    """Echoed bodies of all sizes, from many threads and tasks at once, over one connection."""

    def work(side: BlockingSide, seed: int) -> int:
        chance = random.Random(seed)
        for _ in range(12):
            body = chance.randbytes(chance.choice([1, 300, 20_000, 150_000]))
            assert _ask(side, body) == body
        return seed

    async def task(connection: Connection, seed: int) -> int:
        chance = random.Random(seed)
        for _ in range(12):
            body = chance.randbytes(chance.choice([1, 300, 20_000, 150_000]))
            answer = await connection.request(ECHO, body=body, timeout=DEADLINE)
            assert bytes(answer.body) == body
        return seed

    async with serving({ECHO: _echo}) as server, _connected(server, buffer=buffer) as connection:
        side = connection.for_threads()
        tasks = asyncio.gather(*(task(connection, 100 + seed) for seed in range(4)))

        done = await in_threads(*(partial(work, side, seed) for seed in range(8)))

        assert done == list(range(8))
        assert await tasks == [100, 101, 102, 103]
        assert connection.pending_requests == 0
        assert connection.is_open


async def test_a_socket_that_was_full_is_written_by_threads_again() -> None:
    async with serving({ECHO: _echo}) as server, _connected(server, buffer=2048) as connection:
        side = connection.for_threads()
        shared = connection._shared
        assert shared is not None
        await in_threads(*(lambda: _ask(side, b"x" * 500_000) for _ in range(4)))
        await until(lambda: not shared._belongs_to_loop, "the socket's freedom")
        before = shared.written

        await in_threads(lambda: _ask(side, b"small"))

        assert shared.written > before


async def test_a_late_answer_is_an_error_after_its_time_and_leaves_nothing_behind() -> None:
    async with serving({HOLD: _hold, ECHO: _echo}) as server, _connected(server) as connection:
        side = connection.for_threads()

        (error,) = await in_threads(lambda: _ask(side, b"", HOLD, timeout=0.05))
        (answer,) = await in_threads(lambda: _ask(side, b"again"))

        assert isinstance(error, RequestTimedOut)
        assert (error.code, error.timeout) == (HOLD, 0.05)
        assert answer == b"again"
        assert connection.pending_requests == 0


async def test_threads_that_wait_are_told_of_the_end_of_the_connection() -> None:
    async with serving({HOLD: _hold}) as server, _connected(server) as connection:
        side = connection.for_threads()
        asking = begin(*(partial(_ask, side, b"", HOLD) for _ in range(10)))
        await until(lambda: connection.pending_requests == 10)

        connection.abort("for a test")

        outcomes = await asking
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 10
        assert all("for a test" in str(outcome) for outcome in outcomes)


async def test_threads_that_come_after_the_end_are_told_at_once() -> None:
    async with serving({ECHO: _echo}) as server, _connected(server) as connection:
        side = connection.for_threads()
        connection.close()
        await connection.wait_closed()

        asked, told = await in_threads(
            lambda: _ask(side, b""), lambda: side.tell(encoding(ECHO, one_way=True))
        )

        assert isinstance(asked, ConnectionLost)
        assert isinstance(told, ConnectionLost)
        assert not side.is_open


@pytest.mark.parametrize("buffer", [None, 2048])
async def test_a_peer_that_dies_among_sends_leaves_nobody_waiting(buffer: int | None) -> None:
    """Every thread goes on asking until it is told; none hangs, none gets a wrong answer."""

    def work(side: BlockingSide, seed: int) -> RemotingError:
        chance = random.Random(seed)
        while True:
            body = chance.randbytes(chance.choice([10, 5_000, 100_000]))
            try:
                assert _ask(side, body) == body
            except RemotingError as error:
                return error

    server = Server(Dispatcher({ECHO: _echo}), ServerSettings())
    await server.start()
    async with _connected(server, buffer=buffer) as connection:
        side = connection.for_threads()
        asking = asyncio.create_task(in_threads(*(partial(work, side, seed) for seed in range(8))))
        await until(lambda: connection.bytes_in > 300_000)

        for peer in tuple(server.connections):
            peer.abort("killed")

        outcomes = await asking
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 8
        assert connection.pending_requests == 0
    await server.stop(grace=1.0)


async def test_more_requests_than_allowed_are_refused() -> None:
    settings = ConnectionSettings(pending_requests=2)
    async with serving({HOLD: _hold}) as server, _connected(server, settings) as connection:
        side = connection.for_threads()
        asking = begin(*(partial(_ask, side, b"", HOLD) for _ in range(2)))
        await until(lambda: connection.pending_requests == 2)

        (error,) = await in_threads(lambda: _ask(side, b"", HOLD))

        assert isinstance(error, TooManyRequests)
        connection.abort()
        await asking


async def test_a_request_that_cannot_be_encoded_waits_for_nothing() -> None:
    def encode(_: int) -> Sequence[Bytes]:
        raise RemotingError("no such request")

    async with serving({ECHO: _echo}) as server, _connected(server) as connection:
        side = connection.for_threads()

        (error,) = await in_threads(lambda: side.ask(ECHO, encode, DEADLINE))

        assert str(error) == "no such request"
        assert connection.pending_requests == 0


async def test_with_tls_the_loop_writes_for_the_threads() -> None:
    certificate = TLS / "certificate.pem"
    settings = ServerSettings(tls=ServerTls(certificate=certificate, key=TLS / "key.pem"))
    async with serving({ECHO: _echo}, settings) as server:
        connection = await connect(server.address, tls=ClientTls(authority=certificate).context())
        side = connection.for_threads()
        bodies = [bytes([number]) * 70_000 for number in range(6)]

        answers = await in_threads(*(partial(_ask, side, body) for body in bodies))

        assert answers == bodies
        shared = connection._shared
        assert shared is not None
        assert shared.written == 0
        connection.abort()
        await connection.wait_closed()
