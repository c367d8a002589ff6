"""The checkpoint: where recovery may begin.

The first 40 bytes are Apache's: times of the last messages that are on the disk in the log, in the
queues and in the index, and two offsets of replication. They bound its recovery to a time.

Bytes 64 to 139, which Apache's broker neither reads nor writes, are ours and say it exactly:

    magic, file size, queue file entries, durable, entries, flushed, indexed, last indexed, flags,
    checksum

`file size` and `queue file entries` are the shape of all files of the store and cannot change.

`durable`: the log below this offset and every queue entry that points below it are on the disk.
`entries`: how many these are, counting every queue from 0; if it is another number, files of
queues were lost. `flushed`: the log below this offset is on the disk (never below `durable`).
`indexed`: the index knows all messages below this offset and is on the disk, if the offset of the
last message in it is still `last indexed`.

The checksum covers Apache's bytes too. Its broker changes them as soon as it stores a message, so
a hint that it left behind counts no longer, and recovery does what Apache's does. If it cut the
log without storing anything, the bytes behind the cut are still there and are looked at as if it
had never been here; should it have deleted files, the log ends before `durable`, and the store is
refused. All of it lies in one disk sector: a torn write leaves the old or the new page, or no valid
hint.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.store.files import write_all

if TYPE_CHECKING:
    from pathlib import Path

    from orbitmq.store.files import DiskFiles

PAGE = 4096
_times = struct.Struct(">5q")
_hint = struct.Struct(">8sqqqqqqqq")
_checksum = struct.Struct(">I")
_HINT_AT = 64
_MAGIC = b"ORBITMQ\x02"
_CLEAN = 1
#: Apache's broker looks back this much further than the times say.
_MARGIN_MS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What our own broker knows at a checkpoint."""

    file_size: int
    queue_file_entries: int
    durable: int
    entries: int
    flushed: int
    indexed: int
    index_last: int
    is_clean: bool = False  #: written by a proper shutdown, after everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of the checkpoint file; times in milliseconds, as stored."""

    physical_ms: int = 0
    logical_ms: int = 0
    index_ms: int = 0
    master_flushed: int = 0
    confirmed: int = 0
    hint: Hint | None = None

    @property
    def safe_ms(self) -> int:
        """Messages stored before are on the disk, in log and queues."""
        return max(0, min(self.physical_ms, self.logical_ms) - _MARGIN_MS)

    def pack(self) -> bytes:
        times = _times.pack(
            self.physical_ms,
            self.logical_ms,
            self.index_ms,
            self.master_flushed,
            self.confirmed,
        )
        page = times.ljust(_HINT_AT, b"\0")
        if (hint := self.hint) is not None:
            flags = _CLEAN if hint.is_clean else 0
            page += _hint.pack(
                _MAGIC,
                hint.file_size,
                hint.queue_file_entries,
                hint.durable,
                hint.entries,
                hint.flushed,
                hint.indexed,
                hint.index_last,
                flags,
            )
            page += _checksum.pack(zlib.crc32(page))
        return page.ljust(PAGE, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Checkpoint:
        page = page.ljust(PAGE, b"\0")
        physical, logical, index, master, confirmed = _times.unpack_from(page)
        return cls(
            physical_ms=physical,
            logical_ms=logical,
            index_ms=index,
            master_flushed=master,
            confirmed=confirmed,
            hint=_unpack_hint(page),
        )


def read_checkpoint(path: Path, files: DiskFiles) -> Checkpoint:
    """The checkpoint of a store; an empty one when there is no file."""
    if not files.exists(path):
        return Checkpoint()
    return Checkpoint.unpack(files.read_bytes(path)[:PAGE])


def write_checkpoint(path: Path, checkpoint: Checkpoint, files: DiskFiles) -> None:
    """Write it over the old one and return when it is on the disk."""
    is_new = not files.exists(path)
    fd = files.open(path, create=True)
    try:
        write_all(files, fd, checkpoint.pack(), 0)
        files.sync(fd)
    finally:
        files.close(fd)
    if is_new:
        files.sync_folder(path.parent)


def _unpack_hint(page: bytes) -> Hint | None:
    fields = _hint.unpack_from(page, _HINT_AT)
    magic, file_size, queue_entries, durable, entries, flushed, indexed, last, flags = fields
    checked = _HINT_AT + _hint.size
    if magic != _MAGIC or _checksum.unpack_from(page, checked)[0] != zlib.crc32(page[:checked]):
        return None
    if not 0 <= durable <= flushed:
        return None
    return Hint(
        file_size=file_size,
        queue_file_entries=queue_entries,
        durable=durable,
        entries=entries,
        flushed=flushed,
        indexed=indexed,
        index_last=last,
        is_clean=bool(flags & _CLEAN),
    )
