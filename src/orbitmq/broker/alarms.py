"""Alarms: work that comes when it is due, not when somebody happens to look.

The work itself is a *step*: a function that is given the time, does a bounded part of what is due
then, and says when it wants to be called again. It knows nothing of loops, so a test steps through
hours of virtual time in milliseconds. An alarm calls the step at the time it asked for.

The time of day may be set, forwards or back, and then an alarm that was set before rings at the
wrong moment. So it rings at least every `IDLE` seconds and asks again; a step that has nothing to
do is a comparison.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias

from orbitmq.clock import Clock

log = logging.getLogger(__name__)

#: Given the time of day, does what is due; when there will be more, None when that is not known.
Step: TypeAlias = Callable[[float], float | None]

#: The longest time between two looks.
IDLE = 1.0
#: How long a step that failed is left alone.
AFTER_FAILURE = 1.0
#: A timer of the loop may ring this much early.
_ROUNDING = 0.0005


class Alarm:
    """Calls one step at the right times, between `begin` and `end`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, step: Step, *, idle: float = IDLE
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._step = step
        self._idle = idle
        self._timer: asyncio.Handle | None = None
        self._is_running = False
        self._is_soon = False

    def begin(self) -> None:
        self._is_running = True
        self.soon()

    def end(self) -> None:
        self._is_running = False
        self._set(None)

    def soon(self) -> None:
        """Look in the next step of the loop, whatever was asked for."""
        if self._is_running and not self._is_soon:
            self._is_soon = True
            self._set(self._loop.call_soon(self._ring))

    def _ring(self) -> None:
        self._is_soon = False
        self._timer = None
        now = self._clock.now()
        try:
            again = self._step(now)
        except Exception:
            log.exception("work that was due failed; it is tried again in %g s", AFTER_FAILURE)
            again = now + AFTER_FAILURE
        if self._is_soon or not self._is_running:
            return
        if again is None:
            self._set(self._loop.call_later(self._idle, self._ring))
        elif again <= now:
            self.soon()
        else:
            wait = min(again - self._clock.now() + _ROUNDING, self._idle)
            self._set(self._loop.call_later(max(wait, 0.0), self._ring))

    def _set(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


def nobody() -> None:
    """Stands for whoever wakes an alarm, before there is one."""
