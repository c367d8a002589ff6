"""Frames that have begun to arrive: how much memory strangers get, and for how long."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitmq.remoting.address import Address
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dialing import connect
from orbitmq.remoting.dispatch import LATER, Dispatcher, Result
from orbitmq.remoting.errors import SettingError
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import ConnectionSettings, ServerSettings
from orbitmq.remoting.unfinished import FREE_BYTES, UnfinishedFrames
from orbitmq.wire.command import Command, encode_command
from orbitmq.wire.limits import WireLimits
from tests.support.remoting import (
    DEADLINE,
    FakeTransport,
    ManualClock,
    RawPeer,
    serving,
    until,
)

CODE = 10
HOLD = 11
MIB = 1024 * 1024
#: The longest frame that the servers of these tests take.
LONGEST = 1 * MIB
#: Bytes of one read, on either loop: what a connection may have without a place.
ONE_READ = 256 * 1024

#: Room for four of the longest frames.
ROOM = 4 * (LONGEST + 4)


def tight(**changes: Any) -> ServerSettings:
    defaults: dict[str, Any] = {
        "unfinished_bytes": ROOM,
        "connection": ConnectionSettings(limits=WireLimits(frame=LONGEST)),
    }
    return ServerSettings(**(defaults | changes))


def _fine(_: Connection, request: Command) -> Command:
    return request.answer(0)


def long_request(opaque: int = 1, size: int = LONGEST - 1000) -> bytes:
    return encode_command(Command.request(CODE, opaque=opaque, body=bytes(size)))


async def begin(peer: RawPeer, size: int = LONGEST - 1) -> None:
    """Announce the longest frame, and send so much of it."""
    peer.writer.write(struct.pack(">iI", LONGEST, 100) + bytes(size - 8))


def kept(server: Server) -> int:
    return sum(each._reader.unfinished for each in server.connections)


# Over sockets.


async def test_memory_for_frames_that_are_not_finished_is_bounded_whoever_sends_them() -> None:
    async with serving({CODE: _fine}, tight(crowded_frame=60.0)) as server:
        async with _peers(server, 24) as peers:
            for peer in peers:
                await begin(peer)
            await until(lambda: len(server.connections) == 24)
            await until(lambda: server._capacity.frames.waiting == 20)
            await until(lambda: kept(server) >= 4 * (LONGEST - 1))

            # 24 MiB were sent; what is not read stays with those who send it.
            assert kept(server) <= ROOM + 20 * ONE_READ
            assert server._capacity.frames.used == 4 * (LONGEST + 4)
            # Who sends usual requests does not notice.
            usual = await connect(server.address)
            assert (await usual.request(CODE, body=b"x" * 1000, timeout=DEADLINE)).code == 0
            usual.close()
        await until(lambda: not server.connections)

        assert (server._capacity.frames.used, server._capacity.frames.waiting) == (0, 0)


async def test_whoever_keeps_memory_while_others_wait_for_it_is_closed_and_the_others_go_on() -> (
    None
):
    async with (
        serving({CODE: _fine}, tight(crowded_frame=0.05)) as server,
        _peers(server, 4) as greedy,
    ):
        for peer in greedy:
            await begin(peer)
        await until(lambda: server._capacity.frames.used == 4 * (LONGEST + 4))
        honest = await connect(server.address)

        answer = await honest.request(CODE, body=bytes(LONGEST - 1000), timeout=DEADLINE)

        assert answer.code == 0
        assert await greedy[0].is_closed_by_the_other_side()
        honest.close()


async def test_many_honest_senders_of_long_frames_take_turns_and_nobody_is_closed() -> None:
    async with serving({CODE: _fine}, tight(crowded_frame=60.0)) as server:
        connections = [await connect(server.address) for _ in range(12)]

        answers = await asyncio.gather(
            *(
                each.request(CODE, body=bytes(LONGEST - 1000), timeout=DEADLINE)
                for each in connections
                for _ in range(2)
            )
        )

        assert {answer.code for answer in answers} == {0}
        assert all(each.is_open for each in connections)
        assert server._capacity.frames.used == 0
        for each in connections:
            each.close()


async def test_a_frame_that_takes_too_long_ends_its_connection_however_busy_that_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serving({CODE: _fine}, tight(frame=0.3, crowded_frame=0.3, sweep=0.05)) as server,
        RawPeer.connected(server.address) as slow,
    ):
        await slow.ask(Command.request(CODE, opaque=1))
        slow.writer.write(struct.pack(">iI", 1000, 100))
        closed = asyncio.create_task(slow.is_closed_by_the_other_side())
        while not closed.done():
            # It is never idle.
            slow.writer.write(b"\0")
            await asyncio.sleep(0.02)

        assert await closed
    assert "took over 0.3 s" in caplog.text


async def test_requests_before_a_long_frame_are_answered_while_that_waits() -> None:
    async with (
        serving({CODE: _fine}, tight(crowded_frame=60.0)) as server,
        _peers(server, 4) as greedy,
        RawPeer.connected(server.address) as peer,
    ):
        for each in greedy:
            await begin(each)
        await until(lambda: server._capacity.frames.used == 4 * (LONGEST + 4))
        peer.writer.write(encode_command(Command.request(CODE, opaque=7)) + long_request(8))

        first = await peer.receive()
        await until(lambda: server._capacity.frames.waiting == 1)
        greedy[0].writer.transport.abort()
        second = await peer.receive()

        assert (first.opaque, second.opaque) == (7, 8)


async def test_open_requests_with_large_bodies_stop_the_reading_until_they_are_answered() -> None:
    open_requests: list[tuple[Connection, Command]] = []

    def hold(connection: Connection, request: Command) -> Result:
        open_requests.append((connection, request))
        return LATER

    connection_settings = ConnectionSettings(open_bytes=2 * MIB)
    async with (
        serving({HOLD: hold}, ServerSettings(connection=connection_settings)) as server,
        RawPeer.connected(server.address) as peer,
    ):
        for number in range(8):
            request = Command.request(HOLD, opaque=number, body=bytes(MIB // 2))
            peer.writer.write(encode_command(request))
        await until(lambda: len(open_requests) >= 4)
        await until(lambda: not open_requests[0][0]._transport.is_reading())
        at_first = len(open_requests)
        answered = 0
        while answered < 8:
            await until(lambda: bool(open_requests))
            connection, request = open_requests.pop(0)
            connection.reply(request, request.answer(0))
            await peer.receive()
            answered += 1

        assert at_first == 4


async def test_what_is_written_to_a_peer_that_vanished_is_not_tried_for_ever() -> None:
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("this system has no such option")
    async with serving({CODE: _fine}, ServerSettings(idle=7.5)) as server:
        connection = await connect(server.address)
        await connection.request(CODE, timeout=DEADLINE)
        (other_end,) = server.connections
        raw = other_end._transport.get_extra_info("socket")

        assert raw.getsockopt(socket.IPPROTO_TCP, option) == 7500
        connection.close()


def _peers(server: Server, count: int) -> _Peers:
    return _Peers(server.address, count)


class _Peers:
    """So many raw peers, closed at the end."""

    def __init__(self, address: Address, count: int) -> None:
        self._address = address
        self._count = count
        self._peers: list[RawPeer] = []

    async def __aenter__(self) -> list[RawPeer]:
        for _ in range(self._count):
            self._peers.append(
                RawPeer(*await asyncio.open_connection(self._address.host, self._address.port))
            )
        return self._peers

    async def __aexit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()


# One connection, without sockets.


async def test_the_time_of_a_frame_does_not_run_while_we_do_not_read() -> None:
    clock = ManualClock()
    places = UnfinishedFrames(LONGEST + 4, patience=60.0, monotonic=clock.monotonic)
    places.enter(Holder("other"), LONGEST + 4)
    transport = FakeTransport()
    connection = Connection(Dispatcher({}), clock=clock, places=places)
    connection.connection_made(transport)

    connection.data_received(long_request()[: FREE_BYTES + 1])
    assert not transport.is_reading_now
    clock.time += 100
    connection.check_frame(clock.monotonic(), 60.0)
    assert not transport.was_aborted
    clock.time += 61
    connection._arriving.place_given()
    connection.check_frame(clock.monotonic(), 60.0)
    assert not transport.was_aborted
    connection._resume()
    clock.time += 61
    connection.check_frame(clock.monotonic(), 60.0)

    assert transport.was_aborted


async def test_a_peer_that_sends_usual_frames_all_the_time_has_begun_none_for_long() -> None:
    clock = ManualClock()
    transport = FakeTransport()
    connection = Connection(Dispatcher({CODE: _fine}), clock=clock)
    connection.connection_made(transport)
    data = encode_command(Command.request(CODE, opaque=1))

    connection.data_received(data[:10])
    for _ in range(5):
        clock.time += 50
        # Every read ends one frame and begins the next.
        connection.data_received(data[10:] + data[:10])
        connection.check_frame(clock.monotonic(), 60.0)

    assert connection.is_open
    assert len(transport.written) == 5


async def test_a_connection_that_is_gone_leaves_its_place_and_keeps_no_bytes() -> None:
    places = UnfinishedFrames(LONGEST + 4, patience=60.0, monotonic=ManualClock().monotonic)
    connection = Connection(Dispatcher({}), places=places)
    connection.connection_made(FakeTransport())
    connection.data_received(long_request()[: FREE_BYTES + 1])
    assert places.used > FREE_BYTES

    connection.connection_lost(None)

    assert places.used == 0
    assert connection._reader.unfinished == 0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ServerSettings(unfinished_bytes=MIB), "server.unfinished_bytes must have room"),
        (lambda: ServerSettings(frame=1.0), "crowded_frame 5.0, frame 1.0"),
        (lambda: ServerSettings(host_connections=0), "server.host_connections must be positive"),
        (lambda: ConnectionSettings(open_bytes=0), "connection.open_bytes must be positive"),
    ],
)
def test_a_limit_that_cannot_work_is_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        make()


# The places, against a model.


class Holder:
    """As much of a connection as places need."""

    def __init__(self, host: str) -> None:
        self.remote = Address(host, 1)
        self.has_place = False
        self.was_closed = False

    def place_given(self) -> None:
        assert not self.has_place
        self.has_place = True

    def place_taken(self, _: str) -> None:
        assert self.has_place
        self.has_place = False
        self.was_closed = True


class PlacesMachine(RuleBasedStateMachine):
    """Senders of some hosts come, finish, leave and wait, as time goes by."""

    LIMIT = 10
    PATIENCE = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.places = UnfinishedFrames(
            self.LIMIT, patience=self.PATIENCE, monotonic=self.clock.monotonic
        )
        # The machine looks itself: there is no loop.
        self.places._watch = lambda: None  # type: ignore[method-assign]
        self.inside: dict[Holder, tuple[int, float]] = {}
        self.waiting: list[tuple[Holder, int]] = []

    def _settle(self) -> None:
        """Move those who were let in or closed to where they are now."""
        for holder in [each for each in self.inside if each.was_closed]:
            del self.inside[holder]
        for holder, size in [each for each in self.waiting if each[0].has_place]:
            self.waiting.remove((holder, size))
            self.inside[holder] = (size, self.clock.time)

    @rule(host=st.sampled_from("abc"), size=st.integers(1, 10))
    def come(self, host: str, size: int) -> None:
        holder = Holder(host)
        fits = not self.waiting and sum(each for each, _ in self.inside.values()) + size <= 10

        assert self.places.enter(holder, size) is fits
        if fits:
            holder.has_place = True
            self.inside[holder] = (size, self.clock.time)
        else:
            self.waiting.append((holder, size))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(list(self.inside)))
        del self.inside[holder]
        self.places.leave(holder)
        self.places.leave(holder)
        self._settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entry)
        self.places.leave(entry[0])
        self._settle()

    @rule(seconds=st.sampled_from((1.0, 3.0, 6.0)))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.places._look()
        self._settle()

        if self.waiting:
            # Nobody has been inside for long while others wait.
            assert all(self.clock.time - since < 5.0 for _, since in self.inside.values())

    @invariant()
    def the_limit_is_kept(self) -> None:
        assert self.places.used == sum(size for size, _ in self.inside.values()) <= self.LIMIT
        assert self.places.waiting == len(self.waiting)

    @invariant()
    def nobody_waits_without_reason(self) -> None:
        assert not self.waiting or self.inside

    @invariant()
    def each_host_is_served_in_order(self) -> None:
        for host in "abc":
            line = [each for each, _ in self.waiting if each.remote.host == host]
            mine = list(self.places._waiting.get(host, {}))
            assert mine == line


TestPlaces = PlacesMachine.TestCase
TestPlaces.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_hosts_take_turns_with_what_becomes_free() -> None:
    clock = ManualClock()
    places = UnfinishedFrames(1, patience=60.0, monotonic=clock.monotonic)
    places._watch = lambda: None  # type: ignore[method-assign]
    first = Holder("crowd")
    places.enter(first, 1)
    crowd = [Holder("crowd") for _ in range(5)]
    for each in crowd:
        places.enter(each, 1)
    lonely = Holder("lonely")
    places.enter(lonely, 1)

    places.leave(first)
    places.leave(crowd[0])

    assert lonely.has_place
    assert not crowd[1].has_place
