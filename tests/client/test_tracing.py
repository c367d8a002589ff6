"""A trace follows a message from the send to the handler, with OpenTelemetry's own SDK."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from orbitmq import (
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    DeadLetter,
    Message,
    Producer,
    PullConsumer,
    ReceivedMessage,
)
from orbitmq.errors import MessageRefused
from orbitmq.testing import EmbeddedCluster

trace = pytest.importorskip("opentelemetry.trace", reason="needs OpenTelemetry's API")
pytest.importorskip("opentelemetry.sdk.trace", reason="needs OpenTelemetry's SDK")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

from orbitmq.client import tracing as tracing_module  # noqa: E402
from orbitmq.client.tracing import Tracing  # noqa: E402

PATIENCE = 20.0
_MAPS = pa.map_(pa.string(), pa.string())


class Recorder:
    """A provider of the test's own, and the spans that came of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(self.provider)
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def recorder():
    made = Recorder()
    yield made
    made.provider.shutdown()


@pytest.fixture
def cluster(orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)
    return orbit_cluster


def shop(cluster: EmbeddedCluster, tracing: Tracing) -> Producer:
    return tracing.trace(Producer("shop", name_server=cluster.name_server))


def billing(cluster: EmbeddedCluster, recorder: Recorder) -> Consumer:
    return Consumer(
        "billing",
        name_server=cluster.name_server,
        consume_from="first",
        middleware=[recorder.tracing],
    )


def polled(cluster: EmbeddedCluster, count: int) -> list[ReceivedMessage]:
    """So many messages, by a program that polls."""
    messages: list[ReceivedMessage] = []
    with PullConsumer("reports", name_server=cluster.name_server, consume_from="first") as consumer:
        consumer.subscribe("orders")

        def are_there() -> bool:
            messages.extend(consumer.poll(timeout=0.2))
            return len(messages) == count

        until(are_there, f"{count} messages")
    return messages


def until(condition: Callable[[], object], what: str) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise TimeoutError(f"{what} did not happen within {PATIENCE} s")


def chain(spans: list[ReadableSpan], last: ReadableSpan) -> list[str]:
    """Names from the root of a trace to a span of it."""
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    names = [last.name]
    while last.parent is not None:
        last = by_id[last.parent.span_id]
        names.append(last.name)
    return names[::-1]


@pytest.mark.feature("O2")
def test_one_trace_goes_from_the_send_over_store_and_delivery_into_the_handler(recorder, cluster):
    consumer = billing(cluster, recorder)
    seen: list[ReceivedMessage] = []

    @consumer.on("orders")
    def bill(message: ReceivedMessage) -> None:
        with recorder.tracer.start_as_current_span("charge the card"):
            seen.append(message)

    with (
        shop(cluster, recorder.tracing) as producer,
        recorder.tracer.start_as_current_span("POST /orders"),
    ):
        sent = producer.send("orders", b"one", tags="paid", keys=["order-1"])
    with consumer:
        until(lambda: recorder.named("process orders"), "the span of the handler")

    spans = recorder.spans
    (inner,) = recorder.named("charge the card")
    assert chain(spans, inner) == [
        "POST /orders",
        "send orders",
        "store orders",
        "deliver orders",
        "process orders",
        "charge the card",
    ]
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 1
    (send,), (store,) = recorder.named("send orders"), recorder.named("store orders")
    (deliver,), (process,) = recorder.named("deliver orders"), recorder.named("process orders")
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    (message,) = seen
    assert store.start_time == round(message.born_at * 1e9)
    assert store.end_time == deliver.start_time == round(message.stored_at * 1e9)
    assert deliver.end_time is not None
    assert process.start_time is not None
    assert deliver.end_time <= process.start_time
    assert send.context is not None
    assert message.get("traceparent") == (
        f"00-{send.context.trace_id:032x}-{send.context.span_id:016x}"
        f"-{send.context.trace_flags:02x}"
    )
    assert dict(send.attributes or {}) == {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.body.size": 3,
        "messaging.rocketmq.message.tag": "paid",
        "messaging.rocketmq.message.keys": ("order-1",),
        "messaging.message.id": sent.msg_id,
        "messaging.destination.partition.id": "broker-a:0",
        "orbitmq.send.status": "ok",
    }
    about = dict(process.attributes or {})
    assert about["messaging.consumer.group.name"] == "billing"
    assert about["messaging.message.id"] == sent.msg_id
    assert process.status.status_code is StatusCode.UNSET


