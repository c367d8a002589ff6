"""Threads that are interrupted while they ask: whatever they leave, others are served.

A thread can be interrupted when a call returns and when a function begins; that is where the
interpreter looks. Here it is, at each of these points in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import pytest

import orbitmq.remoting
from orbitmq.remoting import blocking as sharedsocket
from orbitmq.remoting.blocking import BlockingSide, Encode, SharedSocket, Waiter
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection, PendingRequests
from orbitmq.remoting.outgoing import Outgoing
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import ConnectionLost, RequestTimedOut
from orbitmq.wire.command import Command, command_pieces
from orbitmq.wire.frame import Bytes
from tests.support.remoting import DEADLINE, serving, until

ECHO = 10
TOLD = 12
REMOTING = str(Path(orbitmq.remoting.__file__).parent)
ASYNCIO = str(Path(asyncio.__file__).parent)


class Interrupt(BaseException):
    """What strikes a thread, as Ctrl-C does."""


class InterruptLikeASocket(TimeoutError):
    """What signal handlers of applications raise; also an `OSError`."""


def _echo(_: Connection, request: Command) -> Command:
    return request.answer(0, body=request.body)


def _encoding(code: int, body: bytes = b"", *, one_way: bool = False) -> Encode:
    def encode(opaque: int) -> Sequence[Bytes]:
        return command_pieces(Command.request(code, opaque=opaque, body=body, one_way=one_way))

    return encode


def _ask(side: BlockingSide, body: bytes, timeout: float = DEADLINE) -> bytes:
    return bytes(side.ask(ECHO, _encoding(ECHO, body), timeout).body)


@contextlib.asynccontextmanager
async def _connected(server: Server, *, buffer: int | None = None) -> AsyncIterator[Connection]:
    connection = await connect(server.address)
    if buffer is not None:
        # Small, so that writes are cut short.
        raw = connection._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


class _StrikeAt:
    """Raises at the n-th point where a thread that is in `remoting` can be interrupted."""

    def __init__(self, place: int, error: type[BaseException]) -> None:
        self._left = place
        self._error = error
        self.has_struck = False
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return") or not _is_in_remoting(frame):
            return
        self._left -= 1
        if self._left < 0 and not self.has_struck:
            self.has_struck = True
            self.where = f"{frame.f_code.co_name} {event} {getattr(argument, '__name__', '')}"
            raise self._error


def _is_in_remoting(frame: FrameType) -> bool:
    """Or in what it calls to wake the loop, which is Python code, too."""
    return frame.f_code.co_filename.startswith((REMOTING, ASYNCIO))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _on_thread(work: Callable[[], object], strike: _StrikeAt | None = None) -> object:
    """What the work returns or raises."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[object] = loop.create_future()

    def run() -> None:
        result: object
        # What a collection of garbage calls on this thread is no point of the work: an interrupt
        # would be lost there.
        with _no_collection():
            sys.setprofile(strike)
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  # it is looked at by the test
                result = error
            finally:
                sys.setprofile(None)
        loop.call_soon_threadsafe(outcome.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(2 * DEADLINE):
        return await outcome


@pytest.mark.parametrize("size", [10, 400_000])
@pytest.mark.parametrize("error", [Interrupt, InterruptLikeASocket])
async def test_wherever_a_thread_is_interrupted_the_others_are_served(
    size: int, error: type[BaseException]
) -> None:
    """Another thread is answered soon, or told soon that the connection has ended."""
    place, aborted = 0, []
    async with serving({ECHO: _echo}) as server:
        while True:
            async with _connected(server, buffer=4096) as connection:
                side = connection.for_threads()
                strike = _StrikeAt(place, error)
                body = bytes([place % 256]) * size

                struck = await _on_thread(lambda: _ask(side, body), strike)  # noqa: B023  # ended here
                others = await asyncio.gather(
                    *(_on_thread(lambda: _ask(side, b"another")) for _ in range(3))  # noqa: B023
                )

                if not strike.has_struck:
                    assert struck == body
                    break
                # asyncio takes any `OSError` for one of its own socket there, and goes on.
                is_swallowed = "_write_to_self" in strike.where and issubclass(error, OSError)
                assert isinstance(struck, error) or is_swallowed, strike.where
                for other in others:
                    assert other == b"another" or isinstance(other, ConnectionLost), strike.where
                await until(lambda: connection.pending_requests == 0)
                if ConnectionLost in map(type, others):
                    aborted.append(strike.where)
                else:
                    shared = cast(SharedSocket, connection._shared)
                    assert not shared._wake_is_due or connection.is_open, strike.where
            place += 1
    assert place > 20, "there are more points than that"
    # While frames leave the queue, and nowhere else: not in the system call, which takes longest.
    assert not [where for where in aborted if "extend" in where or "wait" in where], aborted


@pytest.mark.parametrize("error", [Interrupt, InterruptLikeASocket])
async def test_wherever_a_thread_is_interrupted_on_its_lane_nobody_gets_its_answer(
    error: type[BaseException],
) -> None:
    place = 0
    async with serving({ECHO: _echo}) as server:
        while True:
            async with _connected(server) as connection:
                side = connection.for_threads()
                lanes = connection._lanes
                assert lanes is not None
                lanes._open_for(threading.get_ident())
                await until(lambda: len(lanes) == 1)  # noqa: B023  # ended here
                lane = lanes._lanes.pop(threading.get_ident())

                def ask_on_lane(body: bytes) -> bytes:
                    lanes._lanes[threading.get_ident()] = lane  # noqa: B023
                    return _ask(side, body)  # noqa: B023

                strike = _StrikeAt(place, error)
                struck = await _on_thread(partial(ask_on_lane, b"struck"), strike)
                others = [await _on_thread(partial(ask_on_lane, b"%d" % n)) for n in range(3)]

                assert others == [b"0", b"1", b"2"], strike.where
                if not strike.has_struck:
                    assert struck == b"struck"
                    assert lane.requests == 4
                    break
                is_swallowed = "_write_to_self" in strike.where and issubclass(error, OSError)
                assert isinstance(struck, error) or is_swallowed, strike.where
                assert not lane.lock.locked(), strike.where
            await until(lambda: lane._socket.fileno() == -1, strike.where)  # noqa: B023
            place += 1
    assert place > 10, "there are more points than that"


async def test_a_thread_that_is_interrupted_does_not_silence_the_others() -> None:
    """It was about to have the loop woken for all who have left their frames to it."""
    async with serving({ECHO: _echo}) as server, _connected(server) as connection:
        side = connection.for_threads()
        shared = cast(SharedSocket, connection._shared)
        shared._belongs_to_loop = True  # as after a write that was cut short
        loop = shared._loop

        class Struck:
            def call_soon_threadsafe(self, *_: object) -> None:
                shared._loop = loop
                raise Interrupt

        shared._loop = cast(asyncio.AbstractEventLoop, Struck())

        struck = await _on_thread(lambda: _ask(side, b"one"))
        answer = await _on_thread(lambda: _ask(side, b"two"))

        assert isinstance(struck, Interrupt)
        assert answer == b"two"


@pytest.mark.parametrize("by", ["flush", "look"])
async def test_what_a_thread_leaves_while_the_loop_has_the_lock_is_written(by: str) -> None:
    """It does not wait for the loop, and nobody else is going to write."""
    told: list[bytes] = []

    def note(_: Connection, request: Command) -> None:
        told.append(bytes(request.body))

    async with serving({TOLD: note}) as server, _connected(server) as connection:
        side = connection.for_threads()
        shared = cast(SharedSocket, connection._shared)

        def tell_meanwhile() -> int:
            telling = threading.Thread(
                target=lambda: side.tell(_encoding(TOLD, b"meanwhile", one_way=True))
            )
            telling.start()
            telling.join(DEADLINE)
            return 0

        class Meanwhile:
            """In place of what the loop asks and does under the lock."""

            def flush(self) -> int:
                return tell_meanwhile()

            def get_write_buffer_size(self) -> int:
                shared._transport = transport
                return tell_meanwhile()

        transport = shared._transport
        if by == "flush":
            shared.flush(cast(Outgoing, Meanwhile()))
        else:
            shared._transport = cast(asyncio.Transport, Meanwhile())
            shared._look(0.001)

        await until(lambda: told == [b"meanwhile"])


class _AnsweringLast(PendingRequests):
    """Has just told a thread when that one gives up."""

    def add_thread(self, opaque: int, waiter: Waiter) -> None:
        self.waiter = waiter

    def give_up_thread(self, opaque: int) -> None:
        answer = Command.request(ECHO, opaque=opaque, body=b"in the last moment")
        self.waiter.settle(answer)


async def test_an_answer_that_comes_in_the_moment_when_the_time_is_up_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody is told that it did not come."""
    late: list[float] = []
    monkeypatch.setattr(Connection, "was_late_from_thread", lambda _, waited: late.append(waited))
    async with serving({}) as server, _connected(server) as connection:
        whole = connection.for_threads()
        pending = _AnsweringLast(asyncio.get_running_loop(), connection.remote, 10)
        side = BlockingSide(connection, whole._socket, None, pending, whole._opaques)

        answer = await _on_thread(lambda: _ask(side, b"", timeout=0.2))

        assert not isinstance(answer, RequestTimedOut)
        assert answer == b"in the last moment"
        assert late == []


class _HeldUp:
    """A thread that a signal handler holds up while it writes, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.was_let_go = False
        self._writes = threading.Event()
        send = sharedsocket._send

        def held_up(
            descriptor: socket.socket, pieces: Sequence[Bytes], sent: list[int]
        ) -> OSError | None:
            self._writes.set()
            # Not for ever: a loop that waits for this thread cannot let it go.
            self.was_let_go = self.let_go.wait(DEADLINE / 4)
            return send(descriptor, pieces, sent)

        monkeypatch.setattr(sharedsocket, "_send", held_up)

    async def until_it_writes(self) -> None:
        await until(self._writes.is_set)


async def test_the_loop_does_not_wait_for_a_thread_that_is_held_up_while_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving({ECHO: _echo}) as server, _connected(server) as connection:
        side = connection.for_threads()
        thread = _HeldUp(monkeypatch)
        asking = asyncio.ensure_future(_on_thread(lambda: _ask(side, b"thread")))
        await thread.until_it_writes()
        cast(SharedSocket, connection._shared)._look(0.001)

        own = asyncio.ensure_future(connection.request(ECHO, body=b"loop", timeout=DEADLINE))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        thread.let_go.set()
        answer = await own

        assert bytes(answer.body) == b"loop"
        assert await asking == b"thread"
        assert thread.was_let_go


async def test_what_the_loop_tells_is_not_overtaken_while_a_thread_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bytes] = []

    def note(_: Connection, request: Command) -> None:
        told.append(bytes(request.body))

    async with serving({ECHO: _echo, TOLD: note}) as server, _connected(server) as connection:
        side = connection.for_threads()
        thread = _HeldUp(monkeypatch)
        asking = asyncio.ensure_future(_on_thread(lambda: _ask(side, b"thread")))
        await thread.until_it_writes()

        for number in range(3):
            connection.notify(TOLD, body=b"loop %d" % number)
            connection.flush()
            tell = partial(side.tell, _encoding(TOLD, b"thread %d" % number, one_way=True))
            assert await _on_thread(tell) is None
        thread.let_go.set()

        assert await asking == b"thread"
        await until(lambda: len(told) == 6)
        assert told == [b"%s %d" % (who, n) for n in range(3) for who in (b"loop", b"thread")]


