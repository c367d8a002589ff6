"""What the store needs of records beyond `message.scan`: place, topics, tag codes, damage.

A record counts if its parts add up, its body matches its checksum, and it says itself that it lies
where it was found. The last test tells a record of this log from the same bytes anywhere else, in
a body for instance.

Everything that is done for many records is done on columns. Positions are those in the file that
holds the records, `base` is the offset of the file in the log.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from orbitmq.message.record import (
    END_OF_FILE_MAGIC,
    MAGIC_V1,
    MAGIC_V2,
    RecordFault,
    check_record,
)
from orbitmq.message.scan import ScanResult, find_pairs, overlapping, scan_blocks
from orbitmq.message.tagcode import tag_code
from orbitmq.store.errors import DamagedRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orbitmq.message.scan import Int64s, RecordArrays
    from orbitmq.store.consumequeue import ConsumeQueue

_read_place = struct.Struct(">qq").unpack_from
_read_time = struct.Struct(">q").unpack_from
_read_int = struct.Struct(">i").unpack_from
_read_short = struct.Struct(">h").unpack_from
_BORN_V6 = 0x10

#: How much is searched at a time.
_WINDOW: Final = 1 << 20
#: What the magic codes of both kinds of records begin with.
_MAGIC_BEGINS: Final = MAGIC_V1.to_bytes(4, "big", signed=True)[:2]
#: Topics that all records of a block are compared with before the rest is looked up one by one.
_ROUNDS: Final = 12
#: Letters of a tag that are hashed by columns; a longer one is hashed by itself.
_TAG_LETTERS: Final = 32
_VALUE_END: Final = 2
_SIZE_FIELD: Final = 4
_QUEUE_ID_AT: Final = 12


# ---- many records


def scan_log(
    view: memoryview, base: int, *, start: int, end: int | None = None, check_crc: bool = True
) -> Iterator[ScanResult]:
    """The valid records of `view[start:end]` that belong here, in blocks; see `scan_blocks`."""
    for block in scan_blocks(view, start=start, end=end, check_crc=check_crc):
        records = block.records
        in_place = records.physical_offsets == records.starts + base
        if not in_place.all():
            count = int(in_place.argmin())
            at = int(records.starts[count])
            yield ScanResult(records.rows(slice(count)), at, RecordFault.BAD_SIZE)
            return
        yield block


class TopicNumbers:
    """Numbers topics as they are met, so that topics of records are columns of small numbers."""

    def __init__(self) -> None:
        self.names: list[str] = []  #: by number
        self._numbers: dict[bytes, int] = {}

    def of(self, view: memoryview, records: RecordArrays) -> Int64s:
        """The number of every record's topic."""
        numbers = np.full(len(records), -1, np.int64)
        left = np.arange(len(records))
        # Most blocks have few topics: compare all records with one topic at a time.
        for _ in range(_ROUNDS):
            if not len(left):
                return numbers
            topic = _topic(view, records, int(left[0]))
            same = left[records.topic_sizes[left] == len(topic)]
            if topic:
                # Of texts of one length none equals another, though zeros at the end do not count.
                same = same[overlapping(view, f"S{len(topic)}")[records.topic_at[same]] == topic]
            numbers[same] = self._number(topic)
            left = left[numbers[left] < 0]
        for index in left.tolist():
            numbers[index] = self._number(_topic(view, records, index))
        return numbers

    def _number(self, topic: bytes) -> int:
        number = self._numbers.get(topic)
        if number is None:
            number = self._numbers[topic] = len(self.names)
            self.names.append(topic.decode("utf-8", "replace"))
        return number


def _topic(view: memoryview, records: RecordArrays, index: int) -> bytes:
    at = int(records.topic_at[index])
    return bytes(view[at : at + int(records.topic_sizes[index])])


def tag_codes_of(view: memoryview, records: RecordArrays) -> Int64s:
    """The tag code of every record of a block."""
    codes = np.zeros(len(records), np.int64)
    if not len(records):
        return codes
    text = np.frombuffer(view, np.uint8)
    ends = records.ends
    at = _after_name(view, int(records.starts[0]), int(ends[-1]))
    owners = np.searchsorted(records.starts, at, "right") - 1
    begins = at - len(b"TAGS\x01")
    properties_at = records.properties_at[owners]
    is_name = (begins >= properties_at) & (at < ends[owners])
    is_name &= (begins == properties_at) | (text[begins - 1] == _VALUE_END)
    at, owners = at[is_name], owners[is_name]
    has_value = text[at] != _VALUE_END
    at, owners = at[has_value], owners[has_value]
    # Of several the last one counts, and an assignment keeps the last.
    codes[owners] = _value_hashes(view, at, ends[owners])
    return codes


def _after_name(view: memoryview, first: int, end: int) -> Int64s:
    """Where in `[first, end)` a value of TAGS may begin: behind each `TAGS` and 01."""
    text = np.frombuffer(view, np.uint8)
    places = find_pairs(view, b"S\x01", first, end) + 2
    for back, letter in enumerate(b"GAT", start=3):
        places = places[text[places - back] == letter]
    return places


