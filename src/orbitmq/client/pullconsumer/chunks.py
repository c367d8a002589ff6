"""Pulled bytes that nobody has asked for yet, and how they are given out.

A chunk is what one pull brought, or what is left of it: whole records, one after the other, as they
lie in the broker's log. It is cut between records without decoding them, and becomes objects or
columns only when it is returned, so that columns never cost an object per message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.client.consumer.innerbatches import without_inner_batches
from orbitmq.client.consumer.landmarks import Landmark
from orbitmq.client.received import ReceivedMessage
from orbitmq.message.errors import RecordInvalid
from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.message.stored import decode_messages
from orbitmq.message.sysflag import BATCH_MASK

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.pullanswers import Pulled
    from orbitmq.client.consumer.subscription import Subscription
    from orbitmq.wire.frame import Bytes

_read_size = struct.Struct(">i").unpack_from
#: The size and the system flag of a record.
_read_head = struct.Struct(">i32xi").unpack_from
_read_offset = struct.Struct(">q").unpack_from
_OFFSET_AT = 20


@dataclass(slots=True, eq=False)
class Chunk:
    """Records of one queue in their order, and where the queue goes on after them."""

    owned: OwnedQueue
    subscription: Subscription
    body: Bytes
    count: int
    #: Where the queue goes on: behind the last record, and what the filter left out after it.
    next_offset: int
    #: How often the queue had been sought when it was pulled: chunks of before are stale.
    spell: int = 0
    #: Behind the last message that was returned before these; None if there was none.
    given_before: int | None = None

    @property
    def first_offset(self) -> int:
        """The offset of the first record."""
        return int(_read_offset(self.body, _OFFSET_AT)[0])

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return len(self.body)

    def split(self, count: int, size: int | None = None) -> tuple[Chunk, Chunk | None]:
        """The first `count` messages, in at most `size` bytes but never none; and the rest."""
        if count >= self.count and (size is None or size >= len(self.body)):
            return self, None
        at = taken = 0
        while taken < min(count, self.count):
            (record,) = _read_size(self.body, at)
            if taken and size is not None and at + record > size:
                break
            at += record
            taken += 1
        if taken == self.count:
            return self, None
        view = memoryview(self.body)
        rest = self._part(view[at:], self.count - taken, self.next_offset, self.given_before)
        return self._part(view[:at], taken, rest.first_offset, self.given_before), rest

    def since(self, offset: int) -> Chunk:
        """What is left of it from a message on that it holds."""
        at = skipped = 0
        before = self.given_before
        while (found := _read_offset(self.body, at + _OFFSET_AT)[0]) < offset:
            at += _read_size(self.body, at)[0]
            skipped += 1
            before = found + 1
        left = self.count - skipped
        return self._part(memoryview(self.body)[at:], left, self.next_offset, before)

    def _part(
        self, body: memoryview, count: int, next_offset: int, given_before: int | None
    ) -> Chunk:
        return Chunk(
            self.owned, self.subscription, body, count, next_offset, self.spell, given_before
        )

    def messages(
        self, group: str | None = None, namespace: str | None = None
    ) -> Sequence[ReceivedMessage]:
        """As objects, those that match the subscription. Raises `RecordInvalid`."""
        queue = self.owned.queue
        return self.subscription.accepted(
            [
                ReceivedMessage(stored, queue, group, None, namespace)
                for stored in decode_messages(self.body)
            ]
        )


def chunk_of(
    owned: OwnedQueue, pulled: Pulled, subscription: Subscription, spell: int = 0
) -> Chunk:
    """What a pull brought, whose last message is noted in the queue.

    Raises `MessageError` when it is not whole records.
    """
    count, last, has_batches = _counted(pulled.body)
    if has_batches:
        singles = without_inner_batches(decode_messages(pulled.body), pulled.offset)
        if singles:
            owned.last_fetched = Landmark.of(singles[-1])
        body: Bytes = b"".join(each.encode() for each in singles)
        return Chunk(owned, subscription, body, len(singles), pulled.next_offset, spell)
    if count:
        owned.last_fetched = Landmark.in_records(pulled.body, last)
    return Chunk(owned, subscription, pulled.body, count, pulled.next_offset, spell)


def _counted(body: Bytes) -> tuple[int, int, bool]:
    """How many records there are, where the last begins, and whether some hold several messages."""
    at, end, count, last, has_batches = 0, len(body), 0, 0, False
    while at < end:
        if end - at < MIN_RECORD_SIZE:
            raise RecordInvalid(at, f"{end - at} bytes are left, a record has {MIN_RECORD_SIZE}")
        size, flag = _read_head(body, at)
        if not MIN_RECORD_SIZE <= size <= end - at:
            raise RecordInvalid(at, f"its size says {size}, {end - at} bytes are left")
        has_batches = has_batches or flag & BATCH_MASK == BATCH_MASK
        last = at
        at += size
        count += 1
    return count, last, has_batches
