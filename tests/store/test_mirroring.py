"""A log that follows another one: the same bytes at the same offsets, and the same queues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitmq.message.record import MAGIC_V1, MAGIC_V2
from orbitmq.store.mirror import MirrorRefused
from orbitmq.store.queues import SCHEDULE_TOPIC
from orbitmq.store.settings import DiskFull, StoreSettings, WriteRefused
from orbitmq.store.store import Store
from orbitmq.store.verify import find_last_record
from tests.support.store import SMALL, FailingFiles, HandClock, QuickFiles, bodies, put

ROOMY = replace(SMALL, file_size=1 << 20)


class Pair:
    """A store, and one that follows it."""

    def __init__(self, root: Path, settings: StoreSettings = SMALL) -> None:
        self._root = root
        self._settings = settings
        self.clock = HandClock()
        self.files = FailingFiles()
        self.master = Store(
            root / "master", settings, clock=self.clock, files=QuickFiles(), background=False
        )
        self.slave = self.open_slave()

    def open_slave(self, settings: StoreSettings | None = None) -> Store:
        self.slave = Store(
            self._root / "slave",
            settings or self._settings,
            clock=self.clock,
            files=self.files,
            background=False,
        )
        self.slave.mirroring.follow()
        return self.slave

    def crash_slave(self) -> None:
        self.slave.abandon()
        self.open_slave()

    def log_bytes(self, start: int, end: int) -> bytes:
        found = b""
        while start + len(found) < end:
            piece = self.master.mirroring.stretch(start + len(found), end - start - len(found))
            assert piece
            found += piece
        return found

    def copy(self, upto: int | None = None, step: int = 1 << 20) -> int:
        """Send what the slave does not have, in pieces of `step` bytes."""
        taking = self.slave.mirroring
        end = self.master.mirroring.end if upto is None else upto
        while taking.expected < end:
            at = taking.expected
            taking.append_raw(at, self.log_bytes(at, min(end, at + step)))
        return taking.expected

    def close(self) -> None:
        self.files.heal()
        self.master.abandon()
        self.slave.abandon()

    def assert_same(self) -> None:
        assert self.slave.mirroring.end == self.master.mirroring.end
        start = self.slave.mirroring.start
        folder = self._root / "slave" / "commitlog"
        mine = b"".join(
            each.read_bytes() for each in sorted(folder.iterdir()) if int(each.name) >= start
        )[: self.master.mirroring.end - start]
        assert mine == self.log_bytes(start, self.master.mirroring.end)
        for queue in self.master.queues():
            entries = self.master.queue_entries(
                queue.topic, queue.queue_id, queue.min_offset, queue.max_offset
            )
            assert entries == self.slave.queue_entries(
                queue.topic, queue.queue_id, queue.min_offset, queue.max_offset
            )
            assert bodies(self.slave, queue.topic, queue.queue_id) == bodies(
                self.master, queue.topic, queue.queue_id
            )


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    yield made
    made.close()


def fill(store: Store, count: int, size: int = 100, topic: str = "T") -> None:
    for number in range(count):
        put(store, topic, number % 3, b"%d " % number + b"x" * size, {"TAGS": f"tag{number % 5}"})
    store.write()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 3000)),
        st.tuples(st.just("park"), st.integers(0, 2), st.integers(0, 500)),
        st.tuples(st.just("copy"), st.integers(1, 700), st.integers(0, 4000)),
        st.tuples(st.just("crash"), st.just(0), st.just(0)),
        st.tuples(st.just("lose"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_whatever_happens_a_slave_has_a_part_of_its_masters_log_and_then_all_of_it(
    tmp_path_factory, steps
):
    pair = Pair(tmp_path_factory.mktemp("pair"))
    try:
        for what, number, size in steps:
            if what == "put":
                put(pair.master, f"T{number}", number, b"b" * size, {"TAGS": "A", "KEYS": "k"})
                pair.master.write()
            elif what == "park":
                put(pair.master, SCHEDULE_TOPIC, number, b"b" * size, {"DELAY": str(number + 1)})
                pair.master.write()
            elif what == "copy":
                end = min(pair.master.mirroring.end, pair.slave.mirroring.expected + size)
                pair.copy(end, step=number)
            elif what == "crash":
                pair.crash_slave()
            else:
                pair.slave.mirroring.forget_rest()
            assert pair.slave.mirroring.end <= pair.master.mirroring.end

        pair.copy(step=333)

        pair.assert_same()
    finally:
        pair.close()


def test_a_message_becomes_readable_when_its_last_byte_has_come(pair):
    arrived: list[int] = []
    pair.slave.on_arrival(lambda arrivals: arrived.extend(each[1] for each in arrivals))
    fill(pair.master, 1, size=500)
    end = pair.master.mirroring.end

    pair.copy(end - 1, step=100)
    before = (pair.slave.max_offset("T", 0), pair.slave.mirroring.written, list(arrived))
    pair.copy(end)

    assert before == (0, 0, [])
    assert (pair.slave.max_offset("T", 0), pair.slave.mirroring.written) == (1, end)
    assert arrived == [0]


def test_a_slave_that_begins_with_a_later_file_has_its_queues_begin_where_the_master_says(pair):
    fill(pair.master, 200)
    mirroring = pair.master.mirroring
    first = mirroring.last_file
    assert first > 0

    pair.slave.mirroring.append_raw(first, pair.log_bytes(first, mirroring.end))
    fill(pair.master, 5)
    pair.copy()
    pair.crash_slave()

    assert pair.slave.mirroring.start == first
    for queue_id in range(3):
        low = pair.slave.min_offset("T", queue_id)
        assert 0 < low < pair.master.max_offset("T", queue_id)
        assert pair.slave.max_offset("T", queue_id) == pair.master.max_offset("T", queue_id)
        assert bodies(pair.slave, "T", queue_id) == bodies(pair.master, "T", queue_id, low)


def test_a_topic_that_the_master_deleted_and_made_again_begins_anew(pair):
    fill(pair.master, 30)
    pair.copy()
    pair.master.delete_topic("T")
    fill(pair.master, 7)

    pair.copy()

    for _ in range(2):
        for queue_id in range(3):
            assert bodies(pair.slave, "T", queue_id) == bodies(pair.master, "T", queue_id)
        assert pair.slave.max_offset("T", 0) == 3
        pair.crash_slave()


def test_a_queue_that_begins_anew_takes_no_other_queue_of_its_topic_with_it(pair):
    # Apache's master also restarts queues of topics that live on, once all they had has expired.
    fill(pair.master, 30)
    put(pair.master, "T", 0, b"last")
    pair.master.write()
    pair.copy()
    kept = {queue_id: bodies(pair.slave, "T", queue_id) for queue_id in (1, 2)}
    pair.master.delete_topic("T")
    put(pair.master, "T", 0, b"new")
    pair.master.write()

    pair.copy()

    for _ in range(2):
        assert bodies(pair.slave, "T", 0) == [b"new"]
        assert {queue_id: bodies(pair.slave, "T", queue_id) for queue_id in (1, 2)} == kept
        assert all(kept.values())
        assert pair.slave.deleted_below("T") == 0
        pair.crash_slave()


def test_a_damaged_message_of_the_master_is_copied_and_not_served(tmp_path):
    pair = Pair(tmp_path, ROOMY)
    fill(pair.master, 9)
    end = pair.master.mirroring.end
    data = bytearray(pair.log_bytes(0, end))
    at = data.index(b"3 xxx")
    data[at] ^= 1

    pair.slave.mirroring.append_raw(0, bytes(data))

    result = pair.slave.read("T", 0, 0)
    assert (result.count, result.damaged) == (2, (1,))
    assert pair.slave.mirroring.written == end
    pair.close()


@pytest.mark.parametrize(
    ("offset", "change"),
    [
        pytest.param(1, lambda data: data, id="not at the end"),
        pytest.param(0, lambda data: data[8:], id="no record"),
        pytest.param(0, lambda data: bytes(len(data)), id="nothing"),
        pytest.param(0, lambda data: data[:28] + bytes(8)[:7] + b"\1" + data[36:], id="elsewhere"),
        pytest.param(0, lambda data: b"\x7f" + data[1:], id="too large"),
        pytest.param(
            0, lambda data: b"\0\0\1\0\xcb\xd4\x31\x94" + data[8:], id="end of another file"
        ),
    ],
)
def test_bytes_that_do_not_continue_the_log_are_refused(pair, offset, change):
    assert callable(change)
    fill(pair.master, 3)
    pair.copy()
    start = pair.slave.mirroring.expected
    fill(pair.master, 1)
    good = pair.log_bytes(start, pair.master.mirroring.end)

    with pytest.raises(MirrorRefused):
        pair.slave.mirroring.append_raw(start + offset, change(good))
    pair.slave.mirroring.forget_rest()
    pair.copy()

    pair.assert_same()


def test_a_slave_with_files_of_another_size_refuses(pair):
    pair.slave.abandon()
    pair.open_slave(replace(SMALL, file_size=4096))
    fill(pair.master, 60)

    with pytest.raises(MirrorRefused, match="file_size"):
        pair.copy()


def test_a_full_disk_takes_nothing_and_later_everything(pair):
    fill(pair.master, 3)
    pair.copy()
    fill(pair.master, 20)
    pair.files.fail("pwrite", 28)

    with pytest.raises(DiskFull):
        pair.copy()
    pair.files.heal()
    pair.slave.mirroring.forget_rest()
    pair.copy()

    pair.assert_same()


def test_nobody_else_adds_to_a_log_that_follows(pair):
    fill(pair.master, 3)
    pair.copy()

    with pytest.raises(WriteRefused, match="master"):
        put(pair.slave, "T", 0, b"mine")

    pair.assert_same()


# Topics that are deleted on the master.


def queues_of(store: Store, topic: str) -> set[int]:
    return {each.queue_id for each in store.queues() if each.topic == topic}


def test_messages_of_a_topic_that_is_known_to_be_deleted_get_into_no_queue(pair):
    fill(pair.master, 12)
    fill(pair.master, 6, topic="U")
    half_way = pair.master.mirroring.end // 2
    pair.copy(half_way)
    pair.master.delete_topic("T")
    deleted_at = pair.master.mirroring.end

    assert pair.slave.delete_topic_below("T", deleted_at)
    pair.copy()
    assert queues_of(pair.slave, "T") == set()
    put(pair.master, "T", 0, b"of the new topic")
    pair.master.write()
    pair.copy()

    pair.assert_same()
    assert queues_of(pair.slave, "T") == {0}
    assert pair.slave.deleted_below("T") == deleted_at


def test_a_crash_does_not_bring_back_what_was_deleted_on_the_master(pair):
    fill(pair.master, 12)
    pair.copy()
    end = pair.master.mirroring.end
    assert pair.slave.delete_topic_below("T", end + 1000)

    pair.crash_slave()

    assert queues_of(pair.slave, "T") == set()
    # What comes now may be of a topic that was made again.
    assert pair.slave.deleted_below("T") == end


MAGICS = [magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2)]


@pytest.fixture
def store(tmp_path):
    opened = open_store(tmp_path)
    yield opened
    opened.abandon()


def open_store(root: Path, file_size: int = SMALL.file_size) -> Store:
    store_settings = replace(SMALL, file_size=file_size)
    return Store(
        root / "store", store_settings, clock=HandClock(), files=QuickFiles(), background=False
    )


def log_of(store: Store, start: int, end: int) -> bytes:
    return bytes(store.mirroring.stretch(start, end - start) or b"")


BODIES = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 3000).map(bytes),
    st.tuples(st.sampled_from(MAGICS), st.integers(0, 300)).map(lambda pair: pair[0] * pair[1]),
)


@settings(max_examples=50, deadline=None)
@given(
    puts=st.lists(st.tuples(BODIES, st.sampled_from([1, 40, 200])), min_size=1, max_size=15),
    is_opened_again=st.booleans(),
)
def test_the_last_record_is_found_whatever_lies_in_the_log(
    tmp_path_factory, puts, *, is_opened_again
):
    root = tmp_path_factory.mktemp("log")
    store = open_store(root)
    try:
        for body, topic_size in puts:
            # Long names make records of the second kind.
            place, _ = put(store, "T" * topic_size, 0, body)
            store.write()
            assert store.mirroring.last_record == place
        if is_opened_again:
            store.close()
            store = open_store(root)

        assert store.mirroring.last_record == place
    finally:
        store.abandon()


def test_the_search_goes_on_behind_what_it_looks_at_at_a_time(tmp_path):
    store = open_store(tmp_path, file_size=4 << 20)
    put(store, "T", 0, b"first")
    place, _ = put(store, "T", 0, bytes((2 << 20) + 5))
    store.write()

    assert store.mirroring.last_record == place
    store.abandon()


def test_a_damaged_record_is_the_last_one_all_the_same(store):
    put(store, "T", 0, b"first")
    place, _ = put(store, "T", 0, b"second")
    store.write()
    data = bytearray(log_of(store, 0, store.mirroring.end))

    data[data.index(b"second")] ^= 1
    by_body = find_last_record(memoryview(data), 0)
    data[place + 4] ^= 1
    by_magic = find_last_record(memoryview(data), 0)

    assert by_body == place
    assert by_magic == 0
    assert find_last_record(memoryview(data), 8192) is None
    assert find_last_record(memoryview(b""), 0) is None


def test_what_is_here_already_is_compared_and_the_rest_is_given_back(store):
    put(store, "T", 0, b"first")
    place, _ = put(store, "T", 0, b"second")
    store.write()
    mirroring, end = store.mirroring, store.mirroring.written
    last = log_of(store, place, end)

    assert mirroring.compare(place, last[:7]) == b""
    assert mirroring.compare(place + 7, last[7:]) == b""
    assert mirroring.compare(place, last + b"more") == b"more"
    assert mirroring.compare(end, b"more") == b"more"
    for at in range(len(last)):
        other = bytearray(last + b"more")
        other[at] ^= 1
        with pytest.raises(MirrorRefused, match="the logs have parted"):
            mirroring.compare(place, bytes(other))
    assert mirroring.written == end
