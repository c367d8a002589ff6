"""The console: an ASGI application, and a server that runs it on the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from orbitmq.client.engine import AsyncLife
from orbitmq.clock import Clock, SystemClock
from orbitmq.console.api import access, alerts, deadletters, groups, messages, overview, topics
from orbitmq.console.api.access import me_content, small_page
from orbitmq.console.api.overview import clusters_content, known_now
from orbitmq.console.http import AccessControl, answer, on_error, on_http_error
from orbitmq.console.settings import CLUSTERS, CannotListen, ConsoleError, ConsoleSettings
from orbitmq.console.state import Clusters, ConsoleState, clusters_of, state_of
from orbitmq.errors import OrbitError

PREFIX = "/api/v1"
STATIC = Path(str(files("orbitmq.console") / "static"))
_MARK = "<!--boot-->"
_PRELOAD = "<!--preload-->"
#: Addresses that other servers have, and where to find what they offer.
_ELSEWHERE = {
    "/metrics": "a console has no metrics; brokers have, where --http-port of `orbitmq up` says"
}
#: The views, at whose addresses a browser may load the page; `VIEWS` in main.js is the same table.
#: A name in braces stands for any text without a slash.
VIEWS: Final = (
    "/",
    "/topics",
    "/topics/{topic}",
    "/groups",
    "/groups/{group}",
    "/messages",
    "/dead-letters",
    "/dead-letters/{group}",
    "/progress",
    "/consumers",
    "/consumers/{group}",
    "/consumers/{group}/{client}",
    "/charts",
    "/send",
    "/topology",
    "/pipelines",
    "/pipelines/{name}",
    "/brokers",
    "/alerts",
    "/audit",
    "/access",
    CLUSTERS,
)
_IS_VIEW = re.compile(
    "|".join(re.sub(r"\{\w+\}", "[^/]+", view).rstrip("/") + "/*" for view in VIEWS)
).fullmatch
#: Seconds that open requests have to end at a stop.
_GRACE = 3
#: Connections and requests at the same time; further ones are refused before files run out.
_MOST_CONNECTIONS = 800


class Console(AsyncLife):
    """A console that listens, on the caller's event loop.

    settings = ConsoleSettings(client=ClientSettings(name_servers=("localhost:9876",)))
    async with Console(settings) as console:
        print(console.url)
    """

    def __init__(self, settings: ConsoleSettings, *, clock: Clock | None = None) -> None:
        self.settings = settings
        self.app = make_app(settings, clock=clock)
        self.clusters: Clusters = self.app.state.clusters
        #: The first cluster.
        self.state: ConsoleState = self.clusters.default
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> None:
        """Returns when browsers can connect. Raises `ConsoleError`."""
        settings = self.settings
        self._socket = _listen(settings.host, settings.port)
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            server_header=False,
            # The client is the one that connects: any client can write a header.
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.private_key,
            limit_concurrency=_MOST_CONNECTIONS,
            # Pages keep their connections.
            timeout_keep_alive=30,
        )
        try:
            await self.clusters.start()
        except BaseException:
            self._socket.close()
            raise
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="console")
        while not self._server.started:
            if self._task.done():
                await self.clusters.stop()
                self._socket.close()
                await self._task
                raise ConsoleError("the console ended before it listened")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """End all streams, answer open requests, and close the connections to the cluster."""
        server, self._server = self._server, None
        if server is None or self._task is None:
            return
        self.clusters.end_streams()
        server.should_exit = True
        await self._task
        await self.clusters.stop()
        if self._socket is not None:
            self._socket.close()

    async def until_ended(self) -> str:
        """Return, with the reason, when the server has ended by itself."""
        if self._task is None:
            return "the console is not running"
        await asyncio.wait((self._task,))
        error = None if self._task.cancelled() else self._task.exception()
        return f"the console ended by itself: {error or 'no reason given'}"

    @property
    def port(self) -> int:
        """The port that it listens on."""
        if self._socket is None:
            return self.settings.port
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        host = self.settings.host
        if host in ("0.0.0.0", "::", ""):  # noqa: S104  # recognised, not listened on
            host = "127.0.0.1"
        scheme = "https" if self.settings.is_encrypted else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/"


class _Server(uvicorn.Server):
    """A server that leaves signals to the owner of the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise CannotListen(f"the console cannot listen on {host}:{port}: {error}") from error
    return listener


