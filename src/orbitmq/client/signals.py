"""The signals that end a program, as an event: for programs that end in order.

Signals belong to the program, and a consumer is a guest in it. A server around it has handlers of
its own, another consumer on the same loop wants to hear of the same signal, and they come and go in
any order. So whoever listens here is a link in a chain:

*   A link sets its event, and passes the signal on to what was there before it: to the next link,
    or to the handler of the host. Only what would end the program at once is not called: the
    default actions, that of `asyncio.run`, which cancels the main task, and PySpark's, which
    cancels all jobs and raises. Ending in their place is what links are for.
*   A link that is let go of while it is the last one put on gives its place back to what was there
    before, leaving out links that were let go of earlier. Under something else it stays, and only
    passes on; also to a default action, for which nobody else stands in any more.

Handlers that a host gave to its loop (`loop.add_signal_handler`) are reached by the loop's own way,
which no handler of Python's `signal` module interrupts: they are called beside the links, and are
there when those are gone. That is why links are put on by `signal.signal`, also on a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from orbitmq.clock import Clock, SystemClock

#: End a program that runs a consumer.
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM)


class Settable(Protocol):
    """What a signal sets; at any point of the main thread's work, so it must not take a lock."""

    def set(self) -> None: ...


class EndingSignals:
    """Has an event set by the signals that end a program, instead of ending it.

    Signals are left alone when this is not the main thread.
    """

    def __init__(self, ended: Settable) -> None:
        self._links = [_Link(number, ended.set) for number in ENDINGS]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for link in self._links:
                link.put_on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Let signals do again what they did before."""
        for link in self._links:
            link.let_go()


class LoopEndingSignals:
    """The same for the running event loop, when it runs on the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._signals = EndingSignals(self)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Let signals do again what they did before."""
        self._signals.restore()

    def set(self) -> None:
        """A signal came, in the middle of anything: the loop is told, and woken."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._ended.set)

    async def or_event(self, other: asyncio.Event) -> None:
        """Returns when a signal came, or the event was set."""
        waits = [asyncio.ensure_future(each.wait()) for each in (self._ended, other)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class Latch:
    """An event that can be set by a signal handler while the same thread waits for it.

    `threading.Event` has a lock, which the thread may hold at the moment of the signal.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """Let all go on, now and later."""
        with contextlib.suppress(RuntimeError):  # it is open
            self._gate.release()

    def wait(self) -> None:
        """Block until it is set."""
        self._gate.acquire()
        # Whoever else waits goes on, too.
        self.set()


class _Link:
    """One who listens to one signal. See the head of the module."""

    def __init__(self, number: int, heard: Callable[[], None]) -> None:
        self._number = number
        self._heard = heard
        self._is_on = False
        self._before: Any = None

    def put_on(self) -> None:
        self._before = signal.getsignal(self._number)
        self._is_on = True
        signal.signal(self._number, self)

    def let_go(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        before = self.host
        # None: a handler that was not made by Python, which cannot be put back.
        current: object = signal.getsignal(self._number)
        if current is self and before is not None:
            signal.signal(self._number, before)

    @property
    def host(self) -> Any:
        """What was there before, leaving out those that have gone since."""
        before = self._before
        while isinstance(before, _Link) and not before._is_on:
            before = before._before
        return before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before = self.host
        if self._is_on:
            self._heard()
            if callable(before) and not _ends_at_once(before):
                before(number, frame)
        elif callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _ends_at_once(handler: Callable[..., object]) -> bool:
    if handler is signal.default_int_handler:
        return True
    # A classic session puts its own in the place of the default.
    if (getattr(handler, "__module__", None) or "").partition(".")[0] == "pyspark":
        return True
    # `asyncio.run` has its own for SIGINT, in the place of the default.
    owner = (
        getattr(handler.func, "__self__", None) if isinstance(handler, functools.partial) else None
    )
    return isinstance(owner, asyncio.Runner)


# Ctrl-C and SIGTERM as a wish, for commands that finish what they are at.


T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def wish_to_stop() -> Iterator[asyncio.Event]:
    """Set by the first signal; the second one ends the process as it would without this."""
    loop = asyncio.get_running_loop()
    wish = asyncio.Event()

    def stop() -> None:
        wish.set()
        _leave(loop)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield wish
    finally:
        _leave(loop)


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    for number in _SIGNALS:
        if loop.remove_signal_handler(number) and number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


async def unless(wish: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work, or None if the wish came first and the work was given up."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(wish.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, waiting):
            each.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


# Ctrl-C at `orbitmq pipeline run`: the first one lets the batch end, the second one does not.

#: Seconds within which a second signal says nothing new.
_SAME_WISH = 0.5


class StopWish:
    """Ctrl-C and SIGTERM as a wish to stop; the second one ends the process.

    One that follows at once is the same wish: `timeout` tells the process and then its group.

    The thread that gets the signal is the one that waits for the event, and may have its lock at
    that moment; so another thread sets it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.event = threading.Event()
        self._heard = Latch()
        self._is_wanted = False
        self._clock = clock or SystemClock()
        self._wished_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        threading.Thread(target=self._pass_on, name="wish", daemon=True).start()
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._wanted)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._heard.set()

    def take_over(self) -> None:
        """Again, when somebody else has put handlers of their own in place."""
        for number in _SIGNALS:
            signal.signal(number, self._wanted)

    def _wanted(self, number: int, frame: FrameType | None) -> None:
        now = self._clock.monotonic()
        if not self._is_wanted:
            self._is_wanted = True
            self._wished_at = now
            self._heard.set()
        elif now - self._wished_at > _SAME_WISH:
            for each, before in self._before.items():
                signal.signal(each, before)
            signal.raise_signal(number)

    def _pass_on(self) -> None:
        self._heard.wait()
        self.event.set()
