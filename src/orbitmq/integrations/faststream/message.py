"""Messages as FastStream sees them: received ones, and what is to be sent.

FastStream's headers are properties; `content-type`, `correlation_id` and `reply_to` are among them.
What becomes of a received message is decided by `ack`, `nack` and `reject`, by hand or by
FastStream's `AckPolicy`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from faststream.message import StreamMessage, decode_message
from faststream.response.publish_type import PublishType
from faststream.response.response import BatchPublishCommand, PublishCommand, Response

from orbitmq.client.consumer.verdict import DeadLetter, Retry
from orbitmq.client.message import ReceivedMessage
from orbitmq.message.properties import REPLY_TO_CLIENT, RESERVED

CONTENT_TYPE: Final = "content-type"
CORRELATION_ID: Final = "correlation_id"
REPLY_TO: Final = "reply_to"
#: A body without bytes, which RocketMQ does not have, is one byte with this property.
EMPTY_BODY: Final = "empty-body"

#: Whose errors say that data does not fit.
_MODEL_LIBRARIES: Final = frozenset(("pydantic", "pydantic_core", "msgspec"))

Raw = ReceivedMessage | tuple[ReceivedMessage, ...]


class Settlement:
    """What a handler's call has decided about its message."""

    __slots__ = ("error", "is_decided")

    def __init__(self) -> None:
        self.is_decided = False
        #: None: the message is done.
        self.error: Exception | None = None

    def decide(self, error: Exception | None) -> None:
        """The first decision counts."""
        if not self.is_decided:
            self.is_decided, self.error = True, error

    def apply(self) -> None:
        """Tell the consumer by returning or raising."""
        if not self.is_decided:
            raise Retry("it was not acknowledged")
        if self.error is not None:
            raise self.error


#: Of the call that runs in this context.
settlement: ContextVar[Settlement | None] = ContextVar("orbitmq_settlement", default=None)


class RocketMQMessage(StreamMessage[Any]):
    """A received message; `raw_message` is OrbitMQ's own, or a tuple of them for a batch."""

    def __init__(self, *args: Any, decision: Settlement | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._decision = decision or Settlement()

    async def ack(self) -> None:
        """The message is done."""
        if self.committed is None:
            self._decision.decide(None)
        await super().ack()

    async def nack(self, delay: float | None = None) -> None:
        """Deliver the message again, after `delay` seconds or the group's usual delays."""
        cause = sys.exc_info()[1]
        if delay is None and _does_not_fit(cause):
            # The body will not fit the next time either.
            await self.reject()
            return
        if self.committed is None:
            self._decision.decide(Retry(cause or "nack", delay=delay))
        await super().nack()

    async def reject(self) -> None:
        """The message becomes a dead letter, with the error as its reason."""
        if self.committed is None:
            self._decision.decide(DeadLetter(sys.exc_info()[1] or "rejected"))
        await super().reject()


def _does_not_fit(error: BaseException | None) -> bool:
    """Whether FastDepends could not make a handler's arguments of a message.

    Libraries of models raise errors of their own, which a handler may raise as well.
    """
    frames = traceback.walk_tb(None if error is None else error.__traceback__)
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    callers = [module for module in modules if module not in _MODEL_LIBRARIES]
    return isinstance(error, ValueError | TypeError) and callers[-1:] == ["fast_depends"]


async def parse_message(raw: ReceivedMessage) -> RocketMQMessage:
    headers = headers_of(raw)
    return RocketMQMessage(
        raw_message=raw,
        body=body_of(raw),
        headers=headers,
        reply_to=headers.get(REPLY_TO) or raw.get(REPLY_TO_CLIENT) or "",
        content_type=headers.get(CONTENT_TYPE),
        message_id=raw.msg_id,
        correlation_id=headers.get(CORRELATION_ID),
        decision=settlement.get(),
    )


async def parse_batch(raw: tuple[ReceivedMessage, ...]) -> RocketMQMessage:
    each_headers = [headers_of(each) for each in raw]
    first = each_headers[0]
    return RocketMQMessage(
        raw_message=raw,
        body=[body_of(each) for each in raw],
        headers=first,
        batch_headers=each_headers,
        reply_to=first.get(REPLY_TO, ""),
        content_type=first.get(CONTENT_TYPE),
        message_id=f"{raw[0].msg_id}-{raw[-1].msg_id}",
        correlation_id=first.get(CORRELATION_ID),
        decision=settlement.get(),
    )


async def decode_one(message: StreamMessage[Any]) -> Any:
    return decode_message(message)


async def decode_batch(message: StreamMessage[Any]) -> Any:
    return [decode_message(await parse_message(raw)) for raw in message.raw_message]


def headers_of(raw: ReceivedMessage) -> dict[str, str]:
    """The application's properties."""
    return {
        name: value
        for name, value in raw.properties.items()
        if name not in RESERVED and name != EMPTY_BODY
    }


def body_of(raw: ReceivedMessage) -> bytes:
    return b"" if raw.get(EMPTY_BODY) else raw.body


# ---- sending


class RocketMQResponse(Response):
    """What a handler returns to set more than the body of what its publishers send."""

    def __init__(
        self,
        body: Any,
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        ordering_key: str | None = None,
        delay: float | None = None,
    ) -> None:
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.tag = tag
        self.keys = keys
        self.ordering_key = ordering_key
        self.delay = delay

    def get_publish_key(self) -> str | None:
        return self.ordering_key

    def as_publish_command(self) -> RocketMQPublishCommand:
        return RocketMQPublishCommand(
            self.body,
            headers=self.headers,
            correlation_id=self.correlation_id,
            tag=self.tag,
            keys=self.keys,
            ordering_key=self.ordering_key,
            delay=self.delay,
            _publish_type=PublishType.PUBLISH,
        )


class RocketMQPublishCommand(BatchPublishCommand):
    """What is to be sent, on its way through the middlewares."""

    def __init__(
        self,
        message: Any = None,
        /,
        *messages: Any,
        _publish_type: PublishType,
        topic: str = "",
        reply_to: str = "",
        correlation_id: str | None = None,
        headers: dict[str, Any] | None = None,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        ordering_key: str | None = None,
        delay: float | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(
            message,
            *messages,
            destination=topic,
            reply_to=reply_to,
            correlation_id=correlation_id,
            headers=headers,
            _publish_type=_publish_type,
        )
        self.tag = tag
        self.keys = keys
        self.ordering_key = ordering_key
        self.delay = delay
        self.timeout = timeout
        #: The request that this answers, if it came from `request`.
        self.request: ReceivedMessage | None = None

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> RocketMQPublishCommand:
        if isinstance(cmd, RocketMQPublishCommand):
            return cmd
        body, others = cls._parse_bodies(cmd.body, batch=batch)
        return cls(
            body,
            *others,
            topic=cmd.destination,
            reply_to=cmd.reply_to,
            correlation_id=cmd.correlation_id,
            headers=cmd.headers,
            _publish_type=cmd.publish_type,
        )

    def properties(self, content_type: str | None) -> dict[str, str]:
        """The headers as properties; RocketMQ has no blank values."""
        ours: Mapping[str, object] = {
            CONTENT_TYPE: content_type,
            CORRELATION_ID: self.correlation_id,
            REPLY_TO: self.reply_to,
        }
        return {
            name: str(value)
            for name, value in {**ours, **self.headers}.items()
            if value is not None and str(value).strip()
        }
