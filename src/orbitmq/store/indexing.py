"""Feeding the key index from the log.

The index may lag: it is fed in steps of the owner, larger ones when it is far behind, and before
every look-up, so that a look-up finds all that a reader could read. What a look-up catches up with
is bounded, because the owner can do nothing else meanwhile. More than that is behind only after the
index was lost, or under a load that the steps cannot keep up with; then the newest messages are not
found for a while, as with Apache's broker, whose index is fed in the background too.

The log is walked in chunks of whole records, which the index takes apart by columns; an append pays
nothing for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orbitmq.message.record import RecordFault, check_record
from orbitmq.store.scanning import find_record, scan_log

if TYPE_CHECKING:
    from orbitmq.clock import Clock
    from orbitmq.message.scan import ScanResult
    from orbitmq.store.commitlog import CommitLog, LogFile
    from orbitmq.store.keyindex import IndexFlush, KeyIndex

log = logging.getLogger(__name__)

_CHUNK = 4 << 20
#: Seconds until a disk that refused the index is asked again.
_PAUSE = 5.0


class Indexing:
    """The index and how far it has come."""

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
                # The log is what must go on, and has everything: the disk may have room later.
                log.exception("the key index cannot be written; look-ups find older messages only")
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
        self._flush_failed = True  # until it has got through: others of the round come first
        self._flush = self.index.begin_flush()

    def run_flush(self) -> None:
        """Worker: bring the index to the disk. If that fails, a crash makes it anew."""
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
