"""Threads that ask over a connection of the loop that a test runs on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TypeVar

from orbitmq.remoting.blocking import BlockingSide, Encode, SharedReading
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection, Owner
from orbitmq.remoting.dispatch import LATER, Result
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import ConnectionSettings
from orbitmq.wire.command import Command, command_pieces, decode_command, encode_command
from orbitmq.wire.frame import Bytes, FrameReader
from tests.support.remoting import DEADLINE, until

ECHO = 10
HOLD = 11
QUESTION = 13

#: With these a lending lasts until something ends it that the test does: however slow the machine
#: is, the loop does not take the reading back because no thread has come to read yet.
LENT_FOR_LONG = ConnectionSettings(reading_look=100 * DEADLINE)

Returned = TypeVar("Returned")


def echo(_: Connection, request: Command) -> Command:
    return request.answer(0, body=request.body)


def encoding(code: int, body: bytes = b"", *, one_way: bool = False) -> Encode:
    def encode(opaque: int) -> Sequence[Bytes]:
        return command_pieces(Command.request(code, opaque=opaque, body=body, one_way=one_way))

    return encode


def ask(side: BlockingSide, code: int, body: bytes = b"", timeout: float = DEADLINE) -> bytes:
    """The body of the answer."""
    return bytes(side.ask(code, encoding(code, body), timeout).body)


async def in_threads(*works: Callable[[], object]) -> list[object]:
    """Run every function on a thread of its own; their results or errors."""
    loop = asyncio.get_running_loop()
    outcomes: list[asyncio.Future[object]] = []
    for work in works:
        outcome: asyncio.Future[object] = loop.create_future()
        outcomes.append(outcome)
        threading.Thread(target=_run, args=(work, loop, outcome), daemon=True).start()
    async with asyncio.timeout(2 * DEADLINE):
        return list(await asyncio.gather(*outcomes, return_exceptions=True))


def begin(*works: Callable[[], object]) -> asyncio.Task[list[object]]:
    """The same, while the test goes on."""
    return asyncio.get_running_loop().create_task(in_threads(*works))


def _run(
    work: Callable[[], object],
    loop: asyncio.AbstractEventLoop,
    outcome: asyncio.Future[object],
) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  # it is looked at by the test
        loop.call_soon_threadsafe(outcome.set_exception, error)
    else:
        loop.call_soon_threadsafe(outcome.set_result, result)


class Holding:
    """Keeps requests open until they are let go."""

    def __init__(self) -> None:
        self.held: list[tuple[Connection, Command]] = []

    def __call__(self, connection: Connection, request: Command) -> Result:
        self.held.append((connection, request))
        return LATER

    def answer(self, place: int) -> None:
        connection, request = self.held.pop(place)
        connection.reply(request, request.answer(0, body=request.body))


@contextlib.asynccontextmanager
async def lent(
    server: Server | Peer,
    owner: Owner | None = None,
    settings: ConnectionSettings | None = None,
) -> AsyncIterator[tuple[Connection, BlockingSide, SharedReading]]:
    """A connection whose reading is lent to threads, by the answer to one of them.

    With settings by which the loop looks sooner than `LENT_FOR_LONG`, that is certain only until
    the test lets the loop go on.
    """
    settings = settings or LENT_FOR_LONG
    connection = await connect(server.address, owner=owner, settings=settings)
    side = connection.for_threads()
    reading = connection._reading
    assert reading is not None
    try:
        await lend(side, reading)
        yield connection, side, reading
    finally:
        connection.abort()
        async with asyncio.timeout(DEADLINE):
            await connection.wait_closed()
        await until(lambda: reading._descriptor.fileno() == -1, "the end of the descriptor")


async def lend(side: BlockingSide, reading: SharedReading) -> None:
    """Have the reading lent; also if the loop takes it back before this goes on."""
    async with asyncio.timeout(DEADLINE):
        while not reading.is_lent:
            assert await in_threads(lambda: ask(side, ECHO, b"lend")) == [b"lend"]


async def until_threads_read(reading: SharedReading, stopped: asyncio.Event) -> None:
    """Return when threads have read once more, or never will: for a loop that asks, too.

    If it always had a question on its way, nothing would be lent to threads.
    """
    reads = reading._reads
    await until(lambda: reading._reads > reads or stopped.is_set(), "a thread that reads")


class Peer:
    """A server on a thread of its own, which answers as it is told, and sends what it is told."""

    def __init__(self, answer: Callable[[Command], bytes]) -> None:
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(DEADLINE)
        self._accepted: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"

    def send(self, *commands: Command) -> None:
        """At once, whoever it was that asked. Only while nothing is being answered."""
        assert self._accepted is not None
        self._accepted.sendall(b"".join(map(encode_command, commands)))

    def _serve(self) -> None:
        with self._listening:
            self._accepted, _ = self._listening.accept()
        reader = FrameReader()
        with self._accepted, contextlib.suppress(ConnectionError):  # it does not take all
            self._accepted.settimeout(2 * DEADLINE)
            while data := self._accepted.recv(65536):
                for frame in reader.feed(data):
                    self._accepted.sendall(self._answer(decode_command(frame)))

    def join(self) -> None:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def raw_peer(answer: Callable[[Command], bytes]) -> Iterator[Peer]:
    peer = Peer(answer)
    try:
        yield peer
    finally:
        peer.join()


class BackgroundLoop:
    """A loop on a thread of its own, for tests whose own thread asks."""

    def __init__(self, make: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop = make()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, Returned]) -> Returned:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self._loop.close()
