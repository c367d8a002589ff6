"""A few pages over HTTP/1.1, for those who watch a broker; it knows nothing of what they say.

One request a connection. What a client may cost is bounded: the bytes of its request, the time for
asking and for taking the answer, and the number of clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

import msgspec

from orbitmq.broker.settings import HttpSettings
from orbitmq.remoting.address import Address, socket_address
from orbitmq.remoting.errors import ListenFailed

log = logging.getLogger(__name__)

#: Bytes of a request line with all its headers.
LARGEST_HEAD = 8 * 1024
_END_OF_HEAD = b"\r\n\r\n"
_METHODS = ("GET", "HEAD")
_JSON = "application/json"


class Answer(NamedTuple):
    """What a page says."""

    status: HTTPStatus
    pieces: tuple[bytes, ...]  #: of the body; each is written when the client has taken the others
    content_type: str = _JSON


Page: TypeAlias = Callable[[], Awaitable[Answer]]


def json_answer(status: HTTPStatus, content: object) -> Answer:
    """An answer for programs that people can read as well."""
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
        """Where it listens, with the real port; None while it does not."""
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
        """Let go of everybody at once: who watches comes again."""
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
            log.debug("a client of the pages is gone: %s", error)
        finally:
            # Whatever is not written yet will not be; after an orderly end there is nothing left.
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
    """The request line and headers; as many bytes as are allowed when it is longer; None at the
    end."""
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
