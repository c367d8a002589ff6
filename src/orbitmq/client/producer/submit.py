"""Messages that were submitted: which are sent at once, and which wait for which.

What is not ready - the queues of its topic are not known, its broker is not connected - waits, and
with it only what might overtake it on the way to its queue:

* While the queues of a topic are not known, all of its messages wait in one line. Once they are
  known, each is looked at again.
* From then on messages wait for their broker, behind others of their topic that do. A broker that
  cannot be reached does not hold up what is for another one, nor for longer than half of its time
  what may go to another one.
* Queues may be forgotten again meanwhile. What comes then waits for queues, and if there are none
  it is told so at once.

All of this belongs to the loop; other threads only append to what was submitted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from orbitmq.client.producer.core import ProducerCore
from orbitmq.client.producer.send import Publisher, Sending, SendResult, outcome_at_stop
from orbitmq.errors import TooManyInFlight

Submitted: TypeAlias = concurrent.futures.Future[SendResult]

#: A message and its future.
Submission: TypeAlias = tuple[Sending, Submitted]

#: Messages in the order of their submission.
Line: TypeAlias = deque[Submission]

#: A topic and the broker that is waited for; None while its queues are not known.
_Key: TypeAlias = tuple[str, str | None]

#: What may go elsewhere waits for this part of its time, as a first attempt would; then for this
#: part of the rest, and so on, as long as there is nowhere to go and at least so many seconds.
_PATIENCE: Final = 0.5
_LEAST: Final = 0.001


class _WaitingLine:
    """Those that wait for the same, in the order of their submission.

    What is done for the first one ends with its time. Each of the others leaves, and is told, when
    its own time is up, however long those before it may wait; or before that, for another broker.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        expire: Callable[[Sending, Submitted], None],
        redirect: Callable[[Submission, str], None],
    ) -> None:
        """`expire` is given who has left so; `redirect`, who is not to go to the broker named."""
        self._monotonic = monotonic
        self._expire = expire
        self._redirect = redirect
        self._members: OrderedDict[Submitted, tuple[Sending, asyncio.TimerHandle]] = OrderedDict()
        #: Those of them that may go to any queue.
        self._free: OrderedDict[Submitted, None] = OrderedDict()
        #: The broker that is being connected to, if the topic has others.
        self.avoidable: str | None = None

    def __len__(self) -> int:
        return len(self._members)

    @property
    def first(self) -> Submission:
        sent, (sending, _) = next(iter(self._members.items()))
        return sending, sent

    def add(self, submission: Submission) -> None:
        sending, sent = submission
        self._members[sent] = sending, self._timer(submission)
        if not sending.is_bound:
            self._free[sent] = None

    def take(self, sent: Submitted) -> Submission:
        sending, timer = self._members.pop(sent)
        self._free.pop(sent, None)
        timer.cancel()
        return sending, sent

    def take_all(self) -> list[Submission]:
        return [self.take(sent) for sent in list(self._members)]

    def redirect_all(self, broker: str) -> None:
        """The broker cannot be reached: those that may go to another one do, in time for it."""
        for sent in list(self._free):
            self._redirect(self.take(sent), broker)

    def _timer(self, submission: Submission) -> asyncio.TimerHandle:
        sending, sent = submission
        left = sending.deadline - self._monotonic()
        call_later = asyncio.get_running_loop().call_later
        if sending.is_bound or left < _LEAST:
            return call_later(left, self._time_is_up, sent)
        return call_later(_PATIENCE * left, self._patience_is_over, sent)

    def _time_is_up(self, sent: Submitted) -> None:
        if sent is not self.first[1]:
            self._expire(*self.take(sent))

    def _patience_is_over(self, sent: Submitted) -> None:
        first = self.first[1]
        if sent is first:
            return
        # There may be nowhere to go, or a callback may want the program to end before its turn.
        sending, _ = self._members[sent]
        self._members[sent] = sending, self._timer((sending, sent))
        broker = self.avoidable
        if broker is not None:
            for each in self._free_until(sent, first):
                self._redirect(self.take(each), broker)

    def _free_until(self, last: Submitted, first: Submitted) -> list[Submitted]:
        """Also those before it, which it would overtake; but not the first of the line."""
        found = []
        for sent in self._free:
            if sent is not first:
                found.append(sent)
            if sent is last:
                break
        return found


