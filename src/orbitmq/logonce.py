"""Tells the events that are worth a line in the log from the many others that are like them."""

from __future__ import annotations

import logging
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


# Trouble that lasts is one event: told when it begins, now and then, and when it is over.
#
# In between it can be asked for: a program that looks at its consumer sees why it gets nothing.


#: While a spell lasts, every so many times it is told again.
_EVERY = 1000


class Spells:
    """Spells of trouble, each known by what it is about."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._times: dict[Hashable, int] = {}
        self._texts: dict[Hashable, str] = {}

    def trouble(
        self, about: Hashable, text: str, *values: object, level: int = logging.WARNING
    ) -> None:
        """It is there, or still there."""
        times = self._times[about] = self._times.get(about, 0) + 1
        self._texts[about] = text % values
        if times == 1:
            self._log.log(level, text, *values)
        elif times % _EVERY == 0:
            self._log.log(level, text + " (%d times)", *values, times)

    def over(self, about: Hashable) -> None:
        """All is well."""
        times = self._times.pop(about, 0)
        if times:
            del self._texts[about]
            self._log.info("trouble with %s is over after %d times", about, times)

    def forget(self, about: Hashable) -> None:
        """Nobody is concerned by it any more."""
        self._times.pop(about, None)
        self._texts.pop(about, None)

    def is_in_trouble(self, about: Hashable) -> bool:
        return about in self._times

    def standing(self) -> tuple[str, ...]:
        """What is wrong now, a sentence each."""
        return tuple(self._texts.values())
