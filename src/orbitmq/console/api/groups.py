"""Consumers: groups with their queues and members, pausing and resets, and Spark pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin.groups import GroupDetails, told_findings
from orbitmq.client.admin.members import (
    Finding,
    FindingKind,
    Members,
    RunningInfo,
    TopicConsumption,
)
from orbitmq.client.admin.resets import ResetFailed, ResetPlan, ResetReport, ResetTo
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.console import words
from orbitmq.console.api.topics import queue_named
from orbitmq.console.collect import GroupSample, Pace, times_of
from orbitmq.console.faults import GROUP_CHECKS, Check, finding_fault, for_cluster, pipeline_faults
from orbitmq.console.http import Row, answer, pick, read_body, read_bytes, text_param, window
from orbitmq.console.pipelines import Pipeline, PipelineReport
from orbitmq.console.roles import Right
from orbitmq.console.settings import BadInput, NotThere
from orbitmq.console.state import ConsoleState, Planned, actor_of, check_right, state_of
from orbitmq.console.words import Action, several
from orbitmq.errors import OrbitError
from orbitmq.names import is_retry_topic
from orbitmq.parsing import Place, Position, position

_COLUMNS = (
    "name", "pace", "lag", "lag_seconds", "in_rate", "out_rate", "members", "dead_letters",
    "open_letters",
)  # fmt: skip
#: Faults that the page of a group finds itself.
_FRESH = frozenset({*(kind.value for kind in FindingKind), "members disagree"})
_WRONG = (Pace.STALLED, Pace.GROWING, Pace.SILENT, Pace.PAUSED)


def group_row(group: GroupSample) -> dict[str, Any]:
    """A group in a list."""
    return pick(
        group,
        "name pace lag lag_seconds retry_lag in_rate out_rate drains_in members dead_letters"
        " dead_last_hour open_letters open_last_hour unknown_letters unknown_last_hour still",
        topics=[part.topic for part in group.parts if not is_retry_topic(part.topic)],
        resent=group.resent.count,
    )


def _matches(row: Row, choice: str) -> bool:
    if choice == "behind":
        return bool(row["lag"])
    if choice == "wrong":
        return bool(row["lag"]) and row["pace"] in _WRONG
    return bool(row["dead_letters"]) if choice == "dead" else True


async def groups(request: Request) -> Response:
    """The list; `filter` is `behind`, `wrong` or `dead`."""
    state = state_of(request)
    snapshot = state.snapshot
    rows = map(group_row, snapshot.groups.values())
    content = window(request, rows, columns=_COLUMNS, default="-lag", matches=_matches)
    by_group = state.pipelines.by_group()
    shown = [{**row, "pipelines": by_group.get(row["name"], ())} for row in content["rows"]]
    return answer({**content, "rows": shown, "at": snapshot.at})


async def group(request: Request) -> Response:
    """One group as it is now: queues with owners, members, findings, settings."""
    state = state_of(request)
    name = request.path_params["group"]
    details = await state.admin.groups.describe(name)
    snapshot = state.collector.snapshot
    sample = None if snapshot is None else snapshot.groups.get(name)
    faults = () if snapshot is None else state.faults()
    handlers = times_of(details.running.values())
    later = await state.later_attempts(name)
    pipelines = [each.name for each in state.pipelines.all if each.report.group == name]
    return answer(
        {
            "name": name,
            "state": details.state,
            "settings": details.settings,
            "sample": None if sample is None else group_row(sample),
            "parts": [] if sample is None else sample.parts,
            "queues": _queues(details),
            "lag": details.progress.lag,
            "lag_seconds": details.progress.lag_seconds,
            "retry_lag": details.progress.retry_lag,
            "later": later,
            "later_text": None if later is None else str(later),
            "member_retries": _member_retries(details),
            "dead_letters": details.dead_letters,
            "members": None if details.members is None else _members(details.members, details),
            "findings": [_explained(each, state) for each in details.findings],
            "faults": [
                fault for fault in faults
                if (
                    fault.check in GROUP_CHECKS
                    and fault.subject == name
                    and fault.kind not in _FRESH
                )
                or (fault.check is Check.PIPELINES and fault.subject in pipelines)
            ],
            "handlers": handlers,
            "pipelines": pipelines,
            "command": state.command(Action.SHOW_GROUP, name),
            "commands": {
                "pause": state.command(Action.PAUSE_GROUP, name),
                "resume": state.command(Action.RESUME_GROUP, name),
            },
            "unreachable": details.progress.unreachable,
        }
    )  # fmt: skip


def _members(members: Members, details: GroupDetails) -> dict[str, Any]:
    """The members, each with the name of its client."""
    told = {
        name: info.properties.get("orbitmqVersion", "") for name, info in details.running.items()
    }
    clients = [
        pick(
            each,
            "client_id address language version",
            client=words.client_name(each.language, each.version, told.get(each.client_id, "")),
        )
        for each in members.clients
    ]
    names = [field.name for field in fields(members) if field.name != "clients"]
    return pick(members, " ".join(names), clients=clients)


def _member_retries(details: GroupDetails) -> int | None:
    """The limit on retries of the members; None: the brokers decide."""
    limits = (info.properties.get("maxReconsumeTimes", "") for info in details.running.values())
    return min((int(each) for each in limits if each.isdecimal()), default=None)


def _explained(finding: Finding, state: ConsoleState) -> dict[str, object]:
    """A finding among the members of a group, with the remedy."""
    fault = for_cluster(finding_fault(finding), state.settings.client.name_servers)
    return {
        "kind": fault.kind,
        "text": fault.text,
        "variants": finding.variants,
        "remedy": fault.remedy,
        "command": fault.command,
    }


def _queues(details: GroupDetails) -> list[dict[str, Any]]:
    return [
        pick(
            each,
            # `last_consumed_at` is the old name of `finished_stored_at`, and misleading.
            "lag lag_seconds in_flight last_consumed_at owner",
            **pick(each.queue, "topic broker id"),
            end=each.broker_offset,
            done=each.consumer_offset,
            finished_stored_at=each.last_consumed_at,
        )
        for each in details.progress.queues
    ]


async def heat(request: Request) -> Response:
    """The lag of each queue over the last hour."""
    state = state_of(request)
    columns = state.collector.heat.of(request.path_params["group"])
    # A retry topic has a row only if it had lag.
    queues = sorted(
        {
            queue
            for column in columns
            for queue, lag in column.lags.items()
            if lag or not is_retry_topic(queue.topic)
        }
    )
    return answer(
        {
            "queues": [str(queue) for queue in queues],
            "times": [column.at for column in columns],
            "lags": [[column.lags.get(queue, 0) for column in columns] for queue in queues],
        }
    )


async def member(request: Request) -> Response:
    """What one consumer owns and does; with `stack=1` with the stacks of its threads."""
    state = state_of(request)
    name, client_id = request.path_params["group"], request.path_params["client"]
    stack = request.query_params.get("stack") == "1"
    info = await state.admin.consumers.running_info(name, client_id, stack=stack)
    command = state.command(Action.SHOW_MEMBER, name, client_id, stack=stack)
    shown = shown_member(info)
    shown["subscriptions"] = _subscriptions(info, await _differences(state, name))
    return answer(shown | {"command": command, "at": state.clock.now()})


async def _differences(state: ConsoleState, group: str) -> dict[str, Finding]:
    """The topics that members of a group subscribe to differently.

    OrbitMQ's brokers report them; for Apache's the last reports of the members count.
    """
    inside = state.members.findings.get(group)
    _, warnings = await state.admin.consumers.look(group)
    found = (*(() if inside is None else inside.findings), *told_findings(warnings))
    return {
        each.topic: each
        for each in found
        if each.kind is FindingKind.DIFFERENT_SUBSCRIPTIONS and each.topic is not None
    }


def _subscriptions(
    info: RunningInfo, differences: Mapping[str, Finding]
) -> list[dict[str, object]]:
    """The subscriptions of a member, and how those of other members differ."""
    mine = {each.topic: each for each in info.subscriptions}
    rows: list[dict[str, object]] = []
    for topic in sorted(mine.keys() | differences.keys()):
        own, finding = mine.get(topic), differences.get(topic)
        rows.append(
            {
                "topic": topic,
                "expression": None if own is None else own.expression,
                "expression_type": None if own is None else own.expression_type,
                "others": [
                    {"clients": each.clients, "expression": each.expression}
                    for each in (() if finding is None else finding.variants)
                    if info.client_id not in each.clients
                ],
            }
        )
    return rows


#: Properties of consumers, and their names on the page.
_LIMITS = {
    "PROP_CONSUMEORDERLY": "in order",
    "PROP_THREADPOOL_CORE_SIZE": "workers",
    "PROP_CONSUMER_START_TIMESTAMP": "started",
    "PROP_CONSUME_TYPE": "kind",
    "PROP_CLIENT_VERSION": "version",
}


def shown_member(info: RunningInfo) -> dict[str, Any]:
    """A consumer by its own report."""
    return pick(
        info,
        "client_id is_orderly cached_messages stack",
        properties=dict(info.properties),
        named={
            word: info.properties[key] for key, word in _LIMITS.items() if key in info.properties
        },
        topics={topic: _consumption(each) for topic, each in info.topics.items()},
        queues=[
            pick(
                each,
                "commit_offset cached_messages cached_mib is_locked is_dropped last_pull_at"
                " last_consume_at last_lock_at",
                **pick(each.queue, "topic broker id"),
            )
            for each in info.queues
        ],
    )


def _consumption(topic: TopicConsumption) -> dict[str, Any]:
    return pick(
        topic,
        "pull_rate pull_time ok_rate failed_rate failed_last_hour consume_time",
        **pick(topic.consume_times or CallTimes({}), "p50 p95 p99 longest"),
    )


async def pause(request: Request) -> Response:
    """Stop a group from pulling."""
    return await _switch(request, resume=False)


async def resume(request: Request) -> Response:
    """Let a group pull again."""
    return await _switch(request, resume=True)


async def _switch(request: Request, *, resume: bool) -> Response:
    state: ConsoleState = state_of(request)
    name = request.path_params["group"]
    command = state.command(Action.RESUME_GROUP if resume else Action.PAUSE_GROUP, name)
    check_right(request, Right.PROGRESS, command)
    if resume:
        after = await state.admin.groups.resume(name)
    else:
        after = await state.admin.groups.pause(name)
    if not after:
        raise NotThere(f"no broker knows group {name!r}")
    outcome = "consumes again" if resume else "paused"
    await state.audit.note(actor_of(request), command, f"{outcome} on {', '.join(sorted(after))}")
    state.collector.look_soon()
    return answer({"command": command, "outcome": outcome})


class MoveRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """From where a group is to consume."""

    #: `reset`, `skip` or `clone`.
    action: str
    group: str
    topic: str | None = None
    #: Of a reset: `shift`, `time`, `offset`, or any position: `earliest`, `latest`, `-10m`, `1500`.
    to: str = "latest"
    time: str | float | None = None
    number: int | None = None
    #: `broker-a:3`; none: all queues.
    queues: tuple[str, ...] = ()
    #: Of a clone: the group whose progress is copied to `group`.
    source: str | None = None


class ApplyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The plan to be applied."""

    plan: str


