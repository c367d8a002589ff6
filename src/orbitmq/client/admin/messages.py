"""Finds messages by id, key, offset or time, browses topics, and tracks messages."""

from __future__ import annotations

import asyncio
import base64
import enum
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from orbitmq.arguments import explained
from orbitmq.client.admin.deadletters import RESENT_FROM
from orbitmq.client.admin.groups import ProgressQueries
from orbitmq.client.admin.members import AsyncConsumers, Members, stored_at
from orbitmq.client.admin.requests import AdminRequests, BrokerNode, Topology
from orbitmq.client.admin.topics import TopicQueries
from orbitmq.client.errors import BadRequest, MessageNotFound, QueueNotFound
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.cluster import search
from orbitmq.client.routes import Queue
from orbitmq.clock import milliseconds
from orbitmq.errors import BrokerRefused, InvalidFilter, NotSupported
from orbitmq.filter.tags import TagFilter, parse_tags
from orbitmq.message.properties import DLQ_ORIGIN_TOPIC, REAL_TOPIC, RETRY_TOPIC
from orbitmq.message.stored import decode_messages
from orbitmq.names import (
    DEAD_LETTER_PREFIX,
    RETRY_PREFIX,
    TOOLS_GROUP,
    check_topic,
    dead_letter_topic,
    is_system_group,
    retry_topic,
)
from orbitmq.parsing import LARGEST_LONG, Duration, Moment, duration, moment, whole
from orbitmq.remoting.settings import Address
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    OffsetResponse,
    PullFlag,
    PullMessageRequest,
    PullMessageResponse,
    QueryMessageRequest,
    QueryMessageResponse,
    SearchOffsetRequest,
)

if TYPE_CHECKING:
    from orbitmq.client.admin.admin import AsyncAdmin

#: The most messages in a broker's answer to a key query.
MOST_BY_KEY = 64
_FOREVER_MS = 2**63 - 1
#: The resolution of times in the index, rounded down.
_INDEX_STEP_MS = 1000


@dataclass(frozen=True, slots=True)
class _Found:
    """The answers of all brokers to a key query."""

    #: In the order of storing.
    messages: tuple[ReceivedMessage, ...]
    #: Before this time a broker may have more; None: complete.
    floor: int | None
    #: The refusals of brokers where this account may not read the topic.
    refusal: BrokerRefused | None


