"""Alerts: webhooks and how posts to them go, and silences."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.console.alerts import Delivery, SilenceRequest
from orbitmq.console.http import answer, pick, read_body
from orbitmq.console.roles import Right
from orbitmq.console.state import ConsoleState, actor_of, check_right, state_of


async def alerts(request: Request) -> Response:
    """Webhooks without their addresses, the latest posts, and the silences in force."""
    state = state_of(request)
    return answer(
        {
            "webhooks": [_shown(state, each) for each in state.alerts.deliveries.values()],
            "posts": list(state.alerts.posts),
            "silences": state.alerts.silences.all,
        }
    )


def _shown(state: ConsoleState, delivery: Delivery) -> dict[str, object]:
    hook = delivery.webhook
    book = state.alerts.waiting[hook.name]
    return pick(hook, "name host format severity subjects repeat") | {
        "for": hook.wait,
        "lasting": len(book.told),
        "waiting": len(book.waiting),
        "lost": book.lost,
        **pick(delivery, "posted posted_at failures problem next_at"),
    }


async def test(request: Request) -> Response:
    """Post a test to a webhook."""
    state, name = state_of(request), request.path_params["name"]
    check_right(request, Right.ALERTS)
    state.alerts.test(name, actor_of(request))
    await state.audit.note(actor_of(request), f"test of webhook {name}", "a test is posted")
    return Response(status_code=202)


async def silences(request: Request) -> Response:
    """The silences in force."""
    return answer({"silences": state_of(request).alerts.silences.all})


async def silence(request: Request) -> Response:
    """Silence a `subject` (with `*`) `for` some seconds or `until` a time, with a `reason`."""
    state = state_of(request)
    wanted = await read_body(request, SilenceRequest)
    check_right(request, Right.ALERTS)
    return answer(await state.alerts.silences.add(wanted, actor_of(request)), 201)


async def end_silence(request: Request) -> Response:
    """Remove a silence."""
    state = state_of(request)
    check_right(request, Right.ALERTS)
    return answer(
        await state.alerts.silences.remove(request.path_params["identity"], actor_of(request))
    )


routes = [
    Route("/alerts", alerts),
    Route("/alerts/{name}/test", test, methods=["POST"]),
    Route("/silences", silences),
    Route("/silences", silence, methods=["POST"]),
    Route("/silences/{identity}", end_silence, methods=["DELETE"]),
]
