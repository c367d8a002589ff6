"""Lag of single queues over time, for heat maps: only of groups that are behind.

One queue that stands still among sixteen that move is invisible in a sum and plain in a picture.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orbitmq.client.queue import Queue
from orbitmq.console.tables import Places

#: Seconds that a column stands for, and how many there are: an hour.
COLUMN = 30.0
COLUMNS = 120
#: Groups that are followed at the same time; those with the largest lag.
MOST_GROUPS = 300
MOST_QUEUES = 256


@dataclass(frozen=True, slots=True)
class Column:
    """The lag of each queue at one time."""

    at: float
    lags: dict[Queue, int]


class HeatMaps:
    """One map for each group that is, or lately was, behind."""

    def __init__(self) -> None:
        self._maps: dict[str, deque[Column]] = {}
        self._last = 0.0

    def add(self, at: float, places: Places) -> None:
        """A sample; samples of one column replace each other."""
        begins = at - self._last >= COLUMN
        if begins:
            self._last = at
            self._forget(at)
        lags = {
            group: {queue: place.lag for queue, place in queues.items()}
            for group, queues in places.items()
        }
        behind = sorted(((sum(each.values()), group) for group, each in lags.items()), reverse=True)
        wanted = {group for lag, group in behind[:MOST_GROUPS] if lag} | self._maps.keys()
        for group in wanted & lags.keys():
            column = Column(self._last or at, dict(list(lags[group].items())[:MOST_QUEUES]))
            columns = self._maps.setdefault(group, deque(maxlen=COLUMNS))
            if columns and columns[-1].at == column.at:
                columns[-1] = column
            else:
                columns.append(column)

    def of(self, group: str) -> list[Column]:
        """The columns of a group, the oldest first."""
        return list(self._maps.get(group, ()))

    def _forget(self, at: float) -> None:
        """Groups that were not behind at any time of the hour are left alone."""
        for group, columns in list(self._maps.items()):
            is_old = columns[-1].at < at - COLUMN * COLUMNS
            if is_old or not any(any(column.lags.values()) for column in columns):
                del self._maps[group]
