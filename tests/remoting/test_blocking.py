"""Threads that send requests on blocking connections lent by a pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import orbitmq.remoting
from orbitmq.remoting.blocking import BlockingPool
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import (
    Address,
    ConnectionLost,
    RemotingError,
    RequestTimedOut,
    ServerSettings,
    TooManyRequests,
)
from orbitmq.remoting.tls import ClientTls, ServerTls
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import FrameReader
from tests.support.askingthreads import (
    ECHO,
    HOLD,
    Holding,
    Interrupt,
    StrikeAt,
    ask,
    background_loop,
    begin,
    echo,
    encoding,
    in_threads,
    pool_for,
)
from tests.support.remoting import DEADLINE, ManualClock, serving, until

TLS = Path(__file__).parents[1] / "data" / "tls"
REMOTING = str(Path(orbitmq.remoting.__file__).parent)


def _tls_server() -> ServerSettings:
    return ServerSettings(tls=ServerTls(certificate=TLS / "certificate.pem", key=TLS / "key.pem"))


@contextlib.contextmanager
def _closing(pool: BlockingPool) -> Iterator[BlockingPool]:
    try:
        yield pool
    finally:
        pool.close("closed here", is_abort=True)


@contextlib.contextmanager
def _peer(serve: Callable[[socket.socket], None]) -> Iterator[Address]:
    """A listener whose connections are handled by `serve`, each on a thread."""
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                accepted, _ = listening.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=handle, args=(accepted,), daemon=True))
            threads[-1].start()

    def handle(accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            accepted.settimeout(2 * DEADLINE)
            serve(accepted)

    listening = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield Address(*listening.getsockname())
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in (accepting, *threads):
            thread.join(DEADLINE)
            assert not thread.is_alive()


def _answering(
    answer: Callable[[Command, socket.socket], object],
) -> Callable[[socket.socket], None]:
    """Answers the first request of a connection, which opens it, and has `answer` do the rest."""

    def serve(accepted: socket.socket) -> None:
        reader, is_open = FrameReader(), False
        while data := accepted.recv(65536):
            for frame in reader.feed(data):
                command = decode_command(frame)
                if is_open:
                    answer(command, accepted)
                else:
                    accepted.sendall(encode_command(command.answer(0)))
                is_open = True

    return serve


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_each_thread_gets_its_own_answers(is_encrypted):
    tls = ClientTls(authority=TLS / "certificate.pem").context() if is_encrypted else None

    def work(pool, seed):
        chance = random.Random(seed)
        for _ in range(12):
            body = chance.randbytes(chance.choice([1, 300, 20_000, 150_000, 2_000_000]))
            assert ask(pool, ECHO, body) == body
        return seed

    async with serving({ECHO: echo}, _tls_server() if is_encrypted else None) as server:
        with _closing(pool_for(server, most=4, tls=tls)) as pool:
            done = await in_threads(*(partial(work, pool, seed) for seed in range(8)))

            assert done == list(range(8))
            assert 1 <= len(pool) <= 4


async def test_when_all_connections_are_in_use_a_thread_waits_within_its_timeout():
    holding = Holding()
    async with serving({HOLD: holding, ECHO: echo}) as server:
        with _closing(pool_for(server, most=2)) as pool:
            asking = begin(*(partial(ask, pool, HOLD, b"held") for _ in range(2)))
            await until(lambda: len(holding.held) == 2)

            (error,) = await in_threads(lambda: ask(pool, ECHO, timeout=0.05))
            waiting = begin(lambda: ask(pool, ECHO, b"waited"))
            holding.answer(0)

            assert await waiting == [b"waited"]
            assert isinstance(error, TooManyRequests)
            assert len(pool) == 2
            holding.answer(0)
            assert await asking == [b"held"] * 2


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of descriptors to be raised")
async def test_descriptors_above_those_of_select_are_used():
    clock = ManualClock()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken: list[int] = []
    try:
        while not taken or taken[-1] < 1100:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        async with serving({ECHO: echo}) as server:
            with _closing(pool_for(server, monotonic=clock.monotonic)) as pool:
                for _ in range(2):
                    assert await in_threads(lambda: ask(pool, ECHO, b"one")) == [b"one"]
                    clock.time += 5.0  # the next use looks whether the connection is fresh
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("limit", [0.05, 0.7])
async def test_a_late_answer_is_an_error_and_the_next_request_gets_its_own(is_encrypted, limit):
    holding = Holding()
    tls = ClientTls(authority=TLS / "certificate.pem").context() if is_encrypted else None
    settings = _tls_server() if is_encrypted else None
    async with serving({HOLD: holding, ECHO: echo}, settings) as server:
        with _closing(pool_for(server, most=1, tls=tls)) as pool:
            await in_threads(lambda: ask(pool, ECHO))

            (error,) = await in_threads(lambda: ask(pool, HOLD, timeout=limit))
            with contextlib.suppress(IndexError):
                holding.answer(0)
            (answer,) = await in_threads(lambda: ask(pool, ECHO, b"again"))

            assert isinstance(error, RequestTimedOut)
            assert (error.code, error.timeout) == (HOLD, limit)
            assert answer == b"again"


async def test_a_peer_that_does_not_read_is_given_up_in_time():
    is_over = threading.Event()
    with (
        _peer(_answering(lambda *_: is_over.wait(DEADLINE))) as address,
        _closing(pool_for(address)) as pool,
    ):
        (error,) = await in_threads(lambda: ask(pool, ECHO, bytes(16_000_000), timeout=0.6))

        assert isinstance(error, RequestTimedOut)
        is_over.set()


async def test_answers_to_other_requests_are_passed_over():
    def answer(request, accepted):
        other = Command.request(ECHO, opaque=request.opaque + 7).answer(0, body=b"another's")
        asked_by_peer = Command.request(ECHO, opaque=request.opaque)
        own = request.answer(0, body=b"own")
        accepted.sendall(b"".join(map(encode_command, (other, asked_by_peer, own))))

    with _peer(_answering(answer)) as address, _closing(pool_for(address)) as pool:
        assert await in_threads(lambda: ask(pool, ECHO)) == [b"own"]


async def test_threads_that_wait_are_told_when_the_pool_is_closed():
    holding = Holding()
    async with serving({HOLD: holding, ECHO: echo}) as server:
        pool = pool_for(server, most=3)
        asking = begin(*(partial(ask, pool, HOLD) for _ in range(3)))
        await until(lambda: len(holding.held) == 3)
        waiting = begin(lambda: pool.request(ECHO, encoding(ECHO), DEADLINE))

        pool.close("for a test", is_abort=True)

        outcomes = await asking
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 3
        assert all("for a test" in str(outcome) for outcome in outcomes)
        assert await waiting == [None]
        assert pool.request(ECHO, encoding(ECHO), DEADLINE) is None
        assert len(pool) == 0


async def test_a_peer_that_dies_among_requests_leaves_no_thread_waiting():
    def work(pool, seed):
        chance = random.Random(seed)
        while True:
            body = chance.randbytes(chance.choice([10, 5_000, 100_000]))
            try:
                answer = pool.request(ECHO, encoding(ECHO, body), DEADLINE)
            except RemotingError as error:
                return error
            if answer is None:  # the peer died while a connection was opened
                return None
            assert bytes(answer.body) == body

    server = Server(Dispatcher({ECHO: echo}), ServerSettings())
    await server.start()
    with _closing(pool_for(server, most=8)) as pool:
        asking = begin(*(partial(work, pool, seed) for seed in range(8)))
        await until(lambda: sum(each.bytes_in for each in server.connections) > 300_000)

        while not asking.done():
            for peer in tuple(server.connections):
                peer.abort("killed")
            await asyncio.sleep(0)

        assert all(each is None or isinstance(each, ConnectionLost) for each in await asking)
    await server.stop(grace=1.0)


async def test_a_one_way_request_of_a_thread_comes_before_its_next_request():
    bodies: list[bytes] = []

    def note(connection, request):
        bodies.append(bytes(request.body))
        return request.answer(0)

    async with serving({ECHO: note}) as server:
        with _closing(pool_for(server)) as pool:

            def work():
                for number in range(20):
                    assert pool.notify(encoding(ECHO, b"%d" % number, one_way=True), DEADLINE)
                ask(pool, ECHO, b"after")

            assert await in_threads(work) == [None]
            assert bodies == [*(b"%d" % number for number in range(20)), b"after"]


async def test_a_connection_that_the_peer_closed_in_a_pause_is_no_failure():
    clock = ManualClock()
    async with serving({ECHO: echo}) as server:
        with _closing(pool_for(server, monotonic=clock.monotonic)) as pool:
            await in_threads(lambda: ask(pool, ECHO))
            (connection,) = server.connections
            connection.close()
            await connection.wait_closed()
            clock.time += 2.0

            assert await in_threads(lambda: ask(pool, ECHO, b"next")) == [b"next"]


async def test_connections_that_are_not_used_are_closed():
    clock = ManualClock()
    holding = Holding()
    async with serving({HOLD: holding, ECHO: echo}) as server:
        with _closing(pool_for(server, monotonic=clock.monotonic)) as pool:
            asking = begin(*(partial(ask, pool, HOLD) for _ in range(3)))
            await until(lambda: len(holding.held) == 3)
            for _ in range(3):
                holding.answer(0)
            await asking
            clock.time += 15.0
            await in_threads(lambda: ask(pool, ECHO))
            clock.time += 10.0

            pool.sweep(20.0)

            assert len(pool) == 1
            await until(lambda: len(server.connections) == 1)


def _drop(accepted: socket.socket) -> None:
    accepted.shutdown(socket.SHUT_RDWR)


def _say_nothing(accepted: socket.socket) -> None:
    while accepted.recv(65536):
        pass


@pytest.mark.parametrize("serve", [_drop, _say_nothing])
async def test_of_a_peer_that_serves_no_further_connection_nothing_is_asked(serve):
    clock = ManualClock()
    with _peer(serve) as address, _closing(pool_for(address, monotonic=clock.monotonic)) as pool:
        asking = begin(lambda: pool.request(ECHO, encoding(ECHO), DEADLINE))
        while not asking.done():
            clock.time += 1.0
            await asyncio.sleep(0.02)

        assert await asking == [None]
        assert pool.request(ECHO, encoding(ECHO), DEADLINE) is None


async def test_of_a_peer_that_is_not_there_nothing_is_asked_for_a_while():
    clock = ManualClock()
    with _closing(pool_for("127.0.0.1:1", monotonic=clock.monotonic)) as pool:
        assert await in_threads(lambda: pool.request(ECHO, encoding(ECHO), 5.0)) == [None]
        async with serving({ECHO: echo}) as server:
            pool.address = Address("127.0.0.1", server.address.port)
            assert pool.request(ECHO, encoding(ECHO), 5.0) is None
            clock.time += 11.0

            assert await in_threads(lambda: ask(pool, ECHO, b"now")) == [b"now"]


def test_a_signal_handler_may_interrupt_a_wait_with_any_error():
    class Stopped(TimeoutError):
        """What signal handlers of applications raise; also an `OSError`."""

    def stop(*_):
        raise Stopped

    holding = Holding()
    with _handling(stop), background_loop() as run:
        context = serving({HOLD: holding, ECHO: echo})
        server = run(context.__aenter__())
        with _closing(pool_for(server, most=1)) as pool:
            striking = _strike_when(lambda: len(holding.held) == 1)
            with pytest.raises(Stopped):
                ask(pool, HOLD)
            striking.join(DEADLINE)

            assert ask(pool, ECHO, b"next") == b"next"
        run(context.__aexit__(None, None, None))


@contextlib.contextmanager
def _handling(handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _strike_when(condition: Callable[[], bool]) -> threading.Thread:
    """Send this process a signal as soon as the condition holds."""

    def strike() -> None:
        asyncio.run(until(condition))
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_new", [False, True])
async def test_wherever_a_thread_is_interrupted_the_next_is_served(is_new):
    """One connection is allowed: it is neither lost for good nor lent with an open answer."""
    place = 0
    async with serving({ECHO: echo}) as server:
        while True:
            with _closing(pool_for(server, most=1)) as pool:
                if not is_new:
                    await in_threads(partial(ask, pool, ECHO))
                strike = StrikeAt(place, REMOTING)

                (struck,) = await in_threads(
                    partial(strike.during, partial(ask, pool, ECHO, b"struck"))
                )
                others = await in_threads(partial(ask, pool, ECHO, b"another"))

                assert others == [b"another"], strike.where
                if not strike.has_struck:
                    assert struck == b"struck"
                    break
                assert struck is Interrupt, strike.where
            place += 1
    assert place > 10, "there are more points than that"
