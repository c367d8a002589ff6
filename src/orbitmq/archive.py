"""The archive: log files of brokers as Parquet, and what is in it.

    topic=<topic>/day=<yyyy-mm-dd>/<broker>-<first log offset>.parquet
    _log/<broker>/<first log offset>.json

Invariant: a log file is archived when its entry in `_log` exists, which is written after all its
Parquet files are on the disk. Files without an entry are remains of an interrupted run; the next
run writes files of the same names. Readers therefore use entries only. See docs/howto/archive.md.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import fs

from orbitmq.atomicfile import DISK, FolderLock, replace_file
from orbitmq.errors import OrbitError

#: Topic, broker and queue id.
QueueKey: TypeAlias = tuple[str, str, int]

_ENTRIES: Final = "_log"
#: Files whose names begin so are no data to readers of Parquet.
_DRAFT: Final = "_draft-"
_NAME_DIGITS: Final = 20
#: Bytes that a name in a folder can have, and the characters of a longer topic that are in it.
_LONGEST_NAME: Final = 255
_KEPT_OF_LONG: Final = 60
#: Object stores that need no folders, by pyarrow's names.
_WITHOUT_FOLDERS: Final = frozenset({"s3", "gcs", "abfs"})
_CHUNK: Final = 4 << 20


class ArchiveError(OrbitError):
    """An archive that cannot be used, or that lacks what its entries name."""


# ---- entries


class QueuePart(msgspec.Struct, frozen=True):
    """The messages of a queue in a Parquet file."""

    queue: int
    first: int  #: offset
    last: int
    rows: int
    bytes: int  #: as stored in the log
    first_ms: int  #: when the first message was stored
    last_ms: int


class ParquetPart(msgspec.Struct, frozen=True):
    """A Parquet file: the messages of one topic, day and log file, by queue and offset."""

    topic: str
    day: str
    path: str  #: in the archive
    size: int
    crc: int  #: CRC-32 of the file
    rows: int
    queues: tuple[QueuePart, ...]


class LogEntry(msgspec.Struct, frozen=True):
    """An archived log file."""

    broker: str
    log_start: int
    log_end: int
    #: Identifies the log: after a loss, another one may have the same offsets.
    fingerprint: str
    writer: str  #: which process wrote it
    written_ms: int
    first_ms: int  #: store times of the first and the last record
    last_ms: int
    #: Records of topics that are not archived, of deleted topics, and of queues that began again.
    left_out: int
    #: Parts of the log file that hold no records.
    damaged: tuple[tuple[int, int], ...]
    #: The topics whose messages below an offset of the log are deleted.
    deleted: dict[str, int]
    files: tuple[ParquetPart, ...]
    format: int = 1


def parquet_path(topic: str, day: str, broker: str, log_start: int) -> str:
    """The path of a Parquet file in the archive."""
    name = f"{_escaped(broker)}-{log_start:0{_NAME_DIGITS}d}.parquet"
    folder = f"topic={_escaped(topic)}"
    if len(folder) > _LONGEST_NAME:
        # What is escaped takes three characters.
        digest = hashlib.blake2b(topic.encode(), digest_size=16).hexdigest()
        folder = f"topic={_escaped(topic[:_KEPT_OF_LONG])}~{digest}"
    return f"{folder}/day={day}/{name}"


def _escaped(name: str) -> str:
    # As Hive and Spark do in the names of folders.
    return quote(name, safe="")


# ---- where it is


class Location:
    """A folder of this machine, or of an object store by its URI (`s3://bucket/archive`)."""

    def __init__(self, text: str) -> None:
        #: For people: a URI may have a secret in front of the host.
        self.text = re.sub(r"://[^/]*@", "://", text)
        self._local: Path | None = None
        try:
            if "://" in text:
                self._fs, self._root = fs.FileSystem.from_uri(text)
                if isinstance(self._fs, fs.LocalFileSystem):
                    self._local = Path(self._root)
            else:
                self._local = Path(text).expanduser().absolute()
                self._fs, self._root = fs.LocalFileSystem(), str(self._local)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ArchiveError(f"{self.text!r} is no place for an archive: {error}") from error

    @contextmanager
    def writing(self, path: str) -> Iterator[SummedFile]:
        """A new file, which has its name when all of it is on the disk."""
        whole = f"{self._root}/{path}"
        if self._local is None:
            # An object is there when it is complete.
            with self._new_object(whole) as stream, SummedFile(stream) as summed:
                yield summed
            return
        target = Path(whole)
        draft = target.with_name(_DRAFT + target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                with SummedFile(file) as summed:
                    yield summed
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
            # The new folders, too.
            for folder in (target.parent, target.parent.parent, self._local):
                DISK.sync_folder(folder)
        finally:
            draft.unlink(missing_ok=True)

    def put(self, path: str, data: bytes) -> None:
        """Replace a small file; it is on the disk when this returns."""
        if self._local is not None:
            replace_file(self._local / path, data)
            for folder in (self._local / path).parents[1:3]:
                DISK.sync_folder(folder)
            return
        with self._new_object(f"{self._root}/{path}") as stream:
            stream.write(data)

    def _new_object(self, path: str) -> Any:
        if self._fs.type_name not in _WITHOUT_FOLDERS:
            self._fs.create_dir(path.rpartition("/")[0])
        return self._fs.open_output_stream(path)

    def open(self, path: str) -> Any:
        """A file for reading. Raises `FileNotFoundError`."""
        return self._fs.open_input_file(f"{self._root}/{path}")

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            data: bytes = file.read()
            return data

    def size(self, path: str) -> int | None:
        """The size of a file; None if there is none."""
        info = self._fs.get_file_info(f"{self._root}/{path}")
        return info.size if info.type is fs.FileType.File else None

    def names(self, folder: str = "", *, deep: bool = False) -> list[str]:
        """The names in a folder, with `deep` the paths of all files below it; in order."""
        place = f"{self._root}/{folder}".rstrip("/")
        found = self._fs.get_file_info(fs.FileSelector(place, allow_not_found=True, recursive=deep))
        if not deep:
            return sorted(each.base_name for each in found)
        start = len(f"{self._root}/")
        return sorted(each.path[start:] for each in found if each.type is fs.FileType.File)

    def lock(self, broker: str) -> FolderLock | None:
        """Taken by the one process that archives a broker; an object store has no locks.

        Raises `ArchiveError` if another process has it.
        """
        if self._local is None:
            return None
        lock = FolderLock(self._local / _ENTRIES / _escaped(broker) / "lock")
        if not lock.take():
            raise ArchiveError(
                f"process {lock.holder or 'of another machine'} writes the archive of broker "
                f"{broker} in {self.text} already"
            )
        return lock


class SummedFile(io.RawIOBase):
    """Counts the bytes that are written, and computes their checksum."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.size = 0
        self.crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._target.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)
        return len(data)

    def tell(self) -> int:
        return self.size


