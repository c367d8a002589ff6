"""Appending in turns: places, bytes, and what happens when the disk does not take them."""

from __future__ import annotations

import errno
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.message.properties import property_value
from orbitmq.message.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    RecordRefused,
    tag_code,
)
from orbitmq.store.queues import SCHEDULE_TOPIC
from orbitmq.store.settings import DiskFull, MessageTooLarge, StoreFailed, TopicRefused, WriteFailed
from tests.support.store import BORN_HOST, NOW, SMALL, FailingFiles, bodies, messages_of, put

if TYPE_CHECKING:
    from pathlib import Path

    from orbitmq.store.append import Arrival
    from orbitmq.store.store import Store


def log_bytes(store: Store) -> bytes:
    """The log as it is in the files."""
    return b"".join(path.read_bytes() for path in sorted((store.root / "commitlog").iterdir()))


def entries(store: Store, topic: str, queue_id: int) -> list[tuple[int, int, int]]:
    """The queue as it is in the files after a proper shutdown."""
    folder: Path = store.root / "consumequeue" / topic / str(queue_id)
    raw = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return [entry for entry in struct.iter_unpack(">qiq", raw) if entry[1]]


# ---- places


def test_a_message_gets_its_place_at_once_and_is_seen_after_the_write(open_store):
    store = open_store()

    first = put(store, "T", 3, b"one")
    second = put(store, "T", 3, b"two")

    assert (first, second[1]) == ((0, 0), 1)
    assert store.max_offset("T", 3) == 0
    assert store.write() == store.statistics().log_end > second[0] > 0
    assert bodies(store, "T", 3) == [b"one", b"two"]


def test_the_bytes_are_those_of_the_documented_record(open_store):
    store = open_store()
    put(store, "x", 0, b"before")
    put(store, "T", 1, b"hi", {"TAGS": "A"})
    store.write()

    message = messages_of(store.read("T", 1, 0))[0]
    place = message.physical_offset

    assert message.encode() == log_bytes(store)[place : place + 101]
    assert (message.topic, message.queue_id, message.queue_offset) == ("T", 1, 0)
    assert message.born_host == ("10.0.0.7", 50123)
    assert message.store_host == ("127.0.0.1", 10911)
    assert message.store_ms == int(NOW * 1000)
    assert message.body == b"hi"
    assert dict(message.properties) == {"TAGS": "A"}


def test_arrivals_are_announced_with_the_write(open_store):
    store = open_store()
    announced: list[Arrival] = []
    store.on_arrival(announced.extend)
    put(store, "T", 1, b"hi", {"TAGS": "A"})

    assert announced == []
    store.write()

    queue, number, code, place, size = announced[0]
    assert (queue.topic, queue.queue_id, number, code, place) == ("T", 1, 0, 65, 0)
    assert size == store.statistics().log_end


def test_a_record_that_does_not_fit_begins_the_next_file(open_store):
    store = open_store()
    while store.statistics().log_end < 7000:
        put(store, "T", 0, bytes(100))
        store.write()
    end = store.statistics().log_end

    place, _ = put(store, "T", 0, bytes(2000))
    store.write()

    assert place == 8192
    assert struct.unpack_from(">iI", log_bytes(store), end) == (8192 - end, 0xCBD43194)
    assert messages_of(store.read("T", 0, store.max_offset("T", 0) - 1))[0].body == bytes(2000)


@pytest.mark.parametrize("rest", [8, 9])
def test_eight_bytes_are_left_for_the_end_record(open_store, rest):
    store = open_store()
    size = 8192 - rest - 92  # a record of topic T without properties takes 92 bytes more

    place, _ = put(store, "T", 0, bytes(size))
    following, _ = put(store, "T", 0, b"")
    store.write()

    assert (place, following) == (0, 8192)
    store.abandon()
    assert bodies(open_store(), "T", 0) == [bytes(size), b""]


def test_a_batch_goes_whole_into_the_next_file(open_store):
    store = open_store()
    put(store, "T", 0, bytes(7000))
    elements = [(bytes(200), flag, b"TAGS\x01A\x02") for flag in range(4)]

    places, first = store.append_batch("T", 0, elements, 5, BORN_HOST)
    store.write()

    assert (places[0], first, len(places)) == (8192, 1, 4)
    found = messages_of(store.read("T", 0, 1))
    assert [message.flag for message in found] == [0, 1, 2, 3]
    assert [message.physical_offset for message in found] == places
    assert [message.queue_offset for message in found] == [1, 2, 3, 4]


