"""Threads that ask at the same time get sockets of their own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest

from orbitmq.errors import SettingError
from orbitmq.remoting import blocking as lanes_module
from orbitmq.remoting.blocking import BlockingSide, Lane, Lanes
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Result
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import (
    ConnectionLost,
    ConnectionSettings,
    RequestTimedOut,
    ServerSettings,
)
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import FrameReader
from tests.support.askingthreads import (
    ECHO,
    HOLD,
    BackgroundLoop,
    Holding,
    ask,
    begin,
    echo,
    encoding,
    in_threads,
)
from tests.support.remoting import DEADLINE, serving, until

#: However slow the machine is, no lane counts as unused.
KEPT = ConnectionSettings(lane_idle=100 * DEADLINE)
TOLD = 12


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no lane counts as one that may have been closed."""
    monkeypatch.setattr(lanes_module, "_FRESH", 100 * DEADLINE)


@contextlib.asynccontextmanager
async def _opened(
    server: Server, settings: ConnectionSettings = KEPT
) -> AsyncIterator[tuple[BlockingSide, Lanes]]:
    connection = await connect(server.address, settings=settings)
    side = connection.for_threads()
    lanes = connection._lanes
    assert lanes is not None
    try:
        yield side, lanes
    finally:
        connection.abort()
        async with asyncio.timeout(DEADLINE):
            await connection.wait_closed()


