"""The messages of one queue that were fetched and are not finished, in the order of the queue.

The invariant: `commit_offset` is never above the offset of an unfinished message. It is the
smallest of those, or, when there is none, the offset up to which everything was fetched or left out
by the filter. Messages may finish in any order; a crash then repeats what lies behind the smallest
unfinished one and skips nothing.

Two kinds of consumption use it. Concurrent consumption starts messages in any order and calls
`finish`. Orderly consumption takes messages from the front (`take`) and either commits all it has
taken or puts them back; a message that was taken is still unfinished.

A queue is fetched in ascending order, so new messages are appended to a mapping that is ordered
already, and its first key is the smallest. Should a broker go back (it lost the end of its log),
the older offsets are sorted in: that is slow, rare, and loses nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from orbitmq.names import is_retry_topic

if TYPE_CHECKING:
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.routes import Queue


class Window:
    """What one queue has in memory. Belongs to the event loop."""

    __slots__ = ("_end", "_last", "_size", "_taken", "_waiting")

    def __init__(self) -> None:
        # Fetched and not taken by orderly consumption; every unfinished one in the concurrent kind.
        self._waiting: OrderedDict[int, ReceivedMessage] = OrderedDict()
        # Taken by orderly consumption and not committed.
        self._taken: OrderedDict[int, ReceivedMessage] = OrderedDict()
        self._size = 0
        # The highest offset that was fetched.
        self._last = -1
        # Everything below was fetched or left out; None as long as nothing is known.
        self._end: int | None = None

    def __len__(self) -> int:
        """How many messages are unfinished."""
        return len(self._waiting) + len(self._taken)

    def __contains__(self, offset: object) -> bool:
        """Whether the message at this offset is unfinished."""
        return offset in self._waiting or offset in self._taken

    @property
    def size(self) -> int:
        """Bytes of the unfinished messages, as they are stored."""
        return self._size

    @property
    def span(self) -> int:
        """How far fetching is ahead of the first unfinished message; 0 when there is none.

        Up to the last message that was fetched, finished or not: everything in between is consumed
        again after a crash. (Java clients look at unfinished ones only, and so let a queue with one
        stuck message run ahead as long as the others finish in time.)
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
        """The smallest and the largest offset that orderly consumption has in hand."""
        return _bounds(self._taken)

    @property
    def taken_count(self) -> int:
        """How many messages orderly consumption has in hand."""
        return len(self._taken)

    @property
    def commit_offset(self) -> int | None:
        """Where another consumer would have to begin; None when nothing was ever fetched."""
        if not self._taken:
            return next(iter(self._waiting), self._end)
        bounds = self.bounds
        return None if bounds is None else bounds[0]

    # ---- filled by pulls

    def add(
        self, messages: Sequence[ReceivedMessage], next_offset: int | None = None
    ) -> list[ReceivedMessage]:
        """Take in what a pull brought; returns those that were not here already.

        `next_offset` is where the next pull begins: what lies below and is not among the messages
        was left out by the filter and needs no finishing.
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
        """Take back what `add` has just returned: nobody will consume it, it is fetched again."""
        self.finish([message.queue_offset for message in messages])
        if messages and self._end is not None:
            self._end = min(self._end, messages[0].queue_offset)

    def skip_to(self, next_offset: int) -> None:
        """Note that nothing below is for us, besides what is here already."""
        if self._end is None or next_offset > self._end:
            self._end = next_offset

    # ---- emptied by concurrent consumption

    def finish(self, offsets: Iterable[int]) -> None:
        """Forget messages that are done with: consumed, sent back, or given up."""
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
            # Put back, or fetched once more, behind something that is still taken.
            self._taken = OrderedDict(sorted(taken.items()))
        return messages

    def commit(self) -> int | None:
        """Finish everything taken; returns the new `commit_offset`."""
        self._size -= sum(message.size for message in self._taken.values())
        self._taken.clear()
        return self.commit_offset

    def rollback(self, messages: Sequence[ReceivedMessage] | None = None) -> None:
        """Put back what was taken, all of it or these messages, to be taken again.

        The objects given replace the ones put in: an attempt that failed may be counted in them.
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

    def clear(self) -> None:
        """Forget everything: the queue was lost, or is read from elsewhere now."""
        self._waiting.clear()
        self._taken.clear()
        self._size = 0
        self._last = -1
        self._end = None


def _bounds(messages: OrderedDict[int, ReceivedMessage]) -> tuple[int, int] | None:
    if not messages:
        return None
    return next(iter(messages)), next(reversed(messages))


def _offset_of(message: ReceivedMessage) -> int:
    return message.queue_offset


# A queue that this consumer owns: what pulling, consuming and rebalancing know about it together.
#
# Its life: gained (made by the rebalancer with the offset to begin at) -> pulled and consumed ->
# draining (nothing new is begun; what runs may finish) -> dropped (results no longer count). It
# never comes back: a queue that is gained again is a new object, so that late results of the old
# one cannot be mistaken for results of the new one.


class HeldLock(Protocol):
    """The lock of an orderly consumer on its queue."""

    def is_held(self, now: float) -> bool:
        """Whether it may be relied on at `now`, by the clock's `monotonic`."""


class Ownership:
    """Stands for one spell of owning a queue: the same for all deliveries in it, and for no others.

    Compared by identity. Who keeps something for the length of the spell holds it weakly.
    """

    __slots__ = ("__weakref__",)


class OwnedQueue:
    """One owned queue. Belongs to the event loop; compared by identity."""

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
        """`next_offset` is where to begin; `now` is by the clock's `monotonic`."""
        self.queue = queue
        #: What is told about this object to those who run around handlers.
        self.ownership = Ownership()
        self.window = Window()
        #: Where the next pull begins.
        self.next_offset = next_offset
        #: The bounds of the queue as the last pull told them; the end is the next message's offset.
        self.min_offset: int | None = None
        self.max_offset: int | None = None
        #: No longer ours: pulls end, results are ignored. Set by `drop`.
        self.is_dropped = False
        #: About to be given up: no pull and no handler call is begun.
        self.is_draining = False
        #: The application wants no messages of it for now.
        self.is_paused = False
        #: An administrator has moved its progress: nothing of its own is reported any more.
        self.is_reset = False
        #: When a pull was last begun or put off: not at all for long means that pulling is broken.
        self.last_pull = now
        #: When a handler last finished.
        self.last_consumed = now
        #: Orderly consumption only.
        self.lock = lock
        #: Handler calls in flight.
        self.running = 0

    def __repr__(self) -> str:
        state = "dropped" if self.is_dropped else "draining" if self.is_draining else "owned"
        return (
            f"<OwnedQueue {self.queue} {state} next={self.next_offset} cached={len(self.window)}>"
        )

    @property
    def is_retry(self) -> bool:
        """Whether it holds messages that failed before."""
        return is_retry_topic(self.queue.topic)

    @property
    def lag(self) -> int | None:
        """Messages in the queue that are not finished; None before the first answer to a pull."""
        if self.max_offset is None:
            return None
        done = self.window.commit_offset
        return max(0, self.max_offset - (self.next_offset if done is None else done))

    def drop(self) -> None:
        """It is no longer ours."""
        self.is_dropped = True
        self.is_draining = True
