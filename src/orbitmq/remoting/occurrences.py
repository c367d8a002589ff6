"""Tells the first of many like events from the others, so that logs are not flooded."""

from __future__ import annotations

from collections import OrderedDict


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