async def plan(request: Request) -> Response:
    """Plan a reset, skip or clone, queue by queue; changes nothing."""
    state = state_of(request)
    move = await read_body(request, MoveRequest)
    plans, command = await _planned(state, move)
    planned = state.plans.keep(plans, state.for_cluster(command))
    return answer(_shown(planned))


async def _planned(state: ConsoleState, move: MoveRequest) -> tuple[tuple[ResetPlan, ...], str]:
    progress = state.admin.progress
    match move.action:
        case "skip":
            command = words.command(Action.SKIP_BACKLOG, move.group, move.topic)
            return await progress.plan_skip(move.group, move.topic), command
        case "clone":
            if not move.source:
                raise BadInput("a clone needs the group whose progress is copied: source")
            command = words.command(Action.CLONE_GROUP, move.source, move.group, topic=move.topic)
            return await progress.plan_clone(move.source, move.group, move.topic), command
        case "reset":
            if not move.topic:
                raise BadInput("a reset needs a topic")
            queues = [queue_named(move.topic, each) for each in move.queues]
            to, options = _target(move)
            made = await progress.plan_reset(move.group, move.topic, to, queues=queues or None)
            command = words.command(
                Action.RESET_GROUP, move.group, move.topic, **options, queue=queues
            )
            return (made,), command
        case _:
            raise BadInput(f"action must be reset, skip or clone, got {move.action[:40]!r}")


