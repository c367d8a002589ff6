"""What a start makes of whatever it finds."""

from __future__ import annotations

import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orbitmq.message.record import RecordFault, RecordRefused
from orbitmq.message.stored import StoredMessage
from orbitmq.store.files import DiskFiles
from orbitmq.store.recovery import Checkpoint, read_checkpoint, write_checkpoint
from orbitmq.store.settings import DamagedRecord, NoSuchRecord, StoreDamaged
from orbitmq.store.store import Store
from tests.support.store import BORN_HOST, SMALL, HandClock, bodies, lookup, messages_of, put
from tests.support.tries import shortest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    OpenStore = Callable[..., Store]


def fill(store: Store, count: int = 60) -> None:
    for number in range(count):
        put(
            store,
            "T" if number % 3 else "other",
            number % 2,
            b"%06d" % number + bytes(100),
            {"TAGS": f"t{number % 4}", "KEYS": f"key{number}", "UNIQ_KEY": f"u{number}"},
        )
        if number % 4 == 3:
            store.write()
    store.write()


def content(store: Store) -> dict[tuple[str, int], list[bytes]]:
    return {
        (state.topic, state.queue_id): bodies(store, state.topic, state.queue_id)
        for state in store.queues()
        if state.max_offset
    }


def test_queues_with_high_numbers_and_many_topics_are_made_again(open_store):
    store = open_store()
    for number in range(200):
        queue_id = [0, 70_000, 0x7FFFFFFF][number % 3]
        put(store, f"topic-{number % 25}", queue_id, b"%d" % number, {"TAGS": f"tag{number % 7}"})
        store.write()
    before = content(store)
    entries = {key: store.queue_entries(*key, 0, 100) for key in before}
    store.abandon()

    store = open_store()

    assert store.recovery.rebuilt_entries == 200
    assert content(store) == before
    assert {key: store.queue_entries(*key, 0, 100) for key in before} == entries


def make_durable(store: Store, clock: HandClock) -> None:
    for _ in range(6):
        clock.advance(11)
        store.tick()
    assert store.statistics().durable == store.statistics().log_end


def forget_hint(root: Path, **times: int) -> None:
    """Leave the checkpoint as Apache's broker would have written it."""
    path = root / "checkpoint"
    files = DiskFiles()
    *numbers, _ = read_checkpoint(path, files)
    found: dict[str, Any] = dict(zip(Checkpoint.__annotations__, numbers, strict=False))
    write_checkpoint(path, Checkpoint(**(found | times)), files)


