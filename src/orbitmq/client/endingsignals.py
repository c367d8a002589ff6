"""The signals that end a program, as an event: for programs that end in order."""

from __future__ import annotations

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
