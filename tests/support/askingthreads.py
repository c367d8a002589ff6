"""Threads that ask by way of a pool of blocking connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import TypeVar

from orbitmq.remoting.blocking import PROBE, BlockingPool, Encode
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Result
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import Address, parse_address
from orbitmq.wire.command import Command, command_pieces
from orbitmq.wire.frame import Bytes
from tests.support.remoting import DEADLINE

ECHO = 10
HOLD = 11

Returned = TypeVar("Returned")


def echo(_: Connection, request: Command) -> Command:
    return request.answer(0, body=request.body)


def encoding(code: int, body: bytes = b"", *, one_way: bool = False) -> Encode:
    def encode(opaque: int) -> Sequence[Bytes]:
        return command_pieces(Command.request(code, opaque=opaque, body=body, one_way=one_way))

    return encode


def pool_for(server: Server | Address | str, most: int = 4, **options: object) -> BlockingPool:
    address = server.address if isinstance(server, Server) else server
    where = parse_address(address) if isinstance(address, str) else address
    return BlockingPool(where, encoding(PROBE), most=most, **options)  # type: ignore[arg-type]


def ask(pool: BlockingPool, code: int, body: bytes = b"", timeout: float = DEADLINE) -> bytes:
    """The body of the answer."""
    answer = pool.request(code, encoding(code, body), timeout)
    assert answer is not None, "no connection could be opened"
    return bytes(answer.body)


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
    work: Callable[[], object], loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[object]
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


@contextlib.contextmanager
def background_loop() -> Iterator[Callable[[Coroutine[object, object, Returned]], Returned]]:
    """Runs coroutines on a loop of another thread, for tests whose own thread asks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[object, object, Returned]) -> Returned:
        return asyncio.run_coroutine_threadsafe(work, loop).result(2 * DEADLINE)

    try:
        yield run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE)
        assert not thread.is_alive()
        loop.close()


class Interrupt(BaseException):
    """What interrupts a thread, as Ctrl-C does."""


class StrikeAt:
    """Raises at the n-th point where a thread that is in a folder can be interrupted."""

    def __init__(self, place: int, folder: str) -> None:
        self._left = place
        self._folder = folder
        self.has_struck = False
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return"):
            return
        if not frame.f_code.co_filename.startswith(self._folder):
            return
        self._left -= 1
        if self._left < 0 and not self.has_struck:
            self.has_struck = True
            self.where = f"{frame.f_code.co_name} {event} {getattr(argument, '__name__', '')}"
            raise Interrupt

    def during(self, work: Callable[[], object]) -> object:
        gc.disable()  # an interrupt in what a collection calls would be lost
        sys.setprofile(self)
        try:
            return work()
        except Interrupt:  # its traceback would keep the connection alive
            return Interrupt
        finally:
            sys.setprofile(None)
            gc.enable()
