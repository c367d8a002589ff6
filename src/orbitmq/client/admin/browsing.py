"""Walking through a topic: its queues merged by the time at which messages were stored.

There is no ceiling: a walk goes on for as long as there are messages, and holds one pull per queue
in memory. It can be left and taken up again: a cursor says where it was in every queue, and where
it ends, so that pages neither overlap nor miss anything when messages arrive in between.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from orbitmq.client.admin.errors import BadRequest
from orbitmq.client.admin.reading import BATCH, Reading, Wanted
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.remoting.address import Address


@dataclass(frozen=True, slots=True)
class Page:
    """Some messages of a walk."""

    messages: tuple[ReceivedMessage, ...]
    #: Gives the page after this one; None: there is nothing more.
    cursor: str | None


class Stretch(msgspec.Struct, frozen=True):
    """What is left of a queue: from `start` up to, not including, `end`."""

    broker: str
    queue_id: int
    start: int
    end: int


class Cursor(msgspec.Struct, frozen=True):
    """Where a walk is."""

    topic: str
    is_backwards: bool
    expression: str
    expression_type: str
    left: tuple[Stretch, ...]

    @property
    def text(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def of(cls, text: str) -> Cursor:
        """Raises `BadRequest`."""
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadRequest(
                f"not a cursor: {text[:40]!r}; use the one of the page before, unchanged"
            ) from error


class Walk:
    """Goes through the queues of a topic."""

    def __init__(self, reading: Reading, addresses: Mapping[str, Address], cursor: Cursor) -> None:
        wanted = Wanted(cursor.expression, cursor.expression_type)
        self._cursor = cursor
        self._streams = [
            _Stream(reading, addresses[part.broker], cursor, part, wanted)
            for part in cursor.left
            if part.broker in addresses
        ]

    async def messages(self) -> AsyncGenerator[ReceivedMessage, None]:
        """One after the other, in the order of storing, or against it."""
        while (stream := await self._first()) is not None:
            yield stream.take()

    async def page(self, size: int) -> Page:
        """The next ones, and where they end."""
        found: list[ReceivedMessage] = []
        while len(found) < size and (stream := await self._first()) is not None:
            found.append(stream.take())
        left = tuple(part for stream in self._streams if (part := stream.left) is not None)
        if not left:
            return Page(tuple(found), None)
        return Page(tuple(found), msgspec.structs.replace(self._cursor, left=left).text)

    async def _first(self) -> _Stream | None:
        """The queue whose message is next."""
        best: _Stream | None = None
        for stream in self._streams:
            if not await stream.fill():
                continue
            if best is None or stream.key < best.key:
                best = stream
        return best


class _Stream:
    """What is left of one queue, and what was pulled of it already."""

    def __init__(
        self, reading: Reading, where: Address, cursor: Cursor, part: Stretch, wanted: Wanted
    ) -> None:
        self._reading = reading
        self._where = where
        self._queue = Queue(cursor.topic, part.broker, part.queue_id)
        self._is_backwards = cursor.is_backwards
        self._wanted = wanted
        self._start = part.start
        self._end = part.end
        self._pulled: deque[ReceivedMessage] = deque()

    @property
    def key(self) -> tuple[int, Queue]:
        """Sorts streams by their next message."""
        millis = self._pulled[0].stored.store_ms
        return (-millis if self._is_backwards else millis, self._queue)

    @property
    def left(self) -> Stretch | None:
        """What nobody has taken yet."""
        start, end = self._start, self._end
        if self._pulled:
            next_offset = self._pulled[0].queue_offset
            if self._is_backwards:
                end = next_offset + 1
            else:
                start = next_offset
        return Stretch(self._queue.broker, self._queue.id, start, end) if start < end else None

    def take(self) -> ReceivedMessage:
        return self._pulled.popleft()

    async def fill(self) -> bool:
        """Whether there is a next message; it is pulled if need be."""
        while not self._pulled and self._start < self._end:
            if self._is_backwards:
                await self._pull_last()
            else:
                await self._pull_first()
        return bool(self._pulled)

    async def _pull_first(self) -> None:
        most = min(BATCH, self._end - self._start)
        pulled = await self._reading.pull(self._where, self._queue, self._start, self._wanted, most)
        self._pulled.extend(each for each in pulled.messages if each.queue_offset < self._end)
        # Without progress there is nothing more: messages may have expired meanwhile.
        self._start = pulled.next_offset if pulled.next_offset > self._start else self._end

    async def _pull_last(self) -> None:
        start = max(self._start, self._end - BATCH)
        part = [
            message
            async for message in self._reading.messages(
                self._where, self._queue, start, self._end, self._wanted
            )
        ]
        self._pulled.extend(reversed(part))
        self._end = start


def whole_topic(
    topic: str,
    bounds: Mapping[Queue, tuple[int, int]],
    wanted: Wanted,
    *,
    backwards: bool,
) -> Cursor:
    """The beginning of a walk through these stretches."""
    parts: Sequence[Stretch] = [
        Stretch(queue.broker, queue.id, low, high)
        for queue, (low, high) in sorted(bounds.items())
        if low < high
    ]
    return Cursor(topic, backwards, wanted.expression, wanted.expression_type, tuple(parts))
