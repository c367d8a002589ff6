"""The first view, charts, topology and events."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin.cluster import BrokerStatus, NameServerStatus
from orbitmq.client.admin.topics import NOT_LISTED
from orbitmq.console.api.groups import group_row, shown_pipeline
from orbitmq.console.collect import GroupSample, TopicSample
from orbitmq.console.faults import Card, cards, gathered
from orbitmq.console.history import FINE, STEP, WINDOW, thinned, with_gaps
from orbitmq.console.http import (
    answer,
    int_param,
    pick,
    stream,
    text_param,
)
from orbitmq.console.pipelines import Pipeline
from orbitmq.console.settings import BadInput
from orbitmq.console.state import Clusters, ConsoleState, clusters_of, session_check, state_of
from orbitmq.errors import NotSupported, OrbitError
from orbitmq.names import is_retry_topic, is_system_topic

#: Rows of each list.
_SHOWN = 8
#: Cards of what is wrong; the others are counted by kind.
_CARDS = 12
#: Points of the small curves.
_POINTS = 60
_CURVES = ("in", "out", "lag", "dead")


def known_now(state: ConsoleState) -> dict[str, object]:
    """The content of the first view, made once after every look for all pages."""
    snapshot = state.collector.snapshot
    key = (
        None if snapshot is None else snapshot.at,
        state.collector.problem,
        state.pipelines.turn,
        state.alerts.silences.turn,
    )
    if state.now is None or state.now[0] != key:
        state.now = (key, now_content(state))
    return state.now[1]


def now_content(state: ConsoleState) -> dict[str, object]:
    """What the first view shows."""
    snapshot = state.collector.snapshot
    if snapshot is None:
        return {"at": None, "problem": state.collector.problem}
    now = state.clock.now()
    cluster = snapshot.cluster
    faults = state.faults()
    about = cards(faults)
    behind = sorted(
        (group for group in snapshot.groups.values() if group.lag),
        key=lambda group: (-(group.lag_seconds or 0.0), -group.lag, group.name),
    )
    dying = sorted(
        (group for group in snapshot.groups.values() if group.dead_letters),
        key=lambda group: (-group.open_last_hour, -group.open_letters, group.name),
    )
    busy = sorted(snapshot.topics.values(), key=lambda topic: (-topic.in_rate, topic.name))
    totals = pick(
        snapshot,
        "at in_rate out_rate lag oldest dead_letters dead_last_hour open_letters open_last_hour"
        " unknown_letters unknown_last_hour",
    )
    return totals | {
        # After a failed look the snapshot is old: the page says so.
        "problem": state.collector.problem,
        "faults": gathered(faults),
        "fault_count": len(faults),
        "card_count": len(about),
        "cards": about[:_CARDS],
        "more_cards": _rest(about[_CARDS:]),
        "silenced": [
            {"subject": fault.subject, "kind": fault.kind, "until": silence.until}
            for card in about[:_CARDS]
            for fault in card.faults
            if (silence := state.alerts.silences.of(fault.subject, fault.kind)) is not None
        ],
        "brokers": [shown_broker(each, snapshot.rates) for each in cluster.brokers],
        "name_servers": [shown_name_server(each) for each in cluster.name_servers],
        # The window of all rates.
        "rate_seconds": WINDOW,
        "oldest_group": behind[0].name if behind else None,
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
        "pipelines": [shown_pipeline(each, state) for each in state.pipelines.all[:50]],
        "curves": {
            name: thinned(state.fine.since(f"cluster/{name}", now - 3600), _POINTS)
            for name in _CURVES
        },
        "look": {"seconds": snapshot.seconds, "every": state.settings.every},
    }


def _rest(hidden: Sequence[Card]) -> list[dict[str, object]]:
    """Cards that are not shown, by the kind of their worst fault."""
    kinds: dict[tuple[str, str], int] = {}
    for card in hidden:
        worst = card.faults[0]
        key = (worst.kind, worst.check)
        kinds[key] = kinds.get(key, 0) + 1
    return [
        {"kind": kind, "check": check, "count": count} for (kind, check), count in kinds.items()
    ]


def shown_broker(
    status: BrokerStatus, rates: Mapping[str, tuple[float, float]]
) -> dict[str, object]:
    runtime = status.runtime
    # The messages of a slave are counted at its master.
    here = rates.get(status.node.broker) if status.node.is_master else None
    runtime_names = (
        "version started_at in_today out_today disk_used earliest_message_at waiting_sends"
        " waiting_pulls"
    )
    return pick(
        status,
        "is_up warnings",
        name=str(status.node),
        cluster=status.node.cluster,
        address=str(status.node.address),
        is_master=status.node.is_master,
        in_rate=None if here is None else here[0],
        out_rate=None if here is None else here[1],
        is_orbitmq=runtime is not None and runtime.is_orbitmq,
        log_bytes=None
        if runtime is None or runtime.log_end is None
        else runtime.log_end - (runtime.log_start or 0),
    ) | (dict.fromkeys(runtime_names.split()) if runtime is None else pick(runtime, runtime_names))


def shown_name_server(status: NameServerStatus) -> dict[str, object]:
    return pick(status, "is_up brokers problem", address=str(status.address))


async def now(request: Request) -> Response:
    """What is wrong and where, and the numbers of the cluster, as the first view shows them."""
    return answer(known_now(state_of(request)))


def clusters_content(clusters: Clusters) -> dict[str, object]:
    """Every cluster as its last look found it; asks none of them."""
    return {"clusters": [_shown_cluster(each) for each in clusters.all.values()]}


def _shown_cluster(state: ConsoleState) -> dict[str, object]:
    known = known_now(state)
    problem, brokers, worst = known["problem"], known.get("brokers"), known.get("cards")
    names = "at in_rate out_rate lag oldest open_letters open_last_hour card_count topics groups"
    return {
        "name": state.settings.name,
        "state": "unreachable" if problem else "up" if known["at"] else "starting",
        "problem": problem,
        "name_servers": state.settings.client.name_servers,
        "brokers": len(brokers) if isinstance(brokers, list) else None,
        "brokers_up": sum(each["is_up"] for each in brokers) if isinstance(brokers, list) else None,
        "worst": worst[0].weight if isinstance(worst, list | tuple) and worst else None,
    } | {name: known.get(name) for name in names.split()}


async def clusters(request: Request) -> Response:
    """All clusters; `/clusters/NAME` before an address leads into one of several."""
    return answer(clusters_content(clusters_of(request)))


async def faults(request: Request) -> Response:
    """All faults."""
    return answer({"faults": state_of(request).faults()})


async def audit(request: Request) -> Response:
    """What was changed through this console, the newest first."""
    return answer({"lines": state_of(request).audit.lines})


_WEEK = 7 * 24 * 60
_MOST_SERIES = 40
_CHART_POINTS = 360


async def charts(request: Request) -> Response:
    """The points of some series: `series` repeated, `minutes` back from now."""
    state = state_of(request)
    minutes = int_param(request, "minutes", 60, 1, _WEEK)
    names = request.query_params.getlist("series")
    if not 1 <= len(names) <= _MOST_SERIES:
        raise BadInput(f"1 to {_MOST_SERIES} series can be asked for, got {len(names)}")
    now = state.clock.now()
    start = now - minutes * 60
    content = {
        name: with_gaps(thinned(await points(state, name, start), _CHART_POINTS)) for name in names
    }
    return answer({"from": start, "to": now, "series": content})


async def points(state: ConsoleState, name: str, start: float) -> list[tuple[float, float]]:
    """The coarse points of the file up to the fine ones in memory."""
    fine = state.fine.since(name, start)
    if start >= state.clock.now() - FINE and fine and fine[0][0] <= start + 60:
        return fine
    begins = fine[0][0] if fine else float("inf")
    coarse = await state.file.since(name, start)
    # A coarse point stands for the time after it, which must not overlap the fine ones.
    return [point for point in coarse if point[0] + STEP <= begins] + fine


async def events(request: Request) -> Response:
    """Server-sent events: `sample` after every look, `replay`, `pipeline`, `audit`."""
    return stream(state_of(request).events.listen(), session_check(request))


#: Topics in one picture; more cannot be read.
_MOST_TOPICS = 60


async def topology(request: Request) -> Response:
    """Nodes and edges: the busiest topics, or those whose name, or a group's, has `search`.

    Topics that are idle are counted, and drawn with `idle=1`.
    """
    state = state_of(request)
    snapshot = state.snapshot
    wanted = request.query_params.get("search", "").strip().lower()
    most = int_param(request, "count", 12, 1, _MOST_TOPICS)
    own = [
        topic
        for topic in snapshot.topics.values()
        if not topic.name.startswith("%") and not is_system_topic(topic.name)
        and topic.topic.kind != "system"
    ]  # fmt: skip
    pipelines = state.pipelines.all
    piped = {name for each in pipelines for name in (*each.report.topics, *each.report.output)}
    if wanted:
        own = [
            topic for topic in own
            if wanted in topic.name.lower() or any(wanted in name.lower() for name in topic.groups)
        ]  # fmt: skip
    own.sort(
        key=lambda topic: (
            topic.name not in piped, -topic.in_rate, -sum(topic.groups.values()), topic.name
        )
    )  # fmt: skip
    # Topics without writes and without lag are folded, unless they are asked for.
    idle = 0
    if not wanted and not text_param(request, "idle"):
        busy = [topic for topic in own if _is_busy(topic, piped)]
        own, idle = busy, len(own) - len(busy)
    chosen = own[:most]
    names = {topic.name for topic in chosen}
    edges = []
    groups: dict[str, dict[str, object]] = {}
    # The group of a pipeline is drawn once, as that pipeline.
    piping = {each.report.group for each in pipelines}
    for group in snapshot.groups.values():
        if group.name in piping:
            continue
        for part in group.parts:
            if part.topic not in names or is_retry_topic(part.topic):
                continue
            groups[group.name] = {"name": group.name, "lag": group.lag, "pace": group.pace}
            edges.append(
                {"topic": part.topic, "group": group.name, "rate": part.out_rate, "lag": part.lag}
            )
    return answer(
        {
            "topics": [{"name": each.name, "in_rate": each.in_rate} for each in chosen],
            "left_out": len(own) - len(chosen),
            "idle": idle,
            "groups": list(groups.values()),
            "edges": edges,
            "pipelines": [
                _drawn(each, snapshot.groups.get(each.report.group or ""), state.clock.now())
                for each in pipelines
            ],
            "producers": await _producers(state),
        }
    )


def _is_busy(topic: TopicSample, piped: Collection[str]) -> bool:
    return topic.name in piped or topic.in_rate > 0 or any(topic.groups.values())


def _drawn(pipeline: Pipeline, group: GroupSample | None, now: float) -> dict[str, object]:
    """A pipeline, with what is known of its consumer group."""
    report = pipeline.report
    reads = () if group is None else (part.topic for part in group.parts)
    return {
        "name": pipeline.name,
        "state": pipeline.state_at(now),
        "group": report.group,
        "lag": None if group is None else group.lag,
        "topics": report.topics or tuple(each for each in reads if not is_retry_topic(each)),
        "output": report.output,
        "rate": report.rows_per_second if pipeline.is_up_at(now) else None,
    }


async def _producers(state: ConsoleState) -> list[dict[str, object]] | None:
    """Producer groups with their numbers of connections; None: brokers do not support it."""
    try:
        found = await state.admin.consumers.producers()
    except (NotSupported, OrbitError):
        return None
    counts: dict[str, int] = {}
    for group, _ in found:
        counts[group] = counts.get(group, 0) + 1
    return [{"name": group, "count": count} for group, count in sorted(counts.items())]


routes = [
    Route("/now", now),
    Route("/clusters", clusters),
    Route("/faults", faults),
    Route("/audit", audit),
    Route("/charts", charts),
    Route("/events", events),
    Route("/topology", topology),
]