async def test_a_connection_ends_without_a_thread_that_is_held_up_while_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That thread lets go of the socket later."""
    async with serving({ECHO: _echo}) as server, _connected(server) as connection:
        side = connection.for_threads()
        shared = cast(SharedSocket, connection._shared)
        thread = _HeldUp(monkeypatch)
        asking = asyncio.ensure_future(_on_thread(lambda: _ask(side, b"thread")))
        await thread.until_it_writes()

        connection.abort()
        await connection.wait_closed()
        descriptor = shared._descriptor
        assert descriptor is not None  # it may be in use
        assert descriptor.fileno() >= 0
        thread.let_go.set()

        assert isinstance(await asking, ConnectionLost)
        assert descriptor.fileno() < 0
        assert thread.was_let_go


class _Crossing:
    """A lock; who takes it first is crossed by somebody."""

    def __init__(self, somebody: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._somebody = [somebody]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        has_it = self._lock.acquire(blocking, timeout)
        while self._somebody:
            self._somebody.pop()()
        return has_it

    def release(self) -> None:
        self._lock.release()


async def test_a_look_closes_the_socket_for_the_thread_that_it_has_kept_from_it() -> None:
    """That thread had the lock at the close, and the look has it when it comes to let go."""
    async with serving({ECHO: _echo}) as server, _connected(server) as connection:
        connection.for_threads()
        shared = cast(SharedSocket, connection._shared)
        with shared._lock:
            shared.close()
        descriptor = shared._descriptor
        assert descriptor is not None  # it may be in use
        shared._lock = _Crossing(shared._wake)  # type: ignore[assignment]

        shared._look(0.001)

        assert shared._descriptor is None
        assert descriptor.fileno() < 0
