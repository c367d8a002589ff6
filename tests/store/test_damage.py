"""Files with flipped bits and torn, lost and misplaced parts: nothing bad is served as good.

ORBITMQ_ROUNDS says how many stores are damaged, ORBITMQ_FIRST_SEED with which damage to begin. What
RocketMQ's format protects is the body of a message (a checksum) and its place (numbers that are
written twice): nothing else of a record can be checked, and nothing of a JSON document that stays
one. Which queue a record belongs to, and its number there, are written a second time in the file of
that queue only; where those files are made anew from the log, the record is believed if nothing
contradicts it.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orbitmq.message.stored import decode_message
from orbitmq.store.settings import RetentionSettings, StoreError
from orbitmq.store.store import Store
from tests.support.damage import damage_some
from tests.support.store import SMALL, HandClock, QuickFiles, bodies, lookup, messages_of, put

ROUNDS = int(os.environ.get("ORBITMQ_ROUNDS", "60"))
FIRST = int(os.environ.get("ORBITMQ_FIRST_SEED", "0"))
QUEUES = 3

#: Queue, number in it -> body.
Known = dict[tuple[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Original:
    """A store that was killed, part of it durable, part not; and what is in it."""

    root: Path
    known: Known
    durable: frozenset[tuple[int, int]]  #: what was flushed, and is known to be
    places: dict[tuple[int, int], range]  #: the bytes of the log that hold each

    def moved(self, root: Path) -> Known:
        """What a damaged copy says is elsewhere than it was, in a way that nothing contradicts.

        All that changed in these records is the number of the queue, or their number in it, which
        has grown, as if others before it were missing.
        """
        before, after = _log(self.root), _log(root)
        found: Known = {}
        for (queue_id, number), place in self.places.items():
            old, new = _bytes_of(before, place), _bytes_of(after, place)
            if (old[:12], old[16:20], old[28:]) == (new[:12], new[16:20], new[28:]):
                there = int.from_bytes(new[12:16], "big"), int.from_bytes(new[20:28], "big")
                if there != (queue_id, number) and there[1] >= number:
                    found[there] = self.known[queue_id, number]
        return found

    def untouched(self, root: Path) -> set[tuple[int, int]]:
        """What was durable and has all of its bytes in a damaged copy.

        Nothing if that does not even know any more how much was flushed.
        """
        if (root / "checkpoint").read_bytes() != (self.root / "checkpoint").read_bytes():
            return set()
        before, after = _log(self.root), _log(root)
        return {
            each
            for each in self.durable
            if _bytes_of(before, self.places[each]) == _bytes_of(after, self.places[each])
        }


def _log(root: Path) -> dict[int, bytes]:
    return {int(path.name): path.read_bytes() for path in (root / "commitlog").iterdir()}


def _bytes_of(log: dict[int, bytes], place: range) -> bytes:
    base = place.start // SMALL.file_size * SMALL.file_size
    return log.get(base, b"")[place.start - base : place.stop - base]


def opened(root: Path) -> Store:
    return Store(root, SMALL, clock=HandClock(), files=QuickFiles(), background=False)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original") / "store"
    clock = HandClock()
    store = Store(root, SMALL, clock=clock, files=QuickFiles(), background=False)
    dice = random.Random(7)
    known: Known = {}
    places: dict[tuple[int, int], range] = {}

    def fill(count):
        for number in range(count):
            queue_id = dice.randrange(QUEUES)
            body = b"%06d" % number + dice.randbytes(dice.randrange(300))
            begin, offset = put(store, "T", queue_id, body, {"KEYS": f"k{number}", "TAGS": "A"})
            known[queue_id, offset] = body
            places[queue_id, offset] = range(begin, begin)
        store.write()
        for each, place in places.items():
            begin = place.start
            places[each] = range(begin, begin + len(bytes(store.message_at(begin))))

    fill(90)
    for _ in range(4):
        clock.advance(11)
        store.tick()
    fill(40)
    end = store.statistics().durable
    assert 0 < end < store.statistics().log_end
    durable = frozenset(each for each, place in places.items() if place.stop <= end)
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    store.abandon()
    return Original(copy, known, durable, places)


@pytest.mark.timeout(1200)
def test_a_damaged_store_serves_what_was_stored_or_says_what_is_missing(tmp_path, original, caplog):
    caplog.set_level(logging.CRITICAL, "orbitmq")  # every bad record is logged, with its traceback
    outcomes = {"refused": 0, "complete": 0, "incomplete": 0}
    for round_number in range(FIRST, FIRST + ROUNDS):
        dice = random.Random(round_number)
        root = tmp_path / "store"
        shutil.copytree(original.root, root)
        if dice.random() < 0.5:
            (root / "abort").unlink()  # as if it had been closed in order
        damaged = damage_some(root, dice)

        try:
            outcome = served(root, original)
        except AssertionError as error:
            names = ", ".join(str(path.relative_to(root)) for path in damaged)
            error.add_note(f"damaged {names}; {again(round_number)}")
            raise
        outcomes[outcome] += 1
        shutil.rmtree(root)

    if ROUNDS > 1:
        assert all(outcomes.values()), f"every outcome must have been seen: {outcomes}"


def again(round_number: int) -> str:
    """How to have this round only."""
    file = "tests/store/test_damage.py"
    return f"ORBITMQ_FIRST_SEED={round_number} ORBITMQ_ROUNDS=1 python -m pytest {file}"


def served(root: Path, original: Original) -> str:
    """Read everything, as a consumer would, and what is more, twice; how it went."""
    known, untouched = original.known, original.untouched(root)
    moved = original.moved(root)
    try:
        store = opened(root)
    except StoreError:
        return "refused"
    try:
        first, is_told = read_all(store, known, moved)
        again, _ = read_all(store, known, moved)
        assert first == again
        for body in list(known.values())[:10]:
            for record in lookup(store, "T", f"k{int(body[:6])}"):
                # Found without a queue, there is nothing to compare its number with.
                assert decode_message(record).stored_body in known.values()
        # Below the durable part only the disk can have done it, and somebody has to be told.
        unserved = untouched - first.keys()
        assert is_told or not unserved, f"durable and whole, not served, not told: {unserved}"
        if first != known:
            is_tail = all(number >= end_of(first, queue) for queue, number in known.keys() - first)
            assert is_told or is_tail, "something in the middle is missing, and nobody is told"
        place, number = put(store, "T", 0, b"still alive")
        store.write()
        assert decode_message(bytes(store.message_at(place))).body == b"still alive"
        assert number >= end_of(first, 0)
    finally:
        store.abandon()
    # What was repaired stays repaired.
    store = opened(root)
    try:
        later = {**known, (0, number): b"still alive"}
        assert read_all(store, later, moved)[0].items() >= first.items()
    finally:
        store.abandon()
    return "complete" if first == known else "incomplete"


def read_all(store: Store, known: Known, moved: Known) -> tuple[Known, bool]:
    """What is served, and whether anything was said to be missing."""
    found: Known = {}
    is_told = bool(store.recovery.damage)
    for state in store.queues():
        offset = state.min_offset
        is_told = is_told or offset > 0
        while offset < state.max_offset:
            result = store.read(state.topic, state.queue_id, offset)
            is_told = is_told or bool(result.damaged)
            for message in messages_of(result):
                place = (state.queue_id, message.queue_offset)
                stored = {known.get(place), moved.get(place)}
                assert message.stored_body in stored, f"{place} is served wrongly"
                found[place] = message.stored_body
            assert result.next_offset > offset
            offset = result.next_offset
    return found, is_told


def end_of(found: Known, queue_id: int) -> int:
    return max((number + 1 for queue, number in found if queue == queue_id), default=0)


@pytest.mark.parametrize("offset", [1 << 60, -(1 << 63), 1 << 40])
def test_an_entry_that_points_outside_of_the_log_is_told_and_not_passed_over(tmp_path, offset):
    store = opened(tmp_path)
    for number in range(5):
        put(store, "T", 0, b"%d" % number)
    store.write()
    store.close()
    file = tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"
    entries = bytearray(file.read_bytes())
    entries[2 * 20 : 2 * 20 + 8] = offset.to_bytes(8, "big", signed=True)
    file.write_bytes(entries)

    store = opened(tmp_path)
    result = store.read("T", 0, 0)

    assert [message.body for message in messages_of(result)] == [b"0", b"1", b"3", b"4"]
    assert result.damaged == (2,)
    store.abandon()


@pytest.mark.parametrize("count", [5, 1500], ids=["one by one", "by stretches"])
def test_a_message_whose_queue_number_changed_is_told_and_not_passed_over(tmp_path, count):
    store = opened(tmp_path)
    for number in range(count):
        place, _ = put(store, "T", 0, b"%d" % number)
        if number == 2:
            begin = place
    store.write()
    store.close()
    log_file = tmp_path / "commitlog" / f"{begin // SMALL.file_size * SMALL.file_size:020d}"
    raw = bytearray(log_file.read_bytes())
    raw[begin % SMALL.file_size + 15] ^= 4
    log_file.write_bytes(raw)

    store = opened(tmp_path)
    served, damaged, offset = list[bytes](), list[int](), 0
    while offset < count:
        result = store.read("T", 0, offset)
        served += [message.body for message in messages_of(result)]
        damaged += result.damaged
        offset = result.next_offset

    assert served == [b"%d" % number for number in range(count) if number != 2]
    assert damaged == [2]
    store.abandon()


@pytest.mark.parametrize("number", [44, 53, 63])
def test_a_damaged_entry_does_not_hide_or_delete_those_before_it(tmp_path, number):
    retention = RetentionSettings(max_bytes=12_000, full_ratio=1.0, forced_ratio=1.0)
    settings = replace(SMALL, retention=retention)
    clock = HandClock()

    def open_again():
        return Store(tmp_path, settings, clock=clock, files=QuickFiles(), background=False)

    store = open_again()
    for each in range(70):
        put(store, "T", 0, b"%d" % each * 60)
        store.write()
    store.close()
    base = number // 32 * 32
    file = tmp_path / "consumequeue" / "T" / "0" / f"{base * 20:020d}"
    entries = bytearray(file.read_bytes())
    entries[(number - base) * 20 : (number - base) * 20 + 8] = bytes(8)
    file.write_bytes(entries)

    store = open_again()
    before = store.statistics().log_start
    store.clean()

    # The log was shortened, and the queue begins with the first message that is left in it.
    start = store.statistics().log_start
    assert start > before
    first = decode_message(store.message_at(start)).queue_offset
    assert store.min_offset("T", 0) == first < number
    assert len(bodies(store, "T", 0)) == 70 - first - 1
    store.abandon()
