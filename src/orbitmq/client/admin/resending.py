"""Sending dead letters again.

A letter goes to the group's retry topic, where only that group gets it, with all its attempts
before it; or to the topic that it was sent to first, where every group gets it. The copy says which
letter it was made of and how often that has happened, so that a letter is not sent twice unless one
insists, and one that dies again shows it.

A broker redirects what is sent to the retry topic of a group that consumes in order straight to the
dead letters. So every copy is looked at where it was stored, before it counts as sent.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from orbitmq.client.admin.arguments import positive, whole_number
from orbitmq.client.admin.asking import Asking, Failed
from orbitmq.client.admin.deadletters import (
    DLQ_REASON,
    AsyncDeadLetterReading,
    DeadLetter,
    DeadLetterFilter,
)
from orbitmq.client.admin.errors import AdminError, BadRequest, GroupNotFound
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.resent import copy_of
from orbitmq.client.admin.resentmarks import RESENT_FROM, RESENT_TIMES
from orbitmq.client.admin.topics import AsyncTopics
from orbitmq.client.admin.topicvalues import Permission
from orbitmq.client.admin.topology import Directory
from orbitmq.client.names import retry_topic
from orbitmq.client.queue import Queue
from orbitmq.message.errors import MessageError
from orbitmq.message.properties import encode_properties
from orbitmq.message.sysflag import COMPRESSED, COMPRESSION_TYPE_MASK
from orbitmq.message.wellknown import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    INSTANCE_ID,
    KEYS,
    ORIGIN_MESSAGE_ID,
    RESERVED,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
)
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.send import SendMessageRequest, SendMessageResponse

#: Of the system's own properties, those that belong to the message and not to its journey.
_KEPT = frozenset({KEYS, TAGS, UNIQ_KEY, INSTANCE_ID, SHARDING_KEY})
_DROPPED = (RESERVED | {DLQ_REASON, DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID}) - _KEPT

PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"


class ResendTo(enum.StrEnum):
    """Where dead letters are sent."""

    #: Only the group that gave it up gets it.
    RETRY = "retry"
    #: Every group that consumes the topic gets it.
    ORIGIN = "origin"


class ResendResult(enum.StrEnum):
    """What became of one letter."""

    SENT = "sent"
    WOULD_BE_SENT = "would be sent"
    ALREADY_SENT = "already sent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResendOutcome:
    """One letter, and what became of it."""

    letter: DeadLetter
    result: ResendResult
    #: The topic that it went, or would go, to.
    topic: str | None = None
    #: The offset id of the copy.
    sent_as: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ResendReport:
    """What became of all letters."""

    group: str
    outcomes: tuple[ResendOutcome, ...]

    @property
    def counts(self) -> Mapping[ResendResult, int]:
        return Counter(outcome.result for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[ResendOutcome, ...]:
        return tuple(each for each in self.outcomes if each.result is ResendResult.FAILED)


class AsyncDeadLetterResending:
    """Sends dead letters again."""

    def __init__(
        self,
        asking: Asking,
        directory: Directory,
        topics: AsyncTopics,
        messages: AsyncMessages,
        letters: AsyncDeadLetterReading,
    ) -> None:
        self._asking = asking
        self._directory = directory
        self._topics = topics
        self._messages = messages
        self._letters = letters

    async def resend(
        self,
        group: str,
        where: DeadLetterFilter | None = None,
        *,
        to: ResendTo | str = ResendTo.RETRY,
        rate: float | None = None,
        limit: int | None = None,
        again: bool = False,
        dry_run: bool = False,
    ) -> ResendReport:
        """Send all letters that a filter means; see `resending`, which tells as it goes."""
        outcomes = [
            outcome
            async for outcome in self.resending(
                group, where, to=to, rate=rate, limit=limit, again=again, dry_run=dry_run
            )
        ]
        return ResendReport(group, tuple(outcomes))

    async def resending(
        self,
        group: str,
        where: DeadLetterFilter | None = None,
        *,
        to: ResendTo | str = ResendTo.RETRY,
        rate: float | None = None,
        limit: int | None = None,
        again: bool = False,
        dry_run: bool = False,
    ) -> AsyncGenerator[ResendOutcome, None]:
        """Send letters one after the other, and say what became of each.

        `rate` is the most per second; `limit` the most that are sent in all. A letter that was
        sent before is left out unless `again`. One that fails does not hold up the others.
        `dry_run` sends nothing.
        """
        target = _target(to)
        pause = 0.0 if rate is None else 1 / positive("rate", rate)
        most = None if limit is None else whole_number("limit", limit, 1)
        routes = _Routes(self._topics)
        if target is ResendTo.RETRY:
            await routes.check_retry(group)
        clock = self._asking.clock
        next_at = clock.monotonic()
        sent = 0
        async for letter in self._letters.list(group, where):
            if sent == most:
                return
            outcome = await self._planned(letter, target, again=again)
            if outcome.result is ResendResult.WOULD_BE_SENT:
                sent += 1
                if not dry_run:
                    await asyncio.sleep(max(0.0, next_at - clock.monotonic()))
                    next_at = max(next_at, clock.monotonic()) + pause
                    outcome = await self._sent(letter, target, outcome.topic or "", routes)
            yield outcome

    async def _planned(self, letter: DeadLetter, target: ResendTo, *, again: bool) -> ResendOutcome:
        topic = retry_topic(letter.group) if target is ResendTo.RETRY else letter.topic
        if topic is None:
            return _failed(letter, None, "nothing in it says which topic it was sent to")
        if again:
            return ResendOutcome(letter, ResendResult.WOULD_BE_SENT, topic)
        try:
            # What was sent to a topic that may not be read is seen nowhere else: unless it is sent
            # there again, where every group would get it twice, the retry topic has to do.
            copy = await copy_of(self._messages, letter, needed=topic)
        except Failed as error:
            return _failed(letter, topic, f"whether it was sent before is not known: {error}")
        if copy is None:
            return ResendOutcome(letter, ResendResult.WOULD_BE_SENT, topic)
        return ResendOutcome(letter, ResendResult.ALREADY_SENT, copy.queue.topic, copy.offset_id)

    async def _sent(
        self, letter: DeadLetter, target: ResendTo, topic: str, routes: _Routes
    ) -> ResendOutcome:
        try:
            stored = letter.message.stored
            # A copy gets a new checksum: a torn body must not become a valid one.
            stored.verify()
            queue = await routes.queue(topic, letter.message.queue.broker)
            node = (await self._directory.look()).master(queue.broker)
            header = SendMessageRequest(
                producer_group=PRODUCER_GROUP,
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue.id,
                sys_flag=stored.sys_flag & (COMPRESSED | COMPRESSION_TYPE_MASK),
                born_timestamp=stored.born_ms,
                flag=stored.flag,
                properties=encode_properties(_properties(letter, target)).decode(),
                reconsume_times=0,
                broker_name=queue.broker,
            )
            answer = await self._asking.ask(
                node.address, RequestCode.SEND_MESSAGE_V2, header, body=stored.stored_body
            )
            sent_as = answer.header(SendMessageResponse).msg_id
            copy = await self._messages.by_offset_id(sent_as)
        except (*Failed, MessageError) as error:
            return _failed(letter, topic, str(error))
        if copy.queue.topic != topic:
            return _failed(
                letter,
                topic,
                f"the broker put it into {copy.queue.topic!r}: the group consumes in order; send "
                "it to the origin instead",
            )
        return ResendOutcome(letter, ResendResult.SENT, topic, sent_as)


class _Routes:
    """Queues to send to: on the letter's own broker if it has the topic, one after the other."""

    def __init__(self, topics: AsyncTopics) -> None:
        self._topics = topics
        self._queues: dict[str, list[Queue]] = {}
        self._turn = 0

    async def check_retry(self, group: str) -> None:
        """A group without a retry topic has never been online, or was deleted."""
        try:
            await self._of(retry_topic(group))
        except AdminError as error:
            raise GroupNotFound(group) from error

    async def queue(self, topic: str, broker: str) -> Queue:
        queues = await self._of(topic)
        near = [queue for queue in queues if queue.broker == broker] or queues
        self._turn += 1
        return near[self._turn % len(near)]

    async def _of(self, topic: str) -> list[Queue]:
        queues = self._queues.get(topic)
        if queues is None:
            route = await self._topics.route(topic)
            queues = self._queues[topic] = [
                Queue(topic, broker.broker, number)
                for broker in route.brokers
                if broker.permission & Permission.WRITE and 0 in broker.addresses
                for number in range(broker.write_queues)
            ]
        if not queues:
            raise AdminError(f"no broker accepts messages for topic {topic!r} at the moment")
        return queues


def _target(to: ResendTo | str) -> ResendTo:
    try:
        return ResendTo(to)
    except ValueError:
        raise BadRequest(
            f"dead letters are sent to one of {', '.join(ResendTo)}, not to {to!r}"
        ) from None


def _properties(letter: DeadLetter, target: ResendTo) -> dict[str, str | None]:
    """What the copy says: the message's own properties, and where it came from."""
    message = letter.message
    kept: dict[str, str | None] = {
        name: value for name, value in message.properties.items() if name not in _DROPPED
    }
    if target is ResendTo.RETRY:
        # The listener is shown the topic that the message was sent to.
        kept[RETRY_TOPIC] = letter.topic
        kept[ORIGIN_MESSAGE_ID] = letter.origin_id
    kept[RESENT_FROM] = letter.id
    kept[RESENT_TIMES] = str(letter.resent_times + 1)
    return kept


def _failed(letter: DeadLetter, topic: str | None, problem: str) -> ResendOutcome:
    return ResendOutcome(letter, ResendResult.FAILED, topic, problem=problem)
