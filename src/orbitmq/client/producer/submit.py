"""Messages that are sent in the background: their number is bounded and their order kept.

Threads post messages to the event loop, which sends each immediately if its broker is connected.
Any other message waits as a task: first until the queues of its topic are known, then until its
broker is connected, each time behind those that were posted before it for the same. So what is not
ready holds up no other topic or broker. A message waits no longer than its own timeout; one that
may go to another broker waits half of that, and is then sent elsewhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.client.producer.send import outcome_at_stop
from orbitmq.errors import NotRunning, TooManyInFlight
from orbitmq.remoting.outgoing import call_on_loop

if TYPE_CHECKING:
    from orbitmq.client.loopthread import LoopThread
    from orbitmq.client.producer.core import ProducerCore
    from orbitmq.client.producer.send import Done, Publisher, Sending, SendResult

Submitted: TypeAlias = concurrent.futures.Future["SendResult"]


class Submissions:
    """What threads have submitted to one producer. Each message gets exactly one outcome."""

    def __init__(self, core: ProducerCore, thread: LoopThread) -> None:
        self._core = core
        self._thread = thread
        self._monotonic = core.engine.clock.monotonic
        self.in_flight = InFlight(core.settings.max_in_flight, core.settings.max_in_flight_bytes)
        #: All without an outcome. The one that takes a message out tells its outcome: the loop, or
        #: any thread when the loop has ended.
        self._open: dict[Submitted, Sending] = {}
        #: Those of them that the loop has not begun.
        self._posted: deque[Submitted] = deque()
        self._wake_is_due = False
        self._lines = Lines()

    @property
    def latest_deadline(self) -> float:
        """When the time of everything that was submitted so far is up."""
        return max((sending.deadline for sending in list(self._open.values())), default=0.0)

    # ---- on any thread

    def post(self, sending: Sending) -> Submitted:
        """Have a message sent; blocks until there is room for it. Raises `TooManyInFlight`."""
        size = len(sending.draft.body)
        sent: Submitted = concurrent.futures.Future()
        sent.set_running_or_notify_cancel()
        if not self.in_flight.try_enter(size):
            if self._thread.is_current:  # a callback: if it waited, the loop would make no room
                raise TooManyInFlight(self.in_flight.count, self.in_flight.size, 0.0)
            self._thread.run(self.in_flight.enter(size, sending.timeout))
        try:
            self._open[sent] = sending
            self._posted.append(sent)
        finally:
            self.wake()
        return sent

    def wake(self) -> None:
        """Have the loop begin what was posted; if it has ended, tell all outcomes."""
        if self._wake_is_due:
            return
        self._wake_is_due = True
        try:
            self._thread.loop.call_soon_threadsafe(self._begin_posted)
        except BaseException as error:
            # Other threads may have left their messages to this one.
            self._wake_is_due = False
            if self._thread.is_running:
                call_on_loop(self._thread.loop, self._begin_posted)
                raise
            self.give_up()
            if not isinstance(error, RuntimeError | NotRunning):
                raise

    def give_up(self) -> None:
        """The loop has ended: tell the outcome of everything that is left."""
        # First this: a thread that finds it set has added its message before.
        self._wake_is_due = False
        # A list is made in one step; other threads may add meanwhile.
        for sent in list(self._open):
            sending = self._open.get(sent)
            if sending is not None:
                self._finish(sent, outcome_at_stop(sending))

    def _finish(self, sent: Submitted, outcome: SendResult | BaseException) -> None:
        sending = self._open.pop(sent, None)
        if sending is None:
            return
        self.in_flight.leave(len(sending.draft.body))
        if isinstance(outcome, BaseException):
            self._core.note_unsent(sending.topic, outcome)
            sent.set_exception(outcome)
        else:
            sent.set_result(outcome)

    # ---- on the loop

    def _begin_posted(self) -> None:
        # First this: a thread that finds it set has posted its message before.
        self._wake_is_due = False
        try:
            # All that waits here was posted since the last turn: the place to put it in batches.
            while self._posted:
                sent = self._posted.popleft()
                if (sending := self._open.get(sent)) is not None:
                    self._begin_or_wait(sending, partial(self._finish, sent))
        finally:
            if self._posted:  # a callback or a selector wants the program to end
                asyncio.get_running_loop().call_soon(self._begin_posted)

    def _begin_or_wait(self, sending: Sending, done: Done) -> None:
        try:
            publisher = self._core.publisher
            is_ready = publisher.is_ready(sending)
            if is_ready and not self._lines:
                publisher.begin(sending, done)
                return
            topic, queue = sending.draft.topic, sending.first
            has_queue = queue is not None and publisher.knows(topic)
            broker = queue.broker if queue is not None and has_queue else None
            if (topic, None) in self._lines:
                broker = None
            elif is_ready and (topic, broker) not in self._lines:
                publisher.begin(sending, done)
                return
            place = self._lines.enter((topic, broker))
        except BaseException as error:
            done(error)
            if not isinstance(error, Exception):
                raise
            return

        def ended(task: asyncio.Task[None]) -> None:
            place.leave()  # the task may have been cancelled before its first step
            if task.cancelled():
                done(outcome_at_stop(sending))

        waiting = self._wait(publisher, sending, place, done)
        self._core.engine.spawn(waiting, "submit").add_done_callback(ended)

    async def _wait(self, publisher: Publisher, sending: Sending, place: Place, done: Done) -> None:
        others = publisher.has_others(sending.draft.topic)
        try:
            if place.broker is None:
                if not await place.turn(sending.deadline - self._monotonic()):
                    done(publisher.expired(sending))
                    return
                found = await publisher.find(sending)
                if isinstance(found, Exception):
                    # Sending looks again and says what is wrong. Queues that are back by then
                    # are not used: others may wait for them since before they were forgotten.
                    if self._lines.has_broker_of(sending.draft.topic):
                        done(found)
                    else:
                        publisher.begin(sending, done)
                    return
                queue, others = found
                last, place = place, self._lines.enter((sending.draft.topic, queue.broker))
                last.leave()
            others = others and not sending.is_bound
            await self._wait_for_broker(publisher, sending, place, others)
            if sending.deadline <= self._monotonic() and not place.is_first:
                done(publisher.expired(sending))
            else:
                publisher.begin(sending, done)
        finally:
            place.leave()

    async def _wait_for_broker(
        self, publisher: Publisher, sending: Sending, place: Place, others: bool
    ) -> None:
        """Connect to the broker, or choose one of the `others` when that takes too long."""
        left = sending.deadline - self._monotonic()
        broker = place.broker
        assert broker is not None  # noqa: S101  # lines for queues have ended by now
        is_first = await place.turn(left / 2 if others else left)
        queue = sending.first
        if others and (not is_first or publisher.avoids(broker)):
            publisher.pass_by(sending, broker)
        elif is_first and queue is not None:
            await publisher.connect(sending, queue, others, leaves_half=True)


class Lines:
    """Tasks that wait for the same thing, in the order in which they came."""

    def __init__(self) -> None:
        #: The last one of each: of a topic, until its queues are known, or of a topic at a broker.
        self._last: dict[tuple[str, str | None], Place] = {}

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, key: tuple[str, str | None]) -> bool:
        return key in self._last

    def has_broker_of(self, topic: str) -> bool:
        """Whether messages of a topic wait for a broker."""
        return any(each == topic and broker is not None for each, broker in self._last)

    def enter(self, key: tuple[str, str | None]) -> Place:
        place = self._last[key] = Place(key[1], self._last.get(key))
        place.left.add_done_callback(lambda _: self._ended(key, place))
        return place

    def _ended(self, key: tuple[str, str | None], place: Place) -> None:
        if self._last.get(key) is place:
            del self._last[key]


class Place:
    """One task's place in a line."""

    __slots__ = ("_before", "broker", "left")

    def __init__(self, broker: str | None, before: Place | None) -> None:
        self.broker = broker
        self._before = None if before is None else before.left
        #: Done when this one and all before it have left.
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_first(self) -> bool:
        return self._before is None or self._before.done()

    async def turn(self, timeout: float) -> bool:  # noqa: ASYNC109  # the result says it
        """Wait until it is the first; False when the time is up before that."""
        if self._before is not None and not self._before.done():
            await asyncio.wait((self._before,), timeout=max(0.0, timeout))
        return self.is_first

    def leave(self) -> None:
        """Let the next one be the first, after those before. May be repeated."""
        if self._before is None or self._before.done():
            self._set_left(None)
        else:
            self._before.add_done_callback(self._set_left)

    def _set_left(self, _: object) -> None:
        if not self.left.done():
            self.left.set_result(None)