def log_files(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


def overwrite(root: Path, offset: int, data: bytes) -> None:
    path = root / "commitlog" / f"{offset - offset % 8192:020d}"
    with path.open("r+b") as file:
        file.seek(offset % 8192)
        file.write(data)


def lose_page(root: Path, offset: int) -> None:
    """Let what was written from `offset` to the end of its page never have reached the disk."""
    overwrite(root, offset, bytes(4096 - offset % 4096))


def places(store: Store) -> list[StoredMessage]:
    found = []
    for state in store.queues():
        offset = state.min_offset
        while offset < state.max_offset:
            result = store.read(state.topic, state.queue_id, offset)
            found += messages_of(result)
            offset = result.next_offset
    return sorted(found, key=lambda message: message.physical_offset)


# ---- tails


@pytest.mark.parametrize("kept", [4, 8, 50, 90, 150])
def test_a_torn_last_record_is_cut_and_its_place_used_again(open_store, kept):
    store = open_store()
    fill(store, 10)
    before = content(store)
    end = store.statistics().log_end
    put(store, "T", 0, b"torn" * 30)
    store.write()
    store.abandon()
    overwrite(store.root, end + kept, bytes(400))

    store = open_store()

    assert content(store) == before
    assert store.recovery.end == end
    assert store.recovery.cut_bytes > 0
    assert put(store, "T", 0, b"new")[0] == end
    store.write()
    data = b"".join(path.read_bytes() for path in log_files(store.root))
    assert data[store.statistics().log_end :].strip(b"\0") == b""


def test_old_bytes_behind_a_cut_do_not_come_back(open_store):
    store = open_store()
    fill(store, 8)
    before = content(store)
    end = store.statistics().log_end
    for body in (b"torn" * 700, b"behind" * 10, b"behind2" * 10):
        put(store, "T", 0, body)
    assert store.write() > 4096
    store.abandon()
    lose_page(store.root, end)

    open_store().abandon()
    store = open_store()
    put(store, "T", 0, b"torn" * 700)  # ends where the next old record began
    store.write()
    store.abandon()

    found = content(open_store())
    before["T", 0] = [*before["T", 0], b"torn" * 700]
    assert found == before


#: Large enough for a record whose size takes three bytes.
LARGE = replace(SMALL, file_size=1 << 18)


def end_before_a_page(store: Store, room: int, pages: int = 1) -> int:
    """Write a record that ends `room` bytes before a page does, some pages on; where it begins."""
    at, _ = put(store, "T", 0, b"")
    size = store.write() - at
    begin = at + size
    page_end = begin - begin % 4096 + 4096 * pages
    put(store, "T", 0, b"x" * (page_end - room - begin - size))
    assert store.write() == page_end - room
    return begin


@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_lost_page_is_known_though_it_holds_the_zeros_that_the_next_record_begins_with(
    open_store, room, pages
):
    store = open_store(LARGE)
    fill(store, 8)
    lost = end_before_a_page(store, room, pages)
    before = [message for message in places(store) if message.physical_offset < lost]
    put(store, "T", 0, b"behind")
    store.write()
    store.abandon()
    last_page = (lost // 4096 + pages - 1) * 4096
    first_lost = max(lost, last_page)
    with log_files(store.root)[0].open("r+b") as file:
        file.seek(first_lost)
        file.write(bytes(last_page + 4096 - first_lost))

    store = open_store(LARGE)

    assert store.recovery.damage == ()
    assert store.recovery.end == lost
    assert places(store) == before


@pytest.mark.parametrize(("room", "size"), [(2, 70_000), (3, 300)])
def test_a_lost_page_is_known_though_it_holds_but_the_first_bytes_of_a_size(open_store, room, size):
    store = open_store(LARGE)
    fill(store, 8)
    end_before_a_page(store, room)
    before = places(store)
    lost = store.statistics().log_end
    put(store, "T", 0, b"y" * size)
    put(store, "T", 0, b"behind")
    store.write()
    store.abandon()
    with log_files(store.root)[0].open("r+b") as file:
        file.seek(lost)
        file.write(bytes(room))

    store = open_store(LARGE)

    assert store.recovery.damage == ()
    assert store.recovery.end == lost
    assert places(store) == before


def test_files_behind_the_end_are_deleted(open_store):
    store = open_store()
    fill(store, 80)
    before = places(store)
    bad = next(message for message in before if message.physical_offset > 8192)
    store.abandon()
    lose_page(store.root, bad.physical_offset)

    store = open_store()

    assert store.recovery.damage == ()

    assert len(log_files(store.root)) == 2
    assert store.recovery.removed_files >= 1
    assert places(store) == [m for m in before if m.physical_offset < bad.physical_offset]


@pytest.mark.parametrize("has_hint", [True, False])
def test_queues_and_index_are_made_again_from_the_log(open_store, has_hint):
    store = open_store()
    fill(store)
    before = content(store)
    store.close()
    shutil.rmtree(store.root / "consumequeue")
    shutil.rmtree(store.root / "index")
    (store.root / "abort").write_bytes(b"")
    if not has_hint:
        forget_hint(store.root, physical_ms=0)

    store = open_store()

    assert store.recovery.rebuilt_all is has_hint
    assert content(store) == before
    assert len(lookup(store, "T", "key7")) == 1
    assert len(lookup(store, "other", "u9")) == 1


def test_a_queue_whose_entries_were_lost_in_the_middle_is_made_again(open_store, clock):
    store = open_store()
    fill(store, 120)
    make_durable(store, clock)
    put(store, "T", 0, b"new")
    store.write()
    before = content(store)
    store.abandon()
    max((store.root / "consumequeue/T/0").iterdir()).unlink()

    store = open_store()

    assert store.recovery.rebuilt_all
    assert content(store) == before


# ---- Apache's stores


def test_a_store_without_our_checkpoint_opens_after_a_proper_shutdown(open_store):
    store = open_store()
    fill(store, 100)
    before = content(store)
    store.close()
    forget_hint(store.root)
    # Apache's broker makes the next file in advance and leaves it.
    following = log_files(store.root)[-1]
    (following.parent / f"{int(following.name) + 8192:020d}").write_bytes(bytes(8192))

    store = open_store()

    assert content(store) == before
    assert (store.recovery.was_clean, store.recovery.used_hint) == (True, False)
    assert store.recovery.start > 0
    assert store.recovery.damage == ()


@pytest.mark.parametrize("known_ms", [0, 1_700_000_030_000, 1_900_000_000_000])
def test_a_store_without_our_checkpoint_opens_after_a_crash(open_store, clock, known_ms):
    store = open_store()
    for _ in range(6):
        fill(store, 20)
        clock.advance(10)
    before = content(store)
    store.close()
    forget_hint(store.root, physical_ms=known_ms, logical_ms=known_ms)
    (store.root / "abort").write_bytes(b"")

    store = open_store()

    assert content(store) == before
    # The later the time that is known to be safe, the less has to be checked.
    assert (store.recovery.start > 0) is (known_ms > 0)


def test_a_checkpoint_that_apache_has_changed_is_not_trusted(open_store):
    store = open_store()
    fill(store)
    before = content(store)
    store.close()
    page = bytearray((store.root / "checkpoint").read_bytes())
    page[0:8] = struct.pack(">q", 1_800_000_000_000)
    (store.root / "checkpoint").write_bytes(page)

    store = open_store()

    assert not store.recovery.used_hint
    assert content(store) == before


def test_what_apache_left_behind_a_cut_does_not_count_as_damage(open_store):
    store = open_store()
    fill(store, 6)
    before = content(store)
    end = store.statistics().log_end
    put(store, "T", 0, b"o" * 100)
    put(store, "T", 0, b"old record in its place")
    store.write()
    data = log_files(store.root)[0].read_bytes()
    store.abandon()
    # Apache's broker cut the log at `end` without wiping it, and wrote something shorter later.
    later = StoredMessage.build(
        topic="T",
        stored_body=b"short",
        queue_id=0,
        queue_offset=len(before["T", 0]),
        physical_offset=end,
        store_ms=1_700_000_900_000,
    ).encode()
    overwrite(store.root, end, later)
    assert log_files(store.root)[0].read_bytes()[end + len(later) :] == data[end + len(later) :]
    forget_hint(store.root, physical_ms=1_700_000_900_000)
    (store.root / "abort").unlink()

    store = open_store()

    assert bodies(store, "T", 0) == [*before["T", 0], b"short"]
    assert store.recovery.damage == ()


# ---- damage


def damaged_store(open_store: OpenStore, clock: HandClock) -> tuple[Store, list[StoredMessage]]:
    """A crashed store all of whose log was flushed, though recovery begins at its beginning."""
    store = open_store()
    fill(store, 120)
    found = places(store)
    store.wait_flushed(store.statistics().log_end)
    clock.advance(2)
    store.tick()
    clock.advance(2)
    store.tick()
    hint = read_checkpoint(store.root / "checkpoint", DiskFiles()).hint
    assert hint is not None
    assert (hint.durable, hint.flushed) == (0, store.statistics().log_end)
    store.abandon()
    return store, found


@pytest.mark.parametrize("what", ["body", "magic", "size", "zeros"])
def test_a_bad_record_among_flushed_ones_costs_only_itself(open_store, clock, what):
    store, before = damaged_store(open_store, clock)
    victim = before[50]
    at = victim.physical_offset
    overwrite(
        store.root,
        at + {"body": 90, "magic": 4, "size": 0, "zeros": 0}[what],
        bytes(victim.size) if what == "zeros" else b"\x00\x00\x02\x33",
    )

    store = open_store()

    assert places(store) == [message for message in before if message is not victim]
    assert [(each.offset, each.size) for each in store.recovery.damage] == [(at, victim.size)]
    with pytest.raises((DamagedRecord, NoSuchRecord)):
        store.message_at(at)
    result = store.read(victim.topic, victim.queue_id, victim.queue_offset, 1)
    assert result.damaged == (victim.queue_offset,)
    # Whoever comes later gets numbers after the old ones.
    last = max(m.queue_offset for m in before if (m.topic, m.queue_id) == ("T", 0))
    assert put(store, "T", 0, b"new")[1] == last + 1


def test_a_file_destroyed_among_flushed_ones_costs_only_its_messages(open_store, clock):
    store, before = damaged_store(open_store, clock)
    overwrite(store.root, 8192, bytes(8192))

    store = open_store()

    kept = [m for m in before if not 8192 <= m.physical_offset < 16384]
    assert places(store) == kept
    assert len(store.recovery.damage) == 1


def test_the_number_of_a_lost_last_message_is_not_given_away(open_store, clock):
    store = open_store()
    put(store, "T", 0, b"consumed" * 10)
    place, _ = put(store, "T", 0, b"consumed and then lost")
    put(store, "T", 1, b"other")
    store.wait_flushed(store.write())
    clock.advance(2)
    store.tick()
    store.abandon()
    overwrite(store.root, place + 95, b"????")

    store = open_store()

    assert len(store.recovery.damage) == 1
    assert put(store, "T", 0, b"new")[1] == 2
    store.write()
    assert bodies(store, "T", 0) == [b"consumed" * 10, b"new"]


@pytest.mark.parametrize("what", ["body", "magic", "size"])
def test_a_flipped_byte_above_the_flushed_offset_costs_one_message(open_store, what):
    """The checkpoint is a second old, and what was stored since was acknowledged."""
    store = open_store()
    fill(store, 150)
    before = places(store)
    victim = before[50]
    store.abandon()
    overwrite(store.root, victim.physical_offset + {"body": 92, "magic": 4, "size": 0}[what], b"?")

    store = open_store()

    assert places(store) == [message for message in before if message is not victim]
    assert [(each.offset, each.size) for each in store.recovery.damage] == [
        (victim.physical_offset, victim.size)
    ]


@pytest.mark.parametrize("what", ["last record", "end record"])
def test_damage_at_the_end_of_a_file_does_not_cost_the_next_one(open_store, what):
    store = open_store()
    fill(store, 150)
    before = places(store)
    last = [message for message in before if message.physical_offset < 8192][-1]
    store.abandon()
    at = last.physical_offset + (92 if what == "last record" else last.size + 5)
    overwrite(store.root, at, b"?")

    store = open_store()

    lost = [last] if what == "last record" else []
    assert places(store) == [message for message in before if message not in lost]
    assert len(store.recovery.damage) == 1


def test_a_flushed_tail_that_is_gone_is_reported(open_store, clock):
    store, before = damaged_store(open_store, clock)
    victim = next(message for message in before if message.physical_offset > 16384)
    end = before[-1].physical_offset + before[-1].size
    overwrite(store.root, victim.physical_offset, bytes(24576 - victim.physical_offset))
    overwrite(store.root, 24576, bytes(8192))

    store = open_store()

    assert places(store) == [m for m in before if m.physical_offset < victim.physical_offset]
    damage = store.recovery.damage
    assert damage[0].offset == victim.physical_offset
    assert sum(each.size for each in damage) == end - victim.physical_offset


def test_many_bad_records_do_not_make_a_start_slow(open_store, clock):
    settings = replace(SMALL, file_size=4 << 20, index=False)
    store = open_store(settings)
    offsets = [put(store, "T", 0, bytes(100))[0] for _ in range(15_000)]
    store.write()
    store.abandon()
    with log_files(store.root)[0].open("r+b") as file:
        for offset in offsets[100:12_100:100]:
            file.seek(offset + 90)
            file.write(b"?")

    def start():
        begun = time.process_time()
        store = open_store(settings)
        spent = time.process_time() - begun
        assert len(store.recovery.damage) == 120
        store.abandon()
        return spent

    assert shortest_of(start, 3) < 3


# ---- refusals


def test_a_missing_file_in_the_middle_is_refused(open_store):
    store = open_store()
    fill(store, 150)
    store.close()
    log_files(store.root)[1].unlink()

    with pytest.raises(StoreDamaged, match="does not follow"):
        open_store()


def test_a_file_that_was_being_cut_when_the_process_died_is_made_whole(open_store):
    store = open_store()
    fill(store, 10)
    before = content(store)
    store.abandon()
    with log_files(store.root)[-1].open("r+b") as file:
        file.truncate(store.statistics().log_end)

    store = open_store()

    assert content(store) == before
    assert log_files(store.root)[-1].stat().st_size == 8192


@pytest.mark.parametrize("has_hint", [True, False])
def test_a_folder_without_its_log_is_refused_and_left_as_it_is(open_store, has_hint):
    store = open_store()
    fill(store)
    before = content(store)
    store.close()
    if not has_hint:
        forget_hint(store.root)
    (store.root / "commitlog").rename(store.root / "elsewhere")

    with pytest.raises(StoreDamaged, match="restore the missing files"):
        open_store()

    shutil.rmtree(store.root / "commitlog", ignore_errors=True)
    (store.root / "elsewhere").rename(store.root / "commitlog")
    assert content(open_store()) == before


@pytest.mark.parametrize("is_clean", [True, False])
def test_missing_last_files_are_refused_until_the_loss_is_accepted(open_store, clock, is_clean):
    store = open_store()
    fill(store, 200)
    make_durable(store, clock)
    kept = [m.body for m in places(store) if m.physical_offset < 8192]
    if is_clean:
        store.close()
    else:
        store.abandon()
    for path in log_files(store.root)[1:]:
        path.unlink()

    with pytest.raises(StoreDamaged, match="ends at 8192, and its files must reach"):
        open_store()

    (store.root / "checkpoint").unlink()
    shutil.rmtree(store.root / "consumequeue")
    assert [m.body for m in places(open_store())] == kept


@pytest.mark.parametrize("has_hint", [True, False])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file_size": 4096}, "file_size=8192"),
        ({"file_size": 16384}, "file_size=8192"),
        ({"queue_file_entries": 48}, "queue_file_entries=32, not 48"),
        ({"queue_file_entries": 16}, "queue_file_entries=32, not 16"),
        ({"queue_file_entries": 64}, "queue_file_entries=32, not 64"),
    ],
)
def test_another_size_of_files_is_refused_with_the_right_one(open_store, changes, words, has_hint):
    store = open_store()
    fill(store, 200)
    before = content(store)
    store.close()
    if not has_hint:
        forget_hint(store.root)

    with pytest.raises(StoreDamaged, match=words):
        open_store(replace(SMALL, **changes))

    assert content(open_store()) == before


