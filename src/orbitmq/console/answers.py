"""Requests and answers of the API: JSON, errors with a status, events, windows of long lists."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypedDict, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

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
from orbitmq.console.errors import BadInput, ConsoleError, TooManyAttempts
from orbitmq.errors import NotSupported, OrbitError
from orbitmq.remoting.settings import RemotingError

log = logging.getLogger(__name__)

T = TypeVar("T")

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


async def read_body(request: Request, kind: type[T], *, largest: int = LARGEST) -> T:
    """The body of a request. Raises `BadInput`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest:
            raise BadInput(f"a request has {largest} bytes at most")
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=kind)
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
_SILENCE = 15.0


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
                done, _ = await asyncio.wait((coming,), timeout=_SILENCE)
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
