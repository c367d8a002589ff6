"""What a broker does by itself: jobs that come again, tasks that end, tables that are saved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from orbitmq.broker.configfile import ConfigFile
from orbitmq.broker.errors import ConfigNotSaved
from orbitmq.clock import Clock
from orbitmq.wire.bodies.base import Body

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