class WaitingLines:
    """Begins what was submitted to one producer."""

    def __init__(
        self,
        core: ProducerCore,
        submitted: Line,
        finish: Callable[[Submitted, SendResult | BaseException], None],
    ) -> None:
        """`submitted` is what is to be begun; `finish` is told each outcome."""
        self._core = core
        self._submitted = submitted
        self._finish = finish
        self._monotonic = core.engine.clock.monotonic
        self._lines: dict[_Key, _WaitingLine] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._lines

    def begin_submitted(self) -> None:
        """Send what was submitted, or have it wait."""
        try:
            while self._submitted:
                submission = self._submitted.popleft()
                sending, sent = submission
                try:
                    publisher = self._core.publisher
                    is_ready = publisher.is_ready(sending)
                    if self._lines and (line := self._line_before(sending)) is not None:
                        line.add(submission)
                    elif is_ready:
                        publisher.begin(sending, partial(self._finish, sent))
                    else:
                        self._wait_in_line(publisher, submission)
                except Exception as error:  # noqa: BLE001  # whatever it is: the others are sent
                    self._finish(sent, error)
                except BaseException as error:
                    self._finish(sent, error)
                    raise
        finally:
            if self._submitted:  # a callback or a selector wants the program to end
                self._begin_soon()

    def _line_before(self, sending: Sending) -> _WaitingLine | None:
        """Those that it might overtake."""
        topic, first = sending.draft.topic, sending.first
        line = self._lines.get((topic, None))
        if line is None and first is not None:
            line = self._lines.get((topic, first.broker))
        return line

    def _wait_in_line(self, publisher: Publisher, submission: Submission) -> None:
        """As the first one of a new line."""
        sending = submission[0]
        topic, first = sending.draft.topic, sending.first
        broker = first.broker if first is not None and publisher.knows(topic) else None
        key = topic, broker
        line = _WaitingLine(self._monotonic, partial(self._expire, publisher), self._redirect)
        self._core.engine.spawn(self._serve(publisher, key, line), "connect")
        line.add(submission)
        self._lines[key] = line

    def _expire(self, publisher: Publisher, sending: Sending, sent: Submitted) -> None:
        self._finish(sent, publisher.expired(sending))

    async def _serve(self, publisher: Publisher, key: _Key, line: _WaitingLine) -> None:
        """Make the first message of a line ready, and send it whatever came of that; and so on."""
        topic, broker = key
        try:
            while line and not (broker is None and publisher.knows(topic)):
                sending, sent = line.first
                given_up: str | None = None
                if not publisher.is_ready(sending):
                    found = await publisher.find(sending)
                    if broker is None and publisher.knows(topic):
                        break
                    if not isinstance(found, Exception):
                        queue, others = found
                        line.avoidable = queue.broker if others else None
                        if not await publisher.connect(sending, queue, others, leaves_half=True):
                            given_up = line.avoidable
                        line.avoidable = None
                    elif broker is None and self._has_lines_for_brokers(topic):
                        # To send it is to look again: a queue that is back by then is one that
                        # others wait for, since before it was forgotten.
                        line.take(sent)
                        self._finish(sent, found)
                        continue
                self._begin(line.take(sent))
                if given_up is not None:
                    line.redirect_all(given_up)
        except (asyncio.CancelledError, GeneratorExit):
            for sending, sent in line.take_all():
                self._finish(sent, outcome_at_stop(sending))
            raise
        finally:
            del self._lines[key]
            if line:
                # Their queues are known now; or a callback wants the program to end.
                self._submitted.extendleft(reversed(line.take_all()))
                self._begin_soon()

    def _has_lines_for_brokers(self, topic: str) -> bool:
        return any(each == topic and broker is not None for each, broker in self._lines)

    def _redirect(self, submission: Submission, broker: str) -> None:
        """It is never again in a line: from now on it is sent like any other, until it is told."""
        self._begin(submission, avoid=broker)

    def _begin(self, submission: Submission, avoid: str | None = None) -> None:
        sending, sent = submission
        try:
            publisher = self._core.publisher
            if avoid is not None:
                publisher.pass_by(sending, avoid)
            publisher.begin(sending, partial(self._finish, sent))
        except Exception as error:  # noqa: BLE001  # whatever it is: the others are sent
            self._finish(sent, error)
        except BaseException as error:
            self._finish(sent, error)
            raise

    def _begin_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.begin_submitted)


# Bounds for what was submitted and is not answered yet.
#
# A program that submits faster than brokers take would fill its memory with messages; it waits here
# instead. One message always fits, however large it is.


#: Seconds after which a thread that waits looks again, for whatever reason nobody woke it.
_LOOK: Final = 0.1


class Room:
    """How much is in flight, and how much may be. Not guarded against anything."""

    __slots__ = ("_most", "_most_bytes", "count", "size")

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.count = 0
        self.size = 0

    def take(self, size: int) -> bool:
        """Take room for a message of `size` bytes, if there is."""
        if self.count and (self.count >= self._most or self.size + size > self._most_bytes):
            return False
        self.count += 1
        self.size += size
        return True

    def give_back(self, size: int) -> None:
        self.count -= 1
        self.size -= size


