"""R7: whoever consumes in order does so alone, whatever stands still or has a wrong date.

What matters is a member that stood still until another one had its queues, and wakes up. So silent
members count as gone before their locks lapse, and some pauses go on until others are at work.
"""

from __future__ import annotations

from pathlib import Path

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, drain, finish
from tools.chaos.figures import Figure, at_most, judged, none_of, repeated, told, tried
from tools.chaos.history import Assigned, Fault, Read, now
from tools.chaos.programs import DEADLINE, Program, Stage, pass_time, wait_until
from tools.chaos.repetitions import SETTLING
from tools.chaos.takeovers import takeovers, until_taken_over

_GROUP = "in-order"
_MEMBERS = 3
_BROKER_LIFE = 60.0
_CLIENT_LIFE = 30.0
_RENEWAL = 20.0
#: Silence after which a member counts as gone, and how often the others say that they are there.
_MEMBER_LIFE = 60.0
_HEARTBEAT = 10.0
#: In lives of a lock: from well within the client's belief in its lock to beyond the broker's.
_SHORT_PAUSE = (0.3, 1.3)
#: Each of them once, except the last; then what chance has. A long pause ends when others have
#: queues of whoever stands still.
_FAULTS = ("long pause", "kill", "broker", "clock", "leave", "short pause")


def orderly(stage: Stage, effort: Effort) -> list[Figure]:
    """With all lives of locks a twentieth, so that many lapse in a short time."""
    return _orderly(stage, effort, rate=20.0)


def orderly_in_real_time(stage: Stage, effort: Effort) -> list[Figure]:
    """With the lives that locks really have."""
    return _orderly(stage, effort, rate=1.0)


def _orderly(stage: Stage, effort: Effort, rate: float) -> list[Figure]:
    chance = effort.chance
    heartbeat = max(1.0, _HEARTBEAT / rate)
    # A broker that forgets its locks must not give them away before their owners gave them up.
    broker = stage.broker(
        "broker-a",
        f"broker.lock_pause={_CLIENT_LIFE}",
        f"broker.client_life={_MEMBER_LIFE}",
        "broker.scan_interval=0.25",
        rate=rate,
    )
    broker.start()
    create_topic(stage, queues=8)
    producers = [
        stage.worker("produce", f"p{number}", rate=150, heartbeat=heartbeat) for number in range(2)
    ]
    clock = stage.folder / "members-clock"
    members = [_start(stage, rate, heartbeat, clock) for _ in range(_MEMBERS)]
    for worker in (*producers, *members):
        worker.until_written('"ready"')
    wait_until(
        lambda: len({each.reader for each in stage.events() if isinstance(each, Read)}) >= _MEMBERS,
        "every member has queues",
        DEADLINE + _CLIENT_LIFE / rate,
        every=0.25,
    )
    began = now()
    planned = list(_FAULTS[:-1])
    while now() < began + effort.seconds or planned:
        fault = planned.pop(0) if planned else chance.choice(_FAULTS)
        if fault == "clock":
            broker.set_clock(chance.choice((-86_400.0, -90.0, 90.0, 86_400.0)))
            _set(clock, chance.choice((-86_400.0, -90.0, 90.0, 86_400.0)))
        elif fault == "broker":
            broker.kill()
            broker.restart()
        else:
            victim = members.pop(chance.randrange(len(members)))
            if fault in ("long pause", "short pause"):
                stage.pause(victim)
                if fault == "long pause":
                    until_taken_over(stage, _GROUP, DEADLINE + 2 * _BROKER_LIFE / rate)
                    pass_time(0.1 * _BROKER_LIFE / rate)
                else:
                    pass_time(chance.uniform(*_SHORT_PAUSE) * _BROKER_LIFE / rate)
                stage.resume(victim)
                members.append(victim)
            elif fault == "kill":
                stage.kill(victim)
            else:
                finish([victim])
            if victim not in members:
                members.append(_start(stage, rate, heartbeat, clock))
                members[-1].until_written('"ready"')
        pass_time(chance.uniform(0.1, 0.5) * _CLIENT_LIFE / rate)
    troubled = now() - began
    broker.set_clock(0.0)
    _set(clock, 0.0)
    finish(producers)
    took = drain(stage, (_GROUP,), deadline=60 + 2 * _BROKER_LIFE / rate)
    finish(members)
    audit(stage)
    events = stage.events()
    analysis = analyse(events, groups=(_GROUP, "audit"), ordered=(_GROUP,))
    faults = sum(isinstance(event, Fault) and not event.is_over for event in events)
    changes = sum(isinstance(event, Assigned) for event in events)
    return [
        tried("R7", "faults", faults),
        tried("R7", "s with faults and pauses between them", troubled),
        tried(
            "R7",
            "queues taken over while their owner stood still",
            len(takeovers(events, _GROUP)),
        ),
        *judged("R7", analysis),
        # Who follows waits for the lock first.
        *repeated("R7", events, (_GROUP,), SETTLING + 2 * _BROKER_LIFE / rate),
        at_most("R7", "drained after", took, 30 + 2 * _BROKER_LIFE / rate, "s"),
        told("R7", "changes of owners", changes),
        told("R7", "lives of locks", f"{_CLIENT_LIFE / rate:g} s and {_BROKER_LIFE / rate:g} s"),
        told("R7", "calls that were caught by a pause", analysis.caught_in_pause),
        told("R7", "delivered again", analysis.delivered_again),
        none_of("R7", "complaints in logs", stage.complaints()),
    ]


def _start(stage: Stage, rate: float, heartbeat: float, clock: Path) -> Program:
    return stage.worker(
        "consume",
        stage.fresh_name("m"),
        group=_GROUP,
        ordered=True,
        lock_life=_CLIENT_LIFE / rate,
        lock_renewal=_RENEWAL / rate,
        heartbeat=heartbeat,
        work=0.005,  # so that pauses often catch a call
        clock=str(clock),
    )


def _set(clock: Path, wrong_by: float) -> None:
    fresh = clock.with_suffix(".new")
    fresh.write_text(str(wrong_by))
    fresh.replace(clock)
