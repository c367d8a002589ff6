"""What was fetched ahead and what was returned, per queue.

Three positions of a queue, each at most the next:

* *settled*: everything before it was returned by a poll that another poll has followed. The
  application had its time with it, and asked for more.
* *returned*: what polls have returned so far.
* the next offset to pull; between it and *returned* lies what is cached.

Automatic commits store *settled*, so that what an application was given and had not asked beyond
comes again after a crash. They begin before the first pull, with where the queue is begun: without
progress, the next life would begin elsewhere. `commit()` stores *returned*: there, the application
says so itself, and before its first one there is no progress but what the group had.

Stretches without a message for us count as returned when nothing of the queue is cached.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from orbitmq.client.consumer.flowcontrol import FlowReason
from orbitmq.client.pullconsumer.chunks import Chunk, chunk_of

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.pullanswers import Pulled
    from orbitmq.client.consumer.subscription import Subscription
    from orbitmq.client.pullconsumer.settings import PollSettings


class CachedQueue:
    """The positions of one assigned queue, and what of it is cached."""

    __slots__ = (
        "chunks",
        "count",
        "given",
        "is_ready",
        "owned",
        "returned",
        "settled",
        "size",
        "spell",
    )

    def __init__(self, owned: OwnedQueue) -> None:
        self.owned = owned
        self.chunks: deque[Chunk] = deque()
        self.count = 0
        self.size = 0
        #: Whether it waits for its turn to be polled.
        self.is_ready = False
        #: Behind the last message that was returned since it was begun, or sought.
        self.given: int | None = None
        self.returned = self.settled = owned.next_offset
        #: How often it was sought.
        self.spell = 0


class Cache:
    """The receiver of a consumer that is polled. Belongs to the event loop."""

    def __init__(self, settings: PollSettings, has_room: Callable[[OwnedQueue], None]) -> None:
        """`has_room` is called with a queue of which less is cached now."""
        self._settings = settings
        self._has_room = has_room
        self._queues: dict[OwnedQueue, CachedQueue] = {}
        self._ready: deque[CachedQueue] = deque()
        self._size = 0
        self._unsettled: set[CachedQueue] = set()
        #: Set when something has come that can be polled.
        self.arrived = asyncio.Event()
        #: Set when polls or commits have moved positions.
        self.settled = asyncio.Event()

    # ---- filled by pulls

    def queues_changed(self, count: int) -> None:
        """Of no interest: limits do not depend on it."""

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        queue = self.of(owned)
        settings = self._settings
        if queue.count >= settings.max_cached_messages:
            return FlowReason.MESSAGES
        if queue.size >= settings.max_cached_bytes:
            return FlowReason.BYTES
        # A queue of which nothing is here is always pulled: it may be what is waited for.
        if queue.count and self._size >= settings.max_cached_bytes_in_all:
            return FlowReason.BYTES
        return None

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        queue = self.of(owned)
        chunk = chunk_of(owned, pulled, subscription, queue.spell)
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
            # An administrator sent the group elsewhere: what is cached is no longer wanted.
            self.clear(owned)
        if not queue.chunks:
            self.place(owned, pulled.next_offset)

    # ---- emptied by polls

    def take(self, count: int, size: int | None = None) -> list[Chunk]:
        """Chunks of so many messages and bytes together, of one queue after the other."""
        taken: list[Chunk] = []
        while count > 0 and (size is None or size > 0) and self._ready:
            queue = self._ready.popleft()
            queue.is_ready = False
            if not self._can_be_polled(queue):
                continue
            head, rest = queue.chunks.popleft().split(count, size)
            if size is not None and taken and head.size > size:
                # One message that does not fit any more: next time.
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
        """Whether so many can be polled, or no more will come before some are."""
        found = 0
        for queue in self._ready:
            if self._can_be_polled(queue):
                found += queue.count
                if found >= messages or self.held_back(queue.owned) is not None:
                    return True
        return False

    def give_back(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that were taken and not returned: they come again, in their place.

        Those of a queue that is being given up come again elsewhere: here, only the positions go
        back, so that nobody takes them for done.
        """
        for chunk in reversed(list(chunks)):
            queue = self._queues.get(chunk.owned)
            if queue is None or chunk.owned.is_dropped or chunk.spell != queue.spell:
                continue  # lost, or sought elsewhere, meanwhile
            queue.returned = chunk.first_offset
            queue.settled = min(queue.settled, queue.returned)
            queue.given = chunk.given_before
            if chunk.owned.is_draining:
                self.settled.set()  # there is less to wait for
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
        """The queues that are ours; positions of others must never become progress."""
        for owned in [owned for owned in self._queues if owned.is_dropped]:
            self.forget(owned)
        return tuple(self._queues.values())

    def settle(self) -> None:
        """A poll follows the ones before: what they returned is settled."""
        if self._unsettled:
            for queue in self._unsettled:
                queue.settled = queue.returned
            self._unsettled.clear()
            self.settled.set()

    def place(self, owned: OwnedQueue, offset: int) -> None:
        """Both positions of a queue are here now, and nothing of it is cached."""
        self.clear(owned)
        queue = self.of(owned)
        queue.given = None
        queue.returned = queue.settled = offset
        queue.spell += 1
        self._unsettled.discard(queue)

    def rewind(self, owned: OwnedQueue) -> int:
        """Forget what is cached of a queue; returns where it goes on, behind what was returned.

        What was taken and is given back later comes before that, as it was.
        """
        self.clear(owned)
        return self.of(owned).returned

    def clear(self, owned: OwnedQueue) -> None:
        """Forget what is cached of a queue."""
        queue = self._queues.get(owned)
        if queue is not None:
            self._size -= queue.size
            queue.chunks.clear()
            queue.count = queue.size = 0

    def forget(self, owned: OwnedQueue) -> None:
        """A queue is no longer ours."""
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
