"""Now: what is wrong and where, and the numbers of the cluster."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin import BrokerStatus, NameServerStatus
from orbitmq.client.admin.topicvalues import NOT_LISTED
from orbitmq.console.answers import answer
from orbitmq.console.api.groups import group_row
from orbitmq.console.api.pipelines import shown_pipeline
from orbitmq.console.checks.faults import gathered
from orbitmq.console.parts import Parts, parts_of
from orbitmq.console.rates import WINDOW
from orbitmq.console.series import thinned

#: Rows of each list.
_SHOWN = 8
#: Points of the small curves.
_POINTS = 60
_CURVES = ("in", "out", "lag", "dead")


def known_now(parts: Parts) -> dict[str, object]:
    """The same for all pages until something is new: each asks for it after every look."""
    snapshot = parts.collector.snapshot
    key = (None if snapshot is None else snapshot.at, parts.collector.problem, parts.pipelines.turn)
    if parts.now is None or parts.now[0] != key:
        parts.now = (key, now_content(parts))
    return parts.now[1]


def now_content(parts: Parts) -> dict[str, object]:
    """What the first view shows, in one piece."""
    snapshot = parts.collector.snapshot
    if snapshot is None:
        return {"at": None, "problem": parts.collector.problem}
    now = parts.clock.now()
    cluster = snapshot.cluster
    faults = parts.faults()
    behind = sorted(
        (group for group in snapshot.groups.values() if group.lag),
        key=lambda group: (-(group.lag_seconds or 0.0), -group.lag, group.name),
    )
    dying = sorted(
        (group for group in snapshot.groups.values() if group.dead_letters),
        key=lambda group: (
            -group.open_last_hour - group.unknown_last_hour,
            -group.open_letters,
            group.name,
        ),
    )
    busy = sorted(snapshot.topics.values(), key=lambda topic: (-topic.in_rate, topic.name))
    return {
        "at": snapshot.at,
        # While the last look failed, the picture is old: the page says so.
        "problem": parts.collector.problem,
        "faults": gathered(faults),
        "fault_count": len(faults),
        "brokers": [shown_broker(each, snapshot.rates) for each in cluster.brokers],
        "name_servers": [shown_name_server(each) for each in cluster.name_servers],
        "in_rate": snapshot.in_rate,
        "out_rate": snapshot.out_rate,
        # Of all rates of all pages.
        "rate_seconds": WINDOW,
        "lag": snapshot.lag,
        "oldest": snapshot.oldest,
        "oldest_group": behind[0].name if behind else None,
        "dead_last_hour": snapshot.dead_last_hour,
        "open_last_hour": snapshot.open_last_hour,
        "open_letters": snapshot.open_letters,
        "unknown_letters": snapshot.unknown_letters,
        "unknown_last_hour": snapshot.unknown_last_hour,
        "dead_letters": snapshot.dead_letters,
        "topics": sum(topic.topic.kind not in NOT_LISTED for topic in snapshot.topics.values()),
        "groups": len(snapshot.groups),
        "groups_behind": len(behind),
        "worst": [group_row(group) for group in behind[:_SHOWN]],
        "dying": [group_row(group) for group in dying[:_SHOWN]],
        "busy": [
            {"name": topic.name, "in_rate": topic.in_rate, "lag": sum(topic.groups.values())}
            for topic in busy[:_SHOWN]
            if topic.in_rate
        ],
        "pipelines": [shown_pipeline(each, parts) for each in parts.pipelines.all[:50]],
        "curves": {
            name: thinned(parts.fine.since(f"cluster/{name}", now - 3600), _POINTS)
            for name in _CURVES
        },
        "look": {"seconds": snapshot.seconds, "every": parts.settings.every},
    }


def shown_broker(
    status: BrokerStatus, rates: Mapping[str, tuple[float, float]]
) -> dict[str, object]:
    runtime = status.runtime
    # A slave has its master's messages, which are counted there.
    here = rates.get(status.node.broker) if status.node.is_master else None
    return {
        "name": str(status.node),
        "cluster": status.node.cluster,
        "address": str(status.node.address),
        "is_master": status.node.is_master,
        "is_up": status.is_up,
        "warnings": status.warnings,
        "version": None if runtime is None else runtime.version,
        "is_orbitmq": runtime is not None and runtime.is_orbitmq,
        "started_at": None if runtime is None else runtime.started_at,
        "in_rate": None if here is None else here[0],
        "out_rate": None if here is None else here[1],
        "in_today": None if runtime is None else runtime.in_today,
        "out_today": None if runtime is None else runtime.out_today,
        "disk_used": None if runtime is None else runtime.disk_used,
        "log_bytes": None
        if runtime is None or runtime.log_end is None
        else runtime.log_end - (runtime.log_start or 0),
        "earliest_message_at": None if runtime is None else runtime.earliest_message_at,
        "waiting_sends": None if runtime is None else runtime.waiting_sends,
        "waiting_pulls": None if runtime is None else runtime.waiting_pulls,
    }


def shown_name_server(status: NameServerStatus) -> dict[str, object]:
    return {
        "address": str(status.address),
        "is_up": status.is_up,
        "brokers": status.brokers,
        "problem": status.problem,
    }


async def now(request: Request) -> Response:
    """What is wrong and where, and the numbers of the cluster: all that the first view shows."""
    return answer(known_now(parts_of(request)))


async def faults(request: Request) -> Response:
    """All of them, not only the first of each kind."""
    return answer({"faults": parts_of(request).faults()})


async def audit(request: Request) -> Response:
    """What was changed through this console, the newest first."""
    return answer({"lines": parts_of(request).audit.lines})


routes = [
    Route("/now", now),
    Route("/faults", faults),
    Route("/audit", audit),
]
