"""OpenTelemetry: one trace from the send of a message to the end of its handler.

    tracing = Tracing()
    with tracing.trace(Producer("orders-svc", name_server="localhost:9876")) as producer:
        producer.send("orders", b"...")
    consumer = Consumer("billing", name_server="localhost:9876", middleware=[tracing])

The context travels in the message's properties. `send` and `process` are measured where they
happen; the consumer derives `store` and `deliver` from the times in the message, as exactly as the
clocks of the machines agree. See docs/howto/tracing.md. A program that does not use this module
never imports OpenTelemetry.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from orbitmq.arguments import warn_deprecated
from orbitmq.client.consumer.verdict import DEAD, DeadLetter
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.core import SendOptions, parse_send_args
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.producer.send import SendResult
from orbitmq.clock import milliseconds_up
from orbitmq.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Link, Span, TracerProvider

    from orbitmq.client.middleware import Delivery


#: The name of the tracer.
_SCOPE: Final = "orbitmq"
_NANOSECONDS: Final = 1_000_000_000
Attributes = dict[str, str | int | float | Sequence[str]]


P = TypeVar("P", Producer, AsyncProducer)


class Tracing:
    """Creates spans for sent and consumed messages. As a middleware, one around every delivery.

    May be shared by any number of producers and consumers.
    """

    def __init__(
        self,
        provider: TracerProvider | None = None,
        *,
        propagator: TextMapPropagator | None = None,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        """`provider` and `propagator`: by default the application's global ones.

        Raises `MissingExtra`.
        """
        try:
            from opentelemetry import propagate, trace  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise MissingExtra("tracing", "OpenTelemetry's API", "otel") from error
        self._trace = trace
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=provider)
        self._propagator = propagator or propagate.get_global_textmap()
        self._now = now

    # ---- sending

    def trace(self, producer: P) -> P:
        """The producer, with a span around every send. The context travels with the message."""
        send_arrow = producer.send_arrow
        for name in _SENDS:
            setattr(producer, name, _traced(self, producer, name))
        for name in ("send_arrow", "send_many"):
            setattr(producer, name, _traced_columns(self, send_arrow, name))
        return producer

    def sending(self, *messages: Message, operation: str = "send") -> Sending:
        """A span for a call that sends, and the messages with its context.

        A batch has one span. A message that has a context already keeps it, and the span links to
        it.
        """
        span = self._tracer.start_span(
            f"{operation} {messages[0].topic}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes=_sent_attributes(messages, operation),
            links=self._links(message.properties for message in messages),
        )
        carrier = self._carrier(span)
        return Sending(self, span, [self._carrying(each, carrier) for each in messages])

    def sending_columns(self, topic: str, table: Any) -> tuple[Sending, Any]:
        """A span for a call of `send_arrow`, and the table with its context, by the same rules."""
        from orbitmq.client.producer.columns import with_properties  # noqa: PLC0415  # an extra

        attributes = _attributes_of_many(topic, "send", getattr(table, "num_rows", 0))
        span = self._tracer.start_span(
            f"send {topic}", kind=self._trace.SpanKind.PRODUCER, attributes=attributes
        )
        if carrier := self._carrier(span):
            table, others = with_properties(table, carrier, self._propagator.fields)
            for link in self._links(iter(others)):
                span.add_link(link.context)
        return Sending(self, span, ()), table

    def _carrier(self, span: Span) -> dict[str, str]:
        """The context of a span as properties; none if spans are not recorded."""
        carrier: dict[str, str] = {}
        if span.get_span_context().is_valid:
            self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier

    def _carrying(self, message: Message, carrier: Mapping[str, str]) -> Message:
        if not carrier or any(name in message.properties for name in self._propagator.fields):
            return message
        return replace(message, properties={**message.properties, **carrier})

    # ---- consuming

    def __call__(self, delivery: Delivery) -> AbstractContextManager[None]:
        """The middleware: work of the handler belongs to the trace of its message."""
        return self._around(delivery)

    @contextmanager
    def _around(self, delivery: Delivery) -> Iterator[None]:
        messages = delivery.messages
        if not messages:  # other middleware dropped or holds them all
            yield
            return
        attributes = _received_attributes(messages, delivery.group)
        attributes["code.function.name"] = delivery.handler
        with self._processing(messages, attributes) as span:
            yield
            # Without an error, the handler may still have returned that messages failed.
            failure = delivery.outcome.failure
            if delivery.outcome.has_failed and span.is_recording():
                is_dead = failure is not None and failure.level == DEAD
                span.set_attribute("orbitmq.outcome", "dead letter" if is_dead else "retry")
                reason = failure.reason if failure is not None else None
                span.set_status(self._trace.StatusCode.ERROR, reason)

    def processing(
        self, *messages: ReceivedMessage, group: str | None = None
    ) -> AbstractContextManager[Span]:
        """A span around work on messages, for programs that poll: one message, or a batch."""
        named = group if group is not None else messages[0].group
        return self._processing(messages, _received_attributes(messages, named))

    @contextmanager
    def _processing(
        self, messages: Sequence[ReceivedMessage], attributes: Attributes
    ) -> Iterator[Span]:
        topic = messages[0].topic
        contexts = [self._arrived(message) for message in messages]
        # One message continues its trace. A batch has many traces, so it only links to them.
        span = self._tracer.start_span(
            f"process {topic}",
            context=contexts[0] if len(messages) == 1 else None,
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=[] if len(messages) == 1 else self._links_to(contexts),
        )
        with self._trace.use_span(
            span, end_on_exit=True, record_exception=False, set_status_on_exception=False
        ):
            try:
                yield span
            except BaseException as error:
                is_dead = isinstance(error, DeadLetter)
                span.set_attribute("orbitmq.outcome", "dead letter" if is_dead else "retry")
                self.fail(span, error, str(error) or type(error).__name__)
                raise

    def _arrived(self, message: ReceivedMessage) -> Context | None:
        """The way of a message until now as spans; the next span is a child of the last one.

        None for a message without a context.
        """
        context = self._propagator.extract(message.properties)
        if not self._trace.get_current_span(context).get_span_context().is_valid:
            return None
        born, stored = (
            round(message.born_at * _NANOSECONDS),
            round(message.stored_at * _NANOSECONDS),
        )
        # The broker itself stored a retried message again.
        if message.attempt == 1:
            context = self._past("store", message, context, born, stored)
        return self._past("deliver", message, context, stored, self._now())

    def _past(
        self, what: str, message: ReceivedMessage, context: Context, began: int, ended: int
    ) -> Context:
        """A span for the past."""
        span = self._tracer.start_span(
            f"{what} {message.topic}",
            context=context,
            start_time=began,
            attributes={
                "messaging.system": "rocketmq",
                "messaging.operation.name": what,
                "messaging.destination.name": message.topic,
                "messaging.message.id": message.msg_id,
                "orbitmq.broker": message.queue.broker,
            },
        )
        span.end(end_time=max(began, ended))
        return self._trace.set_span_in_context(span, context)

    # ---- both

    def _links(self, properties: Iterator[Mapping[str, str]]) -> list[Link]:
        return self._links_to([self._propagator.extract(each) for each in properties if each])

    def _links_to(self, contexts: Sequence[Context | None]) -> list[Link]:
        spans = [
            self._trace.get_current_span(context).get_span_context()
            for context in contexts
            if context is not None
        ]
        return [self._trace.Link(span) for span in spans if span.is_valid]

    def fail(self, span: Span, error: BaseException, text: str) -> None:
        """Record an error in a span."""
        if span.is_recording():
            span.record_exception(error)
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(self._trace.StatusCode.ERROR, text)


class Sending:
    """A call that sends, from its start to its outcome. A context manager around it."""

    __slots__ = ("_goes_on", "_results", "_span", "_tracing", "messages")

    def __init__(self, tracing: Tracing, span: Span, messages: Sequence[Message]) -> None:
        self._tracing = tracing
        self._span = span
        self._results: Sequence[SendResult] = ()
        self._goes_on = False
        #: The messages to send.
        self.messages = messages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or not self._goes_on:
            self._end(self._results if error is None else error)

    def returned(self, result: object) -> None:
        """The result of the call. With a future, the span ends when the future does."""
        if isinstance(result, concurrent.futures.Future | asyncio.Future):
            self._goes_on = True
            result.add_done_callback(lambda sent: self._end(_outcome(sent)))
        elif isinstance(result, list):
            self._results = result
        elif isinstance(result, SendResult):
            self._results = (result,)
        elif isinstance(result, Sequence):
            # Entries are made when they are looked at: one of many that are alike is enough.
            self._results = result[:2] if getattr(result, "is_ok", False) else result

    def _end(self, outcome: Sequence[SendResult] | BaseException) -> None:
        span = self._span
        if isinstance(outcome, BaseException):
            self._tracing.fail(span, outcome, str(outcome) or type(outcome).__name__)
        elif outcome and span.is_recording():
            result = outcome[0]
            if len(outcome) == 1:
                span.set_attribute("messaging.message.id", result.msg_id)
            queue = result.queue
            span.set_attribute("messaging.destination.partition.id", f"{queue.broker}:{queue.id}")
            worst = next((each.status for each in outcome if not each.is_ok), result.status)
            span.set_attribute("orbitmq.send.status", worst.value)
        span.end()


def _outcome(
    sent: concurrent.futures.Future[SendResult] | asyncio.Future[SendResult],
) -> Sequence[SendResult] | BaseException:
    if sent.cancelled():
        return asyncio.CancelledError()
    error = sent.exception()
    return error if error is not None else (sent.result(),)


def _sent_attributes(messages: Sequence[Message], operation: str) -> Attributes:
    first = messages[0]
    found = _attributes_of_many(first.topic, operation, len(messages))
    if len(messages) > 1:
        return found
    found["messaging.message.body.size"] = len(first.body)
    if first.tags is not None:
        found["messaging.rocketmq.message.tag"] = first.tags
    if first.keys:
        found["messaging.rocketmq.message.keys"] = first.keys
    if first.ordering_key is not None:
        found["messaging.rocketmq.message.group"] = first.ordering_key
    if first.delay_level:
        found["messaging.rocketmq.message.delay_time_level"] = first.delay_level
    if first.deliver_at is not None:
        found["messaging.rocketmq.message.delivery_timestamp"] = milliseconds_up(first.deliver_at)
    return found


def _attributes_of_many(topic: str, operation: str, count: int) -> Attributes:
    found: Attributes = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
    }
    if count > 1:
        found["messaging.batch.message_count"] = count
    return found


def _received_attributes(messages: Sequence[ReceivedMessage], group: str | None) -> Attributes:
    first = messages[0]
    found: Attributes = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": first.topic,
        "messaging.destination.partition.id": f"{first.queue.broker}:{first.queue.id}",
    }
    if group is not None:
        found["messaging.consumer.group.name"] = group
    if len(messages) > 1:
        found["messaging.batch.message_count"] = len(messages)
        return found
    found["messaging.message.id"] = first.msg_id
    found["orbitmq.attempt"] = first.attempt
    if first.tags is not None:
        found["messaging.rocketmq.message.tag"] = first.tags
    if first.keys:
        found["messaging.rocketmq.message.keys"] = first.keys
    return found


# ---- producers

#: The methods of a producer that send, and the operation in the names of their spans.
_SENDS: Final = {
    "send": "send",
    "submit": "send",
    "send_one_way": "send",
    "send_batch": "send",
    "send_half": "send",
    "request": "request",
}
#: Options of these methods that are not fields of a message.
_CALL_OPTIONS: Final = ("queue", "selector", "timeout")


def _traced(tracing: Tracing, producer: Producer | AsyncProducer, name: str) -> Callable[..., Any]:
    """A method of a producer with a span around it."""
    send, operation = getattr(producer, name), _SENDS[name]

    def begin(given: Any, body: Any, options: dict[str, Any]) -> tuple[Sending, Any]:
        if name == "send_batch":
            sending = tracing.sending(*given)
            return sending, sending.messages
        if name == "send_half":
            message = given
        else:
            parsed = SendOptions(**options)  # type: ignore[typeddict-item]
            limit, serializer = producer.settings.timeout, producer.serializer
            message = parse_send_args(given, body, parsed, limit, serializer).message
        sending = tracing.sending(message, operation=operation)
        return sending, sending.messages[0]

    def blocking(given: Any, body: Any = None, **options: Any) -> Any:
        if name == "send_batch" and not (given := tuple(given)):
            return send(given, **options)
        sending, carrying = begin(given, body, options)
        with sending:
            result = send(carrying, **{k: v for k, v in options.items() if k in _CALL_OPTIONS})
            sending.returned(result)
        return result

    async def asynchronous(given: Any, body: Any = None, **options: Any) -> Any:
        if name == "send_batch" and not (given := tuple(given)):
            return await send(given, **options)
        sending, carrying = begin(given, body, options)
        with sending:
            result = await send(
                carrying, **{k: v for k, v in options.items() if k in _CALL_OPTIONS}
            )
            sending.returned(result)
        return result

    return asynchronous if inspect.iscoroutinefunction(send) else blocking


def _traced_columns(tracing: Tracing, send: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`send_arrow` or `send_many` of a producer, by its `send_arrow`, with a span around it."""

    def table(given: Any, options: dict[str, Any]) -> Any:
        if name == "send_arrow":
            return given
        from orbitmq.client.producer.columns import many  # noqa: PLC0415  # an extra

        columns = {each: options.pop(each, None) for each in ("keys", "tag", "properties")}
        return many(given, **columns)

    def blocking(topic: str, given: Any, **options: Any) -> Any:
        sending, carrying = tracing.sending_columns(topic, table(given, options))
        with sending:
            result = send(topic, carrying, **options)
            sending.returned(result)
        return result

    async def asynchronous(topic: str, given: Any, **options: Any) -> Any:
        sending, carrying = tracing.sending_columns(topic, table(given, options))
        with sending:
            result = await send(topic, carrying, **options)
            sending.returned(result)
        return result

    return asynchronous if inspect.iscoroutinefunction(send) else blocking


def __getattr__(name: str) -> object:
    if name not in ("TracedProducer", "TracedAsyncProducer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind: Any = Producer if name == "TracedProducer" else AsyncProducer
    warn_deprecated(name, f"Tracing().trace({kind.__name__}(...))")

    def producer(*args: Any, tracing: Tracing | None = None, **options: Any) -> object:
        traced: object = (tracing or Tracing()).trace(kind(*args, **options))
        return traced

    return producer
