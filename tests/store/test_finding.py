"""Finding single messages, and what a store says about itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.errors import SettingError
from orbitmq.message.ids import encode_offset_id
from orbitmq.message.record import pack_host
from orbitmq.message.stored import decode_message
from orbitmq.store import settings
from tests.support.store import SMALL, lookup, put, with_policy

if TYPE_CHECKING:
    pass


def test_a_message_is_found_by_its_offset_id(open_store):
    store = open_store()
    put(store, "T", 0, b"before")
    place, _ = put(store, "T", 0, b"wanted")
    store.write()

    found = decode_message(
        store.message_by_offset_id(encode_offset_id(pack_host("1.2.3.4", 1), place))
    )

    assert found.body == b"wanted"
    assert store.message_by_offset_id(found.offset_id) == store.message_at(place)


def test_a_lookup_catches_up_with_a_bounded_part_of_the_log(open_store):
    store = open_store(replace(SMALL, index_catch_up=1000))
    places = []
    for number in range(40):
        places.append(put(store, "T", 0, bytes(100), {"KEYS": f"k{number}"})[0])
        store.write()

    assert len(lookup(store, "T", "k0")) == 1
    first = store.statistics().indexed
    assert lookup(store, "T", "k39") == []

    # A record that the bound would cut is taken as a whole.
    assert 1000 <= first <= 1000 + places[1]
    assert first < store.statistics().indexed <= first + 1000 + places[1]
    while store.statistics().indexed < store.statistics().log_end:
        store.tick()
    assert len(lookup(store, "T", "k39")) == 1


def test_keys_are_found_newest_first_and_only_in_their_topic(open_store, clock):
    store = open_store()
    for number in range(10):
        put(
            store,
            "T",
            0,
            b"%d" % number,
            {"KEYS": f"odd{number % 2} each", "UNIQ_KEY": f"u{number}"},
        )
        put(store, "other", 0, b"x", {"KEYS": "odd1"})
        store.write()
        clock.advance(10)

    def found(key, *limits):
        return [decode_message(record).body for record in lookup(store, "T", key, *limits)]

    assert found("odd1") == [b"9", b"7", b"5", b"3", b"1"]
    assert found("each", 3) == [b"9", b"8", b"7"]
    assert found("u4") == [b"4"]
    assert found("odd") == []
    start = int((clock.now() - 100) * 1000)
    assert found("each", 64, start + 20_000, start + 40_000) == [b"4", b"3", b"2"]


def test_a_look_up_in_rounds_finds_the_same_as_one_in_one_go(open_store):
    store = open_store(replace(SMALL, file_size=1 << 20))
    for number in range(40):
        body = bytes(200_000) if number == 20 else b"%d" % number
        put(store, "T", 0, body, {"KEYS": "Aa" if number % 10 == 0 else "BB"})
    store.write()

    rounds = list(store.looking_up("T", "Aa"))

    assert [record for record in rounds if record is not None] == lookup(store, "T", "Aa")
    # Those with another key, a read of the index at least, and a long message counts twice.
    assert rounds.count(None) >= 36 + 1 + 1


def test_a_message_that_waits_for_the_disk_is_not_found(open_store):
    store = open_store(with_policy(SMALL, settings.FlushPolicy.SYNC))
    place, _ = put(store, "T", 0, b"x", {"KEYS": "k"})
    end = store.write()

    assert lookup(store, "T", "k") == []
    with pytest.raises(settings.NoSuchRecord):
        store.message_at(place)
    store.wait_flushed(end)
    assert len(lookup(store, "T", "k")) == 1
    assert store.message_at(place)


def test_the_index_is_not_read_again_after_a_proper_shutdown(open_store):
    store = open_store()
    for number in range(100):
        put(store, "T", 0, b"", {"KEYS": "k"} if number < 3 else {})
    store.write()
    store.close()

    store = open_store()

    assert store.statistics().indexed == store.statistics().log_end
    assert len(lookup(store, "T", "k")) == 3


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: settings.StoreSettings(file_size=100), "store.file_size"),
        (lambda: settings.StoreSettings(queue_file_entries=0), "store.queue_file_entries"),
        (lambda: settings.StoreSettings(preallocate_step=-1), "store.preallocate_step"),
        (lambda: settings.FlushSettings(interval=0), "flush.interval"),
        (lambda: settings.FlushSettings(least_bytes=-1), "flush.least_bytes"),
        (lambda: settings.ReadSettings(memory_count=0), "read.memory_count"),
    ],
)
def test_a_wrong_setting_is_named(make, named):
    with pytest.raises(SettingError, match=named):
        make()
