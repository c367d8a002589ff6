"""Finds messages by key: the folder of index files.

The index is made from the log and may lag behind it. Whoever owns both feeds the log to it in
chunks of whole records, in order, beginning at `resume_offset`; feeding a part twice does no harm.
After a crash the index keeps only what is known to be on the disk, and `resume_offset` says from
where the log has to be fed again:

  - a file of ours is kept if it is sound: it says itself whether its last flush is whole;
  - a file of Apache's is kept if it is sound and ends no later than the checkpoint's index time;
  - whatever comes after a file that is not kept goes as well, so that no gap remains.

`durable_until_ms` is the time to put into the checkpoint. It is the latest end of all flushed
files rather than that of the last one: were the clock set back between two files, the last one's
would condemn the one before it.

An entry holds a hash, not a key: what is found are candidates, and the caller compares their keys.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from orbitmq.clock import SystemClock
from orbitmq.store.files import DiskFiles
from orbitmq.store.indexfile import FileFlush, IndexFile, IndexSettings, UnusableIndexFile
from orbitmq.store.indexrepair import repair_index_file
from orbitmq.store.keyhash import index_hash
from orbitmq.store.recordkeys import KeyEntries, entries_of_fields, entries_of_log

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike

    from orbitmq.clock import Clock

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

    @property
    def file_count(self) -> int:
        return len(self._index_files)

    def append_log(self, chunk: memoryview, starts: ArrayLike, base: int) -> int:
        """Index the records that begin at `starts` in a chunk of the log; the entries added.

        `base` is the offset of the chunk in the log, `starts` are relative to the chunk.
        """
        return self._add(entries_of_log(chunk, starts, base))

    def append(
        self,
        offsets: ArrayLike,
        store_ms: ArrayLike,
        topics: Sequence[str],
        unique_keys: Sequence[str | None],
        keys: Sequence[str | None],
    ) -> int:
        """Index records given by their fields, in the order of the log; the entries added.

        `keys` are as in the property: several are separated by spaces.
        """
        return self._add(entries_of_fields(offsets, store_ms, topics, unique_keys, keys))

    def lookup(
        self,
        topic: str,
        key: str,
        max_results: int = 64,
        begin_ms: int = 0,
        end_ms: int = _ALWAYS[1],
    ) -> list[int]:
        """Offsets of messages that probably have this key or unique key, newest first.

        Times in the index are in whole seconds, rounded down: ask from a second earlier.
        """
        found = (
            offset for offset in self.candidates(topic, key, begin_ms, end_ms) if offset is not None
        )
        return list(islice(found, max(max_results, 0)))

    def candidates(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """The same one by one, each once, with a None before every read of a file.

        The index may change between two of them: what is appended later is not among them.
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

    def flush(self) -> int:
        """Bring everything to the disk; the new `durable_until_ms`."""
        flush = self.begin_flush()
        try:
            flush.run()
        finally:
            self.end_flush(flush)
        return self.durable_until_ms

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

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without flushing, as a crash would."""
        for file in self._index_files:
            file.close()
        self._index_files = []

    def _add(self, entries: KeyEntries) -> int:
        entries = self._without_known(entries)
        added = 0
        while added < len(entries):
            added += self._writable_file().append(entries.between(added, len(entries)))
        return added

    def _without_known(self, entries: KeyEntries) -> KeyEntries:
        """Leave out what is in the index already; a crash may have cut the last record's keys."""
        if not self._index_files or not len(entries):
            return entries
        last = self.resume_offset
        if entries.offsets[0] > last:
            return entries
        entries = entries.only(entries.offsets >= last)
        wanted = np.ones(len(entries), np.bool_)
        for at in np.flatnonzero(entries.offsets == last).tolist():
            found = self._find(int(entries.hashes[at]), *_ALWAYS)
            wanted[at] = next((each for each in found if each is not None), None) != last
        return entries.only(wanted)

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
        takes long. Only an owner who never flushes pays here.
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


class IndexFlush:
    """One flush of all files that need it. `run` touches nothing that the index uses."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[tuple[IndexFile, FileFlush]]) -> None:
        self.parts = parts

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
