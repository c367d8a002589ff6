"""Subscribers: handlers of a topic, called by a consumer of OrbitMQ.

All members of a group subscribe to the same topics. So the subscribers of a broker that name the
same group share one consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faststream._internal.configs import SubscriberSpecificationConfig, SubscriberUsecaseConfig
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.utils import process_msg
from faststream.exceptions import SetupError
from faststream.middlewares import AckPolicy
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, SubscriberSpec

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.errors import NoRoute, Unavailable
from orbitmq.integrations.faststream.message import (
    Raw,
    RocketMQMessage,
    Settlement,
    decode_batch,
    decode_one,
    parse_batch,
    parse_message,
    settlement,
)
from orbitmq.integrations.faststream.publisher import ReplyPublisher
from orbitmq.message.properties import REPLY_TO_CLIENT

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import Beginning
    from orbitmq.client.settings import ClientSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """What the subscribers of one group have to have in common."""

    consume_from: Beginning
    ordered: bool
    max_retries: int | None


class GroupConsumers:
    """The consumers of a connected broker, one for each group."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._running: dict[str, tuple[AsyncConsumer, ConsumerOptions, set[str]]] = {}
        self._lock = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    async def join(self, subscriber: TopicSubscriber) -> None:
        group, topic, options = subscriber.group, subscriber.topic, subscriber.options
        async with self._lock:
            consumer, common, topics = self._running.get(group, (None, options, set[str]()))
            if topic in topics:
                raise SetupError(
                    f"two subscribers of topic {topic!r} are in group {group!r}, where each message"
                    " goes to one of them: give each its own group, or one subscriber filters"
                )
            if common != options:
                raise SetupError(
                    f"the subscribers of group {group!r} must have the same consume_from, ordered "
                    f"and max_retries: {common} is not {options}"
                )
            is_new = consumer is None
            if consumer is None:
                consumer = AsyncConsumer(
                    group,
                    client=self._client,
                    consume_from=options.consume_from,
                    ordered=options.ordered,
                    max_retries=options.max_retries,
                    workers=subscriber.max_workers,
                )
            await consumer.subscribe(
                topic,
                subscriber.handle,
                tags=subscriber.tags,
                sql=subscriber.sql,
                batch=subscriber.batch,
                batch_size=subscriber.batch_size,
            )
            if is_new:
                await consumer.start()
            else:
                consumer.resize(consumer.workers + subscriber.max_workers)
            topics.add(topic)
            self._running[group] = consumer, common, topics

    async def leave(self, subscriber: TopicSubscriber) -> None:
        if settlement.get() is None:
            await self._leave(subscriber.group, subscriber.topic)
            return
        # A handler that stops its subscriber would wait for its own end.
        task = asyncio.create_task(self._leave(subscriber.group, subscriber.topic))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, group: str, topic: str) -> None:
        async with self._lock:
            if (found := self._running.get(group)) is None or topic not in found[2]:
                return
            consumer, _, topics = found
            topics.remove(topic)
            if topics:
                await consumer.unsubscribe(topic)
                return
            del self._running[group]
            await consumer.stop()

    async def stop(self) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving)
        async with self._lock:
            running, self._running = self._running, {}
            for consumer, _, _ in running.values():
                await consumer.stop()


@dataclass(kw_only=True)
class SubscriberConfig(SubscriberUsecaseConfig):
    topic: str
    group: str | None
    tags: str | None
    sql: str | None
    batch: bool
    batch_size: int | None
    max_workers: int
    options: ConsumerOptions

    @property
    def ack_policy(self) -> AckPolicy:
        for policy in (self._ack_policy, self._outer_config.ack_policy):
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class RocketMQSubscriberSpecificationConfig(SubscriberSpecificationConfig):
    topic: str
    tags: str | None = field(default=None)


