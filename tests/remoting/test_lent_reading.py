"""What lending the reading to threads must not change: order, back-pressure, whom a signal holds
up, and what is left when all is over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import select
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import pytest
import uvloop

from orbitmq.remoting.blocking import BlockingSide, SharedReading, Waiter
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.outgoing import call_on_loop
from orbitmq.remoting.settings import ConnectionLost, ConnectionSettings
from orbitmq.wire.command import Command, encode_command
from orbitmq.wire.frame import Frame, FrameReader
from tests.support.askingthreads import (
    ECHO,
    HOLD,
    LENT_FOR_LONG,
    QUESTION,
    BackgroundLoop,
    Holding,
    ask,
    begin,
    echo,
    encoding,
    in_threads,
    lend,
    lent,
    raw_peer,
    until_threads_read,
)
from tests.support.remoting import DEADLINE, serving, until


def _question(body: bytes, opaque: int = 1) -> Command:
    return Command.request(QUESTION, opaque=opaque, body=body, one_way=True)


class _Asked:
    """Notes what the peer asks, in order."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, _: Connection, request: Command) -> None:
        self.bodies.append(bytes(request.body))


# Signals


@contextlib.contextmanager
def _handling(handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def _asked_by_this_thread(
    make: Callable[[], asyncio.AbstractEventLoop], holding: Holding
) -> Iterator[tuple[BackgroundLoop, Connection, BlockingSide, SharedReading]]:
    loop = BackgroundLoop(make)
    stack = contextlib.AsyncExitStack()

    async def start() -> tuple[Connection, BlockingSide, SharedReading]:
        server = await stack.enter_async_context(serving({ECHO: echo, HOLD: holding}))
        return await stack.enter_async_context(lent(server, settings=ConnectionSettings()))

    try:
        yield loop, *loop.run(start())
        loop.run(stack.aclose())
    finally:
        loop.stop()


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_signal_handler_on_the_thread_that_polls_holds_up_nobody(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Not itself, if it asks, nor other threads, nor the loop, however long it takes."""
    holding = Holding()
    answers: list[object] = []
    with _asked_by_this_thread(make, holding) as (loop, connection, side, reading):

        def handle() -> None:
            answers.append(ask(side, ECHO, b"handler"))
            other = threading.Thread(target=lambda: answers.append(ask(side, ECHO, b"other")))
            other.start()
            other.join(DEADLINE)
            answer = loop.run(connection.request(ECHO, body=b"loop", timeout=DEADLINE))
            answers.append(bytes(answer.body))
            loop.run(let_go())

        async def let_go() -> None:
            holding.answer(0)

        async def strike() -> None:
            await until(lambda: bool(holding.held), "the question")
            # The loop may have taken the reading back before the thread came to poll: that waits
            # for an answer that never comes then, and is woken when the reading is lent anew.
            async with asyncio.timeout(DEADLINE):
                while not reading._pollers:
                    await lend(side, reading)
                    await until(lambda: bool(reading._pollers) or not reading.is_lent)
            os.kill(os.getpid(), signal.SIGUSR1)

        with _handling(handle):
            striking = threading.Thread(target=lambda: loop.run(strike()))
            striking.start()
            held = ask(side, HOLD, b"held", 2 * DEADLINE)
            striking.join(DEADLINE)

        assert held == b"held"
        assert answers == [b"handler", b"other", b"loop"]
        assert ask(side, ECHO, b"after") == b"after"


# Order


async def test_what_a_thread_passed_on_is_handled_before_what_came_later() -> None:
    """The loop takes the reading back in the step in which it would have been told."""
    asked = _Asked()

    def answer(request: Command) -> bytes:
        first = encode_command(_question(b"first")) if request.code == HOLD else b""
        return first + encode_command(request.answer(0, body=request.body))

    with raw_peer(answer) as peer:
        async with lent(peer, Dispatcher({QUESTION: asked})) as (connection, side, reading):
            asking = threading.Thread(target=lambda: ask(side, HOLD))
            asking.start()
            asking.join(DEADLINE)  # the loop does nothing meanwhile
            peer.send(_question(b"second"))
            connection.submit(ECHO, None, lambda _: None)
            nested = list(asked.bodies)

            await until(lambda: len(asked.bodies) == 2)

            assert nested == [], "nothing is handled inside of a call that sends"
            assert asked.bodies == [b"first", b"second"]
            assert reading._reads > 0


async def test_the_peer_is_served_in_its_order_whoever_reads() -> None:
    asked = _Asked()
    stopped = asyncio.Event()
    chance = random.Random(11)

    def work(side: BlockingSide, seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(80):
            body = b"x" * mine.choice([1, 200, 30_000])
            assert ask(side, ECHO, body) == body

    async def ask_too(connection: Connection, reading: SharedReading) -> None:
        while not stopped.is_set():
            await connection.request(ECHO, timeout=DEADLINE)
            await until_threads_read(reading, stopped)

    async def tell(peer: Connection) -> int:
        count = 0
        while not stopped.is_set():
            for _ in range(chance.randrange(1, 4)):
                peer.notify(QUESTION, body=b"%d" % count)
                count += 1
            await asyncio.sleep(chance.choice([0, 0.001]))
        return count

    async with (
        serving({ECHO: echo}) as server,
        lent(server, Dispatcher({QUESTION: asked}), ConnectionSettings()) as (
            connection,
            side,
            reading,
        ),
    ):
        (peer,) = server.connections
        others = asyncio.gather(tell(peer), ask_too(connection, reading))

        done = await in_threads(*(partial(work, side, seed) for seed in range(3)))
        stopped.set()
        count, _ = await others
        await until(lambda: len(asked.bodies) == count)

        assert done == [None] * 3
        assert asked.bodies == [b"%d" % number for number in range(count)]
        assert reading._reads > 0


async def test_the_end_of_one_lending_that_was_asked_for_twice_does_not_end_the_next() -> None:
    """It would not wake who polls there, who would find nothing: the loop reads his answer."""
    asked = _Asked()
    loop = asyncio.get_running_loop()
    async with (
        serving({ECHO: echo}) as server,
        lent(server, Dispatcher({QUESTION: asked})) as (_, side, reading),
    ):
        polling = Waiter()

        def lend_anew() -> None:
            """What an answer to a thread does, then a thread beside one that polls."""
            reading._lend()
            reading._pollers.add(polling)
            reading._received.append(encode_command(_question(b"second")))
            reading._read()

        reading._received.append(encode_command(_question(b"first")))
        reading.take_back()
        loop.call_soon(lend_anew)
        reading.take_back()
        await until(lambda: len(asked.bodies) == 2 and not reading.is_lent)

        bell, _, _ = select.select([reading._bell], [], [], 0)
        reading.leave(polling)
        assert bell == [reading._bell]
        assert asked.bodies == [b"first", b"second"]
        assert await in_threads(lambda: ask(side, ECHO, b"after")) == [b"after"]


# Back-pressure


async def test_a_thread_that_waits_does_not_read_for_a_loop_that_is_held_up() -> None:
    count, size = 300, 60_000
    asked, holding = Holding(), Holding()
    settings = dataclasses.replace(LENT_FOR_LONG, open_requests=4)
    async with (
        serving({ECHO: echo, HOLD: holding}) as server,
        lent(server, Dispatcher({QUESTION: asked}), settings) as (connection, side, reading),
    ):
        (peer,) = server.connections
        waiting = begin(partial(ask, side, HOLD, b"held", timeout=100 * DEADLINE))
        await until(lambda: bool(holding.held and reading._pollers))
        served: list[object] = []

        for number in range(count):
            body = b"%06d" % number + b"x" * size
            peer.submit(QUESTION, None, served.append, body=body, timeout=100 * DEADLINE)
        await until(lambda: connection._is_held_up and not reading.is_lent, "back-pressure")

        assert connection.bytes_in < 2_000_000
        assert sum(len(frame.body) for frame in connection._backlog) < 500_000
        order: list[int] = []
        while len(order) < count:
            await until(lambda: bool(asked.held))
            _, request = asked.held.pop(0)
            order.append(int(bytes(request.body[:6])))
            connection.reply(request, request.answer(0))
        await until(lambda: len(served) == count)
        assert order == list(range(count))
        holding.answer(0)
        assert await waiting == [b"held"]


async def test_threads_read_little_for_a_loop_that_is_busy() -> None:
    asked = _Asked()

    def answer(request: Command) -> bytes:
        return encode_command(request.answer(0, body=request.body)) if request.code == ECHO else b""

    with raw_peer(answer) as peer:
        async with lent(peer, Dispatcher({QUESTION: asked})) as (connection, side, reading):
            before = connection.bytes_in
            waiting = begin(partial(ask, side, HOLD, timeout=100 * DEADLINE))
            await until(lambda: bool(reading._pollers))
            bodies = [b"%06d" % number + b"x" * 60_000 for number in range(100)]
            sending = threading.Thread(
                target=lambda: peer.send(*map(_question, bodies)), daemon=True
            )

            sending.start()
            end = asyncio.get_running_loop().time() + DEADLINE
            pause = threading.Event()
            while not reading._passed and asyncio.get_running_loop().time() < end:
                pause.wait(0.001)  # the loop does nothing meanwhile
            is_stopped, read = not reading._may_read, connection.bytes_in - before

            assert is_stopped
            assert 60_000 < read < 300_000
            await until(lambda: len(asked.bodies) == len(bodies))
            assert asked.bodies == bodies
            sending.join(DEADLINE)
            connection.abort()
            assert [type(outcome) for outcome in await waiting] == [ConnectionLost]


# The end


class _StoppedReader:
    """In place of a reader: stops in the middle until it is let go."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self.is_in = threading.Event()
        self.goes_on = threading.Event()

    def feed(self, data: bytes) -> list[Frame]:
        self._reader.feed(data[:20])
        self.is_in.set()
        assert self.goes_on.wait(DEADLINE)
        return self._reader.feed(data[20:])

    def abandon(self) -> None:
        self._reader.abandon()


async def test_a_frame_is_not_abandoned_under_a_thread_that_cuts_it() -> None:
    async with (
        serving({ECHO: echo}) as server,
        lent(server) as (connection, side, reading),
    ):
        stopped = _StoppedReader(connection._reader)
        reading._reader = stopped  # type: ignore[assignment]  # all that is used of it
        asking = begin(partial(ask, side, ECHO, b"x" * 5_000))
        await until(stopped.is_in.is_set)

        connection.abort("for a test")
        await asyncio.wait_for(connection.wait_closed(), DEADLINE)
        kept = connection._reader.unfinished
        stopped.goes_on.set()

        (outcome,) = await asking
        assert kept == 20
        assert isinstance(outcome, ConnectionLost)
        await until(lambda: connection._reader.unfinished == 0)


async def test_nothing_looks_after_a_connection_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after a thread was interrupted, and left an answer that the loop found at a look."""
    looks: list[int] = []
    look = SharedReading._look

    def counted(self: SharedReading, *arguments: int) -> None:
        looks.append(1)
        look(self, *arguments)

    monkeypatch.setattr(SharedReading, "_look", counted)
    settings = ConnectionSettings(reading_look=0.02)
    async with (
        serving({ECHO: echo}) as server,
        lent(server, settings=settings) as (connection, _, reading),
    ):
        waiter = Waiter()
        connection._pending.add_thread(77, waiter)
        reading._received.append(encode_command(Command.request(ECHO, opaque=77).answer(0)))
        await until(lambda: waiter.outcome is not None, "the answer, by the loop")
        await until(lambda: not reading.is_lent or reading._timer is not None)

        connection.abort("for a test")
        await asyncio.wait_for(connection.wait_closed(), DEADLINE)
        reading.take_back()
        count = len(looks)
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(4 * settings.reading_look, later.set)
        async with asyncio.timeout(DEADLINE):
            await later.wait()

        assert len(looks) == count
        assert not reading.is_lent
        assert reading._descriptor.fileno() == reading._bell.fileno() == -1


async def test_the_last_who_polls_closes_the_descriptors() -> None:
    """Also if the loop was asked to read again after the end."""
    async with (
        serving({ECHO: echo}) as server,
        lent(server) as (connection, _, reading),
    ):
        polling = Waiter()
        reading._pollers.add(polling)
        connection.abort("for a test")
        await asyncio.wait_for(connection.wait_closed(), DEADLINE)
        reading.take_back()
        is_open = reading._descriptor.fileno() != -1

        reading.leave(polling)

        assert is_open
        assert not reading._lock.locked()
        assert {reading._descriptor.fileno(), reading._ringer.fileno()} == {-1}


async def test_the_last_who_polls_may_leave_in_the_moment_of_the_end() -> None:
    async with (
        serving({ECHO: echo}) as server,
        lent(server) as (connection, _, reading),
    ):

        class Leaving(set[Waiter]):
            """Has left when it has just been seen."""

            def __len__(self) -> int:
                count = super().__len__()
                if count:
                    reading.leave(self.pop())
                return count

        reading._pollers = Leaving([Waiter()])

        connection.abort("for a test")
        async with asyncio.timeout(DEADLINE):
            await connection.wait_closed()

        assert {reading._descriptor.fileno(), reading._ringer.fileno()} == {-1}


async def test_who_comes_to_poll_in_the_moment_of_the_end_keeps_the_descriptors() -> None:
    """Else he polled what another one may have opened since."""
    async with (
        serving({ECHO: echo}) as server,
        lent(server) as (_, _, reading),
    ):
        leaving, coming = Waiter(), Waiter()

        class Coming(set[Waiter]):
            """Has just been found empty when somebody comes, and then the end."""

            def __len__(self) -> int:
                count = super().__len__()
                if not count and not reading._is_closed:
                    self.add(coming)
                    reading.close()
                return count

        reading._pollers = Coming([leaving])

        reading.leave(leaving)
        is_open = reading._descriptor.fileno() != -1
        reading.leave(coming)

        assert is_open
        assert {reading._descriptor.fileno(), reading._ringer.fileno()} == {-1}


class _FailingOwner(Dispatcher):
    """Cannot take the second question."""

    def request_received(self, connection: Connection, request: Command) -> None:
        if bytes(request.body) == b"second":
            raise LookupError("for a test")
        super().request_received(connection, request)


@contextlib.asynccontextmanager
async def _failures() -> AsyncIterator[list[object]]:
    """What the loop was told of meanwhile."""
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context.get("exception")))
    try:
        yield failures
    finally:
        loop.set_exception_handler(None)


async def test_frames_that_cannot_be_served_end_the_connection_as_if_the_loop_had_read() -> None:
    asked = _Asked()

    def answer(request: Command) -> bytes:
        questions = [_question(each) for each in (b"first", b"second", b"third")]
        before = b"".join(map(encode_command, questions)) if request.code == HOLD else b""
        return before + encode_command(request.answer(0, body=request.body))

    with raw_peer(answer) as peer:
        async with (
            _failures() as failures,
            lent(peer, _FailingOwner({QUESTION: asked})) as (connection, side, _),
        ):
            await in_threads(lambda: ask(side, HOLD))
            async with asyncio.timeout(DEADLINE):
                await connection.wait_closed()

            assert [type(failure) for failure in failures] == [LookupError]
            assert asked.bodies == [b"first"]


async def test_what_threads_leave_to_a_connection_that_was_closed_is_dropped() -> None:
    asked = _Asked()
    async with (
        serving({ECHO: echo}) as server,
        lent(server, Dispatcher({QUESTION: asked})) as (connection, _, reading),
    ):
        reading._received.append(encode_command(_question(b"late")))
        reading.take_back()
        connection.close("for a test")

        async with asyncio.timeout(DEADLINE):
            await connection.wait_closed()

        assert asked.bodies == []
        assert not connection._backlog


# Limits


@pytest.mark.parametrize("patience", [25 * 86_400.0, float("inf")])
@pytest.mark.parametrize("is_lent", [True, False])
async def test_a_thread_may_wait_as_long_as_it_likes(patience: float, is_lent: bool) -> None:
    holding = Holding()
    async with (
        serving({ECHO: echo, HOLD: holding}) as server,
        lent(server) as (_, side, reading),
    ):
        if not is_lent:
            reading.take_back()

        asking = begin(partial(ask, side, HOLD, b"long", timeout=patience))
        await until(lambda: bool(holding.held))
        holding.answer(0)

        assert await asking == [b"long"]


async def test_time_spent_on_encoding_and_writing_counts_when_the_loop_reads() -> None:
    now = 100.0

    def encode(opaque: int) -> list[bytes]:
        nonlocal now
        now += 1000.0
        return [b"".join(encoding(HOLD)(opaque))]

    holding = Holding()
    async with serving({ECHO: echo, HOLD: holding}) as server, lent(server) as (_, whole, _):
        side = BlockingSide(
            whole.connection,
            whole._socket,
            None,
            whole._pending,
            whole._opaques,
            monotonic=lambda: now,
        )

        (outcome,) = await in_threads(lambda: side.ask(HOLD, encode, 999.0))

        assert "within 999 s" in str(outcome)


def test_an_error_that_is_not_of_a_closed_loop_is_not_swallowed() -> None:
    """What interrupts a thread can have any type."""

    class Interrupted(RuntimeError):
        pass

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *_: object, **__: object) -> asyncio.Handle:
            raise Interrupted

    loop = Loop()
    try:
        with pytest.raises(Interrupted):
            call_on_loop(loop, lambda: None)
    finally:
        loop.close()
    call_on_loop(loop, lambda: None)


def test_a_waiter_may_be_woken_more_often_than_it_sleeps() -> None:
    waiter = Waiter()

    for _ in range(3):
        waiter.wake()

    for _ in range(4):
        waiter.sleep(0.0)
    assert waiter.outcome is None