def _target(move: MoveRequest) -> tuple[ResetTo, dict[str, Any]]:
    """The target of a reset, and the options of the command."""
    match move.to:
        case "time":
            if move.time is None:
                raise BadInput("a reset to a time needs one")
            to = ResetTo.time(move.time)
            written = move.time if isinstance(move.time, str) else Position(Place.TIME, move.time)
            return to, {"to": str(written)}
        case "offset":
            return ResetTo.offset(_number(move)), {"to": _number(move)}
        case "shift":
            return ResetTo.shift(_number(move)), {"by": move.number}
        case _:
            found = position(move.to[:40], "to")
            return ResetTo.of(found), {"to": str(found) if found.time is None else move.to}


def _number(move: MoveRequest) -> int:
    if move.number is None:
        raise BadInput(f"a reset to {move.to} needs a number")
    return move.number


def _shown(planned: Planned) -> dict[str, object]:
    return {
        "plan": planned.id,
        "command": planned.command,
        "topics": [
            pick(
                each,
                "group topic skipped replayed online is_change",
                moves=[
                    pick(move, "skipped replayed", **pick(move.queue, "broker id"))
                    | {
                        "from": move.from_offset,
                        "to": move.to_offset,
                        "min": move.min_offset,
                        "max": move.max_offset,
                    }
                    for move in each.moves
                ],
            )
            for each in planned.plans
        ],
    }


