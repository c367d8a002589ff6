"""The broker's pages over HTTP: health, readiness and metrics.

`/healthz` says that the process lives and its event loop turns; an orchestrator restarts a broker
that does not answer it. While the store is opened, which takes long after a crash, it says
"starting". `/readyz` says whether to send clients here, and if not why: messages or tables cannot
be stored, no name server knows the broker, or one lists another broker by its name. A restart
repairs none of these. `/metrics` is the text for Prometheus.

A connection serves one request. Its bytes, its time and the number of connections are limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from orbitmq.broker.metrics import CONTENT_TYPE, Metrics
from orbitmq.remoting.settings import Address, ListenFailed, socket_address

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts
    from orbitmq.broker.settings import HttpSettings

log = logging.getLogger(__name__)


#: A loop that needs longer than this for one iteration, in seconds, counts as unhealthy.
SLOWEST_ROUND = 5.0

_STARTING = "the broker is starting"


def http_pages(parts: Callable[[], Parts | None]) -> Mapping[str, Page]:
    """The pages of a broker; `parts` returns None until it is started."""
    metrics: list[tuple[Parts, Metrics]] = []

    async def show_metrics() -> Answer:
        current = parts()
        if current is None:
            return _not_ready([_STARTING])
        if not metrics or metrics[0][0] is not current:
            metrics[:] = [(current, Metrics(current))]
        return Answer(HTTPStatus.OK, await metrics[0][1].text(), CONTENT_TYPE)

    async def show_readiness() -> Answer:
        current = parts()
        reasons = [_STARTING] if current is None else why_not_ready(current)
        return _not_ready(reasons) if reasons else json_answer(HTTPStatus.OK, {"status": "ready"})

    async def show_health() -> Answer:
        return await _health("starting" if parts() is None else "alive")

    return {"/healthz": show_health, "/readyz": show_readiness, "/metrics": show_metrics}


def why_not_ready(parts: Parts) -> list[str]:
    """The reasons why clients should not be sent to the broker."""
    reasons = []
    refusal = parts.store.statistics().refusal
    if refusal:
        reasons.append(f"messages cannot be stored: {refusal}")
    reasons += [each.problem for each in parts.config_files if each.problem is not None]
    registration = parts.registration
    if registration.name_servers and not registration.is_registered:
        tried = ", ".join(map(str, registration.name_servers))
        reasons.append(f"no name server knows this broker yet; tried are {tried}")
    reasons += registration.conflicts
    accept_from = parts.settings.send.accept_from
    if accept_from > parts.clock.now():
        reasons.append(f"messages are accepted from {accept_from:.3f} on (seconds since the epoch)")
    return reasons


async def _health(status: str) -> Answer:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await asyncio.sleep(0)
    took = loop.time() - begin
    if took > SLOWEST_ROUND:
        return json_answer(
            HTTPStatus.SERVICE_UNAVAILABLE,
            {"status": "slow", "reasons": [f"one round of the event loop took {took:.1f} s"]},
        )
    return json_answer(HTTPStatus.OK, {"status": status, "loopSeconds": round(took, 6)})


def _not_ready(reasons: list[str]) -> Answer:
    return json_answer(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "reasons": reasons})


#: Bytes of a request line with all its headers.
LARGEST_HEAD = 8 * 1024
_END_OF_HEAD = b"\r\n\r\n"
_METHODS = ("GET", "HEAD")
_JSON = "application/json"


class Answer(NamedTuple):
    """The answer of a page."""

    status: HTTPStatus
    pieces: tuple[bytes, ...]  #: of the body, written one by one as the client reads them
    content_type: str = _JSON


Page: TypeAlias = Callable[[], Awaitable[Answer]]


def json_answer(status: HTTPStatus, content: object) -> Answer:
    """An answer in JSON."""
    return Answer(status, (msgspec.json.encode(content), b"\n"))


class Endpoint:
    """Serves pages, unless no port is set."""

    def __init__(self, settings: HttpSettings, pages: Mapping[str, Page]) -> None:
        self._settings = settings
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> Address | None:
        """The address, with the real port; None while it does not listen."""
        if self._server is None or not self._server.sockets:
            return None
        return socket_address(self._server.sockets[0].getsockname())

    async def start(self) -> None:
        """Begin to listen. Raises `ListenFailed`."""
        port = self._settings.port
        if port is None:
            return
        try:
            self._server = await asyncio.start_server(
                self._arrived, self._settings.host, port, limit=LARGEST_HEAD
            )
        except OSError as error:
            address = Address(self._settings.host, port)
            raise ListenFailed(address, error.strerror or str(error)) from error
        log.info("serving metrics and health", extra={"address": str(self.address)})

    async def stop(self) -> None:
        """Close all connections; monitoring systems connect again."""
        if self._server is None:
            return
        self._server.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._server.wait_closed()
        self._server = None

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= self._settings.connections:
            answer = _problem(HTTPStatus.SERVICE_UNAVAILABLE, "too many clients")
            writer.writelines((_head_of(answer), *answer.pieces))
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout):
                head = await _head(reader)
            if head is not None:
                method, answer = await self._answer(head)
                async with asyncio.timeout(self._settings.timeout):
                    await _write(writer, answer, with_body=method != "HEAD")
        except (TimeoutError, OSError) as error:
            log.debug("a client of the HTTP pages disconnected: %s", error)
        finally:
            # After an orderly end nothing is left to be written.
            writer.transport.abort()

    async def _answer(self, head: bytes) -> tuple[str, Answer]:
        if len(head) >= LARGEST_HEAD:
            return "GET", _problem(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {LARGEST_HEAD} bytes"
            )
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "GET", _problem(HTTPStatus.BAD_REQUEST, "not a request of HTTP/1.1")
        method, target, _ = words
        if method not in _METHODS:
            return method, _problem(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD are allowed")
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            pages = ", ".join(sorted(self._pages))
            return method, _problem(HTTPStatus.NOT_FOUND, f"there are {pages}")
        try:
            return method, await page()
        except Exception:
            log.exception("page %s failed", target[:64])
            return method, _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "see the broker's log")


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """The request line and headers, cut off at the limit; None at the end."""
    try:
        return await reader.readuntil(_END_OF_HEAD)
    except asyncio.LimitOverrunError:
        return await reader.read(LARGEST_HEAD)
    except asyncio.IncompleteReadError:
        return None


def _problem(status: HTTPStatus, detail: str) -> Answer:
    return json_answer(status, {"error": status.phrase, "detail": detail})


async def _write(writer: asyncio.StreamWriter, answer: Answer, *, with_body: bool) -> None:
    writer.write(_head_of(answer))
    for piece in answer.pieces if with_body else ():
        writer.write(piece)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


def _head_of(answer: Answer) -> bytes:
    allow = ""
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        allow = f"Allow: {', '.join(_METHODS)}\r\n"
    return (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {sum(map(len, answer.pieces))}\r\n"
        f"{allow}"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode("ascii")
