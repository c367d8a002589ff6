"""Spark queries: their reports, and the last state of each."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.console import words
from orbitmq.console.checks import for_cluster, pipeline_faults
from orbitmq.console.http import LARGEST, answer, pick, text_param
from orbitmq.console.pipelines import Pipeline, PipelineReport
from orbitmq.console.settings import BadInput
from orbitmq.console.state import ConsoleState, actor_of, state_of
from orbitmq.console.words import Action


def shown_pipeline(pipeline: Pipeline, state: ConsoleState) -> dict[str, Any]:
    report, now = pipeline.report, state.clock.now()
    servers = state.settings.client.name_servers
    is_late = (
        report.batch_seconds
        and report.trigger_seconds
        and report.batch_seconds > report.trigger_seconds
    )
    return pick(
        report,
        "batch rows rows_per_second input_rows_per_second batch_seconds trigger_seconds group"
        " topics output lag done retried dead failed_share error url",
        name=pipeline.name,
        state=pipeline.state_at(now),
        reported_at=pipeline.reported_at,
        # Not read by its source; the lag of a group is what is not finished.
        unread=pipeline.total_lag,
        unread_by_queue=report.lag,
        lag_total=pipeline.total_lag,
        is_late=bool(is_late),
        is_slow=_is_slow(report),
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
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise BadInput(f"a report has {LARGEST} bytes at most")
    taken = state.pipelines.report(request.path_params["name"], bytes(body))
    state.events.publish("pipeline", shown_pipeline(taken, state))
    return Response(status_code=204)


async def forget(request: Request) -> Response:
    """Remove a pipeline from the page; its next report brings it back."""
    state = state_of(request)
    name = request.path_params["name"]
    command = words.command(Action.FORGET_PIPELINE, name, console="URL")
    state.check_write(command)
    state.pipelines.forget(name)
    await state.audit.note(actor_of(request), command, "taken off the list")
    return Response(status_code=204)


routes = [
    Route("/pipelines", pipelines),
    # The name of a query may have slashes.
    Route("/pipelines/{name:path}", pipeline, methods=["GET"]),
    Route("/pipelines/{name:path}", report, methods=["POST"]),
    Route("/pipelines/{name:path}", forget, methods=["DELETE"]),
]