class RocketMQSubscriberSpecification(
    SubscriberSpecification[Any, RocketMQSubscriberSpecificationConfig]
):
    """A subscriber in the AsyncAPI document."""

    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def channel_labels(self) -> list[str]:
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        payload = resolve_payloads(self.get_payloads())
        message = Message(title=f"{self.name}:Message", payload=payload)
        return {
            self.name: SubscriberSpec(
                address=self.topic,
                description=self.description,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }


class TopicSubscriber(SubscriberUsecase[Any]):
    """Handlers of one topic."""

    #: A composition of the configurations of routers and broker, which has the attributes of all.
    _outer_config: Any

    def __init__(
        self,
        config: SubscriberConfig,
        specification: SubscriberSpecification[Any, Any],
        calls: Any,
    ) -> None:
        config.parser = parse_batch if config.batch else parse_message
        config.decoder = decode_batch if config.batch else decode_one
        super().__init__(config, specification, calls)
        self._topic = config.topic
        self._group = config.group
        self.tags = config.tags
        self.sql = config.sql
        self.batch = config.batch
        self.batch_size = config.batch_size
        self.max_workers = config.max_workers
        self.options = config.options
        self._places = asyncio.Semaphore(config.max_workers)
        self._puller: AsyncPullConsumer | None = None

    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self._topic}"

    @property
    def group(self) -> str:
        return self._group or self._outer_config.group or f"faststream-{self.topic}"

    # ---- life

    async def start(self) -> None:
        await super().start()
        connection = self._outer_config.connection
        if self.calls:
            # Messages may arrive before the consumer's start returns.
            self._post_start()
            await connection.create_topic(self.topic)
            try:
                await connection.groups.join(self)
            except BaseException:
                self.running = False
                raise
        self._post_start()

    async def stop(self) -> None:
        connection = self._outer_config.connection
        await super().stop()
        if connection is not None:
            await connection.groups.leave(self)
        if (puller := self._puller) is not None:
            self._puller = None
            await puller.stop()

    # ---- messages

    async def handle(self, raw: Raw | list[ReceivedMessage]) -> None:
        """Called by the consumer."""
        decision = Settlement()
        token = settlement.set(decision)
        try:
            async with self._places:
                await self.consume(tuple(raw) if isinstance(raw, list) else raw)
        finally:
            settlement.reset(token)
        decision.apply()

    async def _pulling(self) -> AsyncPullConsumer:
        assert not self.calls, "a subscriber with handlers cannot be polled"  # noqa: S101
        if self._puller is None:
            connection = self._outer_config.connection
            await connection.create_topic(self.topic)
            puller = AsyncPullConsumer(
                self.group, client=connection.client, consume_from=self.options.consume_from
            )
            puller.subscribe(self.topic, self.tags, sql=self.sql)
            await puller.start()
            self._puller = puller
        return self._puller

    async def _next(self, timeout: float) -> Raw | None:  # noqa: ASYNC109
        puller = await self._pulling()
        most = (self.batch_size or 32) if self.batch else 1
        try:
            found = await puller.poll(max_messages=most, timeout=timeout)
        except (NoRoute, Unavailable):
            return None  # not yet: the consumer's log says why
        if not found:
            return None
        return tuple(found) if self.batch else found[0]

    async def get_one(self, *, timeout: float = 5.0) -> RocketMQMessage | None:  # noqa: ASYNC109
        return await self._processed(await self._next(timeout))

    async def __aiter__(self) -> AsyncIterator[RocketMQMessage]:
        while True:
            if (raw := await self._next(1.0)) is not None:
                message = await self._processed(raw)
                if message is not None:
                    yield message

    async def _processed(self, raw: Raw | None) -> RocketMQMessage | None:
        parser, decoder = self._get_parser_and_decoder()
        context = self._outer_config.context
        message: Any = await process_msg(
            msg=raw,
            middlewares=(each(raw, context=context) for each in self._broker_middlewares),
            parser=parser,
            decoder=decoder,
        )
        return message  # type: ignore[no-any-return]

    def _make_response_publisher(self, message: Any) -> Sequence[ReplyPublisher]:
        raw = message.raw_message
        is_request = isinstance(raw, ReceivedMessage) and message.reply_to == raw.get(
            REPLY_TO_CLIENT
        )
        return (
            ReplyPublisher(
                self._outer_config.producer, message.reply_to, raw if is_request else None
            ),
        )

    # ---- logs

    @staticmethod
    def build_log_context(message: Any, topic: str = "", group: str = "") -> dict[str, str]:
        return {
            "topic": topic,
            "group": group,
            "message_id": getattr(message, "message_id", ""),
        }

    def get_log_context(self, message: Any) -> dict[str, str]:
        topic = self.topic
        with contextlib.suppress(AttributeError, IndexError):
            raw = message.raw_message
            topic = (raw[0] if isinstance(raw, tuple) else raw).topic
        return self.build_log_context(message, topic, self.group)
