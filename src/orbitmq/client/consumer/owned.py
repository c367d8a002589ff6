"""A queue that this consumer owns: what pulling, consuming and rebalancing know about it together.

Its life: gained (made by the rebalancer with the offset to begin at) -> pulled and consumed ->
draining (nothing new is begun; what runs may finish) -> dropped (results no longer count). It never
comes back: a queue that is gained again is a new object, so that late results of the old one cannot
be mistaken for results of the new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.landmarks import Landmark
from orbitmq.client.consumer.window import Window
from orbitmq.client.names import is_retry_topic

if TYPE_CHECKING:
    from orbitmq.client.queue import Queue
    from orbitmq.message.stored import StoredMessage


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
        "_last_fetched",
        "is_draining",
        "is_dropped",
        "is_paused",
        "is_reset",
        "last_consumed",
        "last_pull",
        "lock",
        "max_offset",
        "min_offset",
        "newest",
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
        #: The last message that a pull brought, for as long as it takes to hand it to its handler.
        self.newest: StoredMessage | None = None
        self._last_fetched: Landmark | None = None
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

    @property
    def last_fetched(self) -> Landmark | None:
        """What the last message that a pull brought is known by."""
        self.keep_landmark()
        return self._last_fetched

    @last_fetched.setter
    def last_fetched(self, landmark: Landmark | None) -> None:
        self.newest, self._last_fetched = None, landmark

    def keep_landmark(self) -> None:
        """Let go of the newest message, and keep what it is known by."""
        newest, self.newest = self.newest, None
        if newest is not None:
            self._last_fetched = Landmark.of(newest)

    @property
    def landmark(self) -> Landmark | None:
        """A message by which its position can be judged: the first unfinished, or the last one."""
        first = self.window.first
        return self.last_fetched if first is None else Landmark.of(first.stored)

    def drop(self) -> None:
        """It is no longer ours."""
        self.is_dropped = True
        self.is_draining = True
