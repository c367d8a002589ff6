"""What runs on the event loop besides requests, in portions that do not hold up requests.

`Scheduler` calls jobs periodically (`every`) or when their next work is due (`at`), and runs tasks.
`Pacing` limits how much pulls may do in one step of the loop, `Slices` does long loops in slices
(`in_slices`), and `Steps` and `chunked_answer` do the same for long answers of coroutines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeAlias

from orbitmq.clock import Clock
from orbitmq.filter.tags import MessageFilter
from orbitmq.remoting.connection import Connection
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import Header
from orbitmq.wire.javajson import Body, encode_body

log = logging.getLogger(__name__)

#: Does what is due at a time of day, in bounded portions, and returns when more is due; None when
#: that is not known. It knows no event loop, so tests step through hours in milliseconds.
Step: TypeAlias = Callable[[float], float | None]

#: The longest time between two calls of a step. The time of day may be set, and a call that was
#: scheduled before would come at the wrong moment.
IDLE = 1.0
#: Seconds until a step that failed is called again.
AFTER_FAILURE = 1.0
#: A timer of the loop may end this much early.
_ROUNDING = 0.0005


class Job(Protocol):
    """Something that runs between `start` and `stop`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Scheduler:
    """The jobs and tasks of one broker. Nothing runs before `start` or after `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self.jobs: list[Job] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_running = False

    def every(self, interval: float, call: Callable[[], object]) -> None:
        """Call at this interval; a call that fails is logged and comes again."""
        self.add(_Periodic(self._loop, interval, call))

    def at(self, step: Step) -> Alarm:
        """Call a step whenever the time comes that it returned, or when its alarm is woken."""
        alarm = Alarm(self._loop, self._clock, step)
        self.add(alarm)
        return alarm

    def add(self, job: Job) -> None:
        """Start a job with the others, and stop it with them."""
        self.jobs.append(job)
        if self._is_running:
            job.start()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run to its end, or until the broker stops."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def start(self) -> None:
        self._is_running = True
        for job in self.jobs:
            job.start()

    def stop_jobs(self) -> None:
        self._is_running = False
        for job in self.jobs:
            job.stop()

    async def stop(self) -> None:
        """Stop all jobs; cancel the tasks and wait for their end."""
        self.stop_jobs()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the broker failed", exc_info=error)


class _Periodic:
    __slots__ = ("_call", "_interval", "_loop", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval: float, call: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._run)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self.start()
        try:
            self._call()
        except Exception:
            log.exception("a job of the broker failed; it comes again in %g s", self._interval)


class Alarm:
    """Calls one step at the right times, between `start` and `stop`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, step: Step, *, idle: float = IDLE
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._step = step
        self._idle = idle
        self._timer: asyncio.Handle | None = None
        self._is_running = False
        self._is_woken = False

    def start(self) -> None:
        self._is_running = True
        self.wake()

    def stop(self) -> None:
        self._is_running = False
        self._set(None)

    def wake(self) -> None:
        """Call the step in the next iteration of the loop."""
        if self._is_running and not self._is_woken:
            self._is_woken = True
            self._set(self._loop.call_soon(self._ring))

    def _ring(self) -> None:
        self._is_woken = False
        self._timer = None
        now = self._clock.now()
        try:
            due = self._step(now)
        except Exception:
            log.exception("work that was due failed; it is tried again in %g s", AFTER_FAILURE)
            due = now + AFTER_FAILURE
        if self._is_woken or not self._is_running:
            return
        if due is None:
            self._set(self._loop.call_later(self._idle, self._ring))
        elif due <= now:
            self.wake()
        else:
            wait = min(due - self._clock.now() + _ROUNDING, self._idle)
            self._set(self._loop.call_later(max(wait, 0.0), self._ring))

    def _set(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


def no_wake() -> None:
    """Stands for `Alarm.wake` before there is an alarm."""


#: Answers that a turn may give, however small they are.
CALLS = 256
#: Messages whose properties a turn may filter by an expression of up to `_SHORT_EXPRESSION`
#: characters: less than a millisecond.
JUDGEMENTS = 64
_SHORT_EXPRESSION = 256


def judgements(wanted: MessageFilter) -> int:
    """How many messages a turn may filter: the longer the expression, the fewer."""
    if not wanted.needs_properties:
        return JUDGEMENTS
    length = max(_SHORT_EXPRESSION, len(getattr(wanted, "text", "")))
    return max(1, JUDGEMENTS * _SHORT_EXPRESSION // length)


class Pacing:
    """Limits what pulls do in one turn, and keeps the pulls that wait for a later one.

    A replay of a long backlog must not delay live messages. A turn may send `limit` bytes, make
    `CALLS` answers, filter `JUDGEMENTS` messages by properties, or compile one expression. Further
    pulls wait, those of a connection in their order, and connections take turns. A step of the loop
    has only one turn with filtering (`is_judging`). A connection that does not read its answers
    gets no turn until it does: a waiting request takes less memory than an answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.limit = limit
        #: Bytes sent by pulls in this turn; set to 0 when a turn begins.
        self.spent = 0
        #: Whether this step has filtered by properties or compiled; further filters wait.
        self.is_judging = False
        self._loop = loop
        self._waiting: dict[Connection, deque[Callable[[], None]]] = {}
        #: What waits for connections that are slow.
        self._stalled: dict[Connection, deque[Callable[[], None]]] = {}
        self._is_scheduled = False

    def __len__(self) -> int:
        lines = (*self._waiting.values(), *self._stalled.values())
        return sum(len(calls) for calls in lines)

    @property
    def least(self) -> int:
        """What an empty answer counts for."""
        return self.limit // CALLS

    def must_wait(self, connection: Connection) -> bool:
        """Whether further work of a connection waits for a later turn."""
        return (
            self.spent >= self.limit
            or connection.is_slow
            or (bool(self._waiting) and connection in self._waiting)
        )

    def later(self, connection: Connection, call: Callable[[], None]) -> None:
        """Have `call` called in a later turn, after what waits for the same connection."""
        calls = self._stalled.get(connection)
        if calls is not None:
            calls.append(call)
            return
        calls = self._waiting.get(connection)
        if calls is None:
            calls = self._waiting[connection] = deque()
        calls.append(call)
        self._schedule()

    def judged(self, messages: int, most: int = JUDGEMENTS) -> None:
        """A filter has judged `messages` of the `most` that a turn may judge."""
        self.spent += messages * (self.limit // most)
        self._begin_judging()

    def compiled(self) -> None:
        """An expression was compiled, which uses up the turn."""
        self.spent += self.limit
        self._begin_judging()

    def _begin_judging(self) -> None:
        if not self.is_judging:
            self.is_judging = True
            self._loop.call_soon(self._end_judging)

    def forget(self, connection: Connection) -> None:
        """Drop the requests of a closed connection."""
        self._waiting.pop(connection, None)
        self._stalled.pop(connection, None)

    def _end_judging(self) -> None:
        self.is_judging = False

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _resume(self, connection: Connection) -> None:
        """A connection is no longer slow: it takes part again."""
        calls = self._stalled.pop(connection, None)
        if calls:
            self._waiting[connection] = calls
            self._schedule()

    def _turn(self) -> None:
        self._is_scheduled = False
        if not self._waiting:
            return
        connection = next(iter(self._waiting))
        calls = self._waiting.pop(connection)
        self.spent = 0
        least = self.least
        while calls and self.spent < self.limit and not connection.is_slow:
            call = calls.popleft()
            self.spent += least
            try:
                call()
            except Exception:
                log.exception("work that waited for its turn failed")
        if calls:
            # To the end of the queue, with what was added meanwhile.
            calls.extend(self._waiting.pop(connection, ()))
            if connection.is_slow:
                self._stalled[connection] = calls
                connection.when_quick(self._resume)
            else:
                self._waiting[connection] = calls
        if self._waiting:
            self._schedule()


#: How long a slice may take, which is how long other work waits.
SLICE_SECONDS = 0.005
#: Rounds between two readings of the clock.
_ROUNDS = 16


class Slices:
    """Does long loops in slices.

    A loop is a generator that yields after every round. Its first rounds (`at_once`) are done
    immediately, which is all of them nearly always; the rest in later steps of the event loop, one
    slice of one loop in each. Loops take turns.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        at_once: int,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is called before every slice but the first ones."""
        self.at_once = at_once
        self._loop = loop
        self._before = before
        self._unfinished: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._unfinished)

    def in_slices(self, rounds: Iterator[None], *, is_late: bool = False) -> None:
        """Do a loop. With `is_late` none of its rounds is done before this returns."""
        if is_late or _has_more(rounds, self.at_once):
            self._unfinished.append(rounds)
            if len(self._unfinished) == 1:
                self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._before()
        rounds = self._unfinished[0]
        end = self._loop.time() + SLICE_SECONDS
        try:
            has_more = _has_more(rounds, _ROUNDS)
            while has_more and self._loop.time() < end:
                has_more = _has_more(rounds, _ROUNDS)
        except Exception:
            log.exception("a loop in slices failed")
            has_more = False
        self._unfinished.popleft()
        if has_more:
            self._unfinished.append(rounds)
        if self._unfinished:
            self._loop.call_soon(self._step)


def _has_more(rounds: Iterator[None], most: int) -> bool:
    """Do up to `most` rounds; whether there may be more."""
    done = sum(1 for _ in itertools.islice(rounds, most))
    return done == most


#: Entries from which an answer is long; shorter ones are encoded in less than 2 ms.
LONG = 250
#: Entries after which other work may run; likewise.
STEP = 250


class Steps:
    """Counts the work of a coroutine and lets other work run after each `STEP` entries."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries = 0

    async def did(self, entries: int) -> None:
        """Count `entries` as done."""
        self._entries += entries
        if self._entries >= STEP:
            self._entries = 0
            await asyncio.sleep(0)


async def chunked_answer(
    request: Command,
    body: Body,
    header: Header | None = None,
    *,
    entries: int,
    remark: str | None = None,
) -> Command:
    """A success whose body has `entries`; a thread encodes a long one.

    The values are frozen, and only the interpreter's lock is shared, in slices of milliseconds.
    """
    if entries < LONG:
        encoded = encode_body(body)
    else:
        encoded = await asyncio.to_thread(encode_body, body)
    return request.answer(ResponseCode.SUCCESS, header, remark=remark, body=encoded)
