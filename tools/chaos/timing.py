"""What a history says about time: how long until things went on, and how long messages took."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from tools.chaos.history import Acked, Event, Fault, Invoked, Read, parse_value


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the end of a fault until the last of the producers, and of the readers, went on."""

    what: str
    stored: float
    read: float


def recoveries(events: Sequence[Event], groups: Iterable[str]) -> list[Recovery]:
    """One for every fault that was mended.

    Whoever had done something before has to do something again, unless he was killed; infinite when
    one did not. A message counts that was sent, or read, after the fault was over. Only the time
    counts in which nothing was wrong: the next fault may come before there is any message, and how
    long that lasts is not the system's doing; but who needs more than one pause between faults,
    needs them all.
    """
    calm = _Calm(events)
    producers, readers = _acknowledged_sends(events), _reads(events, frozenset(groups))
    deaths = {
        event.target: event.at
        for event in events
        if isinstance(event, Fault) and event.what == "kill" and not event.is_over
    }

    def slowest(workers: Mapping[str, Sequence[_Deed]], fault: Fault) -> float:
        longest = 0.0
        for name, deeds in workers.items():
            if deeds[0].done > fault.at:
                continue  # was not at work yet
            at = bisect.bisect_left(deeds, fault.at, key=lambda deed: deed.begun)
            again = deeds[at].done if at < len(deeds) else inf
            if again < deaths.get(name, inf):
                longest = max(longest, calm.between(fault.at, again))
            elif name not in deaths:
                return inf
        return longest

    return [
        Recovery(event.what, slowest(producers, event), slowest(readers, event))
        for event in events
        if isinstance(event, Fault) and event.is_over
    ]


class _Deed(NamedTuple):
    """Something that a worker began, and brought to its end."""

    begun: float
    done: float


def _acknowledged_sends(events: Sequence[Event]) -> dict[str, list[_Deed]]:
    """By producers, in the order of their beginnings."""
    invoked = {event.value: event.at for event in events if isinstance(event, Invoked)}
    found: dict[str, list[_Deed]] = defaultdict(list)
    for event in events:
        if isinstance(event, Acked) and event.value in invoked:
            found[parse_value(event.value).producer].append(_Deed(invoked[event.value], event.at))
    for deeds in found.values():
        deeds.sort()
    return found


def _reads(events: Sequence[Event], groups: AbstractSet[str]) -> dict[str, list[_Deed]]:
    """By readers, in the order of their times."""
    found: dict[str, list[_Deed]] = defaultdict(list)
    for event in events:
        if isinstance(event, Read) and event.group in groups:
            found[event.reader].append(_Deed(event.at, event.at))
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
