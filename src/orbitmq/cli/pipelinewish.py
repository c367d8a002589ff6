"""Ctrl-C at `orbitmq pipeline run`: the first one lets the batch end, the second one does not."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from orbitmq.client.endingsignals import Latch
from orbitmq.clock import Clock, SystemClock

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
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
