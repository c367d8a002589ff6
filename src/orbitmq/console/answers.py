"""Answers as JSON, and errors as sentences with a status."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, TypedDict, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from orbitmq.client.admin import (
    BrokerNotFound,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    NotSupported,
    QueueNotFound,
    TopicNotFound,
)
from orbitmq.client.errors import BrokerUnavailable, NoNameServer
from orbitmq.errors import OrbitError
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
    """Something as JSON."""
    return Response(_encode(content), status, media_type="application/json")


def failed(error: OrbitError) -> Response:
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


async def told(request: Request, exception: Exception) -> Response:
    """The handler of everything that OrbitMQ raises on purpose."""
    if not isinstance(exception, OrbitError):
        raise exception
    if status_of(exception) >= 500:
        log.info("%s", exception, extra={"path": request.url.path})
    return failed(exception)


async def not_there(request: Request, exception: Exception) -> Response:
    """The handler of addresses that mean nothing, and of methods that they do not have."""
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


# What the console refuses, and the HTTP status that says so.


class ConsoleError(OrbitError):
    """Something that the page shows as a sentence."""

    status: ClassVar[int] = 400


class CannotListen(ConsoleError):
    """Its address is taken, or none of this machine's."""


class HistoryUnusable(ConsoleError):
    """The file that keeps the history cannot be opened."""


class BadInput(ConsoleError):
    """A request that cannot be meant."""


class NotLoggedIn(ConsoleError):
    """Nobody is shown anything before the password."""

    status: ClassVar[int] = 401

    def __init__(self) -> None:
        super().__init__("log in first")


class Forbidden(ConsoleError):
    """A request from elsewhere, or for what this console does not do."""

    status: ClassVar[int] = 403


class ReadOnly(Forbidden):
    """The console was started without write rights."""

    def __init__(self, command: str | None = None) -> None:
        remedy = f"; the command does the same: {command}" if command else ""
        super().__init__(f"this console only shows; start it with --write to change things{remedy}")


class NotThere(ConsoleError):
    """Nothing is known under this name."""

    status: ClassVar[int] = 404


class TooManyAttempts(ConsoleError):
    """Wrong passwords, too many of them."""

    status: ClassVar[int] = 429

    def __init__(self, wait: float) -> None:
        self.wait = wait
        super().__init__(f"too many wrong passwords; try again in {wait:.0f} s")


class NotYet(ConsoleError):
    """The cluster has not been seen yet."""

    status: ClassVar[int] = 503
    retriable: ClassVar[bool] = True


# Server-sent events: what is new is pushed to every open page.
#
# Written here because it is thirty lines: the usual package changes the HTTP server's class when it
# is imported and leaves a task on the loop, which a library inside somebody's process must not.


#: Pages that can listen at the same time.
MOST_LISTENERS = 200
#: Events that a slow page may be behind before it misses some.
_BEHIND = 64
#: Seconds of silence before a comment keeps proxies from closing the connection.
_SILENCE = 15.0


class Events:
    """Gives what happens to everybody who listens."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._is_closed = False

    def publish(self, kind: str, content: object) -> None:
        """Tell all pages; nothing is encoded when there are none."""
        if not self._listeners:
            return
        event = encoded(kind, content)
        for listener in self._listeners:
            if listener.full():
                # It catches up with the newest: every event has the whole picture of its kind.
                listener.get_nowait()
            listener.put_nowait(event)

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Events as they come, until the console stops."""
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
    """The answer that carries events, for as long as whoever asked is let in."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    content = _kept_alive(events, is_allowed)
    return StreamingResponse(content, media_type="text/event-stream", headers=headers)


async def _kept_alive(
    events: AsyncGenerator[bytes, None], is_allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    # Tells the browser how long to wait before it connects again, and that the stream is open.
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


# Long lists in windows: searched, sorted and cut here, so that a page asks for what it shows.


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
    """The rows that a query means.

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
    """Sorts what is not known before everything else."""
    return (value is not None, value if value is not None else 0)