class _Worker:
    """A thread that stays, and its lane."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.ident = self._pool.submit(threading.get_ident).result(DEADLINE)

    async def lane(self, lanes: Lanes) -> Lane:
        lanes._open_for(self.ident)
        await until(lambda: self.ident in lanes._lanes, "a lane")
        return lanes._lanes[self.ident]

    def begin(self, work: Callable[[], bytes]) -> Future[bytes]:
        return self._pool.submit(work)

    async def run(self, work: Callable[[], bytes]) -> bytes:
        async with asyncio.timeout(DEADLINE):
            return await asyncio.wrap_future(self.begin(work))

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def worker() -> Iterator[_Worker]:
    made = _Worker()
    yield made
    made.end()


class _NoSockets:
    """The module `socket` of a process that has used up its descriptors."""

    SOCK_STREAM = socket.SOCK_STREAM

    @staticmethod
    def socket(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")


def _closed(lane: Lane) -> bool:
    return lane._socket.fileno() == -1


async def test_threads_that_keep_meeting_get_lanes_and_their_own_answers() -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        stop = threading.Event()

        def work(place: int) -> bool:
            number = 0
            while not stop.is_set():
                number += 1
                body = b"%d of %d" % (number, place)
                assert ask(side, ECHO, body) == body
            return True

        asking = begin(*(partial(work, place) for place in range(4)))
        await until(lambda: sum(bool(lane.requests) for lane in lanes._lanes.values()) >= 2)
        connections = len(server.connections)
        stop.set()

        assert await asking == [True] * 4
        assert connections >= 3


async def test_a_thread_that_asks_alone_gets_none() -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        (answers,) = await in_threads(lambda: [ask(side, ECHO, b"%d" % n) for n in range(100)])

        assert answers == [b"%d" % n for n in range(100)]
        assert len(lanes) == 0
        assert len(server.connections) == 1


async def test_there_are_no_more_lanes_than_the_settings_say() -> None:
    settings = ConnectionSettings(lanes=1, lane_idle=100 * DEADLINE)
    holding = Holding()
    async with serving({HOLD: holding}) as server, _opened(server, settings) as (side, lanes):
        held = begin(partial(ask, side, HOLD, b"first"))
        await until(lambda: len(holding.held) == 1)
        lanes._open_for(threading.get_ident())
        await until(lambda: len(lanes) == 1)
        meetings = begin(*(partial(ask, side, HOLD, b"%d" % place) for place in range(40)))
        await until(lambda: len(holding.held) == 41)
        most = len(lanes)
        while holding.held:
            holding.answer(0)

        await asyncio.gather(held, meetings)
        assert most == 1


async def test_a_thread_that_has_ended_leaves_its_lane_to_the_next() -> None:
    settings = ConnectionSettings(lanes=1, lane_idle=100 * DEADLINE)
    async with serving({ECHO: echo}) as server, _opened(server, settings) as (side, lanes):
        first, second = _Worker(), _Worker()
        try:
            lane = await first.lane(lanes)
            await first.run(partial(ask, side, ECHO))
            lanes._open_for(second.ident)
            while_it_lives = dict(lanes._lanes)
            first.end()

            assert await second.lane(lanes) is lane
            await second.run(partial(ask, side, ECHO))

            assert while_it_lives == {first.ident: lane}
            assert lane.requests == 2
            assert len(lanes) == 1
        finally:
            first.end()
            second.end()


async def test_without_lanes_all_share_one_socket() -> None:
    async with serving({ECHO: echo}) as server:
        connection = await connect(server.address, settings=ConnectionSettings(lanes=0))
        side = connection.for_threads()

        outcomes = await in_threads(
            *(partial(ask, side, ECHO, b"%d" % number) for number in range(40))
        )

        assert outcomes == [b"%d" % number for number in range(40)]
        assert connection._lanes is None
        assert len(server.connections) == 1
        connection.abort()
        await connection.wait_closed()


async def test_an_answer_may_come_in_pieces_and_be_long(worker: _Worker) -> None:
    long = bytes(range(256)) * 200

    def doubled(_: Connection, request: Command) -> Result:
        return request.answer(0, body=bytes(request.body) * 4)

    async with serving({ECHO: doubled}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)

        answers = [await worker.run(partial(ask, side, ECHO, body)) for body in (long, b"short")]

        assert answers == [long * 4, b"short" * 4]
        assert lane.requests == 2


async def test_a_long_frame_takes_the_shared_socket(worker: _Worker) -> None:
    body = b"x" * 100_000
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)

        answer = await worker.run(partial(ask, side, ECHO, body))

        assert answer == body
        assert lane.requests == 0


async def test_what_is_asked_does_not_overtake_what_the_thread_has_told(worker: _Worker) -> None:
    came: list[tuple[int, Connection]] = []

    def note(connection: Connection, request: Command) -> Result:
        came.append((request.code, connection))
        return request.answer(0, body=request.body)

    async with serving({ECHO: note, TOLD: note}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)

        def tell_and_ask() -> bytes:
            side.tell(encoding(TOLD, one_way=True))
            ask(side, ECHO, b"behind it")
            return ask(side, ECHO, b"on the lane")

        await worker.run(tell_and_ask)

        assert [code for code, _ in came] == [TOLD, ECHO, ECHO]
        assert came[0][1] is came[1][1]
        assert came[2][1] is not came[0][1]
        assert lane.requests == 1


async def test_who_waited_in_vain_leaves_the_lane_and_goes_on(worker: _Worker) -> None:
    holding = Holding()
    async with serving({ECHO: echo, HOLD: holding}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)

        with pytest.raises(RequestTimedOut):
            await worker.run(partial(ask, side, HOLD, b"late", 0.05))
        await until(lambda: len(lanes) == 0, "the end of the lane")
        await until(lambda: len(holding.held) == 1)
        holding.answer(0)

        assert _closed(lane)
        assert await worker.run(partial(ask, side, ECHO, b"next")) == b"next"


async def test_a_wait_is_longer_than_one_in_the_kernel(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "_PATIENCE", 0.01)
    holding = Holding()
    async with serving({HOLD: holding}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)
        waits: list[float] = []
        look_at = lane._look_at

        def noting(waiting: Lane, error: OSError, is_done: bool) -> None:
            waits.append(waiting._patience)
            look_at(error, is_done)

        monkeypatch.setattr(Lane, "_look_at", noting)
        asking = worker.begin(partial(ask, side, HOLD, b"patience"))
        await until(lambda: len(waits) >= 3, "several waits")

        holding.answer(0)

        assert await asyncio.wrap_future(asking) == b"patience"
        assert set(waits) == {0.01}


@pytest.mark.parametrize("is_ours", [True, False])
async def test_who_waits_on_a_lane_is_told_of_the_end(worker: _Worker, is_ours: bool) -> None:
    holding = Holding()
    async with serving({HOLD: holding}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)
        asking = worker.begin(partial(ask, side, HOLD))
        await until(lambda: len(holding.held) == 1)

        if is_ours:
            side.connection.abort("enough")
        else:
            for peer in tuple(server.connections):
                peer.abort("killed")

        with pytest.raises(ConnectionLost) as lost:
            await asyncio.wait_for(asyncio.wrap_future(asking), DEADLINE)
        await until(lambda: _closed(lane), "the end of the lane")
        assert len(lanes) == 0
        if is_ours:
            assert "enough" in str(lost.value)


@pytest.mark.parametrize("is_told_late", [True, False])
async def test_a_lane_on_which_the_last_answer_came_is_closed_with_the_connection(
    worker: _Worker, is_told_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is there, and its thread has not looked yet whether the connection has ended."""
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)
        is_answered, may_go_on = threading.Event(), threading.Event()
        ask_on_lane = Lane.ask

        def pausing(*given: Any) -> Command | None:
            if is_told_late:
                answer = ask_on_lane(*given)
            with lane.lock if not is_told_late else contextlib.nullcontext():
                is_answered.set()
                may_go_on.wait(DEADLINE)
            return answer if is_told_late else ask_on_lane(*given)

        monkeypatch.setattr(Lane, "ask", pausing)
        asking = worker.begin(partial(ask, side, ECHO, b"last"))
        await until(is_answered.is_set)

        side.connection.abort("enough")
        await side.connection.wait_closed()
        may_go_on.set()

        with contextlib.suppress(ConnectionLost):
            assert await asyncio.wait_for(asyncio.wrap_future(asking), DEADLINE) == b"last"
        await until(lambda: _closed(lane), "the end of the lane")


