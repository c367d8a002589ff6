"""The key index: finds messages by key, in files that are byte for byte Apache RocketMQ's.

    header      40 bytes: begin and end time, begin and end offset, used slots, next entry
    slots       4 bytes each: the newest entry whose hash falls into the slot, 0 for none
    entries     20 bytes each: hash, offset in the log, seconds since begin time, previous entry

Entries are numbered from 1 and link to smaller numbers, so a walk always ends. They are written
immediately, slots and header only by a flush. While a flush writes slots, the header says that the
file ends in the far future; after a crash such a file is deleted and rebuilt, here and by Apache.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from orbitmq.atomicfile import write_all
from orbitmq.clock import SystemClock
from orbitmq.javahash import java_hash
from orbitmq.message.record import (
    BORN_HOST_V6,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    STORE_HOST_V6,
    TRANSACTION_MASK,
    TRANSACTION_ROLLBACK,
    RecordFault,
    check_record,
)
from orbitmq.message.scan import starts_with
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import (
    _MAX_INT,
    ENTRY_SIZE,
    HEADER_SIZE,
    SLOT_SIZE,
    IndexSettings,
    StoreError,
)
from orbitmq.store.verify import find_record, scan_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from orbitmq.clock import Clock
    from orbitmq.message.scan import ScanResult
    from orbitmq.store.commitlog import CommitLog, LogFile

    Ints = NDArray[np.int64]
    Text = NDArray[np.uint8]

FAR_FUTURE: Final = 0x7FFFFFFFFFFFFFFF
_header = struct.Struct(">qqqqii")
_slot = struct.Struct(">i")
_entry = struct.Struct(">iqii")
ENTRIES: Final = np.dtype(
    [("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
#: Slots that are written together when one of them changed.
_GROUP: Final = 1024
#: Entries read at once when a chain is followed: neighbours in a chain are often close.
_WINDOW: Final = 200


class IndexHeader(NamedTuple):
    """The header of an index file."""

    begin_ms: int = 0
    end_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    used_slots: int = 0
    next_entry: int = 1

    def pack(self) -> bytes:
        return _header.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> IndexHeader:
        return cls._make(_header.unpack(data))


class UnusableIndexFile(StoreError):
    """An index file does not hold what its header says; delete it, the log has everything."""


class IndexFile:
    """An open index file. Not for use by several threads, except for `FileFlush.run`."""

    def __init__(
        self, files: DiskFiles, path: Path, fd: int, settings: IndexSettings, header: IndexHeader
    ) -> None:
        self.path = path
        self.header = header
        self._files = files
        self._fd = fd
        self._settings = settings
        self._slots: NDArray[np.int32] | None = None
        self._changed = np.zeros(-(-settings.slots // _GROUP), np.bool_)
        self._flushed_header = header
        self._is_closed = False

    @classmethod
    def create(
        cls, files: DiskFiles, path: Path, settings: IndexSettings, before: IndexHeader | None
    ) -> IndexFile:
        """A new, empty file that goes on where the one `before` ends; takes space as it fills."""
        fd = files.open(path, create=True)
        try:
            files.truncate(fd, 0)
            files.truncate(fd, settings.file_size)
            write_all(files, fd, IndexHeader(end_ms=FAR_FUTURE).pack(), 0)
        except BaseException:
            files.close(fd)
            files.unlink(path)
            raise
        ends = before or IndexHeader()
        header = IndexHeader(
            begin_ms=ends.end_ms,
            end_ms=ends.end_ms,
            begin_offset=ends.end_offset,
            end_offset=ends.end_offset,
        )
        made = cls(files, path, fd, settings, header)
        # Zeroed memory that is never touched costs nothing.
        made._slots = np.zeros(settings.slots, np.int32)
        return made

    @classmethod
    def load(cls, files: DiskFiles, path: Path, settings: IndexSettings) -> IndexFile:
        """The file at `path`, or UnusableIndexFile."""
        fd = files.open(path)
        try:
            loaded = cls(files, path, fd, settings, IndexHeader())
            loaded.header = loaded._flushed_header = loaded._checked_header()
        except BaseException:
            files.close(fd)
            raise
        return loaded

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_full(self) -> bool:
        return self.header.next_entry >= self._settings.entries

    @property
    def is_flushed(self) -> bool:
        return self.header is self._flushed_header

    def append(self, entries: KeyEntries) -> int:
        """Add entries until the file is full; the number that were added.

        After an OSError the file is as it was before.
        """
        header = self.header
        count = min(len(entries), self._settings.entries - header.next_entry)
        if not count:
            return 0
        entries = entries.rows(slice(count))
        first_offset, first_ms = int(entries.offsets[0]), int(entries.store_ms[0])
        if header.next_entry == 1:
            header = header._replace(begin_offset=first_offset, begin_ms=first_ms)
        slots = self._slots_in_memory()
        slot_of = entries.hashes % self._settings.slots
        previous, changed, newest, newly_used = _chain(slot_of, slots, header.next_entry)

        rows = np.empty(count, ENTRIES)
        rows["hash"] = entries.hashes
        rows["offset"] = entries.offsets
        rows["seconds"] = _whole_seconds(entries.store_ms, header.begin_ms)
        rows["previous"] = previous
        at = self._settings.entries_at + header.next_entry * ENTRY_SIZE
        write_all(self._files, self._fd, rows.view(np.uint8).data, at)

        slots[changed] = newest
        self._changed[changed // _GROUP] = True
        self.header = header._replace(
            end_offset=int(entries.offsets[-1]),
            end_ms=int(entries.store_ms[-1]),
            used_slots=header.used_slots + newly_used,
            next_entry=header.next_entry + count,
        )
        return count

    def find(self, hashed: int, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Offsets of the entries with this hash in a span of time, newest first.

        Times are whole seconds after the begin of the file, rounded down. A chain may have
        millions of entries, so a None comes before every read of the file: an event loop can
        serve others then. It ends early when the file is closed meanwhile.
        """
        settings, file_begin_ms = self._settings, self.header.begin_ms
        if end_ms < file_begin_ms:
            return  # all of its entries are later
        number = self._newest(hashed % settings.slots)
        window, window_first = b"", number + 1
        while 0 < number < self.header.next_entry:
            if number < window_first:
                yield None
                if self._is_closed:
                    return
                window_first = max(1, number - _WINDOW + 1)
                window = self._files.pread(
                    self._fd,
                    (number - window_first + 1) * ENTRY_SIZE,
                    settings.entries_at + window_first * ENTRY_SIZE,
                )
            place = (number - window_first) * ENTRY_SIZE
            if len(window) < place + ENTRY_SIZE:
                return
            found, offset, seconds, previous = _entry.unpack_from(window, place)
            at_ms = file_begin_ms + seconds * 1000
            if seconds < 0:
                return
            if found == hashed and begin_ms <= at_ms <= end_ms:
                yield offset
            if previous >= number or at_ms < begin_ms:
                return
            number = previous

    def begin_flush(self) -> FileFlush:
        """What has to be written so that the disk has everything up to now."""
        changed, self._changed = self._changed, np.zeros_like(self._changed)
        pieces: list[tuple[int, bytes]] = []
        slots = self._slots
        if slots is not None:
            for first, end in _runs(changed):
                values = slots[first * _GROUP : end * _GROUP].astype(">i4")
                pieces.append((HEADER_SIZE + first * _GROUP * SLOT_SIZE, values.tobytes()))
        return FileFlush(self._files, self._fd, self.header, pieces, changed)

    def end_flush(self, flush: FileFlush) -> None:
        """Take note of how a flush went."""
        if not flush.is_done:
            self._changed |= flush.changed
            return
        self._flushed_header = flush.header
        if self.is_full and self.is_flushed:
            self._slots = None

    def flush(self) -> None:
        """Write and sync everything, here and now."""
        flush = self.begin_flush()
        try:
            flush.run()
        finally:
            self.end_flush(flush)

    def close(self) -> None:
        """Close without flushing: the disk keeps what the last flush left."""
        self._is_closed = True
        self._files.close(self._fd)
        self._slots = None

    def delete(self) -> None:
        self.close()
        self._files.unlink(self.path)

    def _newest(self, slot: int) -> int:
        if self._slots is not None:
            return int(self._slots[slot])
        data = self._files.pread(self._fd, SLOT_SIZE, HEADER_SIZE + slot * SLOT_SIZE)
        return int(_slot.unpack(data)[0]) if len(data) == SLOT_SIZE else 0

    def _slots_in_memory(self) -> NDArray[np.int32]:
        if self._slots is None:
            size = self._settings.slots * SLOT_SIZE
            data = self._files.pread(self._fd, size, HEADER_SIZE)
            if len(data) != size:
                raise UnusableIndexFile(f"index file {self.path.name} became shorter")
            slots = np.frombuffer(data, ">i4").astype(np.int32)
            slots[(slots < 0) | (slots >= self.header.next_entry)] = 0
            self._slots = slots
        return self._slots

    def _checked_header(self) -> IndexHeader:
        settings = self._settings
        size = self._files.size(self._fd)
        if size != settings.file_size:
            self._refuse(f"has {size} bytes instead of {settings.file_size}")
        header = IndexHeader.unpack(self._files.pread(self._fd, HEADER_SIZE, 0))
        if header.end_ms == FAR_FUTURE:
            self._refuse("was not flushed to its end")
        if header.next_entry <= 1:
            self._refuse("has no entries")
        if (
            header.next_entry > settings.entries
            or not 0 < header.used_slots < min(settings.slots + 1, header.next_entry)
            or not 0 <= header.begin_offset <= header.end_offset
        ):
            self._refuse("has an impossible header")
        for number, offset in (
            (1, header.begin_offset),
            (header.next_entry - 1, header.end_offset),
        ):
            at = settings.entries_at + number * ENTRY_SIZE
            found = _entry.unpack(self._files.pread(self._fd, ENTRY_SIZE, at))
            if found[1] != offset or not 0 <= found[3] < number:
                self._refuse(f"has another entry {number} than its header says")
        return header

    def _refuse(self, reason: str) -> None:
        raise UnusableIndexFile(f"index file {self.path.name} {reason}")


