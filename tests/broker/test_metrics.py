"""What Prometheus is told, read back by a strict parser."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import json
import re
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from orbitmq.broker import metrics
from orbitmq.broker.broker import Broker, Parts
from orbitmq.broker.metrics import Exposition, Metrics, add_timers
from orbitmq.broker.progress import lag_of
from orbitmq.broker.scheduled import TimerCounts
from orbitmq.broker.scheduler import Steps
from orbitmq.broker.settings import AccessSettings, HttpSettings, PullSettings
from orbitmq.broker.timers import Timers
from orbitmq.clock import milliseconds
from orbitmq.message.ids import decode_offset_id
from orbitmq.remoting.settings import ConnectionSettings, ServerSettings
from orbitmq.testing.cluster import MovableClock
from orbitmq.wire.bodies import MessageModel, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode, TransactionState, WireLimits
from orbitmq.wire.headers import ConsumerSendBackRequest
from tests.support.broker import GROUP, until
from tests.support.delivery import AskedProducer, end_header, hand_broker, send_half
from tests.support.metrics import has_read, use_in_every_way, wanting
from tests.support.prometheus import ParsedFamily, parse_metrics
from tests.support.remoting import RawPeer
from tests.support.store import FailingFiles, HandClock

#: What a page of Apache's 5.5.0 has; `tests/interop/test_metrics.py` checks it against a broker.
RECORDING = Path(__file__).parents[1] / "data" / "recordings" / "5.5.0-metrics.json"


async def scraped(broker: Broker) -> dict[str, ParsedFamily]:
    return parse_metrics(b"".join(await Metrics(broker.parts).text()))


# The whole.

#: What boards for RocketMQ 5 look at, and this broker has even when nothing has happened.
ALWAYS = {
    "rocketmq_processor_watermark": "gauge",
    "rocketmq_broker_permission": "gauge",
    "rocketmq_topic_number": "gauge",
    "rocketmq_consumer_group_number": "gauge",
    "rocketmq_storage_size": "gauge",
    "rocketmq_storage_flush_behind_bytes": "gauge",
    "rocketmq_storage_dispatch_behind_bytes": "gauge",
}
#: And these as soon as somebody sends and consumes.
IN_USE = {
    "rocketmq_messages_in_total": "counter",
    "rocketmq_messages_out_total": "counter",
    "rocketmq_throughput_in_total": "counter",
    "rocketmq_throughput_out_total": "counter",
    "rocketmq_send_to_dlq_messages_total": "counter",
    "rocketmq_producer_connections": "gauge",
    "rocketmq_consumer_connections": "gauge",
    "rocketmq_consumer_lag_messages": "gauge",
    "rocketmq_consumer_lag_latency": "gauge",
    "rocketmq_consumer_inflight_messages": "gauge",
    "rocketmq_consumer_queueing_latency": "gauge",
    "rocketmq_consumer_ready_messages": "gauge",
    "rocketmq_storage_message_reserve_time": "gauge",
}


async def test_an_idle_broker_has_metrics_of_itself(broker):
    found = await scraped(broker)

    assert {name: found[name].kind for name in ALWAYS} == ALWAYS
    assert found["rocketmq_broker_permission"].value() == 6
    assert found["rocketmq_topic_number"].value() == len(broker.parts.topics)
    assert (
        found["rocketmq_storage_flush_behind_bytes"].value(
            storage_type="local", storage_medium="disk"
        )
        == 0
    )
    assert found["orbitmq_store_writable"].value() == 1


async def test_a_broker_in_use_has_the_metrics_of_rocketmq_under_its_names_and_labels(
    broker, client
):
    await client.heartbeat("c", wanting("orders"), producers=("makers",))
    stored = await client.stored("orders", b"12345")
    await client.stored("orders", b"12345")
    has_read(broker, "orders", 0)
    await client.pull("orders", max_msg_nums=1)
    back = ConsumerSendBackRequest(
        offset=decode_offset_id(stored.msg_id).offset, group=GROUP, delay_level=-1
    )
    await client.connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, back)

    found = await scraped(broker)

    common = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}
    consumption = {"topic": "orders", "consumer_group": GROUP, "is_system": "false"}
    assert {name: found[name].kind for name in ALWAYS | IN_USE} == ALWAYS | IN_USE
    assert all(common.items() <= labels for family in found.values() for labels in family.samples)
    sent = {"topic": "orders", "message_type": "normal", "is_system": "false"}
    assert found["rocketmq_messages_in_total"].value(**sent) == 2
    assert found["rocketmq_throughput_in_total"].value(**sent) == 10
    got = {**consumption, "is_retry": "false"}
    assert found["rocketmq_messages_out_total"].value(**got) == 1
    assert found["rocketmq_throughput_out_total"].value(**got) > 5
    assert found["rocketmq_send_to_dlq_messages_total"].value(**consumption) == 1
    assert found["rocketmq_consumer_lag_messages"].value(**got) == 2
    assert found["rocketmq_consumer_inflight_messages"].value(**got) == 1
    assert found["rocketmq_consumer_ready_messages"].value(**got) == 1
    speaks = {"language": "python", "protocol_type": "remoting"}
    assert found["rocketmq_producer_connections"].value(**speaks) == 1
    assert (
        found["rocketmq_consumer_connections"].value(
            **speaks, consumer_group=GROUP, consume_mode="push", is_system="false"
        )
        == 1
    )
    assert all(
        any(name == "version" and value.startswith("v") for name, value in labels)
        for labels in found["rocketmq_consumer_connections"].samples
    )


#: What Apache's broker has and this one has not, and why.
NOT_HERE = {
    "target_info": "of OpenTelemetry's exporter",
    "rocketmq_pop_buffer_scan_time_consume_milliseconds": "POP is not offered",
    "rocketmq_pop_checkpoint_buffer_size": "POP is not offered",
    "rocketmq_pop_offset_buffer_size": "POP is not offered",
    "rocketmq_pop_revive_lag_milliseconds": "POP is not offered",
    "rocketmq_pop_revive_latency_milliseconds": "POP is not offered",
}
#: As boards for older releases have it, without the units that are appended now.
OLDER_NAMES = {
    "rocketmq_consumer_lag_latency",
    "rocketmq_consumer_queueing_latency",
    "rocketmq_storage_size",
    "rocketmq_storage_message_reserve_time",
}
#: The label of OpenTelemetry's exporter.
SCOPE = "otel_scope_name"


@pytest.mark.feature("O1")
async def test_every_metric_of_apaches_broker_is_here_with_its_labels_and_buckets(tmp_path):
    theirs = json.loads(RECORDING.read_text())
    async with hand_broker(tmp_path) as (hand, client):
        broker = hand.broker
        producer = await AskedProducer.join(broker)
        await use_in_every_way(hand, client, producer)

        mine = parse_metrics(b"".join(await Metrics(broker.parts).text()))
        await producer.close()

    assert theirs.keys() - mine.keys() == NOT_HERE.keys()
    for name in theirs.keys() & mine.keys():
        wanted, family = theirs[name], mine[name]
        assert family.kind == wanted["kind"], name
        labels = {label for sample in family.samples for label, _ in sample}
        assert set(wanted["labels"]) - {SCOPE} <= labels, name
        if family.kind == "histogram":
            bounds = {
                value for sample in family.samples for label, value in sample if label == "le"
            }
            assert set(map(float, bounds)) == set(map(float, wanted["buckets"])), name
    assert mine.keys() >= OLDER_NAMES


async def test_every_metric_is_on_the_page_for_operators_and_nothing_else(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    told = set(re.findall(r"\b(?:rocketmq|orbitmq)_\w+", page))
    async with hand_broker(tmp_path) as (hand, client):
        producer = await AskedProducer.join(hand.broker)
        await use_in_every_way(hand, client, producer)
        found = (await scraped(hand.broker)).keys()
        await producer.close()

    # "Also with its unit", says the page of these.
    with_units = {name + unit for name in OLDER_NAMES for unit in ("_bytes", "_milliseconds")}
    assert found - with_units <= told
    # What is wrong in groups is shown when something is; and here nobody asks for a new group.
    assert told - found == {
        "orbitmq_group_findings",
        "rocketmq_consumer_group_create_execution_time_milliseconds",
    }


async def test_half_messages_and_timer_messages_are_counted_by_topic(tmp_path):
    async with hand_broker(tmp_path) as (hand, client):
        producer = await AskedProducer.join(hand.broker)
        await use_in_every_way(hand, client, producer)
        first = await scraped(hand.broker)
        await hand.restart()
        hand.step()
        second = await scraped(hand.broker)
        hand.advance(1000)
        third = await scraped(hand.broker)
        await producer.close()

    assert first["rocketmq_commit_messages_total"].value(topic="sagas") == 1
    assert first["rocketmq_rollback_messages_total"].value(topic="sagas") == 1
    (finished,) = first["rocketmq_finish_message_latency_milliseconds"].counts.values()
    assert finished == 2
    assert first["rocketmq_half_messages"].value(topic="sagas") == 1
    assert first["rocketmq_timer_enqueue_total"].value(topic="orders") == 2
    assert first["rocketmq_timer_dequeue_total"].value(topic="orders") == 1
    assert first["rocketmq_timing_messages"].value(topic="orders") == 1
    assert first["rocketmq_timer_message_snapshot"].value(timer_bound_s="3600") == 1
    assert first["rocketmq_timer_message_snapshot"].value(timer_bound_s="900") == 0
    # What waits is learnt from the queues, so a restart does not forget it.
    assert second["rocketmq_half_messages"].value(topic="sagas") == 1
    assert second["rocketmq_timing_messages"].value(topic="orders") == 1
    assert third["rocketmq_timing_messages"].value(topic="orders") == 0
    assert third["rocketmq_timer_dequeue_lag"].value() == 0


async def test_a_send_whose_turn_the_disk_refuses_counts_as_failed_and_not_as_stored(tmp_path):
    files = FailingFiles()
    async with hand_broker(tmp_path, files=files) as (hand, client):
        producer = await AskedProducer.join(hand.broker)
        half = await send_half(producer, "orders", b"y" * 5000, hand)
        before = await scraped(hand.broker)
        files.fail("pwrite", errno.ENOSPC)
        answers = [await client.send("orders", b"x" * 3000) for _ in range(3)]
        await producer.end(end_header(half, TransactionState.COMMIT))
        files.heal()
        refused = await scraped(hand.broker)
        await client.stored("orders", b"x" * 3000)
        await producer.end(end_header(half, TransactionState.COMMIT))
        after = await scraped(hand.broker)
        await producer.close()

    assert {answer.code for answer in answers} == {ResponseCode.SERVICE_NOT_AVAILABLE}
    into = "rocketmq_messages_in_total"
    taken = [page[into].value(topic="orders") for page in (before, refused, after)]
    assert taken == [1, 1, 3]
    assert refused["orbitmq_sends_failed_total"].value() == 3
    times = refused["rocketmq_rpc_latency_milliseconds"].counts
    calls = [
        count
        for labels, count in times.items()
        if dict(labels)["response_code"] == "service_not_available"
    ]
    assert calls == [3]


class NotedSteps(Steps):
    """Steps that remember how much was done in each."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []

    async def did(self, entries: int) -> None:
        self.done.append(entries)
        await super().did(entries)


