"""Moving progress: a plan to look at, then exactly that plan, read back."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin import ResetFailed, ResetPlan, ResetReport, ResetTo
from orbitmq.console import commandlines
from orbitmq.console.answers import answer, given
from orbitmq.console.api.topics import queue_named
from orbitmq.console.errors import BadInput
from orbitmq.console.parts import Parts, parts_of, who
from orbitmq.console.plans import Planned
from orbitmq.console.words import several
from orbitmq.errors import OrbitError


class Wish(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where a group is to go on."""

    #: `reset`, `skip` or `clone`.
    action: str
    group: str
    topic: str | None = None
    #: Of a reset: `begin`, `end`, `time`, `offset` or `shift`.
    to: str = "end"
    time: str | float | None = None
    number: int | None = None
    #: `broker-a:3`; none: all queues.
    queues: tuple[str, ...] = ()
    #: Of a clone: whose progress is copied to `group`.
    source: str | None = None


class Go(msgspec.Struct, forbid_unknown_fields=True):
    """The plan to be applied."""

    plan: str


async def plan(request: Request) -> Response:
    """What a wish would do, queue by queue; changes nothing."""
    parts = parts_of(request)
    wish = await given(request, Wish)
    plans, command = await _planned(parts, wish)
    planned = parts.plans.keep(plans, parts.aimed(command))
    return answer(_shown(planned))


async def _planned(parts: Parts, wish: Wish) -> tuple[tuple[ResetPlan, ...], str]:
    progress = parts.admin.progress
    match wish.action:
        case "skip":
            command = commandlines.skip_backlog(wish.group, wish.topic)
            return await progress.plan_skip(wish.group, wish.topic), command
        case "clone":
            if not wish.source:
                raise BadInput("a clone needs the group whose progress is copied: source")
            command = commandlines.clone_group(wish.source, wish.group, wish.topic)
            return await progress.plan_clone(wish.source, wish.group, wish.topic), command
        case "reset":
            if not wish.topic:
                raise BadInput("a reset needs a topic")
            queues = [queue_named(wish.topic, each) for each in wish.queues]
            to, options = _target(wish)
            made = await progress.plan_reset(wish.group, wish.topic, to, queues=queues or None)
            command = commandlines.reset_group(
                wish.group,
                wish.topic,
                queues=queues,
                **options,  # type: ignore[arg-type]
            )
            return (made,), command
        case _:
            raise BadInput(f"action must be reset, skip or clone, got {wish.action[:40]!r}")


def _target(wish: Wish) -> tuple[ResetTo, dict[str, object]]:
    """Where a reset goes, and how the command says it."""
    match wish.to:
        case "begin":
            return ResetTo.begin(), {"to_begin": True}
        case "end":
            return ResetTo.end(), {"to_end": True}
        case "time":
            if wish.time is None:
                raise BadInput("a reset to a time needs one")
            to = ResetTo.time(wish.time)
            return to, {"to_time": str(wish.time)}
        case "offset":
            return ResetTo.offset(_number(wish)), {"to_offset": wish.number}
        case "shift":
            return ResetTo.shift(_number(wish)), {"by": wish.number}
        case _:
            raise BadInput(f"to must be begin, end, time, offset or shift, got {wish.to[:40]!r}")


def _number(wish: Wish) -> int:
    if wish.number is None:
        raise BadInput(f"a reset to {wish.to} needs a number")
    return wish.number


def _shown(planned: Planned) -> dict[str, object]:
    return {
        "plan": planned.id,
        "command": planned.command,
        "topics": [
            {
                "group": each.group,
                "topic": each.topic,
                "skipped": each.skipped,
                "replayed": each.replayed,
                "online": each.online,
                "is_change": each.is_change,
                "moves": [
                    {
                        "broker": move.queue.broker,
                        "id": move.queue.id,
                        "from": move.from_offset,
                        "to": move.to_offset,
                        "min": move.min_offset,
                        "max": move.max_offset,
                        "skipped": move.skipped,
                        "replayed": move.replayed,
                    }
                    for move in each.moves
                ],
            }
            for each in planned.plans
        ],
    }


async def apply(request: Request) -> Response:
    """Do what a plan says; says for every queue what was read back."""
    parts = parts_of(request)
    go = await given(request, Go)
    parts.check_write("the command beside the plan")
    planned = parts.plans.take(go.plan)
    reports: list[ResetReport] = []
    try:
        for each in planned.plans:
            try:
                reports.append(await parts.admin.progress.apply(each))
            except ResetFailed as failed:
                reports.append(failed.report)
    except OrbitError as error:
        await parts.audit.note(who(request), planned.command, str(error), is_done=False)
        raise
    is_effective = all(report.is_effective for report in reports)
    await parts.audit.note(who(request), planned.command, _outcome(reports), is_done=is_effective)
    parts.collector.look_soon(configuration=False)
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


routes = [
    Route("/progress/plan", plan, methods=["POST"]),
    Route("/progress/apply", apply, methods=["POST"]),
]
