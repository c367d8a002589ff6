"""Stores whose last records lost a page of their properties with the power."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.message.record import RecordFault, RecordRefused
from orbitmq.store.recovery import read_checkpoint, write_checkpoint
from tests.support.store import BORN_HOST, SMALL, HandClock, QuickFiles, bodies, put

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orbitmq.store.store import Store

    OpenStore = Callable[..., Store]

PAGE = 4096
LARGE = replace(SMALL, file_size=16 * PAGE)


def put_across_a_page(store: Store, *, behind: int = 0, pages: int = 1) -> tuple[int, int]:
    """Write a good message, one whose properties go on in the next page, and others behind it.

    Where the second of them begins, and where that page does.
    """
    at, _ = put(store, "T", 0, b"good", {"KEYS": "k"})
    size = store.write() - at
    begin = at + size
    edge = begin - begin % PAGE + PAGE
    value = "v" * (PAGE * (pages - 1) + 8)
    body = b"b" * (edge - begin - size - len(b"more\x01"))
    put(store, "T", 0, b"good" + body, {"KEYS": "k", "more": value})
    for number in range(behind):
        put(store, "T", 0, b"behind%d" % number + bytes(1000), {"KEYS": "k"})
    store.write()
    return begin, edge


def lose_page(root: Path, edge: int) -> None:
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(edge)
        assert file.read(8) == b"vvvvvvvv"
        file.seek(edge)
        file.write(bytes(PAGE))


def forget_hint(root: Path, physical_ms: int) -> None:
    """Leave the checkpoint as Apache's broker would have written it."""
    path = root / "checkpoint"
    files = QuickFiles()
    known = replace(read_checkpoint(path, files), hint=None, physical_ms=physical_ms)
    write_checkpoint(path, known, files)


@pytest.mark.parametrize("behind", [0, 9], ids=["last", "good ones behind"])
def test_a_record_that_lost_its_properties_is_cut_and_its_place_used_again(open_store, behind):
    store = open_store(LARGE)
    torn, edge = put_across_a_page(store, behind=behind)
    assert behind == 0 or store.statistics().log_end > edge + PAGE
    store.abandon()
    lose_page(store.root, edge)

    store = open_store(LARGE)

    assert (store.recovery.end, store.recovery.damage) == (torn, ())
    assert store.recovery.cut_reason == RecordFault.LOST_PAGE.value
    assert bodies(store, "T", 0) == [b"good"]
    assert len(store.lookup("T", "k", 100)) == 1
    assert put(store, "T", 0, b"new")[0] == torn
    store.write()
    store.abandon()
    store = open_store(LARGE)
    assert bodies(store, "T", 0) == [b"good", b"new"]


def test_a_page_that_was_lost_inside_the_properties_is_known_though_the_next_one_was_kept(
    open_store,
):
    store = open_store(LARGE)
    torn, edge = put_across_a_page(store, behind=1, pages=3)
    store.abandon()
    lose_page(store.root, edge)

    store = open_store(LARGE)

    assert (store.recovery.end, store.recovery.damage) == (torn, ())
    assert bodies(store, "T", 0) == [b"good"]


def flush(store: Store, clock: HandClock) -> None:
    """Bring the log to the disk, and the checkpoint that says so; the queues are not."""
    end = store.statistics().log_end
    assert store.wait_flushed(end)
    clock.advance(1.5)
    store.tick()
    hint = read_checkpoint(store.root / "checkpoint", QuickFiles()).hint
    assert hint is not None
    assert hint.flushed == end


def test_what_is_known_to_be_flushed_is_not_cut(open_store, clock):
    store = open_store(LARGE)
    _, edge = put_across_a_page(store)
    end = store.statistics().log_end
    before = bodies(store, "T", 0)
    flush(store, clock)
    store.abandon()
    lose_page(store.root, edge)

    store = open_store(LARGE)

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
    store = open_store(LARGE)
    torn, edge = put_across_a_page(store)
    end = store.statistics().log_end
    if was_closed:
        store.close()
    else:
        store.abandon()
    lose_page(store.root, edge)
    known = 0 if flushed_until is None else int((clock.now() + flushed_until) * 1000)
    forget_hint(store.root, known)

    store = open_store(LARGE)

    assert not store.recovery.used_hint
    assert store.recovery.end == (torn if is_cut else end)
    assert len(bodies(store, "T", 0)) == (1 if is_cut else 2)


def test_when_only_the_process_dies_no_record_is_cut_for_zeros_in_its_properties(open_store):
    for room in range(1, 7):
        store = open_store(LARGE)
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

        store = open_store(LARGE)

        assert (store.recovery.cut_bytes, store.recovery.damage) == (0, ())
        assert bodies(store, "T", 0) == before
        store.abandon()


def test_properties_that_would_look_like_a_lost_page_are_refused_and_leave_nothing_behind(
    open_store,
):
    store = open_store(LARGE)
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
    master = open_store(LARGE)
    torn, edge = put_across_a_page(master, behind=3)
    end = master.statistics().log_end
    whole = master.mirroring.stretch(0, end)
    assert whole is not None
    slave = open_store(LARGE, root=tmp_path / "slave")
    slave.mirroring.follow()
    assert slave.mirroring.append_raw(0, bytes(whole)) == end
    slave.abandon()
    lose_page(slave.root, edge)

    slave = open_store(LARGE, root=tmp_path / "slave")
    slave.mirroring.follow()

    assert slave.mirroring.expected == torn
    assert slave.mirroring.append_raw(torn, bytes(whole[torn:])) == end
    assert slave.mirroring.stretch(0, end) == whole
    assert bodies(slave, "T", 0) == bodies(master, "T", 0)
