"""Frames that have begun to arrive: how much memory strangers get, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitmq.errors import SettingError
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import FREE_BYTES, ArrivingFrame, Connection, FrameMemory
from orbitmq.remoting.dispatch import LATER, Dispatcher, Handler
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import Address, ConnectionSettings, ServerSettings
from orbitmq.wire.codes import WireLimits
from orbitmq.wire.command import Command, encode_command
from orbitmq.wire.frame import FrameReader
from tests.support.remoting import DEADLINE, FakeTransport, ManualClock, RawPeer, serving, until

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


async def begin(peer: RawPeer, size: int = LONGEST - 1) -> None:
    """Announce the longest frame, and send so much of it."""
    peer.writer.write(struct.pack(">iI", LONGEST, 100) + bytes(size - 8))


def kept(server: Server) -> int:
    return sum(each.bytes_in for each in server.connections)


# Over sockets.


async def test_memory_for_frames_that_are_not_finished_is_bounded_whoever_sends_them():
    async with serving({CODE: _fine}, tight(crowded_frame=60.0)) as server:
        async with _peers(server.address, 24) as peers:
            for peer in peers:
                await begin(peer)
            await until(lambda: len(server.connections) == 24)
            await until(lambda: server.capacity.frames.waiting == 20)
            await until(lambda: kept(server) >= 4 * (LONGEST - 1))

            # 24 MiB were sent; what is not read stays with those who send it.
            assert kept(server) <= ROOM + 20 * ONE_READ
            assert server.capacity.frames.used == 4 * (LONGEST + 4)
            # Who sends usual requests does not notice.
            usual = await connect(server.address)
            assert (await usual.request(CODE, body=b"x" * 1000, timeout=DEADLINE)).code == 0
            usual.close()
        await until(lambda: not server.connections)

        assert (server.capacity.frames.used, server.capacity.frames.waiting) == (0, 0)


async def test_whoever_keeps_memory_while_others_wait_for_it_is_closed_and_the_others_go_on():
    async with (
        serving({CODE: _fine}, tight(crowded_frame=0.05, sweep=0.02)) as server,
        _peers(server.address, 4) as greedy,
    ):
        for peer in greedy:
            await begin(peer)
        await until(lambda: server.capacity.frames.used == 4 * (LONGEST + 4))
        honest = await connect(server.address)

        answer = await honest.request(CODE, body=bytes(LONGEST - 1000), timeout=DEADLINE)

        assert answer.code == 0
        assert server.capacity.frames.evicted >= 1
        honest.close()


async def test_many_honest_senders_of_long_frames_take_turns_and_nobody_is_closed():
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
        assert server.capacity.frames.used == 0
        for each in connections:
            each.close()


async def test_a_frame_that_takes_too_long_ends_its_connection_however_busy_that_is(caplog):
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
    assert server.capacity.frames.too_slow == 1


@contextlib.asynccontextmanager
async def _peers(
    address: Address, count: int, host: str | None = None
) -> AsyncIterator[list[RawPeer]]:
    """So many raw peers, of an address of this host if that is given; closed at the end."""
    local = None if host is None else (host, 0)
    peers: list[RawPeer] = []
    try:
        for _ in range(count):
            streams = await asyncio.open_connection(address.host, address.port, local_addr=local)
            peers.append(RawPeer(*streams))
        yield peers
    finally:
        for peer in peers:
            peer.writer.transport.abort()


# One connection, without sockets.


def was_aborted(transport: FakeTransport) -> bool:
    return transport.was_aborted


def one_connection(
    clock: ManualClock, memory: FrameMemory | None = None, **settings: Any
) -> tuple[Connection, FakeTransport]:
    transport = FakeTransport()
    handlers: dict[int, Handler] = {CODE: _fine, HOLD: lambda _, __: LATER}
    connection = Connection(
        Dispatcher(handlers), clock=clock, memory=memory, settings=ConnectionSettings(**settings)
    )
    connection.connection_made(transport)
    return connection, transport


async def test_a_long_frame_may_take_its_time_on_a_slow_line():
    clock = ManualClock()
    connection, transport = one_connection(clock)
    data = encode_command(Command.request(CODE, opaque=1, body=bytes(4 * MIB)))

    # 160 kbit/s: 3.5 minutes.
    for start in range(0, len(data), 20 * 1024):
        clock.time += 1
        connection.data_received(data[start : start + 20 * 1024])
        connection.check_frame(clock.monotonic(), 60.0, 60.0, RATE)

    assert connection.is_open
    assert len(transport.written) == 1


async def test_a_long_frame_that_stops_on_its_way_ends_its_connection():
    clock = ManualClock()
    connection, transport = one_connection(clock)
    data = encode_command(Command.request(CODE, opaque=1, body=bytes(4 * MIB)))
    connection.data_received(data[: 3 * MIB])
    clock.time += 61
    connection.check_frame(clock.monotonic(), 60.0, 60.0, RATE)
    assert connection.is_open  # it did well so far

    clock.time += 61
    connection.data_received(b"x")
    connection.check_frame(clock.monotonic(), 60.0, 60.0, RATE)

    assert was_aborted(transport)


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
def test_a_limit_that_cannot_work_is_named(make, named):
    with pytest.raises(SettingError, match=named):
        make()


# The memory, against a model.


class MemoryMachine(RuleBasedStateMachine):
    """Connections of some hosts begin long frames, finish them and leave."""

    LIMIT = 12 * 1024 * 1024

    def __init__(self) -> None:
        super().__init__()
        self.memory = FrameMemory(self.LIMIT)
        #: In the order of their coming: the length, the host, and whether it may be read.
        self.frames: dict[ArrivingFrame, tuple[int, str]] = {}

    @rule(host=st.sampled_from("abc"), size=st.integers(1, 12))
    def begin(self, host: str, size: int) -> None:
        reader = FrameReader(WireLimits(frame=self.LIMIT))
        frame = ArrivingFrame(
            reader,
            self.memory,
            Address(host, 1),
            lambda: 0.0,
            go_on=lambda: None,
            give_up=lambda _: None,
        )
        length = size * 1024 * 1024 - 4
        reader.feed(struct.pack(">iI", length, 100) + bytes(FREE_BYTES))
        self.frames[frame] = length + 4, host
        frame.note(0.0, is_another=False)

    @precondition(lambda self: self.frames)
    @rule(dice=st.data())
    def leave(self, dice: st.DataObject) -> None:
        frame = dice.draw(st.sampled_from(list(self.frames)))
        frame.leave()
        del self.frames[frame]

    def _has(self, host: str) -> int:
        return sum(
            size
            for frame, (size, each) in self.frames.items()
            if each == host and not frame.must_wait
        )

    @invariant()
    def what_is_reserved_is_bounded(self) -> None:
        reserved = sum(size for frame, (size, _) in self.frames.items() if not frame.must_wait)
        assert reserved == self.memory.used <= self.LIMIT
        assert self.memory.waiting == sum(frame.must_wait for frame in self.frames)

    @invariant()
    def a_host_has_half_or_a_single_frame(self) -> None:
        for host in "abc":
            has = [s for f, (s, h) in self.frames.items() if h == host and not f.must_wait]
            assert sum(has) <= self.LIMIT // 2 or len(has) == 1

    @invariant()
    def the_first_that_waits_and_may_have_more_finds_no_room(self) -> None:
        for frame, (size, host) in self.frames.items():
            if not frame.must_wait:
                continue
            if (has := self._has(host)) and has + size > self.LIMIT // 2:
                continue
            assert self.memory.used + size > self.LIMIT
            break


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
