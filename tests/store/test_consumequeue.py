"""The queues' files and memory."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.store.settings import FlushSettings, StoreSettings, TopicRefused
from tests.support.store import SMALL, QuickFiles, bodies, messages_of, put

if TYPE_CHECKING:
    pass


class CountingFiles(QuickFiles):
    """Knows how many descriptors are open."""

    def __init__(self) -> None:
        self.open_now = 0
        self.most_open = 0

    def open(self, path, *, create: bool = False) -> int:
        fd = super().open(path, create=create)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        self.open_now -= 1


def test_the_files_are_apaches(open_store):
    store = open_store(replace(SMALL, queue_file_entries=300_000))
    places = [put(store, "T", 3, bytes(number), {"TAGS": "TagA"})[0] for number in range(5)]
    store.close()

    path = store.root / "consumequeue/T/3/00000000000000000000"
    data = path.read_bytes()

    assert len(data) == 6_000_000
    assert [entry[0] for entry in struct.iter_unpack(">qiq", data[:100])] == places
    assert {entry[2] for entry in struct.iter_unpack(">qiq", data[:100])} == {2598919}
    assert not any(data[100:])


def test_entries_are_read_alike_from_files_and_from_memory(open_store, clock):
    store = open_store()
    for number in range(100):
        put(store, "T", 0, b"%d" % number)
        store.write()
        if number % 13 == 0:
            clock.advance(11)
            store.tick()
        for offset in range(0, number + 1, 7):
            found = messages_of(store.read("T", 0, offset))
            assert [message.queue_offset for message in found] == list(
                range(offset, offset + len(found))
            )
            assert found[0].body == b"%d" % offset


def test_many_queues_take_bounded_memory_and_descriptors(open_store, clock):
    files = CountingFiles()
    settings = StoreSettings(
        file_size=64 << 20,
        index=False,
        preallocate_step=0,
        queue_file_entries=1000,
        open_queue_files=32,
        flush=FlushSettings(tail_memory=50_000, queue_tail_bytes=2000, queues_per_step=100),
    )
    store = open_store(settings, files=files)
    queues = 500
    for _ in range(12):
        for queue_id in range(queues):
            put(store, "T", queue_id, b"x")
        store.write()
        for _ in range(queues // 100 + 3):
            clock.advance(11)
            store.tick()
        assert store.statistics().queue_memory <= 50_000 + queues * 20

    assert files.most_open <= 32 + 10
    assert store.max_offset("T", 499) == 12
    for queue_id in range(0, queues, 17):
        assert len(bodies(store, "T", queue_id)) == 12
    assert files.open_now <= 32 + 10
    store.close()
    assert files.open_now == 0


def test_one_queue_that_is_never_flushed_takes_bounded_memory(open_store):
    store = open_store(
        StoreSettings(file_size=16 << 20, index=False, flush=FlushSettings(queue_tail_bytes=10_000))
    )
    for _ in range(500):
        for _ in range(20):
            put(store, "T", 0, b"x")
        store.write()
        assert store.statistics().queue_memory <= 10_000 + 20

    assert len(bodies(store, "T", 0)) == 10_000


def test_a_deleted_topic_is_gone_and_can_be_made_again(open_store):
    store = open_store()
    for topic in ("T", "other"):
        for number in range(100):
            put(store, topic, number % 2, b"%d" % number)
    store.write()
    store.tick()

    assert store.delete_topic("T") == 2

    assert {state.topic for state in store.queues()} == {"other"}
    assert not (store.root / "consumequeue/T").exists()
    assert put(store, "T", 0, b"again")[1] == 0
    store.write()
    assert bodies(store, "T", 0) == [b"again"]
    assert len(bodies(store, "other", 0)) == 50
    store.close()
    assert bodies(open_store(), "T", 0) == [b"again"]


@pytest.mark.parametrize(
    "topic", ["", ".", "..", "../commitlog", "../../victim", "a/b", "\0", "\ud800"]
)
def test_deleting_a_topic_never_leaves_the_folder_of_the_queues(open_store, tmp_path, topic):
    victim = tmp_path / "victim"
    victim.mkdir()
    store = open_store()
    put(store, "T", 0, b"kept")
    store.write()
    store.tick()

    with pytest.raises(TopicRefused, match="cannot name a folder"):
        store.delete_topic(topic)

    assert victim.exists()
    assert bodies(store, "T", 0) == [b"kept"]
    assert (store.root / "commitlog").exists()
    assert store.delete_topic("unknown") == 0
