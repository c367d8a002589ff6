"""R9: how long a group takes to share its queues anew."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from orbitmq import Admin
from tools.chaos.effort import TOPIC, Effort, create_topic
from tools.chaos.figures import Figure, at_most, none_of, tried
from tools.chaos.history import Assigned, Event, now
from tools.chaos.programs import Program, Stage, free_port, wait_until
from tools.chaos.proxy import FaultyProxy, Weather

_GROUP = "readers"
_QUEUES = 16
_LIFE = 120.0
_UNNOTICED = 21.0  #: members look every 20 s by themselves
_KINDS = "kinds of changes"


def rebalance(stage: Stage, effort: Effort) -> list[Figure]:
    """Join, leave, crash, more queues, and a death that nobody hears of.

    From 300 s on the silent death takes its 120 s; below, the broker's clock runs fast.
    """
    is_real = effort.seconds >= 300
    rate = 1.0 if is_real else 20.0
    refresh = 30.0 if is_real else 3.0
    port = free_port()
    scan = 10.0 if is_real else 0.25
    broker = stage.broker(
        "broker-a", f"broker.scan_interval={scan}", advertised=f"127.0.0.1:{port}", rate=rate
    )
    proxy = FaultyProxy(broker.port, seed=effort.seed).start(port)
    stage.on_close(proxy.close)
    broker.start()
    create_topic(stage, queues=_QUEUES)
    members = [_start(stage, refresh, rate) for _ in range(3)]
    for member in members:
        member.until_written('"ready"')
    _until_shared(stage, members, _QUEUES)

    joining = _start(stage, refresh, rate)
    joining.until_written('"ready"')
    shared: list[Figure] = []  # one for every change that came to its end
    took = _until_shared(stage, [*members, joining], _QUEUES)
    shared.append(_within("rebalanced after a member joined", took, 1.0))

    joining.stop()
    took = _until_shared(stage, members, _QUEUES)
    shared.append(_within("… after one left in order", took, 1.0))

    crashing = _start(stage, refresh, rate)
    crashing.until_written('"ready"')
    _until_shared(stage, [*members, crashing], _QUEUES)
    stage.kill(crashing)
    took = _until_shared(stage, members, _QUEUES)
    shared.append(_within("… after one was killed", took, 1.0))

    with Admin(name_server=stage.name_server) as admin:
        admin.topics.update(TOPIC, queues=_QUEUES + 8)
    took = _until_shared(stage, members, _QUEUES + 8)
    scaled = f"… after the topic got more queues (routes are asked for every {refresh:g} s)"
    shared.append(_within(scaled, took, refresh + 1.0))

    silent = members.pop()
    proxy.set_weather(Weather(is_blocked=True), silent.pid)
    began = now()
    stage.kill(silent)
    _until_shared(stage, members, _QUEUES + 8, deadline=2 * _LIFE)
    unheard = f"… after one died in silence (it counts as gone after {_LIFE / rate:g} s)"
    limit = (_LIFE + 5.0) / rate + (scan if is_real else 0.0)
    shared.append(_within(unheard, now() - began, limit))
    return [
        tried("R9", _KINDS, len(shared)),
        *shared,
        none_of("R9", "complaints in logs", stage.complaints()),
    ]


def without_notice(stage: Stage, effort: Effort) -> list[Figure]:
    """Members that nobody tells of each other find out by themselves."""
    stage.broker("broker-a", "broker.notify_consumers=false").start()
    create_topic(stage, queues=_QUEUES)
    first = _start(stage, 30.0, 1.0)
    first.until_written('"ready"')
    _until_shared(stage, [first], _QUEUES)
    second = _start(stage, 30.0, 1.0)
    second.until_written('"ready"')
    took = _until_shared(stage, [first, second], _QUEUES)
    shared = [_within("… without any notice of the broker", took, _UNNOTICED)]
    # Whoever joins asks the others what they have, which tells them. Who dies tells nobody.
    stage.kill(second)
    took = _until_shared(stage, [first], _QUEUES)
    shared.append(_within("… after one was killed, without any notice", took, _UNNOTICED))
    return [tried("R9", _KINDS, len(shared)), *shared]


def _within(what: str, took: float, limit: float) -> Figure:
    return at_most("R9", what, took, limit, "s")


def _start(stage: Stage, refresh: float, rate: float) -> Program:
    return stage.worker(
        "consume",
        stage.fresh_name("m"),
        group=_GROUP,
        route_refresh=refresh,
        heartbeat=max(1.0, 30.0 / rate),
    )


def _until_shared(
    stage: Stage, members: Sequence[Program], queues: int, deadline: float = 60.0
) -> float:
    """Seconds until every queue has exactly one of the members, who have nothing else."""
    names = {member.name for member in members}

    return wait_until(
        lambda: are_shared(stage.events(), names, queues),
        f"{queues} queues are shared by {sorted(names)}",
        deadline,
    )


def are_shared(events: Sequence[Event], names: AbstractSet[str], queues: int) -> bool:
    """Whether every one of these members has said that it has queues, and no two have the same."""
    owned: dict[str, tuple[str, ...]] = {}
    for event in events:
        if isinstance(event, Assigned) and event.reader in names:
            owned[event.reader] = event.queues
    all_owned = [queue for each in owned.values() for queue in each]
    return (
        owned.keys() == names
        and all(owned.values())
        and len(all_owned) == len(set(all_owned)) == queues
    )
