"""Messages that are sent in the background: their number is bounded and their order kept.

A message goes to the `Accumulator` if its broker is connected. Otherwise it waits as a task: first
until the queues of its topic are known, then until its broker is connected. In each wait, messages
keep the order in which they were submitted, and no topic or broker waits for another one. A message
waits no longer than its own timeout. One that may go to another broker waits half of that and is
sent elsewhere. One that may not keeps its place until it has an outcome.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from orbitmq.client.producer.accumulator import Accumulator
from orbitmq.client.producer.send import SendResult, outcome_at_stop
from orbitmq.errors import NotRunning, TooManyInFlight
from orbitmq.remoting.connection import call_on_loop

if TYPE_CHECKING:
    from orbitmq.client.loopthread import LoopThread
    from orbitmq.client.producer.core import ProducerCore
    from orbitmq.client.producer.send import Sending

#: What messages wait for together: the queues of a topic (None), or the topic's broker.
Key: TypeAlias = tuple[str, str | None]


class Submissions:
    """What was submitted to one producer. Each message gets exactly one outcome."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core
        self._monotonic = core.engine.clock.monotonic
        self.in_flight = InFlight(core.settings.max_in_flight, core.settings.max_in_flight_bytes)
        self._lines: dict[Key, Line] = {}
        self._made: Accumulator | None = None
        self._awaited = Awaited(core)

    @property
    def _accumulator(self) -> Accumulator:
        """Raises `NotRunning`."""
        publisher = self._core.publisher
        if self._made is None:
            self._made = Accumulator(publisher, self._core.drafting, self._core.settings)
        return self._made

    def submit(self, sending: Sending) -> asyncio.Future[SendResult] | None:
        """Have a message sent, if there is room for it."""
        sent: asyncio.Future[Any] = asyncio.Future()
        sending.sender, sending.sent = self, sent
        if not self.in_flight.try_enter(sending):
            return None
        self.begin(sending)
        return sent

    async def enter(self, sending: Sending) -> asyncio.Future[SendResult]:
        """The same when there was no room: wait for it. Raises `TooManyInFlight`."""
        await self.in_flight.enter(sending)
        self.begin(sending)
        return cast("asyncio.Future[SendResult]", sending.sent)

    async def send(self, sending: Sending) -> SendResult:
        """Send a message among what else waits for its queue; without a limit, and not in order
        with what is submitted."""
        sent: asyncio.Future[Any] = asyncio.Future()
        sending.sender, sending.sent = self._awaited, sent
        if not self._lines and self._accumulator.take(sending):
            try:
                result: SendResult | None = await sent
            except asyncio.CancelledError:
                sending.timeout = 0.0  # if it still waits, it goes no more
                raise
            if result is not None:
                return result
        return await self._core.publisher.send(sending)

    def begin(self, sending: Sending) -> None:
        """Send a message that is in flight now, or when its turn has come. On the loop."""
        topic, made = sending.draft.topic, self._made
        try:
            if made is not None and not self._lines and made.take(sending):
                # Most are so. After the end nothing is known of any topic, and nothing is taken.
                return
            publisher, accumulator = self._core.publisher, self._accumulator
            may_begin = not self._lines
            if not may_begin and (topic, None) not in self._lines:
                broker = publisher.next_broker(sending)
                may_begin = broker is not None and (topic, broker) not in self._lines
            if may_begin and accumulator.take(sending):
                return
            broker = None if (topic, None) in self._lines else publisher.next_broker(sending)
            waiting = Waiting(sending)
            waiting.task = self._core.engine.spawn(self._wait(waiting), "submit")
        except BaseException as error:
            self.finish(sending, error)
            if not isinstance(error, Exception):
                raise
            return
        self._enter(topic, broker, waiting)

        def ended(task: asyncio.Task[None]) -> None:
            self._leave(waiting)
            if not waiting.was_taken:
                self._ended(task, sending)

        waiting.task.add_done_callback(ended)

    def finish(self, sending: Sending, outcome: SendResult | BaseException) -> None:
        """Tell the outcome of a message, if it has none yet."""
        if not self.in_flight.leave(sending):
            return
        sent = sending.sent
        if isinstance(outcome, SendResult):
            self._core.counts.sent += 1
        else:
            self._core.note_failure(sending.topic, outcome)
        if isinstance(sent, SendFuture):
            try:
                sent.settle(outcome)
            except (KeyboardInterrupt, SystemExit) as error:
                self._raise_later(error)
        elif sent is None or sent.done():  # cancelled by the application
            return
        elif isinstance(outcome, BaseException):
            sent.set_exception(outcome)
            sent.exception()  # it was logged, and need not be retrieved
        else:
            sent.set_result(outcome)

    def _raise_later(self, error: BaseException) -> None:
        """A callback wants the program to end: only after others of the batch have outcomes."""
        raise error

    def retry(self, sending: Sending) -> None:
        """Make further attempts in a task."""
        try:
            task = self._core.engine.spawn(self._core.publisher.finish(sending), "send again")
        except NotRunning as error:
            self.finish(sending, sending.result or error)
        else:
            task.add_done_callback(lambda task: self._ended(task, sending))

    def not_ready(self, sending: Sending) -> None:
        self.begin(sending)

    def _ended(self, task: asyncio.Task[None], sending: Sending) -> None:
        # Here and not in the coroutine, which may be cancelled before its first step.
        if task.cancelled():
            self.finish(sending, outcome_at_stop(sending))

    async def _wait(self, waiting: Waiting) -> None:
        publisher = self._core.publisher
        sending, line = waiting.sending, waiting.line
        assert line is not None  # noqa: S101  # it was entered before the first step
        topic = line.topic
        others = publisher.has_others(topic)
        if line.broker is None:
            if not await line.turn(sending.deadline - self._monotonic()):
                self.finish(sending, publisher.expired(sending, None))
                return
            try:
                queue, others = await publisher.find(sending)
            except Exception as error:  # noqa: BLE001  # also a selector's
                self.finish(sending, error)
                return
            finally:
                line.lock.release()
            # In one step: others of the topic come to the broker's line after this one.
            self._leave(waiting)
            line = self._enter(topic, queue.broker, waiting)
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
                if self._takes(sending):
                    self._leave(waiting)
                    self._take_followers(line)
                    return
                if not others:
                    # Those behind it would overtake it if it left the line now.
                    await publisher.finish(sending)
                    return
            finally:
                self._leave(waiting)
                line.lock.release()
        elif others:
            publisher.pass_by(sending, broker)
        else:
            self.finish(sending, publisher.expired(sending, sending.queue or sending.first))
            return
        self._leave(waiting)
        await publisher.finish(sending)

    def _takes(self, sending: Sending) -> bool:
        """Whether its turn has come; also if it has its outcome, as a selector has raised."""
        try:
            return self._accumulator.take(sending)
        except Exception as error:  # noqa: BLE001  # the caller's to see
            self.finish(sending, error)
            return True

    def _take_followers(self, line: Line) -> None:
        """Send what waited behind a message that was sent, up to one that still has to wait.

        Otherwise each would wait for a turn of its own, and later messages behind it.
        """
        topic = line.topic
        with self._accumulator.burst():
            for key in ((topic, line.broker), (topic, None)):
                behind = self._lines.get(key)
                for waiting in () if behind is None else tuple(behind.members):
                    if behind is not line and self._is_behind_others(waiting.sending):
                        return
                    if not self._takes(waiting.sending):
                        return
                    waiting.was_taken = True
                    self._leave(waiting)
                    waiting.task.cancel()

    def _is_behind_others(self, sending: Sending) -> bool:
        """Whether messages to the broker that it goes to wait in the line of that."""
        topic = sending.draft.topic
        with suppress(Exception):  # a selector's, which raises again
            return (topic, self._core.publisher.next_broker(sending)) in self._lines
        return False

    def _enter(self, topic: str, broker: str | None, waiting: Waiting) -> Line:
        line = self._lines.get((topic, broker))
        if line is None:
            line = self._lines[topic, broker] = Line(topic, broker)
        line.members[waiting] = None
        waiting.line = line
        return line

    def _leave(self, waiting: Waiting) -> None:
        line, waiting.line = waiting.line, None
        if line is not None:
            del line.members[waiting]
            if not line.members:
                del self._lines[line.topic, line.broker]


