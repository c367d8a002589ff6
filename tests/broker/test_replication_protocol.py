"""What master and slave say to each other, byte by byte, and who waits for whom."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.broker import Broker
from orbitmq.broker.errors import PutStatus
from orbitmq.broker.replication.master import (
    FrameReader,
    FrameRefused,
    ReplicaAcks,
    ReportReader,
    pack_head,
    pack_report,
)
from orbitmq.broker.settings import PullSettings
from orbitmq.store.settings import FlushPolicy, RetentionSettings
from orbitmq.wire.codes import ResponseCode
from tests.support.broker import SMALL_STORE, RawClient, until
from tests.support.replication import (
    SERVING,
    RawSlave,
    consume,
    following,
    log_bytes,
    serving,
    slave_of,
    until_copied,
    until_rounds,
)

StartBroker = Callable[..., Awaitable[Broker]]
OpenClient = Callable[..., Awaitable[RawClient]]

#: So that senders wait for one slave.
WAITING = replace(SERVING, in_sync_replicas=2)
SYNC_STORE = replace(SMALL_STORE, flush=replace(SMALL_STORE.flush, policy=FlushPolicy.SYNC))


@pytest.fixture
async def master(start_broker):
    return await start_broker(root="master", replication=SERVING)


# ---- the format


@given(
    frames=st.lists(st.tuples(st.integers(0, 2**62), st.binary(max_size=50)), max_size=8),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_frames_are_read_however_they_are_cut(frames, cuts):
    data = b"".join(pack_head(offset, len(body)) + body for offset, body in frames)
    reader = FrameReader()

    found = []
    while data:
        size = cuts[len(data) % len(cuts)]
        found += list(reader.feed(data[:size]))
        data = data[size:]

    assert found == frames


@pytest.mark.parametrize(("offset", "size"), [(-1, 0), (0, -1), (0, 4 * 1024 * 1024)])
def test_a_frame_that_cannot_be_is_refused(offset, size):
    with pytest.raises(FrameRefused):
        list(FrameReader().feed(pack_head(offset, size)))


@given(offsets=st.lists(st.integers(0, 2**62), min_size=1, max_size=9), cut=st.integers(1, 20))
def test_the_newest_report_counts(offsets, cut):
    data = b"".join(pack_report(offset) for offset in offsets)
    reader = ReportReader()

    found = [reader.feed(data[at : at + cut]) for at in range(0, len(data), cut)]

    assert [offset for offset in found if offset is not None][-1] == offsets[-1]


# ---- the master


async def test_the_log_comes_in_frames_of_at_most_32_kib_that_know_nothing_of_messages(
    master, open_client
):
    client = await open_client(master)
    for _ in range(3):
        await client.stored("orders", b"x" * 50_000)
    slave = await RawSlave.open(serving(master).address)

    await slave.report(0)
    end = master.parts.store.mirroring.end
    found, sizes = b"", []
    while len(found) < end:
        offset, body = await slave.frame()
        assert offset == len(found)
        sizes.append(len(body))
        found += body

    assert max(sizes) == 32 * 1024
    assert found == bytes(master.parts.store.mirroring.stretch(0, end) or b"")
    slave.close()


async def test_a_silent_slave_is_given_up(start_broker):
    quick = replace(SERVING, heartbeat=0.05, silence=0.2)
    master = await start_broker(replication=quick)
    slave = await RawSlave.open(serving(master).address)
    await slave.report(0)
    await until(lambda: serving(master).in_sync == 1)

    await until(lambda: not serving(master).replicas)

    # The rest are signs of life; then the end.
    assert len(await slave.read(1 << 20)) % 12 == 0
    slave.close()


async def test_a_silent_master_is_given_up(start_broker):
    connected: list[asyncio.StreamWriter] = []

    async def silent(_, writer):
        connected.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    master = await start_broker(root="master", replication=SERVING)
    changes = {"heartbeat": 0.05, "silence": 0.2, "master_ha": f"127.0.0.1:{port}"}

    await start_broker(root="slave", **slave_of(master, **changes))
    await until(lambda: len(connected) >= 3)

    for writer in connected:
        writer.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("said", [pack_report(-1), b"\xff" * 8])
async def test_a_slave_that_talks_nonsense_is_given_up(master, said):
    slave = await RawSlave.open(serving(master).address)

    await slave.say(said)

    assert await slave.read(1) == b""
    assert not serving(master).replicas
    slave.close()


async def test_more_slaves_than_allowed_are_turned_away(start_broker):
    master = await start_broker(replication=replace(SERVING, replicas=1))
    first = await RawSlave.open(serving(master).address)
    await first.report(0)
    await until(lambda: len(serving(master).replicas) == 1)

    second = await RawSlave.open(serving(master).address)

    assert await second.read(1) == b""
    assert len(serving(master).replicas) == 1
    first.close()
    second.close()


# ---- waiting for slaves


@pytest.mark.parametrize("store", [SMALL_STORE, SYNC_STORE], ids=["async", "sync"])
async def test_a_send_is_answered_when_the_slave_has_it(start_broker, open_client, store):
    master = await start_broker(root="master", replication=WAITING, store=store)
    client = await open_client(master)
    slave = await start_broker(root="slave", store=store, **slave_of(master))
    await until(lambda: serving(master).in_sync == 1)

    for number in range(20):
        answer = await client.send("orders", b"%d" % number)

        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert slave.parts.store.mirroring.written == master.parts.store.mirroring.end
    answers = await asyncio.gather(*(client.send("orders", b"many") for _ in range(200)))
    assert {answer.code for answer in answers} == {0}


async def test_without_a_slave_a_send_is_stored_and_the_sender_told(start_broker, open_client):
    master = await start_broker(replication=WAITING)
    client = await open_client(master)

    answer = await client.send("orders")

    assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
    assert master.parts.store.max_offset("orders", 0) == 1


async def test_a_slave_that_takes_too_long_is_not_waited_for(start_broker, open_client):
    master = await start_broker(replication=replace(WAITING, copy_timeout=0.1))
    client = await open_client(master)
    lazy = await RawSlave.open(serving(master).address)
    await lazy.report(0)
    await until(lambda: serving(master).in_sync == 1)

    answers = await asyncio.gather(*(client.send("orders") for _ in range(5)))
    answered_after_write = await client.send("orders", properties={"WAIT": "false"})

    assert {answer.code for answer in answers} == {ResponseCode.FLUSH_SLAVE_TIMEOUT}
    assert answered_after_write.code == ResponseCode.SUCCESS
    await lazy.report(master.parts.store.mirroring.end)
    await until(lambda: {each.acknowledged for each in serving(master).replicas} != {0})
    assert master.parts.writes.waiting == 0
    lazy.close()


async def test_a_slave_too_far_behind_is_not_waited_for(start_broker, open_client):
    master = await start_broker(replication=replace(WAITING, max_gap=1000))
    client = await open_client(master)
    lazy = await RawSlave.open(serving(master).address)
    await lazy.report(0)
    await until(lambda: bool(serving(master).replicas))

    answer = await client.send("orders", b"x" * 2000)

    assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
    lazy.close()


@given(
    acks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=30),
    ends=st.lists(st.integers(1, 100), max_size=20),
    needed=st.integers(1, 4),
)
def test_everybody_is_answered_once_and_only_when_enough_slaves_have_it(acks, ends, needed):
    async def check():
        followers: list[Any] = [SimpleNamespace(acknowledged=0, is_in_sync=True) for _ in range(4)]
        copies = ReplicaAcks(needed, 60.0, lambda: followers, asyncio.get_running_loop())
        answered: dict[int, PutStatus] = {}

        def note(number, status):
            assert number not in answered
            answered[number] = status

        for number, end in enumerate(sorted(ends)):
            copies.when_copied(end, lambda status, number=number: note(number, status))  # type: ignore[misc]  # bound now
        for who, offset in acks:
            followers[who].acknowledged = max(offset, followers[who].acknowledged)
            copies.acknowledged()

        reached = sorted((each.acknowledged for each in followers), reverse=True)[needed - 1]
        expected = {n: PutStatus.PUT_OK for n, end in enumerate(sorted(ends)) if end <= reached}
        assert answered == expected
        copies.end()
        assert len(answered) == len(ends)
        assert len(copies) == 0

    asyncio.run(check())


READABLE = PullSettings(slave_read_enable=True)
LIVELY = replace(SERVING, heartbeat=0.05)
STORE = replace(SMALL_STORE, file_size=128 * 1024, max_record=64 * 1024)


async def send(broker: Broker, open_client: OpenClient, *bodies: bytes) -> None:
    client = await open_client(broker)
    for body in bodies:
        await client.stored("orders", body)


def named(name: str, numbers: range) -> list[bytes]:
    return [b"%s-%d" % (name.encode(), number) for number in numbers]


async def bodies_of(broker: Broker, open_client: OpenClient) -> list[bytes]:
    await until(lambda: "orders" in broker.parts.topics)
    return await consume(await open_client(broker), "orders")


class Pair:
    """A master and its slave, which have several lives."""

    def __init__(self, start_broker: StartBroker, open_client: OpenClient, root: Path) -> None:
        self._start = start_broker
        self._open = open_client
        self._root = root

    async def part(self) -> None:
        """Have the master lose five messages that its slave has; both are stopped."""
        master = await self.start_master()
        slave = await self.start_slave(master)
        await send(master, self._open, *named("common", range(10)))
        shutil.copytree(self._root / "master" / "commitlog", self._root / "saved")
        await send(master, self._open, *named("oldtail", range(5)))
        await until_copied(master, slave)
        await slave.stop()
        await master.stop()
        shutil.rmtree(self._root / "master")
        (self._root / "master").mkdir()
        (self._root / "saved").rename(self._root / "master" / "commitlog")

    async def start_master(self, **changes: Any) -> Broker:
        settings = {"replication": LIVELY, "store": STORE, "pull": READABLE}
        return await self._start(root="master", **(settings | changes))

    async def start_slave(self, master: Broker, **told: Any) -> Broker:
        settings = slave_of(master, state_interval=0.05, **told)
        return await self._start(root="slave", store=STORE, pull=READABLE, **settings)


@pytest.fixture
def pair(start_broker, open_client, tmp_path):
    return Pair(start_broker, open_client, tmp_path)


HAD = named("common", range(10)) + named("oldtail", range(5))


@pytest.mark.parametrize("new", [5, 8], ids=["as long", "longer"])
async def test_a_master_that_lost_its_end_and_wrote_another_is_not_followed(
    pair, open_client, caplog, new
):
    await pair.part()
    master = await pair.start_master()
    await send(master, open_client, *named("newtail", range(new)))
    slave = await pair.start_slave(master)
    had = slave.parts.store.mirroring.written

    await until(lambda: "the logs have parted" in caplog.text, 10)
    await until_rounds(slave, 2)

    assert master.parts.store.mirroring.end >= had
    assert slave.parts.store.mirroring.written == had
    assert not following(slave).is_in_step
    assert await bodies_of(slave, open_client) == HAD


@pytest.mark.parametrize(
    "new",
    [[], named("newtail", range(4)), [*named("newtail", range(4)), b"shorter"]],
    ids=["before its last record", "where its last record begins", "within its last record"],
)
async def test_a_master_whose_log_ends_before_the_slaves_is_not_followed_when_it_grows(
    pair, open_client, caplog, new
):
    await pair.part()
    master = await pair.start_master()
    await send(master, open_client, *new)
    slave = await pair.start_slave(master)
    had = slave.parts.store.mirroring.written
    assert master.parts.store.mirroring.end < had
    await until(lambda: "empty this folder" in caplog.text, 10)

    await send(master, open_client, *named("newtail", range(8)))
    await until(lambda: "the logs have parted" in caplog.text, 10)

    assert slave.parts.store.mirroring.written == had
    assert await bodies_of(slave, open_client) == HAD


async def test_a_sender_is_not_told_that_such_a_slave_has_its_message(pair, open_client):
    await pair.part()
    waiting = replace(LIVELY, in_sync_replicas=2, copy_timeout=0.05)
    master = await pair.start_master(replication=waiting)
    slave = await pair.start_slave(master)
    client = await open_client(master)

    codes = [(await client.send("orders", b"newtail-%d" % each)).code for each in range(8)]

    assert master.parts.store.mirroring.end > slave.parts.store.mirroring.written
    # Stored, and perhaps only here: flush slave timeout, slave not available.
    assert set(codes) <= {11, 12}


async def test_a_slave_that_has_a_beginning_of_the_log_goes_on_after_restarts_of_either(
    pair, open_client, tmp_path, caplog
):
    master = await pair.start_master()
    slave = await pair.start_slave(master)
    sent: list[bytes] = []
    for life in range(3):
        more = [*named(f"life{life}", range(3)), b"x" * 50_000]
        await send(master, open_client, *more)
        sent += more
        await until_copied(master, slave)
        # Also one that ends with the master's, and one that is behind.
        await slave.stop()
        if life % 2:
            await send(master, open_client, *more)
            sent += more
        await master.stop()
        master = await pair.start_master()
        slave = await pair.start_slave(master)
    await until_copied(master, slave)
    await until(lambda: following(slave).is_in_step)

    (replica,) = serving(master).replicas
    await until(lambda: replica.acknowledged == master.parts.store.mirroring.end)
    assert await bodies_of(slave, open_client) == sent
    end = master.parts.store.mirroring.end
    mine, theirs = log_bytes(tmp_path / "master"), log_bytes(tmp_path / "slave")
    assert b"".join(mine.values())[:end] == b"".join(theirs.values())[:end]
    assert "empty this folder" not in caplog.text


# ---- what the master has deleted


async def test_a_slave_goes_on_though_the_master_has_deleted_the_file_that_its_log_ends_with(
    pair, open_client, caplog
):
    master = await pair.start_master()
    await send(master, open_client, *[b"x" * 50_000] * 3)
    first_file = bytes(master.parts.store.mirroring.stretch(0, STORE.file_size) or b"")
    async with scripted_master(first_file) as port:
        slave = await pair.start_slave(master, master_ha=f"127.0.0.1:{port}")
        await until(lambda: slave.parts.store.mirroring.written == STORE.file_size)
        await slave.stop()
    await master.stop()
    keeps_little = replace(STORE, retention=RetentionSettings(max_bytes=1))
    master = await pair.start_master(store=keeps_little)
    while master.parts.store.clean().log_files:
        pass
    assert master.parts.store.mirroring.start == STORE.file_size

    slave = await pair.start_slave(master)
    await until_copied(master, slave)
    await send(master, open_client, b"more")
    await until_copied(master, slave)

    assert "without a comparison" in caplog.text
    assert serving(master).in_sync == 1
    assert slave.parts.store.max_offset("orders", 0) == 4


@asynccontextmanager
async def scripted_master(*frames: bytes) -> AsyncIterator[int]:
    """Sends these frames to whoever has reported, and stays; its port."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        async with asyncio.timeout(30):
            await reader.readexactly(8)
        at = 0
        for frame in frames:
            writer.write(pack_head(at, len(frame)) + frame)
            at += len(frame)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for writer in writers:
            writer.close()
        server.close()
        await server.wait_closed()