def make_app(settings: ConsoleSettings, *, clock: Clock | None = None) -> Starlette:
    """An application that looks at its clusters during its lifespan, on one event loop."""
    clusters = Clusters(settings, clock or SystemClock())

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        await clusters.start()
        try:
            yield
        finally:
            await clusters.stop()

    app = Starlette(
        routes=[
            api,
            *access.pages,
            Mount("/static", Static(directory=STATIC)),
            *page_routes(),
        ],
        middleware=[
            *([Middleware(ClusterAddresses)] if clusters.are_several else ()),
            Middleware(
                AccessControl,
                logins=clusters.logins,
                allowed_hosts=settings.allowed_hosts,
                token=settings.token,
            ),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=5),
        ],
        exception_handlers={OrbitError: on_error, HTTPException: on_http_error},
        lifespan=running,
    )
    app.state.clusters = clusters
    return app


class ClusterAddresses:
    """Middleware that takes `/clusters/NAME` off the front of an address, and notes the name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw = _asked_for(scope)
            if match := _IN_CLUSTER(raw):
                rest = match[2] or "/"
                scope = dict(scope)
                scope |= {"raw_path": rest.encode("latin-1"), "path": unquote(rest)}
                scope["state"] = {**scope.get("state", {}), "cluster": unquote(match[1])}
        await self._app(scope, receive, send)


_IN_CLUSTER = re.compile(CLUSTERS + "/([^/]+)(/.*)?", re.DOTALL).fullmatch


class Static(StaticFiles):
    """Files that browsers revalidate with every request."""

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
        """The page, with the content of the first view in it; 404 where there is no view."""
        asked = _asked_for(request.scope)
        is_there = _IS_VIEW(asked) is not None
        if not is_there and "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404, _ELSEWHERE.get(request.scope["path"], "no view is here"))
        clusters, session = clusters_of(request), request.state.session
        is_list = asked.rstrip("/") == CLUSTERS
        name = getattr(request.state, "cluster", None)
        if clusters.are_several and name is None and is_there and not is_list:
            place = CLUSTERS if asked == "/" else clusters.default.settings.prefix + asked
            query = request.url.query
            return RedirectResponse(place + (f"?{query}" if query else ""), 307)
        if session is not None and name is not None and name not in clusters.all:
            return small_page("", f"This console has no cluster {name}.", 404)
        content: dict[str, object] = {"me": me_content(request, session)}
        if session is not None:
            content["now"] = clusters_content(clusters) if is_list else known_now(state_of(request))
        # Inside a script element only `<` could end it or begin a comment.
        data = msgspec.json.encode(content).decode().replace("<", "\\u003c")
        boot = f'<script type="application/json" id="boot">{data}</script>'
        return HTMLResponse(
            self._before + boot + self._after,
            200 if is_there else 404,
            headers={"cache-control": "no-store"},
        )


def _asked_for(scope: Scope) -> str:
    """The path before decoding: a name may have a slash in it."""
    raw: bytes | None = scope.get("raw_path")
    return str(scope["path"]) if raw is None else raw.decode("latin-1").partition("?")[0]


async def health(request: Request) -> Response:
    """Whether the console runs; says nothing about the cluster."""
    return Response("ok\n", media_type="text/plain")


def page_routes() -> list[Route]:
    return [Route("/health", health), Route("/{path:path}", Page().show)]


ROUTES = [
    *access.routes,
    *overview.routes,
    *topics.routes,
    *groups.routes,
    *messages.routes,
    *deadletters.routes,
    *alerts.routes,
]


async def index(_: Request) -> Response:
    """Every address with its methods and what it is about."""
    return answer({"version": 1, "routes": [_described(each) for each in (_INDEX, *ROUTES)]})


def _described(route: Route) -> dict[str, object]:
    methods = sorted((route.methods or set()) - {"HEAD"})
    return {
        "path": f"{PREFIX}{route.path}".replace(":path}", "}").rstrip("/"),
        "methods": methods,
        "about": inspect.getdoc(route.endpoint) or "",
    }


_INDEX = Route("/", index)
api = Mount(PREFIX, routes=[_INDEX, *ROUTES])
