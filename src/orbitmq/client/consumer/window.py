"""The unfinished messages of one queue, and the state of an owned queue.

The invariant: `commit_offset` is never above the offset of an unfinished message. It is the
smallest of those, or, without any, the offset up to which everything was fetched or filtered out.
Messages may finish in any order; a crash repeats messages and skips none.

Concurrent consumption calls `finish` in any order. Orderly consumption takes messages from the
front and commits them or puts them back; taken messages are unfinished.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.routes import Queue


class Window:
    """The unfinished messages of one queue in memory. Belongs to the event loop."""

    __slots__ = ("_end", "_last", "_size", "_taken", "_waiting")

    def __init__(self) -> None:
        # Fetched and not taken. In concurrent consumption these are all unfinished messages. Pulls
        # ascend, so the mapping is normally ordered by itself.
        self._waiting: OrderedDict[int, ReceivedMessage] = OrderedDict()
        # Taken by orderly consumption and not committed.
        self._taken: OrderedDict[int, ReceivedMessage] = OrderedDict()
        self._size = 0
        # The highest fetched offset.
        self._last = -1
        # Everything below was fetched or filtered out; None before the first pull.
        self._end: int | None = None

    def __len__(self) -> int:
        """How many messages are unfinished."""
        return len(self._waiting) + len(self._taken)

    def __contains__(self, offset: object) -> bool:
        """Whether the message at this offset is unfinished."""
        return offset in self._waiting or offset in self._taken

    @property
    def size(self) -> int:
        """Stored bytes of the unfinished messages."""
        return self._size

    @property
    def span(self) -> int:
        """The distance of the last fetched message from the first unfinished one, or 0.

        Everything in between is consumed again after a crash, finished or not. (Java clients count
        unfinished messages only, so one stuck message does not stop their queue.)
        """
        bounds = self.bounds
        return 0 if bounds is None else self._last - bounds[0]

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The smallest and the largest unfinished offset."""
        waiting, taken = _bounds(self._waiting), _bounds(self._taken)
        if waiting is None or taken is None:
            return waiting or taken
        return min(waiting[0], taken[0]), max(waiting[1], taken[1])

    @property
    def taken_bounds(self) -> tuple[int, int] | None:
        """The smallest and the largest taken offset."""
        return _bounds(self._taken)

    @property
    def taken_count(self) -> int:
        """The number of taken messages."""
        return len(self._taken)

    @property
    def unfinished(self) -> list[ReceivedMessage]:
        """The unfinished messages in order, taken or not."""
        messages = [*self._taken.values(), *self._waiting.values()]
        return sorted(messages, key=_offset_of) if self._taken else messages

    @property
    def commit_offset(self) -> int | None:
        """Where another consumer would begin; None before the first pull."""
        if not self._taken:
            return next(iter(self._waiting), self._end)
        bounds = self.bounds
        return None if bounds is None else bounds[0]

    # ---- filled by pulls

    def add(
        self, messages: Sequence[ReceivedMessage], next_offset: int | None = None
    ) -> list[ReceivedMessage]:
        """Add the messages of a pull; returns those that are new.

        What lies below `next_offset` and is not among the messages was filtered out.
        """
        waiting, taken = self._waiting, self._taken
        last = next(reversed(waiting), -1)
        is_ascending = True
        added = 0
        new = []
        for message in messages:
            stored = message.stored
            offset = stored.queue_offset
            if offset > last:
                last = offset
            elif offset in waiting:
                continue
            else:
                is_ascending = False
            if offset in taken:
                continue
            waiting[offset] = message
            added += stored.size
            new.append(message)
        self._size += added
        if last > self._last:
            self._last = last
        if not is_ascending:
            self._waiting = OrderedDict(sorted(waiting.items()))
        end = max(last + 1, next_offset or 0)
        if self._end is None or end > self._end:
            self._end = end
        return new

    def withdraw(self, messages: Sequence[ReceivedMessage]) -> None:
        """Undo an `add` whose messages could not be consumed; they are fetched again."""
        self.finish([message.queue_offset for message in messages])
        if messages and self._end is not None:
            self._end = min(self._end, messages[0].queue_offset)

    def skip_to(self, next_offset: int) -> None:
        """No further message below `next_offset` matches."""
        if self._end is None or next_offset > self._end:
            self._end = next_offset

    # ---- emptied by concurrent consumption

    def finish(self, offsets: Iterable[int]) -> None:
        """Remove messages that were consumed, sent back or given up."""
        waiting = self._waiting
        freed = 0
        for offset in offsets:
            message = waiting.pop(offset, None)
            if message is not None:
                freed += message.stored.size
        self._size -= freed

    # ---- emptied by orderly consumption

    def take(self, limit: int) -> list[ReceivedMessage]:
        """The next messages in order, at most `limit`; they count as unfinished until `commit`."""
        waiting, taken = self._waiting, self._taken
        last = next(reversed(taken), -1)
        messages: list[ReceivedMessage] = []
        while waiting and len(messages) < limit:
            offset, message = waiting.popitem(last=False)
            taken[offset] = message
            messages.append(message)
        if messages and messages[0].queue_offset < last:
            # Put back, or fetched again, behind a message that is taken.
            self._taken = OrderedDict(sorted(taken.items()))
        return messages

    def commit(self) -> int | None:
        """Finish all taken messages; returns the new `commit_offset`."""
        self._size -= sum(message.size for message in self._taken.values())
        self._taken.clear()
        return self.commit_offset

    def rollback(self, messages: Sequence[ReceivedMessage] | None = None) -> None:
        """Put taken messages back, all or these, to be taken again.

        The given objects replace those in the window: they may have another count of attempts.
        """
        taken, waiting = self._taken, self._waiting
        wanted = list(taken.values()) if messages is None else messages
        returned = [each for each in wanted if taken.pop(each.queue_offset, None) is not None]
        is_in_front = True
        for message in sorted(returned, key=_offset_of, reverse=True):
            offset = message.queue_offset
            is_in_front = is_in_front and offset < next(iter(waiting), offset + 1)
            waiting[offset] = message
            waiting.move_to_end(offset, last=False)
        if not is_in_front:
            self._waiting = OrderedDict(sorted(waiting.items()))


