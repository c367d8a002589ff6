"""Apache's broker and ours as master and slave of each other, in both directions.

The logs must be the same bytes, and what a consumer reads from the slave what the master has.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import PullSettings, RegistrationSettings
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from tests.interop import apache
from tests.support.broker import SMALL_STORE, RawClient, small_settings, until
from tests.support.replication import QUICK, SERVING, consume, log_bytes

if TYPE_CHECKING:
    from tests.interop.apache import Release

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

FILE_SIZE = 256 * 1024
DEADLINE = 120.0  #: 5.x copies the tables of its master once a minute
STORE = replace(SMALL_STORE, file_size=FILE_SIZE, max_record=64 * 1024)
QUEUES = 2

StartOurs = Callable[..., Awaitable[Broker]]
StartTheirs = Callable[..., Awaitable[apache.Broker]]


@pytest.fixture
async def names():
    server = NameServer(NameServerSettings(server=ServerSettings()))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def start_ours(tmp_path, names):
    started: list[Broker] = []

    async def start(**changes):
        settings = small_settings(
            tmp_path / "ours",
            store=STORE,
            name_servers=(str(names.address),),
            registration=RegistrationSettings(interval=1.0),
            pull=PullSettings(slave_read_enable=True),
            default_topic_queues=QUEUES,
            **changes,
        )
        broker = Broker(settings)
        await broker.start()
        started.append(broker)
        return broker

    yield start
    for broker in started:
        await broker.stop()


@pytest.fixture
async def start_theirs(tmp_path, names, release):
    stack = ExitStack()

    async def start(**settings):
        running = apache.Broker.running(
            release,
            tmp_path / "theirs",
            str(names.address),
            settings={
                "mappedFileSizeCommitLog": FILE_SIZE,
                "maxMessageSize": 32 * 1024,
                "defaultTopicQueueNums": QUEUES,
                "slaveReadEnable": "true",
                **settings,
            },
        )
        return await asyncio.to_thread(stack.enter_context, running)

    yield start
    await asyncio.to_thread(stack.close)


def driver(release: Release, home: Path, names: NameServer, broker: str) -> apache.Driver:
    return apache.Driver(release, home / "client", str(names.address), broker)


async def until_equal(master: Path, slave: Path, size: int) -> None:
    """Return when the first `size` bytes of both logs are the same."""

    def is_equal() -> bool:
        theirs = b"".join(log_bytes(slave).values()) if (slave / "commitlog").exists() else b""
        return theirs[:size] == b"".join(log_bytes(master).values())[:size]

    await until(is_equal, DEADLINE)


async def test_our_slave_follows_apaches_master(release, start_ours, start_theirs, names, tmp_path):
    master = await start_theirs(brokerRole="ASYNC_MASTER", brokerId=0)
    client = driver(release, tmp_path, names, master.address)
    topic = {"topic": "Orders", "count": 150, "size": 2500, "keys": "order-"}
    await asyncio.to_thread(client.run, "topic", {"topics": "Orders", "queues": QUEUES})
    await asyncio.to_thread(client.run, "send", topic)

    slave = await start_ours(
        broker_id=1, replication=replace(QUICK, heartbeat=5.0, silence=20.0, state_interval=1.0)
    )
    await asyncio.to_thread(client.run, "send", topic)
    pulled = await asyncio.to_thread(client.run, "pull", {"topics": "Orders"})
    await asyncio.to_thread(
        client.run, "consume", {"topic": "Orders", "group": "readers", "count": 300}
    )
    copying = slave.parts.replication.copying
    assert copying is not None
    await until(lambda: slave.parts.topics.get("Orders") is not None, DEADLINE)
    await until(
        lambda: (
            slave.parts.store.max_offset("Orders", 0) + slave.parts.store.max_offset("Orders", 1)
            == 300
        ),
        DEADLINE,
    )
    rounds = copying.rounds
    await until(lambda: copying.rounds > rounds + 1, DEADLINE)
    start = slave.parts.store.mirroring.start
    mine = log_bytes(tmp_path / "ours")
    theirs = log_bytes(master.store)

    assert start > 0
    end = slave.parts.store.mirroring.written
    last = f"{end - end % FILE_SIZE:020d}"
    for name, data in mine.items():
        used = len(data) if name < last else end % FILE_SIZE
        assert data[:used] == theirs[name][:used], name
    reader = await RawClient.open(slave)
    for queue_id in range(QUEUES):
        low = slave.parts.store.min_offset("Orders", queue_id)
        found = await consume(reader, "Orders", queue_id, low)
        assert len(found) == slave.parts.store.max_offset("Orders", queue_id) - low > 0
    await reader.close()
    assert len(pulled) == 300
    assert slave.parts.groups.get("readers") is not None
    await until(
        lambda: sum(slave.parts.progress.offsets("Orders", "readers").values()) == 300, DEADLINE
    )


async def test_our_slave_goes_on_with_apaches_master_and_leaves_one_that_lost_its_end(
    release, start_ours, start_theirs, names, tmp_path, caplog
):
    replication = replace(QUICK, heartbeat=5.0, silence=20.0, state_interval=1.0)

    async def send(master, count):
        client = driver(release, tmp_path, names, master.address)
        message = {"topic": "Orders", "count": count, "size": 100}
        await asyncio.to_thread(client.run, "send", message)

    async def start_slave():
        return await start_ours(broker_id=1, replication=replication)

    async def until_in_step(slave, count):
        store, following = slave.parts.store, slave.parts.replication.following
        assert following is not None
        await until(
            lambda: sum(store.max_offset("Orders", each) for each in range(QUEUES)) == count,
            DEADLINE,
        )
        await until(lambda: following.is_in_step, DEADLINE)

    master = await start_theirs(brokerRole="ASYNC_MASTER", brokerId=0)
    client = driver(release, tmp_path, names, master.address)
    await asyncio.to_thread(client.run, "topic", {"topics": "Orders", "queues": QUEUES})
    await send(master, 20)
    await asyncio.to_thread(master.server.stop)
    shutil.copytree(master.store, tmp_path / "saved")
    master = await start_theirs(brokerRole="ASYNC_MASTER", brokerId=0)
    slave = await start_slave()
    await until_in_step(slave, 20)
    await slave.stop()
    # Nothing new, then something.
    slave = await start_slave()
    await until_in_step(slave, 20)
    await slave.stop()
    await send(master, 10)
    slave = await start_slave()
    await until_in_step(slave, 30)
    had = slave.parts.store.mirroring.written
    await slave.stop()
    assert "empty this folder" not in caplog.text

    await asyncio.to_thread(master.server.stop)
    shutil.rmtree(master.store)
    (tmp_path / "saved").rename(master.store)
    master = await start_theirs(brokerRole="ASYNC_MASTER", brokerId=0)
    slave = await start_slave()
    following = slave.parts.replication.following
    assert following is not None
    await until(lambda: "the master sent nothing from" in caplog.text, DEADLINE)
    await send(master, 30)
    await until(lambda: "the logs have parted" in caplog.text, DEADLINE)

    assert slave.parts.store.mirroring.written == had
    assert not following.is_in_step


async def test_apaches_slave_follows_our_master(release, start_ours, start_theirs, names, tmp_path):
    port = apache.free_port(neighbours=(-2, 1))
    master = await start_ours(
        replication=replace(SERVING, port=None, heartbeat=5.0, silence=20.0, whole_log=True),
        server=ServerSettings(port=port),
        # Where Apache's slave asks for the topics.
        vip=True,
    )
    assert master.vip_address is not None
    client = await RawClient.open(master)
    sent: set[tuple[int, int, bytes]] = set()

    async def send(first, count):
        for number in range(first, first + count):
            body, queue_id = b"%d " % number + b"x" * 2500, number % QUEUES
            place = await client.stored("Orders", body, queue_id=queue_id)
            sent.add((queue_id, place.queue_offset, body))

    await send(0, 50)
    slave = await start_theirs(brokerRole="SLAVE", brokerId=1)
    await send(50, 300)
    end = master.parts.store.mirroring.end
    assert end > 2 * FILE_SIZE
    await until_equal(tmp_path / "ours", slave.store, end)
    serving = master.parts.replication.serving
    assert serving is not None
    await until(lambda: {each.acknowledged for each in serving.replicas} == {end}, DEADLINE)

    await client.pull("Orders")
    await client.report("Orders", 7)
    topics = slave.store / "config" / "topics.json"
    offsets = slave.store / "config" / "consumerOffset.json"

    def has_tables():
        try:
            table = json.loads(topics.read_text())["topicConfigTable"]
            return "Orders" in table and "Orders@billing" in offsets.read_text()
        except (OSError, ValueError):
            return False

    await until(has_tables, DEADLINE)
    await client.close()
    await master.stop()
    reading = driver(release, tmp_path, names, slave.address)
    found = await asyncio.to_thread(
        reading.run, "consume", {"topic": "Orders", "group": "readers", "count": 350}
    )

    assert {
        (each["queueId"], each["queueOffset"], base64.b64decode(each["body"])) for each in found
    } == sent
