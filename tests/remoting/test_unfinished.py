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

from orbitmq.errors import SettingError
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import FREE_BYTES, Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher, Handler, Result
from orbitmq.remoting.server import Server, UnfinishedFrames
from orbitmq.remoting.settings import Address, ConnectionSettings, ServerSettings
from orbitmq.wire.codes import WireLimits
from orbitmq.wire.command import Command, encode_command
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
#: Bytes a second that a frame has to go on by.
RATE = 16 * 1024
#: Bytes of one read, on either loop: what a connection may have without a place.
ONE_READ = 256 * 1024

#: Room for eight of the longest frames, which is for four from one host.
ROOM = 8 * (LONGEST + 4)


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
        async with _peers(server.address, 24) as peers:
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


async def test_a_host_that_has_its_part_does_not_stand_in_the_way_of_others() -> None:
    async with (
        serving({CODE: _fine}, tight(host="0.0.0.0", crowded_frame=60.0)) as server,  # noqa: S104  # two of its own addresses
        _peers(Address("127.0.0.1", server.address.port), 24, "127.0.0.2") as greedy,
    ):
        for peer in greedy:
            await begin(peer, LONGEST // 2)
        await until(lambda: server._capacity.frames.waiting == 20)
        honest = await connect(Address("127.0.0.1", server.address.port))

        for _ in range(3):
            body = bytes(LONGEST - 1000)
            assert (await honest.request(CODE, body=body, timeout=DEADLINE)).code == 0

        assert server._capacity.frames.waiting == 20
        honest.close()


async def test_what_those_keep_who_wait_is_bounded_as_well() -> None:
    room = 2 * (LONGEST + 4)
    async with (
        serving({CODE: _fine}, tight(unfinished_bytes=room, crowded_frame=60.0)) as server,
        _peers(server.address, 60) as peers,
    ):
        for peer in peers:
            await begin(peer, ONE_READ)
        frames = server._capacity.frames
        await until(lambda: frames.evicted > 0 and frames.waiting + frames.evicted == 59)

        assert frames.kept_by_waiting <= room


async def test_slow_senders_of_long_frames_are_not_closed_because_others_wait() -> None:
    # Each takes far longer than the patience with others, and goes on all the time.
    settings = tight(unfinished_bytes=4 * (LONGEST + 4), crowded_frame=0.6)
    async with (
        serving({CODE: _fine}, settings) as server,
        _peers(server.address, 6) as peers,
    ):

        async def send(peer: RawPeer) -> int:
            data = long_request()
            for start in range(0, len(data), 64 * 1024):
                await peer.send(data[start : start + 64 * 1024])
                await asyncio.sleep(0.06)
            return (await peer.receive()).code

        async with asyncio.timeout(DEADLINE):
            assert await asyncio.gather(*map(send, peers)) == [0] * 6
        assert server._capacity.frames.waited > 0
        assert server._capacity.frames.evicted == 0


async def test_whoever_keeps_memory_while_others_wait_for_it_is_closed_and_the_others_go_on() -> (
    None
):
    async with (
        serving({CODE: _fine}, tight(crowded_frame=0.05)) as server,
        _peers(server.address, 4) as greedy,
    ):
        for peer in greedy:
            await begin(peer)
        await until(lambda: server._capacity.frames.used == 4 * (LONGEST + 4))
        honest = await connect(server.address)

        answer = await honest.request(CODE, body=bytes(LONGEST - 1000), timeout=DEADLINE)

        assert answer.code == 0
        # One place was needed, and no more than that was taken.
        assert server._capacity.frames.evicted == 1
        honest.close()


async def test_many_honest_senders_of_long_frames_take_turns_and_nobody_is_closed() -> None:
    async with serving({CODE: _fine}, tight()) as server:
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
    assert "went on by fewer than 16384 bytes a second for 0.3 s" in caplog.text
    assert server._capacity.frames.too_slow == 1


async def test_requests_before_a_long_frame_are_answered_while_that_waits() -> None:
    async with (
        serving({CODE: _fine}, tight(crowded_frame=60.0)) as server,
        _peers(server.address, 4) as greedy,
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


def _peers(address: Address, count: int, host: str | None = None) -> _Peers:
    return _Peers(address, count, host)


class _Peers:
    """So many raw peers, of an address of this host if that is given; closed at the end."""

    def __init__(self, address: Address, count: int, host: str | None) -> None:
        self._address = address
        self._count = count
        self._local = None if host is None else (host, 0)
        self._peers: list[RawPeer] = []

    async def __aenter__(self) -> list[RawPeer]:
        for _ in range(self._count):
            self._peers.append(
                RawPeer(
                    *await asyncio.open_connection(
                        self._address.host, self._address.port, local_addr=self._local
                    )
                )
            )
        return self._peers

    async def __aexit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()


# One connection, without sockets.


def is_read(transport: FakeTransport) -> bool:
    return transport.is_reading_now


def was_aborted(transport: FakeTransport) -> bool:
    return transport.was_aborted


def one_connection(
    clock: ManualClock, places: UnfinishedFrames | None = None, **settings: Any
) -> tuple[Connection, FakeTransport]:
    transport = FakeTransport()
    handlers: dict[int, Handler] = {CODE: _fine, HOLD: lambda _, __: LATER}
    connection = Connection(
        Dispatcher(handlers), clock=clock, places=places, settings=ConnectionSettings(**settings)
    )
    connection.connection_made(transport)
    return connection, transport


def places_of(clock: ManualClock, limit: int, patience: float = 60.0) -> UnfinishedFrames:
    places = UnfinishedFrames(limit, patience=patience, rate=1.0, monotonic=clock.monotonic)
    # The tests look themselves.
    places._watch = lambda: None  # type: ignore[method-assign]
    return places


async def test_the_time_of_a_frame_does_not_run_while_it_waits_for_memory() -> None:
    clock = ManualClock()
    places = places_of(clock, LONGEST + 4)
    other = Holder("other")
    places.enter(other, LONGEST + 4)
    connection, transport = one_connection(clock, places)

    connection.data_received(long_request()[: FREE_BYTES + 1])
    assert not is_read(transport)
    clock.time += 100
    connection.check_frame(clock.monotonic(), 60.0, RATE)
    assert not was_aborted(transport)
    clock.time += 61
    places.leave(other)
    connection.check_frame(clock.monotonic(), 60.0, RATE)
    connection._resume()
    clock.time += 59
    connection.check_frame(clock.monotonic(), 60.0, RATE)
    assert not was_aborted(transport)
    clock.time += 2
    connection.check_frame(clock.monotonic(), 60.0, RATE)

    assert was_aborted(transport)


async def test_the_time_of_a_frame_does_not_run_while_we_do_not_read_for_reasons_of_ours() -> None:
    clock = ManualClock()
    connection, transport = one_connection(clock, open_requests=1)
    held = Command.request(HOLD, opaque=1)
    data = long_request(2)

    # A request that takes us long, and behind it the beginning of a frame.
    connection.data_received(encode_command(held) + data[:30_000])
    assert not is_read(transport)
    for _ in range(3):
        clock.time += 59
        connection.check_frame(clock.monotonic(), 60.0, RATE)
    connection.reply(held, held.answer(0))
    connection._resume()
    assert is_read(transport)
    clock.time += 59
    connection.check_frame(clock.monotonic(), 60.0, RATE)
    assert not was_aborted(transport)
    clock.time += 2
    connection.check_frame(clock.monotonic(), 60.0, RATE)

    assert was_aborted(transport)


async def test_a_connection_that_we_do_not_read_from_keeps_its_place() -> None:
    clock = ManualClock()
    places = places_of(clock, 2 * (LONGEST + 4), patience=5.0)
    connection, transport = one_connection(clock, places, slow_bytes=1 << 20)
    connection.data_received(long_request()[: FREE_BYTES + 1])
    assert is_read(transport)
    places.enter(Holder("127.0.0.1"), 2 * LONGEST)

    connection.pause_writing()  # it does not take its answers
    for _ in range(5):
        clock.time += 4
        places._look()
    connection.resume_writing()
    connection._resume()
    clock.time += 4
    places._look()
    assert not was_aborted(transport)
    clock.time += 2
    places._look()

    assert was_aborted(transport)
    assert places.evicted == 1


async def test_a_long_frame_may_take_its_time_on_a_slow_line() -> None:
    clock = ManualClock()
    connection, transport = one_connection(clock)
    data = encode_command(Command.request(CODE, opaque=1, body=bytes(4 * MIB)))

    # 160 kbit/s: 3.5 minutes.
    for start in range(0, len(data), 20 * 1024):
        clock.time += 1
        connection.data_received(data[start : start + 20 * 1024])
        connection.check_frame(clock.monotonic(), 60.0, RATE)

    assert connection.is_open
    assert len(transport.written) == 1


async def test_a_long_frame_that_stops_on_its_way_ends_its_connection() -> None:
    clock = ManualClock()
    connection, transport = one_connection(clock)
    data = encode_command(Command.request(CODE, opaque=1, body=bytes(4 * MIB)))
    connection.data_received(data[: 3 * MIB])
    clock.time += 61
    connection.check_frame(clock.monotonic(), 60.0, RATE)
    assert connection.is_open  # it did well so far

    clock.time += 61
    connection.data_received(b"x")
    connection.check_frame(clock.monotonic(), 60.0, RATE)

    assert was_aborted(transport)


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
        connection.check_frame(clock.monotonic(), 60.0, RATE)

    assert connection.is_open
    assert len(transport.written) == 5


async def test_a_connection_that_is_gone_leaves_its_place_and_keeps_no_bytes() -> None:
    places = places_of(ManualClock(), LONGEST + 4)
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
        (lambda: ServerSettings(frame_rate=0), "server.frame_rate must be positive"),
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

    def __init__(self, host: str, received: int = 0) -> None:
        self.remote = Address(host, 1)
        self.received = received
        self.read_since: float | None = float("-inf")
        self.has_place = False
        self.was_closed = False

    def place_given(self) -> None:
        assert not self.has_place
        self.has_place = True

    def place_taken(self, _: str) -> None:
        self.has_place = False
        self.was_closed = True


class PlacesMachine(RuleBasedStateMachine):
    """Senders of some hosts come, go on, finish, leave and wait, as time goes by."""

    LIMIT = 12
    PATIENCE = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.places = places_of(self.clock, self.LIMIT, self.PATIENCE)
        self.inside: dict[Holder, int] = {}
        #: When each was last seen to go on, or let in.
        self.went_on: dict[Holder, float] = {}
        self.waiting: list[tuple[Holder, int]] = []

    def _has(self, host: str) -> int:
        return sum(size for each, size in self.inside.items() if each.remote.host == host)

    def _settle(self) -> None:
        """Move those who were let in or closed to where they are now."""
        for holder in [each for each in self.inside if each.was_closed]:
            # Only who did not go on.
            assert self.clock.time - self.went_on[holder] >= self.PATIENCE
            del self.inside[holder]
        for holder, size in [each for each in self.waiting if each[0].has_place]:
            self.waiting.remove((holder, size))
            self._let_in(holder, size)

    def _let_in(self, holder: Holder, size: int) -> None:
        holder.has_place = True
        self.inside[holder] = size
        self.went_on[holder] = self.clock.time

    @rule(host=st.sampled_from("abc"), size=st.integers(1, 12))
    def come(self, host: str, size: int) -> None:
        holder = Holder(host)
        if self.places.enter(holder, size):
            self._let_in(holder, size)
        else:
            self.waiting.append((holder, size))
        self._settle()

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

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), seconds=st.sampled_from((1.0, 3.0, 6.0)))
    def wait(self, data: st.DataObject, seconds: float) -> None:
        """Time goes by, in which some go on."""
        diligent = data.draw(st.sets(st.sampled_from(list(self.inside))))
        self.clock.time += seconds
        for holder in diligent:
            holder.received += 1000
            self.went_on[holder] = self.clock.time
        self.places._look()

        assert not any(holder.was_closed for holder in diligent)
        self._settle()

    @precondition(lambda self: self.waiting)
    @rule()
    def everybody_stops(self) -> None:
        """Who waits gets his turn, if those who are inside do nothing."""
        first = {each.remote.host: each for each, _ in reversed(self.waiting)}
        for _ in range(4 * len(self.waiting) + 4):
            self.clock.time += self.PATIENCE + 1
            self.places._look()
            self._settle()

        assert not any(each in dict(self.waiting) for each in first.values())

    @invariant()
    def the_limit_is_kept(self) -> None:
        assert self.places.used == sum(self.inside.values()) <= self.LIMIT
        assert self.places.waiting == len(self.waiting)

    @invariant()
    def a_host_has_half_or_a_single_frame(self) -> None:
        for host in "abc":
            count = sum(each.remote.host == host for each in self.inside)
            assert count <= 1 or self._has(host) <= self.LIMIT // 2

    @invariant()
    def nobody_waits_without_reason(self) -> None:
        sizes = dict(self.waiting)
        hosts = {each.remote.host for each in (*self.inside, *sizes)}
        for host, line in self.places._waiting.items():
            size = sizes[next(each for each in sizes if each in line)]
            if self._has(host) and self._has(host) + size > self.LIMIT // (len(hosts) + 1):
                continue  # its host has its part
            # Who only lacks room is not overtaken by those behind him.
            assert sum(self.inside.values()) + size > self.LIMIT
            break

    @invariant()
    def each_host_is_served_in_order(self) -> None:
        for host in "abc":
            line = [each for each, _ in self.waiting if each.remote.host == host]
            mine = list(self.places._waiting.get(host, {}))
            assert mine == line


async def test_nobody_is_closed_for_a_time_in_which_this_process_stood_still() -> None:
    clock = ManualClock()
    places = UnfinishedFrames(2, patience=0.02, rate=1.0, monotonic=clock.monotonic)
    holder = Holder("a")
    assert places.enter(holder, 2)
    assert not places.enter(Holder("b"), 2)

    for _ in range(20):
        clock.time += 100.0
        timer = places._timer
        await until(lambda: places._timer is not timer, "another look")  # noqa: B023  # at once

    assert not holder.was_closed
    places.leave(holder)


TestPlaces = PlacesMachine.TestCase
TestPlaces.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_hosts_take_turns_with_what_becomes_free() -> None:
    clock = ManualClock()
    places = places_of(clock, 1)
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