def _bounds(messages: OrderedDict[int, ReceivedMessage]) -> tuple[int, int] | None:
    if not messages:
        return None
    return next(iter(messages)), next(reversed(messages))


def _offset_of(message: ReceivedMessage) -> int:
    return message.queue_offset


# ---- owned queues


class HeldLock(Protocol):
    """The lock of an ordered queue."""

    def is_held(self, now: float) -> bool:
        """Whether the lock holds at `now`, by the clock's `monotonic`."""


class Ownership:
    """Identifies one ownership of a queue: the same object for all deliveries in it.

    Compared by identity. State that is kept for the length of the ownership refers to it weakly.
    """

    __slots__ = ("__weakref__",)


class OwnedQueue:
    """One ownership of a queue: acquired, pulled and consumed, draining, dropped.

    A queue that is acquired again is a new object, so that late results of the old one cannot be
    taken for its own. Belongs to the event loop; compared by identity.
    """

    __slots__ = (
        "is_draining",
        "is_dropped",
        "is_paused",
        "is_reset",
        "last_consumed",
        "last_pull",
        "lock",
        "max_offset",
        "min_offset",
        "next_offset",
        "ownership",
        "queue",
        "running",
        "window",
    )

    def __init__(
        self, queue: Queue, next_offset: int, *, now: float, lock: HeldLock | None = None
    ) -> None:
        """`next_offset` is the start; `now` is by the clock's `monotonic`."""
        self.queue = queue
        #: Identifies this ownership to middleware.
        self.ownership = Ownership()
        self.window = Window()
        #: The offset of the next pull.
        self.next_offset = next_offset
        #: The bounds of the queue by the last pull; the end is the offset of the next message.
        self.min_offset: int | None = None
        self.max_offset: int | None = None
        #: Lost or released: pulls end and results are ignored. Set by `drop`.
        self.is_dropped = False
        #: Being released: no pull and no handler call begins.
        self.is_draining = False
        #: Paused by the application.
        self.is_paused = False
        #: An administrator has set its offset: its own position is not committed any more.
        self.is_reset = False
        #: When a pull was last sent or delayed; a long time without either is a fault.
        self.last_pull = now
        #: When a handler last finished.
        self.last_consumed = now
        #: Orderly consumption only.
        self.lock = lock
        #: Messages whose handler calls wait or run; in order, the run under way.
        self.running = 0

    def __repr__(self) -> str:
        state = "dropped" if self.is_dropped else "draining" if self.is_draining else "owned"
        return (
            f"<OwnedQueue {self.queue} {state} next={self.next_offset} cached={len(self.window)}>"
        )

    def drop(self) -> None:
        """End this ownership."""
        self.is_dropped = True
        self.is_draining = True
