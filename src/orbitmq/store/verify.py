"""Verification of stored records: their place, their topic and tag code, and damage.

A record counts if its lengths add up, its body matches its checksum, and it states the offset at
which it was found. The last test distinguishes a record from equal bytes elsewhere, for example in
a body. Work on many records is done by columns. Positions are relative to the file, `base` is the
file's offset in the log.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from orbitmq.message.properties import ITEM_END
from orbitmq.message.record import (
    CRC_BITS,
    END_OF_FILE_MAGIC,
    HOSTS_V6_MASK,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    RecordFault,
    RecordRefused,
    check_record,
    crc32,
    tag_code,
)
from orbitmq.message.scan import ScanResult, find_pairs, overlapping, scan_blocks
from orbitmq.store.queues import ENTRY
from orbitmq.store.settings import DamagedRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from orbitmq.message.scan import Bools, Int64s, RecordArrays
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.queues import ConsumeQueue


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


# Many records


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

    def is_in(self, topic: str, numbers: Int64s) -> Bools:
        """Which of these numbers are that of a topic."""
        found: Bools = numbers == self._numbers.get(topic.encode(), -1)
        return found

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


def entry_codes(
    view: memoryview,
    records: RecordArrays,
    is_scheduled: Bools,
    in_schedule: Callable[[bytes, int], int],
) -> Int64s:
    """The last field of every record's queue entry: its tag code, or the time of delivery."""
    codes = tag_codes_of(view, records)
    ends = records.ends
    for index in np.flatnonzero(is_scheduled).tolist():
        raw = bytes(view[int(records.properties_at[index]) : int(ends[index])])
        codes[index] = in_schedule(raw, int(records.store_ms[index]))
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


# Behind damage


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


# One record


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


# Verification of old messages in stretches of 1,024 entries. To check each message when it is
# served costs ten times as much as serving it, for every group again. So the first read of a
# stretch checks all of it by columns, and the result is remembered. A stretch with a bad message,
# or with large messages for which this does not pay, is remembered too; its messages are checked
# one by one.

STRETCH: Final = 1024
#: The owner can do nothing else while a stretch is being checked.
_MOST_BYTES: Final = 4 << 20
#: What lies before the body when both hosts are IPv4.
_HEAD: Final = np.dtype(
    {
        "names": ["size", "magic", "crc", "queue", "number", "place", "sys_flag", "body_size"],
        "formats": [">i4", ">i4", ">i4", ">i4", ">i8", ">i8", ">i4", ">i4"],
        "offsets": [0, 4, 8, 12, 20, 28, 36, 84],
        "itemsize": 88,
    }
)


