"""R13: delayed messages across kill -9 of the broker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, create_topic, drain, finish
from tools.chaos.figures import Figure, at_least, at_most, judged, none_of, told, tried
from tools.chaos.history import Acked, Event, Fault, Invoked, Read, now, parse_value
from tools.chaos.programs import Stage, pass_time, wait_until
from tools.chaos.timing import quantile

_GROUP = "readers"
_PRODUCERS = 2
_IN_FLIGHT = 64
#: Messages that were due while the broker was away, or was catching up, are judged apart: what was
#: delivered within 10 s before a kill comes again first.
_CATCHING_UP = 10.0
_CATCHING_UP_WITH_FEW = 3.0
#: Of all messages, that were due when nothing was wrong: with fewer, their times say little.
_LEAST_JUDGED = 0.1


def delayed(stage: Stage, effort: Effort) -> list[Figure]:
    """Levels and free times mixed; the broker dies twice while they wait."""
    broker = stage.broker("broker-a", "broker.store.flush.policy=sync")
    broker.start()
    create_topic(stage, queues=8)
    is_short = effort.seconds < 60
    rate = 100 if is_short else 1700
    count = min(110_000, int(rate * effort.seconds * 0.6))
    longest = max(5.0, min(60.0, effort.seconds / 2))
    reader = stage.worker("consume", "c1", group=_GROUP, work=0.0)
    producers = [
        stage.worker(
            "produce-later",
            f"p{number}",
            rate=rate / _PRODUCERS,
            in_flight=_IN_FLIGHT,
            count=count // _PRODUCERS,
            seed=effort.seed + number,
            delay_from=0.5,
            delay_to=longest,
            levels=(1, 2) if is_short else (1, 2, 3, 4),
        )
        for number in range(_PRODUCERS)
    ]
    for worker in (reader, *producers):
        worker.until_written('"ready"')
    for _ in range(2):
        pass_time(effort.seconds * 0.3)
        broker.kill()
        broker.restart()
    wait_until(
        lambda: not any(producer.is_alive for producer in producers),
        "all are sent",
        10 * effort.seconds + 60,
    )
    took = drain(stage, (_GROUP,), deadline=longest + 60)
    finish([reader])
    events = stage.events()
    analysis = analyse(events, groups=(_GROUP,))
    times = punctuality(events, _CATCHING_UP_WITH_FEW if is_short else _CATCHING_UP)
    late = sorted(times.late)
    return [
        tried("R13", "delayed messages", analysis.acked, count // 2),
        *judged("R13", analysis),
        none_of("R13", "delivered too early", times.early),
        at_least("R13", "due while the broker ran", len(late), times.count * _LEAST_JUDGED),
        at_most("R13", "latest of these", max(late, default=inf), 1.0, "s"),
        told("R13", "late p50 of these", quantile(late, 0.5) * 1000, "ms"),
        told("R13", "due in an outage, or while the broker caught up", len(times.behind)),
        told("R13", "latest of these, from then or its return", max(times.behind, default=0), "s"),
        told("R13", "delivered again after the kills", analysis.stored_twice),
        at_most("R13", "the last one came after", took, longest + 30, "s"),
        none_of("R13", "complaints in logs", stage.complaints()),
    ]


@dataclass(slots=True)
class Punctuality:
    """When delayed messages came, each for the first time."""

    early: list[str] = field(default_factory=list)  #: sentences about those before their time
    late: list[float] = field(default_factory=list)  #: seconds, of those due while all went well
    #: Seconds of those due in an outage or soon after it, from then or, if later, its end.
    behind: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.late) + len(self.behind)


def punctuality(events: Sequence[Event], catching_up: float) -> Punctuality:
    """By the machine's date, which nobody sets."""
    date = time.time() - now()
    sent = {event.value: event.at for event in events if isinstance(event, Invoked)}
    acked = {event.value: event.at for event in events if isinstance(event, Acked)}
    outages: list[list[float]] = []
    for event in events:
        if isinstance(event, Fault) and event.what == "kill broker":
            if event.is_over:
                outages[-1][1] = event.at
            else:
                outages.append([event.at, float("inf")])
    first: dict[str, float] = {}
    for event in events:
        if isinstance(event, Read) and event.value in sent:
            first.setdefault(event.value, event.at)
    found = Punctuality()
    for text, at in first.items():
        due = int(parse_value(text).key.partition("-")[2]) / 1000 - date
        # The date of the machine is adjusted by some milliseconds now and then.
        if at < due - 0.05:
            found.early.append(f"{text} came {due - at:.3f} s before its time")
        # A level counts from when the message was stored, at the latest from when that was told.
        due = max(due, due + acked.get(text, sent[text]) - sent[text])
        near = [end for began, end in outages if began - 1 <= due <= end + catching_up]
        if near:
            found.behind.append(at - max(due, near[-1]))
        else:
            found.late.append(at - due)
    return found