async def test_many_overdue_timer_messages_are_counted_in_bounded_steps():
    clock = HandClock()
    now_ms = milliseconds(clock.now())
    timers = Timers.__new__(Timers)
    timers._store = cast(Any, SimpleNamespace(max_offset=lambda *_: 0))
    timers._scanned = 0
    timers.counts = TimerCounts()
    overdue = [now_ms - 1 - number % 1000 << 40 | number for number in range(120_000)]
    timers._heap = [*overdue, now_ms << 40, now_ms + 6000 << 40]
    heapq.heapify(timers._heap)
    parts: Any = SimpleNamespace(timers=timers, clock=clock)
    page, steps = Exposition({"cluster": "c"}), NotedSteps()

    await add_timers(page, parts, steps)
    found = parse_metrics(b"".join(page.pieces()))

    assert found["rocketmq_timer_dequeue_lag"].value() == 120_000
    assert found["rocketmq_timer_message_snapshot"].value(timer_bound_s="5") == 120_001
    assert found["rocketmq_timer_message_snapshot"].value(timer_bound_s="60") == 1
    assert sum(steps.done) >= 120_002
    assert max(steps.done) <= 10_000


async def test_sizes_of_messages_fall_into_apaches_buckets(broker, client):
    for size in (1, 1024, 1025, 4096, 5000, 600_000):
        await client.stored("orders", b"x" * size)

    family = (await scraped(broker))["rocketmq_message_size"]

    counts = {
        bound: family.value(topic="orders", le=bound)
        for bound in ("1024.0", "4096.0", "524288.0", "1048576.0", "+Inf")
    }
    assert counts == {"1024.0": 2, "4096.0": 4, "524288.0": 5, "1048576.0": 6, "+Inf": 6}
    assert list(family.sums.values()) == [1 + 1024 + 1025 + 4096 + 5000 + 600_000]