@dataclass(slots=True)
class FileFlush:
    """One flush of one file, with copies of all that it writes: it may run in another thread."""

    files: DiskFiles
    fd: int
    header: IndexHeader
    pieces: list[tuple[int, bytes]]
    changed: NDArray[np.bool_]
    is_done: bool = False

    def run(self) -> None:
        """Write and sync; after an OSError the file counts as not flushed."""
        files, fd = self.files, self.fd
        write_all(files, fd, self.header._replace(end_ms=FAR_FUTURE).pack(), 0)
        files.sync(fd)
        for at, data in self.pieces:
            write_all(files, fd, data, at)
        files.sync(fd)
        write_all(files, fd, self.header.pack(), 0)
        files.sync(fd)
        self.is_done = True


def _chain(
    slot_of: NDArray[np.int32], slots: NDArray[np.int32], first_number: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]:
    """Link entries numbered from `first_number` to those before them in their slots.

    Returns the links, the changed slots, their new values, and how many are newly used. A
    stable sort by slot puts the entries of a slot side by side in their order: each follows its
    neighbour, the first one of a slot follows the slot's old value, and the last one is the slot's
    new value.
    """
    order = np.argsort(slot_of, kind="stable")
    by_slot = slot_of[order]
    numbers = (order + first_number).astype(np.int32)
    goes_on = by_slot[1:] == by_slot[:-1]
    is_first = np.concatenate(([True], ~goes_on))
    is_last = np.concatenate((~goes_on, [True]))
    before = slots[by_slot[is_first]]

    linked: NDArray[Any] = np.empty_like(numbers)
    linked[1:] = numbers[:-1]
    linked[is_first] = before
    previous = np.empty_like(numbers)
    previous[order] = linked
    return previous, by_slot[is_last], numbers[is_last], int(np.count_nonzero(before == 0))


