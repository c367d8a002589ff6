"""The messages that were fetched ahead, and the positions of each queue.

A queue has three positions, each at most the next. *settled*: a poll has returned everything
before it, and another poll has followed. *returned*: what polls have returned. The next offset to
pull: between it and *returned* lies what is cached.

Automatic commits store *settled*, so that messages of the last poll are delivered again after a
crash. They begin before the first pull, with the offset at which the queue is begun. `commit()`
stores *returned*. Offsets without a message for this consumer count as returned when nothing of the
queue is cached.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orbitmq.client.consumer.settings import FlowReason
from orbitmq.client.message import ReceivedMessage
from orbitmq.errors import MissingExtra
from orbitmq.message.record import BATCH_MASK, MIN_RECORD_SIZE, RecordInvalid
from orbitmq.message.stored import decode_messages, without_inner_batches

if TYPE_CHECKING:
    from orbitmq.client.consumer.pull import Pulled
    from orbitmq.client.consumer.subscriptions import Subscription
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.pullconsumer.consumer import PollSettings
    from orbitmq.wire.frame import Bytes


class CachedQueue:
    """The positions and the cached messages of one assigned queue."""

    __slots__ = (
        "chunks",
        "count",
        "generation",
        "given",
        "is_ready",
        "owned",
        "returned",
        "settled",
        "size",
    )

    def __init__(self, owned: OwnedQueue) -> None:
        self.owned = owned
        self.chunks: deque[Chunk] = deque()
        self.count = 0
        self.size = 0
        #: Whether it is in the round of queues to poll.
        self.is_ready = False
        #: The offset after the last message that was returned since it was started or sought.
        self.given: int | None = None
        self.returned = self.settled = owned.next_offset
        #: The number of seeks.
        self.generation = 0


class Cache:
    """The receiver of pulled messages. Belongs to the event loop."""

    def __init__(self, settings: PollSettings, has_room: Callable[[OwnedQueue], None]) -> None:
        """`has_room` is called with a queue after messages of it were taken."""
        self._settings = settings
        self._has_room = has_room
        self._queues: dict[OwnedQueue, CachedQueue] = {}
        self._ready: deque[CachedQueue] = deque()
        self._size = 0
        self._unsettled: set[CachedQueue] = set()
        #: Set when messages that can be polled have arrived.
        self.arrived = asyncio.Event()
        #: Set when polls or commits have moved positions.
        self.settled = asyncio.Event()

    # ---- filled by pulls

    def queues_changed(self, count: int) -> None:
        """Limits do not depend on the number of queues."""

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        queue = self.of(owned)
        settings = self._settings
        if queue.count >= settings.max_cached_messages:
            return FlowReason.MESSAGES
        if queue.size >= settings.max_cached_bytes:
            return FlowReason.BYTES
        # A queue without cached messages is always pulled: a poll may wait for it.
        if queue.count and self._size >= settings.max_cached_bytes_in_all:
            return FlowReason.BYTES
        return None

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        queue = self.of(owned)
        chunk = chunk_of(owned, pulled, subscription, queue.generation)
        if not chunk.count:
            self.passed(owned, pulled.next_offset)
            return 0
        self._put(queue, chunk)
        return chunk.count

    def passed(self, owned: OwnedQueue, next_offset: int) -> None:
        queue = self.of(owned)
        if not queue.chunks and next_offset > queue.returned:
            if queue.settled == queue.returned:
                queue.settled = next_offset
            queue.returned = next_offset

    def moved(self, owned: OwnedQueue, pulled: Pulled) -> None:
        queue = self.of(owned)
        if pulled.is_reset:
            # An administrator has reset the group: the cached messages are stale.
            self.clear(owned)
        if not queue.chunks:
            self.place(owned, pulled.next_offset)

    # ---- emptied by polls

    def take(self, count: int, size: int | None = None) -> list[Chunk]:
        """Chunks within these limits in all, from one queue after the other."""
        taken: list[Chunk] = []
        while count > 0 and (size is None or size > 0) and self._ready:
            queue = self._ready.popleft()
            queue.is_ready = False
            if not self._can_be_polled(queue):
                continue
            head, rest = queue.chunks.popleft().split(count, size)
            if size is not None and taken and head.size > size:
                # One message that does not fit: the next call takes it.
                self._put_back(queue, head, rest)
                break
            if rest is not None:
                queue.chunks.appendleft(rest)
            self._shrink(queue, head)
            head.given_before = queue.given
            self._return_to(queue, head.next_offset)
            taken.append(head)
            count -= head.count
            size = None if size is None else size - head.size
            self._make_ready(queue)
        return taken

    def has(self, messages: int) -> bool:
        """Whether this many can be polled, or a full queue prevents more from arriving."""
        found = 0
        for queue in self._ready:
            if self._can_be_polled(queue):
                found += queue.count
                if found >= messages or self.held_back(queue.owned) is not None:
                    return True
        return False

    def give_back(self, chunks: Iterable[Chunk]) -> None:
        """Put chunks that were taken and not returned back in their place.

        Of a queue that is being released only the positions go back, so that the messages do not
        count as done; its next owner gets them.
        """
        for chunk in reversed(list(chunks)):
            queue = self._queues.get(chunk.owned)
            if queue is None or chunk.owned.is_dropped or chunk.generation != queue.generation:
                continue  # lost, or sought elsewhere, meanwhile
            queue.returned = chunk.first_offset
            queue.settled = min(queue.settled, queue.returned)
            queue.given = chunk.given_before
            if chunk.owned.is_draining:
                self.settled.set()  # the drain has less to wait for
                continue
            queue.chunks.appendleft(chunk)
            queue.count += chunk.count
            queue.size += chunk.size
            self._size += chunk.size
            self._make_ready(queue)

    # ---- positions

    def of(self, owned: OwnedQueue) -> CachedQueue:
        queue = self._queues.get(owned)
        if queue is None:
            queue = self._queues[owned] = CachedQueue(owned)
        return queue

    @property
    def queues(self) -> tuple[CachedQueue, ...]:
        """The owned queues; positions of others must never become progress."""
        for owned in [owned for owned in self._queues if owned.is_dropped]:
            self.forget(owned)
        return tuple(self._queues.values())

    def settle(self) -> None:
        """Settle what earlier polls returned."""
        if self._unsettled:
            for queue in self._unsettled:
                queue.settled = queue.returned
            self._unsettled.clear()
            self.settled.set()

    def place(self, owned: OwnedQueue, offset: int) -> None:
        """Set both positions of a queue and discard its cached messages."""
        self.clear(owned)
        queue = self.of(owned)
        queue.given = None
        queue.returned = queue.settled = offset
        queue.generation += 1
        self._unsettled.discard(queue)

    def rewind(self, owned: OwnedQueue) -> int:
        """Discard the cached messages of a queue; returns the offset after the returned ones."""
        self.clear(owned)
        return self.of(owned).returned

    def clear(self, owned: OwnedQueue) -> None:
        """Discard the cached messages of a queue."""
        queue = self._queues.get(owned)
        if queue is not None:
            self._size -= queue.size
            queue.chunks.clear()
            queue.count = queue.size = 0

    def forget(self, owned: OwnedQueue) -> None:
        """Remove a queue that is no longer owned."""
        self.clear(owned)
        queue = self._queues.pop(owned, None)
        if queue is not None:
            self._unsettled.discard(queue)

    def resumed(self, owned: OwnedQueue) -> None:
        """A queue that was paused may be polled again."""
        self._make_ready(self.of(owned))

    # ---- inside

    def _put(self, queue: CachedQueue, chunk: Chunk) -> None:
        queue.chunks.append(chunk)
        queue.count += chunk.count
        queue.size += chunk.size
        self._size += chunk.size
        self._make_ready(queue)
        self.arrived.set()

    def _put_back(self, queue: CachedQueue, head: Chunk, rest: Chunk | None) -> None:
        if rest is not None:
            queue.chunks.appendleft(rest)
        queue.chunks.appendleft(head)
        self._ready.appendleft(queue)
        queue.is_ready = True

    def _make_ready(self, queue: CachedQueue) -> None:
        if self._can_be_polled(queue) and not queue.is_ready:
            queue.is_ready = True
            self._ready.append(queue)
            self.arrived.set()

    def _can_be_polled(self, queue: CachedQueue) -> bool:
        owned = queue.owned
        return bool(queue.chunks) and not (owned.is_paused or owned.is_draining)

    def _shrink(self, queue: CachedQueue, chunk: Chunk) -> None:
        queue.count -= chunk.count
        queue.size -= chunk.size
        self._size -= chunk.size
        self._has_room(queue.owned)

    def _return_to(self, queue: CachedQueue, offset: int) -> None:
        queue.returned = queue.given = offset
        self._unsettled.add(queue)


# ---- chunks
#
# A chunk is the answer of a pull or a part of it: whole records as in the broker's log. It is cut
# between records without decoding. It is decoded to objects or columns when it is returned, so
# that columns do not cost an object per message.


#: The size and the system flag of a record.
_read_head = struct.Struct(">i32xi").unpack_from
_read_offset = struct.Struct(">q").unpack_from
_OFFSET_AT = 20


@dataclass(slots=True, eq=False)
class Chunk:
    """Consecutive records of one queue, and the offset after them."""

    owned: OwnedQueue
    subscription: Subscription
    #: The answer of the pull, which its parts share.
    answer: bytes
    #: Where each record begins in it, and where the last one ends.
    bounds: Sequence[int]
    #: The offset after the last record and after what the filter omitted behind it.
    next_offset: int
    #: The number of seeks when it was pulled: chunks from before a seek are stale.
    generation: int = 0
    #: The offset after the last message that was returned before; None if there was none.
    given_before: int | None = None

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self.bounds) - 1

    @property
    def first_offset(self) -> int:
        """The offset of the first record."""
        return self._offset_at(self.bounds[0])

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return self.bounds[-1] - self.bounds[0]

    @property
    def body(self) -> Bytes:
        """Its records."""
        if self.size == len(self.answer):
            return self.answer
        return memoryview(self.answer)[self.bounds[0] : self.bounds[-1]]

    def split(self, count: int, size: int | None = None) -> tuple[Chunk, Chunk | None]:
        """The first `count` messages, in at most `size` bytes but never none; and the rest."""
        bounds = self.bounds
        if size is not None:
            count = min(count, max(1, bisect_right(bounds, bounds[0] + size) - 1))
        if count >= self.count:
            return self, None
        rest = self._part(bounds[count:], self.next_offset, self.given_before)
        return self._part(bounds[: count + 1], rest.first_offset, self.given_before), rest

    def since(self, offset: int) -> Chunk:
        """The rest from one of its messages on."""
        begin = bisect_left(self.bounds, offset, hi=self.count, key=self._offset_at)
        before = self._offset_at(self.bounds[begin - 1]) + 1 if begin else self.given_before
        return self._part(self.bounds[begin:], self.next_offset, before)

    def _offset_at(self, at: int) -> int:
        return int(_read_offset(self.answer, at + _OFFSET_AT)[0])

    def _part(self, bounds: Sequence[int], next_offset: int, given_before: int | None) -> Chunk:
        return replace(self, bounds=bounds, next_offset=next_offset, given_before=given_before)

    def messages(
        self, group: str | None = None, namespace: str | None = None
    ) -> Sequence[ReceivedMessage]:
        """The messages that match the subscription. Raises `RecordInvalid`."""
        queue, bounds = self.owned.queue, self.bounds
        return self.subscription.accepted(
            [
                ReceivedMessage(stored, queue, group, None, namespace)
                for stored in decode_messages(self.answer, bounds[0], bounds[-1])
            ]
        )


def chunk_of(
    owned: OwnedQueue, pulled: Pulled, subscription: Subscription, generation: int = 0
) -> Chunk:
    """The messages of a pull. Raises `MessageError` when they are not whole records."""
    answer = bytes(pulled.body)
    bounds, has_batches = _bounds(answer)
    if has_batches:
        singles = without_inner_batches(decode_messages(answer), pulled.offset)
        answer = b"".join(each.encode() for each in singles)
        bounds, _ = _bounds(answer)
    return Chunk(owned, subscription, answer, bounds, pulled.next_offset, generation)


def _bounds(answer: bytes) -> tuple[Sequence[int], bool]:
    """Where records begin and end, and whether some of them hold several messages."""
    at, end, has_batches = 0, len(answer), False
    bounds = [0]
    while at < end:
        if end - at < MIN_RECORD_SIZE:
            raise RecordInvalid(at, f"{end - at} bytes are left, a record has {MIN_RECORD_SIZE}")
        size, flag = _read_head(answer, at)
        if not MIN_RECORD_SIZE <= size <= end - at:
            raise RecordInvalid(at, f"its size is {size}, {end - at} bytes are left")
        if flag & BATCH_MASK == BATCH_MASK:
            has_batches = True
        at += size
        bounds.append(at)
    return bounds, has_batches


# ---- chunks as one record batch


_TAGS = "tags"


def chunks_to_arrow(
    chunks: Sequence[Chunk], columns: Sequence[str] | None = None, *, null_bad_bodies: bool = False
) -> Any:
    """A `pyarrow.RecordBatch` of all messages; no object is made per message.

    Raises `MessageError` for a damaged body, unless those are to be null, and `MissingExtra`.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra

        from orbitmq.message.arrow import messages_to_arrow  # noqa: PLC0415  # needs the extra
    except ModuleNotFoundError as missing:
        raise MissingExtra("poll_arrow", "pyarrow and numpy", "arrow") from missing
    batches = [
        _batch(messages_to_arrow, broker, some, columns, null_bad_bodies)
        for (broker, _), some in _alike(chunks).items()
    ]
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return messages_to_arrow(b"", broker_name="", columns=columns)
    # `concat_batches` does not exist in the oldest supported pyarrow.
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or [batches[0]]
    return joined