def test_what_can_never_fit_is_refused_and_names_the_limit(open_store):
    store = open_store(replace(SMALL, max_record=1000))
    put(store, "T", 0, b"kept")

    with pytest.raises(MessageTooLarge, match="1000 bytes are allowed"):
        put(store, "T", 0, bytes(1000))
    with pytest.raises(MessageTooLarge, match="1000 bytes are allowed"):
        store.append_batch("T", 0, [(b"", 0, b""), (bytes(1000), 0, b"")], 5, BORN_HOST)
    with pytest.raises(MessageTooLarge, match="a batch of"):
        store.append_batch("T", 0, [(bytes(500), 0, b"")] * 20, 5, BORN_HOST)
    with pytest.raises(RecordRefused):
        store.append("T", 0, b"", bytes(40_000), 5, BORN_HOST)
    store.write()

    assert bodies(store, "T", 0) == [b"kept"]


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "../../etc", "a\0b", "x" * 300])
def test_a_topic_that_cannot_name_a_folder_is_refused(open_store, topic):
    with pytest.raises(TopicRefused):
        put(open_store(), topic, 0, b"")


# ---- kinds of messages


@pytest.mark.parametrize("restart", [False, True])
def test_entries_of_the_schedule_topic_hold_the_time_of_delivery(open_store, restart):
    store = open_store()
    for level in ("3", "18", "99", "0"):
        put(store, SCHEDULE_TOPIC, 2, b"", {"DELAY": level, "TAGS": "A"})
    store.write()
    if restart:  # and the entries are made again from the log
        store.abandon()
        store = open_store()
    store.close()

    now = int(NOW * 1000)
    codes = [code for _, _, code in entries(store, SCHEDULE_TOPIC, 2)]
    assert codes == [now + 10_000, now + 7_200_000, now + 7_200_000, 65]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("before", [0, 9000], ids=["one file", "two files"])
def test_a_delay_begins_with_the_write_and_not_with_the_turn(open_store, clock, restart, before):
    """A turn may be long: its beginning is not when its messages are stored."""
    store = open_store(replace(SMALL, file_size=16_384))
    put(store, "T", 0, bytes(before))
    put(store, SCHEDULE_TOPIC, 2, bytes(before), {"DELAY": "3", "TAGS": "A"})
    put(store, "T", 0, b"last")
    clock.advance(0.0664)
    store.write()
    if restart:
        store.abandon()
        store = open_store(replace(SMALL, file_size=16_384))

    (delayed,) = messages_of(store.read(SCHEDULE_TOPIC, 2, 0))
    assert delayed.store_ms == int(NOW * 1000) + 67
    assert delayed.body == bytes(before)
    assert store.queue_entries(SCHEDULE_TOPIC, 2, 0, 1) == [
        (delayed.physical_offset, delayed.size, delayed.store_ms + 10_000)
    ]
    assert bodies(store, "T", 0) == [bytes(before), b"last"]


def test_messages_of_a_turn_share_a_time_until_it_is_taken_anew(open_store, clock):
    store = open_store()
    for body in (b"0", b"1", b"2", b"3"):
        put(store, "T", 0, body)
        clock.advance(0.01)
        if body == b"1":
            store.take_time_anew()
    store.write()
    put(store, "T", 0, b"next turn")
    store.write()

    times = [message.store_ms - int(NOW * 1000) for message in messages_of(store.read("T", 0, 0))]
    assert times == [0, 0, 20, 20, 40]


@pytest.mark.parametrize("restart", [False, True])
def test_prepared_and_rolled_back_messages_have_no_place_in_the_queue(open_store, restart):
    store = open_store()
    for sys_flag in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK, TRANSACTION_COMMIT, 0):
        put(store, "T", 0, b"%d" % sys_flag, sys_flag=sys_flag)
    store.write()
    if restart:
        store.abandon()
        store = open_store()

    assert bodies(store, "T", 0) == [b"8", b"0"]


# ---- a disk that does not take it


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("reached", [0, 1, 60, 150, 450])
def test_a_write_that_fails_half_way_leaves_nothing_behind(open_store, code, reached):
    disk = FailingFiles()
    store = open_store(files=disk)
    put(store, "T", 0, b"before")
    store.write()
    end = store.statistics().log_end
    attempts: list[int] = []

    def stop(call, size):
        if call != "pwrite":
            return None
        attempts.append(size)
        if len(attempts) == 1 and reached:
            return min(reached, size)
        raise OSError(code, "injected")

    disk.before = stop
    for number in range(4):
        put(store, "T", number % 2, b"refused" * 10)
    with pytest.raises(DiskFull if code == errno.ENOSPC else WriteFailed):
        store.write()
    disk.heal()

    assert store.statistics().log_end == end
    assert log_bytes(store)[end:].strip(b"\0") == b""
    assert bodies(store, "T", 0) == [b"before"]
    assert put(store, "T", 0, b"after") == (end, 1)
    assert put(store, "T", 1, b"other")[1] == 0
    store.write()
    store.abandon()
    store = open_store()
    assert bodies(store, "T", 0) == [b"before", b"after"]
    assert bodies(store, "T", 1) == [b"other"]


