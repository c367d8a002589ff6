"""Messages that are sent in the background: their number is bounded and their order kept.

A message is sent immediately if its broker is connected. Any other one waits as a task: first until
the queues of its topic are known, then until its broker is connected, each time behind those that
were submitted before it for the same. So what is not ready holds up no other topic or broker. A
message waits no longer than its own timeout; one that may go to another broker waits half of that,
and is then sent elsewhere. One that may not keeps its place until it has an outcome.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.client.producer.send import SendResult, outcome_at_stop
from orbitmq.errors import NotRunning, TooManyInFlight
from orbitmq.remoting.connection import call_on_loop

if TYPE_CHECKING:
    from orbitmq.client.loopthread import LoopThread
    from orbitmq.client.producer.core import ProducerCore
    from orbitmq.client.producer.send import Done, Sending

Submitted: TypeAlias = concurrent.futures.Future[SendResult]
#: What tells the outcome to a thread or to a coroutine.
Sent: TypeAlias = Submitted | asyncio.Future[SendResult]
#: What messages wait for together: the queues of a topic (None), or the topic's broker.
Key: TypeAlias = tuple[str, str | None]


class Submissions:
    """What was submitted to one producer. Each message gets exactly one outcome."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core
        self._monotonic = core.engine.clock.monotonic
        self.in_flight = InFlight(core.settings.max_in_flight, core.settings.max_in_flight_bytes)
        self._lines: dict[Key, Line] = {}

    async def submit(self, sending: Sending) -> asyncio.Future[SendResult]:
        """Have a message sent; returns when there is room for it. Raises `TooManyInFlight`."""
        sent: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        if not self.in_flight.try_enter(sent, sending):
            await self.in_flight.enter(sent, sending)
        self.begin(sent, sending)
        return sent

    def begin(self, sent: Sent, sending: Sending) -> None:
        """Send a message that is in flight now, or when its turn has come. On the loop."""
        done = partial(self.finish, sent)
        topic = sending.draft.topic
        try:
            publisher = self._core.publisher
            may_begin = not self._lines
            if not may_begin and (topic, None) not in self._lines:
                broker = publisher.next_broker(sending)
                may_begin = broker is not None and (topic, broker) not in self._lines
            if may_begin and publisher.begin_at_once(sending, done):
                return
            broker = None if (topic, None) in self._lines else publisher.next_broker(sending)
            place: list[Line] = []
            task = self._core.engine.spawn(self._wait(sending, place, done), "submit")
        except BaseException as error:
            done(error)
            if not isinstance(error, Exception):
                raise
            return
        place.append(self._enter(topic, broker))

        def ended(task: asyncio.Task[None]) -> None:
            self._leave(place.pop())
            # Here and not in the coroutine, which may be cancelled before its first step.
            if task.cancelled():
                done(outcome_at_stop(sending))

        task.add_done_callback(ended)

    def finish(
        self,
        sent: Sent,
        outcome: SendResult | BaseException,
    ) -> None:
        """Tell the outcome of a message, if it has none yet."""
        sending = self.in_flight.leave(sent)
        if sending is None:
            return
        self._core.note_outcome(sending.topic, outcome)
        if sent.done():  # cancelled by the application
            return
        if isinstance(outcome, SendResult):
            sent.set_result(outcome)
        else:
            sent.set_exception(outcome)
            sent.exception()  # it was logged, and need not be retrieved

    async def _wait(self, sending: Sending, place: list[Line], done: Done) -> None:
        publisher = self._core.publisher
        topic, (line,) = sending.draft.topic, place
        others = publisher.has_others(topic)
        if line.broker is None:
            if not await line.turn(sending.deadline - self._monotonic()):
                done(publisher.expired(sending, None))
                return
            try:
                queue, others = await publisher.find(sending)
            except Exception as error:  # noqa: BLE001  # also a selector's
                done(error)
                return
            finally:
                line.lock.release()
            # In one step: others of the topic come to the broker's line after this one.
            self._leave(place.pop())
            line = self._enter(topic, queue.broker)
            place.append(line)
        broker = line.broker
        assert broker is not None  # noqa: S101  # just found
        others = others and not sending.is_bound
        left = sending.deadline - self._monotonic()
        if await line.turn(left / 2 if others else left):
            try:
                if others and publisher.avoids(broker):
                    publisher.pass_by(sending, broker)
                elif sending.first is not None:
                    await publisher.connect(sending, sending.first, others)
                if publisher.begin_at_once(sending, done):
                    return
                if not others:
                    # Those behind it would overtake it if it left the line now.
                    await publisher.finish(sending, done)
                    return
            finally:
                line.lock.release()
        elif others:
            publisher.pass_by(sending, broker)
        else:
            done(publisher.expired(sending, sending.queue or sending.first))
            return
        await publisher.finish(sending, done)

    def _enter(self, topic: str, broker: str | None) -> Line:
        line = self._lines.get((topic, broker))
        if line is None:
            line = self._lines[topic, broker] = Line(topic, broker)
        line.members += 1
        return line

    def _leave(self, line: Line) -> None:
        line.members -= 1
        if not line.members:
            del self._lines[line.topic, line.broker]


