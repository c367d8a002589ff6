"""Messages, found by id, key, place or time, and walked through without a ceiling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from dataclasses import dataclass

from orbitmq.client.admin.arguments import positive, whole_number
from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.browsing import Cursor, Page, Walk, whole_topic
from orbitmq.client.admin.errors import (
    BadRequest,
    MessageNotFound,
    QueueNotFound,
)
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.moments import Moment, moment
from orbitmq.client.admin.progress import Progress
from orbitmq.client.admin.reading import Reading, Wanted, tag_filter
from orbitmq.client.admin.topicstatus import TopicInsight
from orbitmq.client.admin.topology import BrokerNode, Directory, Topology
from orbitmq.client.admin.tracking import Track, Tracking
from orbitmq.client.durations import Duration, seconds
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.names import check_topic
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.clock import milliseconds
from orbitmq.message.errors import MessageIdInvalid
from orbitmq.message.ids import decode_offset_id
from orbitmq.message.stored import decode_message, decode_messages
from orbitmq.remoting.address import Address
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.pull import (
    QueryMessageRequest,
    QueryMessageResponse,
    ViewMessageRequest,
)

#: As many as a broker gives for one question about a key.
MOST_BY_KEY = 64
_FOREVER_MS = 2**63 - 1
#: The index keeps times in whole seconds, rounded down.
_INDEX_STEP_MS = 1000

_FOUND_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)})


@dataclass(frozen=True, slots=True)
class _Found:
    """The answers of all brokers to a question about a key."""

    #: By the time at which they were stored.
    messages: tuple[ReceivedMessage, ...]
    #: The time before which a broker may have had more than it could give; None: that is all.
    floor: int | None
    #: What those said that do not let this account read the topic; None: all let it.
    refusal: BrokerRefused | None


class AsyncMessages:
    """Looks messages up."""

    def __init__(
        self,
        asking: Asking,
        directory: Directory,
        consumers: AsyncConsumers,
        progress: Progress,
    ) -> None:
        self._asking = asking
        self._directory = directory
        self._reading = Reading(asking)
        self._topics = TopicInsight(asking, directory)
        self._tracking = Tracking(asking, directory, consumers, progress, self.copies)

    # By id.

    async def get(self, message_id: str, *, topic: str | None = None) -> ReceivedMessage:
        """A message by its id. Raises `MessageNotFound`.

        An offset id says where the message lies. A unique id (`msg_id`) does not, and looks the
        same: it needs the topic.
        """
        if topic is not None:
            found = await self.copies(topic, message_id)
            if found:
                return found[0]
        try:
            return await self.by_offset_id(message_id)
        except (MessageNotFound, BadRequest):
            if topic is None:
                raise
        raise MessageNotFound(f"{message_id!r} in topic {topic!r}")

    async def by_offset_id(self, offset_id: str) -> ReceivedMessage:
        """The message that lies where its offset id says. Raises `MessageNotFound`."""
        try:
            place = decode_offset_id(offset_id)
        except MessageIdInvalid as error:
            raise BadRequest(str(error)) from error
        # Only brokers of the cluster are asked: an id is a text from anywhere.
        node = (await self._directory.look()).at(Address(place.address, place.port))
        if node is None:
            raise MessageNotFound(
                offset_id,
                f"it would lie at {place.address}:{place.port}, where no broker of this cluster "
                "is; a unique id, such as SendResult.msg_id, is found with its topic only: "
                "get(id, topic=...)",
            )
        try:
            answer = await self._asking.ask(
                node.address,
                RequestCode.VIEW_MESSAGE_BY_ID,
                ViewMessageRequest(offset=place.offset),
            )
        except BrokerRefused as refused:
            raise MessageNotFound(offset_id, refused.remark) from refused
        stored = decode_message(answer.body)
        return ReceivedMessage(stored, Queue(stored.topic, node.broker, stored.queue_id))

    async def copies(
        self, topic: str, unique_id: str, *, brokers: Collection[BrokerNode] | None = None
    ) -> tuple[ReceivedMessage, ...]:
        """All messages of a topic with a unique id, by their time; usually one.

        `brokers` are asked, for who knows them; else they are looked up each time. Raises
        `BrokerRefused` when none of those that failed let this account read the topic.
        """
        found, refusal = await self.readable_copies(topic, unique_id, brokers=brokers)
        if refusal is not None:
            raise refusal
        return found

    async def readable_copies(
        self, topic: str, unique_id: str, *, brokers: Collection[BrokerNode] | None = None
    ) -> tuple[tuple[ReceivedMessage, ...], BrokerRefused | None]:
        """The same, of brokers that let this account read the topic, and what the others said."""
        header = QueryMessageRequest(
            topic=topic,
            key=unique_id,
            max_num=MOST_BY_KEY,
            begin_timestamp=0,
            end_timestamp=_FOREVER_MS,
            is_unique_key=True,
        )
        nodes = (await self._directory.look()).readers() if brokers is None else brokers
        found = await self._query(nodes, header)
        copies = tuple(each for each in found.messages if each.unique_id == unique_id)
        return copies, found.refusal

    # By key.

    async def by_key(
        self,
        topic: str,
        key: str,
        *,
        since: Moment | None = None,
        until: Moment | None = None,
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """All messages of a topic with a business key, the newest first, however many.

        Brokers give 64 at most for one question, and no more than fit into a frame, so it is
        repeated for the time before. When more than that share a second, which the index cannot
        tell apart, that second is walked through.
        """
        check_topic(topic)
        if not key:
            raise BadRequest("a key must not be empty")
        begin = 0 if since is None else milliseconds(moment(since))
        end = _FOREVER_MS if until is None else milliseconds(moment(until)) - 1
        nodes = (await self._directory.look()).readers()
        seen: set[str] = set()
        while begin <= end:
            header = QueryMessageRequest(
                topic=topic,
                key=key,
                max_num=MOST_BY_KEY,
                begin_timestamp=max(0, begin - _INDEX_STEP_MS),
                end_timestamp=end,
            )
            page = await self._query(nodes, header)
            if page.refusal is not None:
                # Who may not read a topic everywhere would take a part for all of it.
                raise page.refusal
            # What lies before the oldest of a full page of one broker is incomplete.
            floor = begin if page.floor is None else max(begin, page.floor)
            for message in reversed(page.messages):
                is_new = key in message.keys and message.offset_id not in seen
                if is_new and floor <= message.stored.store_ms <= end:
                    seen.add(message.offset_id)
                    yield message
            if page.floor is None:
                return
            if floor < end:
                end = floor
                continue
            # The index takes times up to a second later for this one, and has as many of them as an
            # answer holds: no question can look behind them.
            low = max(begin, end - _INDEX_STEP_MS + 1)
            async for message in self.browse(
                topic, since=low / 1000, until=(end + 1) / 1000, newest_first=True
            ):
                if key in message.keys and message.offset_id not in seen:
                    seen.add(message.offset_id)
                    yield message
            end = low - 1

    async def _query(self, nodes: Iterable[BrokerNode], header: QueryMessageRequest) -> _Found:
        async def ask(node: BrokerNode) -> tuple[list[ReceivedMessage], int | None]:
            answer = await self._asking.ask(
                node.address, RequestCode.QUERY_MESSAGE, header, accept=_FOUND_OR_NOT
            )
            if answer.code != ResponseCode.SUCCESS:
                return [], None
            stored = decode_messages(answer.body)
            is_cut_short = (
                len(stored) >= MOST_BY_KEY or answer.header(QueryMessageResponse).cut_short
            )
            oldest = min(each.store_ms for each in stored) if is_cut_short else None
            # Other keys may have the same hash.
            return [
                ReceivedMessage(each, Queue(each.topic, node.broker, each.queue_id))
                for each in stored
                if each.topic == header.topic
            ], oldest

        outcomes = await self._asking.each(nodes, ask)
        refused = _refusals(outcomes.failed.values())
        if not refused:
            outcomes.check(f"looking for {header.key!r} in topic {header.topic!r}")
        parts = outcomes.done.values()
        found = [message for part, _ in parts for message in part]
        found.sort(key=lambda each: (each.stored.store_ms, each.queue, each.queue_offset))
        floors = [oldest for _, oldest in parts if oldest is not None]
        return _Found(tuple(found), max(floors, default=None), next(iter(refused), None))

    # By place.

    async def at(self, queue: Queue, offset: int) -> ReceivedMessage:
        """The message at an offset of a queue. Raises `MessageNotFound`."""
        whole_number("offset", offset, 0, 2**63 - 1)
        node = (await self._directory.look()).reader(queue.broker)
        try:
            found = await self._reading.at(node.address, queue, offset)
        except BrokerRefused as refused:
            raise MessageNotFound(f"at offset {offset} of {queue}", refused.remark) from refused
        if found is None:
            raise MessageNotFound(f"at offset {offset} of {queue}")
        return found

    # By time.

    async def browse(
        self,
        topic: str,
        *,
        since: Moment | None = None,
        until: Moment | None = None,
        queues: Collection[Queue] | None = None,
        newest_first: bool = False,
        expression: str = "*",
        expression_type: str = "TAG",
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """All messages of a topic, of some queues or of a time, in the order of storing.

        `until` is not included. Messages that arrive after the call are not shown. Filters (tags,
        or `expression_type="SQL92"`) are applied by the brokers. Raises `TopicNotFound`.
        """
        cursor, topology = await self._begin(
            topic, since, until, queues, newest_first, Wanted(expression, expression_type)
        )
        async for message in Walk(self._reading, _addresses(topology), cursor).messages():
            yield message

    async def tail(
        self,
        topic: str,
        *,
        every: Duration = 0.5,
        expression: str = "*",
        expression_type: str = "TAG",
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """The messages that arrive from now on, without an end.

        Brokers are asked `every` so many seconds what is new, one request each.
        """
        check_topic(topic)
        wanted = Wanted(expression, expression_type)
        _check_filter(wanted)
        pause = positive("every", seconds(every, "every"))
        seen = await self._topics.bounds(await self._directory.look(), topic)
        while True:
            await asyncio.sleep(pause)
            topology = await self._directory.look()
            now = await self._topics.bounds(topology, topic)
            # A queue that is new begins with what is in it.
            fresh = {
                queue: (max(low, seen[queue][1]) if queue in seen else low, high)
                for queue, (low, high) in now.items()
            }
            cursor = whole_topic(topic, fresh, wanted, backwards=False)
            async for message in Walk(self._reading, _addresses(topology), cursor).messages():
                yield message
            seen = now

    async def page(
        self,
        topic: str,
        *,
        cursor: str | None = None,
        size: int = 50,
        since: Moment | None = None,
        until: Moment | None = None,
        queues: Collection[Queue] | None = None,
        newest_first: bool = False,
        expression: str = "*",
        expression_type: str = "TAG",
    ) -> Page:
        """Some messages, and the cursor that gives the next ones; the same choice as `browse`.

        With a cursor, everything but `size` is what it was for the first page.
        """
        whole_number("size", size, 1, 10_000)
        if cursor is None:
            place, topology = await self._begin(
                topic, since, until, queues, newest_first, Wanted(expression, expression_type)
            )
        else:
            place = Cursor.of(cursor)
            if place.topic != topic:
                raise BadRequest(f"the cursor is one of topic {place.topic!r}, not of {topic!r}")
            topology = await self._directory.look()
        return await Walk(self._reading, _addresses(topology), place).page(size)

    async def _begin(
        self,
        topic: str,
        since: Moment | None,
        until: Moment | None,
        queues: Collection[Queue] | None,
        newest_first: bool,
        wanted: Wanted,
    ) -> tuple[Cursor, Topology]:
        check_topic(topic)
        _check_filter(wanted)
        topology = await self._directory.look()
        bounds = await self._topics.bounds(topology, topic)
        for queue in queues or ():
            if queue not in bounds:
                raise QueueNotFound(queue, bounds)
        begin = None if since is None else moment(since, "since")
        end = None if until is None else moment(until, "until")
        chosen = [
            (queue, place) for queue, place in bounds.items() if queues is None or queue in queues
        ]
        cut = await self._asking.all(
            self._cut(topology, queue, *place, begin, end) for queue, place in chosen
        )
        cursor = whole_topic(topic, dict(cut), wanted, backwards=newest_first)
        return cursor, topology

    async def _cut(
        self,
        topology: Topology,
        queue: Queue,
        low: int,
        high: int,
        begin: float | None,
        end: float | None,
    ) -> tuple[Queue, tuple[int, int]]:
        """The part of a queue that was stored within a time."""
        where = topology.reader(queue.broker).address
        if begin is not None and low < high:
            low = await self._reading.offset_at(where, queue, begin, low, high)
        if end is not None and low < high:
            high = await self._reading.offset_at(where, queue, end, low, high)
        return queue, (low, high)

    # Its fate.

    async def track(self, message: ReceivedMessage) -> tuple[Track, ...]:
        """What became of a message: for every group that consumes its topic, where it is now."""
        return await self._tracking.track(message)


def _check_filter(wanted: Wanted) -> None:
    if wanted.expression_type not in ("TAG", "SQL92"):
        raise BadRequest(f"expression_type must be TAG or SQL92, got {wanted.expression_type!r}")
    tag_filter(wanted)


def _refusals(failed: Collection[Exception]) -> list[BrokerRefused]:
    """What went wrong, if it is nothing but permissions."""
    refused = [
        each
        for each in failed
        if isinstance(each, BrokerRefused) and each.code == ResponseCode.NO_PERMISSION
    ]
    return refused if len(refused) == len(failed) else []


def _addresses(topology: Topology) -> Mapping[str, Address]:
    return {node.broker: node.address for node in topology.readers()}
