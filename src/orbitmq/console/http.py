"""HTTP of the console: access control, JSON answers, errors, events, windows of lists.

* `Host` must be a name of this console or an address: other names could be rebound by DNS.
* Only the routed path is judged: a URL built from headers could differ.
* The API answers pages of this console only: other sites could make it work.
* Requests that change something need an `Origin` of this host, if there is one, and the session's
  token in a header, which forms and other sites cannot set.
* A policy in every answer lets the page run the console's scripts only.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypedDict, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orbitmq.client.errors import (
    BrokerNotFound,
    BrokerUnavailable,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    NoNameServer,
    QueueNotFound,
    TopicNotFound,
)
from orbitmq.console.logins import Logins, Session
from orbitmq.console.settings import BadInput, ConsoleError, Forbidden, NotLoggedIn, TooManyAttempts
from orbitmq.errors import NotSupported, OrbitError
from orbitmq.remoting.settings import RemotingError

log = logging.getLogger(__name__)

T = TypeVar("T")

CSRF_HEADER = "x-csrf-token"

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
#: Paths that need no session: the page itself, which holds no data, and the login.
_OPEN_PATHS = ("/static/", "/health")
_LOGIN_PATHS = frozenset({"/api/v1/login", "/api/v1/me"})
#: Reports of pipelines have a token of their own, which also permits to read and to delete them.
PIPELINES = "/api/v1/pipelines/"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


#: What the token of pipelines stands for, at the addresses where it is taken.
_TOKEN_SESSION = Session(csrf="", until=float("inf"))


class AccessControl:
    """Middleware that checks requests and adds headers to answers."""

    def __init__(
        self, app: ASGIApp, *, logins: Logins, allowed_hosts: Iterable[str], token: str | None
    ) -> None:
        self._app = app
        self._logins = logins
        self._hosts = frozenset(name.lower() for name in allowed_hosts) | {"localhost"}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/api/"):
                    headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            self._check(Request(scope))
        except ConsoleError as error:
            await error_answer(error)(scope, receive, marked)
            return
        await self._app(scope, receive, marked)

    def _check(self, request: Request) -> None:
        self._check_host(request.headers)
        path: str = request.scope["path"]
        cookie = request.cookies.get(cookie_name(request.headers.get("host", "")))
        session = self._logins.session(cookie)
        request.scope.setdefault("state", {})["session"] = session
        if path.startswith("/api/"):
            _check_site(request.headers)
        if request.method not in _SAFE:
            self._check_origin(request.headers)
        if request.method == "POST" and path.startswith(PIPELINES):
            self._check_report(request)
            return
        if (
            request.method in ("GET", "DELETE")
            and f"{path}/".startswith(PIPELINES)
            and self._has_token(request)
        ):
            request.state.session = _TOKEN_SESSION
            return
        if not path.startswith("/api/") or path in _LOGIN_PATHS or path.startswith(_OPEN_PATHS):
            return
        if session is None:
            raise NotLoggedIn
        if request.method not in _SAFE:
            _check_token(request, session)

    def _check_host(self, headers: Headers) -> None:
        host = _name(headers.get("host", ""))
        if host in self._hosts or _is_address(host):
            return
        raise Forbidden(
            f"this console is not known as {host[:100]!r}; allow the name with --allow-host"
        )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise Forbidden("the request comes from another site")

    def _check_report(self, request: Request) -> None:
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise Forbidden("a report is sent as application/json")
        if self._token is None and not self._logins.is_needed:
            return
        if not self._has_token(request):
            raise Forbidden(
                "a pipeline reports with the console's token: Authorization: Bearer TOKEN; start "
                "the console with ORBITMQ_CONSOLE_TOKEN or --token-file"
            )

    def _has_token(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        is_bearer = self._token is not None and kind.lower() == "bearer"
        return is_bearer and same_text(given, self._token or "")


def _check_site(headers: Headers) -> None:
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("the request comes from another site")


def _check_token(request: Request, session: Session) -> None:
    if not same_text(request.headers.get(CSRF_HEADER, ""), session.csrf):
        raise Forbidden("the page is out of date; load it again")


#: A name or an address, and a port: nothing else may be in the header.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")


def _name(host: str) -> str:
    """The host without its port; other text unchanged, which matches no name."""
    match = _HOST.fullmatch(host.strip().lower())
    return host if match is None else match[1] or match[2]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_port = re.compile(r"[^:\[]:([0-9]{1,5})$").search


def cookie_name(host: str) -> str:
    """The cookie that holds a session's token; `host` is what the browser asks for.

    Browsers keep cookies by host and not by port: two consoles on one machine would end each
    other's sessions.
    """
    found = _port(host)
    return f"orbitmq_console_{found[1]}" if found else "orbitmq_console"


def same_text(given: str, wanted: str) -> bool:
    """Whether two secrets are equal, in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())


#: The largest body of a request.
LARGEST = 4 * 1024 * 1024

_NOT_THERE = (
    BrokerNotFound,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    QueueNotFound,
    TopicNotFound,
)
_AWAY = (BrokerUnavailable, NoNameServer, RemotingError)


