"""The page and what it is made of.

One HTML file, whichever view is asked for; with what the first view shows already in it, so that
something is to be seen before any script has asked for anything.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from orbitmq.console.api.overview import known_now
from orbitmq.console.api.session import me_content
from orbitmq.console.parts import parts_of
from orbitmq.console.views import is_view

STATIC = Path(str(files("orbitmq.console") / "static"))
_MARK = "<!--boot-->"
_PRELOAD = "<!--preload-->"
#: Where to find what others offer at such an address.
_ELSEWHERE = {
    "/metrics": "a console has no metrics; brokers have, where --http-port of `orbitmq up` says"
}


class Static(StaticFiles):
    """Files that are asked for anew each time, and answered with "unchanged" when they are."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


class Page:
    """The HTML file, read once."""

    def __init__(self) -> None:
        modules = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js"))
        links = "".join(f'<link rel="modulepreload" href="/static/{name}">' for name in modules)
        text = (STATIC / "index.html").read_text(encoding="utf-8")
        self._before, _, self._after = text.replace(_PRELOAD, links).partition(_MARK)

    async def show(self, request: Request) -> Response:
        """The page; with the status of what is not there at an address that means no view."""
        is_there = is_view(_asked_for(request.scope))
        if not is_there and "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404, _ELSEWHERE.get(request.scope["path"], "no view is here"))
        parts = parts_of(request)
        session = request.state.session
        content: dict[str, object] = {"me": me_content(parts, session)}
        if session is not None:
            content["now"] = known_now(parts)
        # Inside of a script element only `<` could end it, or begin a comment.
        data = msgspec.json.encode(content).decode().replace("<", "\\u003c")
        boot = f'<script type="application/json" id="boot">{data}</script>'
        return HTMLResponse(
            self._before + boot + self._after,
            200 if is_there else 404,
            headers={"cache-control": "no-store"},
        )


def _asked_for(scope: Scope) -> str:
    """The path before it was decoded: a name may have a slash in it."""
    raw: bytes | None = scope.get("raw_path")
    return str(scope["path"]) if raw is None else raw.decode("latin-1").partition("?")[0]


async def health(request: Request) -> Response:
    """Whether the console lives; says nothing about the cluster."""
    return Response("ok\n", media_type="text/plain")


def page_routes() -> list[Route]:
    return [Route("/health", health), Route("/{path:path}", Page().show)]
