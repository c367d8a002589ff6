"""Closed log files as Parquet: what is written, and what a crash leaves."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from orbitmq.archive import (
    ArchiveError,
    Catalog,
    Entries,
    Location,
    LogEntry,
    problems_of,
    read_piece,
    strays,
)
from orbitmq.message.arrow import MESSAGE_SCHEMA, BadBody, messages_to_arrow
from orbitmq.names import dead_letter_topic, retry_topic
from orbitmq.store.archive import archive_log_file, check_same_log, closed_log_files, deleted_topics
from orbitmq.store.store import Store
from tests.support.command import COMMAND, environment
from tests.support.store import put

DAY = 86_400.0
COLUMNS = MESSAGE_SCHEMA.names
TOPICS = ("orders", "visits|eu", dead_letter_topic("billing"))


def fill(store: Store, clock, count: int, seed: int = 0, size: int = 300) -> None:
    chance = random.Random(seed)
    for number in range(count):
        topic = chance.choice((*TOPICS, retry_topic("billing"), "SCHEDULE_TOPIC_XXXX"))
        body = b"%d" % number + bytes(chance.randrange(size))
        put(store, topic, chance.randrange(3), body, {"TAGS": "a", "n": str(number)})
        clock.advance(chance.choice((0.0, 0.5, 900.0)))
    store.write()
    store.wait_flushed(store.statistics().log_end)


def archive(root: Path, entries: Entries) -> list[LogEntry]:
    """Archive what is closed and not archived."""
    done = entries.log_files("broker-a")
    return [
        entry
        for file in closed_log_files(root)
        if file.start not in done
        for entry in archive_log_file(
            file, entries, "broker-a", writer="test", deleted=deleted_topics(root)
        )
        if entry is not None
    ]


def stored(store: Store, topic: str, queue: int) -> pa.Table:
    """What a reader of the broker gets."""
    batches, at = [], store.min_offset(topic, queue)
    while at < store.max_offset(topic, queue):
        found = store.read(topic, queue, at)
        batches.append(
            messages_to_arrow(
                [bytes(each) for each in found.pieces],
                broker_name="broker-a",
                bad_body=BadBody.NULL,
            )
        )
        at = found.next_offset
    return pa.Table.from_batches(batches, MESSAGE_SCHEMA)


def archived(catalog: Catalog, topic: str, queue: int) -> pa.Table:
    key = (topic, "broker-a", queue)
    bounds = catalog.bounds(key)
    if bounds is None:
        return MESSAGE_SCHEMA.empty_table()
    assert catalog.gaps(key, *bounds) == []
    batches = [
        batch
        for piece in catalog.pieces(key, *bounds)
        for batch in read_piece(catalog.location, piece, COLUMNS, batch_bytes=4096)
    ]
    return pa.Table.from_batches(batches, MESSAGE_SCHEMA)


@pytest.fixture
def entries(tmp_path) -> Entries:
    return Entries(Location(str(tmp_path / "archive")))


@pytest.mark.feature("T7")
@pytest.mark.parametrize("seed", range(4))
def test_the_archive_has_what_the_broker_has(open_store, clock, entries, seed):
    if seed == 3:  # an object store, which has neither renames nor locks
        entries = Entries(Location("mock://bucket/archive"))
    store = open_store()
    fill(store, clock, 400, seed)

    written = archive(store.root, entries)

    catalog = Catalog(entries.location)
    assert len(written) == len(closed_log_files(store.root)) > 5
    assert catalog.topics() == set(TOPICS)
    for topic, _, queue in catalog.queues():
        table = archived(catalog, topic, queue)
        assert table.num_rows > 0
        assert table.equals(stored(store, topic, queue).slice(0, table.num_rows))
        rest = stored(store, topic, queue).slice(table.num_rows)
        # What is missing lies in the file that is not closed.
        assert rest.num_rows < 60
    for part in (part for entry in written for part in entry.files):
        assert f"/day={part.day}/broker-a-" in part.path
        for each in part.queues:
            assert datetime.fromtimestamp(each.first_ms / 1000, UTC).date().isoformat() == part.day
    assert [problems_of(entries, entry) for entry in written] == [[]] * len(written)
    assert archive(store.root, entries) == []


def test_a_topic_that_was_created_again_begins_anew(open_store, clock, entries):
    store = open_store()
    fill(store, clock, 200)
    archive(store.root, entries)
    before = Catalog(entries.location).bounds(("orders", "broker-a", 0))
    fill(store, clock, 60, seed=1)
    store.delete_topic("orders")
    fill(store, clock, 200, seed=2)

    written = archive(store.root, entries)

    catalog = Catalog(entries.location)
    table = archived(catalog, "orders", 0)
    assert before is not None
    assert before[0] == table.column("queueOffset")[0].as_py() == 0
    assert table.equals(stored(store, "orders", 0).slice(0, table.num_rows))
    assert [entry.deleted for entry in written] == [store.deletions()] * len(written)
    store.delete_topic("orders")
    fill(store, clock, 60, seed=3)
    archive(store.root, entries)
    # All that was archived before the last deletion is of the deleted topic.
    bounds = Catalog(entries.location).bounds(("visits|eu", "broker-a", 0))
    assert bounds is not None
    for queue in range(3):
        left = archived(Catalog(entries.location), "orders", queue)
        assert left.equals(stored(store, "orders", queue).slice(0, left.num_rows))


def test_a_clock_that_is_set_back_hides_nothing(open_store, clock, entries):
    store = open_store()
    for seconds in (DAY, -DAY, 0.0):
        for number in range(40):
            put(store, "orders", 0, b"%d" % number + bytes(100))
            store.write()
        clock.advance(seconds)
    store.wait_flushed(store.write())

    archive(store.root, entries)

    table = archived(Catalog(entries.location), "orders", 0)
    assert table.num_rows > 80
    assert table.equals(stored(store, "orders", 0).slice(0, table.num_rows))


def test_long_names_are_archived(open_store, clock, entries):
    topics = ("|" * 126 + "a", "|" * 126 + "b", dead_letter_topic("g" * 249))
    store = open_store()
    for number in range(120):
        put(store, topics[number % 3], 0, bytes(300))
    store.wait_flushed(store.write())

    archive(store.root, entries)

    catalog = Catalog(entries.location)
    for topic in topics:
        table = archived(catalog, topic, 0)
        assert table.num_rows > 20
        assert table.equals(stored(store, topic, 0).slice(0, table.num_rows))


def test_damage_is_kept_or_named(open_store, clock, entries):
    store = open_store()
    for number in range(80):
        put(store, "orders", 0, b"%d" % number + bytes(100))
    store.wait_flushed(store.write())
    whole = stored(store, "orders", 0)
    rows = messages_to_arrow(
        [bytes(each) for each in store.read("orders", 0, 0).pieces],
        broker_name="broker-a",
        columns=["logOffset", "queueOffset"],
    )
    bad_body, lost = rows.column("logOffset").to_pylist()[1:3]
    store.close()
    with (store.root / "commitlog" / f"{0:020d}").open("rb+") as log:
        log.seek(bad_body + 88)
        log.write(b"X")  # the first byte of a body
        log.seek(lost)
        log.write(bytes(8))  # size and magic code

    (entry, *_) = archive(store.root, entries)

    assert [begin for begin, _ in entry.damaged] == [lost]
    catalog = Catalog(entries.location)
    found: dict[int, Any] = {}
    for piece in catalog.pieces(("orders", "broker-a", 0), 0, 4):
        for batch in read_piece(
            catalog.location, piece, ("queueOffset", "body", "storedBody", "bodyCrc")
        ):
            found |= {row["queueOffset"]: row for row in batch.to_pylist()}
    assert sorted(found) == [0, 1, 3]
    assert found[1]["body"] is None
    assert found[1]["storedBody"] == b"X" + whole.column("body")[1].as_py()[1:]
    assert found[3]["body"] == whole.column("body")[3].as_py()


def test_another_log_is_not_added_to_an_archive(open_store, clock, entries, tmp_path):
    one = open_store()
    fill(one, clock, 100)
    (entry, *_) = archive(one.root, entries)
    other = open_store(root=tmp_path / "other")
    fill(other, clock, 100, seed=1)

    check_same_log(entry, closed_log_files(one.root)[0])
    with pytest.raises(ArchiveError, match="or of an earlier life of it"):
        check_same_log(entry, closed_log_files(other.root)[0])
    with pytest.raises(ArchiveError, match="no data folder of a broker"):
        closed_log_files(tmp_path)


def test_kills_lose_and_double_nothing(open_store, clock, entries, tmp_path):
    store = open_store()
    fill(store, clock, 3000)
    store.close()
    files = len(closed_log_files(store.root))
    words = ("archive", "run", str(store.root), "--to", entries.location.text)
    killed = 0
    for share in range(1, 6):
        run = subprocess.Popen(
            [*COMMAND, *words, "--broker", "broker-a"], env=environment(), stdout=subprocess.DEVNULL
        )
        while run.poll() is None and len(entries.log_files("broker-a")) < files * share // 6:
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
        killed += run.wait() == -signal.SIGKILL
        for start in entries.log_files("broker-a"):
            assert entries.is_whole(entries.read("broker-a", start))

    written = archive(store.root, entries)

    assert killed >= 3
    assert 0 < len(written) < files
    catalog = Catalog(entries.location)
    assert [problems_of(entries, entry) for entry in catalog.entries()] == [[]] * files
    assert strays(entries, catalog.entries()) == []
    again = open_store()
    for topic, _, queue in catalog.queues():
        table = archived(catalog, topic, queue)
        assert table.equals(stored(again, topic, queue).slice(0, table.num_rows))