def answer(content: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(_encode(content), status, media_type="application/json")


def pick(source: object, names: str, **others: object) -> dict[str, Any]:
    """The named attributes of a value, and other fields, for JSON."""
    return {name: getattr(source, name) for name in names.split()} | others


def error_answer(error: OrbitError) -> Response:
    """An error: its sentence, its kind, and whether trying again may help."""
    content = {
        "error": str(error),
        "kind": type(error).__name__,
        "retriable": error.retriable,
    }
    response = answer(content, status_of(error))
    if isinstance(error, TooManyAttempts):
        response.headers["retry-after"] = str(math.ceil(error.wait))
    return response


def status_of(error: OrbitError) -> int:
    if isinstance(error, ConsoleError):
        return error.status
    if isinstance(error, _NOT_THERE):
        return 404
    if isinstance(error, NotSupported):
        return 501
    return 502 if isinstance(error, _AWAY) else 400


async def on_error(request: Request, exception: Exception) -> Response:
    """The handler of OrbitMQ's errors."""
    if not isinstance(exception, OrbitError):
        raise exception
    if status_of(exception) >= 500:
        log.info("%s", exception, extra={"path": request.url.path})
    return error_answer(exception)


async def on_http_error(request: Request, exception: Exception) -> Response:
    """The handler of unknown addresses and of methods that an address does not have."""
    if not isinstance(exception, HTTPException):
        raise exception
    content = {
        "error": f"{request.method} {request.url.path}: {exception.detail}",
        "kind": "NotThere",
        "retriable": False,
    }
    return answer(content, exception.status_code)


async def read_bytes(request: Request, largest: int = LARGEST) -> bytes:
    """The body of a request. Raises `BadInput`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest:
            raise BadInput(f"a request has {largest} bytes at most")
    return bytes(body)


async def read_body(request: Request, kind: type[T], *, largest: int = LARGEST) -> T:
    """The value in the body of a request. Raises `BadInput`."""
    try:
        return msgspec.json.decode(await read_bytes(request, largest) or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise BadInput(str(error)) from error


def int_param(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number of the query. Raises `BadInput`."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise BadInput(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}")
    return value


def text_param(request: Request, name: str) -> str | None:
    """A text of the query; None when it is empty."""
    return request.query_params.get(name) or None


def required_param(request: Request, name: str) -> str:
    """A text of the query. Raises `BadInput`."""
    value = text_param(request, name)
    if value is None:
        raise BadInput(f"{name} must be given")
    return value


def _encode(content: object) -> bytes:
    return msgspec.json.encode(content, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise NotImplementedError(type(value))


#: Pages that can listen at the same time.
MOST_LISTENERS = 200
#: Events that a slow page may be behind before it misses some.
_BEHIND = 64
#: Seconds of silence before a comment keeps proxies from closing the connection.
SILENCE = 15.0


class Events:
    """Server-sent events for every open page.

    The usual package patches the HTTP server's class at import and leaves a task on the loop,
    which a library must not do.
    """

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._is_closed = False

    def publish(self, kind: str, content: object) -> None:
        """Send an event to all pages."""
        if not self._listeners:
            return
        event = encoded(kind, content)
        for listener in self._listeners:
            if listener.full():
                # The newest event of a kind replaces those before it.
                listener.get_nowait()
            listener.put_nowait(event)

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """The events from now on, until the console stops."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_BEHIND)
        if self._is_closed or len(self._listeners) >= MOST_LISTENERS:
            return
        self._listeners.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.discard(queue)

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for listener in self._listeners:
            while listener.full():
                listener.get_nowait()
            listener.put_nowait(None)

    @property
    def listeners(self) -> int:
        return len(self._listeners)


def encoded(kind: str, content: object) -> bytes:
    """One event; JSON has no line breaks, so it is one line."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))


def stream(
    events: AsyncGenerator[bytes, None], is_allowed: Callable[[], bool]
) -> StreamingResponse:
    """An answer that carries events until the session ends."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    content = _kept_alive(events, is_allowed)
    return StreamingResponse(content, media_type="text/event-stream", headers=headers)


async def _kept_alive(
    events: AsyncGenerator[bytes, None], is_allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    # The delay before the browser connects again, and a sign that the stream is open.
    yield b"retry: 2000\n\n"
    async with aclosing(events):
        coming: asyncio.Future[bytes] | None = None
        try:
            while True:
                if coming is None:
                    coming = asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait((coming,), timeout=SILENCE)
                if not is_allowed():
                    return
                if not done:
                    yield b": still here\n\n"
                    continue
                finished, coming = coming, None
                try:
                    yield finished.result()
                except StopAsyncIteration:
                    return
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


Row = Mapping[str, Any]

MOST_ROWS = 500


#: A part of a list: how long that is, where the part begins, and what is in it.
Window = TypedDict("Window", {"total": int, "from": int, "rows": list[Row]})


def window(
    request: Request,
    rows: Iterable[Row],
    *,
    columns: Iterable[str],
    default: str,
    matches: Callable[[Row, str], bool] | None = None,
) -> Window:
    """The rows of a long list that a query selects.

    `search` is part of a name; `sort` a column, with `-` in front for the largest first; `from` and
    `count` say which rows of the result.
    """
    params = request.query_params
    wanted = params.get("search", "").strip().lower()
    found = [row for row in rows if wanted in row["name"].lower()] if wanted else list(rows)
    if matches is not None and (choice := params.get("filter", "")):
        found = [row for row in found if matches(row, choice)]
    order = params.get("sort") or default
    column = order.removeprefix("-")
    if column not in columns:
        raise BadInput(f"sort must be one of {', '.join(columns)}, got {column[:40]!r}")
    found.sort(key=lambda row: row["name"])
    found.sort(key=lambda row: _place(row[column]), reverse=order.startswith("-"))
    start = int_param(request, "from", 0, 0, 10_000_000)
    count = int_param(request, "count", 100, 1, MOST_ROWS)
    return {"total": len(found), "from": start, "rows": found[start : start + count]}


def _place(value: Any) -> tuple[bool, Any]:
    """A sort key: unknown values come first."""
    return (value is not None, value if value is not None else 0)