def is_checked(queue: ConsumeQueue, commit_log: CommitLog, first: int, count: int) -> bool:
    """Whether these entries and their messages are known to be good, now at the latest."""
    last = min(first + count, queue.trusted_from) - 1
    known = queue.checked
    for stretch in range(first // STRETCH, last // STRETCH + 1):
        is_good = known.get(stretch)
        if is_good is None:
            is_good = known[stretch] = _is_good(queue, commit_log, stretch * STRETCH)
        if not is_good:
            return False
    return True


def _is_good(queue: ConsumeQueue, commit_log: CommitLog, begin: int) -> bool:
    number = max(begin, queue.min_offset)
    end = min(begin + STRETCH, queue.trusted_from)
    while number < end:
        raw = queue.entries(number, end - number)
        if not raw:
            return False
        entries = np.frombuffer(raw, ENTRY)
        offsets, sizes = entries["offset"].astype(np.int64), entries["size"].astype(np.int64)
        if sizes.min() < MIN_RECORD_SIZE or int(sizes.sum()) > _MOST_BYTES:
            return False
        bases = offsets - offsets % commit_log.file_size
        # Messages lie in the order of the log: those of a file are side by side.
        for part in np.split(np.arange(len(bases)), np.flatnonzero(np.diff(bases)) + 1):
            file = commit_log.file_of(int(offsets[part[0]]))
            if file is None or int((offsets[part] + sizes[part]).max()) > commit_log.end:
                return False
            at = offsets[part] - file.base
            if not _are_records(file.view, file.base, at, sizes[part], number + part, queue):
                return False
        number += len(entries)
    return True


def _are_records(
    view: memoryview,
    base: int,
    at: Int64s,
    sizes: Int64s,
    numbers: NDArray[np.intp],
    queue: ConsumeQueue,
) -> bool:
    """Whether just these messages of the queue lie at these places of a file."""
    ends = at + sizes
    if int(at.min()) < 0 or int(ends.max()) > len(view):
        return False
    heads = overlapping(view, f"V{_HEAD.itemsize}")[at].view(_HEAD)
    body_sizes = heads["body_size"].astype(np.int64)
    topic = queue.topic_field
    body_at = at + _HEAD.itemsize
    topic_at = body_at + body_sizes
    properties_at = topic_at + len(topic) + 2
    is_sound = (
        (heads["size"] == sizes)
        & ((heads["magic"] == MAGIC_V1) | (heads["magic"] == MAGIC_V2))
        & (heads["sys_flag"] & HOSTS_V6_MASK == 0)
        & (heads["place"] == at + base)
        & (heads["queue"] == queue.queue_id)
        & (heads["number"] == numbers)
        & (body_sizes >= 0)
        & (properties_at <= ends)
    )
    # Only now all these places are known to lie inside the records.
    if not (
        is_sound.all()
        and (overlapping(view, f"S{len(topic)}")[topic_at] == topic).all()
        and (overlapping(view, ">i2")[properties_at - 2] == ends - properties_at).all()
    ):
        return False
    bounds = zip(body_at.tolist(), topic_at.tolist(), strict=True)
    sums = np.array([crc32(view[begin:end]) for begin, end in bounds], np.int64) & CRC_BITS
    return bool(((sums == heads["crc"]) | (body_sizes == 0)).all())


# Pages that were lost with the power. A lost page reads as zeros from the end of some record to its
# own end. A record that begins before it and reaches into it is recognised by its lengths or its
# checksum, unless only its topic or properties were in the page: `first_torn` finds that case. The
# store makes sure that properties never look like a lost page (`distinct`).
# docs/internals/recovery.md has the cases.

#: What a disk, or the kernel, writes as a whole.
PAGE: Final = 4096
_TOO_MANY_ZEROS: Final = bytes(PAGE - 1)
_ITEM_END: Final = ITEM_END.encode()


# Records that look good and are not whole


def first_torn(view: memoryview, records: RecordArrays, is_doubtful: Bools) -> int | None:
    """The row of the first record whose topic or properties lie in a lost page.

    The records are valid, one behind the other, and lie in the file `view`. Only those that are
    doubtful can be torn: the others were flushed.
    """
    rows = np.flatnonzero(is_doubtful)
    if not len(rows):
        return None
    octets = np.frombuffer(view, np.uint8)
    ends = records.ends
    begin = int(records.starts[rows[0]])
    edges = np.arange(begin - begin % PAGE + PAGE, int(ends[rows[-1]]), PAGE)
    edges = edges[octets[edges] == 0]
    # The record that a page begins in, or before which it begins.
    owners = np.searchsorted(records.starts, edges, "left") - 1
    is_inside = is_doubtful[owners] & (edges < ends[owners])
    edges, owners = edges[is_inside], owners[is_inside]
    # A length and a text that are not zero: the topic's, and the properties' if there are any.
    topic_at, properties_at = records.topic_at[owners], records.properties_at[owners]
    is_in_topic = edges < topic_at + records.topic_sizes[owners]
    has_properties = properties_at < ends[owners]
    is_unguarded = (edges + PAGE >= topic_at) & (is_in_topic | has_properties)
    for edge, owner in zip(
        edges[is_unguarded].tolist(), owners[is_unguarded].tolist(), strict=True
    ):
        if not octets[edge : edge + PAGE].any():
            return int(owner)
    return None


def distinct(properties: bytes) -> bytes:
    """Properties that have zeros, so that they cannot be taken for lost ones.

    The separator that may be missing at the end is added. A page full of zeros is refused.
    """
    if _TOO_MANY_ZEROS in properties:
        raise RecordRefused(
            f"properties with {len(_TOO_MANY_ZEROS)} zeros (U+0000) in a row could not be told "
            "from a page that a disk has lost; put such data into the body"
        )
    return properties if properties.endswith(_ITEM_END) else properties + _ITEM_END


# Bad records


def has_lost_page(view: memoryview, at: int, end: int) -> bool:
    """Whether a page that was never written explains why no record begins at `at`.

    Such a page is zero from where it was last written on, which is not before `at`, to its end.
    A good record was found at `end`; the zeros that its size begins with may be of a lost page.
    """
    size_field = bytes(view[end : end + _SIZE_FIELD])
    zeros_end = end + len(size_field) - len(size_field.lstrip(b"\0"))
    page_end = at - at % PAGE + PAGE
    if page_end <= zeros_end and not any(view[at:page_end]):
        # A record begins with its size: zeros where it should be say that it was not written.
        if page_end - at >= _SIZE_FIELD:
            return True
        if _was_record(view, at, end, page_end - at):
            return True
    return any(
        not any(view[page : page + PAGE]) for page in range(page_end, zeros_end - PAGE + 1, PAGE)
    )


def _was_record(view: memoryview, at: int, end: int, lost: int) -> bool:
    """Whether all that a record in `[at, end)` lacks is the `lost` first bytes of its size."""
    size_field = (end - at).to_bytes(_SIZE_FIELD, "big")
    if not any(size_field[:lost]) or view[at + lost : at + _SIZE_FIELD] != size_field[lost:]:
        return False
    record = size_field + bytes(view[at + _SIZE_FIELD : end])
    return check_record(record, 0, len(record)) == len(record)