def test_a_refused_message_does_not_come_back_behind_a_shorter_one(open_store):
    disk = FailingFiles()
    store = open_store(files=disk)
    # Three records of which the last would lie where a later one ends.
    put(store, "T", 0, b"a" * 20)
    put(store, "T", 0, b"b" * 20)
    total = 2 * (92 + 20)
    short = [total - 1]
    disk.before = lambda call, size: (
        short.pop() if call == "pwrite" and short else (0 if call == "pwrite" else None)
    )
    with pytest.raises(DiskFull):
        store.write()
    disk.heal()

    put(store, "T", 0, b"c" * 20)
    store.write()
    store.abandon()

    assert bodies(open_store(), "T", 0) == [b"c" * 20]


def test_a_turn_over_two_files_is_undone_in_both(open_store):
    disk = FailingFiles()
    store = open_store(files=disk)
    put(store, "T", 0, bytes(5000))
    store.write()
    calls: list[int] = []

    def fail_second(call, size):
        if call == "pwrite":
            calls.append(size)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "injected")
        return

    disk.before = fail_second
    put(store, "T", 0, b"x" * 2000)
    put(store, "T", 0, b"y" * 3000)
    with pytest.raises(DiskFull):
        store.write()
    disk.heal()

    put(store, "T", 0, b"z")
    store.write()
    store.abandon()
    assert bodies(open_store(), "T", 0) == [bytes(5000), b"z"]


def test_a_store_that_cannot_undo_refuses_writes_and_goes_on_reading(open_store):
    disk = FailingFiles()
    store = open_store(files=disk)
    put(store, "T", 0, b"kept")
    store.write()

    attempts: list[int] = []

    def refuse(call, size):
        if call == "pwrite":
            attempts.append(size)
            if len(attempts) == 1:
                return 50
        if call in ("pwrite", "truncate"):
            raise OSError(errno.EIO, "injected")
        return None

    disk.before = refuse
    put(store, "T", 0, b"lost")
    with pytest.raises(WriteFailed):
        store.write()
    disk.heal()

    with pytest.raises(StoreFailed, match="until the store is opened again"):
        put(store, "T", 0, b"refused")
    assert bodies(store, "T", 0) == [b"kept"]
    store.close()
    assert bodies(open_store(), "T", 0) == [b"kept"]


def test_a_queue_that_cannot_be_written_keeps_its_entries_in_memory_and_is_tried_again_soon(
    open_store, clock
):
    disk = FailingFiles()
    store = open_store(files=disk)
    log_writes: list[int] = []

    def only_the_log(call, size):
        # Entries are written in multiples of 20 bytes, the records here are not.
        if call == "pwrite" and size % 20 == 0:
            raise OSError(errno.ENOSPC, "injected")
        log_writes.append(size)
        return

    disk.before = only_the_log
    put(store, "T", 0, b"first")
    for number in range(12):
        put(store, "T", 0, b"%05d" % number)
    store.write()

    with pytest.raises(DiskFull, match="consume queue"):
        put(store, "T", 0, b"refused")
    assert len(bodies(store, "T", 0)) == 13
    clock.advance(1.0)
    store.tick()  # begins a round
    store.tick()
    with pytest.raises(DiskFull, match="consume queue"):
        put(store, "T", 0, b"refused")
    disk.heal()
    clock.advance(1.0)
    store.tick()
    store.tick()
    put(store, "T", 0, b"accepted")
    store.write()
    assert len(bodies(store, "T", 0)) == 14


@pytest.mark.parametrize(
    "properties",
    [
        b"TAGS\x01A",
        b"TAGS\x01A\x02",
        b"TAGS\x01A\x02KEYS\x01k\x02",
        b"KEYS\x01k\x02TAGS\x01A",
        b"KEYS\x01k\x02TAGS\x01A\x02",
        b"TAGS\x01B\x02TAGS\x01A\x02",
        b"XTAGS\x01B\x02TAGS\x01A\x02XTAGS\x01C\x02",
        b"TAGS\x01A\x02k\x01TAGS\x02",
        b"TAGS\x01\x02",
        b"XTAGS\x01A\x02",
        b"k\x01TAGS\x02",
        b"TAGS\x01Gr\xc3\xb6\xc3\x9fe\x02",
        b"",
    ],
)
def test_the_entry_holds_the_code_of_the_tag_wherever_it_stands(open_store, properties):
    store = open_store()
    expected = tag_code(property_value(properties, "TAGS"))

    for _ in range(2):  # the second one is known
        store.append("T", 0, b"body", properties, 1, BORN_HOST)
    store.append_batch("T", 0, [(b"body", 0, properties)], 1, BORN_HOST)
    store.write()

    entries = store.queue_entries("T", 0, 0, 3)
    assert entries is not None
    assert [code for _, _, code in entries] == [expected] * 3
