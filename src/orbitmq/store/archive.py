"""Writes closed log files into an archive, by columns.

A log file is closed when the next one has a record, so its bytes never change again. It is scanned
once for the places of its records; these are sorted by topic, day, queue and offset, and then taken
from the file a row group at a time. Nothing is decoded into objects. Both passes stop after every
slice, for a caller that has other work.

Dead letters are archived. Retry topics are not: they repeat messages for one group. Topics of the
brokers themselves are not either (delays, half messages, traces).
"""

from __future__ import annotations

import logging
import mmap
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from orbitmq.archive import (
    ArchiveError,
    Entries,
    LogEntry,
    ParquetPart,
    QueuePart,
    parquet_path,
)
from orbitmq.message.arrow import (
    MESSAGE_SCHEMA,
    RECORD_SCHEMA,
    BadBody,
    messages_to_arrow,
    numbers,
)
from orbitmq.message.record import (
    BATCH_MASK,
    ChunkTooLarge,
    CodecMissing,
    MessageError,
    RecordFault,
)
from orbitmq.message.stored import MAX_EXPANDED_BODY, decode_messages, without_inner_batches
from orbitmq.names import is_retry_topic, is_system_topic
from orbitmq.store.commitlog import NAME_DIGITS, ClosedLogFile
from orbitmq.store.files import DiskFiles
from orbitmq.store.retention import Deletions
from orbitmq.store.verify import TopicNumbers, find_last_record, find_record, scan_log

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from orbitmq.message.scan import Int64s, RecordArrays


log = logging.getLogger(__name__)

SCHEMA: Final = pa.schema([*MESSAGE_SCHEMA, *RECORD_SCHEMA])
#: Stored bytes and rows of one row group, which is also the size of a slice of work.
_GROUP_BYTES: Final = 8 << 20
_GROUP_ROWS: Final = 1 << 15
#: Decompressed bytes of a row group.
_MOST_EXPANDED: Final = 128 << 20
#: Columns with few values.
_FEW_VALUES: Final = [
    *("topic", "brokerName", "queueId", "tags", "flag", "reconsumeTimes", "sysFlag"),
    *("preparedLogOffset", "bornHost", "storeHost", "properties.key_value.key"),
]
#: Columns that readers choose row groups by.
_CHOOSING: Final = ["queueId", "queueOffset", "storeTimestamp", "tags"]
_NO_ENTRY: Final = 0x4
_DAY_MS: Final = 86_400_000
_QUEUE_BITS: Final = 0xFFFFFFFF
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC).date()
_read_place = struct.Struct(">q").unpack_from
_PLACE_AT: Final = 28
#: Bytes that a fingerprint covers, from the first record and from the last one on.
_HEAD: Final = 4096


def closed_log_files(root: Path) -> list[ClosedLogFile]:
    """The closed log files of a store, also of one that is open elsewhere; in order."""
    folder = root / "commitlog"
    if not folder.is_dir():
        raise ArchiveError(
            f"{root} is no data folder of a broker: it has no folder 'commitlog'; "
            "orbitmq up keeps that of its first broker in orbitmq-data/broker-a"
        )
    names = [
        each.name
        for each in sorted(folder.iterdir())
        if len(each.name) == NAME_DIGITS and each.name.isascii() and each.name.isdigit()
    ]
    starts = [int(name) for name in names]
    return [
        ClosedLogFile(folder / name, start, start + (folder / name).stat().st_size)
        for name, start, following in zip(names, starts, starts[1:], strict=False)
        if _begins_at(folder / f"{following:0{NAME_DIGITS}d}", following)
    ]


def _begins_at(path: Path, start: int) -> bool:
    """Whether a log file has a first record. The next file is made before it is needed."""
    with path.open("rb") as file:
        head = file.read(_PLACE_AT + 8)
    # The first record of all has place 0, as bytes that were never written.
    return len(head) == _PLACE_AT + 8 and any(head[:8]) and _read_place(head, _PLACE_AT)[0] == start


def deleted_topics(root: Path) -> Mapping[str, int]:
    """The offsets of the log below which the messages of deleted topics lie."""
    deletions = Deletions(root / "deleted-topics", DiskFiles())
    deletions.load()
    return deletions.by_topic


