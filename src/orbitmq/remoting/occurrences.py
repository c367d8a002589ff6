"""Tells the events that are worth a line in the log from the many others that are like them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class Occurrences:
    """Counts what happens again and again, per who did it, so that logs are not flooded."""

    def __init__(self, *, every: int = 1000, remembered: int = 1024) -> None:
        self._every = every
        self._remembered = remembered
        self._counts: OrderedDict[str, int] = OrderedDict()

    def note(self, who: str) -> int:
        """The count of this occurrence when it is worth a line in the log (the first, then every
        thousandth), else 0."""
        count = self._counts.pop(who, 0) + 1
        self._counts[who] = count
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        return count if count == 1 or count % self._every == 0 else 0


class Reminders:
    """Tells of what goes on and on when it begins, and again from time to time."""

    def __init__(self, *, interval: float = 60.0, remembered: int = 1024) -> None:
        self._interval = interval
        self._remembered = remembered
        #: When each was last told of, and how often it happened since it began.
        self._told: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def note(self, what: Hashable, now: float) -> int:
        """How often it has happened if that is worth a line in the log, else 0."""
        told, count = self._told.pop(what, (float("-inf"), 0))
        count += 1
        is_due = now - told >= self._interval
        self._told[what] = (now if is_due else told, count)
        if len(self._told) > self._remembered:
            self._told.popitem(last=False)
        return count if is_due else 0

    def end(self, what: Hashable) -> None:
        """It is over: should it happen again, that is a new beginning."""
        if self._told:
            self._told.pop(what, None)
