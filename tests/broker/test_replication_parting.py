"""A slave follows only a master whose log begins with its own: the same bytes, not just as many."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.replication.master import pack_head
from orbitmq.broker.settings import PullSettings
from orbitmq.store.settings import RetentionSettings
from tests.support.broker import SMALL_STORE, RawClient, until
from tests.support.replication import (
    SERVING,
    consume,
    following,
    log_bytes,
    serving,
    slave_of,
    until_copied,
    until_rounds,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

StartBroker = Callable[..., Awaitable[Broker]]
OpenClient = Callable[..., Awaitable[RawClient]]

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


async def test_going_on_costs_one_record_and_what_is_new(pair, open_client):
    master = await pair.start_master()
    slave = await pair.start_slave(master)
    await send(master, open_client, *[b"x" * 1000] * 200)
    await until_copied(master, slave)
    last = slave.parts.store.mirroring.last_record
    await slave.stop()
    await until(lambda: not serving(master).replicas)

    slave = await pair.start_slave(master)
    await until(lambda: following(slave).is_in_step)

    end = master.parts.store.mirroring.end
    assert 1000 < end - last < 1300
    (replica,) = serving(master).replicas
    # A head, and signs of life.
    assert end - last + 12 <= replica.sent_bytes < end - last + 12 * 100


async def test_a_log_of_one_record_is_not_taken_for_an_empty_one(pair, open_client):
    master = await pair.start_master()
    slave = await pair.start_slave(master)
    await send(master, open_client, b"one")
    await until_copied(master, slave)
    assert slave.parts.store.mirroring.last_record == 0
    await slave.stop()
    await send(master, open_client, b"two")

    slave = await pair.start_slave(master)
    await until_copied(master, slave)

    assert await bodies_of(slave, open_client) == [b"one", b"two"]


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


async def test_a_master_that_says_only_that_it_lives_is_not_followed(pair, open_client, caplog):
    """So does Apache's when it has less than the slave, or has deleted what the slave asks for."""
    master = await pair.start_master()
    slave = await pair.start_slave(master)
    await send(master, open_client, b"one", b"two")
    await until_copied(master, slave)
    asked = slave.parts.store.mirroring.last_record
    await slave.stop()

    async with scripted_master(b"", b"", first=asked) as port:
        slave = await pair.start_slave(master, master_ha=f"127.0.0.1:{port}")
        await until(lambda: f"the master sent nothing from {asked} on" in caplog.text)

        assert not following(slave).is_in_step


async def test_a_late_sign_of_life_before_the_log_is_no_reason_to_leave(pair, open_client):
    master = await pair.start_master()
    slave = await pair.start_slave(master)
    await send(master, open_client, b"one", b"two")
    await until_copied(master, slave)
    mirroring = slave.parts.store.mirroring
    asked, end = mirroring.last_record, mirroring.written
    last = bytes(mirroring.stretch(asked, end - asked) or b"")
    await slave.stop()

    # The record comes in two pieces, cut anywhere.
    async with scripted_master(b"", last[:50], last[50:], first=asked) as port:
        slave = await pair.start_slave(master, master_ha=f"127.0.0.1:{port}")
        await until(lambda: following(slave).is_in_step)

        assert slave.parts.store.mirroring.written == end


@asynccontextmanager
async def scripted_master(*frames: bytes, first: int = 0) -> AsyncIterator[int]:
    """Sends these frames to whoever has reported, and stays; its port."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        async with asyncio.timeout(30):
            await reader.readexactly(8)
        at = first
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
