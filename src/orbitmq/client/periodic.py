"""Work that is done again and again, and sooner when somebody asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

#: What is done each time; a number that it returns is the pause before the next time.
Work: TypeAlias = Callable[[], Awaitable[float | None]]


class Periodic:
    """One piece of work and its timer: never twice at a time, and an error does not end it.

    The pause counts from the end of the work. A wake-up ends the pause; one that comes while the
    work is running makes it run once more, because it may have looked too early.
    """

    def __init__(self, interval: float, work: Work, *, first: float | None, name: str) -> None:
        """`first` is the pause before the first time; None: the same as the others."""
        self._interval = interval
        self._work = work
        self._first = interval if first is None else first
        self._name = name
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]) -> None:
        """Begin, as a task that `spawn` makes."""
        self._task = spawn(self._run(), self._name)

    def wake(self) -> None:
        """Do it now, or once more if it is being done."""
        self._is_due.set()

    def stop(self) -> None:
        """Do it no more; what is running is cancelled."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        pause = self._first
        while True:
            await self._until_due(pause)
            self._is_due.clear()
            pause = self._interval
            try:
                wanted = await self._work()
            except Exception:
                log.exception("%s failed, next time in %g s", self._name, pause)
            else:
                if wanted is not None:
                    pause = wanted

    async def _until_due(self, pause: float) -> None:
        if pause <= 0 or self._is_due.is_set():
            # Others get their turn even if there is always something to do.
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(pause):
                await self._is_due.wait()
        except TimeoutError:
            pass