def test_names_that_are_none_of_ours_do_not_matter(open_store):
    store = open_store()
    fill(store, 20)
    before = content(store)
    store.close()
    for name in ("\u00b2", "99999999999", "007", "x"):
        (store.root / "consumequeue/T" / name).mkdir()
    (store.root / "consumequeue/T/0/20240101").write_bytes(b"?")
    for name in ("\u00b2", "20240101", "readme"):
        (store.root / "commitlog" / name).write_bytes(b"?")
    (store.root / "consumequeue/readme").write_bytes(b"?")

    assert content(open_store()) == before


# ---- topics that were deleted


@pytest.mark.parametrize("has_hint", [True, False])
def test_deleted_topics_stay_deleted_whatever_the_next_start_has_to_make_anew(
    open_store, clock, has_hint
):
    store = open_store()
    for topic in ("A", "B", "line\nbreak", "kept"):
        for number in range(5):
            put(store, topic, 0, b"%d" % number)
    store.write()
    store.delete_topic("A")
    make_durable(store, clock)
    store.delete_topic("B")
    store.delete_topic("line\nbreak")
    put(store, "B", 0, b"new life")
    store.write()
    expected = store.queues()
    store.abandon()
    if not has_hint:
        forget_hint(store.root, physical_ms=0)

    for _ in range(2):
        store = open_store()

        assert sorted(store.queues(), key=repr) == sorted(expected, key=repr)
        assert bodies(store, "B", 0) == [b"new life"]
        assert len(bodies(store, "kept", 0)) == 5
        store.abandon()


