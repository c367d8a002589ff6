"""R6: members of a group that start, stop, die and stand still.

Some stand still for so long that others are given their queues. Before the first of these faults
comes a time in which progress is reported: of a member that dies after it, no more comes again than
what it did since, and that is less than what it did in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, drain, finish
from tools.chaos.figures import Figure, at_least, at_most, judged, none_of, repeated, tried
from tools.chaos.history import Event, Fault, Read, now
from tools.chaos.programs import Program, Stage, pass_time
from tools.chaos.repetitions import UNSAVED
from tools.chaos.takeovers import takeovers, until_taken_over

_GROUP = "readers"
_CALLS = 8  #: of handlers at once, in one member
#: Progress is reported every 5 s; a report takes its time.
_UNREPORTED = 6.0
#: Seconds without a fault before the first kill. They make the run longer.
CALM = UNSAVED + 1.0
#: Silence after which a member counts as gone, so that pauses of a few seconds move queues.
_MEMBER_LIFE = 6.0
_HEARTBEAT = 1.0
_SHORT_PAUSE = (1.0, 3.0)
#: Each of them once; then what chance has.
_FAULTS = ("kill", "long pause", "short pause")


def consumer_chaos(stage: Stage, effort: Effort) -> list[Figure]:
    """First members come and go in order, then they die and stand still as well."""
    chance = effort.chance
    stage.broker(
        "broker-a", f"broker.client_life={_MEMBER_LIFE}", "broker.scan_interval=0.25"
    ).start()
    create_topic(stage)
    producers = [
        stage.worker("produce", f"p{number}", rate=150, heartbeat=_HEARTBEAT) for number in range(2)
    ]
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
    pass_time(CALM)
    orderly_until = now()
    longest = max(2.0, min(80.0, effort.seconds / 10))
    deadline = now() + effort.seconds / 2
    planned = list(_FAULTS)
    while now() < deadline or planned:
        fault = planned.pop(0) if planned else chance.choice(_FAULTS)
        victim = members.pop(chance.randrange(len(members)))
        if fault == "kill":
            stage.kill(victim)
            members.append(_start(stage))
            members[-1].until_written('"ready"')
        else:
            stage.pause(victim)
            if fault == "long pause":
                until_taken_over(stage, _GROUP)
                pass_time(chance.uniform(1.0, longest))
            else:
                pass_time(chance.uniform(*_SHORT_PAUSE))
            stage.resume(victim)
            members.append(victim)
        pass_time(chance.uniform(0.5, 2.0))
    troubled = now() - began - CALM
    finish(producers)
    took = drain(stage, (_GROUP,))
    finish(members)
    audit(stage)
    events = stage.events()
    analysis = analyse(events, groups=(_GROUP, "audit"))
    in_order = [at for at in analysis.delivered_again_at if at < orderly_until]
    kills = sum(isinstance(event, Fault) and not event.is_over for event in events)
    return [
        tried("R6", "kills and stops of members", kills),
        tried("R6", "that left in order", left),
        tried("R6", "s with faults and pauses between them", troubled),
        tried(
            "R6",
            "queues taken over while their owner stood still",
            len(takeovers(events, _GROUP)),
        ),
        *judged("R6", analysis),
        *repeated("R6", events, (_GROUP,)),
        at_most("R6", "drained after", took, 30, "s"),
        at_most("R6", "delivered again while members came and went in order", len(in_order), 0),
        at_most(
            "R6",
            "delivered again in all; bound: in flight and 5 s of progress at each kill and each "
            "pause that moved queues, and what others did with these meanwhile",
            analysis.delivered_again,
            bound(events),
        ),
        none_of("R6", "complaints in logs", stage.complaints()),
        at_least("R6", "members that read something", _readers(events), count),
    ]


def _start(stage: Stage) -> Program:
    return stage.worker(
        "consume", stage.fresh_name("c"), group=_GROUP, workers=_CALLS, heartbeat=_HEARTBEAT
    )


def bound(events: Sequence[Event]) -> int:
    """What may come again: what members had done and not reported when they lost their queues.

    One that was only stopped goes on where it was when it wakes up, until it hears that others have
    its queues: what these did meanwhile may come again as well.
    """
    moved = takeovers(events, _GROUP)
    faults = {
        (event.target, event.at)
        for event in events
        if isinstance(event, Fault)
        if event.what == "kill"
    }
    faults |= {(each.owner, each.stopped_at) for each in moved}
    reads = [event for event in events if isinstance(event, Read)]
    return sum(each.done for each in moved) + sum(
        _CALLS + sum(read.reader == target and at - _UNREPORTED <= read.at <= at for read in reads)
        for target, at in faults
    )


def _readers(events: Sequence[Event]) -> int:
    """Readers of the group in a history."""
    return len({event.reader for event in events if isinstance(event, Read)} - {"audit"})