def test_a_retry_continues_the_same_trace_and_says_what_went_wrong(recorder, cluster):
    consumer = billing(cluster, recorder)

    @consumer.on("orders")
    def bill(message: ReceivedMessage) -> None:
        if message.attempt == 1:
            raise ValueError("the bank does not answer")
        raise DeadLetter("no such account")

    with shop(cluster, recorder.tracing) as producer:
        producer.send("orders", b"one")

    def second_is_there():
        cluster.advance(10)
        return len(recorder.named("process orders")) == 2

    with consumer:
        until(lambda: recorder.named("process orders"), "the first attempt")
        until(second_is_there, "the second attempt")

    first, second = recorder.named("process orders")
    assert first.status.status_code is second.status.status_code is StatusCode.ERROR
    assert first.status.description == "the bank does not answer"
    assert [event.name for event in first.events] == ["exception"]
    assert (first.attributes or {})["orbitmq.outcome"] == "retry"
    assert (second.attributes or {})["orbitmq.outcome"] == "dead letter"
    assert (second.attributes or {})["orbitmq.attempt"] == 2
    assert chain(recorder.spans, second) == ["send orders", "deliver orders", "process orders"]


async def test_many_async_handlers_at_a_time_keep_to_their_own_traces(recorder, orbit_cluster):
    orbit_cluster.create_topic("orders", queues=4)
    together = asyncio.Barrier(10)
    traces: dict[str, int] = {}
    consumer = AsyncConsumer(
        "billing",
        name_server=orbit_cluster.name_server,
        consume_from="first",
        middleware=[recorder.tracing],
    )

    @consumer.on("orders")
    async def bill(message: ReceivedMessage) -> None:
        await asyncio.wait_for(together.wait(), PATIENCE)
        with recorder.tracer.start_as_current_span("inner") as span:
            traces[message.msg_id] = span.get_span_context().trace_id

    producer = recorder.tracing.trace(AsyncProducer("shop", name_server=orbit_cluster.name_server))
    async with producer:
        futures = [await producer.submit("orders", f"{number}") for number in range(10)]
        await asyncio.wait_for(asyncio.gather(*futures), PATIENCE)
    async with consumer:
        await asyncio.to_thread(
            until, lambda: len(recorder.named("process orders")) == 10, "ten spans"
        )

    for name in ("send orders", "process orders"):
        spans = recorder.named(name)
        found = {span.attributes["messaging.message.id"]: span.context.trace_id for span in spans}
        assert found == traces
    assert len(set(traces.values())) == 10


def test_a_batch_is_one_span_that_points_at_the_sends_of_its_messages(recorder, cluster):
    with shop(cluster, recorder.tracing) as producer:
        producer.send_batch([Message("orders", b"1"), Message("orders", b"2")])
        producer.send("orders", b"3")
        producer.send_one_way("orders", b"4")

    messages = polled(cluster, 4)
    with recorder.tracing.processing(*messages):
        pass

    batch, single, one_way = recorder.named("send orders")
    assert (batch.attributes or {})["messaging.batch.message_count"] == 2
    assert "messaging.message.id" not in (one_way.attributes or {})
    (process,) = recorder.named("process orders")
    contexts = [span.context for span in (batch, batch, single, one_way)]
    assert [link.context.trace_id for link in process.links] == [
        context.trace_id for context in contexts if context is not None
    ]
    assert process.parent is None


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_call_that_sends_columns_is_one_span(recorder, cluster, is_async):
    other = f"00-{7:032x}-{8:016x}-01"
    maps = [[("country", "DE")], None, [("traceparent", other), ("x", "1")], []]
    table = pa.table({"body": list("abcd"), "properties": pa.array(maps, _MAPS)}).slice(1)

    def blocking() -> None:
        with shop(cluster, recorder.tracing) as producer:
            producer.send_many("orders", [b"1", b"2"], keys=["k1", "k2"], queue=None)
            producer.send_arrow("orders", table, ordering_key=1)
            with pytest.raises(MessageRefused):
                producer.send_many("orders", [b"1", b""])

    if is_async:
        made = recorder.tracing.trace(AsyncProducer("shop", name_server=cluster.name_server))
        async with made as producer:
            await producer.send_many("orders", [b"1", b"2"], keys=["k1", "k2"], queue=None)
            await producer.send_arrow("orders", table, ordering_key=1)
            with pytest.raises(MessageRefused):
                await producer.send_many("orders", [b"1", b""])
    else:
        await asyncio.to_thread(blocking)

    many, columns, failed = recorder.named("send orders")
    counts = [(span.attributes or {})["messaging.batch.message_count"] for span in recorder.spans]
    assert counts == [2, 3, 2]
    assert failed.status.status_code is StatusCode.ERROR
    assert (many.attributes or {})["orbitmq.send.status"] == "ok"
    assert "messaging.message.id" not in (many.attributes or {})
    assert [link.context.span_id for link in columns.links] == [8]
    found = [message.properties for message in cluster.messages("orders")]
    ids = [each["traceparent"].split("-")[2] for each in found]
    mine, theirs = (f"{span.context.span_id:016x}" for span in (many, columns))
    assert ids == [mine, mine, theirs, f"{8:016x}", theirs]
    assert [each.get("x") for each in found] == [None, None, None, "1", None]
    assert [each.get("KEYS") for each in found] == ["k1", "k2", None, None, None]


