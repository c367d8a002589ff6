"""Ctrl-C and SIGTERM, which end the demo within five seconds, whenever they come.

They are noted, and whoever waits looks whether one came, so that the demo ends in order and shows
how far it came. What is noted is a plain attribute, because a handler runs in the midst of whatever
the main thread does: a lock that it wanted to take might be one that the same thread holds. A
thread that was started before waits beside it: it says what happens, and ends the process when the
end in order takes too long, as on a busy machine. A second signal ends it immediately.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_TAKEN = (signal.SIGINT, signal.SIGTERM)
#: Seconds from the first signal until the process ends in any case.
LIMIT = 4.0
#: Seconds of them for orders that are still on their way.
GRACE = 1.5
_BEAT = 0.05


class Interrupts:
    """Whether somebody wants the demo to end."""

    def __init__(self) -> None:
        #: When the first signal came, by the monotonic clock.
        self.at: float | None = None
        #: What the demo is about, for a sentence.
        self.doing = "starting"
        #: Whether orders were sent.
        self.has_orders = False
        #: Called before the process is ended hard.
        self.at_hard_end: Callable[[], None] = lambda: None
        self._count = 0

    @property
    def came(self) -> bool:
        return self.at is not None

    @property
    def is_grace_over(self) -> bool:
        """Whether orders on their way are waited for no longer."""
        return self.at is not None and time.monotonic() > self.at + GRACE

    def left(self) -> float:
        """Seconds until the process is ended, with some to spare."""
        return 0.0 if self.at is None else max(0.0, self.at + LIMIT - 1.0 - time.monotonic())

    def take(self) -> None:
        """From now on they are noted."""
        for number in _TAKEN:
            signal.signal(number, self._note)
        threading.Thread(target=self._guard, name="demo end", daemon=True).start()

    def ignore(self) -> None:
        """From now on there is nothing left to end, but for the interpreter itself."""
        for number in _TAKEN:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, _: object) -> None:
        if self.at is None:
            self.at = time.monotonic()
        self._count += 1

    def _guard(self) -> None:
        while self.at is None:
            time.sleep(_BEAT)
        self._say(f"\nStopping: {self.doing}. It ends within five seconds.")
        while self._count < 2 and time.monotonic() < self.at + LIMIT:
            time.sleep(_BEAT)
        if self.has_orders:
            self._say(f"Ended in the midst of it ({self.doing}), because it took too long.")
        else:
            self._say("Stopped early: nothing was sent, so there is nothing to sum up.")
        try:
            self.at_hard_end()
        finally:
            os._exit(130 if self.has_orders else 0)

    @staticmethod
    def _say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
