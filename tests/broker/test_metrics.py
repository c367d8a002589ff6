"""What Prometheus is told, read back by a strict parser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from orbitmq.broker.broker import Broker, Parts
from orbitmq.broker.metrics import Exposition, Metrics
from orbitmq.broker.progress import lag_of
from orbitmq.message.ids import decode_offset_id
from orbitmq.testing.cluster import MovableClock
from orbitmq.wire.bodies import TopicConfig
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import ConsumerSendBackRequest
from tests.support.broker import GROUP
from tests.support.delivery import AskedProducer, hand_broker
from tests.support.metrics import has_read, use_in_every_way, wanting
from tests.support.prometheus import ParsedFamily, parse_metrics

#: What a page of Apache's 5.5.0 has; `tests/interop/test_metrics.py` checks it against a broker.
RECORDING = Path(__file__).parents[1] / "data" / "recordings" / "5.5.0-metrics.json"


async def scraped(broker: Broker) -> dict[str, ParsedFamily]:
    return parse_metrics(b"".join(await Metrics(broker.parts).text()))


# The whole.


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
    await client.connection.request(987_654)

    found = await scraped(broker)

    common = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}
    consumption = {"topic": "orders", "consumer_group": GROUP, "is_system": "false"}
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


# Lag.


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


# The format.


@given(st.dictionaries(st.sampled_from("abc"), st.text(), min_size=1), st.integers(0, 2**53))
def test_labels_and_values_come_back_whatever_they_are(labels, value):
    page = Exposition({"node": 'a"\\\n'})
    page.gauge("some_gauge", "Text").add(page.labels(**labels), value)

    found = parse_metrics(b"".join(page.pieces()))

    wanted = {name: text.encode("utf-8", "replace").decode() for name, text in labels.items()}
    assert found["some_gauge"].value(**wanted, node='a"\\\n') == value


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
    """The samples of a broker, as Prometheus reads them, with their labels."""
    async with hand_broker(root) as (hand, client):
        producer = await AskedProducer.join(hand.broker)
        await use_in_every_way(hand, client, producer)
        text = b"".join(await Metrics(hand.broker.parts).text()).decode()
        await producer.close()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.feature("O1")
async def test_every_metric_and_label_of_the_board_is_exposed_by_this_broker_and_by_apaches(
    board, tmp_path
):
    labels = await exposed(tmp_path)
    theirs = json.loads(RECORDING.read_text())
    parts = {f"{name}_{part}": name for name in theirs for part in ("bucket", "count", "sum")}

    asked = list(queries(board))
    assert len(asked) > 40
    for query in asked:
        found = _METRIC.findall(query.expression)
        assert found, query
        for metric, matchers in found:
            assert metric in labels, query
            assert set(_MATCHER.findall(matchers)) <= labels[metric], query
            if metric.startswith("rocketmq_"):
                name = parts.get(metric, metric)
                assert set(_MATCHER.findall(matchers)) <= {*theirs[name]["labels"], "le"}, query
        shared = set.intersection(*(labels[metric] for metric, _ in found))
        grouped = {
            name.strip() for names in _BY.findall(query.expression) for name in names.split(",")
        }
        assert grouped <= shared, query
        # What is summed up by some labels has no others left to be shown.
        assert set(_LEGEND.findall(query.legend)) <= (grouped or shared), query


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
