"""Messages of an earlier life: checked once, in stretches, and every bad one is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import orbitmq.store.read
from orbitmq.message.record import pack_host
from orbitmq.store.read import ReadStatus
from orbitmq.store.settings import ReadSettings
from tests.support.store import SMALL, bodies, messages_of, put

if TYPE_CHECKING:
    from orbitmq.store.store import Store


LARGE = replace(
    SMALL,
    file_size=1 << 20,
    queue_file_entries=700,
    read=ReadSettings(memory_distance=1 << 30, memory_count=5000, memory_bytes=1 << 30),
)


def body(number: int) -> bytes:
    return b"%06d" % number * ((number + 1) % 9)


@pytest.fixture
def old(open_store):
    """A store of an earlier life with two queues of 3000 messages, and where those of one lie."""
    store = open_store(LARGE)
    offsets = []
    for number in range(3000):
        offsets.append(put(store, "T", 0, body(number), {"TAGS": "A"})[0])
        put(store, "T", 1, b"other")
    store.write()
    store.close()
    return open_store(LARGE), offsets


def overwrite(store: Store, offset: int, data: bytes) -> None:
    base = offset - offset % LARGE.file_size
    with (store.root / "commitlog" / f"{base:020d}").open("r+b") as file:
        file.seek(offset - base)
        file.write(data)


@pytest.mark.parametrize("pull", [1, 32, 1024])
def test_old_messages_are_not_checked_one_by_one(old, pull, monkeypatch):
    store, _ = old
    checked: list[int] = []
    monkeypatch.setattr(orbitmq.store.read, "verify", lambda _, offset, *__: checked.append(offset))

    found: list[bytes] = []
    offset = 0
    while offset < 3000:
        result = store.read("T", 0, offset, pull)
        found += [message.body for message in messages_of(result)]
        offset = result.next_offset

    assert found == [body(number) for number in range(3000)]
    assert checked == []


@pytest.mark.parametrize("victim", [0, 1023, 2999])
@pytest.mark.parametrize("at", [0, 4, 20, 28, 90], ids=["size", "magic", "number", "place", "body"])
def test_a_bad_message_among_old_ones_is_named_and_the_others_are_served(old, victim, at):
    store, offsets = old
    overwrite(store, offsets[victim] + at, b"\x55")

    served: list[int] = []
    damaged: list[int] = []
    offset = 0
    while offset < 3000:
        result = store.read("T", 0, offset, 32)
        served += [message.queue_offset for message in messages_of(result)]
        damaged += result.damaged
        offset = result.next_offset

    assert damaged == [victim]
    assert served == [number for number in range(3000) if number != victim]


def test_a_message_of_another_topic_in_the_place_is_not_served(old):
    store, offsets = old
    overwrite(store, offsets[9] + 88 + len(body(9)) + 1, b"X")

    assert store.read("T", 0, 9, 1).damaged == (9,)
    assert store.read("T", 0, 10, 1).status is ReadStatus.FOUND


def test_what_was_checked_is_not_checked_again(old):
    store, offsets = old
    before = bodies(store, "T", 0)
    overwrite(store, offsets[1] + 20, b"\x55")

    # Only a new check would find that.
    assert bodies(store, "T", 0) == before


def test_messages_from_ipv6_hosts_are_served_too(open_store):
    store = open_store(LARGE)
    for number in range(50):
        store.append("T", 0, b"%d" % number, b"", 1, pack_host("::1", 5), 0x10)
    store.write()
    store.close()

    assert bodies(open_store(LARGE), "T", 0) == [b"%d" % number for number in range(50)]
