"""Long polling: pulls that found nothing wait here until something arrives or their time is up.

A held pull is an entry in two structures, not a task: in the table of its queue, and in one heap of
deadlines with one timer. Thousands of them cost memory and nothing else.

**Nothing is missed.** A pull is held only if its queue has nothing at or after its offset, and the
decision and the entry are made in one step of the loop. Every message that arrives afterwards is
announced to `arrived`, in order. So the pull's `offset` is always the first number that its
filter has not judged yet: a message that the filter refuses moves it on by one, one that passes
wakes the pull. The filter is the one that the store would apply, by the tag code of the queue entry
and, where it asks for them, by the properties of the message. A pull that is held for its whole
time in a busy queue whose messages it does not want is therefore answered with an offset behind
all of them, and they are never looked at again. (Apache's broker keeps the offset and wakes such
pulls every five seconds to read the stretch again.)

**In the same turn.** `arrived` is called by the write that stored the messages. Woken pulls are
processed there and then, up to the turn's budget; the rest follows in later turns (`Pacing`).

**Once.** A pull leaves by exactly one of: woken, timed out, its connection closed, the broker
stops. Woken and timed-out pulls are processed again from the first check on, with holding disabled,
so what they are told is up to date.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Sequence

from orbitmq.broker.pacing import Pacing
from orbitmq.broker.peers import peer_of
from orbitmq.filter.properties import Properties
from orbitmq.filter.subscription import MessageFilter
from orbitmq.remoting.connection import Connection
from orbitmq.store.arrivals import Arrival
from orbitmq.store.errors import StoreError
from orbitmq.store.scanning import properties_of
from orbitmq.store.store import Store
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: Below this many entries a heap is not worth cleaning.
_SMALL_HEAP = 256


class HeldPull:
    """A pull that waits."""

    __slots__ = (
        "connection",
        "deadline",
        "group",
        "is_held",
        "key",
        "offset",
        "request",
        "since",
        "wanted",
    )

    def __init__(
        self,
        connection: Connection,
        request: Command,
        topic: str,
        queue_id: int,
        group: str,
        offset: int,
        wanted: MessageFilter,
    ) -> None:
        self.connection = connection
        self.request = request
        self.key = (topic, queue_id)
        self.group = group
        #: The first message that the filter has not judged.
        self.offset = offset
        self.wanted = wanted
        self.since = 0.0
        self.deadline = 0.0
        self.is_held = False


class Holding:
    """All held pulls of a broker."""

    def __init__(
        self, store: Store, pacing: Pacing, loop: asyncio.AbstractEventLoop, limit: int
    ) -> None:
        #: How many may be held; what is held already stays.
        self.limit = limit
        #: Processes a pull again and answers it; set by the handler of pulls.
        self.again: Callable[[HeldPull], None] = _nobody
        self._store = store
        self._pacing = pacing
        self._loop = loop
        self._queues: dict[tuple[str, int], dict[HeldPull, None]] = {}
        self._deadlines: list[tuple[float, int, HeldPull]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def hold(self, pull: HeldPull, seconds: float) -> bool:
        """Keep a pull for so long; False when there are too many already."""
        if self._count >= self.limit:
            return False
        pull.since = self._loop.time()
        pull.deadline = pull.since + seconds
        pull.is_held = True
        self._count += 1
        queue = self._queues.get(pull.key)
        if queue is None:
            queue = self._queues[pull.key] = {}
        queue[pull] = None
        peer_of(pull.connection).held.add(pull)
        heapq.heappush(self._deadlines, (pull.deadline, next(self._order), pull))
        if self._timer is None or pull.deadline < self._timer.when():
            self._set_timer()
        elif len(self._deadlines) > _SMALL_HEAP + 2 * self._count:
            self._forget_gone()
        return True

    def age_of(self, pull: HeldPull) -> float:
        """How long ago a pull was held, in seconds."""
        return self._loop.time() - pull.since

    # What ends the waiting.

    def arrived(self, arrivals: Sequence[Arrival]) -> None:
        """Messages can be read now: wake those who wait for one of them."""
        if not self._queues:
            return
        try:
            self._wake(arrivals)
        except Exception:
            # The write that announces these messages has to answer its senders.
            log.exception("those who wait could not be woken")

    def _wake(self, arrivals: Sequence[Arrival]) -> None:
        queues = self._queues
        woken: list[HeldPull] = []
        for queue, number, code, at, _ in arrivals:
            waiting = queues.get((queue.topic, queue.queue_id))
            if waiting:
                self._judge(waiting, number, code, at, woken)
        for pull in woken:
            self._process(pull)
        # Not left to the end of the step: whoever waits has waited long enough.
        for connection in {pull.connection for pull in woken}:
            connection.flush()

    def _judge(
        self,
        waiting: dict[HeldPull, None],
        number: int,
        code: int,
        at: int,
        woken: list[HeldPull],
    ) -> None:
        properties: Properties | None = None
        for pull in tuple(waiting):
            if number < pull.offset:
                continue
            wanted = pull.wanted
            is_wanted = wanted.accepts_code(code)
            if is_wanted and wanted.needs_properties:
                if properties is None:
                    properties = self._properties_at(at)
                is_wanted = properties is None or wanted.accepts_properties(properties)
            # A gap would mean that something arrived unheard of: then the store is to judge.
            if is_wanted or number != pull.offset:
                self._remove(pull)
                woken.append(pull)
            else:
                pull.offset = number + 1

    def _properties_at(self, at: int) -> Properties | None:
        try:
            return properties_of(self._store.message_at(at))
        except StoreError:
            return None

    def wake(
        self,
        topic: str | None = None,
        queue_id: int | None = None,
        group: str | None = None,
    ) -> int:
        """Process again those who wait for a queue, a topic or anything, or only a group's.

        For what concerns them and is no message: a reset, a deleted topic, a permission. How many
        there were.
        """
        concerned = [
            pull
            for key, waiting in self._queues.items()
            if (topic is None or key[0] == topic) and (queue_id is None or key[1] == queue_id)
            for pull in waiting
            if group is None or pull.group == group
        ]
        for pull in concerned:
            self._remove(pull)
            self._process(pull)
        return len(concerned)

    def forget(self, connection: Connection) -> None:
        """A connection was closed: nobody is there to be answered."""
        for pull in tuple(peer_of(connection).held):
            self._remove(pull)

    def stop(self) -> None:
        """Answer everybody, and hold nobody any more."""
        self.limit = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiting in tuple(self._queues.values()):
            for pull in tuple(waiting):
                self._remove(pull)
                self._run(pull)
        self._deadlines.clear()

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or not deadlines[0][2].is_held):
            _, _, pull = heapq.heappop(deadlines)
            if pull.is_held:
                self._remove(pull)
                self._process(pull)
        if deadlines:
            self._set_timer()

    # The structures.

    def _process(self, pull: HeldPull) -> None:
        if self._pacing.must_wait(pull.connection):
            self._pacing.later(pull.connection, lambda: self._run(pull))
        else:
            self._run(pull)

    def _run(self, pull: HeldPull) -> None:
        try:
            self.again(pull)
        except Exception:
            log.exception("a held pull could not be answered")
            pull.connection.release(pull.request)

    def _remove(self, pull: HeldPull) -> None:
        pull.is_held = False
        self._count -= 1
        queue = self._queues[pull.key]
        del queue[pull]
        if not queue:
            del self._queues[pull.key]
        peer_of(pull.connection).held.discard(pull)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadlines[0][0], self._expire)

    def _forget_gone(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if entry[2].is_held]
        heapq.heapify(self._deadlines)


def _nobody(_: HeldPull) -> None:
    """Before there is a handler of pulls nothing is held."""