async def test_counters_of_a_broker_only_grow(broker, client):
    before: dict[str, ParsedFamily] = {}
    for _ in range(3):
        await client.stored("orders")
        await client.pull("orders")
        after = await scraped(broker)
        for name, family in before.items():
            if family.kind == "counter":
                assert all(after[name].samples[key] >= was for key, was in family.samples.items())
        before = after

    assert before["rocketmq_messages_in_total"].value(topic="orders") == 3


async def test_types_of_messages_are_those_that_topics_declare(broker, client):
    parts = broker.parts
    parts.topics.update(
        TopicConfig(topic_name="steps", attributes={"+message.type": "FIFO"}), now=0.0
    )
    await client.stored("steps")

    found = await scraped(broker)

    assert found["rocketmq_messages_in_total"].value(topic="steps", message_type="fifo") == 1


async def test_giving_up_in_order_counts_as_a_dead_letter_too(broker, client):
    broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    await client.send(
        f"%RETRY%{GROUP}",
        properties={"RETRY_TOPIC": "orders"},
        reconsume_times=17,
        max_reconsume_times=16,
    )

    found = await scraped(broker)

    dead = found["rocketmq_send_to_dlq_messages_total"]
    assert dead.value(topic="orders", consumer_group=GROUP) == 1


# Lag.

