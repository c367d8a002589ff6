"""Which brokers are better left alone for a while.

A broker that failed is avoided for ten seconds; one that was slow, for as long as the table says.
To be avoided means that others are preferred, never that nothing is sent: when all of them are
avoided, all are used. One good answer ends it, and so does a new connection to the broker.

Java has the whole of it behind one switch that is off by default (`sendLatencyEnable`). Failures
are told apart here: a broker that refuses connections is bad by any measure, while a slow answer
may be nothing but a long queue of our own sends, and shifting all of them to another broker would
slow down that one next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: From this many seconds of latency on, a broker is avoided for so many seconds.
AVOID_SLOW: Final = (
    (15.0, 30.0),
    (5.0, 10.0),
    (3.0, 6.0),
    (1.8, 5.0),
    (0.55, 2.0),
)
#: A failure counts like an answer after ten seconds.
AVOID_FAILED: Final = 10.0


def avoided_for(latency: float) -> float:
    """Seconds for which a broker that took so long to answer is avoided."""
    for least, pause in AVOID_SLOW:
        if latency >= least:
            return pause
    return 0.0


class Faults:
    """Until when which broker is avoided. May be used by several threads at a time."""

    __slots__ = ("_avoid_failed", "_monotonic", "avoid_slow", "avoided")

    def __init__(
        self, monotonic: Callable[[], float], *, avoid_failed: bool, avoid_slow: bool
    ) -> None:
        self._monotonic = monotonic
        self._avoid_failed = avoid_failed
        #: Whether it matters how long an answer took.
        self.avoid_slow = avoid_slow
        #: Until when a broker is avoided, or was. Empty as a rule: every send looks at it.
        self.avoided: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no broker is avoided, or might be."""
        return not self.avoided

    def is_available(self, broker: str) -> bool:
        until = self.avoided.get(broker)
        return until is None or self._monotonic() >= until

    def answered(self, broker: str, latency: float) -> None:
        """A broker did what it was asked."""
        if self.avoid_slow and (pause := avoided_for(latency)):
            self.avoided[broker] = self._monotonic() + pause
        elif self.avoided:
            self.forgive(broker)

    def failed(self, broker: str) -> None:
        """A broker could not be reached, did not answer in time, or could not store."""
        if self._avoid_failed or self.avoid_slow:
            self.avoided[broker] = self._monotonic() + AVOID_FAILED

    def forgive(self, broker: str) -> None:
        """A broker is as good as any other again."""
        self.avoided.pop(broker, None)