class Line:
    """Messages that wait for the same thing, in the order in which they came."""

    __slots__ = ("broker", "lock", "members", "topic")

    def __init__(self, topic: str, broker: str | None) -> None:
        self.topic = topic
        self.broker = broker
        self.members = 0
        #: Held by the first one. Those that wait for it get it in their order.
        self.lock = asyncio.Lock()

    async def turn(self, timeout: float) -> bool:  # noqa: ASYNC109  # the result says it
        """Become the first, which holds the lock; False when the time is up before that."""
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                return await self.lock.acquire()
        except TimeoutError:
            return False


class ThreadSubmissions(Submissions):
    """What threads have submitted: they post messages to the event loop."""

    def __init__(self, core: ProducerCore, thread: LoopThread) -> None:
        super().__init__(core)
        self._thread = thread
        #: Those in flight that the loop has not begun.
        self._posted: deque[Submitted] = deque()
        self._wake_is_due = False

    @property
    def latest_deadline(self) -> float:
        """When the time of everything that was submitted so far is up."""
        found = list(self.in_flight.messages.values())
        return max((sending.deadline for sending in found), default=0.0)

    def post(self, sending: Sending) -> Submitted:
        """Have a message sent; blocks until there is room for it. Raises `TooManyInFlight`."""
        sent: Submitted = concurrent.futures.Future()
        sent.set_running_or_notify_cancel()
        try:
            has_room = self.in_flight.try_enter(sent, sending)
        finally:
            # A thread that is interrupted leaves nothing in flight that is not sent.
            if sent in self.in_flight.messages:
                self._posted.append(sent)
                self.wake()
        if not has_room:
            if self._thread.is_current:  # a callback: if it waited, the loop would make no room
                raise self.in_flight.full(0.0)
            self._thread.run(self._begin_with_room(sent, sending))
        return sent

    async def _begin_with_room(self, sent: Submitted, sending: Sending) -> None:
        await self.in_flight.enter(sent, sending)
        self.begin(sent, sending)

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
        for sent, sending in list(self.in_flight.messages.items()):
            self.finish(sent, outcome_at_stop(sending))

    def _begin_posted(self) -> None:
        # First this: a thread that finds it set has posted its message before.
        self._wake_is_due = False
        try:
            # All that waits here was posted since the last turn: the place to put it in batches.
            while self._posted:
                sent = self._posted.popleft()
                if (sending := self.in_flight.messages.get(sent)) is not None:
                    self.begin(sent, sending)
        finally:
            if self._posted:  # a callback or a selector wants the program to end
                asyncio.get_running_loop().call_soon(self._begin_posted)


class InFlight:
    """The messages that were submitted and not answered; one always fits, however large.

    Any thread may call `try_enter`; everything else belongs to the loop. So entering is counted
    under a lock, for a few instructions, and leaving by the loop alone, without it.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self.messages: dict[Sent, Sending] = {}
        self._entered_bytes = self._left_bytes = 0
        #: Held by the first one that waits for room; the others wait for this.
        self._turn = asyncio.Lock()
        self._has_changed = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self.messages)

    def full(self, timeout: float) -> TooManyInFlight:
        """The error when there was no room within the time."""
        size = self._entered_bytes - self._left_bytes
        return TooManyInFlight(self.count, size, timeout)

    def try_enter(self, sent: Sent, sending: Sending) -> bool:
        """Whether there is room for a message, which is in flight then."""
        return not self._turn.locked() and self._take(sent, sending)

    async def enter(self, sent: Sent, sending: Sending) -> None:
        """Returns when there is room for a message, within its time. Raises `TooManyInFlight`."""
        try:
            async with asyncio.timeout(sending.timeout), self._turn:
                while not self._take(sent, sending):
                    await self._change()
        except TimeoutError:
            raise self.full(sending.timeout) from None

    def leave(self, sent: Sent) -> Sending | None:
        """A message was answered, or never will be; None if it has left already."""
        sending = self.messages.pop(sent, None)
        if sending is not None:
            self._left_bytes += len(sending.draft.body)
            self._has_changed.set()
        return sending

    async def until_empty(self) -> None:
        """Returns when nothing is in flight."""
        while self.messages:
            await self._change()

    def _take(self, sent: Sent, sending: Sending) -> bool:
        size = len(sending.draft.body)
        with self._lock:
            count, entered_bytes = len(self.messages), self._entered_bytes + size
            if count and (
                count >= self._most or entered_bytes - self._left_bytes > self._most_bytes
            ):
                return False
            # An interrupt can come after a call only, and so not between these.
            self.messages[sent] = sending
            self._entered_bytes = entered_bytes
        return True

    async def _change(self) -> None:
        self._has_changed.clear()
        await self._has_changed.wait()
