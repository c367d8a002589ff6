"""Sends on what a handler returns, before its message counts as done.

A send that fails is a failure of the handler: the message comes again, and what it returns is sent
again. So a result arrives at least once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from orbitmq.client.consumer.verdict import Verdict
from orbitmq.client.consumer.workers import awaited
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.errors import NotRunning, SettingError
from orbitmq.names import sending_problem

if TYPE_CHECKING:
    from orbitmq.client.producer.send import SendResult
    from orbitmq.client.serialization import Serializing
    from orbitmq.client.tracing import Sending

#: Properties in which the context of a trace travels.
_TRACE: Final = ("traceparent", "tracestate", "baggage", "b3")


class Sender(Protocol):
    """What sends; the consumer's own producer."""

    async def send(self, message: Message) -> SendResult:
        """Send a message. Raises `OrbitError`."""


class Publication:
    """The topic to which one handler's results go."""

    def __init__(
        self, topic: str, serializer: Serializing, middleware: Sequence[object] = ()
    ) -> None:
        """With `Tracing` among the middleware, each send has a span inside of the handler's."""
        if problem := sending_problem(topic):
            raise SettingError(f"publish: {problem}")
        self._topic = topic
        self._serializer = serializer
        tracing: list[Any] = [each for each in middleware if hasattr(each, "sending")]
        self._tracing: Callable[[Message], Sending] | None = tracing[0].sending if tracing else None
        #: Known when the consumer runs.
        self.sender: Sender | None = None

    def around(
        self, function: Callable[[ReceivedMessage], Any], *, is_async: bool
    ) -> Callable[[ReceivedMessage], Any]:
        """The same handler, whose result is sent. It returns what tells of the message."""

        def call(message: ReceivedMessage) -> Any:
            answer = function(message)
            if isinstance(answer, Awaitable):
                answer = awaited(answer)
            return answer if _is_verdict(answer) else self._send(self._made(answer, message))

        async def call_async(message: ReceivedMessage) -> Any:
            answer = await function(message)
            if _is_verdict(answer):
                return answer
            return await self._send(self._made(answer, message))

        return call_async if is_async else call

    def _made(self, answer: Any, message: ReceivedMessage) -> Sequence[Message]:
        """The messages to send: those returned, or one with the returned value."""
        if isinstance(answer, Message):
            return [answer]
        if isinstance(answer, list) and all(isinstance(each, Message) for each in answer):
            return answer
        trace: dict[str, str] = {}
        if self._tracing is None:  # otherwise it writes a context of its own
            found = ((name, message.get(name)) for name in _TRACE)
            trace = {name: value for name, value in found if value}
        made = Message(
            self._topic,
            answer,
            serializer=self._serializer,
            keys=message.keys,
            ordering_key=message.ordering_key or None,
            properties=trace,
        )
        return [made]

    async def _send(self, messages: Sequence[Message]) -> None:
        if self.sender is None:
            raise NotRunning("the consumer that publishes")
        for message in messages:
            if self._tracing is None:
                await self.sender.send(message)
                continue
            with self._tracing(message) as sending:
                sending.returned(await self.sender.send(sending.messages[0]))


def _is_verdict(answer: object) -> bool:
    return answer is None or isinstance(answer, bool | Verdict)


def publication_of(
    topic: str | None, serializer: Serializing, middleware: Sequence[object], *, is_batch: bool
) -> Publication | None:
    """What `publish=` asks for. Raises `SettingError`."""
    if topic is None:
        return None
    if is_batch:
        raise SettingError("publish is for a handler of one message; in a batch, send by yourself")
    return Publication(topic, serializer, middleware)
