"""`TestRocketMQBroker`: a broker whose messages stay in the process, for unit tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import anyio
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import DefaultCodec
from faststream._internal.testing.broker import EnterType, TestBroker, change_producer
from faststream.exceptions import SubscriberNotFound

from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.filter.tags import parse_tags
from orbitmq.integrations.faststream.broker import RocketMQBroker
from orbitmq.integrations.faststream.message import (
    RocketMQPublishCommand,
    decode_one,
    parse_message,
)
from orbitmq.integrations.faststream.producer import RocketMQProducer, message_of
from orbitmq.integrations.faststream.publisher import TopicPublisher
from orbitmq.integrations.faststream.subscriber import TopicSubscriber
from orbitmq.message.stored import StoredMessage

__all__ = ("TestRocketMQBroker",)


class TestRocketMQBroker(TestBroker[RocketMQBroker, EnterType], broker=RocketMQBroker):
    """Calls handlers with what is published, without a cluster."""

    __test__ = False

    def __init__(
        self,
        *brokers: RocketMQBroker,
        with_real: bool = False,
        connect_only: bool | None = None,
    ) -> None:
        super().__init__(*brokers, with_real=with_real, connect_only=connect_only)

    @contextmanager
    def _patch_producer(self, broker: Any) -> Iterator[None]:
        producer = FakeProducer(broker, self.brokers)
        with change_producer(broker.config.broker_config, producer):
            yield

    async def _fake_connect(  # type: ignore[override]
        self, broker: Any, *_: Any, **__: Any
    ) -> MagicMock:
        connection = MagicMock()
        for name in ("create_topic", "stop"):
            setattr(connection, name, AsyncMock())
        connection.groups.join = AsyncMock()
        connection.groups.leave = AsyncMock()
        broker.config.broker_config.connection = connection
        return connection

    def create_publisher_fake_subscriber(
        self, broker: RocketMQBroker, publisher: TopicPublisher
    ) -> tuple[TopicSubscriber, bool]:
        for each in self.brokers:
            for subscriber in each.subscribers:
                if isinstance(subscriber, TopicSubscriber) and subscriber.topic == publisher.topic:
                    return subscriber, True
        made = broker.subscriber(publisher.topic, batch=publisher.batch, persistent=False)
        return made, False


class FakeProducer(RocketMQProducer):
    """Calls the handlers of one subscriber of each group."""

    def __init__(self, broker: RocketMQBroker, brokers: Sequence[RocketMQBroker]) -> None:
        super().__init__()
        config: Any = broker.config
        self._brokers = brokers
        self._parser = ParserComposition(broker._parser, parse_message)
        self._decoder = ParserComposition(broker._decoder, decode_one)
        self.codec = config.broker_codec or DefaultCodec()
        self._serializer = config.fd_config._serializer

    def _subscribers(self, topic: str, tag: str | None) -> Iterator[TopicSubscriber]:
        groups = set()
        for broker in self._brokers:
            for subscriber in broker.subscribers:
                assert isinstance(subscriber, TopicSubscriber)  # noqa: S101
                if subscriber.topic != topic or subscriber.group in groups:
                    continue
                if subscriber.tags and not parse_tags(subscriber.tags).accepts_tag(tag):
                    continue
                groups.add(subscriber.group)
                yield subscriber

    async def publish(self, cmd: RocketMQPublishCommand) -> Any:
        received = await self._encoded(cmd)
        for subscriber in self._subscribers(cmd.destination, cmd.tag):
            await subscriber.process_message((received,) if subscriber.batch else received)

    async def publish_batch(self, cmd: RocketMQPublishCommand) -> Any:
        received = [_received(message) for message in await self.messages(cmd)]
        for subscriber in self._subscribers(cmd.destination, cmd.tag):
            if subscriber.batch:
                await subscriber.process_message(tuple(received))
            else:
                for each in received:
                    await subscriber.process_message(each)

    async def request(self, cmd: RocketMQPublishCommand) -> ReceivedMessage:
        received = await self._encoded(cmd)
        for subscriber in self._subscribers(cmd.destination, cmd.tag):
            with anyio.fail_after(cmd.timeout):
                answer = await subscriber.process_message(
                    (received,) if subscriber.batch else received
                )
            reply = RocketMQPublishCommand.from_cmd(answer.as_publish_command())
            reply.destination = cmd.destination
            reply.correlation_id = answer.correlation_id
            return await self._encoded(reply)
        raise SubscriberNotFound

    async def _encoded(self, cmd: RocketMQPublishCommand) -> ReceivedMessage:
        return _received(message_of(cmd, *await self.codec.encode(cmd.body, self._serializer)))


def _received(message: Message) -> ReceivedMessage:
    """What a consumer would get."""
    stored = StoredMessage.build(
        topic=message.topic, stored_body=message.body, properties=message.all_properties()
    )
    return ReceivedMessage(stored, Queue(message.topic, "in-memory", 0))
