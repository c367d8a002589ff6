"""Judges a history, in the spirit of Jepsen's analysis of queues.

From the sends and the reads follows what must not be:

- *lost*: acknowledged, or read by another group, and never read, though later messages of its
  queue were;
- *unseen*: acknowledged, and never read, at the end of its queue: zero after a drain;
- *corrupt*: read, and not what anybody has sent;
- *aborted read*: read, though the broker had refused it, or nobody had sent it;
- *inconsistent offset*: one place with two values, whoever said so, acknowledgements included;
- *sent out of order*: of two messages with one key, the second sent after the acknowledgement of
  the first, the second stands before the first in their queue;
- *handled out of order* (groups that consume in order): a message was begun before an earlier one
  of its key was done;
- *skip* and *step back*: a reader that had a queue all the time left offsets out, or repeated some;
- *overlap*: two calls for one queue of a group that consumes in order were at work at the same
  time, in two members or in one.

Two things are counted and not condemned here, because at-least-once allows them within bounds that
a scenario knows: a value that is stored twice (the answer was lost and the producer tried again),
and a place that a group was given more than once.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools.chaos.history import (
    Acked,
    Assigned,
    Corrupt,
    Entered,
    Event,
    Fault,
    Invoked,
    Read,
    Refused,
    Unknown,
    parse_value,
)

Place = tuple[str, int]  #: queue and offset

#: Begins the names of queues that hold copies which the broker makes: retries, half messages.
_SYSTEM = "%"

SENT_OUT_OF_ORDER = "sent out of order"
HANDLED_OUT_OF_ORDER = "handled out of order"
SKIPPED = "skipped"
STEPPED_BACK = "stepped back"
OVERLAPS = "overlaps"
_ALWAYS = ("lost", "unseen", "corrupt", "aborted reads", "inconsistent offsets")


@dataclass(slots=True)
class Analysis:
    """What a history shows; every list holds sentences about one anomaly each."""

    invoked: int = 0
    acked: int = 0
    refused: int = 0
    unknown: int = 0
    reads: int = 0
    lost: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    inconsistent: list[str] = field(default_factory=list)
    sent_out_of_order: list[str] = field(default_factory=list)
    handled_out_of_order: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    stepped_back: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    #: Values that stand at more than one place.
    stored_twice: int = 0
    #: Reads of a place beyond the first, by the same group.
    delivered_again: int = 0
    #: Of those, the times.
    delivered_again_at: list[float] = field(default_factory=list)
    #: Calls that were caught by a SIGSTOP: they go on when others may have begun.
    caught_in_pause: int = 0

    #: What was looked for; an absence that nobody looked for says nothing.
    looked_for: set[str] = field(default_factory=lambda: set(_ALWAYS))

    @property
    def anomalies(self) -> dict[str, list[str]]:
        """Everything that must be empty, of what was looked for."""
        found = {
            "lost": self.lost,
            "unseen": self.unseen,
            "corrupt": self.corrupt,
            "aborted reads": self.aborted,
            "inconsistent offsets": self.inconsistent,
            SENT_OUT_OF_ORDER: self.sent_out_of_order,
            HANDLED_OUT_OF_ORDER: self.handled_out_of_order,
            SKIPPED: self.skipped,
            STEPPED_BACK: self.stepped_back,
            OVERLAPS: self.overlaps,
        }
        return {kind: those for kind, those in found.items() if kind in self.looked_for}

    @property
    def is_clean(self) -> bool:
        return not any(self.anomalies.values())


def analyse(
    events: Sequence[Event],
    *,
    groups: Iterable[str],
    ordered: Iterable[str] = (),
    contiguous: Iterable[str] = (),
) -> Analysis:
    """Judge a history.

    `groups` must each have read everything, also one of which no read is told; `ordered` are those
    that consume in order, `contiguous` those whose readers take one offset after the other.
    """
    found = Analysis()
    sends = _Sends(events, found)
    reads = [event for event in events if isinstance(event, Read)]
    found.reads = len(reads)
    found.corrupt.extend(
        f"{event.reader} got {event.queue} {event.offset}: {event.reason}"
        for event in events
        if isinstance(event, Corrupt)
    )
    places = _places(sends, reads, found)
    _judge_values(sends, reads, found)
    _judge_send_order(sends, places, found)
    unanswered = {value: its for value, its in places.items() if value not in sends.acked}
    for group in sorted(groups):
        its_reads = [read for read in reads if read.group == group]
        _judge_group(group, sends, unanswered, its_reads, found)
    for group in ordered:
        found.looked_for |= {HANDLED_OUT_OF_ORDER, OVERLAPS}
        _judge_ordered(group, sends, events, found)
    for group in contiguous:
        found.looked_for |= {SKIPPED, STEPPED_BACK}
        _judge_contiguity(group, events, found)
    return found


class _Sends:
    """The sends by their values."""

    def __init__(self, events: Sequence[Event], found: Analysis) -> None:
        self.invoked: dict[str, float] = {}
        self.acked: dict[str, Acked] = {}
        self.refused: set[str] = set()
        for event in events:
            if isinstance(event, Invoked):
                self.invoked.setdefault(event.value, event.at)
            elif isinstance(event, Acked):
                self.acked[event.value] = event
            elif isinstance(event, Refused):
                self.refused.add(event.value)
            elif isinstance(event, Unknown):
                found.unknown += 1
        found.invoked = len(self.invoked)
        found.acked = len(self.acked)
        found.refused = len(self.refused)
        # A producer that was killed has left sends without any outcome.
        found.unknown = found.invoked - found.acked - found.refused


def _places(sends: _Sends, reads: list[Read], found: Analysis) -> dict[str, list[Place]]:
    """Where every value stands, in order; a place with two values is told."""
    values: dict[Place, str] = {}
    places: dict[str, list[Place]] = defaultdict(list)
    told: set[Place] = set()
    claims = [(each.queue, each.offset, each.value) for each in sends.acked.values()]
    claims += [(each.queue, each.offset, each.value) for each in reads]
    for queue, offset, value in claims:
        place = (queue, offset)
        before = values.setdefault(place, value)
        if before == value:
            places[value].append(place)
        elif place not in told:
            told.add(place)
            found.inconsistent.append(f"{queue} {offset} is {before} and {value}")
    for value, its in places.items():
        own = sorted({place for place in its if not place[0].startswith(_SYSTEM)})
        places[value] = own
        found.stored_twice += len(own) > 1
    return places


def _judge_values(sends: _Sends, reads: list[Read], found: Analysis) -> None:
    for value in sorted({read.value for read in reads}):
        if value in sends.refused:
            found.aborted.append(f"{value} was refused, and read")
        elif value not in sends.invoked:
            found.aborted.append(f"{value} was read, and never sent")


def _judge_send_order(sends: _Sends, places: dict[str, list[Place]], found: Analysis) -> None:
    by_key: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for text in sends.acked:
        value = parse_value(text)
        by_key[value.producer, value.key].append((value.sequence, text))
    for sent in by_key.values():
        sent.sort()
        for (_, first), (_, second) in itertools.pairwise(sent):
            if sends.acked[first].at > sends.invoked[second]:
                continue  # both were on their way at the same time
            if not (places[first] and places[second]):
                continue  # told as inconsistent
            found.looked_for.add(SENT_OUT_OF_ORDER)
            before, after = places[first][0], places[second][0]
            if before[0] == after[0] and before > after:
                found.sent_out_of_order.append(
                    f"{second} stands at {after}, before {first} at {before}"
                )


def _judge_group(
    group: str,
    sends: _Sends,
    unanswered: dict[str, list[Place]],
    reads: list[Read],
    found: Analysis,
) -> None:
    """Every group has whatever was acknowledged, and of what it passed whatever another one has.

    `unanswered` are the values that somebody has read though nobody was told that they are stored.
    At the end of a queue such a one may be missing: nobody waited until all groups had it.
    """
    times: dict[Place, int] = defaultdict(int)
    highest: dict[str, int] = defaultdict(lambda: -1)
    seen: set[str] = set()
    for read in reads:
        place = (read.queue, read.offset)
        times[place] += 1
        if times[place] > 1:
            found.delivered_again += 1
            found.delivered_again_at.append(read.at)
        highest[read.queue] = max(highest[read.queue], read.offset)
        seen.add(read.value)
    for value, acked in sends.acked.items():
        if value in seen:
            continue
        where = f"{value} at {acked.queue} {acked.offset} was not read by {group}"
        is_passed = acked.offset < highest[acked.queue]
        (found.lost if is_passed else found.unseen).append(where)
    for value, its in unanswered.items():
        if value in seen or value in sends.refused or value not in sends.invoked:
            continue
        if all(offset < highest[queue] for queue, offset in its) and its:
            found.lost.append(f"{value} at {its[0][0]} {its[0][1]} was passed over by {group}")


@dataclass(frozen=True, slots=True)
class _Call:
    """A handler at work."""

    began: float
    ended: float
    reader: str
    offset: int
    value: str


def _judge_ordered(group: str, sends: _Sends, events: Sequence[Event], found: Analysis) -> None:
    calls = _calls(group, events)
    pauses = _pauses(events)
    for queue, its in calls.items():
        its.sort(key=lambda call: call.began)
        _judge_overlaps(queue, its, pauses, found)
    _judge_handling(calls, sends, found)


def _calls(group: str, events: Sequence[Event]) -> dict[str, list[_Call]]:
    """Every call of a handler by queue; one that was cut off ended with its process."""
    ends: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    deaths = {
        event.target: event.at
        for event in events
        if isinstance(event, Fault) and event.what == "kill" and not event.is_over
    }
    for event in events:
        if isinstance(event, Read) and event.group == group:
            ends[event.reader, event.queue, event.offset].append(event.at)
    calls: dict[str, list[_Call]] = defaultdict(list)
    for event in events:
        if isinstance(event, Entered) and event.group == group:
            after = ends[event.reader, event.queue, event.offset]
            at = bisect.bisect_left(after, event.at)
            ended = after[at] if at < len(after) else deaths.get(event.reader, float("inf"))
            calls[event.queue].append(
                _Call(event.at, ended, event.reader, event.offset, event.value)
            )
    return calls


def _pauses(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """When each process was stopped."""
    began: dict[str, float] = {}
    pauses: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if isinstance(event, Fault) and event.what == "pause":
            if not event.is_over:
                began[event.target] = event.at
            elif event.target in began:
                pauses[event.target].append((began.pop(event.target), event.at))
    return pauses


def _judge_overlaps(
    queue: str,
    calls: list[_Call],
    pauses: dict[str, list[tuple[float, float]]],
    found: Analysis,
) -> None:
    """Calls in the order of their beginnings; only the one that ends last can be overlapped."""
    last: _Call | None = None
    for call in calls:
        caught = any(
            call.began <= end and begin <= call.ended for begin, end in pauses.get(call.reader, ())
        )
        if caught:
            # Nothing but a fencing token at the far side could stop a call that was begun in time.
            found.caught_in_pause += 1
            continue
        if last is not None and call.began < last.ended:
            found.overlaps.append(
                f"{queue}: {call.reader} began {call.offset} while {last.reader} had {last.offset}"
            )
        if last is None or call.ended > last.ended:
            last = call


def _judge_handling(calls: dict[str, list[_Call]], sends: _Sends, found: Analysis) -> None:
    """Nobody begins a message before the earlier ones of its key were done once."""
    for queue, its in calls.items():
        by_key: dict[tuple[str, str], list[_Call]] = defaultdict(list)
        for call in its:
            if call.value in sends.acked and sends.acked[call.value].queue == queue:
                value = parse_value(call.value)
                by_key[value.producer, value.key].append(call)
        for same_key in by_key.values():
            _judge_key(queue, same_key, found)


def _judge_key(queue: str, calls: list[_Call], found: Analysis) -> None:
    first_began: dict[int, float] = {}
    first_ended: dict[int, float] = {}
    for call in calls:
        first_began[call.offset] = min(call.began, first_began.get(call.offset, call.began))
        first_ended[call.offset] = min(call.ended, first_ended.get(call.offset, call.ended))
    offsets = sorted(first_began)
    for before, after in itertools.pairwise(offsets):
        if first_began[after] < first_ended[before]:
            found.handled_out_of_order.append(
                f"{queue}: {after} was begun before {before} was done"
            )


def _judge_contiguity(group: str, events: Sequence[Event], found: Analysis) -> None:
    """A reader that keeps a queue takes one offset after the other."""
    expected: dict[tuple[str, str], int] = {}
    owned: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if isinstance(event, Assigned) and event.group == group:
            for queue in owned[event.reader] ^ set(event.queues):
                expected.pop((event.reader, queue), None)
            owned[event.reader] = set(event.queues)
        elif isinstance(event, Read) and event.group == group:
            reader, offset = (event.reader, event.queue), event.offset
            wanted = expected.get(reader, offset)
            if offset > wanted:
                found.skipped.append(f"{event.reader} went from {wanted} to {offset} {event.queue}")
            elif offset < wanted:
                found.stepped_back.append(
                    f"{event.reader} went back from {wanted} to {offset} of {event.queue}"
                )
            expected[reader] = offset + 1