async def apply(request: Request) -> Response:
    """Apply a plan, and answer the offset that was read back for every queue."""
    state = state_of(request)
    go = await read_body(request, ApplyRequest)
    check_right(request, Right.PROGRESS, "the command beside the plan")
    planned = state.plans.take(go.plan)
    reports: list[ResetReport] = []
    try:
        for each in planned.plans:
            try:
                reports.append(await state.admin.progress.apply(each))
            except ResetFailed as failed:
                reports.append(failed.report)
    except OrbitError as error:
        await state.audit.note(actor_of(request), planned.command, str(error), is_done=False)
        raise
    is_effective = all(report.is_effective for report in reports)
    await state.audit.note(
        actor_of(request), planned.command, _outcome(reports), is_done=is_effective
    )
    state.collector.look_soon(configuration=False)
    return answer(
        {
            "command": planned.command,
            "is_effective": is_effective,
            "outcome": _outcome(reports),
            "topics": [
                {
                    "topic": report.plan.topic,
                    "queues": [
                        {
                            "broker": each.move.queue.broker,
                            "id": each.move.queue.id,
                            "wanted": each.move.to_offset,
                            "read_back": each.read_back,
                            "problem": each.problem,
                        }
                        for each in report.outcomes
                    ],
                }
                for report in reports
            ],
        }
    )


