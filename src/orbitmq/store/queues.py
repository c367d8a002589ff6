"""Consume queues: where in the log the messages of each queue are.

Entry n is at byte n * 20: offset in the log, size, tag code. Files hold a fixed number of entries
and are named by their first byte. The newest entries are in memory until they are written in bulk;
a crash loses none, because recovery derives them from the log.

`next_offset` is the offset of the next message, `max_offset` the end for readers (smaller while
messages wait for a flush), `min_offset` the first entry whose message is still in the log. Entries
below `tail_first` are read from files, others from memory: `tail_first <= written <= max_offset`.
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from orbitmq.atomicfile import write_all
from orbitmq.message.record import magic_for, topic_field
from orbitmq.store.files import is_out_of_files, queue_files_to_keep
from orbitmq.store.settings import ReadFailed, StoreDamaged, TopicRefused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from orbitmq.store.files import DiskFiles
    from orbitmq.store.settings import StoreSettings


ENTRY_SIZE = 20
ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("code", ">i8")])
NAME_DIGITS = 20
pack_entry = struct.Struct(">qiq").pack
_read_entry = struct.Struct(">qiq").unpack_from
#: Offset in the log, size and tag code of consecutive entries.
iter_entries = struct.Struct(">qiq").iter_unpack
_BLANK_SIZE = 0x7FFFFFFF
_BLOCK = 4096
#: Placeholders for entries whose files were lost.
BLANK_ENTRY = pack_entry(0, _BLANK_SIZE, 0)

#: Messages of this topic wait for a time, which their entries hold in place of a tag code.
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"


class QueueFiles:
    """Descriptors of queue files for reading; a bounded number stays open."""

    def __init__(self, files: DiskFiles, limit: int) -> None:
        self._files = files
        self._limit = limit
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, size: int, at: int) -> bytes:
        """A part of a file; `ReadFailed` when it cannot be read."""
        try:
            fd = self._open.get(path)
            if fd is None:
                fd = self._open_file(path)
            else:
                self._open.move_to_end(path)
            return self._files.pread(fd, size, at)
        except OSError as error:
            raise ReadFailed(f"{path} cannot be read: {error}") from error

    def _open_file(self, path: Path) -> int:
        if len(self._open) >= self._limit:
            self._files.close(self._open.popitem(last=False)[1])
        try:
            fd = self._files.open(path)
        except OSError as error:
            if not is_out_of_files(error):
                raise
            # The process may have no descriptors left; continue with one.
            self.close()
            fd = self._files.open(path)
        self._open[path] = fd
        return fd

    def forget(self, path: Path) -> None:
        fd = self._open.pop(path, None)
        if fd is not None:
            self._files.close(fd)

    def close(self) -> None:
        while self._open:
            self._files.close(self._open.popitem()[1])


class ConsumeQueue:
    """The entries of one queue of one topic."""

    __slots__ = (
        "_files",
        "_paths",
        "_reader",
        "bases",
        "checked",
        "folder",
        "has_new_names",
        "is_dirty",
        "is_schedule",
        "last_end",
        "magic",
        "max_offset",
        "min_offset",
        "next_offset",
        "per_file",
        "queue_id",
        "tail",
        "tail_first",
        "topic",
        "topic_field",
        "topic_size",
        "trusted_from",
        "unsynced",
        "written",
    )

    def __init__(
        self,
        topic: str,
        queue_id: int,
        folder: Path,
        per_file: int,
        files: DiskFiles,
        reader: QueueFiles,
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.folder = folder
        self.per_file = per_file
        self.topic_field = topic_field(topic)
        self.topic_size = len(self.topic_field)
        self.magic = magic_for(self.topic_field)
        self.is_schedule = topic == SCHEDULE_TOPIC
        self.bases: list[int] = []  #: first entries of the existing files
        self.next_offset = self.max_offset = self.min_offset = 0
        self.tail = bytearray()
        self.tail_first = self.written = 0
        self.last_end = 0  #: the end in the log of the last entry's message
        self.trusted_from = 0  #: this process created these and checked their messages
        self.checked: dict[int, bool] = {}  #: by block below `trusted_from`; see `checking`
        self.is_dirty = False  #: something is not written or not flushed
        self.has_new_names = False  #: the folder is not flushed
        self.unsynced: set[int] = set()  #: files written since they were last flushed
        self._files = files
        self._reader = reader
        self._paths: dict[int, Path] = {}  #: of the used files, by their first entries

    def __repr__(self) -> str:
        return f"<ConsumeQueue {self.topic}/{self.queue_id} {self.min_offset}-{self.max_offset}>"

    # ---- opening

    def load(self, recorded_entries: int | None) -> None:
        """Find the files. Recovery decides how many entries of the last one are valid.

        The names of files of another size do not match their entries, so such files are refused.
        A file may be shorter if our own checkpoint records the file size: the process died while it
        was created or truncated. Apache's broker leaves only empty ones.
        """
        full = self.per_file * ENTRY_SIZE
        for name in self._files.names(self.folder):
            if not (len(name) == NAME_DIGITS and name.isascii() and name.isdigit()):
                continue
            if recorded_entries not in (None, self.per_file):
                raise self.wrong_size(recorded_entries)
            size = self._files.size_of(self.folder / name)
            is_short = size < full and (size > 0 and recorded_entries is None)
            if size > full or is_short or int(name) % full:
                raise self.wrong_size(size // ENTRY_SIZE)
            self.bases.append(int(name) // ENTRY_SIZE)

    def wrong_size(self, entries: int | None) -> StoreDamaged:
        """The files of this queue have another number of entries than the settings say."""
        return StoreDamaged(
            f"the consume queue in {self.folder} has files of {entries} entries; open it with "
            f"queue_file_entries={entries}, not {self.per_file}"
        )

    def cut_to(self, physical_offset: int) -> None:
        """Keep exactly the entries whose messages begin below `physical_offset`.

        Those are known to be good, so the first other one can be found by bisection. All entries
        behind it are cleared, whatever they contain.
        """
        self.tail.clear()
        count = 0
        while self.bases:
            base = self.bases[-1]
            count = self._entries_below(base, physical_offset)
            if count:
                break
            self._remove_file(self.bases.pop())
        end = (self.bases[-1] + count) if self.bases else 0
        self.unsynced.clear()
        if self.bases and count < self.per_file and self._wipe_file(self.bases[-1], count):
            self.unsynced.add(self.bases[-1])
        self.tail_first = self.written = self.max_offset = self.next_offset = end
        self.trusted_from = end
        self.checked.clear()
        self.last_end = 0
        if end:
            offset, size, _ = self.entry(end - 1)
            self.last_end = offset + size
        self.min_offset = self.bases[0] if self.bases else 0

    def end_of_files(self) -> int:
        """The end in the log of the last entry's message in the files; 0 without entries."""
        for base in reversed(self.bases):
            count = self._entries_below(base, 1 << 63)
            if count:
                data = self._reader.read(self._path(base), ENTRY_SIZE, (count - 1) * ENTRY_SIZE)
                offset, size, _ = _read_entry(data)
                return 0 if size == _BLANK_SIZE else int(offset + size)
        return 0

    def _entries_below(self, base: int, physical_offset: int) -> int:
        path = self._path(base)
        low, high = 0, self.per_file
        while low < high:
            middle = (low + high) // 2
            data = self._reader.read(path, ENTRY_SIZE, middle * ENTRY_SIZE)
            if len(data) == ENTRY_SIZE:
                offset, size, _ = _read_entry(data)
            else:
                offset, size = 0, 0
            if size > 0 and 0 <= offset < physical_offset:
                low = middle + 1
            else:
                high = middle
        return low

    def _wipe_file(self, base: int, count: int) -> bool:
        """Clear the file from entry `count` on; False when it is clear already.

        The clearing must be on the disk before these entries can count as durable: an old entry
        that reappeared would point below the durable offset and be treated as good.
        """
        at = count * ENTRY_SIZE
        block = _BLOCK - at % _BLOCK
        fd = self._files.open(self._path(base))
        try:
            is_used = any(self._files.pread(fd, block, at)) or self._files.has_data(fd, at + block)
            size = self._files.size(fd)
            if is_used or size != self.per_file * ENTRY_SIZE:
                self._files.truncate(fd, at)
                self._files.truncate(fd, self.per_file * ENTRY_SIZE)
                return True
        finally:
            self._files.close(fd)
        return False

    # ---- appending

    def push(self, entries: bytes, first: int, last_end: int) -> None:
        """Append entries from number `first` on; a gap is filled."""
        if first > self.max_offset:
            self._leave_blank(first)
        self.tail += entries
        self.max_offset = first + len(entries) // ENTRY_SIZE
        self.last_end = last_end

    def _leave_blank(self, first: int) -> None:
        if self.max_offset == 0:
            # The older files were lost. Files before that of `first` never existed.
            base = first - first % self.per_file
            self.tail_first = self.written = base
            self.tail += BLANK_ENTRY * (first - base)
            self.min_offset = first
        else:
            # The messages between were destroyed on the disk. Offsets must not decrease in a queue,
            # and no record has one byte: a read of these entries reports the damage.
            self.tail += pack_entry(self.last_end, 1, 0) * (first - self.max_offset)
        self.max_offset = first

    def restart(self) -> None:
        """Drop everything: the topic was deleted and created again, and counts from 0."""
        for base in self.bases:
            self._remove_file(base)
        self.bases.clear()
        self.unsynced.clear()
        self.tail.clear()
        self.tail_first = self.written = 0
        self.max_offset = self.min_offset = self.next_offset = 0
        self.last_end = self.trusted_from = 0
        self.checked.clear()

    # ---- writing

    def write_tail(self) -> None:
        """Write the entries in memory to the files; an OSError leaves them in memory."""
        while self.written < self.max_offset:
            base = self.written - self.written % self.per_file
            stop = min(self.max_offset, base + self.per_file)
            begin = (self.written - self.tail_first) * ENTRY_SIZE
            end = (stop - self.tail_first) * ENTRY_SIZE
            fd = self._open_for_writing(base)
            try:
                data = bytes(memoryview(self.tail)[begin:end])
                write_all(self._files, fd, data, (self.written - base) * ENTRY_SIZE)
            finally:
                self._files.close(fd)
            self.unsynced.add(base)
            self.written = stop

    def _open_for_writing(self, base: int) -> int:
        path = self._path(base)
        if self.bases and self.bases[-1] >= base:
            return self._files.open(path)
        if not self.bases:
            self._files.make_folder(self.folder)
        fd = self._files.open(path, create=True)
        try:
            self._files.truncate(fd, 0)
            self._files.truncate(fd, self.per_file * ENTRY_SIZE)
        except BaseException:
            self._files.close(fd)
            raise
        self.bases.append(base)
        self.has_new_names = True
        return fd

    def trim(self, keep_bytes: int) -> None:
        """Free the memory of entries that are in the files, except the newest ones."""
        surplus = min(len(self.tail) - keep_bytes, (self.written - self.tail_first) * ENTRY_SIZE)
        surplus -= surplus % ENTRY_SIZE
        if surplus > 0:
            del self.tail[:surplus]
            self.tail_first += surplus // ENTRY_SIZE

    def unsynced_paths(self) -> list[Path]:
        return [self._path(base) for base in sorted(self.unsynced)]

    # ---- reading

    def entries(self, first: int, count: int) -> bytes | None:
        """At most `count` entries from `first` on, of one file; None when that file is missing."""
        base = first - first % self.per_file
        stop = min(first + count, self.max_offset, base + self.per_file)
        if first >= self.tail_first:
            begin = (first - self.tail_first) * ENTRY_SIZE
            return bytes(self.tail[begin : begin + (stop - first) * ENTRY_SIZE])
        if base not in self.bases:
            return None
        in_file = min(stop, self.tail_first)
        data = self._reader.read(
            self._path(base), (in_file - first) * ENTRY_SIZE, (first - base) * ENTRY_SIZE
        )
        if stop > in_file:
            data += self.tail[: (stop - in_file) * ENTRY_SIZE]
        return data[: len(data) - len(data) % ENTRY_SIZE]

    def entry(self, number: int) -> tuple[int, int, int]:
        """Offset in the log, size and tag code of an existing entry."""
        data = self.entries(number, 1)
        if data is None or len(data) < ENTRY_SIZE:
            return 0, 0, 0
        offset, size, code = _read_entry(data)
        return offset, size, code

    def following_file(self, number: int) -> int:
        """The first entry of the file after that of entry `number`."""
        return number - number % self.per_file + self.per_file

    # ---- retention

    def correct_min_offset(self, log_start: int) -> None:
        """Move `min_offset` to the first entry whose message is still in the log."""
        if self.min_offset < self.max_offset and self.entry(self.min_offset)[0] >= log_start > 0:
            return
        low = max(self.min_offset, self.bases[0] if self.bases else self.tail_first)
        high = self.max_offset
        while low < high:
            middle = (low + high) // 2
            if self._is_gone(middle, log_start):
                low = middle + 1
            else:
                high = middle
        self.min_offset = low

    def drop_files_below(self, log_start: int) -> int:
        """Delete files whose messages have all left the log; the last one stays."""
        dropped = 0
        while len(self.bases) > 1 and log_start > 0:
            base = self.bases[0]
            if self.written < base + self.per_file:
                break
            if not self._is_gone(base + self.per_file - 1, log_start):
                break
            self._remove_file(base)
            del self.bases[0]
            self.unsynced.discard(base)
            dropped += 1
        return dropped

    def _is_gone(self, number: int, log_start: int) -> bool:
        """Whether the message of an entry, and of all before it, was deleted with its file.

        One entry is no proof: a flipped bit in it would hide, or delete, the entries of existing
        messages. So the entry before it has to agree.
        """
        first = self.bases[0] if self.bases else self.tail_first
        for each in {number, max(number - 1, first)}:
            offset, size, _ = self.entry(each)
            if not (0 <= offset < log_start or size == _BLANK_SIZE):
                return False
        return True

    def _remove_file(self, base: int) -> None:
        path = self._path(base)
        self._reader.forget(path)
        self._files.unlink(path)
        del self._paths[base]

    def _path(self, base: int) -> Path:
        path = self._paths.get(base)
        if path is None:
            # Creating a path is expensive, and so is hashing a new one. Groups read at several
            # places of a queue in turn, so remembering one path would not be enough.
            path = self.folder / f"{base * ENTRY_SIZE:0{NAME_DIGITS}d}"
            self._paths[base] = path
        return path