def test_a_deletion_does_not_reach_offsets_that_are_used_again(open_store):
    store = open_store()
    put(store, "T", 0, b"first")
    end = store.write()
    put(store, "T", 0, b"lost with the power")
    store.write()
    store.delete_topic("T")
    store.abandon()
    overwrite(store.root, end, bytes(200))
    store = open_store()
    assert store.recovery.end == end
    assert put(store, "T", 0, b"new")[0] == end
    store.write()
    store.abandon()
    shutil.rmtree(store.root / "consumequeue")

    assert bodies(open_store(), "T", 0) == [b"new"]


def test_a_note_of_a_deletion_that_was_cut_short_does_not_count(open_store):
    store = open_store()
    for topic in ("A", "B"):
        put(store, topic, 0, b"x")
    store.write()
    store.delete_topic("A")
    store.abandon()
    path = store.root / "deleted-topics"
    path.write_bytes(path.read_bytes() + b'00000000 500 "B')
    store = open_store()
    assert [state.topic for state in store.queues()] == ["B"]

    store.delete_topic("B")
    store.abandon()

    assert open_store().queues() == []


def test_messages_lost_with_their_files_leave_a_gap_and_no_number_twice(open_store):
    """As after a crash of a broker whose retention went ahead of its queues."""
    store = open_store()
    for number in range(15):
        put(store, "B", 0, b"%d" % number)
    fill(store, 150)
    put(store, "B", 0, b"the last")
    store.write()
    store.abandon()
    # Eleven entries had reached the file.
    assert (store.root / "consumequeue/B/0" / f"{0:020d}").exists()
    log_files(store.root)[0].unlink()

    store = open_store()

    assert (store.min_offset("B", 0), store.max_offset("B", 0)) == (15, 16)
    assert bodies(store, "B", 0) == [b"the last"]
    assert put(store, "B", 0, b"next")[1] == 16