class Awaited:
    """Gives messages back to the coroutines that wait for them."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core

    def finish(self, sending: Sending, outcome: SendResult | BaseException) -> None:
        sent, counts = sending.sent, self._core.counts
        if sent is None or sent.done():  # given up by its coroutine
            return
        if isinstance(outcome, BaseException):
            counts.failed += 1
            sent.set_exception(outcome)
        else:
            counts.sent += 1
            sent.set_result(outcome)

    def retry(self, sending: Sending) -> None:
        """Have the coroutine go on by itself."""
        sent = sending.sent
        if isinstance(sent, asyncio.Future) and not sent.done():
            sent.set_result(None)

    not_ready = retry


class Waiting:
    """A message that cannot be sent yet, and the task that finds out when it can."""

    __slots__ = ("line", "sending", "task", "was_taken")

    def __init__(self, sending: Sending) -> None:
        self.sending = sending
        self.task: asyncio.Task[None]
        #: Where it waits; None: nowhere any more.
        self.line: Line | None = None
        #: Whether it was sent with another one, and its task has nothing left to do.
        self.was_taken = False


class Line:
    """Messages that wait for the same thing, in the order in which they came."""

    __slots__ = ("broker", "lock", "members", "topic")

    def __init__(self, topic: str, broker: str | None) -> None:
        self.topic = topic
        self.broker = broker
        self.members: dict[Waiting, None] = {}
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
        self._posted: deque[Sending] = deque()
        self._wake_is_due = False

    @property
    def latest_deadline(self) -> float:
        """When the time of everything that was submitted so far is up."""
        found = list(self.in_flight.messages)
        return max((sending.deadline for sending in found), default=0.0)

    def post(self, sending: Sending) -> concurrent.futures.Future[SendResult]:
        """Have a message sent; blocks until there is room for it. Raises `TooManyInFlight`."""
        sent = SendFuture()
        sending.sender, sending.sent = self, sent
        try:
            has_room = self.in_flight.try_enter(sending)
        finally:
            # A thread that is interrupted leaves nothing in flight that is not sent.
            if sending in self.in_flight.messages:
                self._posted.append(sending)
                self.wake()
        if not has_room:
            if self._thread.is_current:  # a callback: if it waited, the loop would make no room
                raise self.in_flight.full(0.0)
            self._thread.run(self._begin_with_room(sending))
        return sent

    async def _begin_with_room(self, sending: Sending) -> None:
        await self.in_flight.enter(sending)
        self.begin(sending)

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
        for sending in list(self.in_flight.messages):
            self.finish(sending, outcome_at_stop(sending))

    def _begin_posted(self) -> None:
        # First this: a thread that finds it set has posted its message before.
        self._wake_is_due = False
        try:
            with self._gathered():
                while self._posted:
                    sending = self._posted.popleft()
                    if sending in self.in_flight.messages:
                        self.begin(sending)
        finally:
            if self._posted:  # a callback or a selector wants the program to end
                asyncio.get_running_loop().call_soon(self._begin_posted)

    def _raise_later(self, error: BaseException) -> None:
        if not self._thread.is_current:
            raise error
        asyncio.get_running_loop().call_soon(_raise, error)

    def _gathered(self) -> AbstractContextManager[None]:
        """What is begun meanwhile was posted since the last turn, and goes together."""
        try:
            return self._accumulator.burst()
        except NotRunning:  # each message meets it again
            return nullcontext()


def _raise(error: BaseException) -> None:
    raise error


#: States of `concurrent.futures.Future`.
_RUNNING: Final = "RUNNING"
_FINISHED: Final = "FINISHED"


class SendFuture(concurrent.futures.Future[SendResult]):
    """The outcome of a submitted message, of which many thousands are made in a second.

    The condition is most of the cost of such a future, and few futures need one: most have their
    outcome before a thread asks for it. The first thread that asks earlier creates it. No lock is
    needed: this thread claims the future before it reads the state, and the event loop stores the
    outcome before it reads the claim.
    """

    _state: str = _RUNNING
    _result: SendResult | None = None
    _exception: BaseException | None = None

    def __init__(self) -> None:
        # What the base class sets is set in the class, or when it is looked for.
        pass

    def __getattr__(self, name: str) -> Any:
        if name not in ("_condition", "_waiters", "_done_callbacks"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        values = self.__dict__
        values.setdefault("_waiters", [])
        values.setdefault("_done_callbacks", [])
        # First the claim: a thread that finds the condition has claimed, even if interrupted.
        values.setdefault("_claim", _RUNNING)
        values.setdefault("_condition", threading.Condition())
        return values[name]

    def settle(self, outcome: SendResult | BaseException) -> None:
        """Give it its outcome, once."""
        if isinstance(outcome, BaseException):
            self._exception = outcome
        else:
            self._result = outcome
        self._state = _FINISHED
        if self.__dict__.setdefault("_claim", _FINISHED) is _FINISHED:
            return
        with self._condition:
            for waiter in self._waiters:
                if self._exception is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            self._condition.notify_all()
        self._invoke_callbacks()

    def done(self) -> bool:
        return self._state is _FINISHED

    def result(self, timeout: float | None = None) -> SendResult:
        result = self._result
        if self._state is _FINISHED and result is not None:
            return result
        return super().result(timeout)


class InFlight:
    """The messages that were submitted and not answered; one always fits, however large.

    Any thread may call `try_enter`; everything else belongs to the loop. So entering is counted
    under a lock, for a few instructions, and leaving by the loop alone, without it.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self.messages: dict[Sending, None] = {}
        self._entered_bytes = self._left_bytes = 0
        #: Held by the first one that waits for room; the others wait for this.
        self._turn = asyncio.Lock()
        #: Those that wait for room, and those that wait for a change.
        self._entering = self._watching = 0
        self._has_changed = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self.messages)

    def full(self, timeout: float) -> TooManyInFlight:
        """The error when there was no room within the time."""
        size = self._entered_bytes - self._left_bytes
        return TooManyInFlight(self.count, size, timeout)

    def try_enter(self, sending: Sending) -> bool:
        """Whether there is room for a message, which is in flight then."""
        return not self._entering and self._take(sending)

    async def enter(self, sending: Sending) -> None:
        """Returns when there is room for a message, within its time. Raises `TooManyInFlight`."""
        self._entering += 1
        try:
            async with asyncio.timeout(sending.timeout), self._turn:
                while not self._take(sending):
                    await self._change()
        except TimeoutError:
            raise self.full(sending.timeout) from None
        finally:
            self._entering -= 1

    def leave(self, sending: Sending) -> bool:
        """A message was answered, or never will be; False if it has left already."""
        if sending not in self.messages:
            return False
        del self.messages[sending]
        self._left_bytes += len(sending.draft.body)
        if self._watching:
            self._has_changed.set()
        return True

    async def until_empty(self) -> None:
        """Returns when nothing is in flight."""
        while self.messages:
            await self._change()

    def _take(self, sending: Sending) -> bool:
        size = len(sending.draft.body)
        with self._lock:
            count, entered_bytes = len(self.messages), self._entered_bytes + size
            if count and (
                count >= self._most or entered_bytes - self._left_bytes > self._most_bytes
            ):
                return False
            # An interrupt can come after a call only, and so not between these.
            self.messages[sending] = None
            self._entered_bytes = entered_bytes
        return True

    async def _change(self) -> None:
        self._has_changed.clear()
        self._watching += 1
        try:
            await self._has_changed.wait()
        finally:
            self._watching -= 1
