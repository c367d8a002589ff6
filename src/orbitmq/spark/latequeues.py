"""Where queues begin that a stream finds only after it has begun.

They are new, or their broker was away when the stream began; from here these look alike. Where the
stream began at a time, or at its group's progress, such a queue is begun there as well: that place
is the same whenever it is asked for. Otherwise it is read from its first message. For a stream that
began at the end, this may bring what was there before it; the end as it is now would leave out what
came to a new queue meanwhile, which is worse.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from orbitmq.client.queue import Queue
from orbitmq.client.rangecluster import Bounds, Found, RangeCluster
from orbitmq.clock import Clock
from orbitmq.spark.offsets import AtTimes, GroupProgress, Place

log = logging.getLogger(__name__)

#: How soon brokers that did not say where a queue begins are asked again, in seconds.
_AGAIN: Final = 1.0


class LateQueues:
    """Begins queues that come late. Brokers are asked only where the place is one to ask for."""

    def __init__(self, place: Place, cluster: RangeCluster, clock: Clock) -> None:
        self._place = place
        self._cluster = cluster
        self._monotonic = clock.monotonic
        self._not_before = float("-inf")
        self._unanswered: frozenset[Queue] = frozenset()

    def begins(self, bounds: Mapping[Queue, Bounds]) -> dict[Queue, int]:
        """Where queues with these bounds begin; without those whose brokers cannot say now."""
        match self._place:
            case AtTimes() as place if bounds:
                return self._at_times(place, bounds)
            case GroupProgress() if bounds:
                return self._at_progress(bounds)
            case _:
                return {queue: each.low for queue, each in bounds.items()}

    def _at_times(self, place: AtTimes, bounds: Mapping[Queue, Bounds]) -> dict[Queue, int]:
        times = {queue: place.times.get(queue, place.time) for queue in bounds}
        begins = {queue: bounds[queue].low for queue, time in times.items() if time is None}
        dated = {queue: time for queue, time in times.items() if time is not None}
        if self._may_ask():
            for queue, at in self._heard(self._cluster.at_times(dated, patient=False)).items():
                # The end was asked for before: all that it has up to there is older than the time.
                begins[queue] = bounds[queue].high if at is None else at
        return begins

    def _at_progress(self, bounds: Mapping[Queue, Bounds]) -> dict[Queue, int]:
        begins: dict[Queue, int] = {}
        if self._may_ask():
            for queue, at in self._heard(self._cluster.progress(bounds, patient=False)).items():
                low, high = bounds[queue].low, bounds[queue].high
                begins[queue] = low if at is None else at
                if begins[queue] > high:
                    log.warning(
                        "%s has %d to %d and is read from its beginning, though the group has "
                        "read it up to offset %d: it was made anew, or has lost its end",
                        *(queue, low, high, at),
                    )
                    begins[queue] = low
        return begins

    def _may_ask(self) -> bool:
        return self._monotonic() >= self._not_before

    def _heard(self, found: Found[int | None]) -> dict[Queue, int | None]:
        """What brokers said; those who did not are left alone for a while."""
        if found.failures:
            self._not_before = self._monotonic() + _AGAIN
        for queue in sorted(found.failures.keys() - self._unanswered):
            log.warning("where to begin %s is not known yet: %s", queue, found.failures[queue])
        self._unanswered = frozenset(found.failures)
        return found.values
