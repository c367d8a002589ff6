"""R20: a long load in a short time, with brokers that are restarted one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from tools.chaos.census import Census, census
from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, create_topic, drain, finish
from tools.chaos.figures import Figure, at_least, at_most, judged, none_of, repeated, told, tried
from tools.chaos.history import now
from tools.chaos.programs import Broker, Stage, pass_time
from tools.chaos.timing import quantile, send_times

_GROUPS = 20
_RATE = 400.0  #: messages a second; every one is consumed by all groups
_MIB = 1024 * 1024
_ROUTES = 3.0  #: seconds between two questions where the brokers are; 30 by default
#: Allocators keep what was freed, which in a short run may be more than what is lost.
_NOISE = 12 * _MIB
#: Seconds of load from which on a run is long enough for what is lost to be seen beside that.
_LONG = 3600.0


def soak(stage: Stage, effort: Effort) -> list[Figure]:
    """Twenty groups, two brokers that are stopped and started in turn, and one that lives on.

    What a broker loses bit by bit is seen in the one that lives on.
    """
    brokers = [stage.broker(name) for name in ("broker-a", "broker-b")]
    steady = stage.broker("broker-c")
    for broker in (*brokers, steady):
        broker.start()
    create_topic(stage, queues=8)
    groups = _GROUPS if effort.seconds >= 60 else 4
    producer = stage.worker("produce", "p1", rate=_RATE if groups == _GROUPS else 100, timeout=5.0)
    readers = [
        stage.worker(
            "consume",
            f"c{number}",
            group="soak",
            groups=groups,
            work=0.0,
            workers=2,
            route_refresh=_ROUTES,
        )
        for number in range(2)
    ]
    for worker in (producer, *readers):
        worker.until_written('"ready"')
    started = now()
    lasting = [producer, *readers]
    part = effort.seconds / 6
    # A restart and what piled up meanwhile belong to what a process needs at its largest.
    for _ in range(2):
        _rolling_restart(stage, brokers)
        pass_time(max(part, 2 * _ROUTES))
    began = now()
    before = [census(each.pid) for each in lasting]
    pass_time(part)
    # As long after a restart as in the end: brokers grow until they have seen all of their load.
    young = [_taken(broker) for broker in (*brokers, steady)]
    first_end = now()
    for _ in range(effort.times(60.0)):
        _rolling_restart(stage, brokers)
        pass_time(max(part, 2 * _ROUTES))
    last_begin = now()
    pass_time(part)
    after = [census(each.pid) for each in lasting]
    old = [_taken(broker) for broker in (*brokers, steady)]
    last_end = now()
    finish([producer])
    names = [f"soak-{number}" for number in range(groups)]
    took = drain(stage, names)
    finish(readers)
    events = stage.events()
    analysis = analyse(events, groups=names)
    first = quantile(send_times(events, began, first_end), 0.99)
    last = quantile(send_times(events, last_begin, last_end), 0.99)
    rate = analysis.acked / (last_end - started)
    return [
        tried("R20", f"s of load at {rate:,.0f} msg/s into {groups} groups", last_end - started),
        *judged("R20", analysis),
        *repeated("R20", events, names),
        *_growth("clients", before, after, last_end - started),
        *_growth("restarted brokers", young[:-1], old[:-1], last_end - started),
        *_growth("the broker that lives on", young[-1:], old[-1:], last_end - started),
        at_most("R20", "p99 of sends, last part", last * 1000, max(2 * first * 1000, 50), "ms"),
        told("R20", "p99 of sends, first part", first * 1000, "ms"),
        at_most("R20", "drained after", took, 30, "s"),
        at_least("R20", "delivered", analysis.reads, analysis.acked * groups),
        none_of("R20", "complaints in logs", stage.complaints()),
    ]


def _rolling_restart(stage: Stage, brokers: Sequence[Broker]) -> None:
    """One after the other. What is on its way to a broker when it stops may come twice."""
    for broker in brokers:
        stage.tell("restart", broker.name, is_over=False)
        broker.running.stop()
        broker.start()
        stage.tell("restart", broker.name, is_over=True)


def _taken(broker: Broker) -> Census:
    return census(broker.running.pid)


def _growth(
    who: str, before: Sequence[Census], after: Sequence[Census], seconds: float
) -> list[Figure]:
    """Memory and descriptors of processes, one by one; the worst is told."""
    grown = [(new.memory - old.memory, old.memory) for old, new in zip(before, after, strict=True)]
    handles = [new.descriptors - old.descriptors for old, new in zip(before, after, strict=True)]
    growth, base = max(grown, key=lambda pair: pair[0] - allowed_growth(pair[1], seconds))
    return [
        at_most(
            "R20",
            f"memory that {who} took more (of {base / _MIB:.0f} MiB; {len(before)} looked at)",
            growth / _MIB,
            allowed_growth(base, seconds) / _MIB,
            "MiB",
        ),
        at_most("R20", f"descriptors that {who} took more", max(handles), 8),
    ]


def allowed_growth(base: float, seconds: float) -> float:
    """Bytes that a process of this size may take more in so many seconds of load."""
    share = 0.05 * base
    return share if seconds >= _LONG else max(_NOISE, share)
