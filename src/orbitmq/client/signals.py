"""SIGINT and SIGTERM as a request to stop: the first stops gracefully, the second immediately.

Signal handlers belong to the process, so all users in it share one. It is installed for the first
user and removed after the last one, whatever the order in which they end. Handlers of the host
program are called as well, except for those that would end the program immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

#: The signals that end a program.
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM)
#: Seconds within which a second signal is the same request: `timeout` signals the process and then
#: its group.
_SAME_REQUEST: Final = 0.5


class GracefulExit:
    """Calls `stop` at the first SIGINT or SIGTERM. A second signal has its former effect.

    Outside of the main thread signals are not handled. `stop` interrupts the main thread at any
    point, so it must not take a lock: use a `Latch` instead of a `threading.Event`.
    """

    def __init__(
        self, stop: Callable[[], object], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.stop = stop
        self.monotonic = monotonic

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            _installed.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _installed.remove(self)

    def reinstall(self) -> None:
        """Install the handlers again, after a library has replaced them."""
        _installed.install()


class _Installed:
    """The process's handler for these signals, and the handlers that it replaced."""

    def __init__(self) -> None:
        self._active: list[GracefulExit] = []
        #: The handlers below this one, at most two. A handler that was installed during an earlier
        #: use may call this one; in a later use it is below, and its call goes to the one below it.
        self._before: dict[int, list[Any]] = {}
        self._requested_at: float | None = None

    def add(self, graceful: GracefulExit) -> None:
        if not self._active:
            self._requested_at = None
            for number in ENDINGS:
                # None stands for a handler that was not installed by Python. It cannot be restored.
                before = signal.getsignal(number)
                if before != self.handle:
                    self._before[number] = [*self._before.get(number, [])[-1:], before]
            self.install()
        self._active.append(graceful)

    def remove(self, graceful: GracefulExit) -> None:
        if graceful in self._active:
            self._active.remove(graceful)
            if not self._active:
                self.uninstall()

    def install(self) -> None:
        for number in ENDINGS:
            signal.signal(number, self.handle)

    def uninstall(self) -> None:
        for number, chain in self._before.items():
            # A handler that was installed later stays. It may call this one.
            if signal.getsignal(number) == self.handle and chain[-1] is not None:
                signal.signal(number, chain[-1])
                del chain[1:]

    def handle(self, number: int, frame: FrameType | None) -> None:
        chain = self._before.get(number) or [None]
        before = chain[-1]
        if self._active:
            now = self._active[0].monotonic()
            if self._requested_at is None:
                self._requested_at = now
                for graceful in tuple(self._active):
                    graceful.stop()
                if callable(before) and not _ends_at_once(before):
                    before(number, frame)
                return
            if now - self._requested_at <= _SAME_REQUEST:
                return
        self.uninstall()
        if callable(before):
            is_below = chain[1:] == [before]
            del chain[1:]
            try:
                before(number, frame)
            finally:
                chain += [before] * is_below
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


_installed = _Installed()


def _ends_at_once(handler: Callable[..., object]) -> bool:
    """Whether it is a default handler: of Python, `asyncio.run` or PySpark."""
    if handler is signal.default_int_handler:
        return True
    if (getattr(handler, "__module__", None) or "").partition(".")[0] == "pyspark":
        return True  # cancels all jobs and raises
    owner = getattr(handler.func, "__self__", None) if isinstance(handler, functools.partial) else 0
    return isinstance(owner, asyncio.Runner)


class Latch:
    """An event that a signal handler can set while the same thread waits for it.

    `threading.Event` has a lock, which the thread may hold at the moment of the signal.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it is released already
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set, or until the timeout; returns whether it is set."""
        if self._gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self.set()  # for other waiting threads
        return self._is_set


# ---- on an event loop


@contextlib.contextmanager
def stop_requested() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets."""
    loop = asyncio.get_running_loop()
    requested = asyncio.Event()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(requested.set)

    with GracefulExit(stop):
        yield requested


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work, or None if the event came first and the work was cancelled."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, waiting):
            each.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
