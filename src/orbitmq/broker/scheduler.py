"""What a broker does by itself: jobs that come again, tasks that end, tables that are saved."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from orbitmq.broker.configfile import ConfigFile
from orbitmq.broker.errors import ConfigNotSaved
from orbitmq.clock import Clock
from orbitmq.filter.tags import MessageFilter
from orbitmq.remoting.connection import Connection
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import Header
from orbitmq.wire.javajson import Body, encode_body

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

#: How long a table that could not be saved is left alone.
_AFTER_FAILURE = 5.0


class Background:
    """The jobs and tasks of one broker. Nothing runs before `start`, or after `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: list[Job] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_running = False

    def every(
        self, interval: float, call: Callable[[], None], *, first: float | None = None
    ) -> None:
        """Call again and again, first after `first` seconds (else after `interval`)."""
        job = _Job(self._loop, interval, call)
        self._jobs.append(job)
        job.first = interval if first is None else first
        if self._is_running:
            job.begin()

    def add(self, job: Job) -> None:
        """Begin a job with the others, and end it with them."""
        self._jobs.append(job)
        if self._is_running:
            job.begin()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run to its end, or until the broker stops."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def start(self) -> None:
        self._is_running = True
        for job in self._jobs:
            job.begin()

    async def stop(self) -> None:
        """Call nothing any more; cancel what runs, and wait for its end."""
        self._is_running = False
        for job in self._jobs:
            job.end()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the broker failed", exc_info=error)


class Job(Protocol):
    """Something that runs between `begin` and `end`."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class _Job:
    """One call that comes again. A call that fails is logged and comes again all the same."""

    __slots__ = ("_call", "_interval", "_loop", "_timer", "first")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval: float, call: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self.first = interval

    def begin(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self.first, self._run)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._run)
        try:
            self._call()
        except Exception:
            log.exception("a job of the broker failed; it comes again in %g s", self._interval)


class SavedTable(Generic[B]):
    """A table and its file: written when the table changed, never by two at a time.

    The document is made on the loop, from live tables, and written in a thread.
    """

    def __init__(
        self,
        file: ConfigFile[B],
        *,
        revision: Callable[[], int],
        document: Callable[[], B],
        clock: Clock,
    ) -> None:
        self._file = file
        self._revision = revision
        self._document = document
        self._monotonic = clock.monotonic
        self._saved = revision()
        self._not_before = 0.0
        #: Why the last save failed; None when it did not.
        self._problem: ConfigNotSaved | None = None
        self._task: asyncio.Task[None] | None = None
        #: Whether somebody asked while the task was writing.
        self._is_asked_again = False

    @property
    def is_stale(self) -> bool:
        """Whether the table says something that its file does not."""
        return self._revision() != self._saved

    def outdate(self) -> None:
        """Have the file written though the table has not changed: other things it tells have."""
        self._saved = -1

    def save_soon(self) -> None:
        """Begin to write, if there is anything to write; after whoever is writing."""
        if self._task is not None:
            self._is_asked_again = True
        elif self.is_stale and self._monotonic() >= self._not_before:
            # Not one of the tasks that a stop cancels: the thread would go on writing.
            self._task = asyncio.get_running_loop().create_task(self._save())

    async def _save(self) -> None:
        try:
            revision = self._revision()
            await asyncio.to_thread(self._file.save, self._document())
            self._saved = revision
            self._problem = None
        except ConfigNotSaved as error:
            self._problem = error
            self._not_before = self._monotonic() + _AFTER_FAILURE
            if self._file.failures_in_a_row == 1:
                log.exception(
                    "configuration was not saved; trying again every %g s", _AFTER_FAILURE
                )
        finally:
            self._task = None
        if self._is_asked_again:
            self._is_asked_again = False
            self.save_soon()

    async def saved(self) -> None:
        """Return when the file says what the table says now, or more. Raises `ConfigNotSaved`."""
        wanted = self._revision()
        while self._saved < wanted:
            if self._task is None:
                self._not_before = 0.0
                self.save_soon()
            if self._task is not None:
                await asyncio.shield(self._task)
            if self._saved < wanted and self._problem is not None:
                raise self._problem

    async def close(self) -> None:
        """Write what is not written yet, after whoever is writing. Raises `ConfigNotSaved`."""
        while self._task is not None:
            await asyncio.wait((self._task,))
        self.save_now()

    def save_now(self) -> None:
        """Write what is not written yet; nobody else may be writing. Raises `ConfigNotSaved`."""
        if self.is_stale:
            revision = self._revision()
            self._file.save(self._document())
            self._saved = revision


# Alarms: work that comes when it is due, not when somebody happens to look.
#
# The work itself is a *step*: a function that is given the time, does a bounded part of what is due
# then, and says when it wants to be called again. It knows nothing of loops, so a test steps
# through hours of virtual time in milliseconds. An alarm calls the step at the time it asked for.
#
# The time of day may be set, forwards or back, and then an alarm that was set before rings at the
# wrong moment. So it rings at least every `IDLE` seconds and asks again; a step that has nothing to
# do is a comparison.


#: Given the time of day, does what is due; when there will be more, None when that is not known.
Step: TypeAlias = Callable[[float], float | None]

#: The longest time between two looks.
IDLE = 1.0
#: How long a step that failed is left alone.
AFTER_FAILURE = 1.0
#: A timer of the loop may ring this much early.
_ROUNDING = 0.0005


class Alarm:
    """Calls one step at the right times, between `begin` and `end`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, step: Step, *, idle: float = IDLE
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._step = step
        self._idle = idle
        self._timer: asyncio.Handle | None = None
        self._is_running = False
        self._is_soon = False

    def begin(self) -> None:
        self._is_running = True
        self.soon()

    def end(self) -> None:
        self._is_running = False
        self._set(None)

    def soon(self) -> None:
        """Look in the next step of the loop, whatever was asked for."""
        if self._is_running and not self._is_soon:
            self._is_soon = True
            self._set(self._loop.call_soon(self._ring))

    def _ring(self) -> None:
        self._is_soon = False
        self._timer = None
        now = self._clock.now()
        try:
            again = self._step(now)
        except Exception:
            log.exception("work that was due failed; it is tried again in %g s", AFTER_FAILURE)
            again = now + AFTER_FAILURE
        if self._is_soon or not self._is_running:
            return
        if again is None:
            self._set(self._loop.call_later(self._idle, self._ring))
        elif again <= now:
            self.soon()
        else:
            wait = min(again - self._clock.now() + _ROUNDING, self._idle)
            self._set(self._loop.call_later(max(wait, 0.0), self._ring))

    def _set(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


def no_wake() -> None:
    """Stands for whoever wakes an alarm, before there is one."""


# Bounded work per turn, so that reading a long backlog does not hold up what is live.
#
# Sending a mebibyte of old messages takes longer than storing and delivering dozens of new ones,
# and a consumer that replays a topic asks for many at once. So each turn may send so many bytes of
# pulled messages. The pulls beyond wait, each connection's in their order, and the connections get
# turns in rotation after whatever else is ready by then: somebody at the tail never waits behind
# what somebody else has asked for. An empty answer counts as well, so that a turn ends after
# `CALLS` of them, and so do messages that a filter had to look into: that takes a hundred times as
# long as sending them. `JUDGEMENTS` of them make a turn, as does an expression that has to be
# compiled, and a step of the loop has only one such turn (`is_judging`), whoever asks: what is due
# otherwise waits for one of them at most.
#
# A connection that does not take what it was sent gets no turns until it does. What it asked for
# costs little while it waits here; answered, it would lie in memory until the connection had to be
# given up, although its peer is merely slower than our disk.


#: Answers that a turn may give, however small they are.
CALLS = 256
#: Messages that a turn may look into for a filter by properties, unless its expression is longer
#: than so many characters: less than a millisecond.
JUDGEMENTS = 64
_SHORT_EXPRESSION = 256


def judgements(wanted: MessageFilter) -> int:
    """How many messages a turn may look into for a filter: the longer it is, the fewer."""
    if not wanted.needs_properties:
        return JUDGEMENTS
    length = max(_SHORT_EXPRESSION, len(getattr(wanted, "text", "")))
    return max(1, JUDGEMENTS * _SHORT_EXPRESSION // length)


class Pacing:
    """How much of the current turn is used up, and what waits for a later one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.limit = limit
        #: Bytes sent by pulls in this turn; whoever begins a turn sets it to 0.
        self.spent = 0
        #: Whether messages were looked into in this step, or an expression compiled: further
        #: filters wait for the next.
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
        """What an answer counts for even if it is empty."""
        return self.limit // CALLS

    def must_wait(self, connection: Connection) -> bool:
        """Whether further work for a connection has to wait for a turn of its own."""
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
        """A filter has looked into so many messages of those that a turn may look into."""
        self.spent += messages * (self.limit // most)
        self._begin_judging()

    def compiled(self) -> None:
        """An expression was compiled, which takes longer than all that a turn may do."""
        self.spent += self.limit
        self._begin_judging()

    def _begin_judging(self) -> None:
        if not self.is_judging:
            self.is_judging = True
            self._loop.call_soon(self._end_judging)

    def forget(self, connection: Connection) -> None:
        """A connection was closed: what it asked for is not needed any more."""
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
            # To the end of the line, with whatever was added meanwhile.
            calls.extend(self._waiting.pop(connection, ()))
            if connection.is_slow:
                self._stalled[connection] = calls
                connection.when_quick(self._resume)
            else:
                self._waiting[connection] = calls
        if self._waiting:
            self._schedule()


# Long loops in slices, so that nobody else has to wait for their end.
#
# A loop over everybody who waits for something is short nearly always, and then it is best done at
# once. Sometimes it has a hundred thousand rounds. So a loop is a generator that yields after every
# round: its first rounds are done at once, the rest in later steps of the event loop, one slice of
# one loop in each step. Loops take turns; a short one that comes later does not wait behind.


#: How long a slice may take. Whoever else is there waits for so long, and half as much again.
SLICE_SECONDS = 0.005
#: Rounds between two looks at the clock.
_ROUNDS = 16


class Slices:
    """The loops of one broker that are not done yet."""

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

    def begin(self, rounds: Iterator[None], *, is_late: bool = False) -> None:
        """Do the first rounds now, unless enough was done (`is_late`), and what is left soon."""
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
    """Do up to so many rounds; whether there may be more."""
    done = sum(1 for _ in itertools.islice(rounds, most))
    return done == most


# Long answers, made in steps and written by a thread, while others are served.
#
# Looking at tens of thousands of queues, and writing what was found as JSON, takes a good part of a
# second. The values are frozen, so a thread may write them; only the interpreter's lock is shared,
# in slices of a few milliseconds.


#: Entries from which an answer is long; shorter ones are written in less than 2 ms.
LONG = 250
#: Entries that are looked at before others may run; likewise.
STEP = 250


class Steps:
    """Lets others run from time to time."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries = 0

    async def did(self, entries: int) -> None:
        """So much is done; if it is enough for a step, it is others' turn."""
        self._entries += entries
        if self._entries >= STEP:
            self._entries = 0
            await asyncio.sleep(0)


async def answered(
    request: Command,
    body: Body,
    header: Header | None = None,
    *,
    entries: int,
    remark: str | None = None,
) -> Command:
    """A success with a body of so many entries."""
    if entries < LONG:
        encoded = encode_body(body)
    else:
        encoded = await asyncio.to_thread(encode_body, body)
    return request.answer(ResponseCode.SUCCESS, header, remark=remark, body=encoded)