class InFlight:
    """Room that coroutines of one loop wait for, in the order of their coming."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._room = Room(most, most_bytes)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        #: Who waits until nothing is in flight.
        self._until_empty: list[asyncio.Future[None]] = []

    @property
    def count(self) -> int:
        return self._room.count

    def enter_at_once(self, size: int) -> bool:
        """Whether there is room for a message of `size` bytes, which is taken then."""
        return not self._waiting and self._room.take(size)

    async def enter(self, size: int, timeout: float) -> None:  # noqa: ASYNC109  # see the error
        """Returns when there is room for a message of `size` bytes. Raises `TooManyInFlight`."""
        if self.enter_at_once(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(timeout):
                await turn
        except BaseException as error:
            full = TooManyInFlight(self._room.count, self._room.size, timeout)
            if turn.done() and not turn.cancelled():
                # It came in the same instant: pass it on.
                self.leave(size)
            else:
                with contextlib.suppress(ValueError):  # whoever admitted others passed over it
                    self._waiting.remove((size, turn))
                self._admit()
            if isinstance(error, TimeoutError):
                raise full from None
            raise

    def leave(self, size: int) -> None:
        """A message was answered, or never will be."""
        self._room.give_back(size)
        if self._waiting:
            self._admit()
        if self._until_empty and not self._room.count:
            ended, self._until_empty = self._until_empty, []
            for waiter in ended:
                if not waiter.done():
                    waiter.set_result(None)

    async def until_empty(self) -> None:
        """Returns when nothing is in flight."""
        if self._room.count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._until_empty.append(waiter)
            await waiter

    def _admit(self) -> None:
        while self._waiting and (
            self._waiting[0][1].done() or self._room.take(self._waiting[0][0])
        ):
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)


class BlockingInFlight:
    """The same for threads. `leave` and the waiting for the end need no lock.

    A signal handler may hold up a thread that has the lock, and may itself wait for the end, or for
    the loop, which calls `leave`. So only those who enter take it, for a few instructions. Who
    leaves appends to `_left`, and who enters next takes that into account. Who finds no room puts a
    gate of its own (a condition can be left locked by a thread that is interrupted inside of it)
    where it is found, then looks again; who leaves says so first, then opens the gates: one of the
    two sees the other. A gate that is lost with a thread that was interrupted costs one `_LOOK`.

    Nothing is in flight when as many have left as had entered, and nobody has entered meanwhile.
    What has left is counted in `_left` or in `_gone`, for an instant in neither: never in both.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # Under the lock: how many came in, how many of them are known to have left, and the bytes
        # of the others.
        self._entered = 0
        self._gone = 0
        self._size = 0
        #: When the time of everything that has come in so far is up.
        self._latest = 0.0
        #: The sizes of those that have left since.
        self._left: deque[int] = deque()
        #: Opened, all of them, when something has changed.
        self._gates: deque[threading.Lock] = deque()

    @property
    def count(self) -> int:
        """How many are in flight; at most, while others come and go."""
        return self._entered - self._gone - len(self._left)

    def enter(self, size: int, timeout: float, until: float = 0.0) -> None:
        """Blocks until there is room for a message of `size` bytes. Raises `TooManyInFlight`.

        `until` is when the message has an outcome at the latest.
        """
        is_in = False
        try:
            deadline = time.monotonic() + timeout
            while True:
                with self._lock:
                    while self._left:
                        self._forget_first()
                    count = self._entered - self._gone
                    if not count or (count < self._most and self._size + size <= self._most_bytes):
                        # No call until all of it is noted.
                        is_in = True
                        self._entered += 1
                        self._size += size
                        if until > self._latest:
                            self._latest = until
                        return
                if deadline <= time.monotonic():
                    break
                self._wait_for_change(lambda: bool(self._left), deadline)
        except BaseException:
            if is_in:
                self.leave(size)  # interrupted in its last step
            raise
        raise TooManyInFlight(self.count, self._size, timeout)

    def _forget_first(self) -> None:
        """Take one that has left into account. The lock is held; there is no call in it."""
        size = self._left[0]
        del self._left[0]
        self._gone += 1
        self._size -= size

    def leave(self, size: int) -> None:
        """A message was answered, or never will be. Never waits."""
        self._left.append(size)
        while self._gates:
            try:
                gate = self._gates.popleft()
            except IndexError:
                return  # somebody else has opened it
            gate.release()

    def until_empty(self, timeout: float | None) -> bool:
        """Blocks until nothing is in flight; False when the time is up."""
        end = None if timeout is None else time.monotonic() + timeout
        return self._wait(lambda: end)

    def until_over(self, grace: float) -> bool:
        """The same with the time that the messages have, and `grace` to tell what came of them."""
        return self._wait(lambda: self._latest + grace)

    def _wait(self, end_of: Callable[[], float | None]) -> bool:
        """Blocks until nothing is in flight, or until the end, which may move meanwhile."""
        while not self._is_empty():
            end = end_of()
            if end is not None and end <= time.monotonic():
                return False
            self._wait_for_change(self._is_empty, end)
        return True

    def _wait_for_change(self, has_come: Callable[[], bool], end: float | None) -> None:
        """Blocks until somebody has left, or for a while. May be interrupted anywhere."""
        gate = threading.Lock()
        gate.acquire()
        try:
            self._gates.append(gate)
            if not has_come():  # else nobody may have seen the gate
                left = _LOOK if end is None else min(_LOOK, end - time.monotonic())
                gate.acquire(timeout=max(0.0, left))
        finally:
            with contextlib.suppress(ValueError):  # it was opened
                self._gates.remove(gate)

    def _is_empty(self) -> bool:
        entered = self._entered
        ended = self._gone  # before `_left`: what moves between the two is not counted twice
        ended += len(self._left)
        return ended >= entered == self._entered
