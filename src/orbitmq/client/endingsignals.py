"""The signals that end a program, as an event: for programs that end in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

#: End a program that runs a consumer.
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM)


class EndingSignals:
    """Has an event set by the signals that end a program, instead of ending it.

    Signals are left alone when this is not the main thread.
    """

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDINGS:
                self._before[number] = signal.signal(number, self._end)
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
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ended.set()


class LoopEndingSignals:
    """The same for the running event loop. Left alone where a loop cannot have signals."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._handled: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDINGS:
                with contextlib.suppress(NotImplementedError, ValueError):
                    self._loop.add_signal_handler(number, self._ended.set)
                    self._handled.append(number)
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
        for number in self._handled:
            self._loop.remove_signal_handler(number)
        self._handled.clear()

    async def or_event(self, other: asyncio.Event) -> None:
        """Returns when a signal came, or the event was set."""
        waits = [asyncio.ensure_future(each.wait()) for each in (self._ended, other)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