def _outcome(reports: list[ResetReport]) -> str:
    skipped = sum(report.plan.skipped for report in reports)
    replayed = sum(report.plan.replayed for report in reports)
    queues = sum(len(report.outcomes) for report in reports)
    wrong = sum(not each.is_effective for report in reports for each in report.outcomes)
    if wrong:
        return f"{wrong} of {several(queues, 'queue')} did not move"
    return (
        f"{several(queues, 'queue')} read back; {several(skipped, 'message')} skipped, "
        f"{replayed:,} to be consumed again"
    )


def shown_pipeline(pipeline: Pipeline, state: ConsoleState) -> dict[str, Any]:
    report, now = pipeline.report, state.clock.now()
    servers = state.settings.client.name_servers
    is_late = (
        report.batch_seconds
        and report.trigger_seconds
        and report.batch_seconds > report.trigger_seconds
    )
    is_up = pipeline.is_up_at(now)
    return pick(
        report,
        "batch rows batch_seconds trigger_seconds group topics by_topic output lag done retried"
        " dead failed_share error url",
        # What ended has no rate.
        rows_per_second=report.rows_per_second if is_up else None,
        input_rows_per_second=report.input_rows_per_second if is_up else None,
        name=pipeline.name,
        state=pipeline.state_at(now),
        reported_at=pipeline.reported_at,
        # Not read by its source; the lag of a group is what is not finished.
        unread=pipeline.total_lag,
        unread_by_queue=report.lag,
        lag_total=pipeline.total_lag,
        is_late=bool(is_late and is_up),
        is_slow=is_up and _is_slow(report),
        faults=tuple(for_cluster(each, servers) for each in pipeline_faults((pipeline,), now)),
    )


def _is_slow(report: PipelineReport) -> bool:
    """Whether more comes in than is processed, while something waits."""
    came, went = report.input_rows_per_second, report.rows_per_second
    return bool(came and went and came > went and any(report.lag.values()))


async def pipelines(request: Request) -> Response:
    """Spark queries that have reported."""
    state = state_of(request)
    return answer({"pipelines": [shown_pipeline(each, state) for each in state.pipelines.all]})


async def pipeline(request: Request) -> Response:
    """One query, as it reported last."""
    state = state_of(request)
    found = state.pipelines.get(request.path_params["name"])
    # Behind a proxy, only the page knows the address of this console.
    console = text_param(request, "console") or "URL"
    commands = {"forget": words.command(Action.FORGET_PIPELINE, found.name, console=console)}
    return answer(shown_pipeline(found, state) | {"commands": commands})


async def report(request: Request) -> Response:
    """Accept a driver's report."""
    state = state_of(request)
    taken = state.pipelines.report(request.path_params["name"], await read_bytes(request))
    state.events.publish("pipeline", shown_pipeline(taken, state))
    return Response(status_code=204)


async def forget(request: Request) -> Response:
    """Remove a pipeline from the page; its next report brings it back."""
    state = state_of(request)
    name = request.path_params["name"]
    command = words.command(Action.FORGET_PIPELINE, name, console="URL")
    check_right(request, Right.PIPELINES, command)
    state.pipelines.forget(name)
    await state.audit.note(actor_of(request), command, "taken off the list")
    return Response(status_code=204)


routes = [
    Route("/groups", groups),
    Route("/groups/{group}", group),
    Route("/groups/{group}/heat", heat),
    Route("/groups/{group}/members/{client}", member),
    Route("/groups/{group}/pause", pause, methods=["POST"]),
    Route("/groups/{group}/resume", resume, methods=["POST"]),
    Route("/progress/plan", plan, methods=["POST"]),
    Route("/progress/apply", apply, methods=["POST"]),
    Route("/pipelines", pipelines),
    # The name of a query may have slashes.
    Route("/pipelines/{name:path}", pipeline, methods=["GET"]),
    Route("/pipelines/{name:path}", report, methods=["POST"]),
    Route("/pipelines/{name:path}", forget, methods=["DELETE"]),
]
