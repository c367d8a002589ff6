"""Peers and servers for tests of the remoting room and of those that stand on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher, Handler
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import Address, ServerSettings, parse_address
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import RequestHeader

#: How long anything may take before a test fails.
DEADLINE = 20.0


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE
    while not condition():
        if loop.time() > end:
            raise AssertionError(f"{what} did not come about within {DEADLINE} s")
        await asyncio.sleep(0.002)


async def asked(address: str, code: RequestCode, header: RequestHeader) -> Command:
    """The answer to one question, over a connection of its own."""
    connection = await connect(parse_address(address), owner=Dispatcher({}))
    try:
        return await connection.request(code, header, timeout=DEADLINE)
    finally:
        connection.close()
        await connection.wait_closed()


@contextlib.asynccontextmanager
async def serving(
    handlers: Mapping[int, Handler] | Dispatcher, settings: ServerSettings | None = None
) -> AsyncIterator[Server]:
    """A server on a free port for the time of the block."""
    dispatcher = handlers if isinstance(handlers, Dispatcher) else Dispatcher(handlers)
    server = Server(dispatcher, settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace=1.0)
        await dispatcher.stop()


@dataclass(slots=True)
class RawPeer:
    """A peer that knows bytes and frames, and nothing of what is under test but the wire."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _frames: FrameReader = field(default_factory=FrameReader)
    _ready: list[Command] = field(default_factory=list)

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, address: Address, **options: object) -> AsyncIterator[RawPeer]:
        reader, writer = await asyncio.open_connection(address.host, address.port, **options)  # type: ignore[arg-type]  # ssl and limit
        peer = cls(reader, writer)
        try:
            yield peer
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def send(self, *what: bytes | Command) -> None:
        data = b"".join(each if isinstance(each, bytes) else encode_command(each) for each in what)
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> Command:
        """The next command; fails at the deadline, raises `EOFError` at the end."""
        async with asyncio.timeout(DEADLINE):
            while not self._ready:
                data = await self.reader.read(65536)
                if not data:
                    raise EOFError
                self._ready += [decode_command(frame) for frame in self._frames.feed(data)]
        return self._ready.pop(0)

    async def ask(self, request: Command) -> Command:
        await self.send(request)
        return await self.receive()

    async def is_closed_by_the_other_side(self) -> bool:
        """Whether the stream ends, and without another byte."""
        async with asyncio.timeout(DEADLINE):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


class FakeTransport(asyncio.Transport):
    """A transport that notes what is done with it. `room` is what its peer still takes."""

    def __init__(self, room: int = 1 << 60) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.room = room
        self.unwritten = 0
        self.is_reading_now = True
        self.was_aborted = False
        self.high = 64 * 1024
        self.protocol: asyncio.Protocol | None = None
        self._closing = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 4711) if name in ("peername", "sockname") else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))
        taken = min(self.room, len(data))
        self.room -= taken
        self.unwritten += len(data) - taken
        if self.unwritten > self.high and self.protocol is not None:
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Sequence[bytes | bytearray | memoryview]) -> None:  # type: ignore[override]  # what is given
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True
        self.was_aborted = True


@dataclass(slots=True)
class ManualClock:
    """A clock that goes on when it is told to."""

    time: float = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time