class InFlight:
    """Bounds the messages that were submitted and not answered; one always fits, however large.

    Any thread may call `try_enter`; everything else belongs to the loop. So entering is counted
    under a lock, for a few instructions, and leaving by the loop alone, without it.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entered = self._entered_bytes = 0
        self._left = self._left_bytes = 0
        #: Held by the first one that waits for room; the others wait for this.
        self._turn = asyncio.Lock()
        self._has_changed = asyncio.Event()

    @property
    def count(self) -> int:
        return self._entered - self._left

    @property
    def size(self) -> int:
        """The bytes in flight."""
        return self._entered_bytes - self._left_bytes

    def try_enter(self, size: int) -> bool:
        """Whether there is room for a message of `size` bytes, which is taken then."""
        return not self._turn.locked() and self._take(size)

    async def enter(self, size: int, timeout: float) -> None:  # noqa: ASYNC109  # see the error
        """Returns when there is room for a message of `size` bytes. Raises `TooManyInFlight`."""
        try:
            async with asyncio.timeout(timeout), self._turn:
                while not self._take(size):
                    await self._change()
        except TimeoutError:
            raise TooManyInFlight(self.count, self.size, timeout) from None

    def leave(self, size: int) -> None:
        """A message was answered, or never will be."""
        self._left += 1
        self._left_bytes += size
        self._has_changed.set()

    async def until_empty(self) -> None:
        """Returns when nothing is in flight."""
        while self.count:
            await self._change()

    def _take(self, size: int) -> bool:
        with self._lock:
            count, entered_bytes = self._entered - self._left, self._entered_bytes + size
            if count and (
                count >= self._most or entered_bytes - self._left_bytes > self._most_bytes
            ):
                return False
            self._entered += 1
            self._entered_bytes = entered_bytes
        return True

    async def _change(self) -> None:
        self._has_changed.clear()
        await self._has_changed.wait()
