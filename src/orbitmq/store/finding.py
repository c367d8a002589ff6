"""Finding single messages: by place in the log, by offset id, by key, by unique id."""

from __future__ import annotations

import struct
from itertools import islice, repeat
from typing import TYPE_CHECKING, Final

from orbitmq.message.ids import decode_offset_id
from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.message.stored import decode_message
from orbitmq.store.errors import DamagedRecord, NoSuchRecord
from orbitmq.store.scanning import store_time, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.indexing import Indexing

_read_head = struct.Struct(">ii12xqq").unpack_from
_ALWAYS: Final = (1 << 63) - 1
#: The index knows whole seconds only.
_INDEX_STEP_MS = 1000
#: Bytes of a message that are checked in the time of a round.
_ROUND_BYTES = 128 * 1024


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
        """The record that begins at an offset of the log, if readers may see it."""
        if physical_offset >= self._visible_end():
            raise NoSuchRecord(physical_offset, self._log.start, self._log.end)
        return self.written_at(physical_offset)

    def written_at(self, physical_offset: int) -> memoryview:
        """The same, also if it waits for the disk and nobody may see it yet."""
        head = self._log.view(physical_offset, MIN_RECORD_SIZE) if physical_offset >= 0 else None
        if head is not None:
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
        found = (
            record for record in self.looking_up(topic, key, begin_ms, end_ms) if record is not None
        )
        return list(islice(found, max(max_results, 0)))

    def looking_up(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _ALWAYS
    ) -> Iterator[memoryview | None]:
        """The same one by one, in rounds that take a fraction of a millisecond each.

        A key may be on millions of messages that were stored at another time, and different keys
        may share a hash. So what may take long is divided: a None says that a round was in vain.
        """
        if self._indexing is None:
            return iter(())
        self._indexing.advance(self._visible_end(), self._catch_up)
        return self._looking_up(self._indexing, topic, key, begin_ms, end_ms)

    def _looking_up(
        self, indexing: Indexing, topic: str, key: str, begin_ms: int, end_ms: int
    ) -> Iterator[memoryview | None]:
        earliest = max(begin_ms - _INDEX_STEP_MS, 0)
        for offset in indexing.index.candidates(topic, key, earliest, end_ms):
            if offset is None:
                yield None
                continue
            try:
                record = self.message_at(offset)
            except (NoSuchRecord, DamagedRecord):
                yield None
                continue
            is_meant = begin_ms <= store_time(record) <= end_ms and _has_key(record, topic, key)
            yield record if is_meant else None
            # Checking a long one took as long as many rounds.
            yield from repeat(None, len(record) // _ROUND_BYTES)


def _has_key(record: memoryview, topic: str, key: str) -> bool:
    message = decode_message(record)
    return message.topic == topic and (
        message.unique_id == key or key in (message.keys or "").split(" ")
    )
