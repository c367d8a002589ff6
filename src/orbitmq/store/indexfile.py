"""One file of the key index, byte for byte as Apache RocketMQ writes it.

    header      40 bytes: begin and end time, begin and end offset, used slots, next entry
    slots       4 bytes each: the newest entry whose hash falls into the slot, 0 for none
    entries     20 bytes each: hash, offset in the log, seconds since begin time, previous entry

Entries of a slot form a chain from the newest to the oldest. They are numbered from 1, so a link
always goes to a smaller number; a walk that insists on it ends, whatever the bytes say.

Entries are written at once, slots and header only when the file is flushed. On the disk the file
is therefore always as it was at the last flush, plus entries that nothing points to. While a
flush is writing slots the header says that the file ends in the far future; after a crash such a
file is later than any checkpoint, and this system as well as Apache's deletes and rebuilds it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orbitmq.store.errors import SettingError, StoreError
from orbitmq.store.files import write_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from orbitmq.store.files import DiskFiles
    from orbitmq.store.recordkeys import KeyEntries

HEADER_SIZE: Final = 40
SLOT_SIZE: Final = 4
ENTRY_SIZE: Final = 20
_MAX_INT: Final = 0x7FFFFFFF
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """The shape of every index file; all files of a folder have the same."""

    slots: int = 5_000_000  #: of the hash table in a file
    entries: int = 20_000_000  #: places; the first one is never used

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise SettingError(f"index.slots must be positive, got {self.slots}")
        if self.entries < 2:
            raise SettingError(f"index.entries must be 2 or more, got {self.entries}")
        if self.file_size > _MAX_INT:
            raise SettingError(
                f"index.slots and index.entries make a file of {self.file_size} bytes; "
                f"{_MAX_INT} are allowed"
            )

    @property
    def entries_at(self) -> int:
        return HEADER_SIZE + self.slots * SLOT_SIZE

    @property
    def file_size(self) -> int:
        return self.entries_at + self.entries * ENTRY_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """What a file says about itself."""

    begin_ms: int = 0
    end_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    used_slots: int = 0
    next_entry: int = 1

    def pack(self) -> bytes:
        return _header.pack(
            self.begin_ms,
            self.end_ms,
            self.begin_offset,
            self.end_offset,
            self.used_slots,
            self.next_entry,
        )

    @classmethod
    def unpack(cls, data: bytes) -> IndexHeader:
        begin_ms, end_ms, begin_offset, end_offset, used_slots, next_entry = _header.unpack(data)
        return cls(
            begin_ms=begin_ms,
            end_ms=end_ms,
            begin_offset=begin_offset,
            end_offset=end_offset,
            used_slots=used_slots,
            next_entry=next_entry,
        )


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
        entries = entries.between(0, count)
        first_offset, first_ms = int(entries.offsets[0]), int(entries.store_ms[0])
        if header.next_entry == 1:
            header = replace(header, begin_offset=first_offset, begin_ms=first_ms)
        slots = self._slots_in_memory()
        chained = _chain(entries.hashes % self._settings.slots, slots, header.next_entry)

        rows = np.empty(count, ENTRIES)
        rows["hash"] = entries.hashes
        rows["offset"] = entries.offsets
        rows["seconds"] = _whole_seconds(entries.store_ms, header.begin_ms)
        rows["previous"] = chained.previous
        at = self._settings.entries_at + header.next_entry * ENTRY_SIZE
        write_all(self._files, self._fd, rows.view(np.uint8).data, at)

        slots[chained.slots] = chained.newest
        self._changed[chained.slots // _GROUP] = True
        self.header = replace(
            header,
            end_offset=int(entries.offsets[-1]),
            end_ms=int(entries.store_ms[-1]),
            used_slots=header.used_slots + chained.newly_used,
            next_entry=header.next_entry + count,
        )
        return count

    def find(self, hashed: int, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Offsets of the entries with this hash in a span of time, newest first.

        Times are whole seconds after the begin of the file, rounded down. A chain may have
        millions of entries, so every read of the file is announced by a None: whoever has others
        to serve may do so then. It ends early when the file is closed meanwhile.
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


class FileFlush:
    """One flush of one file, with copies of all that it writes: it may run in another thread."""

    __slots__ = ("_fd", "_files", "_pieces", "changed", "header", "is_done")

    def __init__(
        self,
        files: DiskFiles,
        fd: int,
        header: IndexHeader,
        pieces: list[tuple[int, bytes]],
        changed: NDArray[np.bool_],
    ) -> None:
        self.header = header
        self.changed = changed
        self.is_done = False
        self._files = files
        self._fd = fd
        self._pieces = pieces

    def run(self) -> None:
        """Write and sync; after an OSError the file counts as not flushed."""
        files, fd = self._files, self._fd
        write_all(files, fd, replace(self.header, end_ms=FAR_FUTURE).pack(), 0)
        files.sync(fd)
        for at, data in self._pieces:
            write_all(files, fd, data, at)
        files.sync(fd)
        write_all(files, fd, self.header.pack(), 0)
        files.sync(fd)
        self.is_done = True


@dataclass(frozen=True, slots=True)
class _Chained:
    """Links of new entries, and what the slots have to say afterwards."""

    previous: NDArray[np.int32]
    slots: NDArray[np.int32]
    newest: NDArray[np.int32]
    newly_used: int


def _chain(slot_of: NDArray[np.int32], slots: NDArray[np.int32], first_number: int) -> _Chained:
    """Link entries numbered from `first_number` to those before them in their slots.

    A stable sort by slot puts the entries of a slot side by side in their order: each follows its
    neighbour, the first one of a slot follows what the slot says, the last one is what the slot
    will say.
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
    return _Chained(
        previous, by_slot[is_last], numbers[is_last], int(np.count_nonzero(before == 0))
    )


def _whole_seconds(store_ms: NDArray[np.int64], begin_ms: int) -> NDArray[np.int64]:
    if begin_ms <= 0:
        return np.zeros_like(store_ms)
    return np.clip((store_ms - begin_ms) // 1000, 0, _MAX_INT)


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Spans `[first, end)` in which the flags are set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
