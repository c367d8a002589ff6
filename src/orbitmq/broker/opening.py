"""Doing in a thread what a broker cannot do in steps while it starts: open its store.

After a crash that takes as long as reading the end of the log takes: seconds, or minutes. The loop
answers meanwhile: those who ask for the state of health, and the signal that ends the process.

The thread is a daemon's: a process that is to end does not wait for it. Recovery reads, cuts what
is torn and writes again what it accepted; it can be ended anywhere, as by a crash, and begins anew
at the next start.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Opening(Generic[T]):
    """What is made in one thread, and may be given up in another at any moment."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], None]) -> None:
        self._make = make
        self._close = close
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._made: list[T] = []
        self._running: Future[T] | None = None

    async def opened(self) -> T:
        """What `make` makes in a thread of its own.

        When the caller is cancelled, that is closed as soon as it is there: nobody waits for it.
        """
        self._running = _in_own_thread(self._run)
        try:
            return await asyncio.wrap_future(self._running)
        except asyncio.CancelledError:
            self._abandon()
            raise

    async def ended(self) -> None:
        """Return when the thread is done, and what was given up is closed."""
        if self._running is None:
            return
        running = asyncio.wrap_future(self._running)
        # How it ended is told to whoever opened.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait((running,))

    def _run(self) -> T:
        made = self._make()
        with self._lock:
            self._made.append(made)
            if not self._is_abandoned:
                return made
        self._close(made)
        return made

    def _abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            made = tuple(self._made)
        for each in made:
            self._close(each)


def _in_own_thread(call: Callable[[], T]) -> Future[T]:
    """The outcome of a call in a new thread, which no end of a program waits for."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # for whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="orbitmq-opening", daemon=True).start()
    return future