def fingerprint(file: ClosedLogFile) -> str:
    """Tells a log file from one of another log with the same offsets, by its first and last record.

    A record states its place, its queue offset and its store time.
    """
    view = _mapped(file.path)
    last = find_last_record(view, file.start) or 0
    return f"{zlib.crc32(view[:_HEAD]):08x}{zlib.crc32(view[last : last + _HEAD]):08x}"


def check_same_log(entry: LogEntry, file: ClosedLogFile) -> None:
    """Raise `ArchiveError` unless the entry is about this log file."""
    if entry.fingerprint != fingerprint(file):
        raise ArchiveError(
            f"the archive has the log of another broker {entry.broker!r}, or of an earlier life of "
            f"it: {file.path} is not the file that was archived; use another folder for the archive"
        )


def archive_log_file(
    file: ClosedLogFile,
    entries: Entries,
    broker: str,
    *,
    writer: str,
    deleted: Mapping[str, int] | None = None,
) -> Iterator[LogEntry | None]:
    """Write a log file: None after every slice of the work, at the end its entry.

    An iterator that is not run to its end leaves at most files that the next attempt replaces.
    Raises `ArchiveError`, `OSError`, and `CodecMissing` for a body that needs an extra.
    """
    view = _mapped(file.path, sync=True)
    rows = _LogRows(view, file.start, deleted or {})
    for _ in rows.scan():
        yield None
    parts: list[ParquetPart] = []
    for topic, day, order in rows.files():
        yield from _write_file(
            parts,
            rows,
            order,
            entries,
            parquet_path(topic, day, broker, file.start),
            topic=topic,
            day=day,
            broker=broker,
        )
    if rows.damaged:
        log.warning("parts of a log file hold no messages", extra={"file": str(file.path)})
    entry = LogEntry(
        broker=broker,
        log_start=file.start,
        log_end=file.end,
        fingerprint=fingerprint(file),
        writer=writer,
        written_ms=int(time.time() * 1000),
        first_ms=rows.first_ms,
        last_ms=rows.last_ms,
        left_out=rows.left_out,
        damaged=tuple(rows.damaged),
        deleted=dict(deleted or {}),
        files=tuple(parts),
    )
    entries.write(entry)
    yield entry


