"""All of version 1, which describes itself: `GET /api/v1/` lists every address."""

from __future__ import annotations

import inspect

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from orbitmq.console.answers import answer
from orbitmq.console.api import (
    charts,
    deadletters,
    groups,
    messages,
    overview,
    pipelines,
    progress,
    sending,
    session,
    topics,
    topology,
)

PREFIX = "/api/v1"

_ROUTES = [
    *session.routes,
    *overview.routes,
    *topics.routes,
    *groups.routes,
    *messages.routes,
    *deadletters.routes,
    *progress.routes,
    *charts.routes,
    *sending.routes,
    *topology.routes,
    *pipelines.routes,
]


async def index(_: Request) -> Response:
    """What can be asked for: every address with its methods and what it is about."""
    return answer({"version": 1, "routes": [_described(each) for each in (_INDEX, *_ROUTES)]})


def _described(route: Route) -> dict[str, object]:
    methods = sorted((route.methods or set()) - {"HEAD"})
    return {
        "path": f"{PREFIX}{route.path}".replace(":path}", "}").rstrip("/"),
        "methods": methods,
        "about": inspect.getdoc(route.endpoint) or "",
    }


_INDEX = Route("/", index)
api = Mount(PREFIX, routes=[_INDEX, *_ROUTES])