def test_a_queue_that_begins_late_is_filled_as_apache_does(open_store):
    store = open_store()
    record = StoredMessage.build(
        topic="T", stored_body=b"x", queue_id=0, queue_offset=70, store_ms=1_700_000_000_000
    ).encode()
    store.close()
    shutil.rmtree(store.root)
    (store.root / "commitlog").mkdir(parents=True)
    (store.root / "commitlog" / f"{0:020d}").write_bytes(record.ljust(8192, b"\0"))

    store = open_store()

    assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (70, 71)
    assert bodies(store, "T", 0) == [b"x"]
    store.close()
    names = [path.name for path in sorted((store.root / "consumequeue/T/0").iterdir())]
    assert names == [f"{64 * 20:020d}"]
    raw = (store.root / "consumequeue/T/0" / names[0]).read_bytes()
    assert raw[:120] == struct.pack(">qiq", 0, 0x7FFFFFFF, 0) * 6
    assert open_store().min_offset("T", 0) == 70


# ---- anything at all


def test_the_checkpoint_survives_a_round_trip_and_is_apaches_page(tmp_path):
    path = tmp_path / "checkpoint"
    files = DiskFiles()
    written = Checkpoint(physical_ms=5, logical_ms=4, index_ms=3, master_flushed=2, confirmed=1)

    write_checkpoint(path, written, files)

    assert path.stat().st_size == 4096
    assert struct.unpack_from(">5q", path.read_bytes()) == (5, 4, 3, 2, 1)
    assert read_checkpoint(path, files) == written