LAGS = [name for name in IN_USE if name.startswith("rocketmq_consumer_") and "conn" not in name]


async def test_lag_has_the_age_of_the_oldest_message_that_waits(start_broker, open_client):
    clock = MovableClock()
    broker = await start_broker(parts={"clock": clock})
    client = await open_client(broker)
    has_read(broker, "orders", 0)
    await client.stored("orders")
    clock.advance(100)
    await client.stored("orders")
    await client.pull("orders", max_msg_nums=1)
    clock.advance(50)

    found = await scraped(broker)

    assert 150_000 <= found["rocketmq_consumer_lag_latency"].value(topic="orders") < 160_000
    assert 50_000 <= found["rocketmq_consumer_queueing_latency"].value(topic="orders") < 60_000


async def test_a_group_without_lag_has_no_latency(broker, client):
    await client.stored("orders")
    has_read(broker, "orders", 1)

    found = await scraped(broker)

    values = [found[name].value(topic="orders") for name in LAGS]
    assert values == [0] * 5


async def test_a_group_that_is_gone_still_has_lag(broker, client, open_client):
    consumer = await open_client(broker)
    await consumer.heartbeat("c", wanting("orders"))
    has_read(broker, "orders", 0)
    await client.stored("orders")
    await consumer.close()

    found = await scraped(broker)

    assert found["rocketmq_consumer_lag_messages"].value(consumer_group=GROUP) == 1


async def test_a_group_that_is_there_has_lag_in_what_it_subscribes_to(broker, client):
    for topic in ("orders", "given-up"):
        await client.stored(topic)
        has_read(broker, topic, 0)
    await client.heartbeat("c", wanting("orders"))

    found = await scraped(broker)

    lags = found["rocketmq_consumer_lag_messages"]
    assert lags.value(consumer_group=GROUP, topic="orders") == 1
    assert lags.find(topic="given-up") == {}


async def test_groups_that_broadcast_have_no_lag_here(broker, client):
    await client.stored("orders")
    has_read(broker, "orders", 0)
    await client.heartbeat("c", wanting("orders"), message_model=MessageModel.BROADCASTING)

    found = await scraped(broker)

    assert "rocketmq_consumer_lag_messages" not in found


