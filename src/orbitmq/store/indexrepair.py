"""Keeping an index file whose flush was interrupted.

While a flush writes slots, the file says that it ends in the far future: its slots may be of the
flush before or of this one. Its entries are none of the flush's business, though, and slots can be
made from entries. How many entries are good our own checkpoint knows: those up to the last message
that an earlier flush had brought to the disk. All behind them are made again from the log.

Without this a crash under load, when flushes follow one another, would cost the whole index.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from orbitmq.store.files import write_all
from orbitmq.store.indexfile import (
    ENTRIES,
    ENTRY_SIZE,
    FAR_FUTURE,
    HEADER_SIZE,
    IndexHeader,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from orbitmq.store.files import DiskFiles
    from orbitmq.store.indexfile import IndexSettings

_CHUNK = 1 << 18  #: entries read at once


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
            rows = _read(fd, files, settings, next_entry, min(_CHUNK, count - next_entry + 1))
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
        whole = replace(
            header,
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
