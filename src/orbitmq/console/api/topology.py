"""Who sends to whom: topics, groups, Spark queries, and how fast."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin import NotSupported
from orbitmq.client.names import is_retry_topic, is_system_topic
from orbitmq.console.answers import answer, number
from orbitmq.console.parts import Parts, parts_of
from orbitmq.console.pipelines import Pipeline
from orbitmq.console.samples import GroupSample
from orbitmq.errors import OrbitError

#: Topics in one picture; more cannot be read.
_MOST_TOPICS = 60


async def topology(request: Request) -> Response:
    """Nodes and edges: the busiest topics, or those whose name, or a group's, has `search`."""
    parts = parts_of(request)
    snapshot = parts.snapshot
    wanted = request.query_params.get("search", "").strip().lower()
    most = number(request, "count", 12, 1, _MOST_TOPICS)
    own = [
        topic
        for topic in snapshot.topics.values()
        if not topic.name.startswith("%") and not is_system_topic(topic.name)
        and topic.topic.kind != "system"
    ]  # fmt: skip
    pipelines = parts.pipelines.all
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
    chosen = own[:most]
    names = {topic.name for topic in chosen}
    edges = []
    groups: dict[str, dict[str, object]] = {}
    # A group that a pipeline consumes as is drawn once, as that pipeline.
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
            "groups": list(groups.values()),
            "edges": edges,
            "pipelines": [
                _drawn(each, snapshot.groups.get(each.report.group or ""), parts.clock.now())
                for each in pipelines
            ],
            "producers": await _producers(parts),
        }
    )


def _drawn(pipeline: Pipeline, group: GroupSample | None, now: float) -> dict[str, object]:
    """A pipeline, with what is known of the group that it consumes as."""
    report = pipeline.report
    reads = () if group is None else (part.topic for part in group.parts)
    return {
        "name": pipeline.name,
        "state": pipeline.state_at(now),
        "group": report.group,
        "lag": None if group is None else group.lag,
        "topics": report.topics or tuple(each for each in reads if not is_retry_topic(each)),
        "output": report.output,
        "rate": report.rows_per_second,
    }


async def _producers(parts: Parts) -> list[dict[str, object]] | None:
    """Producer groups and how many are connected; None: brokers cannot tell."""
    try:
        found = await parts.admin.consumers.producers()
    except (NotSupported, OrbitError):
        return None
    counts: dict[str, int] = {}
    for group, _ in found:
        counts[group] = counts.get(group, 0) + 1
    return [{"name": group, "count": count} for group, count in sorted(counts.items())]


routes = [Route("/topology", topology)]