def _alike(chunks: Sequence[Chunk]) -> dict[tuple[str, frozenset[str]], list[Chunk]]:
    """Chunks that are decoded together: of one broker, with the same tags."""
    groups: dict[tuple[str, frozenset[str]], list[Chunk]] = {}
    for chunk in chunks:
        key = (chunk.owned.queue.broker, chunk.subscription.tags.tags)
        groups.setdefault(key, []).append(chunk)
    return groups


def _batch(
    messages_to_arrow: Any,
    broker: str,
    chunks: Sequence[Chunk],
    columns: Sequence[str] | None,
    null_bad_bodies: bool,
) -> Any:
    from orbitmq.message.arrow import BadBody  # noqa: PLC0415  # as above

    tags = chunks[0].subscription.tags
    wanted = columns
    if not tags.matches_all and columns is not None and _TAGS not in columns:
        wanted = [*columns, _TAGS]
    batch = messages_to_arrow(
        [chunk.body for chunk in chunks],
        broker_name=broker,
        columns=wanted,
        bad_body=BadBody.NULL if null_bad_bodies else BadBody.RAISE,
    )
    if tags.matches_all:
        return batch
    batch = _with_tags(batch, tags.tags)
    return batch if wanted is columns else batch.select(list(columns or ()))


def _with_tags(batch: Any, tags: frozenset[str]) -> Any:
    """The rows with one of these tags: brokers compare hashes, which may collide."""
    import pyarrow as pa  # noqa: PLC0415  # as above
    import pyarrow.compute as pc  # noqa: PLC0415

    matching = pc.is_in(batch.column(_TAGS), value_set=pa.array(sorted(tags), pa.string()))
    return batch if pc.all(matching).as_py() in (True, None) else batch.filter(matching)
