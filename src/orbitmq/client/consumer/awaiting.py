"""What a `def` handler returned, and what has to be awaited before it means anything.

Whether a handler is asynchronous is looked up when it is registered, but a lambda or a decorator of
the application's own may call an `async def` function and return the coroutine. The call is made in
a worker thread, as the function may block until it returns; what it returned belongs on the event
loop, where everything is that it may want to wait with. The thread waits for it there, so that the
number of workers, middleware and time limits hold for both halves.

How a thread finds its loop: worker threads run handlers in a context that says so. Elsewhere, as in
a task of Spark, there is none, and the thread has a loop of its own for the time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from contextvars import ContextVar
from typing import Any, Final

from orbitmq.client.errors import NotRunning
from orbitmq.client.loopthread import LoopCall

#: How often a thread looks whether its loop is still there, and lets an interruption through.
_LOOK: Final = 0.1


def awaited(awaitable: Awaitable[object]) -> object:
    """What it comes to, on the loop of the consumer whose worker this thread is."""
    awaiting = AWAITING.get(None)
    coroutine = _coroutine(awaitable)
    return asyncio.run(coroutine) if awaiting is None else awaiting.wait_for(coroutine)


class Awaiting:
    """Has things awaited on one event loop, for threads that wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: set[LoopCall[object]] = set()
        self._is_over = False

    def wait_for(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """What it comes to; called by a thread. It is cancelled if the thread is interrupted.

        Raises `NotRunning` when the loop is closed, or this is over, before it comes to anything.
        """
        call: LoopCall[object] = LoopCall()
        self._calls.add(call)
        try:
            is_done = self._begin(call, coroutine) and self._wait(call)
        except BaseException:
            call.give_up()
            raise
        finally:
            self._calls.discard(call)
        if not is_done:
            with contextlib.suppress(RuntimeError, ValueError):
                coroutine.close()
            raise NotRunning("this consumer", was_stopped=True)
        return call.outcome()

    def _begin(self, call: LoopCall[object], coroutine: Coroutine[Any, Any, object]) -> bool:
        # Whoever ends this says so first and looks at the calls afterwards; here it is the reverse.
        if self._is_over:
            return False
        try:
            self._loop.call_soon_threadsafe(call.begin, self._loop, coroutine)
        except RuntimeError:
            return False
        return True

    def _wait(self, call: LoopCall[object]) -> bool:
        while not call.wait(_LOOK):
            if self._loop.is_closed():
                return False
        return True

    def end(self) -> bool:
        """Cancel what is awaited, and let nothing follow; on the loop. Whether there was any."""
        self._is_over = True
        calls = tuple(self._calls)
        for call in calls:
            call.give_up()
        return bool(calls)

    def has(self, task: asyncio.Task[Any]) -> bool:
        """Whether a task is one of those that are awaited."""
        return any(call.is_task(task) for call in tuple(self._calls))


#: Set where workers run handlers.
AWAITING: Final[ContextVar[Awaiting]] = ContextVar("orbitmq.awaiting")


def _coroutine(awaitable: Awaitable[object]) -> Coroutine[Any, Any, object]:
    if isinstance(awaitable, Coroutine):
        return awaitable

    async def wait() -> object:
        return await awaitable

    return wait()
