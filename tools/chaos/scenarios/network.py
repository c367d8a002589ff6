"""R8: a network that delays, breaks, goes silent, forgets connections and crawls."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, drain, finish
from tools.chaos.figures import Figure, at_least, at_most, judged, none_of, repeated, told, tried
from tools.chaos.history import Acked, Event, Fault, Invoked, Read, now
from tools.chaos.programs import Program, Stage, free_port, pass_time, wait_until
from tools.chaos.proxy import FaultyProxy, Weather

_EVERYBODY = "all"
_GROUPS = ("readers", "pullers")
_HOLD = 3.0
_PULL_TIMEOUT = 6.0
_ATTEMPT = 1.0
_FAULTS = ("delay", "cut", "partition", "half-open", "slow", "partition")
#: After which a member of the group that says nothing counts as gone.
_CLIENT_LIFE = 120.0


def network(stage: Stage, effort: Effort) -> list[Figure]:
    """Faults for everybody or for one process, one after the other, with time to recover."""
    chance = effort.chance
    port = free_port()
    broker = stage.broker("broker-a", advertised=f"127.0.0.1:{port}")
    proxy = FaultyProxy(broker.port, seed=effort.seed).start(port)
    stage.on_close(proxy.close)
    broker.start()
    create_topic(stage)
    producers = [
        stage.worker("produce", f"p{number}", rate=100, timeout=3.0) for number in range(2)
    ]
    # What has a key is tried once, because of its order. This one tries again, before a partition
    # ends, and what it repeats is stored twice.
    producers.append(
        stage.worker(
            "produce", "p-again", rate=50, timeout=3.0, attempt_timeout=_ATTEMPT, is_keyed=False
        )
    )
    consumers = [
        stage.worker(
            "consume", f"c{number}", group="readers", hold=_HOLD, pull_timeout=_PULL_TIMEOUT
        )
        for number in range(3)
    ]
    puller = stage.worker("pull", "puller", group="pullers", hold=_HOLD, pull_timeout=_PULL_TIMEOUT)
    workers = [*producers, *consumers, puller]
    for worker in workers:
        worker.until_written('"ready"')
    pass_time(2.0)
    longest = max(1.5, min(120.0, effort.seconds / 6))
    began, hit = now(), 0
    deadline = began + effort.seconds
    planned = list(_FAULTS if effort.seconds >= 30 else _FAULTS[2:4])
    while now() < deadline or planned:
        is_planned = bool(planned)
        fault = planned.pop(0) if is_planned else chance.choice(_FAULTS)
        # Partitions that are planned are for everybody, and so for those who send.
        is_for_all = (is_planned and fault == "partition") or chance.random() < 0.4
        victim = None if is_for_all else chance.choice(workers)
        seconds = chance.uniform(1.0, longest)
        if is_planned and fault == "partition":
            seconds = max(seconds, 2.5 * _ATTEMPT)
        hit += _bring(stage, proxy, fault, victim, seconds)
        pass_time(5.0 if fault != "half-open" else _PULL_TIMEOUT + 2.0)
    troubled = now() - began
    finish(producers)
    took = drain(stage, _GROUPS)
    finish((*consumers, puller))
    audit(stage)
    events = stage.events()
    analysis = analyse(events, groups=(*_GROUPS, "audit"), contiguous=("pullers",))
    names = [worker.name for worker in workers]
    faults = sum(isinstance(event, Fault) and event.is_over for event in events)
    healing = _healings(events, names, ("delay", "cut", "partition", "slow"))
    noticing = _healings(events, names, ("half-open",))
    return [
        tried("R8", "faults", faults),
        tried("R8", "connections that faults hit", hit, faults),
        tried("R8", "s with faults and pauses between them", troubled),
        *judged("R8", analysis),
        *repeated("R8", events, _GROUPS, patience=_ATTEMPT),
        at_most("R8", "every client continued after healing", max(healing, default=inf), 5, "s"),
        at_most(
            "R8",
            f"half-open connections replaced (pulls are given up after {_PULL_TIMEOUT:g} s)",
            max(noticing, default=inf),
            _PULL_TIMEOUT + 5,
            "s",
        ),
        at_most("R8", "drained after", took, 30, "s"),
        at_least("R8", "stored twice (answer lost, sent again)", analysis.stored_twice, 1),
        told("R8", "delivered again", analysis.delivered_again),
        none_of("R8", "complaints in logs", stage.complaints()),
    ]


def _bring(
    stage: Stage, proxy: FaultyProxy, fault: str, victim: Program | None, seconds: float
) -> int:
    """Have a fault begin and end; how many connections it hit, of which there is one at least."""
    target = _EVERYBODY if victim is None else victim.name
    pid = None if victim is None else victim.pid
    hit = 0

    def has_hit() -> bool:
        nonlocal hit
        if fault == "cut":
            hit = proxy.cut(pid, share=0.7)
        elif fault == "half-open":
            hit = proxy.half_open(pid)
        else:
            hit = proxy.connections(pid)
        return hit > 0

    stage.tell(fault, target, is_over=False)
    # A victim may be between two connections.
    wait_until(has_hit, f"{fault} hits a connection of {target}")
    if fault not in ("cut", "half-open"):
        weather = {
            "delay": Weather(delay=min(2.0, seconds)),
            "partition": Weather(is_blocked=True),
            "slow": Weather(bytes_per_second=4000.0),
        }[fault]
        proxy.set_weather(weather, pid)
        pass_time(seconds)
        proxy.clear()
    stage.tell(fault, target, is_over=True)
    return hit


def _healings(events: Sequence[Event], names: Sequence[str], kinds: Sequence[str]) -> list[float]:
    """For every fault that was mended: until each worker that it hit had done something again.

    Infinite for one that never did anything again.
    """
    done: dict[str, list[float]] = {name: [] for name in names}
    owner: dict[str, str] = {}
    for event in events:
        if isinstance(event, Invoked):
            owner[event.value] = event.value.partition("/")[0]
        elif isinstance(event, Acked):
            done.setdefault(owner[event.value], []).append(event.at)
        elif isinstance(event, Read):
            done.setdefault(event.reader, []).append(event.at)
    found = []
    for event in events:
        if isinstance(event, Fault) and event.is_over and event.what in kinds:
            hit = names if event.target == _EVERYBODY else [event.target]
            found += [
                min((at for at in done[name] if at >= event.at), default=float("inf")) - event.at
                for name in hit
            ]
    return found
