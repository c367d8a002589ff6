"""Feeding the key index from the log.

The index may lag: it is fed in the background, and before every look-up up to the end, so that a
look-up finds all that a reader could read. The log is walked in chunks of whole records, which the
index takes apart by columns; an append pays nothing for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orbitmq.message.record import RecordFault
from orbitmq.store.scanning import find_record, scan

if TYPE_CHECKING:
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.keyindex import IndexFlush, KeyIndex

log = logging.getLogger(__name__)

_CHUNK = 4 << 20


class Indexing:
    """The index and how far it has come."""

    def __init__(self, index: KeyIndex, commit_log: CommitLog, position: int) -> None:
        self.index = index
        self.position = max(position, commit_log.start)  #: all below is in the index
        self.durable_position = self.position  #: and on the disk
        self.durable_last = index.resume_offset
        self._log = commit_log
        self._flush: IndexFlush | None = None
        self._flush_at = (self.position, self.durable_last)
        self._flush_failed = False
        self._is_failed = False

    @property
    def durable_ms(self) -> int:
        return self.index.durable_until_ms

    def advance(self, upto: int, budget: int) -> bool:
        """Index the log up to `upto`, at most `budget` bytes of it; True when it is done."""
        self.position = max(self.position, self._log.start)
        stop = min(upto, self.position + budget)
        while self.position < stop and not self._is_failed:
            if not self._advance_chunk(upto, min(_CHUNK, stop - self.position)):
                break
        return self.position >= upto

    def _advance_chunk(self, upto: int, chunk: int) -> bool:
        file = self._log.file_of(self.position)
        if file is None:
            return False
        at = self.position - file.base
        end = min(file.size, upto - file.base)
        found = scan(file.view[at : min(at + chunk, end)], self.position, check_crc=False)
        if not len(found) and found.fault is RecordFault.CUT_SHORT:
            found = scan(file.view[at:end], self.position, check_crc=False)
        if len(found):
            try:
                self.index.append_log(found.view, found.starts, self.position)
            except OSError:
                # The index can be made again from the log; the log is what must go on.
                log.exception("the key index cannot be written; look-ups find older messages only")
                self._is_failed = True
                return False
            self.position += found.end
        elif found.fault is RecordFault.END_OF_FILE:
            self.position = file.end
        else:
            behind = find_record(file.view, file.base, at + 1, end)
            self.position = file.base + (behind if behind is not None else end)
        return True

    # ---- flushing, in the three steps of a round

    def begin_flush(self) -> None:
        self._flush_at = (self.position, self.index.resume_offset)
        self._flush = self.index.begin_flush()

    def run_flush(self) -> None:
        """Worker: bring the index to the disk. If that fails, a crash makes it anew."""
        if self._flush is not None:
            self._flush_failed = False
            try:
                self._flush.run()
            except OSError:
                self._flush_failed = True
                log.exception("the key index was not flushed")

    def end_flush(self) -> None:
        if self._flush is not None:
            flush, self._flush = self._flush, None
            self.index.end_flush(flush)
            if not self._flush_failed:
                self.durable_position, self.durable_last = self._flush_at

    def abandon(self) -> None:
        """Close the files as they are."""
        self.index.abandon()
