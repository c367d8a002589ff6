"""Keeps repeated events from flooding a log."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable

#: During an outage, one line for this many repetitions.
_EVERY = 1000


class LogEveryNth:
    """Counts repeated events by source; the first and every n-th of a source are worth a line."""

    def __init__(self, *, every: int = 1000, remembered: int = 1024) -> None:
        self._every = every
        self._remembered = remembered
        self._counts: OrderedDict[str, int] = OrderedDict()

    def note(self, source: str) -> int:
        """The count of the source's events when this one is worth a line, else 0."""
        count = self._counts.pop(source, 0) + 1
        self._counts[source] = count
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        return count if count == 1 or count % self._every == 0 else 0


class LogAtIntervals:
    """Counts lasting conditions; the first note of one and one per interval are worth a line."""

    def __init__(self, *, interval: float = 60.0, remembered: int = 1024) -> None:
        self._interval = interval
        self._remembered = remembered
        #: When each was last logged, and its count since it began.
        self._logged: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def note(self, condition: Hashable, now: float) -> int:
        """The count of the condition when it is worth a line, else 0."""
        logged, count = self._logged.pop(condition, (float("-inf"), 0))
        count += 1
        is_due = now - logged >= self._interval
        self._logged[condition] = (now if is_due else logged, count)
        if len(self._logged) > self._remembered:
            self._logged.popitem(last=False)
        return count if is_due else 0

    def end(self, condition: Hashable) -> None:
        """The condition is over; its next note starts a new count."""
        if self._logged:
            self._logged.pop(condition, None)


class LogOncePerOutage:
    """Logs an outage when it begins, every thousandth time while it lasts, and at its end.

    While it lasts, `current` has its text, so that a program can show why nothing arrives.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: dict[Hashable, int] = {}
        self._texts: dict[Hashable, str] = {}

    def failed(
        self, subject: Hashable, text: str, *values: object, level: int = logging.WARNING
    ) -> None:
        """The subject has failed, for the first time or again."""
        count = self._counts[subject] = self._counts.get(subject, 0) + 1
        self._texts[subject] = text % values
        if count == 1:
            self._log.log(level, text, *values)
        elif count % _EVERY == 0:
            self._log.log(level, text + " (%d times)", *values, count)

    def recovered(self, subject: Hashable) -> None:
        """The subject works, or works again."""
        count = self._counts.pop(subject, 0)
        if count:
            del self._texts[subject]
            self._log.info("trouble with %s is over after %d times", subject, count)

    def forget(self, subject: Hashable) -> None:
        """The subject is no longer used; its outage ends without a line."""
        self._counts.pop(subject, None)
        self._texts.pop(subject, None)

    def is_failing(self, subject: Hashable) -> bool:
        return subject in self._counts

    def current(self) -> tuple[str, ...]:
        """The outages of now, a sentence each."""
        return tuple(self._texts.values())