async def test_the_lag_of_retries_is_marked(broker, client):
    await client.stored(f"%RETRY%{GROUP}")
    has_read(broker, f"%RETRY%{GROUP}", 0)

    found = await scraped(broker)

    lag = found["rocketmq_consumer_lag_messages"]
    assert lag.value(consumer_group=GROUP, topic=f"%RETRY%{GROUP}", is_retry="true") == 1


async def test_retries_that_a_group_never_began_with_are_lag(broker, client):
    broker.parts.groups.find(GROUP, now=0)
    await client.stored(f"%RETRY%{GROUP}")

    found = await scraped(broker)

    lag = found["rocketmq_consumer_lag_messages"]
    assert lag.value(consumer_group=GROUP, topic=f"%RETRY%{GROUP}", is_retry="true") == 1


offsets = st.integers(0, 20)


@given(
    st.lists(
        st.tuples(offsets, offsets, st.none() | offsets, st.none() | offsets),
        min_size=1,
        max_size=4,
    )
)
def test_what_waits_is_either_in_flight_or_ready_whatever_the_offsets(queues):
    bounds = [(min(first, end), max(first, end)) for first, end, _, _ in queues]

    def known(place):
        return lambda _topic, _group, queue_id: queues[queue_id][place]

    parts = SimpleNamespace(
        store=SimpleNamespace(
            min_offset=lambda _, queue_id: bounds[queue_id][0],
            max_offset=lambda _, queue_id: bounds[queue_id][1],
            store_time=lambda _topic, _queue, offset: 1000 + offset,
        ),
        progress=SimpleNamespace(query=known(2), pulled=known(3)),
    )
    topic = TopicConfig(topic_name="t", read_queue_nums=len(queues), write_queue_nums=len(queues))

    lag = lag_of(cast(Parts, parts), "g", topic, 5000)

    waiting = [
        (max(consumed, first), end)
        for (first, end), (_, _, consumed, _) in zip(bounds, queues, strict=True)
        if consumed is not None and consumed < end
    ]
    assert lag.messages == sum(end - begin for begin, end in waiting)
    assert lag.messages == lag.in_flight + lag.ready
    assert min(lag) >= 0
    assert lag.latency_ms == max((5000 - 1000 - begin for begin, _ in waiting), default=0)
    assert lag.queueing_ms <= lag.latency_ms


# Our own.


async def test_refused_requests_are_counted_by_reason(start_broker, open_client, tmp_path):
    accounts = tmp_path / "accounts.toml"
    accounts.touch()
    broker = await start_broker(access=AccessSettings(accounts=accounts))
    stranger = await open_client(broker)
    for _ in range(3):
        await stranger.send("orders")

    found = await scraped(broker)

    refused = found["orbitmq_access_refused_total"]
    assert refused.value(reason="no_credentials") == 3
    assert refused.value(reason="wrong_signature") == 0


async def test_pulls_without_room_to_wait_are_counted(start_broker, open_client):
    crowded = PullSettings(held_requests=4, held_per_connection=4, short_hold=100.0)
    broker = await start_broker(pull=crowded)
    broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    greedy, modest = await open_client(broker), await open_client(broker)
    held = broker.parts.held
    begun = [asyncio.ensure_future(greedy.pull("orders", hold=100.0)) for _ in range(7)]
    await until(lambda: held.deferred == 3)
    begun += [asyncio.ensure_future(modest.pull("orders", hold=100.0)) for _ in range(2)]
    await until(lambda: held.deferred == 5)

    found = await scraped(broker)

    assert found["orbitmq_held_pulls"].value() == 4
    assert found["orbitmq_put_off_pulls"].value() == 5
    assert found["orbitmq_pulls_crowded_out_total"].value() == 3
    assert found["orbitmq_pulls_displaced_total"].value() == 2
    assert found["orbitmq_pulls_refused_total"].value() == 0
    for pull in begun:
        pull.cancel()


