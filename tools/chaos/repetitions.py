"""Whether what came twice had a reason: at-least-once allows repetitions because of faults, only.

A group is given a message again when a fault took away what was known of its progress: progress is
reported every five seconds, and saved every five, while nothing is wrong. So whatever a group had
done before such a time comes no more, however much it was, and none comes long after everything was
well again. A count with a bound would not see a group that begins again from the start: few faults
allow many.

A message stands at two places when the answer to its first sending was lost, or came too late. So
its sending met with a fault, or took longer than its producer waits before it tries again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from tools.chaos.history import Acked, Event, Fault, Invoked, Read

#: Progress is reported every 5 s and saved every 5 s; both take a moment.
UNSAVED = 11.0
#: After a fault, until everybody is where the others expect him, on a busy machine.
SETTLING = 15.0
#: What a send may take beyond the fault that it met with.
_RETRYING = 5.0
#: Changes no progress, loses no answer.
_HARMLESS = frozenset({"clock jump"})

Place = tuple[str, int]  #: queue and offset


def unexplained_deliveries(
    events: Sequence[Event], groups: Iterable[str], settling: float = SETTLING
) -> list[str]:
    """Sentences about messages that a group was given again without a reason."""
    outages = _outages(events)
    calm = _calm_times(outages)
    wanted = frozenset(groups)
    last: dict[tuple[str, Place], float] = {}
    found = []
    for event in events:
        if not isinstance(event, Read) or event.group not in wanted:
            continue
        place = (event.group, (event.queue, event.offset))
        before = last.get(place)
        last[place] = event.at
        if before is not None and not any(
            each.began <= event.at <= each.ended + settling
            and not _is_saved(before, each.began, calm)
            for each in outages
        ):
            found.append(
                f"{event.group} was given {event.queue} {event.offset} again, "
                f"{event.at - before:.1f} s later"
            )
    return found


def unexplained_copies(events: Sequence[Event], patience: float = inf) -> list[str]:
    """Sentences about messages that are stored twice though nothing happened to their sending.

    `patience` is how long producers wait for an answer before they try again.
    """
    outages = _outages(events)
    invoked: dict[str, float] = {}
    acked: dict[str, float] = {}
    places: dict[str, set[Place]] = defaultdict(set)
    for event in events:
        if isinstance(event, Invoked):
            invoked.setdefault(event.value, event.at)
        elif isinstance(event, Acked):
            acked[event.value] = event.at
            places[event.value].add((event.queue, event.offset))
        elif isinstance(event, Read) and not event.queue.startswith("%"):
            places[event.value].add((event.queue, event.offset))
    return [
        f"{value} stands at {sorted(its)}"
        for value, its in places.items()
        if len(its) > 1 and value in acked and value in invoked
        if acked[value] - invoked[value] < patience
        if not any(each.met_by(invoked[value], acked[value]) for each in outages)
    ]


@dataclass(frozen=True, slots=True)
class _Outage:
    """A fault from its beginning to its end."""

    began: float
    ended: float

    def met_by(self, invoked: float, acked: float) -> bool:
        return invoked <= self.ended + _RETRYING and self.began <= acked


def _outages(events: Sequence[Event]) -> list[_Outage]:
    """Every fault; one whose end nobody told, like a kill of a worker, was over at once."""
    open_since: dict[tuple[str, str], float] = {}
    found: list[_Outage] = []
    for event in events:
        if not isinstance(event, Fault) or event.what in _HARMLESS:
            continue
        fault = (event.what, event.target)
        if event.is_over and fault in open_since:
            found.append(_Outage(open_since.pop(fault), event.at))
        elif not event.is_over:
            if fault in open_since:
                found.append(_Outage(open_since[fault], open_since[fault]))
            open_since[fault] = event.at
    found += [_Outage(began, began) for began in open_since.values()]
    return found


def _calm_times(outages: Sequence[_Outage]) -> list[tuple[float, float]]:
    """From the end of everything that was wrong to the beginning of what went wrong next."""
    found = []
    well_since = float("-inf")
    for outage in sorted(outages, key=lambda each: each.began):
        if outage.began - well_since >= UNSAVED:
            found.append((well_since, outage.began))
        well_since = max(well_since, outage.ended)
    return found


def _is_saved(done: float, fault: float, calm: Sequence[tuple[float, float]]) -> bool:
    """Whether there was a time without faults, long enough, from when it was done to a fault."""
    return any(min(end, fault) - max(since, done) >= UNSAVED for since, end in calm)