# ---- records that lost a page of their properties

PAGE = 4096
PAGES = replace(SMALL, file_size=16 * PAGE)


def put_across_a_page(store: Store, *, behind: int = 0) -> tuple[int, int]:
    """Write a good message, one whose properties go on in the next page, and others behind it.

    Where the second of them begins, and where that page does.
    """
    at, _ = put(store, "T", 0, b"good", {"KEYS": "k"})
    size = store.write() - at
    begin = at + size
    edge = begin - begin % PAGE + PAGE
    body = b"b" * (edge - begin - size - len(b"more\x01"))
    put(store, "T", 0, b"good" + body, {"KEYS": "k", "more": "v" * 8})
    for number in range(behind):
        put(store, "T", 0, b"behind%d" % number + bytes(1000), {"KEYS": "k"})
    store.write()
    return begin, edge


def lose_properties(root: Path, edge: int) -> None:
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(edge)
        assert file.read(8) == b"vvvvvvvv"
        file.seek(edge)
        file.write(bytes(PAGE))


@pytest.mark.parametrize("behind", [0, 9], ids=["last", "good ones behind"])
def test_a_record_that_lost_its_properties_is_cut_and_its_place_used_again(open_store, behind):
    store = open_store(PAGES)
    torn, edge = put_across_a_page(store, behind=behind)
    assert behind == 0 or store.statistics().log_end > edge + PAGE
    store.abandon()
    lose_properties(store.root, edge)

    store = open_store(PAGES)

    assert (store.recovery.end, store.recovery.damage) == (torn, ())
    assert store.recovery.cut_reason == RecordFault.LOST_PAGE.value
    assert bodies(store, "T", 0) == [b"good"]
    assert len(lookup(store, "T", "k", 100)) == 1
    assert put(store, "T", 0, b"new")[0] == torn
    store.write()
    store.abandon()
    store = open_store(PAGES)
    assert bodies(store, "T", 0) == [b"good", b"new"]