# All queues of a store.

log = logging.getLogger(__name__)

_NO_NAMES = frozenset({"", ".", ".."})
_LONGEST_NAME = 255  #: the limit of file systems


def check_topic(topic: str) -> None:
    """Refuse a topic whose name would leave the folder of the queues."""
    if topic in _NO_NAMES or "/" in topic or "\0" in topic:
        raise TopicRefused(topic)
    try:
        size = len(topic.encode())
    except UnicodeEncodeError as error:
        raise TopicRefused(topic) from error
    if size > _LONGEST_NAME:
        raise TopicRefused(topic)


class QueueTable:
    """The queues by topic and number. The memory of all their entries is bounded."""

    def __init__(self, folder: Path, settings: StoreSettings, files: DiskFiles) -> None:
        self.folder = folder
        self.by_key: dict[tuple[str, int], ConsumeQueue] = {}
        self.dirty: list[ConsumeQueue] = []  #: queues with something to write or flush
        self.file_entries = settings.queue_file_entries
        self.tail_limit = settings.flush.queue_tail_bytes
        self.write_error: OSError | None = None  #: entries wait: the disk refused them
        self._settings = settings
        self._files = files
        self._reader = QueueFiles(files, settings.open_queue_files or queue_files_to_keep())

    # ---- the table

    def load(self, recorded_entries: int | None) -> None:
        """Find the queues that have files.

        `recorded_entries` is the number of entries per file in our own checkpoint.
        """
        self._files.make_folder(self.folder)
        for topic in self._files.names(self.folder):
            for name in self._files.names(self.folder / topic):
                try:
                    self._load_queue(topic, name, recorded_entries)
                except TopicRefused:
                    log.warning("not a queue of ours", extra={"folder": f"{topic!a}/{name!a}"})

    def _load_queue(self, topic: str, name: str, recorded_entries: int | None) -> None:
        # `isdigit` also accepts characters such as "²".
        if name.isascii() and name.isdigit() and str(int(name)) == name:
            self.create(topic, int(name)).load(recorded_entries)

    def create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """A new, empty queue; its topic becomes the name of a folder."""
        check_topic(topic)
        if not 0 <= queue_id <= 0x7FFFFFFF:
            raise TopicRefused(topic, queue_id)
        queue = ConsumeQueue(
            topic,
            queue_id,
            self.folder / topic / str(queue_id),
            self._settings.queue_file_entries,
            self._files,
            self._reader,
        )
        self.by_key[topic, queue_id] = queue
        return queue

    def forget_unused(self, queue: ConsumeQueue) -> None:
        """Drop a queue that was created for messages that were not stored."""
        if not queue.next_offset and not queue.bases:
            self.by_key.pop((queue.topic, queue.queue_id), None)

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self.by_key.get((topic, queue_id))

    def delete_topic(self, topic: str) -> int:
        """Drop the queues of a topic and delete their files; returns the number of queues."""
        check_topic(topic)
        doomed = [key for key in self.by_key if key[0] == topic]
        if not doomed:
            return 0
        for key in doomed:
            queue = self.by_key.pop(key)
            queue.restart()
        self.dirty = [queue for queue in self.dirty if queue.topic != topic]
        self._files.remove_folder(self.folder / topic)
        return len(doomed)

    def delete_below(self, deleted: Mapping[str, int]) -> int:
        """Drop the queues whose messages all lie below the given offset of their topic.

        Returns the number of queues.
        """
        doomed = {
            key: queue
            for key, queue in self.by_key.items()
            if queue.topic in deleted and queue.last_end <= deleted[queue.topic]
        }
        for key, queue in doomed.items():
            del self.by_key[key]
            queue.restart()
            self._files.remove_folder(self.folder / queue.topic / str(queue.queue_id))
        self.dirty = [queue for queue in self.dirty if (queue.topic, queue.queue_id) not in doomed]
        return len(doomed)

    def clear(self) -> None:
        """Drop all queues and delete all files."""
        for topic in {topic for topic, _ in self.by_key}:
            self.delete_topic(topic)

    def close(self) -> None:
        self._reader.close()

    # ---- memory and files

    def mark_dirty(self, queue: ConsumeQueue) -> None:
        """Note that a queue has something to write."""
        if not queue.is_dirty:
            queue.is_dirty = True
            self.dirty.append(queue)

    def spill(self, queue: ConsumeQueue) -> None:
        """Write a queue whose entries use much memory, and keep the newest half of them."""
        if self.write(queue):
            queue.trim(self.tail_limit // 2)

    def write(self, queue: ConsumeQueue) -> bool:
        """Write the entries of a queue. A failure is kept, and the entries stay in memory."""
        try:
            queue.write_tail()
        except OSError as error:
            if self.write_error is None:
                log.exception("writing a consume queue failed", extra={"queue": repr(queue)})
            self.write_error = error
            return False
        self.write_error = None
        return True

    def trim(self) -> None:
        """Free memory when all queues together exceed their limit."""
        budget = self._settings.flush.tail_memory
        queues = self.by_key.values()
        held = sum(len(queue.tail) for queue in queues)
        if held > budget:
            for queue in queues:
                queue.trim(0)

    @property
    def memory(self) -> int:
        return sum(len(queue.tail) for queue in self.by_key.values())
