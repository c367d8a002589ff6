"""Where a queue begins: at its group's progress, and only without any, where `consume_from` says.

| no progress, `consume_from` | ordinary topic          | retry topic |
|-----------------------------|-------------------------|-------------|
| last (the default)          | the end                 | 0           |
| first                       | the first message       | 0           |
| a time                      | the first at or after it| the end     |

A group's retry topic begins at 0 because everything in it is the group's own. With a time it does
not, as with Apache, whose clients of the same group must not begin elsewhere.

A question that cannot be answered is an error; the queue is not begun and tried again later. There
is no third outcome: a guess here is a silent loss, or everything twice.

The end is the one of the first look: it is asked for before the progress, and kept until the queue
is begun, however often that fails. (Apache's clients ask for it afterwards, and pass over what is
stored in between.) Where a group begins without progress is its progress from then on, and is put
by before the first pull: whoever has the queue next would begin at an end that has moved on.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from orbitmq.client.consumer.progress import Supposing
from orbitmq.client.durations import Instant, epoch
from orbitmq.client.errors import BrokerRefused, BrokerUnavailable, SettingError
from orbitmq.client.names import is_retry_topic
from orbitmq.clock import milliseconds
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.bodies.membership import ConsumeFromWhere
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.offsets import (
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    OffsetResponse,
    SearchOffsetRequest,
)

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.errors import OrbitError
    from orbitmq.wire.headers.base import Header


class Begin(enum.Enum):
    """Which message of a queue is meant."""

    LAST = "last"
    FIRST = "first"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class ConsumeFrom:
    """Where a group without progress begins; has no effect on a queue that has some."""

    begin: Begin
    time: float | None = None  #: seconds since the epoch

    LAST: ClassVar[ConsumeFrom]
    FIRST: ClassVar[ConsumeFrom]

    @property
    def wire_name(self) -> ConsumeFromWhere:
        """As heartbeats say it."""
        return _WIRE_NAMES[self.begin]

    def __str__(self) -> str:
        return self.begin.value if self.time is None else f"time {self.time:.3f}"


ConsumeFrom.LAST = ConsumeFrom(Begin.LAST)
ConsumeFrom.FIRST = ConsumeFrom(Begin.FIRST)

_WIRE_NAMES: Mapping[Begin, ConsumeFromWhere] = {
    Begin.LAST: ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
    Begin.FIRST: ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    Begin.TIME: ConsumeFromWhere.CONSUME_FROM_TIMESTAMP,
}

#: What users may give: a `ConsumeFrom`, "last", "first", or a time.
Beginning: TypeAlias = ConsumeFrom | str | Instant

_NAMES: Mapping[str, ConsumeFrom] = {
    "last": ConsumeFrom.LAST,
    "first": ConsumeFrom.FIRST,
    ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET.value: ConsumeFrom.LAST,
    ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET.value: ConsumeFrom.FIRST,
}
_JAVA_TIME = re.compile(r"[0-9]{14}")


def consume_from(given: Beginning, name: str = "consume_from") -> ConsumeFrom:
    """What a user gave as a `ConsumeFrom`; a text of digits is a local time, yyyyMMddHHmmss."""
    if isinstance(given, ConsumeFrom):
        return given
    if not isinstance(given, str):
        return ConsumeFrom(Begin.TIME, epoch(given, name))
    if (named := _NAMES.get(given)) is not None:
        return named
    if _JAVA_TIME.fullmatch(given):
        try:
            # Without a zone, and so in local time: Java reads it like that.
            at = datetime.strptime(given, "%Y%m%d%H%M%S")  # noqa: DTZ007
        except ValueError:
            pass
        else:
            return ConsumeFrom(Begin.TIME, at.timestamp())
    raise SettingError(
        f"{name} must be 'last', 'first', a time as yyyyMMddHHmmss, a datetime or seconds since "
        f"the epoch, got {given!r}"
    )


class _Point(enum.Enum):
    """What is asked from the broker."""

    ZERO = enum.auto()
    FIRST = enum.auto()
    END = enum.auto()
    TIME = enum.auto()


#: Where a queue without progress begins: an ordinary topic's, and a retry topic's.
WITHOUT_PROGRESS: Mapping[Begin, tuple[_Point, _Point]] = {
    Begin.LAST: (_Point.END, _Point.ZERO),
    Begin.FIRST: (_Point.FIRST, _Point.ZERO),
    Begin.TIME: (_Point.TIME, _Point.END),
}


class Starting:
    """Works out where queues begin."""

    def __init__(
        self, engine: Engine, progress: ProgressStore, begin: ConsumeFrom = ConsumeFrom.LAST
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._begin = begin
        #: Where queues ended when they were first looked at, until they are begun.
        self._ends: dict[Queue, int] = {}

    async def offset(self, queue: Queue) -> int:
        """The offset of the first message to pull. Raises when it cannot be worked out."""
        offset, _ = await self._find(queue)
        self._ends.pop(queue, None)
        return offset

    async def begin(self, queue: Queue) -> int:
        """The same; and it is put by, unless it was. Raises when that cannot be done either."""
        offset, is_stored = await self._find(queue)
        progress = self._progress
        if not is_stored:
            progress.update(queue, offset)
            await self._put_by(queue)
        elif isinstance(progress, Supposing) and progress.is_supposed(queue):
            progress.insist([queue])
            await self._put_by(queue)
        self._ends.pop(queue, None)
        return offset

    async def _find(self, queue: Queue) -> tuple[int, bool]:
        """Where a queue begins, and whether that is progress of its group."""
        unseen = await self._look(queue) if self._point(queue) is _Point.END else None
        stored = await self._progress.fetch(queue)
        if stored is not None:
            return stored, True
        if unseen is not None:
            raise unseen
        end = self._ends.get(queue)
        return (await self.without_progress(queue) if end is None else end), False

    async def _look(self, queue: Queue) -> OrbitError | None:
        """See where a queue ends; why that cannot be said, which matters only without progress."""
        try:
            end = await end_offset(self._engine, queue)
        except (BrokerRefused, BrokerUnavailable, RemotingError) as error:
            return error
        # A broker that was killed may have lost the end that was seen.
        self._ends[queue] = min(end, self._ends.get(queue, end))
        return None

    async def _put_by(self, queue: Queue) -> None:
        # A broker that does not take progress of the group refuses its pulls as well, and is told
        # of there. Until then the position is in memory, and goes with the next report.
        with suppress(BrokerRefused):
            await self._progress.persist([queue])

    async def without_progress(self, queue: Queue) -> int:
        """Where a queue of which nothing is put by begins now."""
        point = self._point(queue)
        if point is _Point.ZERO:
            return 0
        if point is _Point.FIRST:
            return await self._first(queue)
        if point is _Point.END:
            return await end_offset(self._engine, queue)
        return await offset_at(self._engine, queue, self._begin.time or 0.0)

    def _point(self, queue: Queue) -> _Point:
        ordinary, retry = WITHOUT_PROGRESS[self._begin.begin]
        return retry if is_retry_topic(queue.topic) else ordinary

    async def _first(self, queue: Queue) -> int:
        try:
            return await first_offset(self._engine, queue)
        except BrokerRefused as refused:
            if refused.code != ResponseCode.NO_PERMISSION:
                raise
            # Who may only consume may not ask. Then as Java clients do, who never ask: if there is
            # nothing at 0 any more, the answer to the first pull says where there is.
            return 0


async def first_offset(engine: Engine, queue: Queue) -> int:
    """The offset of the first message that the broker still has."""
    header = GetMinOffsetRequest(topic=queue.topic, queue_id=queue.id, broker_name=queue.broker)
    return await _ask(engine, queue, RequestCode.GET_MIN_OFFSET, header)


async def end_offset(engine: Engine, queue: Queue) -> int:
    """The offset that the next message will get."""
    header = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue.id, broker_name=queue.broker)
    return await _ask(engine, queue, RequestCode.GET_MAX_OFFSET, header)


async def offset_at(engine: Engine, queue: Queue, time: float) -> int:
    """The offset of the first message stored at or after a time; the end if there is none."""
    header = SearchOffsetRequest(
        topic=queue.topic,
        queue_id=queue.id,
        timestamp=milliseconds(time),
        broker_name=queue.broker,
    )
    return await _ask(engine, queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)


async def _ask(engine: Engine, queue: Queue, code: RequestCode, header: Header) -> int:
    # Masters only: a slave's end lies behind, and what it does not have yet would come twice.
    answer = await engine.ask(engine.routes.master(queue.broker), code, header)
    return answer.header(OffsetResponse).offset