async def test_connections_that_were_refused_and_frames_that_wait_are_counted(start_broker):
    limits = WireLimits(frame=1 << 20)
    broker = await start_broker(
        server=ServerSettings(
            host_connections=3,
            unfinished_bytes=(1 << 20) + 4,
            connection=ConnectionSettings(limits=limits),
        )
    )
    begun = struct.pack(">iI", 1 << 20, 100) + bytes(256 * 1024)
    async with contextlib.AsyncExitStack() as peers:
        for _ in range(3):
            peer = await peers.enter_async_context(RawPeer.connected(broker.address))
            peer.writer.write(begun)
        await until(lambda: broker.parts.listeners.capacity.frames.waiting == 2)
        refused = await peers.enter_async_context(RawPeer.connected(broker.address))
        assert await refused.is_closed_by_the_other_side()

        found = await scraped(broker)

    assert found["orbitmq_connections"].value() == 3
    assert found["orbitmq_connections_refused_total"].value() == 1
    assert found["orbitmq_frames_waiting"].value() == 2
    assert found["orbitmq_frames_waited_total"].value() == 2
    assert found["orbitmq_frames_bytes"].value() == (1 << 20) + 4
    assert found["orbitmq_frames_evicted_total"].value() == 0
    assert found["orbitmq_frames_too_slow_total"].value() == 0


async def test_groups_that_disagree_are_shown(broker, open_client):
    for number, tag in enumerate(("A", "B")):
        client = await open_client(broker)
        await client.heartbeat(f"c{number}", wanting("orders", tag))
    broker.parts.disagreements.check(broker.parts.clock.monotonic())

    found = await scraped(broker)

    assert found["orbitmq_group_findings_number"].value() == 1
    assert (
        found["orbitmq_group_findings"].value(
            consumer_group=GROUP, topic="orders", kind="different_subscriptions"
        )
        == 1
    )


# Much.


async def test_more_groups_than_are_shown_are_counted(broker, client, monkeypatch):
    monkeypatch.setattr(metrics, "MOST_PAIRS", 3)
    await client.stored("orders")
    for number in range(5):
        has_read(broker, "orders", 0, f"g{number}")

    found = await scraped(broker)

    assert len(found["rocketmq_consumer_lag_messages"].samples) == 3
    assert found["orbitmq_metrics_left_out"].value(what="lags") == 2
    assert found["orbitmq_metrics_left_out"].value(what="groups") == 0


async def test_others_are_served_while_many_groups_are_looked_at(broker, client):
    await client.stored("orders")
    parts = broker.parts
    for number in range(2000):
        has_read(broker, "orders", 0, f"g{number}")
    scrape = asyncio.create_task(Metrics(parts).text())
    sends = 0
    while not scrape.done():
        await client.stored("orders")
        sends += 1

    found = parse_metrics(b"".join(scrape.result()))

    assert len(found["rocketmq_consumer_lag_messages"].samples) == 2000
    assert sends >= 5


async def test_who_asks_while_it_is_being_made_shares_the_next_one(broker, monkeypatch):
    page = Metrics(broker.parts)
    made = 0
    make = page._make

    async def counting():
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return await make()

    monkeypatch.setattr(page, "_make", counting)

    texts = await asyncio.gather(*(page.text() for _ in range(10)))
    again = await page.text()

    assert made == 3
    assert all(parse_metrics(b"".join(text)) for text in (*texts, again))


async def test_a_scrape_over_http_is_the_same(start_broker, open_client):
    broker = await start_broker(http=HttpSettings(port=0))
    client = await open_client(broker)
    await client.stored("orders")
    assert broker.http_address is not None

    reader, writer = await asyncio.open_connection(*broker.http_address)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()

    found = parse_metrics(answer.partition(b"\r\n\r\n")[2])
    assert found["rocketmq_messages_in_total"].value(topic="orders") == 1


# The format.


@given(st.dictionaries(st.sampled_from("abc"), st.text(), min_size=1), st.integers(0, 2**53))
def test_labels_and_values_come_back_whatever_they_are(labels, value):
    page = Exposition({"node": 'a"\\\n'})
    page.gauge("some_gauge", "Text").add(page.labels(**labels), value)

    found = parse_metrics(b"".join(page.pieces()))

    wanted = {name: text.encode("utf-8", "replace").decode() for name, text in labels.items()}
    assert found["some_gauge"].value(**wanted, node='a"\\\n') == value


def test_a_metric_without_samples_is_left_out():
    page = Exposition({"node": "a"})
    page.gauge("some_gauge", "Text")

    assert page.pieces() == ()