def _mapped(path: Path, *, sync: bool = False) -> memoryview:
    """The bytes of a file; with `sync` they are on the disk, whatever its broker has flushed."""
    with path.open("rb") as file:
        if sync:
            # Otherwise a power failure could leave another log here than in the archive.
            DiskFiles().sync(file.fileno())
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class _LogRows:
    """The places of the records of a log file, sorted into files."""

    def __init__(self, view: memoryview, base: int, deleted: Mapping[str, int]) -> None:
        self._view = view
        self._base = base
        self._deleted = deleted
        self._topics = TopicNumbers()
        #: Topic, queue and day; the number of each.
        self._groups: dict[tuple[int, int, int], int] = {}
        self._blocks: list[tuple[NDArray[Any], ...]] = []
        self.left_out = 0
        self.damaged: list[tuple[int, int]] = []
        self.first_ms = self.last_ms = 0
        self._day = 0
        self.starts = self.sizes = np.empty(0, np.int64)
        #: The starts of records that hold several messages.
        self.batches: set[int] = set()

    def scan(self) -> Iterator[None]:
        """Find the records, a block at a time."""
        at, end = 0, len(self._view)
        while at < end:
            fault = None
            for block in scan_log(self._view, self._base, start=at, check_crc=False):
                if len(block.records):
                    self._add(block.records)
                at, fault = block.stopped_at, block.fault
                yield
            if fault is None or fault is RecordFault.END_OF_FILE:
                break
            found = find_record(self._view, self._base, at + 1, end) or end
            self.damaged.append((self._base + at, self._base + found))
            at = found
        joined = [np.concatenate(column) for column in zip(*self._blocks, strict=True)]
        self._blocks.clear()
        if joined:
            self._numbers, self.starts, self.sizes, self._offsets = joined

    def _add(self, records: RecordArrays) -> None:
        if not self.first_ms:
            self.first_ms = int(records.store_ms[0])
        self.last_ms = max(self.last_ms, int(records.store_ms.max()))
        count = len(records)
        topics = self._topics.of(self._view, records)
        below = np.array([self._kept_from(name) for name in self._topics.names], np.int64)[topics]
        kept = (records.sys_flags & _NO_ENTRY == 0) & (records.starts + self._base >= below)
        if not kept.all():
            records, topics = records.rows(kept), topics[kept]
        self.left_out += count - len(records)
        if int(np.bitwise_or.reduce(records.sys_flags, initial=0)) & BATCH_MASK == BATCH_MASK:
            are_batches = records.sys_flags & BATCH_MASK == BATCH_MASK
            self.batches.update(records.starts[are_batches].tolist())
        # A clock that is set back must not divide a queue into days whose offsets overlap.
        days = np.maximum.accumulate(np.maximum(records.store_ms // _DAY_MS, self._day))
        self._day = int(days[-1]) if len(days) else self._day
        keys = topics << 32 | records.queue_ids
        group = np.empty(len(records), np.int32)
        for day in np.unique(days).tolist():  # one, nearly always
            of_day = days == day
            unique, inverse = np.unique(keys[of_day], return_inverse=True)
            found = [
                self._groups.setdefault((key >> 32, key & _QUEUE_BITS, day), len(self._groups))
                for key in unique.tolist()
            ]
            group[of_day] = np.array(found, np.int32)[inverse]
        sizes, offsets = records.sizes.astype(np.int32), records.queue_offsets
        self._blocks.append((group, records.starts.astype(np.int32), sizes, offsets))

    def _kept_from(self, topic: str) -> int:
        """The offset of the log from which the messages of a topic are archived."""
        if is_system_topic(topic) or is_retry_topic(topic):
            return 1 << 62
        return self._deleted.get(topic, 0)

    def files(self) -> Iterator[tuple[str, str, Int64s]]:
        """Topic, day, and the rows of each file by queue and offset."""
        ranked = sorted(self._groups, key=lambda each: (each[0], each[2], each[1]))
        if not ranked:
            return
        ranks = np.empty(len(ranked), np.int32)
        for rank, key in enumerate(ranked):
            ranks[self._groups[key]] = rank
        # The log has the messages of a queue in order. 16 bits are sorted in one pass.
        kind = np.uint16 if len(ranked) <= 1 << 16 else np.int32
        rank_of = ranks[self._numbers].astype(kind)
        order = np.argsort(rank_of, kind="stable")
        bounds = np.searchsorted(rank_of[order], np.arange(len(ranked) + 1))
        parts: dict[tuple[int, int], list[Int64s]] = {}
        for rank, (topic, _, day) in enumerate(ranked):
            rows = order[bounds[rank] : bounds[rank + 1]]
            parts.setdefault((topic, day), []).append(self._last_life(rows))
        for (topic, day), rows_of_queues in parts.items():
            date = (_EPOCH + timedelta(days=day)).isoformat()
            yield self._topics.names[topic], date, np.concatenate(rows_of_queues)

    def _last_life(self, rows: Int64s) -> Int64s:
        """The rows of a queue since it last began again, as after its topic was deleted."""
        falls = np.flatnonzero(np.diff(self._offsets[rows]) <= 0)
        if not len(falls):
            return rows
        self.left_out += int(falls[-1]) + 1
        return rows[falls[-1] + 1 :]

    def slices(self, rows: Int64s) -> Iterator[Int64s]:
        """The rows in slices, each a row group."""
        ends = np.cumsum(self.sizes[rows], dtype=np.int64)
        at = 0
        while at < len(rows):
            room = (int(ends[at - 1]) if at else 0) + _GROUP_BYTES
            stop = min(int(np.searchsorted(ends, room, "right")), at + _GROUP_ROWS)
            stop = max(stop, at + 1)
            yield rows[at:stop]
            at = stop

    def gathered(self, rows: Int64s) -> memoryview:
        """The records of these rows, one behind the other."""
        starts, sizes = self.starts[rows], self.sizes[rows]
        ascending = np.argsort(starts, kind="stable")
        cuts = np.empty(2 * len(rows) + 1, np.int32)
        cuts[:-1:2] = starts[ascending]
        cuts[1::2] = starts[ascending] + sizes[ascending]
        cuts[-1] = cuts[-2]
        place = np.empty(len(rows), np.int64)
        place[ascending] = np.arange(0, 2 * len(rows), 2)
        buffers = [None, pa.py_buffer(cuts), pa.py_buffer(self._view)]
        pieces = pa.Array.from_buffers(pa.binary(), 2 * len(rows), buffers)
        taken = pieces.take(numbers(place))
        return memoryview(taken.buffers()[2])[: int(sizes.sum(dtype=np.int64))]

    def taken_apart(self, data: memoryview | bytes) -> bytes:
        """Records with one message each. One that cannot be split counts as damaged."""
        singles: list[bytes] = []
        for record in decode_messages(data):
            try:
                found = without_inner_batches([record], record.queue_offset)
            except CodecMissing:
                raise
            except MessageError:
                at = record.physical_offset
                self.damaged.append((at, at + record.size))
                continue
            singles += [each.encode() for each in found]
        return b"".join(singles)


def _write_file(
    parts: list[ParquetPart],
    rows: _LogRows,
    order: Int64s,
    entries: Entries,
    path: str,
    *,
    topic: str,
    day: str,
    broker: str,
) -> Iterator[None]:
    """Write a Parquet file and add its part."""
    from pyarrow import parquet  # noqa: PLC0415  # only while there is something to archive

    queues: dict[int, _Tally] = {}
    with ExitStack() as stack:
        summed = stack.enter_context(entries.location.writing(path))
        output = stack.enter_context(
            parquet.ParquetWriter(
                summed,
                SCHEMA,
                compression="zstd",
                use_dictionary=_FEW_VALUES,
                write_statistics=_CHOOSING,
            )
        )
        for some in rows.slices(order):
            for batch in _batches(rows, some, broker):
                _count(queues, batch, int(rows.sizes[some].sum(dtype=np.int64)) // len(some))
                output.write_batch(batch)
            yield
        output.close()
        summed.flush()
    parts.append(
        ParquetPart(
            topic=topic,
            day=day,
            path=path,
            size=summed.size,
            crc=summed.crc,
            rows=sum(each.rows for each in queues.values()),
            queues=tuple(_part(*each) for each in sorted(queues.items())),
        )
    )


def _batches(rows: _LogRows, some: Int64s, broker: str) -> Iterator[pa.RecordBatch]:
    """The messages of these rows; several batches if their bodies decompress to much."""
    data: memoryview | bytes = rows.gathered(some)
    if rows.batches and not rows.batches.isdisjoint(rows.starts[some].tolist()):
        data = rows.taken_apart(data)
    try:
        yield messages_to_arrow(
            data,
            broker_name=broker,
            columns=SCHEMA.names,
            bad_body=BadBody.NULL,
            max_expanded=_MOST_EXPANDED if len(some) > 1 else MAX_EXPANDED_BODY,
        )
    except ChunkTooLarge:
        if len(some) == 1:
            raise
        middle = len(some) // 2
        yield from _batches(rows, some[:middle], broker)
        yield from _batches(rows, some[middle:], broker)


@dataclass(slots=True)
class _Tally:
    """The messages of a queue in a file."""

    first: int
    first_ms: int
    last: int = 0
    last_ms: int = 0
    rows: int = 0
    bytes: int = 0


def _count(queues: dict[int, _Tally], batch: pa.RecordBatch, mean: int) -> None:
    """Add the rows of a batch, whose records have `mean` bytes, to those of their queues."""
    ids, offsets = np.asarray(batch.column("queueId")), np.asarray(batch.column("queueOffset"))
    times = batch.column("storeTimestamp").cast(pa.int64()).fill_null(0)
    stored = np.asarray(times) // 1000
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    for begin, end in pairwise(edges):
        if begin == end:
            continue
        queue, last = int(ids[begin]), end - 1
        tally = queues.setdefault(queue, _Tally(int(offsets[begin]), int(stored[begin])))
        tally.last, tally.last_ms = int(offsets[last]), int(stored[last])
        tally.rows += end - begin
        tally.bytes += (end - begin) * mean


def _part(queue: int, tally: _Tally) -> QueuePart:
    return QueuePart(
        queue=queue,
        first=tally.first,
        last=tally.last,
        rows=tally.rows,
        bytes=tally.bytes,
        first_ms=tally.first_ms,
        last_ms=tally.last_ms,
    )
