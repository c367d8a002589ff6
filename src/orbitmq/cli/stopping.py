"""Ctrl-C and SIGTERM as a wish, for commands that finish what they are at."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

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
