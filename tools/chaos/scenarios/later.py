"""R13: delayed messages across kill -9 of the broker."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, create_topic, drain, finish
from tools.chaos.figures import Figure, at_most, judged, none_of, told, tried
from tools.chaos.history import Acked, Event, Fault, Invoked, Read, now, parse_value
from tools.chaos.programs import Stage, pass_time, wait_until
from tools.chaos.timing import quantile

_GROUP = "readers"
_PRODUCERS = 2
_IN_FLIGHT = 64
#: Messages that were due while the broker was away, or was catching up, say nothing about timing:
#: what was delivered within 10 s before a kill comes again first.
_CATCHING_UP = 10.0
_CATCHING_UP_WITH_FEW = 3.0


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
    analysis = analyse(events)
    early, late = _punctuality(events, _CATCHING_UP_WITH_FEW if is_short else _CATCHING_UP)
    return [
        tried("R13", "delayed messages", analysis.acked, count // 2),
        *judged("R13", analysis),
        none_of("R13", "delivered too early", early),
        told("R13", "judged for their times", len(late)),
        at_most("R13", "latest, outages aside", max(late, default=0.0), 1.0, "s"),
        told("R13", "late p50", quantile(sorted(late), 0.5) * 1000, "ms"),
        told("R13", "delivered again after the kills", analysis.stored_twice),
        at_most("R13", "the last one came after", took, longest + 30, "s"),
        none_of("R13", "complaints in logs", stage.complaints()),
    ]


def _punctuality(events: Sequence[Event], catching_up: float) -> tuple[list[str], list[float]]:
    """Which came early, and how late the others were; by the machine's date, which is not set."""
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
    early, late = [], []
    for text, at in first.items():
        due = int(parse_value(text).key.partition("-")[2]) / 1000 - date
        # The date of the machine is adjusted by some milliseconds now and then.
        if at < due - 0.05:
            early.append(f"{text} came {due - at:.3f} s before its time")
        # A level counts from when the message was stored, at the latest from when that was told.
        due = max(due, due + acked.get(text, sent[text]) - sent[text])
        if not any(began - 1 <= due <= ended + catching_up for began, ended in outages):
            late.append(at - due)
    return early, late
