"""What single brokers keep in tables, read with one question each.

Administration sums these tables up; the console needs what is in them: offsets of every queue give
rates without asking, the progress of a sample ago tells a stalled group from one that drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orbitmq.client.admin.progresstables import decode_progress_tables
from orbitmq.client.engine import Engine
from orbitmq.client.names import TOOLS_GROUP
from orbitmq.client.queue import Queue
from orbitmq.clock import milliseconds
from orbitmq.remoting.address import Address
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.stats import (
    ConsumeStats,
    ConsumeTimeSpans,
    QueueProgress,
    QueueTimeSpan,
    TopicStats,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.offsets import OffsetResponse, SearchOffsetRequest
from orbitmq.wire.headers.stats import (
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    QueryConsumeTimeSpanRequest,
)
from orbitmq.wire.headers.topics import TopicRequest

#: A broker with thousands of groups takes its time.
TABLE_TIMEOUT = 30.0
TIMEOUT = 5.0
#: Bytes of an answer that is read aside.
_LARGE = 100_000

_THERE_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})


@dataclass(frozen=True, slots=True)
class Place:
    """How far a group is in a queue."""

    #: Where the next message will be stored.
    end: int
    #: The next message that is not finished.
    done: int

    @property
    def lag(self) -> int:
        return max(0, self.end - self.done)


#: The queues of each group.
Places = dict[str, dict[Queue, Place]]


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a topic on one broker."""

    messages: int
    #: The sum of the next offsets: how many messages it has ever had.
    total: int
    #: The sum of the first offsets: grows when old messages are deleted.
    deleted: int
    last_stored_at: float | None
    first_stored_at: float | None = None
    #: The first and the next offset of each queue.
    queues: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)


class BrokerTables:
    """Asks brokers for their tables."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Queues by the text that names them: they are the same in every look.
        self._queues: dict[str, Queue] = {}

    async def places(self, broker: Address) -> Places:
        """The progress of all groups of a broker."""
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_BROKER_CONSUME_STATS,
            GetBrokerConsumeStatsRequest(is_order=False),
            timeout=TABLE_TIMEOUT,
        )
        body = bytes(answer.body)
        if len(body) < _LARGE:
            return decode_places(body, self._queues)
        # A tenth of a second of work: pages are answered meanwhile.
        return await asyncio.to_thread(decode_places, body, self._queues)

    async def places_of(
        self, broker: Address, group: str, topic: str | None = None
    ) -> dict[Queue, Place]:
        """The progress of a group; in one topic also when it has not reported any yet."""
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_CONSUME_STATS,
            GetConsumeStatsRequest(consumer_group=group, topic=topic),
            timeout=TIMEOUT,
        )
        table = decode_body(ConsumeStats, answer.body or b"{}").offset_table
        return {
            Queue(key.topic, key.broker_name, key.queue_id): _place(place)
            for key, place in table.items()
        }

    async def age(self, broker: Address, group: str, topic: str) -> float | None:
        """How long the oldest message of a topic has waited for a group; None: not known."""
        ages = map(self._age, await self._spans(broker, group, topic))
        return max((age for age in ages if age is not None), default=None)

    async def _spans(self, broker: Address, group: str, topic: str) -> Collection[QueueTimeSpan]:
        """The times of a topic's messages, by queue; of the queue itself whoever the group is."""
        answer = await self._engine.ask(
            broker,
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            QueryConsumeTimeSpanRequest(topic=topic, group=group),
            accept=_THERE_OR_NOT,
            timeout=TIMEOUT,
        )
        if answer.code != ResponseCode.SUCCESS:
            return ()
        return decode_body(ConsumeTimeSpans, answer.body or b"{}").consume_time_span_set

    def _age(self, span: QueueTimeSpan) -> float | None:
        if span.min_time_stamp <= 0:
            return None
        delay = span.delay_time / 1000
        # For a group without progress Apache counts from the year 1969: its oldest message is the
        # oldest there is.
        oldest = self._engine.clock.now() - span.min_time_stamp / 1000
        return max(0.0, oldest if delay > oldest + 3600 else delay)

    async def content(self, broker: Address, topic: str) -> Content | None:
        """What is in a topic; None when the broker does not have it."""
        queues = await self._stats(broker, topic)
        bounds = queues.values()
        if not bounds:
            return None
        times = [last for _, _, last in bounds if last > 0]
        return Content(
            sum(max(0, high - low) for low, high, _ in bounds),
            sum(high for _, high, _ in bounds),
            sum(low for low, _, _ in bounds),
            max(times) / 1000 if times else None,
            queues={number: (low, max(low, high)) for number, (low, high, _) in queues.items()},
        )

    async def first_stored(self, broker: Address, topic: str) -> float | None:
        """When the oldest message of a topic was stored; None: not known."""
        spans = await self._spans(broker, TOOLS_GROUP, topic)
        times = [span.min_time_stamp for span in spans if span.min_time_stamp > 0]
        return min(times) / 1000 if times else None

    async def stored_since(self, broker: Address, topic: str, since: float) -> int:
        """How many messages of a topic were stored from a time on."""
        count, since_ms = 0, milliseconds(since)
        for queue_id, (low, high, last) in (await self._stats(broker, topic)).items():
            if high <= low or last < since_ms:
                continue
            header = SearchOffsetRequest(topic=topic, queue_id=queue_id, timestamp=since_ms)
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
            answer = await self._engine.ask(broker, code, header, timeout=TIMEOUT)
            count += high - min(max(answer.header(OffsetResponse).offset, low), high)
        return count

    async def _stats(self, broker: Address, topic: str) -> Mapping[int, tuple[int, int, int]]:
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_TOPIC_STATS_INFO,
            TopicRequest(topic=topic),
            accept=_THERE_OR_NOT,
            timeout=TIMEOUT,
        )
        if answer.code != ResponseCode.SUCCESS:
            return {}
        table = decode_body(TopicStats, answer.body or b"{}").offset_table
        return {
            key.queue_id: (each.min_offset, each.max_offset, each.last_update_timestamp)
            for key, each in table.items()
        }


def decode_places(data: bytes, known: dict[str, Queue] | None = None) -> Places:
    """The answer to GET_BROKER_CONSUME_STATS. Raises `BodyError`.

    `known` has the queues of earlier answers, and gets those of this one.
    """
    return {
        group: {queue: _place(place) for table in tables for queue, place in table.places.items()}
        for group, tables in decode_progress_tables(data, known).items()
    }


def _place(place: QueueProgress) -> Place:
    return Place(place.broker_offset, max(0, place.consumer_offset))