class Entries:
    """The entries of an archive."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def brokers(self) -> list[str]:
        return [unquote(name) for name in self.location.names(_ENTRIES)]

    def log_files(self, broker: str) -> list[int]:
        """The archived log files of a broker, by their first offsets."""
        names = self.location.names(f"{_ENTRIES}/{_escaped(broker)}")
        return [int(name[:-5]) for name in names if re.fullmatch(r"[0-9]{20}\.json", name)]

    def read(self, broker: str, log_start: int) -> LogEntry:
        """Raises `ArchiveError`, `OSError`."""
        path = self._path(broker, log_start)
        try:
            entry = msgspec.json.decode(self.location.read(path), type=LogEntry)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ArchiveError(
                f"{path} in the archive {self.location.text} is damaged: {error}; delete it, and "
                "the log file is archived again if the broker still has it"
            ) from error
        if entry.format != 1:
            raise ArchiveError(
                f"the archive {self.location.text} was written by a newer OrbitMQ (format "
                f"{entry.format}); read it with that"
            )
        return entry

    def write(self, entry: LogEntry) -> None:
        data = msgspec.json.format(msgspec.json.encode(entry), indent=1)
        self.location.put(self._path(entry.broker, entry.log_start), data)

    def is_whole(self, entry: LogEntry) -> bool:
        """Whether all files of an entry exist in their sizes."""
        return all(self.location.size(part.path) == part.size for part in entry.files)

    def _path(self, broker: str, log_start: int) -> str:
        return f"{_ENTRIES}/{_escaped(broker)}/{log_start:0{_NAME_DIGITS}d}.json"


# ---- the catalogue: where the messages of a queue are


@dataclass(frozen=True, slots=True)
class Piece:
    """The messages of a queue from `start` to `end` (exclusive) in one Parquet file."""

    path: str
    queue: int
    start: int
    end: int


class Sampled(NamedTuple):
    """The place of a message in the log and its size, estimated from entries."""

    place: int
    size: int


class _Span(NamedTuple):
    entry: LogEntry
    path: str
    part: QueuePart


class Catalog:
    """What an archive holds of each queue. A topic that was created again begins anew."""

    def __init__(self, location: Location) -> None:
        """Raises `ArchiveError` for a place that is no archive."""
        self._entries = Entries(location)
        self.location = location
        self._known: dict[str, dict[int, LogEntry]] = {}
        self._spans: dict[QueueKey, list[_Span]] = {}
        self.refresh()
        if not self._known:
            raise ArchiveError(
                f"{location.text} holds no archive; write one with: "
                f"orbitmq archive run DATA_FOLDER --to {location.text}"
            )

    def refresh(self) -> None:
        """Read entries that are new since the last call."""
        has_news = False
        try:
            for broker in self._entries.brokers():
                known = self._known.setdefault(broker, {})
                for start in self._entries.log_files(broker):
                    if start not in known:
                        known[start] = self._entries.read(broker, start)
                        has_news = True
        finally:
            if has_news:
                self._spans = _by_queue(self.entries())

    def entries(self) -> list[LogEntry]:
        """All entries, by broker and in the order of its log."""
        return [known[start] for _, known in sorted(self._known.items()) for start in sorted(known)]

    def topics(self) -> set[str]:
        return {topic for topic, _, _ in self._spans}

    def queues(self) -> Iterable[QueueKey]:
        return self._spans.keys()

    def bounds(self, key: QueueKey) -> tuple[int, int] | None:
        """The first offset of a queue, and the one after its last. There may be gaps."""
        spans = self._spans.get(key)
        return (spans[0].part.first, spans[-1].part.last + 1) if spans else None

    def pieces(self, key: QueueKey, start: int, end: int) -> list[Piece]:
        """The archived parts of a range of a queue, in order."""
        return [
            Piece(path, part.queue, max(start, part.first), min(end, part.last + 1))
            for _, path, part in self._spans.get(key, ())
            if part.first < end and part.last >= start
        ]

    def gaps(self, key: QueueKey, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that are in no file."""
        found, at = [], start
        for piece in self.pieces(key, start, end):
            if piece.start > at:
                found.append((at, piece.start))
            at = piece.end
        if at < end:
            found.append((at, end))
        return found

    def complete_until_ms(self) -> int:
        """The archive has all messages that its brokers stored before this time."""
        return min(map(_complete_until_ms, self._known.values()), default=0)

    def first_at(self, key: QueueKey, time_ms: int) -> int | None:
        """The first offset stored at a time or later; None when there is none."""
        for _, path, part in self._spans.get(key, ()):
            if part.last_ms < time_ms:
                continue
            if part.first_ms >= time_ms:
                return part.first
            piece = Piece(path, part.queue, part.first, part.last + 1)
            for batch in read_piece(self.location, piece, ("queueOffset", "storeTimestamp")):
                times = np.asarray(batch.column("storeTimestamp").cast(pa.int64()))
                young = np.flatnonzero(times >= time_ms * 1000)
                if len(young):
                    return int(batch.column("queueOffset")[int(young[0])].as_py())
        return None

    def stored_ms(self, key: QueueKey, offset: int) -> int | None:
        """When a message was stored; None if it is not here."""
        for piece in self.pieces(key, offset, offset + 1):
            for batch in read_piece(self.location, piece, ("storeTimestamp",)):
                at = batch.column("storeTimestamp").cast(pa.int64())[0].as_py()
                return None if at is None else int(at // 1000)
        return None

    def sample(self, key: QueueKey, offset: int) -> Sampled | None:
        """The estimated place and size of a message; None if it is not here."""
        for entry, _, part in self._spans.get(key, ()):
            if part.first <= offset <= part.last:
                share = (offset - part.first) / max(1, part.rows)
                place = entry.log_start + int((entry.log_end - entry.log_start) * min(share, 1.0))
                return Sampled(place, part.bytes // max(1, part.rows))
        return None


def _complete_until_ms(known: Mapping[int, LogEntry]) -> int:
    """The same for one broker, which may have nothing archived yet."""
    until, end = 0, None
    for start in sorted(known):
        if end is not None and start != end:
            break
        until, end = max(until, known[start].last_ms), known[start].log_end
    return until


def _by_queue(entries: Iterable[LogEntry]) -> dict[QueueKey, list[_Span]]:
    entries = list(entries)
    deleted: dict[tuple[str, str], int] = {}
    for entry in entries:
        for topic, below in entry.deleted.items():
            key = (entry.broker, topic)
            deleted[key] = max(below, deleted.get(key, 0))
    found: dict[QueueKey, list[_Span]] = {}
    for entry in entries:
        for file in sorted(entry.files, key=lambda each: each.day):
            if entry.log_end <= deleted.get((entry.broker, file.topic), 0):
                continue
            for part in file.queues:
                spans = found.setdefault((file.topic, entry.broker, part.queue), [])
                if spans and part.first <= spans[-1].part.last:
                    spans.clear()  # the topic was deleted and created again
                spans.append(_Span(entry, file.path, part))
    return found


# ---- reading


def read_piece(
    location: Location, piece: Piece, columns: Sequence[str], *, batch_bytes: int = 8 << 20
) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, in order. Raises `ArchiveError` if the file cannot be read."""
    from pyarrow import parquet  # noqa: PLC0415  # planners read none, nearly always

    wanted = list(dict.fromkeys((*columns, "queueId", "queueOffset")))
    try:
        with location.open(piece.path) as source:
            file = parquet.ParquetFile(source)
            groups = _row_groups(file.metadata, piece)
            size = sum(file.metadata.row_group(each).total_byte_size for each in groups)
            rows = sum(file.metadata.row_group(each).num_rows for each in groups)
            count = max(1, min(65_536, rows * batch_bytes // max(1, size)))
            for batch in file.iter_batches(count, groups, wanted, use_threads=False):
                chosen = _rows_of(batch, piece)
                if chosen.num_rows:
                    yield chosen.select(list(columns))
    except (OSError, pa.ArrowException) as error:
        raise ArchiveError(
            f"{piece.path} of the archive {location.text} cannot be read: {error}; check it with: "
            f"orbitmq archive verify {location.text}"
        ) from error


def _row_groups(metadata: Any, piece: Piece) -> list[int]:
    """The row groups that may have rows of a piece, by their statistics."""
    names = [metadata.schema.column(place).path for place in range(metadata.num_columns)]
    queue_at, offset_at = names.index("queueId"), names.index("queueOffset")
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        queues, offsets = group.column(queue_at).statistics, group.column(offset_at).statistics
        if not queues.min <= piece.queue <= queues.max:
            continue
        if queues.min == queues.max and not (
            offsets.min < piece.end and piece.start <= offsets.max
        ):
            continue
        found.append(number)
    return found


def _rows_of(batch: pa.RecordBatch, piece: Piece) -> pa.RecordBatch:
    queues, offsets = np.asarray(batch.column("queueId")), np.asarray(batch.column("queueOffset"))
    begin, end = np.searchsorted(queues, piece.queue), np.searchsorted(queues, piece.queue, "right")
    first, last = np.searchsorted(offsets[begin:end], (piece.start, piece.end))
    return batch.slice(begin + first, last - first)


# ---- checking


def problems_of(entries: Entries, entry: LogEntry) -> list[str]:
    """What is wrong with the files of an entry: size, checksum, rows and offsets."""
    found = []
    for part in entry.files:
        with suppress(FileNotFoundError):
            problem = _problem_of(entries.location, part)
            if problem:
                found.append(f"{part.path}: {problem}")
            continue
        found.append(f"{part.path}: is missing")
    return found


def _problem_of(location: Location, part: ParquetPart) -> str:
    from pyarrow import parquet  # noqa: PLC0415  # rarely used

    size = crc = 0
    with location.open(part.path) as file:
        while data := file.read(_CHUNK):
            size, crc = size + len(data), zlib.crc32(data, crc)
    if (size, crc) != (part.size, part.crc):
        return "its bytes are not those that were written"
    with location.open(part.path) as file:
        rows: int = parquet.ParquetFile(file).metadata.num_rows
    if rows != part.rows or rows != sum(queue.rows for queue in part.queues):
        return f"it has {rows} rows, and its entry says {part.rows}"
    return ""


def strays(entries: Entries, known: Iterable[LogEntry]) -> list[str]:
    """Parquet files that no entry names: of an interrupted run, or deleted from `_log`."""
    named = {part.path for entry in known for part in entry.files}
    return [
        path
        for path in entries.location.names(deep=True)
        if path.endswith(".parquet") and path not in named
    ]
