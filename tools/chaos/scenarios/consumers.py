"""R6: members of a group that start, stop, die and stand still."""

from __future__ import annotations

from collections.abc import Sequence

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, drain, finish
from tools.chaos.figures import Figure, at_most, judged, none_of, repeated, told, tried
from tools.chaos.history import Event, Fault, Read, now
from tools.chaos.programs import Program, Stage, pass_time

_GROUP = "readers"
_CALLS = 8  #: of handlers at once, in one member
#: Progress is reported every 5 s; a report takes its time.
_UNREPORTED = 6.0


def consumer_chaos(stage: Stage, effort: Effort) -> list[Figure]:
    """First members come and go in order, then they die and stand still as well."""
    chance = effort.chance
    stage.broker("broker-a").start()
    create_topic(stage)
    producers = [stage.worker("produce", f"p{number}", rate=150) for number in range(2)]
    count = 8 if effort.seconds >= 60 else 4
    members = [_start(stage) for _ in range(count)]
    for worker in (*producers, *members):
        worker.until_written('"ready"')
    began, left = now(), 0
    for _ in range(effort.times(15.0)):
        leaving = members.pop(chance.randrange(len(members)))
        finish([leaving])
        left += 1
        members.append(_start(stage))
        members[-1].until_written('"ready"')
        pass_time(chance.uniform(0.2, 2.0))
    pass_time(1.0)
    orderly_until = now()
    longest = min(90.0, effort.seconds / 8)
    deadline = now() + effort.seconds / 2
    while now() < deadline:
        victim = members.pop(chance.randrange(len(members)))
        if chance.random() < 0.5:
            stage.kill(victim)
            members.append(_start(stage))
            members[-1].until_written('"ready"')
        else:
            stage.pause(victim)
            pass_time(chance.uniform(min(5.0, longest), longest))
            stage.resume(victim)
            members.append(victim)
        pass_time(chance.uniform(0.5, 2.0))
    troubled = now() - began
    finish(producers)
    took = drain(stage, (_GROUP,))
    finish(members)
    audit(stage)
    events = stage.events()
    analysis = analyse(events)
    in_order = [at for at in analysis.delivered_again_at if at < orderly_until]
    kills = sum(isinstance(event, Fault) and not event.is_over for event in events)
    return [
        tried("R6", "kills and stops of members", kills),
        tried("R6", "that left in order", left),
        tried("R6", "s with faults and pauses between them", troubled),
        *judged("R6", analysis),
        *repeated("R6", events, (_GROUP,)),
        at_most("R6", "drained after", took, 30, "s"),
        at_most("R6", "delivered again while members came and went in order", len(in_order), 0),
        at_most(
            "R6",
            "delivered again in all; bound: in flight and 5 s of progress at each kill",
            analysis.delivered_again,
            _bound(events),
        ),
        none_of("R6", "complaints in logs", stage.complaints()),
        told("R6", "members that read something", _readers(events)),
    ]


def _start(stage: Stage) -> Program:
    return stage.worker("consume", stage.fresh_name("c"), group=_GROUP, workers=_CALLS)


def _bound(events: Sequence[Event]) -> int:
    """What members may have done and not reported when they were killed or stopped."""
    faults = [
        (event.target, event.at)
        for event in events
        if isinstance(event, Fault)
        if not event.is_over
    ]
    reads = [event for event in events if isinstance(event, Read)]
    return sum(
        _CALLS + sum(read.reader == target and at - _UNREPORTED <= read.at <= at for read in reads)
        for target, at in faults
    )


def _readers(events: Sequence[Event]) -> int:
    """Readers of the group in a history."""
    return len({event.reader for event in events if isinstance(event, Read)} - {"audit"})
