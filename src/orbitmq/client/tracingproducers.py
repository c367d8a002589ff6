"""Producers whose sends are spans; see `tracing` for what a trace looks like.

They are producers like any other, with one more parameter. A plain `Producer` knows nothing of
tracing, so that there is nothing to switch off and nothing to pay.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable
from typing import Self, Unpack

from orbitmq.client.durations import Duration
from orbitmq.client.engine import Engine
from orbitmq.client.message import Message
from orbitmq.client.producer.arguments import Body, SendOptions, understand
from orbitmq.client.producer.asyncproducer import AsyncProducer
from orbitmq.client.producer.core import DEFAULT_GROUP
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.producer.transactions import Check
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.client.settings import ClientSettings
from orbitmq.client.tracing import Sending, Tracing


class TracedProducer(Producer):
    """A `Producer` with a span around every send, whose context travels with the message."""

    def __init__(
        self,
        group: str = DEFAULT_GROUP,
        *,
        tracing: Tracing | None = None,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        sending: SendSettings | None = None,
        check: Check | None = None,
    ) -> None:
        """`tracing` None: by what OpenTelemetry was set up with globally."""
        super().__init__(
            group, name_server=name_server, client=client, sending=sending, check=check
        )
        self.tracing = tracing or Tracing()

    def send(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> SendResult:
        sending, where = _begin(self, message, body, options)
        with sending:
            result = super().send(sending.messages[0], **where)
            sending.stored((result,))
        return result

    def submit(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> concurrent.futures.Future[SendResult]:
        sending, where = _begin(self, message, body, options)
        with sending:
            sent = super().submit(sending.messages[0], **where)
            sending.until(sent)
        return sent

    def send_one_way(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> None:
        sending, where = _begin(self, message, body, options)
        with sending:
            super().send_one_way(sending.messages[0], **where)

    def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: Queue | None = None,
        key: str | int | None = None,
        timeout: Duration | None = None,
    ) -> list[SendResult]:
        given = tuple(messages)
        if not given:
            return super().send_batch(given, queue=queue, key=key, timeout=timeout)
        with self.tracing.sending(*given) as sending:
            results = super().send_batch(sending.messages, queue=queue, key=key, timeout=timeout)
            sending.stored(results)
        return results

    def send_half(self, message: Message, *, timeout: Duration | None = None) -> SendResult:
        with self.tracing.sending(message) as sending:
            result = super().send_half(sending.messages[0], timeout=timeout)
            sending.stored((result,))
        return result

    def request(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> ReceivedMessage:
        sending, where = _begin(self, message, body, options, operation="request")
        with sending:
            return super().request(sending.messages[0], **where)


class TracedAsyncProducer(AsyncProducer):
    """An `AsyncProducer` with a span around every send, whose context travels with the message."""

    def __init__(
        self,
        group: str = DEFAULT_GROUP,
        *,
        tracing: Tracing | None = None,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        sending: SendSettings | None = None,
        check: Check | None = None,
    ) -> None:
        """`tracing` None: by what OpenTelemetry was set up with globally."""
        super().__init__(
            group, name_server=name_server, client=client, sending=sending, check=check
        )
        self.tracing = tracing or Tracing()

    @classmethod
    def on(
        cls,
        engine: Engine,
        group: str = DEFAULT_GROUP,
        *,
        tracing: Tracing | None = None,
        sending: SendSettings | None = None,
        check: Check | None = None,
    ) -> Self:
        """A producer that shares the connections of a running client, which outlives it."""
        producer = super().on(engine, group, sending=sending, check=check)
        producer.tracing = tracing or Tracing()
        return producer

    async def send(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> SendResult:
        sending, where = _begin(self, message, body, options)
        with sending:
            result = await super().send(sending.messages[0], **where)
            sending.stored((result,))
        return result

    async def submit(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> asyncio.Future[SendResult]:
        sending, where = _begin(self, message, body, options)
        with sending:
            sent = await super().submit(sending.messages[0], **where)
            sending.until(sent)
        return sent

    async def send_one_way(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> None:
        sending, where = _begin(self, message, body, options)
        with sending:
            await super().send_one_way(sending.messages[0], **where)

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: Queue | None = None,
        key: str | int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> list[SendResult]:
        given = tuple(messages)
        if not given:
            return await super().send_batch(given, queue=queue, key=key, timeout=timeout)
        with self.tracing.sending(*given) as sending:
            results = await super().send_batch(
                sending.messages, queue=queue, key=key, timeout=timeout
            )
            sending.stored(results)
        return results

    async def send_half(
        self,
        message: Message,
        *,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> SendResult:
        with self.tracing.sending(message) as sending:
            result = await super().send_half(sending.messages[0], timeout=timeout)
            sending.stored((result,))
        return result

    async def request(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> ReceivedMessage:
        sending, where = _begin(self, message, body, options, operation="request")
        with sending:
            return await super().request(sending.messages[0], **where)


def _begin(
    producer: TracedProducer | TracedAsyncProducer,
    message: Message | str,
    body: Body | None,
    options: SendOptions,
    *,
    operation: str = "send",
) -> tuple[Sending, SendOptions]:
    """The span of a call, with the message to send in it; and the options that are not in that."""
    call = understand(message, body, options, producer.settings.timeout)
    where = SendOptions(queue=call.queue, selector=call.select, timeout=call.timeout)
    return producer.tracing.sending(call.message, operation=operation), where