def _whole_seconds(store_ms: NDArray[np.int64], begin_ms: int) -> NDArray[np.int64]:
    if begin_ms <= 0:
        return np.zeros_like(store_ms)
    return np.clip((store_ms - begin_ms) // 1000, 0, _MAX_INT)


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Spans `[first, end)` in which the flags are set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


# The folder of index files. The index may lag behind the log; its owner feeds it whole records from
# `resume_offset` on, and feeding a part twice does no harm. After a crash a file of ours is kept if
# its last flush was complete, one of Apache's if it ends before the checkpoint's index time, and
# nothing is kept behind a file that is dropped. `durable_until_ms` is the latest end of all flushed
# files, not that of the last one, because the clock may have been set back between two files.
# Entries hold hashes, so results are candidates whose keys the caller compares.

log = logging.getLogger(__name__)

#: yyyyMMddHHmmssSSS
_NAME_LENGTH: Final = 17
_ALWAYS: Final = (-(1 << 63), (1 << 63) - 1)


class KeyIndex:
    """The key index of a store. One owner; only `IndexFlush.run` may run in another thread."""

    def __init__(
        self,
        folder: Path,
        index_files: list[IndexFile],
        settings: IndexSettings,
        files: DiskFiles,
        clock: Clock,
    ) -> None:
        self._folder = folder
        self._index_files = index_files
        self._settings = settings
        self._files = files
        self._clock = clock
        self._flushing: IndexFlush | None = None
        #: For the checkpoint: what was stored until then survives a crash in the index.
        self.durable_until_ms = max((file.header.end_ms for file in index_files), default=0)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        settings: IndexSettings | None = None,
        files: DiskFiles | None = None,
        clock: Clock | None = None,
        safe_until_ms: int | None = None,
        log_end: int | None = None,
        known_last: int | None = None,
    ) -> KeyIndex:
        """Open the index in `folder`, which is made if need be.

        `safe_until_ms` is the checkpoint's index time if the last run did not end properly and was
        Apache's, and `log_end` where the log ends: the index must not know of offsets that will be
        used again. `known_last` is the offset of the last message in it that our own checkpoint
        knows to be on the disk, after a crash.
        """
        settings = settings or IndexSettings()
        files = files or DiskFiles()
        files.make_folder(folder)
        kept: list[IndexFile] = []
        paths = [folder / name for name in files.names(folder) if _is_index_name(name)]
        try:
            for path in paths:
                if known_last:
                    _repair(path, files, settings, known_last)
                if reason := _load(path, kept, settings, files, safe_until_ms, log_end):
                    _drop(paths[len(kept) :], reason, files)
                    break
        except BaseException:
            for file in kept:
                file.close()
            raise
        return cls(folder, kept, settings, files, clock or SystemClock())

    @property
    def resume_offset(self) -> int:
        """Everything in the log below this offset is indexed; 0 when nothing is."""
        return self._index_files[-1].header.end_offset if self._index_files else 0

    @property
    def last_ms(self) -> int:
        """When the last indexed message was stored; 0 when there is none."""
        return self._index_files[-1].header.end_ms if self._index_files else 0

    def append_log(self, chunk: memoryview, starts: ArrayLike, base: int) -> int:
        """Index the records that begin at `starts` in a chunk of the log; the entries added.

        `base` is the offset of the chunk in the log, `starts` are relative to the chunk.
        """
        return self.add(entries_of_log(chunk, starts, base))

    def candidates(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Offsets of messages that probably have this key or unique key, newest first, each once.

        A None comes before every read of a file. Times in the index are in whole seconds, rounded
        down: ask from a second earlier. The index may change
        between two of them: what is appended later is not among them.
        """
        # Entries are in the order of the log, Apache's as well as ours. So those of one message
        # follow each other in a chain, and from the end of one file to the beginning of the next.
        last = -1
        for offset in self._find(index_hash(topic, key), begin_ms, end_ms):
            if offset is None:
                yield None
            elif offset != last:
                last = offset
                yield offset

    def begin_flush(self) -> IndexFlush:
        """A flush of everything up to now, whose `run` another thread may call.

        Until `end_flush` is called no other flush may begin; appending and looking up go on.
        """
        if self._flushing is not None:
            raise RuntimeError("a flush of the index is under way; end it first")
        self._flushing = IndexFlush(
            [(file, file.begin_flush()) for file in self._index_files if not file.is_flushed]
        )
        return self._flushing

    def end_flush(self, flush: IndexFlush) -> None:
        """Take note of how a flush went, successful or not."""
        self._flushing = None
        for file, part in flush.parts:
            file.end_flush(part)
            if part.is_done:
                self.durable_until_ms = max(self.durable_until_ms, part.header.end_ms)

    def delete_below(self, min_offset: int) -> int:
        """Delete files that know only of messages before `min_offset`; how many were deleted.

        The newest file stays: it says how far the log is indexed.
        """
        busy = {file for file, _ in self._flushing.parts} if self._flushing else set()
        deleted = 0
        while len(self._index_files) > 1:
            oldest = self._index_files[0]
            if oldest.header.end_offset >= min_offset or oldest in busy:
                break
            del self._index_files[0]
            oldest.delete()
            deleted += 1
        return deleted

    def abandon(self) -> None:
        """Close without flushing, as a crash would."""
        for file in self._index_files:
            file.close()
        self._index_files = []

    def add(self, entries: KeyEntries) -> int:
        """Add entries in the order of the log, but for those that are known; how many."""
        entries = self._without_known(entries)
        added = 0
        while added < len(entries):
            added += self._writable_file().append(entries.rows(slice(added, None)))
        return added

    def _without_known(self, entries: KeyEntries) -> KeyEntries:
        """Leave out what is in the index already; a crash may have cut the last record's keys."""
        if not self._index_files or not len(entries):
            return entries
        last = self.resume_offset
        if entries.offsets[0] > last:
            return entries
        entries = entries.rows(entries.offsets >= last)
        wanted = np.ones(len(entries), np.bool_)
        for at in np.flatnonzero(entries.offsets == last).tolist():
            found = self._find(int(entries.hashes[at]), *_ALWAYS)
            wanted[at] = next((each for each in found if each is not None), None) != last
        return entries.rows(wanted)

    def _find(self, hashed: int, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        for file in self._index_files[::-1]:
            if file.is_closed:
                return  # its messages were deleted meanwhile, and so were those before
            yield from file.find(hashed, begin_ms, end_ms)
            if file.header.begin_ms < begin_ms:
                return

    def _writable_file(self) -> IndexFile:
        if self._index_files and not self._index_files[-1].is_full:
            return self._index_files[-1]
        self._release_memory()
        name = self._next_name()
        before = self._index_files[-1].header if self._index_files else None
        file = IndexFile.create(self._files, self._folder / name, self._settings, before)
        self._index_files.append(file)
        self._files.sync_folder(self._folder)
        log.info("index file created", extra={"file": name})
        return file

    def _release_memory(self) -> None:
        """Flush full files that wait for a flush, but for the last one.

        The last one is left to the next ordinary flush, because syncing hundreds of megabytes
        takes long. Only an owner that never flushes pays here.
        """
        if self._flushing is None:
            for file in self._index_files[:-1]:
                if not file.is_flushed:
                    file.flush()
                    self.durable_until_ms = max(self.durable_until_ms, file.header.end_ms)

    def _next_name(self) -> str:
        # Local time, as Apache's broker does; when the clock stands still or goes back the order
        # of the names must not.
        moment = datetime.fromtimestamp(self._clock.now(), UTC).astimezone()
        name = int(f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}")
        if self._index_files:
            name = max(name, int(self._index_files[-1].path.name) + 1)
        return f"{name:0{_NAME_LENGTH}d}"


@dataclass(frozen=True, slots=True)
class IndexFlush:
    """One flush of all files that need it. `run` touches nothing that the index uses."""

    parts: list[tuple[IndexFile, FileFlush]]

    def run(self) -> None:
        """Write and sync, oldest file first; after an OSError the rest is not flushed."""
        for _, part in self.parts:
            part.run()


def _is_index_name(name: str) -> bool:
    return len(name) == _NAME_LENGTH and name.isascii() and name.isdigit()


def _repair(path: Path, files: DiskFiles, settings: IndexSettings, known_last: int) -> None:
    try:
        if repair_index_file(path, files, settings, known_last):
            log.info("index file kept after an interrupted flush", extra={"file": path.name})
    except OSError:
        log.exception("index file not repaired", extra={"file": path.name})


def _load(
    path: Path,
    kept: list[IndexFile],
    settings: IndexSettings,
    files: DiskFiles,
    safe_until_ms: int | None,
    log_end: int | None,
) -> str:
    """Add the file to those that are kept, or say why it is not."""
    try:
        file = IndexFile.load(files, path, settings)
    except UnusableIndexFile as unusable:
        return str(unusable)
    header = file.header
    if safe_until_ms is not None and header.end_ms > safe_until_ms:
        reason = "it is later than the checkpoint"
    elif log_end is not None and header.end_offset >= log_end:
        reason = "it goes beyond the end of the log"
    elif kept and header.begin_offset < kept[-1].header.end_offset:
        reason = "it begins before the one before it ends"
    else:
        kept.append(file)
        return ""
    file.close()
    return reason


def _drop(paths: list[Path], reason: str, files: DiskFiles) -> None:
    log.warning(
        "index files dropped, to be made again from the log",
        extra={"file": paths[0].name, "count": len(paths), "reason": reason},
    )
    # From the last one on: should this be interrupted, what is left has no gap.
    for path in reversed(paths):
        files.unlink(path)


# Feeding the index. The owner feeds it in steps and before every look-up, so that a look-up finds
# everything readable. That is bounded: when more is missing (the index was lost, or the load is too
# high), the newest messages are not found for a while, as with Apache's broker. An append pays
# nothing.

_CHUNK = 4 << 20
#: The pause in seconds after a failed write of the index.
_PAUSE = 5.0


class Indexing:
    """The index and its position in the log."""

    def __init__(self, index: KeyIndex, commit_log: CommitLog, position: int, clock: Clock) -> None:
        self.index = index
        self.position = max(position, commit_log.start)  #: all below is in the index
        self.durable_position = self.position  #: and on the disk
        self.durable_last = index.resume_offset
        self._log = commit_log
        self._flush: IndexFlush | None = None
        self._flush_at = (self.position, self.durable_last)
        self._flush_failed = False
        self._clock = clock
        self._retry_at = 0.0  #: after a failure nothing is tried before

    @property
    def durable_ms(self) -> int:
        return self.index.durable_until_ms

    def step(self, upto: int, usual: int) -> None:
        """Index the usual number of bytes, up to four times as many when far behind."""
        behind = upto - self.position
        self.advance(upto, min(max(usual, behind // 8), 4 * usual))

    def advance(self, upto: int, budget: int) -> bool:
        """Index the log up to `upto`, at most `budget` bytes of it; True when it is done."""
        self.position = max(self.position, self._log.start)
        stop = min(upto, self.position + budget)
        while self.position < stop and self._clock.monotonic() >= self._retry_at:
            if not self._advance_chunk(upto, min(_CHUNK, stop - self.position)):
                break
        return self.position >= upto

    def _advance_chunk(self, upto: int, chunk: int) -> bool:
        file = self._log.file_of(self.position)
        if file is None:
            return False
        at = self.position - file.base
        end = min(file.size, upto - file.base)
        found = self._records(file, at, min(at + chunk, end))
        if not len(found.records) and found.fault is RecordFault.CUT_SHORT:
            # Maybe only the chunk is too short: then take the one record.
            size = check_record(file.view, at, end, check_crc=False)
            found = self._records(file, at, at + size if isinstance(size, int) else end)
        if len(found.records):
            try:
                self.index.append_log(file.view[:end], found.records.starts, file.base)
            except OSError:
                # The log has everything and must not stop; the disk may have room later.
                log.exception("the key index cannot be written; look-ups find only older messages")
                self._retry_at = self._clock.monotonic() + _PAUSE
                return False
            self.position = file.base + found.stopped_at
        elif found.fault is RecordFault.END_OF_FILE:
            self.position = file.end
        else:
            behind = find_record(file.view, file.base, at + 1, end)
            self.position = file.base + (behind if behind is not None else end)
        return True

    @staticmethod
    def _records(file: LogFile, at: int, end: int) -> ScanResult:
        """The first block of records of a part of a file; their bodies do not matter here."""
        return next(scan_log(file.view, file.base, start=at, end=end, check_crc=False))

    # ---- flushing, in the three steps of a round

    def begin_flush(self) -> None:
        self._flush_at = (self.position, self.index.resume_offset)
        self._flush_failed = True  # until `end_flush`: other files of the round are flushed first
        self._flush = self.index.begin_flush()

    def run_flush(self) -> None:
        """Worker: flush the index. If that fails, it is rebuilt after a crash."""
        if self._flush is not None:
            try:
                self._flush.run()
            except OSError:
                log.exception("the key index was not flushed")
            else:
                self._flush_failed = False

    def end_flush(self) -> None:
        if self._flush is not None:
            flush, self._flush = self._flush, None
            self.index.end_flush(flush)
            if not self._flush_failed:
                self.durable_position, self.durable_last = self._flush_at

    def abandon(self) -> None:
        """Close the files as they are."""
        self.index.abandon()


# Repair after an interrupted flush. The slots may be of two flushes, but entries are not touched by
# a flush, and slots can be built from entries. The checkpoint knows how many entries are good.
# Without this, a crash under load would cost the whole index.

_REPAIR_CHUNK = 1 << 18  #: entries read at once


def repair_index_file(
    path: Path, files: DiskFiles, settings: IndexSettings, last_offset: int
) -> bool:
    """Make a file whole up to the message at `last_offset`; False when it needs or allows none."""
    fd = files.open(path)
    try:
        data = files.pread(fd, HEADER_SIZE, 0)
        if len(data) < HEADER_SIZE or files.size(fd) != settings.file_size:
            return False
        header = IndexHeader.unpack(data)
        count = min(header.next_entry, settings.entries) - 1
        if header.end_ms != FAR_FUTURE or count < 1 or header.begin_offset > last_offset:
            return False
        slots = np.zeros(settings.slots, np.int32)
        next_entry = 1
        offset, seconds = header.begin_offset, 0
        while next_entry <= count:
            rows = _read(
                fd, files, settings, next_entry, min(_REPAIR_CHUNK, count - next_entry + 1)
            )
            good = _leading(rows, offset, last_offset)
            if good:
                numbers = np.arange(next_entry, next_entry + good, dtype=np.int32)
                # Of several entries of a slot the last one counts, and an assignment keeps it.
                slots[rows["hash"][:good].astype(np.int32) % settings.slots] = numbers
                offset, seconds = int(rows["offset"][good - 1]), int(rows["seconds"][good - 1])
                next_entry += good
            if good < len(rows) or not len(rows):
                break
        if next_entry == 1 or offset != last_offset:
            return False
        write_all(files, fd, slots.astype(">i4").tobytes(), HEADER_SIZE)
        files.sync(fd)
        whole = header._replace(
            # The index knows whole seconds only; the end must not be before the last message's.
            end_ms=header.begin_ms + seconds * 1000 + 999,
            end_offset=offset,
            used_slots=int(np.count_nonzero(slots)),
            next_entry=next_entry,
        )
        write_all(files, fd, whole.pack(), 0)
        files.sync(fd)
    finally:
        files.close(fd)
    return True


def _read(
    fd: int, files: DiskFiles, settings: IndexSettings, first: int, count: int
) -> NDArray[np.void]:
    data = files.pread(fd, count * ENTRY_SIZE, settings.entries_at + first * ENTRY_SIZE)
    return np.frombuffer(data[: len(data) - len(data) % ENTRY_SIZE], ENTRIES)


def _leading(rows: NDArray[np.void], before: int, last: int) -> int:
    """How many entries continue one at offset `before` and are of messages up to `last`."""
    offsets = rows["offset"].astype(np.int64)
    is_good = offsets <= last
    is_good[1:] &= offsets[1:] >= offsets[:-1]
    if len(offsets):
        is_good[0] &= offsets[0] >= before
    return len(offsets) if is_good.all() else int(is_good.argmin())


# Java's string hash of many pieces of one text at once. The hash of a piece [a, b) is the sum of
# unit[j] * 31 ** (b - 1 - j) modulo 2**32. 31 is odd and has an inverse i, so
#
#     hash(a, b) = 31 ** (b - 1) * (unit[a] * i ** a + ... + unit[b - 1] * i ** (b - 1))
#
# One multiplication over the text and one sum per piece give all hashes, whatever their lengths.


_BASE = 31
_INVERSE = pow(_BASE, -1, 1 << 32)
_HASH_SIGN = ord("#")


def index_hash(topic: str, key: str) -> int:
    """The hash under which the index keeps `key` of `topic`: never negative."""
    hashed = abs(java_hash(f"{topic}#{key}"))
    return hashed if hashed <= 0x7FFFFFFF else 0


def index_hashes(
    topics: NDArray[np.uint32], keys: NDArray[np.uint32], lengths: NDArray[np.int64]
) -> NDArray[np.int32]:
    """`index_hash` of many: from the hashes of the topics, those of the keys and their lengths.

    A hash of joined text needs no joined text: `hash(x + y) = hash(x) * 31 ** len(y) + hash(y)`.
    """
    prefixes = topics * np.uint32(_BASE) + np.uint32(_HASH_SIGN)
    hashes = prefixes * powers(int(lengths.max(initial=0)))[lengths] + keys
    signed = hashes.view(np.int32)
    # abs() of the smallest int32 stays negative, as in Java; the index keeps 0 for it.
    return np.maximum(np.abs(signed), np.int32(0))


def hash_pieces(
    units: Text, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """The Java hash of every piece `units[start:end]`, as unsigned 32-bit numbers.

    `units` are the bytes of a text that is ASCII wherever a piece lies.
    """
    if not len(starts):
        return np.zeros(0, np.uint32)
    weighted = np.zeros(len(units) + 1, np.uint32)
    np.multiply(units, _inverse_powers(len(units))[: len(units)], out=weighted[:-1])
    # Of the sums between neighbouring bounds every second one is that of a piece. The others cost
    # next to nothing, because a bound that is not above the one before it means a single unit.
    bounds = np.column_stack((starts, ends))[::-1].ravel()
    sums = np.add.reduceat(weighted, bounds, dtype=np.uint32)[::2][::-1]
    return np.where(ends > starts, sums * powers(len(units))[ends - 1], np.uint32(0))


def powers(highest: int) -> NDArray[np.uint32]:
    """31 to the power of 0, 1, ... at least `highest`, modulo 2**32."""
    return _powers(_BASE, 1 << max(highest, 1 << 15).bit_length())


def _inverse_powers(highest: int) -> NDArray[np.uint32]:
    return _powers(_INVERSE, 1 << max(highest, 1 << 15).bit_length())


@lru_cache(maxsize=8)
def _powers(base: int, count: int) -> NDArray[np.uint32]:
    factors: NDArray[Any] = np.full(count, base, np.uint32)
    factors[0] = 1
    table = np.cumprod(factors, dtype=np.uint32)
    table.flags.writeable = False
    return table


# Index entries of many records at once: topic, `UNIQ_KEY` and every word of `KEYS`. Topic and
# properties lie at the end of a record; these ends are copied into one text and cut by columns:
#
#     topic 02 02 name 01 value 02 name 01 value 02 02 topic 02 02 ...
#
# The two bytes between topic and properties were the length of the properties. They are overwritten
# with separators, because a length could look like one.


#: How many bytes of topics and properties are worked on at a time: what a core's cache holds.
_BLOCK: Final = 192 * 1024
_NAME_END: Final = 1
_ITEM_END: Final = 2
_SEPARATOR: Final = b"\x02"
_SPACE: Final = 0x20
_LAST_LETTERS: Final = 4


@dataclass(frozen=True, slots=True)
class KeyEntries:
    """What the index has to hold for some records, in the order of the log."""

    hashes: NDArray[np.int32]
    offsets: Ints
    store_ms: Ints

    def __len__(self) -> int:
        return len(self.hashes)

    def rows(self, chosen: slice | NDArray[np.bool_]) -> KeyEntries:
        """Some of the entries."""
        return KeyEntries(self.hashes[chosen], self.offsets[chosen], self.store_ms[chosen])


def entries_of_log(chunk: memoryview, starts: ArrayLike, base: int) -> KeyEntries:
    """The entries of the records at `starts` in a chunk of the log that begins at offset `base`.

    Rolled-back transactions have none. What is no whole record has none either: whether the log
    is sound is not decided here.
    """
    tails = _tails(chunk, np.asarray(starts, np.int64), base)
    blocks = [_entries_of_block(chunk, block) for block in _blocks(tails)]
    return KeyEntries(
        np.concatenate([np.zeros(0, np.int32), *(block.hashes for block in blocks)]),
        np.concatenate([np.zeros(0, np.int64), *(block.offsets for block in blocks)]),
        np.concatenate([np.zeros(0, np.int64), *(block.store_ms for block in blocks)]),
    )


#: The rows of an array with a column for each record: its offset in the log and its time, and
#: where its topic begins and ends and its properties end, in the chunk.
_OFFSET, _STORE_MS, _TOPIC_START, _TOPIC_END, _END = range(5)


def _blocks(tails: Ints) -> Iterator[Ints]:
    """The same columns, in blocks that are worked on at a time."""
    filled = np.cumsum(tails[_END] - tails[_TOPIC_START])
    first, count = 0, len(filled)
    while first < count:
        before = int(filled[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(filled, before + _BLOCK, "right")))
        yield tails[:, first:end]
        first = end


def _tails(chunk: memoryview, starts: Ints, base: int) -> Ints:
    limit = len(chunk)
    starts = starts[(starts >= 0) & (starts <= limit - MIN_RECORD_SIZE)]
    size, magic = _int32(chunk, starts), _int32(chunk, starts + 4)
    sys_flag = _int32(chunk, starts + 36)
    born_extra = np.where(sys_flag & BORN_HOST_V6, 12, 0)
    extra = born_extra + np.where(sys_flag & STORE_HOST_V6, 12, 0)
    store_ms = _gather(chunk, ">i8", starts + 56 + born_extra)
    body_length = _int32(chunk, starts + 84 + extra)
    topic_field = starts + 88 + extra + body_length
    wide = magic == MAGIC_V2
    topic_length = np.where(
        wide, _gather(chunk, ">i2", topic_field), _gather(chunk, "i1", topic_field)
    )
    topic_starts = topic_field + 1 + wide
    topic_ends = topic_starts + topic_length
    properties_length = _gather(chunk, ">i2", topic_ends)
    ends = topic_ends + 2 + properties_length
    # Lengths were read wherever they led to; a record counts only if they are all possible and
    # add up to its size.
    sound = (
        (wide | (magic == MAGIC_V1))
        & (np.minimum(np.minimum(body_length, topic_length), properties_length) >= 0)
        & (ends == starts + size)
        & (ends <= limit)
        & (sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK)
    )
    return np.stack((starts + base, store_ms, topic_starts, topic_ends, ends))[:, sound]


def _int32(chunk: memoryview, at: Ints) -> Ints:
    return _gather(chunk, ">i4", at)


def _gather(chunk: memoryview | Text, kind: str, at: Ints) -> Ints:
    """The integers at the places `at`; a place outside of the chunk gives one from its edge."""
    if not len(at):
        return np.zeros(0, np.int64)
    dtype = np.dtype(kind)
    room = len(chunk) - dtype.itemsize + 1
    anywhere: NDArray[Any] = np.ndarray((room,), dtype, chunk, strides=(1,))
    return anywhere[np.clip(at, 0, room - 1)].astype(np.int64)


def _entries_of_block(chunk: memoryview, tails: Ints) -> KeyEntries:
    starts, ends = tails[_TOPIC_START], tails[_END]
    firsts = np.cumsum(ends - starts + 1) - (ends - starts + 1)
    topic_ends = firsts + (tails[_TOPIC_END] - starts)
    size = int(ends[0] - starts[0])
    if (ends - starts == size).all():
        anywhere: NDArray[Any] = np.ndarray(
            (len(chunk) - size + 1,), f"V{size}", chunk, strides=(1,)
        )
        rows = np.full((len(starts), size + 1), _ITEM_END, np.uint8)
        rows[:, :-1] = anywhere[starts].view(np.uint8).reshape(-1, size)
        joined = bytearray(rows)
    else:
        joined = bytearray(_SEPARATOR).join(
            [chunk[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        )
        joined += _SEPARATOR
    text = np.frombuffer(joined, np.uint8)
    text[topic_ends] = _ITEM_END
    text[topic_ends + 1] = _ITEM_END

    items = _Items(text, firsts, topic_ends + 2)
    unique_keys = items.named(b"UNIQ_KEY")
    words = items.named(b"KEYS").words(text)
    keys = unique_keys.merged_with(words)

    count = len(firsts)
    hashes = hash_pieces(
        text,
        np.concatenate((firsts, keys.starts)),
        np.concatenate((topic_ends, keys.ends)),
    )
    found = index_hashes(hashes[keys.owners], hashes[count:], keys.ends - keys.starts)
    if not joined.isascii():
        _correct_beyond_ascii(found, joined, text, firsts, topic_ends, keys)
    return KeyEntries(found, tails[_OFFSET, keys.owners], tails[_STORE_MS, keys.owners])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of the text, in its order, and the rows of the records they belong to."""

    owners: Ints
    starts: Ints
    ends: Ints

    def words(self, text: Text) -> _Pieces:
        """What stands between spaces."""
        spaces = np.flatnonzero(text == _SPACE)
        if len(spaces) and len(self.starts):
            piece = np.searchsorted(self.starts, spaces, "right") - 1
            spaces = spaces[(piece >= 0) & (spaces < self.ends[piece])]
        if not (len(spaces) and len(self.starts)):
            return self
        # Pieces do not overlap, so sorting the bounds brings each start before its end.
        starts = np.sort(np.concatenate((self.starts, spaces + 1)), kind="stable")
        ends = np.sort(np.concatenate((self.ends, spaces)), kind="stable")
        full = ends > starts
        starts, ends = starts[full], ends[full]
        owners = self.owners[np.searchsorted(self.starts, starts, "right") - 1]
        return _Pieces(owners, starts, ends)

    def merged_with(self, others: _Pieces) -> _Pieces:
        """Both, by record, and in a record these before the others."""
        owners = np.concatenate((self.owners, others.owners))
        order = np.argsort(owners, kind="stable")
        return _Pieces(
            owners[order],
            np.concatenate((self.starts, others.starts))[order],
            np.concatenate((self.ends, others.ends))[order],
        )


class _Items:
    """The properties in a text of joined record ends."""

    __slots__ = (
        "_firsts",
        "_item_ends",
        "_last_letters",
        "_name_ends",
        "_property_starts",
        "_text",
    )

    def __init__(self, text: Text, firsts: Ints, property_starts: Ints) -> None:
        self._text, self._firsts, self._property_starts = text, firsts, property_starts
        name_ends = np.flatnonzero(text == _NAME_END)
        self._name_ends = name_ends = name_ends[name_ends >= _LAST_LETTERS]
        self._item_ends = np.flatnonzero(text == _ITEM_END)
        #: Of every name, as a number: what most names differ in.
        self._last_letters = np.ndarray((max(0, len(text) - 3),), "<u4", text, strides=(1,))[
            name_ends - _LAST_LETTERS
        ]

    def named(self, name: bytes) -> _Pieces:
        """The values of one property, whose name has four letters or more.

        In a record the last one counts, an empty one does not.
        """
        text, size = self._text, len(name)
        # A name that stands right behind the end of an item is one: it holds no 01 itself, and
        # further ones belong to the value.
        wanted = int.from_bytes(name[-_LAST_LETTERS:], "little")
        ends = self._name_ends[self._last_letters == wanted]
        ends = ends[ends > size]
        ends = ends[starts_with(text, ends - size - 1, _SEPARATOR + name)]
        value_ends = self._item_ends[np.searchsorted(self._item_ends, ends)]
        owners = np.searchsorted(self._firsts, ends, "right") - 1
        # A topic that holds separators must not pass for a property.
        is_one = (value_ends > ends + 1) & (ends - size >= self._property_starts[owners])
        ends, value_ends, owners = ends[is_one], value_ends[is_one], owners[is_one]
        is_last = np.append(owners[1:] != owners[:-1], np.ones(min(1, len(owners)), np.bool_))
        return _Pieces(owners[is_last], ends[is_last] + 1, value_ends[is_last])


def _correct_beyond_ascii(
    found: NDArray[np.int32],
    joined: bytearray,
    text: Text,
    firsts: Ints,
    topic_ends: Ints,
    keys: _Pieces,
) -> None:
    """Hash again, one by one, where topic or key has bytes that are not code units."""
    wide = np.flatnonzero(text > 0x7F)
    wide_topic = np.searchsorted(wide, firsts) < np.searchsorted(wide, topic_ends)
    wide_key = np.searchsorted(wide, keys.starts) < np.searchsorted(wide, keys.ends)
    for at in np.flatnonzero(wide_key | wide_topic[keys.owners]).tolist():
        owner = keys.owners[at]
        topic = joined[firsts[owner] : topic_ends[owner]].decode(errors="replace")
        key = joined[keys.starts[at] : keys.ends[at]].decode(errors="replace")
        found[at] = index_hash(topic, key)
