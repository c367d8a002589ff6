"""What a history says about time: how long until things went on, and how long messages took."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from tools.chaos.history import Acked, Event, Fault, Invoked, Read


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the end of a fault to the first message that was stored, and that was read."""

    what: str
    stored: float
    read: float


def recoveries(events: Sequence[Event], group: str | None = None) -> list[Recovery]:
    """One for every fault that was mended while producers and consumers went on.

    A message counts that was sent, or read, after the fault was over. Only the time counts in which
    nothing was wrong: the next fault may come before there is any message, and how long that lasts
    is not the system's doing; but who needs more than one pause between faults, needs them all.
    """
    calm = _Calm(events)
    invoked = {event.value: event.at for event in events if isinstance(event, Invoked)}
    acks = sorted(
        (invoked[event.value], event.at)
        for event in events
        if isinstance(event, Acked) and event.value in invoked
    )
    reads = sorted(
        event.at
        for event in events
        if isinstance(event, Read) and (group is None or event.group == group)
    )
    starts = [began for began, _ in acks]
    found = []
    for event in events:
        if not isinstance(event, Fault) or not event.is_over:
            continue
        later = acks[bisect.bisect_left(starts, event.at) :]
        read_at = bisect.bisect_left(reads, event.at)
        if later and read_at < len(reads):
            stored = min(at for _, at in later[:1000])
            found.append(
                Recovery(
                    event.what,
                    calm.between(event.at, stored),
                    calm.between(event.at, reads[read_at]),
                )
            )
    return found


class _Calm:
    """A clock that stands still from the beginning of a fault to its end."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._faults: list[tuple[float, float]] = []
        begun: dict[tuple[str, str], float] = {}
        for event in events:
            if not isinstance(event, Fault):
                continue
            fault = (event.what, event.target)
            if not event.is_over:
                begun[fault] = event.at
            elif fault in begun:
                self._add(begun.pop(fault), event.at)

    def _add(self, begin: float, end: float) -> None:
        """In the order of their ends; those that overlap become one."""
        while self._faults and self._faults[-1][1] >= begin:
            begin = min(begin, self._faults.pop()[0])
        self._faults.append((begin, end))

    def between(self, since: float, until: float) -> float:
        """Seconds in which nothing was wrong."""
        disturbed = (min(until, end) - max(since, begin) for begin, end in self._faults)
        return until - since - sum(each for each in disturbed if each > 0)


def latencies(events: Sequence[Event], group: str) -> list[float]:
    """From the call of `send` to the end of the first handler, in order of size."""
    invoked = {event.value: event.at for event in events if isinstance(event, Invoked)}
    taken: dict[str, float] = {}
    for event in events:
        if isinstance(event, Read) and event.group == group and event.value in invoked:
            taken.setdefault(event.value, event.at - invoked[event.value])
    return sorted(taken.values())


def send_times(events: Sequence[Event], since: float, until: float) -> list[float]:
    """How long acknowledged sends took that were called within a time, in order of size."""
    invoked = {event.value: event.at for event in events if isinstance(event, Invoked)}
    return sorted(
        event.at - invoked[event.value]
        for event in events
        if isinstance(event, Acked) and since <= invoked.get(event.value, -1.0) < until
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the others lie; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
