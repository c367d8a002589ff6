"""Walking through the log: many records at once, and finding them again behind damage.

Only the walk from size to size is a loop over records; every other check is done on columns. A
record counts if its parts add up, its body matches its checksum, and it says itself that it lies
where it was found. The last test tells a record of this log from the same bytes anywhere else, in
a body for instance.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orbitmq.message.checksum import CRC_BITS, crc32
from orbitmq.message.record import (
    END_OF_FILE_MAGIC,
    MAGIC_V1,
    MAGIC_V2,
    MAX_TOPIC_V1,
    MIN_RECORD_SIZE,
    RecordFault,
    check_record,
)
from orbitmq.message.tagcode import tag_code
from orbitmq.store.errors import DamagedRecord
from orbitmq.store.keyhash import hash_pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_HEAD: Final = np.dtype(
    [
        ("size", ">i4"),
        ("magic", ">i4"),
        ("crc", ">i4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("physical_offset", ">i8"),
        ("sys_flag", ">i4"),
    ]
)
_read_pair = struct.Struct(">ii").unpack_from
_read_place = struct.Struct(">qq").unpack_from
_read_time = struct.Struct(">q").unpack_from
_read_int = struct.Struct(">i").unpack_from
_read_short = struct.Struct(">h").unpack_from
_BORN_V6 = 0x10
_WINDOW: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Records:
    """Columns of the valid records of a chunk; positions are relative to its beginning."""

    view: memoryview
    base: int  #: offset of the chunk in the log
    starts: Ints
    sizes: Ints
    queue_ids: Ints
    queue_offsets: Ints
    sys_flags: Ints
    store_ms: Ints
    topic_at: Ints
    topic_sizes: Ints
    properties_at: Ints
    end: int  #: position of the first byte that is not part of a valid record
    fault: RecordFault | None  #: why the walk ended there; None at the end of the chunk

    def __len__(self) -> int:
        return len(self.starts)


def scan(view: memoryview, base: int, *, check_crc: bool = True) -> Records:
    """The valid records from the beginning of `view` on, up to the first that is not valid."""
    starts, end, fault = _walk(view)
    head = _gather(view, _HEAD, starts)
    sizes = head["size"].astype(np.int64)
    sys_flags = head["sys_flag"].astype(np.int64)
    born_v6 = (sys_flags >> 4 & 1) * 12
    body_at = starts + 88 + born_v6 + (sys_flags >> 5 & 1) * 12
    ends = starts + sizes
    good = body_at + 3 <= ends
    body_sizes = _column(view, ">i4", body_at - 4, good)
    topic_at = body_at + body_sizes
    good &= (body_sizes >= 0) & (topic_at + 3 <= ends)
    is_v1 = head["magic"] == MAGIC_V1
    prefix = np.where(is_v1, 1, 2)
    topic_sizes = np.where(
        is_v1, _column(view, "u1", topic_at, good), _column(view, ">i2", topic_at, good)
    )
    properties_at = topic_at + prefix + topic_sizes + 2
    good &= (topic_sizes >= 0) & (~is_v1 | (topic_sizes <= MAX_TOPIC_V1)) & (properties_at <= ends)
    properties_sizes = _column(view, ">i2", properties_at - 2, good)
    good &= (properties_sizes >= 0) & (properties_at + properties_sizes == ends)
    good &= head["physical_offset"] == starts + base
    count, why = _leading(good, RecordFault.BAD_SIZE)
    if check_crc:
        bodies = [
            crc32(view[a:b])
            for a, b in zip(body_at[:count].tolist(), topic_at[:count].tolist(), strict=True)
        ]
        sums = np.array(bodies, np.int64) & CRC_BITS
        matching = (sums == head["crc"][:count]) | (body_sizes[:count] == 0)
        count, crc_why = _leading(matching, RecordFault.BAD_CRC)
        why = crc_why or why
    if why is not None:
        end, fault = int(starts[count]), why
    return Records(
        view=view,
        base=base,
        starts=starts[:count],
        sizes=sizes[:count],
        queue_ids=head["queue_id"][:count].astype(np.int64),
        queue_offsets=head["queue_offset"][:count].astype(np.int64),
        sys_flags=sys_flags[:count],
        store_ms=_column(view, ">i8", starts[:count] + 56 + born_v6[:count], None),
        topic_at=(topic_at + prefix)[:count],
        topic_sizes=topic_sizes[:count],
        properties_at=properties_at[:count],
        end=end,
        fault=fault,
    )


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


def is_record(view: memoryview, base: int, at: int) -> bool:
    """Whether a valid record that belongs here begins at this position."""
    size = check_record(view, at, len(view))
    return isinstance(size, int) and _read_place(view, at + 20)[1] == base + at


def verify(
    record: memoryview,
    physical_offset: int,
    queue_offset: int | None = None,
    topic_field: bytes | None = None,
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
    if topic_field is not None:
        topic_at = _topic_at(record)
        if record[topic_at : topic_at + len(topic_field)] != topic_field:
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


def topics_of(records: Records) -> tuple[list[str], NDArray[np.intp]]:
    """The different topics, and for every record which of them is its."""
    names: dict[bytes, int] = {}
    which = np.full(len(records), -1, np.intp)
    left = np.arange(len(records))
    text = np.frombuffer(records.view, np.uint8)
    # Most chunks have few topics: compare all records with one topic at a time. What a handful of
    # topics does not cover is looked up one by one.
    for _ in range(8):
        if not len(left):
            break
        at, size = int(records.topic_at[left[0]]), int(records.topic_sizes[left[0]])
        topic = bytes(records.view[at : at + size])
        same = records.topic_sizes[left] == size
        candidates = left[same]
        letters = text[records.topic_at[candidates][:, None] + np.arange(size)]
        equal = (letters == np.frombuffer(topic, np.uint8)).all(axis=1)
        which[candidates[equal]] = names.setdefault(topic, len(names))
        left = np.flatnonzero(which < 0)
    view = records.view
    for index in left.tolist():
        at, size = int(records.topic_at[index]), int(records.topic_sizes[index])
        which[index] = names.setdefault(bytes(view[at : at + size]), len(names))
    return [name.decode("utf-8", "replace") for name in names], which


def tag_codes_of(records: Records) -> Ints:
    """The tag code of every record, found in all properties at once."""
    codes = np.zeros(len(records), np.int64)
    if not len(records):
        return codes
    view = records.view
    begins, ends = records.properties_at, records.starts + records.sizes
    joined = b"\x02".join([view[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)])
    # Every record's properties follow a separator in `text`, so every name does.
    text = np.frombuffer(b"\x02" + joined + b"\x02", np.uint8)
    origins = np.concatenate(([0], np.cumsum(ends - begins + 1)))
    marks = np.flatnonzero(text == 1)
    marks = marks[marks >= 5]
    for back, letter in enumerate(b"SGAT\x02", start=1):
        marks = marks[text[marks - back] == letter]
    separators = np.flatnonzero(text == 2)
    stops = separators[np.searchsorted(separators, marks)]
    has_value = stops > marks + 1
    marks, stops = marks[has_value], stops[has_value]
    # Of several the last one counts, and an assignment keeps the last.
    owners = np.searchsorted(origins, marks, "right") - 1
    codes[owners] = _java_hashes(text, marks + 1, stops)
    return codes


def _java_hashes(text: NDArray[np.uint8], begins: Ints, ends: Ints) -> Ints:
    lengths = ends - begins
    stops = np.cumsum(lengths)
    pieces = text[np.repeat(ends - stops, lengths) + np.arange(int(lengths.sum()))]
    hashes = hash_pieces(pieces, stops - lengths, stops).view(np.int32).astype(np.int64)
    if (pieces >= 0x80).any():
        # Bytes are UTF-16 units only as long as they are ASCII.
        odd = np.unique(np.searchsorted(stops, np.flatnonzero(pieces >= 0x80), "right"))
        for index in odd.tolist():
            tag = text[begins[index] : ends[index]].tobytes()
            hashes[index] = tag_code(tag.decode("utf-8", "replace"))
    return hashes


def _walk(view: memoryview) -> tuple[Ints, int, RecordFault | None]:
    """From size to size; the sizes lead from one known magic code to the next."""
    starts: list[int] = []
    at, end = 0, len(view)
    fault: RecordFault | None = None
    while at + 8 <= end:
        size, magic = _read_pair(view, at)
        if magic != MAGIC_V1 and magic != MAGIC_V2:
            if magic == END_OF_FILE_MAGIC:
                fault = RecordFault.END_OF_FILE
            else:
                fault = RecordFault.UNKNOWN_MAGIC if size or magic else RecordFault.EMPTY
            break
        if size < MIN_RECORD_SIZE:
            fault = RecordFault.BAD_SIZE
            break
        if at + size > end:
            fault = RecordFault.CUT_SHORT
            break
        starts.append(at)
        at += size
    else:
        fault = RecordFault.CUT_SHORT if at < end else None
    return np.array(starts, np.int64), at, fault


def _gather(view: memoryview, kind: np.dtype[Any], at: Ints) -> NDArray[Any]:
    """The structures at these positions."""
    if not len(at):
        return np.zeros(0, kind)
    raw = np.ndarray((len(view) - kind.itemsize + 1,), f"V{kind.itemsize}", view, strides=(1,))
    return raw[at].view(kind)


def _column(view: memoryview, kind: str, at: Ints, good: NDArray[np.bool_] | None) -> Ints:
    """The numbers at these positions; 0 where the position is not known to be good."""
    if not len(at):
        return np.zeros(0, np.int64)
    safe = at if good is None else np.where(good, at, 0)
    dtype = np.dtype(kind)
    every = np.ndarray((len(view) - dtype.itemsize + 1,), dtype, view, strides=(1,))
    return every[safe].astype(np.int64)


def _leading(good: NDArray[np.bool_], why: RecordFault) -> tuple[int, RecordFault | None]:
    """How many are good from the first on, and the reason to stop if not all are."""
    if good.all():
        return len(good), None
    return int(np.argmin(good)), why