@pytest.mark.parametrize(
    "wrong",
    [
        b'some_gauge{a="b"} 1\n',
        b'# HELP x T\n# TYPE x gauge\nx{a="b"} 1',
        b'# HELP x T\n# TYPE x gauge\nx{a="b"} one\n',
        b'# HELP x T\n# TYPE x gauge\nx{a="b",a="c"} 1\n',
        b'# HELP x T\n# TYPE x gauge\nx{a="b"c"} 1\n',
        b'# HELP x T\n# TYPE x gauge\nx{a="b"} 1\nx{a="b"} 2\n',
        b'# HELP x T\n# TYPE x counter\nx{a="b"} 1\n',
        b"# HELP x T\n# TYPE x gauge\n",
        b'# TYPE x gauge\nx{a="b"} 1\n',
    ],
)
def test_the_parser_of_these_tests_is_strict(wrong):
    with pytest.raises(ValueError, match=r"."):
        parse_metrics(wrong)


BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "orbitmq.json"

_METRIC = re.compile(r"\b((?:rocketmq|orbitmq)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)(?:=~|=|!=|!~)\"")
_BY = re.compile(r"\bby \(([^)]*)\)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")
_VARIABLE = re.compile(r"\$\{?(\w+)")
#: Variables that Grafana has by itself.
_BUILT_IN = {"__rate_interval", "__range"}


class Query(NamedTuple):
    """What one line of a panel, or a variable, asks for."""

    where: str
    expression: str
    legend: str


@pytest.fixture(scope="module")
def board():
    loaded: dict[str, Any] = json.loads(BOARD.read_text())
    return loaded


def queries(board: dict[str, Any]) -> Iterator[Query]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"], target["legendFormat"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield Query(f"${variable['name']}", variable["query"]["query"], "")


async def exposed(root: Path) -> dict[str, set[str]]:
    """The samples of a live broker, as Prometheus reads them over HTTP, with their labels."""
    async with hand_broker(root, http=HttpSettings(port=0)) as (hand, client):
        producer = await AskedProducer.join(hand.broker)
        await use_in_every_way(hand, client, producer)
        page = f"http://{hand.broker.http_address}/metrics"
        text = await asyncio.to_thread(_get, page)
        await producer.close()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def _get(page: str) -> str:
    with urllib.request.urlopen(page, timeout=20) as answer:  # noqa: S310  # the broker's own
        text: str = answer.read().decode()
        return text


@pytest.mark.feature("O1")
async def test_every_metric_and_label_of_the_board_is_exposed_by_a_broker(board, tmp_path):
    labels = await exposed(tmp_path)

    asked = list(queries(board))
    assert len(asked) > 40
    for query in asked:
        found = _METRIC.findall(query.expression)
        assert found, query
        for metric, matchers in found:
            assert metric in labels, query
            assert set(_MATCHER.findall(matchers)) <= labels[metric], query
        shared = set.intersection(*(labels[metric] for metric, _ in found))
        grouped = {
            name.strip() for names in _BY.findall(query.expression) for name in names.split(",")
        }
        assert grouped <= shared, query
        # What is summed up by some labels has no others left to be shown.
        assert set(_LEGEND.findall(query.legend)) <= (grouped or shared), query


def test_what_the_board_takes_for_rocketmqs_is_there_in_apaches_broker(board):
    theirs = json.loads(RECORDING.read_text())
    parts = {f"{name}_{part}": name for name in theirs for part in ("bucket", "count", "sum")}

    for query in queries(board):
        for metric, matchers in _METRIC.findall(query.expression):
            if metric.startswith("rocketmq_"):
                name = parts.get(metric, metric)
                assert name in theirs, query
                assert set(_MATCHER.findall(matchers)) <= {*theirs[name]["labels"], "le"}, query


def test_the_board_is_one_that_grafana_can_import(board):
    panels = board["panels"]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = {name for query in queries(board) for name in _VARIABLE.findall(query.expression)}
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert (board["uid"], board["title"]) == ("orbitmq", "OrbitMQ")
    assert used - _BUILT_IN <= variables
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len(set(cells)) == len(cells), "panels lie on one another"
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert panel["description"], panel["title"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references), panel["title"]