@explained()
class AsyncMessages:
    """Finds and reads messages."""

    def __init__(
        self,
        asking: AdminRequests,
        consumers: AsyncConsumers,
        progress: ProgressQueries,
    ) -> None:
        self._asking = asking
        self._reading = QueueReader(asking)
        self._topics = TopicQueries(asking)
        self._consumers = consumers
        self._progress = progress

    async def get(self, message_id: str, *, topic: str | None = None) -> ReceivedMessage:
        """A message by its id. Raises `MessageNotFound`.

        An offset id is an address in a broker's log. A unique id (`msg_id`) looks the same and
        needs the topic.
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
        """The message at an offset id. Raises `MessageNotFound`."""
        topology = await self._asking.topology()
        message, _ = await stored_at(self._asking, topology, offset_id)
        return message

    async def copies(
        self, topic: str, unique_id: str, *, brokers: Collection[BrokerNode] | None = None
    ) -> tuple[ReceivedMessage, ...]:
        """All messages of a topic with a unique id, by their time; usually one.

        `brokers` saves looking them up. Raises `BrokerRefused` when all failures are missing
        permissions.
        """
        found, refusal = await self.readable_copies(topic, unique_id, brokers=brokers)
        if refusal is not None:
            raise refusal
        return found

    async def readable_copies(
        self, topic: str, unique_id: str, *, brokers: Collection[BrokerNode] | None = None
    ) -> tuple[tuple[ReceivedMessage, ...], BrokerRefused | None]:
        """As `copies`, from brokers where this account may read, with the others' refusal."""
        header = QueryMessageRequest(
            topic=topic,
            key=unique_id,
            max_num=MOST_BY_KEY,
            begin_timestamp=0,
            end_timestamp=_FOREVER_MS,
            is_unique_key=True,
        )
        nodes = (await self._asking.topology()).readers() if brokers is None else brokers
        found = await self._query(nodes, header)
        copies = tuple(each for each in found.messages if each.unique_id == unique_id)
        return copies, found.refusal

    async def by_key(
        self,
        topic: str,
        key: str,
        *,
        since: Moment | None = None,
        until: Moment | None = None,
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """All messages of a topic with a business key, the newest first.

        Brokers return at most 64 for a query, so it is repeated for the time before. When more
        share a second, the resolution of the index, that second is browsed.
        """
        check_topic(topic)
        if not key:
            raise BadRequest("a key must not be empty")
        begin = 0 if since is None else milliseconds(moment(since))
        end = _FOREVER_MS if until is None else milliseconds(moment(until)) - 1
        nodes = (await self._asking.topology()).readers()
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
                # A partial result must not look complete.
                raise page.refusal
            # Before the oldest message of a full answer the result is incomplete.
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
            # A full answer within one second: the index cannot return the messages before.
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
            code, absent = RequestCode.QUERY_MESSAGE, ResponseCode.QUERY_NOT_FOUND
            answer = await self._asking.find(node.address, code, header, absent=absent)
            if answer is None:
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

    async def at(self, queue: Queue, offset: int) -> ReceivedMessage:
        """The message at an offset of a queue. Raises `MessageNotFound`."""
        whole(offset, "offset", least=0, most=LARGEST_LONG)
        node = (await self._asking.topology()).reader(queue.broker)
        try:
            found = await self._reading.at(node.address, queue, offset)
        except BrokerRefused as refused:
            raise MessageNotFound(f"at offset {offset} of {queue}", refused.remark) from refused
        if found is None:
            raise MessageNotFound(f"at offset {offset} of {queue}")
        return found

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

        `until` is exclusive. Messages that arrive after the call are not returned. Filters (tags,
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
        """New messages, without end.

        Brokers are polled `every` interval, one request each.
        """
        check_topic(topic)
        wanted = Wanted(expression, expression_type)
        _check_filter(wanted)
        pause = duration(every, "every")
        seen = await self._topics.bounds(await self._asking.topology(), topic)
        while True:
            await asyncio.sleep(pause)
            topology = await self._asking.topology()
            now = await self._topics.bounds(topology, topic)
            # A new queue is read from its beginning.
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
        """A page of messages with the cursor for the next; the same filters as `browse`.

        With a cursor, everything but `size` is as for the first page.
        """
        whole(size, "size", most=10_000)
        if cursor is None:
            place, topology = await self._begin(
                topic, since, until, queues, newest_first, Wanted(expression, expression_type)
            )
        else:
            place = Cursor.of(cursor)
            if place.topic != topic:
                raise BadRequest(f"the cursor is one of topic {place.topic!r}, not of {topic!r}")
            topology = await self._asking.topology()
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
        topology = await self._asking.topology()
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
        """The part of a queue that was stored in a period."""
        where = topology.reader(queue.broker).address
        if begin is not None and low < high:
            low = await self._reading.offset_at(where, queue, begin, low, high)
        if end is not None and low < high:
            high = await self._reading.offset_at(where, queue, end, low, high)
        return queue, (low, high)

    async def track(self, message: ReceivedMessage) -> tuple[Track, ...]:
        """What became of a message in every group that consumes its topic."""
        topology = await self._asking.topology()
        original = await self._original(message)
        groups = [
            group
            for group in await self._topics.groups(topology, original.queue.topic)
            if not is_system_group(group)
        ]
        parked: list[ReceivedMessage] = []
        if message.unique_id is not None:
            for topic in PARKED_TOPICS:
                parked += await self.copies(topic, message.unique_id)
        tracks = await self._asking.all(
            self._track(topology, group, original, parked) for group in groups
        )
        return tuple(tracks)

    async def _original(self, message: ReceivedMessage) -> ReceivedMessage:
        """The original of a copy."""
        if not message.queue.topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
            return message
        topic = message.get(DLQ_ORIGIN_TOPIC) or message.get(RETRY_TOPIC)
        if topic is None or message.unique_id is None:
            return message
        found = await self.copies(topic, message.unique_id)
        return found[0] if found else message

    async def _track(
        self,
        topology: Topology,
        group: str,
        message: ReceivedMessage,
        parked: Sequence[ReceivedMessage],
    ) -> Track:
        members, _ = await self._consumers.look(group, topology)
        is_online = members is not None
        if members is not None and members.model == "broadcasting":
            return Track(group, Fate.BROADCAST, is_online)
        later = await self._later(topology, group, message, parked)
        if later is not None:
            fate, copy, letters = later
            failures = sum(each.reconsume_times for each in (copy, *letters))
            return Track(group, fate, is_online, failures, copy, len(letters))
        offset = await self._offset(topology, group, message.queue)
        if offset is None:
            return Track(group, Fate.NO_PROGRESS, is_online)
        if offset <= message.queue_offset:
            return Track(group, Fate.WAITING, is_online)
        if members is not None and not _is_wanted(members, message):
            return Track(group, Fate.FILTERED, is_online)
        return Track(group, Fate.CONSUMED, is_online)

    async def _later(
        self,
        topology: Topology,
        group: str,
        message: ReceivedMessage,
        parked: Sequence[ReceivedMessage],
    ) -> tuple[Fate, ReceivedMessage, Sequence[ReceivedMessage]] | None:
        """The track by the latest copy in the group, and its dead letters; None without a copy."""
        if message.unique_id is None:
            return None
        topic = retry_topic(group)
        retried = await self.copies(topic, message.unique_id)
        dead = await self.copies(dead_letter_topic(group), message.unique_id)
        waiting = [each for each in parked if each.get(REAL_TOPIC) == topic]
        last = max((*retried, *dead, *waiting), key=lambda each: each.stored.store_ms, default=None)
        if last is None:
            return None
        letters = _resent_letters(last, dead)
        if last in dead:
            return Fate.DEAD, last, letters
        if last in waiting:
            return Fate.PARKED, last, letters
        offset = await self._offset(topology, group, last.queue)
        is_done = offset is not None and offset > last.queue_offset
        return (Fate.CONSUMED if is_done else Fate.RETRYING), last, letters

    async def _offset(self, topology: Topology, group: str, queue: Queue) -> int | None:
        return await self._progress.offset(topology.reader(queue.broker), group, queue)


def _check_filter(wanted: Wanted) -> None:
    if wanted.expression_type not in ("TAG", "SQL92"):
        raise BadRequest(f"expression_type must be TAG or SQL92, got {wanted.expression_type!r}")
    tag_filter(wanted)


def _refusals(failed: Collection[Exception]) -> list[BrokerRefused]:
    """The error, if all failures are missing permissions."""
    refused = [
        each
        for each in failed
        if isinstance(each, BrokerRefused) and each.code == ResponseCode.NO_PERMISSION
    ]
    return refused if len(refused) == len(failed) else []


def _addresses(topology: Topology) -> Mapping[str, Address]:
    return {node.broker: node.address for node in topology.readers()}


# Browsing. A walk merges the queues of a topic in the order of storing and holds one pull per queue
# in memory. A cursor holds the position and the end in every queue, so that pages neither overlap
# nor miss messages that arrive in between.


@dataclass(frozen=True, slots=True)
class Page:
    """Some messages of a walk."""

    messages: tuple[ReceivedMessage, ...]
    #: For the next page; None at the end.
    cursor: str | None


class Stretch(msgspec.Struct, frozen=True):
    """The rest of a queue: from `start` to `end`, exclusive."""

    broker: str
    queue_id: int
    start: int
    end: int


class Cursor(msgspec.Struct, frozen=True):
    """The position of a walk."""

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
    """A walk through the queues of a topic."""

    def __init__(
        self, reading: QueueReader, addresses: Mapping[str, Address], cursor: Cursor
    ) -> None:
        wanted = Wanted(cursor.expression, cursor.expression_type)
        self._cursor = cursor
        self._streams = [
            _Stream(reading, addresses[part.broker], cursor, part, wanted)
            for part in cursor.left
            if part.broker in addresses
        ]

    async def messages(self) -> AsyncGenerator[ReceivedMessage, None]:
        """All messages, in the order of storing or backwards."""
        while (stream := await self._first()) is not None:
            yield stream.take()

    async def page(self, size: int) -> Page:
        """The next messages, and the cursor after them."""
        found: list[ReceivedMessage] = []
        while len(found) < size and (stream := await self._first()) is not None:
            found.append(stream.take())
        left = tuple(part for stream in self._streams if (part := stream.left) is not None)
        if not left:
            return Page(tuple(found), None)
        return Page(tuple(found), msgspec.structs.replace(self._cursor, left=left).text)

    async def _first(self) -> _Stream | None:
        """The stream with the next message."""
        best: _Stream | None = None
        for stream in self._streams:
            if not await stream.fill():
                continue
            if best is None or stream.key < best.key:
                best = stream
        return best


class _Stream:
    """The rest of one queue, with the messages pulled already."""

    def __init__(
        self, reading: QueueReader, where: Address, cursor: Cursor, part: Stretch, wanted: Wanted
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
    def key(self) -> tuple[int, int, int, Queue]:
        """The key of the next message, for sorting: by its times, and by its place on a broker."""
        stored = self._pulled[0].stored
        sign = -1 if self._is_backwards else 1
        place = sign * stored.physical_offset
        return (sign * stored.store_ms, sign * stored.born_ms, place, self._queue)

    @property
    def left(self) -> Stretch | None:
        """The rest that was not returned."""
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
        """Whether there is a next message; pulls if necessary."""
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
        # No progress means no more messages: they may have expired.
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
    """The cursor at the beginning of these stretches."""
    parts: Sequence[Stretch] = [
        Stretch(queue.broker, queue.id, low, high)
        for queue, (low, high) in sorted(bounds.items())
        if low < high
    ]
    return Cursor(topic, backwards, wanted.expression, wanted.expression_type, tuple(parts))


# Reading queues without a group. Messages are pulled as the group `TOOLS_CONSUMER`, which every
# broker has, with the subscription in the request: no registration, no commit, no long polling.


BATCH = 32

_OUTCOMES = frozenset(
    {
        int(ResponseCode.SUCCESS),
        int(ResponseCode.PULL_NOT_FOUND),
        int(ResponseCode.PULL_RETRY_IMMEDIATELY),
        int(ResponseCode.PULL_OFFSET_MOVED),
    }
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The filter of a pull, applied by the broker."""

    expression: str = "*"
    #: `TAG` or `SQL92`.
    expression_type: str = "TAG"


@dataclass(frozen=True, slots=True)
class Pulled:
    """The messages of a pull, and the next offset."""

    messages: tuple[ReceivedMessage, ...]
    next_offset: int


ALL = Wanted()


class QueueReader:
    """Pulls messages of queues."""

    def __init__(self, asking: AdminRequests) -> None:
        self._asking = asking

    async def pull(
        self, where: Address, queue: Queue, offset: int, wanted: Wanted = ALL, most: int = BATCH
    ) -> Pulled:
        """The messages from an offset on. Raises `NotSupported` when the broker forbids it."""
        header = PullMessageRequest(
            consumer_group=TOOLS_GROUP,
            topic=queue.topic,
            queue_id=queue.id,
            queue_offset=offset,
            max_msg_nums=most,
            sys_flag=int(PullFlag.SUBSCRIPTION),
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=0,
            subscription=wanted.expression,
            expression_type=wanted.expression_type,
        )
        try:
            answer = await self._asking.ask(
                where, RequestCode.PULL_MESSAGE, header, accept=_OUTCOMES
            )
        except BrokerRefused as refused:
            if refused.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                raise BadRequest(refused.remark) from refused
            if refused.code != ResponseCode.NO_PERMISSION:
                raise
            raise NotSupported(
                f"{queue.broker} cannot show messages of {queue.topic!r}; {refused.remark}; if its "
                f"permission is the reason: orbitmq topic update '{queue.topic}' --permission rw"
            ) from refused
        place = answer.header(PullMessageResponse)
        messages: tuple[ReceivedMessage, ...] = ()
        if answer.code == ResponseCode.SUCCESS:
            # The broker filters by the hash of tags; other tags with the same hash are dropped
            # here.
            tags = tag_filter(wanted)
            messages = tuple(
                ReceivedMessage(stored, queue)
                for stored in decode_messages(answer.body)
                if tags.accepts_tag(stored.tags)
            )
        return Pulled(messages, place.next_begin_offset)

    async def at(self, where: Address, queue: Queue, offset: int) -> ReceivedMessage | None:
        """The message at an offset, or None."""
        pulled = await self.pull(where, queue, offset, most=1)
        return next((each for each in pulled.messages if each.queue_offset == offset), None)

    async def messages(
        self, where: Address, queue: Queue, start: int, end: int, wanted: Wanted = ALL
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """The messages of a stretch in order, without expired ones."""
        offset = start
        while offset < end:
            pulled = await self.pull(where, queue, offset, wanted, min(BATCH, end - offset))
            for message in pulled.messages:
                if message.queue_offset < end:
                    yield message
            if pulled.next_offset <= offset:
                return
            offset = pulled.next_offset

    async def offset_at(
        self, where: Address, queue: Queue, time: float, low: int, high: int
    ) -> int:
        """The first offset from `low` on that was stored at or after a time; `high` without one.

        Brokers of 4.9 may return a neighbour, and any broker the last of several messages of one
        millisecond. The answer is checked, and corrected by a search.
        """
        millis = milliseconds(time)
        header = SearchOffsetRequest(topic=queue.topic, queue_id=queue.id, timestamp=millis)
        answer = await self._asking.ask(where, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)

        async def is_young(offset: int) -> bool:
            message = await self.at(where, queue, offset)
            # An expired message is older than the remaining ones.
            return message is not None and message.stored.store_ms >= millis

        return await search(low, high, answer.header(OffsetResponse).offset, is_young)


def tag_filter(wanted: Wanted) -> TagFilter:
    """The check of tags by text, after the broker's by hash. Raises `BadRequest`."""
    try:
        return parse_tags(wanted.expression if wanted.expression_type == "TAG" else "*")
    except InvalidFilter as error:
        raise BadRequest(str(error)) from error


class BodyForm(enum.StrEnum):
    """The form in which a body is shown."""

    #: JSON if valid, else text if UTF-8, else hexadecimal.
    AUTO = "auto"
    TEXT = "text"
    JSON = "json"
    HEX = "hex"


_ROW = 16


def shown_body(body: bytes, form: BodyForm | str = BodyForm.AUTO) -> str:
    """A body as text. Raises `BadRequest` when it does not have the form."""
    try:
        wanted = BodyForm(form)
    except ValueError:
        raise BadRequest(
            f"a body is shown as one of {', '.join(BodyForm)}, not as {form!r}"
        ) from None
    match wanted:
        case BodyForm.TEXT:
            text = _text(body)
            if text is None:
                raise BadRequest("the body is not UTF-8 text; show it as hex")
            return text
        case BodyForm.JSON:
            json = _json(body)
            if json is None:
                raise BadRequest("the body is not JSON; show it as text or hex")
            return json
        case BodyForm.HEX:
            return _hex(body)
        case BodyForm.AUTO:
            # A single number or word is shown as text.
            json = _json(body) if body[:1] in (b"{", b"[") else None
            text = _text(body) if json is None else json
            return _hex(body) if text is None else text


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _json(body: bytes) -> str | None:
    try:
        return msgspec.json.format(body, indent=2).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _hex(body: bytes) -> str:
    """Offsets, bytes and characters, as `hexdump -C` prints them."""
    rows = []
    for start in range(0, len(body), _ROW):
        row = body[start : start + _ROW]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in row)
        rows.append(f"{start:08x}  {row.hex(' '):<{_ROW * 3 - 1}}  |{letters}|")
    return "\n".join(rows)


# Tracking. A group's progress shows whether it has passed the message. Copies with the same unique
# id show the rest: parked until the next attempt, waiting in the retry topic, dead. A resent
# message starts with its first attempt again; the earlier ones are in the dead letters it was made
# of.


#: The topics of delayed messages: by delay level, and by time.
PARKED_TOPICS = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")


class Fate(enum.StrEnum):
    """What became of a message in a group."""

    WAITING = "not consumed yet"
    CONSUMED = "consumed"
    FILTERED = "passed over by the subscription"
    PARKED = "failed, parked until its next attempt"
    RETRYING = "failed, waiting for its next attempt now"
    DEAD = "dead letter"
    BROADCAST = "broadcast: every member keeps its own progress"
    NO_PROGRESS = "the group has no progress in its queue"


@dataclass(frozen=True, slots=True)
class Track:
    """A message and a group."""

    group: str
    fate: Fate
    is_online: bool
    #: Failed attempts, as far as copies show; including those before a resend.
    failures: int = 0
    #: The copy that `fate` describes: retry, dead letter or parked.
    copy: ReceivedMessage | None = None
    #: How often it was resent.
    resent: int = 0

    @property
    def text(self) -> str:
        """What became of the message, as text."""
        if not self.resent:
            return self.fate.value
        times = "" if self.resent == 1 else f" {self.resent} times"
        return f"died and was resent{times}: {self.fate.value}"


def _resent_letters(
    copy: ReceivedMessage, dead: Sequence[ReceivedMessage]
) -> list[ReceivedMessage]:
    """The dead letters that a copy was made of, the last one first."""
    letters = {letter.offset_id: letter for letter in dead}
    found: list[ReceivedMessage] = []
    while (letter := letters.pop(copy.get(RESENT_FROM, ""), None)) is not None:
        found.append(letter)
        copy = letter
    return found


def _is_wanted(members: Members, message: ReceivedMessage) -> bool:
    """Whether the group's tags match a message; SQL is evaluated by brokers only."""
    for subscription in members.subscriptions:
        if subscription.topic != message.queue.topic or subscription.expression_type != "TAG":
            continue
        try:
            return parse_tags(subscription.expression).accepts_tag(message.tags)
        except InvalidFilter:
            return True
    return True


async def cursor_at(
    admin: AsyncAdmin,
    queue: Queue,
    offset: int,
    *,
    newest_first: bool,
    expression: str,
    expression_type: str,
) -> str:
    """The cursor of a page that begins at an offset. Raises `BadRequest`."""
    status = await admin.topics.status(queue.topic)
    place = next((each for each in status.queues if each.queue == queue), None)
    if place is None:
        raise BadRequest(f"topic {queue.topic!r} has no queue {queue.broker}:{queue.id}")
    if place.min_offset == place.max_offset:
        raise BadRequest(f"queue {queue.broker}:{queue.id} of {queue.topic!r} is empty")
    if not place.min_offset <= offset < place.max_offset:
        raise BadRequest(
            f"queue {queue.broker}:{queue.id} has the offsets {place.min_offset} to "
            f"{place.max_offset - 1}, not {offset}"
        )
    start, end = (place.min_offset, offset + 1) if newest_first else (offset, place.max_offset)
    stretch = Stretch(queue.broker, queue.id, start, end)
    return Cursor(queue.topic, newest_first, expression, expression_type, (stretch,)).text
