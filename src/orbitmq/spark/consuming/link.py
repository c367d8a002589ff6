"""The link of a running job's tasks to their driver: reports, leases, and the end of the job.

    task:   connect -> (report -> lease)... -> end
    driver: take reports, grant leases, say when the job ends

Invariant: a task begins no call later than its time limit after it *sent* the last report that the
driver answered. A task that cannot reach its driver therefore ends by itself, as early as one of a
job without a link. Whoever connects proves that it has the secret of the job.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from orbitmq.errors import OrbitError
from orbitmq.spark.consuming.progress import PieceReport

log = logging.getLogger(__name__)

#: Seconds to connect and to prove the secret.
CONNECT: Final = 3.0
_NONCE: Final = 16
#: Bytes of a frame, before and after the proof.
_LONGEST_HELLO: Final = 256
_LONGEST: Final = 64 * 1024 * 1024
_size = struct.Struct(">I")
#: What the driver says: a report was taken, which renews the lease; begin no further call.
_TAKEN: Final = b"+"
_END: Final = b"-"
_reports = msgspec.msgpack.Decoder(list[PieceReport])
#: How a connection ends.
_LOST: Final = (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, struct.error)


class LinkRefused(OrbitError):
    """The driver does not accept a task: another attempt of it has the link, or the job is over."""


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """How the tasks of a job reach their driver. Travels with the job."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Hello:
    task: int
    proof: bytes


def _proof(secret: bytes, nonce: bytes, task: int) -> bytes:
    return hmac.digest(secret, nonce + _size.pack(task), "sha256")


async def _frame(reader: asyncio.StreamReader, longest: int) -> bytes:
    (size,) = _size.unpack(await reader.readexactly(_size.size))
    if size > longest:
        raise ConnectionError(f"a frame of {size} bytes")
    return await reader.readexactly(size)


def _framed(data: bytes) -> bytes:
    return _size.pack(len(data)) + data


class DriverLink:
    """The driver's end. Serves one job at a time; belongs to the event loop."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._host = ""
        #: Of the present job; None between jobs.
        self._secret: bytes | None = None
        self._count = 0
        self._writers: dict[int, asyncio.StreamWriter] = {}
        #: Tasks that have connected, including those that have ended.
        self._known: set[int] = set()
        self._arrived: list[PieceReport] = []
        self.is_ending = False

    async def start(self, host: str, bind: str) -> None:
        """Listen on a free port of `bind`, which tasks reach as `host`. Raises `OSError`."""
        self._server = await asyncio.start_server(self._serve, bind, 0)
        self._host = host

    async def stop(self) -> None:
        self.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def is_started(self) -> bool:
        return self._server is not None

    # ---- a job

    def open(self, tasks: int) -> LinkOffer:
        """Expect the tasks of a new job."""
        assert self._server is not None  # noqa: S101  # checked by the caller
        self.close()
        self._secret = secrets.token_bytes(32)
        self._count, self.is_ending = tasks, False
        port: int = self._server.sockets[0].getsockname()[1]
        return LinkOffer(self._host, port, self._secret)

    def end(self) -> None:
        """Have all tasks of the job end; they finish the running calls."""
        if self._secret is not None and not self.is_ending:
            self.is_ending = True
            for writer in self._writers.values():
                writer.write(_END)

    def close(self) -> None:
        """The job is over: late reports are not taken."""
        self._secret = None
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._known.clear()
        self._arrived.clear()

    def arrived(self) -> list[PieceReport]:
        """The reports since the last call."""
        found, self._arrived = self._arrived, []
        return found

    @property
    def is_complete(self) -> bool:
        """Whether all tasks have connected."""
        return len(self._known) == self._count

    @property
    def has_lost_one(self) -> bool:
        """Whether a task has connected and its connection has ended."""
        return len(self._writers) < len(self._known)

    # ---- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        secret = self._secret
        task: int | None = None
        try:
            if secret is None:
                return
            async with asyncio.timeout(CONNECT):
                task = await self._accepted(reader, writer, secret)
            while task is not None:
                data = await _frame(reader, _LONGEST)
                if self._secret is not secret:
                    return
                self._arrived += _reports.decode(data)
                writer.write(_TAKEN)
                await writer.drain()
        except _LOST as error:  # includes timeouts
            log.debug("the link to task %s has ended: %s", task, error)
        finally:
            if task is not None and self._writers.get(task) is writer:
                del self._writers[task]
            writer.close()

    async def _accepted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
    ) -> int | None:
        """The number of the task that connects; None when it is refused."""
        nonce = secrets.token_bytes(_NONCE)
        writer.write(nonce)
        hello = msgspec.msgpack.decode(await _frame(reader, _LONGEST_HELLO), type=_Hello)
        is_true = hmac.compare_digest(hello.proof, _proof(secret, nonce, hello.task))
        # One attempt of each task: another one would handle the same messages.
        is_over = self._secret is not secret or self.is_ending
        if not is_true or is_over or hello.task in self._known:
            return None
        self._known.add(hello.task)
        self._writers[hello.task] = writer
        writer.write(_TAKEN)
        return hello.task


class TaskLink:
    """A task's end. Belongs to the event loop of its worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._now = asyncio.get_running_loop().time
        #: When the reports were sent that are not answered.
        self._sent: deque[float] = deque()
        #: Also set when there will be no answer.
        self._is_answered = asyncio.Event()
        self._is_answered.set()
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def connected(cls, offer: LinkOffer, task: int) -> Self:
        """Raises `OSError` when the driver cannot be reached, and `LinkRefused`."""
        async with asyncio.timeout(CONNECT):
            reader, writer = await asyncio.open_connection(offer.host, offer.port)
            link = cls(reader, writer)
            try:
                nonce = await reader.readexactly(_NONCE)
                hello = _Hello(task, _proof(offer.secret, nonce, task))
                writer.write(_framed(msgspec.msgpack.encode(hello)))
                await reader.readexactly(1)
            except BaseException as error:
                writer.close()
                if isinstance(error, asyncio.IncompleteReadError):
                    why = "the job of this task is over, or another attempt handles it"
                    raise LinkRefused(why) from error
                raise
        return link

    def listen(self, renewed: Callable[[float], None], ended: Callable[[], None]) -> None:
        """`renewed` is called with the time at which an answered report was sent.

        `ended` is called when the driver ends the job, or is lost.
        """
        self._listening = asyncio.create_task(self._listen(renewed, ended), name="driver's link")

    def report(self, reports: Sequence[PieceReport]) -> None:
        """Send reports, maybe none, which asks for a renewal of the lease."""
        self._sent.append(self._now())
        self._is_answered.clear()
        self._writer.write(_framed(msgspec.msgpack.encode(reports)))

    async def close(self) -> None:
        """Wait until the reports are taken, unless the driver is lost, and close."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT):
                await self._is_answered.wait()
        self._writer.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])

    async def _listen(self, renewed: Callable[[float], None], ended: Callable[[], None]) -> None:
        with suppress(*_LOST):
            while True:
                if await self._reader.readexactly(1) == _TAKEN:
                    renewed(self._sent.popleft())
                    if not self._sent:
                        self._is_answered.set()
                else:
                    ended()
        self._is_answered.set()
        ended()