def flush(store: Store, clock: HandClock) -> None:
    """Bring the log to the disk, and the checkpoint that says so; the queues are not."""
    end = store.statistics().log_end
    assert store.wait_flushed(end)
    clock.advance(1.5)
    store.tick()
    hint = read_checkpoint(store.root / "checkpoint", DiskFiles()).hint
    assert hint is not None
    assert hint.flushed == end


def test_what_is_known_to_be_flushed_is_not_cut(open_store, clock):
    store = open_store(PAGES)
    _, edge = put_across_a_page(store)
    end = store.statistics().log_end
    before = bodies(store, "T", 0)
    flush(store, clock)
    store.abandon()
    lose_properties(store.root, edge)

    store = open_store(PAGES)

    assert store.recovery.end == end
    assert bodies(store, "T", 0) == before


@pytest.mark.parametrize(
    ("was_closed", "flushed_until", "is_cut"),
    [
        (True, 0.0, False),
        (False, 0.0, True),
        (False, 2.5, True),
        (False, 3.5, False),
        (False, None, False),
    ],
)
def test_a_log_of_apaches_broker_is_cut_only_after_a_crash_and_behind_what_was_flushed(
    open_store, clock, was_closed, flushed_until, is_cut
):
    store = open_store(PAGES)
    torn, edge = put_across_a_page(store)
    end = store.statistics().log_end
    if was_closed:
        store.close()
    else:
        store.abandon()
    lose_properties(store.root, edge)
    known = 0 if flushed_until is None else int((clock.now() + flushed_until) * 1000)
    forget_hint(store.root, physical_ms=known)

    store = open_store(PAGES)

    assert not store.recovery.used_hint
    assert store.recovery.end == (torn if is_cut else end)
    assert len(bodies(store, "T", 0)) == (1 if is_cut else 2)


def test_when_only_the_process_dies_no_record_is_cut_for_zeros_in_its_properties(open_store):
    for room in range(1, 7):
        store = open_store(PAGES)
        at = store.statistics().log_end
        edge = at - at % PAGE + PAGE
        properties = b"k\x01v" + bytes(6)
        # The last `room` of the zeros that were sent lie behind the page's end.
        size = edge + room - at
        place, _ = store.append(
            "T", 0, bytes(size - 92 - len(properties)), properties, 0, BORN_HOST
        )
        assert place == at
        store.write()
        before = bodies(store, "T", 0)
        store.abandon()

        store = open_store(PAGES)

        assert (store.recovery.cut_bytes, store.recovery.damage) == (0, ())
        assert bodies(store, "T", 0) == before
        store.abandon()


def test_properties_that_would_look_like_a_lost_page_are_refused_and_leave_nothing_behind(
    open_store,
):
    store = open_store(PAGES)
    put(store, "T", 0, b"good")
    bad = b"k\x01" + bytes(PAGE - 1) + b"\x02"

    with pytest.raises(RecordRefused, match="zeros"):
        store.append("T", 0, b"bad", bad, 0, BORN_HOST)
    with pytest.raises(RecordRefused, match="zeros"):
        store.append_batch("new", 0, [(b"a", 0, b""), (b"b", 0, bad)], 0, BORN_HOST)
    store.append_batch("T", 0, [(b"a", 0, b"k\x01\0"), (b"b", 0, b"")], 0, BORN_HOST)
    store.write()

    assert bodies(store, "T", 0) == [b"good", b"a", b"b"]
    assert [state.topic for state in store.queues()] == ["T"]
    assert b"k\x01\0\x02" in b"".join(store.read("T", 0, 1).pieces)


def test_a_slave_that_lost_a_page_gets_the_record_from_its_master_again(open_store, tmp_path):
    master = open_store(PAGES)
    torn, edge = put_across_a_page(master, behind=3)
    end = master.statistics().log_end
    whole = master.mirroring.stretch(0, end)
    assert whole is not None
    slave = open_store(PAGES, root=tmp_path / "slave")
    slave.mirroring.follow()
    assert slave.mirroring.append_raw(0, bytes(whole)) == end
    slave.abandon()
    lose_properties(slave.root, edge)

    slave = open_store(PAGES, root=tmp_path / "slave")
    slave.mirroring.follow()

    assert slave.mirroring.expected == torn
    assert slave.mirroring.append_raw(torn, bytes(whole[torn:])) == end
    assert slave.mirroring.stretch(0, end) == whole
    assert bodies(slave, "T", 0) == bodies(master, "T", 0)
