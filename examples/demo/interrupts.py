"""Ctrl-C and SIGTERM, which end the demo in order whenever they come.

Nothing is cut off by them: they are noted, and whoever waits looks whether one came. What is noted
is a plain attribute, because a handler runs in the midst of whatever the main thread does: a lock
that it wanted to take might be one that the same thread holds.

Who asks a third time does not want to wait for the end in order: something hangs, and the signal
does what it always does.
"""

from __future__ import annotations

import signal

_TAKEN = (signal.SIGINT, signal.SIGTERM)
_PATIENT = 2


class Interrupts:
    """Whether somebody wants the demo to end."""

    def __init__(self) -> None:
        self.came = False
        self._count = 0

    def take(self) -> None:
        """From now on they are noted."""
        for number in _TAKEN:
            signal.signal(number, self._note)

    def ignore(self) -> None:
        """From now on there is nothing left to end, but for the interpreter itself."""
        for number in _TAKEN:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, _: object) -> None:
        self.came = True
        self._count += 1
        if self._count > _PATIENT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