async def test_a_lane_that_is_lost_alone_leaves_the_connection(worker: _Worker) -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        await in_threads(partial(ask, side, ECHO))
        before = set(server.connections)
        lane = await worker.lane(lanes)
        await worker.run(partial(ask, side, ECHO))
        for peer in set(server.connections) - before:
            peer.abort("killed")
        await until(lambda: len(server.connections) == 1)

        with pytest.raises(ConnectionLost):
            await worker.run(partial(ask, side, ECHO, b"lost"))

        assert await worker.run(partial(ask, side, ECHO, b"next")) == b"next"
        assert side.is_open
        await until(lambda: _closed(lane))


async def test_lanes_that_nobody_uses_are_closed(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "_LOOK", 0.02)
    settings = ConnectionSettings(lane_idle=0.02)
    async with serving({ECHO: echo}) as server, _opened(server, settings) as (side, lanes):
        await in_threads(partial(ask, side, ECHO))
        lanes._open_for(worker.ident)
        assert lanes._opening is not None
        await lanes._opening

        await until(lambda: len(server.connections) == 1 and not len(lanes), "its end")

        await until(lambda: lanes._timer is None)
        assert await worker.run(partial(ask, side, ECHO, b"next")) == b"next"


async def test_a_lane_that_the_peer_closed_in_a_pause_is_no_failure(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "_FRESH", -1.0)
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        await in_threads(partial(ask, side, ECHO))
        before = set(server.connections)
        lane = await worker.lane(lanes)
        await worker.run(partial(ask, side, ECHO))
        for peer in set(server.connections) - before:
            peer.close("idle")
        await until(lambda: len(server.connections) == 1)

        answer = await worker.run(partial(ask, side, ECHO, b"next"))

        assert answer == b"next"
        assert lane.requests == 1
        await until(lambda: _closed(lane), "its end")


async def test_a_look_leaves_those_that_are_used(worker: _Worker) -> None:
    holding = Holding()
    settings = ConnectionSettings(lane_idle=1000 * DEADLINE)
    async with serving({HOLD: holding}) as server, _opened(server, settings) as (side, lanes):
        lane = await worker.lane(lanes)
        asking = worker.begin(partial(ask, side, HOLD, b"held"))
        await until(lambda: len(holding.held) == 1)
        lanes._idle = -1.0  # whatever is not in use, is not used for so long

        lanes._look()
        holding.answer(0)

        assert await asyncio.wrap_future(asking) == b"held"
        assert not _closed(lane)
        lanes._look()
        assert _closed(lane)


