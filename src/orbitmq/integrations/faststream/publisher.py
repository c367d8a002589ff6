"""Publishers: objects and decorators that send to one topic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from faststream._internal.configs import PublisherSpecificationConfig, PublisherUsecaseConfig
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.producer import ProducerProto
from faststream.response.publish_type import PublishType
from faststream.response.response import PublishCommand
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec

from orbitmq.client.message import ReceivedMessage
from orbitmq.integrations.faststream.message import RocketMQMessage, RocketMQPublishCommand


@dataclass(kw_only=True)
class PublisherConfig(PublisherUsecaseConfig):
    topic: str
    tag: str | None
    headers: dict[str, str] | None
    reply_to: str
    batch: bool


@dataclass(kw_only=True)
class RocketMQPublisherSpecificationConfig(PublisherSpecificationConfig):
    topic: str


class RocketMQPublisherSpecification(
    PublisherSpecification[Any, RocketMQPublisherSpecificationConfig]
):
    """A publisher in the AsyncAPI document."""

    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        payload = resolve_payloads(self.get_payloads(), "Publisher")
        message = Message(title=f"{self.name}:Message", payload=payload)
        return {
            self.name: PublisherSpec(
                address=self.topic,
                description=self.config.description_,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }


class TopicPublisher(PublisherUsecase):
    """Sends to a topic; with `batch`, each element of what a handler returns."""

    def __init__(
        self, config: PublisherConfig, specification: PublisherSpecification[Any, Any]
    ) -> None:
        super().__init__(config, specification)
        self._topic = config.topic
        self.tag = config.tag
        self.headers = config.headers or {}
        self.reply_to = config.reply_to
        self.batch = config.batch

    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self._topic}"

    async def publish(
        self,
        *messages: Any,
        topic: str = "",
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        ordering_key: str | None = None,
        delay: float | None = None,
    ) -> Any:
        cmd = RocketMQPublishCommand(
            *(messages or (None,)),
            topic=topic or self.topic,
            headers=self.headers | (headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            reply_to=reply_to or self.reply_to,
            tag=tag or self.tag,
            keys=keys,
            ordering_key=ordering_key,
            delay=delay,
            _publish_type=PublishType.PUBLISH,
        )
        return await self._send(cmd, ())

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> Any:
        """Called with what a handler has returned."""
        cmd = RocketMQPublishCommand.from_cmd(cmd, batch=self.batch)
        cmd.destination = self.topic
        cmd.add_headers(self.headers, override=False)
        cmd.reply_to = cmd.reply_to or self.reply_to
        cmd.tag = cmd.tag or self.tag
        return await self._send(cmd, _extra_middlewares)

    async def _send(self, cmd: RocketMQPublishCommand, middlewares: Iterable[Any]) -> Any:
        send = self._basic_publish_batch if self.batch else self._basic_publish
        return await send(cmd, producer=self._outer_config.producer, _extra_middlewares=middlewares)

    async def request(
        self,
        message: Any,
        topic: str = "",
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        tag: str | None = None,
        timeout: float = 3.0,  # noqa: ASYNC109  # FastStream's name
    ) -> RocketMQMessage:
        cmd = RocketMQPublishCommand(
            message,
            topic=topic or self.topic,
            headers=self.headers | (headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            tag=tag or self.tag,
            timeout=timeout,
            _publish_type=PublishType.REQUEST,
        )
        reply: RocketMQMessage = await self._basic_request(
            cmd, producer=self._outer_config.producer
        )
        return reply


class ReplyPublisher(FakePublisher):
    """Sends what a handler returns to whoever asked."""

    def __init__(
        self, producer: ProducerProto[Any], topic: str, request: ReceivedMessage | None
    ) -> None:
        super().__init__(producer=producer)
        self._topic = topic
        self._request = request

    def patch_command(self, cmd: PublishCommand) -> RocketMQPublishCommand:
        made = RocketMQPublishCommand.from_cmd(super().patch_command(cmd))
        made.destination = self._topic
        made.request = self._request
        return made
