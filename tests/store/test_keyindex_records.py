"""Keys from the bytes of the log: the vectorised way against reading record by record."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.message.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_NONE,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    encode_record,
    record_constants,
    topic_field,
)
from orbitmq.store.index import KeyEntries, entries_of_fields, entries_of_log, index_hash

V4 = bytes(8)
V6 = bytes(20)

names = st.sampled_from(["KEYS", "UNIQ_KEY", "TAGS", "KEY", "KEYSS", "UNIQ_KEYS", "", "订单"])
values = st.text(st.sampled_from("ab KE\x01\x00#") | st.characters(codec="utf-8"), max_size=12).map(
    lambda text: text.replace("\x02", "")
)
property_texts = st.lists(st.tuples(names, values), max_size=6).map(
    lambda pairs: "\x02".join(f"{name}\x01{value}" for name, value in pairs)
) | st.text(st.sampled_from("KEYS\x01\x02 a"), max_size=20)
topics = st.sampled_from(["T", "orders", "订单", "%RETRY%g", "t" * 200, "KEYS\x01a", ""])


@dataclass(frozen=True, slots=True)
class Written:
    topic: str
    properties: bytes
    body: bytes
    store_ms: int
    sys_flag: int
    born_host: bytes
    store_host: bytes

    def record(self, offset: int) -> bytes:
        constants = record_constants(
            self.sys_flag, 0, self.born_host, self.store_ms, self.store_host
        )
        _, pieces = encode_record(
            self.body, topic_field(self.topic), self.properties, 0, 0, 0, offset, constants
        )
        return b"".join(pieces)

    def expected_hashes(self) -> list[int]:
        """What Apache's reader makes of the record, one property after the other."""
        if self.sys_flag == TRANSACTION_ROLLBACK:
            return []
        found: dict[str, str] = {}
        for item in self.properties.decode(errors="replace").split("\x02"):
            name, separator, value = item.partition("\x01")
            if separator and name and value:
                found[name] = value
        keys = [found["UNIQ_KEY"]] if "UNIQ_KEY" in found else []
        keys += [word for word in found.get("KEYS", "").split(" ") if word]
        return [index_hash(self.topic, key) for key in keys]


written = st.builds(
    Written,
    topic=topics,
    properties=property_texts.map(str.encode) | st.binary(max_size=30),
    body=st.binary(max_size=40),
    store_ms=st.integers(1, 1 << 50),
    sys_flag=st.sampled_from(
        [TRANSACTION_NONE, TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK]
    ),
    born_host=st.sampled_from([V4, V6]),
    store_host=st.sampled_from([V4, V6]),
)


def log_of(messages: list[Written], base: int) -> tuple[memoryview, list[int]]:
    log, starts = bytearray(), []
    for message in messages:
        starts.append(len(log))
        log += message.record(base + len(log))
    return memoryview(bytes(log)), starts


def as_rows(entries: KeyEntries) -> list[tuple[int, int, int]]:
    return list(
        zip(
            entries.hashes.tolist(),
            entries.offsets.tolist(),
            entries.store_ms.tolist(),
            strict=True,
        )
    )


@given(st.lists(written, max_size=12), st.sampled_from([0, 1 << 40]))
@settings(deadline=None)
def test_a_chunk_of_the_log_gives_the_keys_that_reading_each_record_gives(messages, base):
    chunk, starts = log_of(messages, base)

    entries = entries_of_log(chunk, starts, base)

    assert as_rows(entries) == [
        (hashed, base + start, message.store_ms)
        for message, start in zip(messages, starts, strict=True)
        for hashed in message.expected_hashes()
    ]


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), max_size=8),
            st.text("AB a订😀", max_size=12),
            st.none() | st.text("AaB订", max_size=8),
        ),
        max_size=12,
    )
)
@settings(deadline=None)
def test_fields_and_bytes_of_the_same_records_give_the_same_entries(rows):
    messages = [
        Written(
            topic,
            f"KEYS\x01{keys}\x02{'' if unique is None else f'UNIQ_KEY{chr(1)}{unique}'}".encode(),
            b"",
            1700000000000 + at,
            0,
            V4,
            V4,
        )
        for at, (topic, keys, unique) in enumerate(rows)
    ]
    chunk, starts = log_of(messages, 0)

    from_bytes = entries_of_log(chunk, starts, 0)
    from_fields = entries_of_fields(
        starts,
        [message.store_ms for message in messages],
        [topic for topic, _, _ in rows],
        [unique for _, _, unique in rows],
        [keys for _, keys, _ in rows],
    )

    assert as_rows(from_fields) == as_rows(from_bytes)


def test_more_properties_than_one_block_holds_keep_their_order():
    filler = "x" * 30_000
    messages = [
        Written("T", f"KEYS\x01k{n}\x02f\x01{filler}\x02".encode(), b"", n + 1, 0, V4, V4)
        for n in range(40)
    ]
    chunk, starts = log_of(messages, 0)

    entries = entries_of_log(chunk, starts, 0)

    assert entries.hashes.tolist() == [index_hash("T", f"k{n}") for n in range(40)]
    assert entries.offsets.tolist() == starts


@given(
    st.lists(written, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=12),
    st.integers(0, 400),
    st.lists(st.integers(-10, 500), max_size=4),
)
@settings(deadline=None)
def test_damaged_bytes_and_wrong_starts_never_raise(messages, changes, cut, more_starts):
    chunk, starts = log_of(messages, 0)
    damaged = bytearray(chunk)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    shortened = memoryview(bytes(damaged))[: max(0, len(damaged) - cut)]

    entries = entries_of_log(shortened, starts + more_starts, 0)

    assert set(entries.offsets.tolist()) <= set(starts + more_starts)


def test_a_record_whose_lengths_do_not_add_up_is_left_out():
    good = Written("T", b"KEYS\x01a", b"body", 1, 0, V4, V4)
    chunk, starts = log_of([good, good, good], 0)
    damaged = bytearray(chunk)
    struct.pack_into(">i", damaged, starts[1] + 84, 0x7FFFFFFF)

    entries = entries_of_log(memoryview(damaged), np.array(starts), 0)

    assert entries.offsets.tolist() == [starts[0], starts[2]]
