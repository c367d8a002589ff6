"""Finding single messages: by place in the log, by offset id, by key, by unique id."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from orbitmq.message.ids import decode_offset_id
from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.message.stored import decode_message
from orbitmq.store.errors import DamagedRecord, NoSuchRecord
from orbitmq.store.scanning import store_time, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.indexing import Indexing

_read_head = struct.Struct(">ii12xqq").unpack_from
_ALWAYS: Final = (1 << 63) - 1
#: The index knows whole seconds only.
_INDEX_STEP_MS = 1000


class Finding:
    """Looks messages up. Whatever is returned has been checked."""

    def __init__(
        self,
        commit_log: CommitLog,
        indexing: Indexing | None,
        visible_end: Callable[[], int],
        catch_up: int,
    ) -> None:
        self._log = commit_log
        self._indexing = indexing
        self._visible_end = visible_end
        self._catch_up = catch_up

    def message_at(self, physical_offset: int) -> memoryview:
        """The record that begins at an offset of the log."""
        head = self._log.view(physical_offset, MIN_RECORD_SIZE) if physical_offset >= 0 else None
        if head is not None and physical_offset < self._visible_end():
            size, _, _, place = _read_head(head)
            if place == physical_offset:
                record = self._log.view(physical_offset, size)
                if record is None:
                    raise DamagedRecord(physical_offset, f"its size says {size}")
                verify(record, physical_offset)
                return record
        raise NoSuchRecord(physical_offset, self._log.start, self._log.end)

    def message_by_offset_id(self, offset_id: str) -> memoryview:
        """The record that an offset id names, whichever broker's address the id holds."""
        return self.message_at(decode_offset_id(offset_id).offset)

    def lookup(
        self,
        topic: str,
        key: str,
        max_results: int = 64,
        begin_ms: int = 0,
        end_ms: int = _ALWAYS,
    ) -> list[memoryview]:
        """Messages of a topic that have this key or this unique id, newest first.

        They are found up to where the index has come when it was given its chance to catch up.
        """
        if self._indexing is None:
            return []
        self._indexing.advance(self._visible_end(), self._catch_up)
        found: list[memoryview] = []
        wanted = max_results
        while True:
            candidates = self._indexing.index.lookup(
                topic, key, wanted, max(begin_ms - _INDEX_STEP_MS, 0), end_ms
            )
            found = [
                record
                for offset in candidates
                if (record := self._matching(offset, topic, key, begin_ms, end_ms)) is not None
            ]
            # Different keys may share a hash: ask for more as long as there may be more.
            if len(found) >= max_results or len(candidates) < wanted:
                return found[:max_results]
            wanted *= 4

    def _matching(
        self, offset: int, topic: str, key: str, begin_ms: int, end_ms: int
    ) -> memoryview | None:
        try:
            record = self.message_at(offset)
        except (NoSuchRecord, DamagedRecord):
            return None
        if not begin_ms <= store_time(record) <= end_ms:
            return None
        message = decode_message(record)
        if message.topic != topic:
            return None
        is_meant = message.unique_id == key or key in (message.keys or "").split(" ")
        return record if is_meant else None