def _value_hashes(view: memoryview, at: Int64s, ends: Int64s) -> Int64s:
    """Java's hashes of the property values that begin at `at` in records that end at `ends`.

    All first letters are taken, then all second ones: few steps, because tags are short.
    """
    hashes = np.zeros(len(at), np.uint32)
    is_open = at + _TAG_LETTERS <= len(view)
    is_odd = ~is_open
    room = np.minimum(ends - at, _TAG_LETTERS).astype(np.uint8)
    rows = overlapping(view, f"V{_TAG_LETTERS}")[np.where(is_open, at, 0)]
    letters = rows.view(np.uint8).reshape(-1, _TAG_LETTERS)
    for column, each in enumerate(np.ascontiguousarray(letters.T)):
        is_open &= (each != _VALUE_END) & (room > column)
        if not is_open.any():
            break
        is_odd |= is_open & (each >= 0x80)
        hashes = np.where(is_open, hashes * np.uint32(31) + each, hashes)
    codes = hashes.view(np.int32).astype(np.int64)
    # Bytes are UTF-16 units only as long as they are ASCII.
    for index in np.flatnonzero(is_odd | is_open).tolist():
        value, _, _ = bytes(view[int(at[index]) : int(ends[index])]).partition(b"\x02")
        codes[index] = tag_code(value.decode("utf-8", "replace"))
    return codes


# ---- behind damage


def find_record(view: memoryview, base: int, at: int, end: int) -> int | None:
    """The first position in `[at, end)` where a valid record of this log begins."""
    needles = (MAGIC_V1.to_bytes(4, "big", signed=True), MAGIC_V2.to_bytes(4, "big", signed=True))
    while at < end:
        window = bytes(view[at : min(at + _WINDOW, end) + 7])
        hits: list[int] = []
        for needle in needles:
            hit = window.find(needle, 4)
            while hit >= 0:
                hits.append(at + hit - 4)
                hit = window.find(needle, hit + 1)
        for hit in sorted(hits):
            if hit < end and is_record(view, base, hit):
                return hit
        at += _WINDOW
    return None


def find_last_record(view: memoryview, base: int) -> int | None:
    """The last position where a record of this log begins; its checksum is not looked at."""
    places = overlapping(view, ">i8")
    end = len(view)
    while end > 0:
        at = max(0, end - _WINDOW)
        starts = find_pairs(view, _MAGIC_BEGINS, at + 4, min(end + 5, len(view))) - 4
        # By columns: a body may be full of magic codes.
        starts = starts[starts + 28 < len(places)]
        starts = starts[places[starts + 28] == starts + base]
        for start in reversed(starts.tolist()):
            if isinstance(check_record(view, start, len(view), check_crc=False), int):
                return int(start)
        end = at
    return None


def find_end_of_file(view: memoryview, at: int, end: int, written: int) -> int | None:
    """The first position in `[at, written)` of a record that fills the file up to its `end`."""
    magic = END_OF_FILE_MAGIC.to_bytes(4, "big", signed=True)
    window = bytes(view[at:written])
    hit = window.find(magic, 4)
    while hit >= 0:
        place = at + hit - 4
        if _read_int(view, place)[0] == end - place:
            return place
        hit = window.find(magic, hit + 1)
    return None


def was_end_of_file(view: memoryview, at: int) -> bool:
    """Whether one of the two fields here is that of a record that fills the rest of the file."""
    if len(view) - at < _SIZE_FIELD + 4:
        return False
    size: int = _read_int(view, at)[0]
    magic: int = _read_int(view, at + 4)[0]
    return size == len(view) - at or magic == END_OF_FILE_MAGIC


def is_record(view: memoryview, base: int, at: int) -> bool:
    """Whether a valid record that belongs here begins at this position."""
    size = check_record(view, at, len(view))
    return isinstance(size, int) and _read_place(view, at + 20)[1] == base + at


# ---- one record


def verify(
    record: memoryview,
    physical_offset: int,
    queue_offset: int | None = None,
    queue: ConsumeQueue | None = None,
) -> None:
    """Raise DamagedRecord unless these bytes are the record that was stored at this place."""
    size = check_record(record, 0, len(record))
    if isinstance(size, RecordFault):
        raise DamagedRecord(physical_offset, size.value)
    number, place = _read_place(record, 20)
    if size != len(record) or place != physical_offset:
        raise DamagedRecord(physical_offset, "its head belongs to another place")
    if queue_offset is not None and number != queue_offset:
        raise DamagedRecord(physical_offset, "its head belongs to another place in the queue")
    if queue is not None:
        if _read_int(record, _QUEUE_ID_AT)[0] != queue.queue_id:
            raise DamagedRecord(physical_offset, "its head names another queue")
        topic_at = _topic_at(record)
        if record[topic_at : topic_at + queue.topic_size] != queue.topic_field:
            raise DamagedRecord(physical_offset, "its topic is another one")


def store_time(record: memoryview) -> int:
    """When a record was stored, in milliseconds."""
    shift = 12 if _read_int(record, 36)[0] & _BORN_V6 else 0
    stored: int = _read_time(record, 56 + shift)[0]
    return stored


def properties_of(record: memoryview) -> memoryview:
    """The properties of a valid record, as they lie in it."""
    topic_at = _topic_at(record)
    if _read_int(record, 4)[0] == MAGIC_V1:
        return record[topic_at + 3 + record[topic_at] :]
    return record[topic_at + 4 + _read_short(record, topic_at)[0] :]


def _topic_at(record: memoryview) -> int:
    flags = _read_int(record, 36)[0]
    body_at: int = 88 + 12 * (flags >> 4 & 1) + 12 * (flags >> 5 & 1)
    size: int = _read_int(record, body_at - 4)[0]
    return body_at + size