async def test_who_does_not_see_that_his_time_is_up_is_woken(worker: _Worker) -> None:
    """The system waits anew after each signal: with many of them, for ever."""
    holding = Holding()
    async with serving({HOLD: holding}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)
        clock = [lane._monotonic()]
        lane._monotonic = lanes._monotonic = lambda: clock[0]
        asking = worker.begin(partial(ask, side, HOLD, b"late"))
        await until(lambda: len(holding.held) == 1)
        lanes._look()  # it is not yet
        waits = not asking.done()

        clock[0] += 2 * DEADLINE
        lanes._look()

        assert waits
        with pytest.raises(RequestTimedOut):
            await asyncio.wait_for(asyncio.wrap_future(asking), DEADLINE)
        await until(lambda: _closed(lane), "the end of the lane")


async def test_a_look_spares_a_request_that_is_just_beginning(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "_FRESH", -1.0)
    loop = asyncio.get_running_loop()
    is_silent = Lane._is_silent
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)
        lane.deadline = float("-inf")  # the time of the last request was up long ago

        async def look() -> None:
            lanes._look()

        def looked_at(each: Lane) -> bool:
            was_silent = is_silent(each)
            asyncio.run_coroutine_threadsafe(look(), loop).result(DEADLINE)
            return was_silent

        monkeypatch.setattr(Lane, "_is_silent", looked_at)

        answer = await worker.run(partial(ask, side, ECHO, b"next"))

        assert answer == b"next"
        assert lane.requests == 1


