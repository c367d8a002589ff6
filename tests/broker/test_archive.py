"""A broker that archives its log deletes only what is archived."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.archive import Catalog, Entries, Location, problems_of
from orbitmq.broker.broker import Broker
from orbitmq.broker.metrics import Metrics
from orbitmq.broker.settings import ArchiveSettings, ArchiveWriter
from orbitmq.errors import SettingError
from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import parse_address
from orbitmq.store.settings import RetentionSettings
from orbitmq.wire.codes import ResponseCode
from tests.support.broker import SMALL_STORE, RawClient, until
from tests.support.command import Started
from tests.support.replication import SERVING, slave_of, until_copied
from tests.support.store import FailingFiles

RETENTION = RetentionSettings(max_bytes=64 * 1024, expired_ratio=0.8, files_per_run=100)
STORE = replace(SMALL_STORE, file_size=64 * 1024, max_record=16 * 1024, retention=RETENTION)
QUICKLY = ArchiveSettings(interval=0.02, share=1.0)


def into(folder: Path, **changes: object) -> ArchiveSettings:
    return replace(QUICKLY, folder=str(folder), **changes)  # type: ignore[arg-type]


async def send(client: RawClient, count: int) -> None:
    for _ in range(0, count, 50):
        await asyncio.gather(
            *(client.stored("orders", bytes(500), queue_id=each % 2) for each in range(50))
        )


def log_start(broker: Broker) -> int:
    """Where the log begins after a run of retention."""
    store = broker.parts.store
    store.clean()
    return store.statistics().log_start


@pytest.mark.feature("T7")
async def test_nothing_is_deleted_before_it_is_archived(
    start_broker, open_client, tmp_path, caplog
):
    occupied = tmp_path / "archive"
    occupied.write_text("no folder")
    disk = FailingFiles()
    disk.ratio = 0.5
    broker = await start_broker(store=STORE, archive=into(occupied), parts={"files": disk})
    client = await open_client(broker)
    await send(client, 400)
    archiver = broker.parts.archiver

    await until(lambda: archiver.problem)
    for _ in range(5):
        assert log_start(broker) == 0
    text = b"".join(await Metrics(broker.parts).text()).decode()
    assert "orbitmq_archive_failing{" in text
    assert broker.parts.store.statistics().is_held_back
    assert "wait until they are archived" in caplog.text
    disk.ratio = 0.95
    assert log_start(broker) == 0
    assert (await client.send("orders", b"x")).code != ResponseCode.SUCCESS

    occupied.unlink()
    disk.ratio = 0.5
    await until(lambda: log_start(broker) > 0)

    await until(lambda: not archiver.problem)
    catalog = Catalog(Location(str(occupied)))
    low = broker.parts.store.min_offset("orders", 0)
    assert low > 0
    assert catalog.gaps(("orders", "broker-a", 0), 0, low) == []
    assert (await client.send("orders", b"x")).code == ResponseCode.SUCCESS


async def test_a_setting_prefers_new_messages_to_unarchived_ones(
    start_broker, open_client, tmp_path
):
    (tmp_path / "archive").write_text("no folder")
    disk = FailingFiles()
    disk.ratio = 0.5
    archive = into(tmp_path / "archive", delete_unarchived=True)
    broker = await start_broker(store=STORE, archive=archive, parts={"files": disk})
    await send(await open_client(broker), 400)

    assert log_start(broker) == 0
    disk.ratio = 0.87
    assert log_start(broker) > 0


async def test_an_archive_that_lost_files_frees_nothing(start_broker, open_client, tmp_path):
    folder = tmp_path / "archive"
    broker = await start_broker(store=STORE, archive=into(folder))
    await send(await open_client(broker), 400)
    await until(lambda: broker.parts.archiver.written > 1 and not broker.parts.archiver.behind)
    for file in folder.rglob("*.parquet"):
        file.unlink()

    log_start(broker)
    await until(lambda: "lacks files" in broker.parts.archiver.problem)
    assert log_start(broker) == 0


@pytest.mark.parametrize("writer", [ArchiveWriter.MASTER, ArchiveWriter.SLAVE])
async def test_master_and_slave_share_one_archive(start_broker, open_client, tmp_path, writer):
    archive = into(tmp_path / "archive", writer=writer)
    master = await start_broker(root="master", store=STORE, archive=archive, replication=SERVING)
    slave = await start_broker(root="slave", store=STORE, archive=archive, **slave_of(master))
    await send(await open_client(master), 400)
    await until_copied(master, slave)

    await until(lambda: log_start(master) > 0 and log_start(slave) > 0)

    entries = Entries(Location(str(tmp_path / "archive")))
    written = [entries.read("broker-a", start) for start in entries.log_files("broker-a")]
    assert {entry.writer.split()[0] for entry in written} == {writer.value}
    assert [problems_of(entries, entry) for entry in written] == [[]] * len(written)


def test_settings_that_cannot_work_are_refused():
    for wrong in ({"share": 0.0}, {"share": 2.0}, {"folder": ""}, {"interval": 0.0}):
        with pytest.raises(SettingError, match=f"archive.{next(iter(wrong))}"):
            ArchiveSettings(**wrong)


async def test_a_killed_broker_archives_every_message_once(tmp_path):
    """Each life ends with kill -9 while it archives."""
    words = ("broker", "--data", str(tmp_path / "broker-a"), "--port", "0")
    settings = {
        "broker.store.file_size": 1024 * 1024,
        "broker.archive.folder": tmp_path / "archive",
        "broker.archive.interval": 0.01,
    }
    flags = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    entries = Entries(Location(str(tmp_path / "archive")))
    chance, sent = random.Random(7), 0
    for _ in range(3):
        with Started(*words, *flags) as broker:
            address = parse_address(broker.address("broker-a"))
            client = RawClient(await connect(address, owner=Dispatcher({})), [])
            goal = len(entries.log_files("broker-a")) + chance.randrange(2, 5)
            while len(entries.log_files("broker-a")) < goal:
                await asyncio.gather(
                    *(client.stored("orders", bytes(2000), queue_id=n % 4) for n in range(50))
                )
                sent += 50
            broker.process.kill()
            client.connection.close()

    catalog = Catalog(entries.location)
    assert [problems_of(entries, entry) for entry in catalog.entries()] == [[]] * len(
        catalog.entries()
    )
    rows = Counter[int]()
    for part in (part for entry in catalog.entries() for part in entry.files):
        for queue in part.queues:
            assert queue.first == rows[queue.queue]
            assert queue.rows == queue.last - queue.first + 1
            rows[queue.queue] += queue.rows
    assert 0 < sum(rows.values()) <= sent