def test_a_send_that_fails_ends_its_span_with_the_error(recorder, cluster):
    with shop(cluster, recorder.tracing) as producer:
        with pytest.raises(MessageRefused):
            producer.send("orders", b"x" * (5 << 20))
        with pytest.raises(MessageRefused):
            producer.submit("orders", b"x" * (5 << 20))

    for span in recorder.named("send orders"):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "MessageRefused"
    assert len(recorder.spans) == 2


def test_without_an_sdk_nothing_is_added_to_a_message(cluster):

    with shop(cluster, Tracing(trace.NoOpTracerProvider())) as producer:
        producer.send("orders", b"one")

    (message,) = cluster.messages("orders")
    assert "traceparent" not in message.properties


def test_a_former_name_still_makes_a_traced_producer(recorder, cluster):
    with pytest.warns(DeprecationWarning, match="trace"):
        make: Any = tracing_module.TracedProducer

    with make("shop", name_server=cluster.name_server, tracing=recorder.tracing) as producer:
        producer.send("orders", b"one")

    assert len(recorder.named("send orders")) == 1


@pytest.mark.feature("O2")
def test_who_does_not_ask_for_tracing_never_loads_it():
    program = """
import sys
from orbitmq import AsyncConsumer, AsyncProducer, Consumer, Producer, PullConsumer
Producer("shop", name_server="127.0.0.1:1")
Consumer("billing", name_server="127.0.0.1:1").on("orders")(print)
print([name for name in sys.modules if "opentelemetry" in name or "tracing" in name])
sys.modules["opentelemetry"] = None
from orbitmq.client.tracing import Tracing
from orbitmq.errors import MissingExtra
try:
    Tracing()
except MissingExtra as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    loaded, refused = ran.stdout.splitlines()
    assert loaded == "[]"
    assert re.search(r"pip install '.*\[otel\]'", refused)


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_what_a_handler_publishes_continues_the_trace_of_its_message(recorder, cluster, is_async):
    cluster.create_topic("invoices", queues=1)
    consumer = billing(cluster, recorder)

    def bill(order: dict[str, int]) -> object:
        return {"total": order["cents"]}

    async def bill_async(order: dict[str, int]) -> object:
        return bill(order)

    consumer.on("orders", publish="invoices")(bill_async if is_async else bill)
    with shop(cluster, recorder.tracing) as producer:
        producer.send("orders", {"cents": 100})
    with consumer:
        until(lambda: recorder.named("process orders"), "the span of the handler")

    (sent,) = recorder.named("send invoices")
    assert chain(recorder.spans, sent)[-2:] == ["process orders", "send invoices"]
    (invoice,) = cluster.messages("invoices")
    context = sent.context
    assert f"{context.trace_id:032x}-{context.span_id:016x}" in invoice.get_property("traceparent")
