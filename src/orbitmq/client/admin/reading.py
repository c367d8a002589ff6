"""Reading queues from outside, without a group of one's own and without moving anybody's progress.

Messages are pulled as the group `TOOLS_CONSUMER`, which every broker has, with the subscription in
the request: nobody has to be registered, nothing is committed, and nothing is held back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.errors import BadRequest, NotSupported
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.names import TOOLS_GROUP
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.clock import milliseconds
from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.tags import TagFilter, parse_tags
from orbitmq.message.stored import decode_messages
from orbitmq.remoting.address import Address
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.offsets import (
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    OffsetResponse,
    SearchOffsetRequest,
)
from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest, PullMessageResponse

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
    """Which messages of a queue: all, or those that a filter lets through at the broker."""

    expression: str = "*"
    #: `TAG` or `SQL92`.
    expression_type: str = "TAG"


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought, and where to go on."""

    messages: tuple[ReceivedMessage, ...]
    next_offset: int
    min_offset: int
    max_offset: int


ALL = Wanted()


class Reading:
    """Pulls single stretches of queues."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def pull(
        self, where: Address, queue: Queue, offset: int, wanted: Wanted = ALL, most: int = BATCH
    ) -> Pulled:
        """The messages from an offset on, maybe none. Raises `NotSupported` when forbidden."""
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
                f"show messages of {queue.topic!r}",
                queue.broker,
                f"{refused.remark}; if its permission is the reason: orbitmq topic update "
                f"'{queue.topic}' --permission rw",
            ) from refused
        place = answer.header(PullMessageResponse)
        messages: tuple[ReceivedMessage, ...] = ()
        if answer.code == ResponseCode.SUCCESS:
            # The broker filters by the hash of tags: what only has the same hash is left out here.
            tags = tag_filter(wanted)
            messages = tuple(
                ReceivedMessage(stored, queue)
                for stored in decode_messages(answer.body)
                if tags.accepts_tag(stored.tags)
            )
        return Pulled(messages, place.next_begin_offset, place.min_offset, place.max_offset)

    async def at(self, where: Address, queue: Queue, offset: int) -> ReceivedMessage | None:
        """The message at an offset; None when there is none."""
        pulled = await self.pull(where, queue, offset, most=1)
        return next((each for each in pulled.messages if each.queue_offset == offset), None)

    async def messages(
        self, where: Address, queue: Queue, start: int, end: int, wanted: Wanted = ALL
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """The messages of a stretch, in order; what is gone already is left out."""
        offset = start
        while offset < end:
            pulled = await self.pull(where, queue, offset, wanted, min(BATCH, end - offset))
            for message in pulled.messages:
                if message.queue_offset < end:
                    yield message
            if pulled.next_offset <= offset:
                return
            offset = pulled.next_offset

    # Bounds.

    async def max_offset(self, where: Address, queue: Queue) -> int:
        header = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue.id)
        answer = await self._asking.ask(where, RequestCode.GET_MAX_OFFSET, header)
        return answer.header(OffsetResponse).offset

    async def min_offset(self, where: Address, queue: Queue) -> int:
        header = GetMinOffsetRequest(topic=queue.topic, queue_id=queue.id)
        answer = await self._asking.ask(where, RequestCode.GET_MIN_OFFSET, header)
        return answer.header(OffsetResponse).offset

    async def offset_at(
        self, where: Address, queue: Queue, time: float, low: int, high: int
    ) -> int:
        """The first offset from `low` on that was stored at or after a time; `high` when none was.

        Brokers of 4.9 answer with a neighbour of it, and any broker may with the last of several
        messages of one millisecond; so the answer is looked at, and searched for here if need be.
        """
        millis = milliseconds(time)
        header = SearchOffsetRequest(topic=queue.topic, queue_id=queue.id, timestamp=millis)
        answer = await self._asking.ask(where, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
        found = min(max(answer.header(OffsetResponse).offset, low), high)
        before = found <= low or await self._is_before(where, queue, found - 1, millis)
        after = found >= high or not await self._is_before(where, queue, found, millis)
        if before and after:
            return found
        first, last = (found + 1, high) if before else (low, found - 1)
        while first < last:
            middle = (first + last) // 2
            if await self._is_before(where, queue, middle, millis):
                first = middle + 1
            else:
                last = middle
        return first

    async def _is_before(self, where: Address, queue: Queue, offset: int, millis: int) -> bool:
        message = await self.at(where, queue, offset)
        # One that is gone was stored before everything that is left.
        return message is None or message.stored.store_ms < millis


def tag_filter(wanted: Wanted) -> TagFilter:
    """The check by text that follows the broker's by hash. Raises `BadRequest`."""
    try:
        return parse_tags(wanted.expression if wanted.expression_type == "TAG" else "*")
    except InvalidFilter as error:
        raise BadRequest(str(error)) from error
