"""Producers whose sends are spans; see `tracing` for what a trace looks like.

They are producers like any other, with one more parameter. A plain `Producer` knows nothing of
tracing, so that there is nothing to switch off and nothing to pay.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable
from typing import Unpack

from orbitmq.client.durations import Duration
from orbitmq.client.message import Message
from orbitmq.client.producer.arguments import Body, Call, SendOptions, understand
from orbitmq.client.producer.asyncproducer import AsyncProducer
from orbitmq.client.producer.core import DEFAULT_GROUP
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.producer.transactions import Check
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.client.settings import ClientSettings
from orbitmq.client.tracing import Tracing


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
        self._tracing = tracing or Tracing()

    def send(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> SendResult:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message) as sending:
            result = super().send(sending.messages[0], **_where(call))
            sending.stored((result,))
        return result

    def submit(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> concurrent.futures.Future[SendResult]:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message) as sending:
            sent = super().submit(sending.messages[0], **_where(call))
            sending.until(sent)
        return sent

    def send_one_way(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> None:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message) as sending:
            super().send_one_way(sending.messages[0], **_where(call))

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
        with self._tracing.sending(*given) as sending:
            results = super().send_batch(sending.messages, queue=queue, key=key, timeout=timeout)
            sending.stored(results)
        return results

    def send_half(self, message: Message, *, timeout: Duration | None = None) -> SendResult:
        with self._tracing.sending(message) as sending:
            result = super().send_half(sending.messages[0], timeout=timeout)
            sending.stored((result,))
        return result

    def request(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> ReceivedMessage:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message, operation="request") as sending:
            return super().request(sending.messages[0], **_where(call))


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
        self._tracing = tracing or Tracing()

    async def send(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> SendResult:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message) as sending:
            result = await super().send(sending.messages[0], **_where(call))
            sending.stored((result,))
        return result

    async def submit(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> asyncio.Future[SendResult]:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message) as sending:
            sent = await super().submit(sending.messages[0], **_where(call))
            sending.until(sent)
        return sent

    async def send_one_way(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> None:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message) as sending:
            await super().send_one_way(sending.messages[0], **_where(call))

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
        with self._tracing.sending(*given) as sending:
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
        with self._tracing.sending(message) as sending:
            result = await super().send_half(sending.messages[0], timeout=timeout)
            sending.stored((result,))
        return result

    async def request(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> ReceivedMessage:
        call = understand(message, body, options, self.settings.timeout)
        with self._tracing.sending(call.message, operation="request") as sending:
            return await super().request(sending.messages[0], **_where(call))


def _where(call: Call) -> SendOptions:
    """The options of a call that are not in its message."""
    return SendOptions(queue=call.queue, selector=call.select, timeout=call.timeout)