class _LookedAt:
    """The lock of a lane whose thread begins another request while the loop looks at it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def locked(self) -> bool:
        self._lane.deadline = float("inf")
        return True


async def test_who_is_late_is_not_woken_in_his_next_request(worker: _Worker) -> None:
    holding = Holding()
    async with serving({HOLD: holding}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)
        asking = worker.begin(partial(ask, side, HOLD, b"next"))
        await until(lambda: len(holding.held) == 1)
        lane.deadline = float("-inf")
        lock = lane.lock
        lane.lock = cast(threading.Lock, _LookedAt(lane))

        lane.wake_if_late(lane._monotonic())
        lane.lock = lock
        holding.answer(0)

        assert await asyncio.wrap_future(asking) == b"next"
        await until(lambda: _closed(lane), "its end: it was withdrawn")


async def test_who_begins_after_a_lane_was_withdrawn_takes_the_shared_socket(
    worker: _Worker,
) -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)
        lane.deadline = float("-inf")
        with lane.lock:  # as its thread does, before anything else
            lane.wake_if_late(lane._monotonic())

        answer = await worker.run(partial(ask, side, ECHO, b"next"))

        assert answer == b"next"
        assert lane.requests == 0
        await until(lambda: _closed(lane), "its end")


async def test_a_lane_that_was_left_ends_though_a_fork_has_its_socket(worker: _Worker) -> None:
    async with serving({ECHO: echo, HOLD: Holding()}) as server, _opened(server) as (side, lanes):
        await in_threads(partial(ask, side, ECHO))
        lane = await worker.lane(lanes)
        with lane._socket.dup():
            with pytest.raises(RequestTimedOut):
                await worker.run(partial(ask, side, HOLD, timeout=0.05))

            await until(lambda: len(server.connections) == 1, "the end of its connection")


async def test_what_the_peer_has_got_before_it_stops_is_still_answered(worker: _Worker) -> None:
    holding = Holding()
    async with serving({ECHO: echo, HOLD: holding}) as server, _opened(server) as (side, lanes):
        await in_threads(partial(ask, side, ECHO))
        (shared,) = server.connections
        lane = await worker.lane(lanes)
        asking = worker.begin(partial(ask, side, HOLD, b"stored"))
        await until(lambda: len(holding.held) == 1)

        shared.finish("the server stops")
        await side.connection.wait_closed()
        holding.answer(0)

        assert await asyncio.wrap_future(asking) == b"stored"
        await until(lambda: _closed(lane), "the end of the lane")


async def test_answers_on_lanes_keep_the_connection_from_being_idle(worker: _Worker) -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        await worker.lane(lanes)
        side.connection.last_active = side.connection._last_read = 0.0

        await worker.run(partial(ask, side, ECHO))

        assert side.connection.last_active > 0.0
        assert side.connection._last_read == 0.0  # it may be dead, and has to be found so


async def test_an_answer_on_a_lane_does_not_make_the_connection_look_idle_for_longer(
    worker: _Worker,
) -> None:
    """It counts from the beginning of its request, and others may have been answered since."""
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        await worker.lane(lanes)
        side.connection.last_active = float("inf")

        await worker.run(partial(ask, side, ECHO))

        assert side.connection.last_active == float("inf")


@pytest.mark.parametrize("way", ["long frames", "after one-way"])
async def test_who_could_not_use_one_gets_none(way: str) -> None:
    body = b"x" * 100_000 if way == "long frames" else b"short"
    holding = Holding()

    async with (
        serving({ECHO: echo, HOLD: holding, TOLD: echo}) as server,
        _opened(server) as (side, lanes),
    ):
        held = begin(partial(ask, side, HOLD))  # somebody is at the shared socket all the time
        await until(lambda: len(holding.held) == 1)

        def work() -> None:
            for _ in range(3 * lanes_module._MEETINGS):
                if way == "after one-way":
                    side.tell(encoding(TOLD, one_way=True))
                ask(side, ECHO, body)

        await in_threads(work)
        met = lanes._meetings
        holding.answer(0)
        await held

        assert met == 0
        assert lanes._opening is None


async def test_a_peer_that_takes_no_more_connections_is_asked_on_the_shared_one(
    worker: _Worker,
) -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            lanes._address = gone.getsockname()

        lanes._open_for(worker.ident)
        assert lanes._opening is not None
        await lanes._opening
        for _ in range(100):
            lanes._meet(worker.ident)
        await asyncio.sleep(0)

        assert len(lanes) == 0
        assert lanes._opening.done()  # no second try yet
        assert await worker.run(partial(ask, side, ECHO, b"next")) == b"next"


async def test_a_peer_that_takes_a_connection_and_drops_it_is_asked_on_the_shared_one(
    worker: _Worker,
) -> None:
    limits = ServerSettings(host_connections=1)
    async with serving({ECHO: echo}, limits) as server, _opened(server) as (side, lanes):
        await in_threads(partial(ask, side, ECHO))

        lanes._open_for(worker.ident)
        assert lanes._opening is not None
        await lanes._opening

        assert len(lanes) == 0
        assert lanes._is_opening  # for the time of a pause
        assert await worker.run(partial(ask, side, ECHO, b"next")) == b"next"


async def test_a_peer_that_does_not_answer_on_a_lane_is_asked_on_the_shared_one(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "_OPENING", 0.05)
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        with socket.create_server(("127.0.0.1", 0)) as deaf:  # it never accepts
            lanes._address = deaf.getsockname()
            lanes._open_for(worker.ident)
            assert lanes._opening is not None
            await lanes._opening

        assert len(lanes) == 0
        assert await worker.run(partial(ask, side, ECHO, b"next")) == b"next"


async def test_without_descriptors_there_are_no_lanes_for_a_while(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        with monkeypatch.context() as patched:
            patched.setattr(lanes_module, "_PAUSE", 0.01)
            patched.setattr(lanes_module, "socket", _NoSockets)
            lanes._open_for(worker.ident)
            assert lanes._opening is not None
            await lanes._opening
        await until(lambda: not lanes._is_opening, "the end of the pause")

        lane = await worker.lane(lanes)
        await worker.run(partial(ask, side, ECHO))

        assert lane.requests == 1


async def test_bytes_that_are_no_frame_end_the_lane(worker: _Worker) -> None:
    accepted: list[socket.socket] = []

    def babble(listening: socket.socket) -> None:
        taken, _ = listening.accept()
        accepted.append(taken)
        (frame,) = FrameReader().feed(taken.recv(65536))
        taken.sendall(encode_command(decode_command(frame).answer(0)))
        taken.recv(65536)
        taken.sendall(b"\xff" * 16)

    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            lanes._address = listening.getsockname()
            babbling = threading.Thread(target=babble, args=(listening,), daemon=True)
            babbling.start()
            await worker.lane(lanes)

            with pytest.raises(ConnectionLost, match="no frame"):
                await worker.run(partial(ask, side, ECHO, b"what"))

            babbling.join(DEADLINE)
            accepted[0].close()
        assert await worker.run(partial(ask, side, ECHO, b"next")) == b"next"


async def test_what_the_loop_looks_at_is_not_waited_for(worker: _Worker) -> None:
    async with serving({ECHO: echo}) as server, _opened(server) as (side, lanes):
        lane = await worker.lane(lanes)

        with lane.lock:
            answer = await worker.run(partial(ask, side, ECHO, b"shared"))

        assert answer == b"shared"
        assert lane.requests == 0


def test_negative_lanes_are_refused() -> None:
    with pytest.raises(SettingError, match="lanes must not be negative, got -1"):
        ConnectionSettings(lanes=-1)


# A test's own thread asks, since signals strike there; the loop is on another one.


class _StoppedByTimer(TimeoutError):
    """What signal handlers of applications raise."""


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop(asyncio.new_event_loop)
    yield loop
    loop.stop()


@contextlib.contextmanager
def _on_alarm(action: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class _Stage:
    """A server and a connection on the loop in the background, with a lane for this thread."""

    def __init__(self, background: BackgroundLoop) -> None:
        self._background = background
        self.holding = Holding()

    async def open(self) -> None:
        self._serving = serving({ECHO: echo, HOLD: self.holding})
        server = await self._serving.__aenter__()
        self.connection = await connect(server.address, settings=KEPT)
        self.side = self.connection.for_threads()
        assert self.connection._lanes is not None
        self.lanes = self.connection._lanes
        self.lanes._open_for(threading.main_thread().ident or 0)
        await until(lambda: len(self.lanes) == 1)

    async def strike_when_held(self, count: int = 1) -> None:
        await until(lambda: len(self.holding.held) == count)
        signal.raise_signal(signal.SIGUSR1)

    async def close(self) -> None:
        self.connection.abort()
        await self.connection.wait_closed()
        await self._serving.__aexit__(None, None, None)


@pytest.fixture
def stage(background: BackgroundLoop) -> Iterator[_Stage]:
    made = _Stage(background)
    background.run(made.open())
    yield made
    background.run(made.close())


def test_a_handler_may_interrupt_a_wait_with_any_error(
    background: BackgroundLoop, stage: _Stage
) -> None:
    lane = stage.lanes._lanes[threading.get_ident()]

    def stop() -> None:
        raise _StoppedByTimer

    with _on_alarm(stop):
        striking = asyncio.run_coroutine_threadsafe(stage.strike_when_held(), background._loop)
        with pytest.raises(_StoppedByTimer):
            ask(stage.side, HOLD)
        striking.result(DEADLINE)

    background.run(until(lambda: _closed(lane), "the end of the lane"))
    assert ask(stage.side, ECHO, b"next") == b"next"


def test_a_handler_may_ask_while_its_thread_waits(
    background: BackgroundLoop, stage: _Stage
) -> None:
    answers: list[bytes] = []

    def also() -> None:
        answers.append(ask(stage.side, ECHO, b"within"))
        background._loop.call_soon_threadsafe(stage.holding.answer, 0)

    with _on_alarm(also):
        striking = asyncio.run_coroutine_threadsafe(stage.strike_when_held(), background._loop)
        answers.append(ask(stage.side, HOLD, b"around"))
        striking.result(DEADLINE)

    assert answers == [b"within", b"around"]
    assert stage.lanes._lanes[threading.get_ident()].requests == 1
