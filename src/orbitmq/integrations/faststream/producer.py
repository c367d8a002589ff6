"""Sends what FastStream publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import BatchCodecProto, DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import IncorrectState

from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.producer.send import SendResult
from orbitmq.errors import SendFailed, TimedOut
from orbitmq.integrations.faststream.message import (
    EMPTY_BODY,
    RocketMQPublishCommand,
    decode_one,
    parse_message,
)

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import CustomCallable


class RocketMQProducer(ProducerProto[RocketMQPublishCommand]):
    """Encodes bodies with the broker's codec, and sends with OrbitMQ's `AsyncProducer`."""

    def __init__(
        self,
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
    ) -> None:
        self._parser = ParserComposition(parser, parse_message)
        self._decoder = ParserComposition(decoder, decode_one)
        self.codec: CodecProto = codec or DefaultCodec()
        self._producer: AsyncProducer | None = None
        self._serializer: SerializerProto | None = None

    def connect(self, producer: AsyncProducer, serializer: SerializerProto | None) -> None:
        self._producer, self._serializer = producer, serializer

    def disconnect(self) -> None:
        self._producer = None

    @property
    def _connected(self) -> AsyncProducer:
        if self._producer is None:
            raise IncorrectState("the broker is not connected: call `connect()` or `start()` first")
        return self._producer

    async def publish(self, cmd: RocketMQPublishCommand) -> SendResult:
        encoded = await self.codec.encode(cmd.body, self._serializer)
        if cmd.request is not None:
            content, properties = with_properties(cmd, *encoded)
            return await self._connected.reply(cmd.request, content, properties=properties)
        return await self._connected.send(message_of(cmd, *encoded))

    async def publish_batch(self, cmd: RocketMQPublishCommand) -> list[SendResult]:
        messages = await self.messages(cmd)
        return await self._connected.send_batch(messages) if messages else []

    async def request(self, cmd: RocketMQPublishCommand) -> ReceivedMessage:
        encoded = await self.codec.encode(cmd.body, self._serializer)
        message, timeout = message_of(cmd, *encoded), cmd.timeout or 3.0
        try:
            return await self._connected.request(message, timeout=timeout)
        except (TimedOut, SendFailed) as error:
            if isinstance(error, SendFailed) and not isinstance(error.cause, TimedOut):
                raise
            raise TimeoutError(str(error)) from error

    async def messages(self, cmd: RocketMQPublishCommand) -> list[Message]:
        """The messages of a batch."""
        bodies, codec = cmd.batch_bodies, self.codec
        if isinstance(codec, BatchCodecProto):
            encoded = await codec.encode_batch(bodies, self._serializer)
        else:
            encoded = [await codec.encode(body, self._serializer) for body in bodies]
        return [message_of(cmd, *each) for each in encoded]


def message_of(cmd: RocketMQPublishCommand, content: bytes, content_type: str | None) -> Message:
    """What a command sends, with this encoded body."""
    body, properties = with_properties(cmd, content, content_type)
    return Message(
        cmd.destination,
        body,
        tag=cmd.tag,
        keys=cmd.keys,
        properties=properties,
        ordering_key=cmd.ordering_key,
        delay=cmd.delay,
    )


def with_properties(
    cmd: RocketMQPublishCommand, content: bytes, content_type: str | None
) -> tuple[bytes, dict[str, str]]:
    """A body that RocketMQ takes, and the properties that belong to it."""
    properties = cmd.properties(content_type)
    return (content, properties) if content else (b"\0", {**properties, EMPTY_BODY: "true"})
