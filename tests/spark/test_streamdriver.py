"""What a stream decides on the driver, without Spark: starts, ends, losses, commits."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orbitmq import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.ranges.cluster import CommitResult, QueueResults
from orbitmq.client.routes import Queue
from orbitmq.errors import NoRoute, OrbitError
from orbitmq.spark.options import (
    CheckpointOfOtherTopics,
    DataLost,
    Json,
    Mark,
    OptionRefused,
    SourceError,
    from_json,
    marks_in,
    stream_options,
    to_json,
)
from orbitmq.spark.stream import BoundsSettings, StreamDriver
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import (
    fill,
    forget_old,
    make_topic,
    members,
    numbered,
    stop_broker,
    with_small_files,
)
from tests.support.rebalancing import slipping_in
from tests.support.remoting import ManualClock

#: Asks brokers at every call.
EAGER = BoundsSettings(idle=0.0, busy=0.0, lows=0.0, route=0.0)
#: Later than all messages.
FUTURE = {"startingTimestamp": "32503680000000", "startingOffsetsByTimestampStrategy": "latest"}
NO_RETRIES = {"fetchOffset.numRetries": "0"}

Ranges = dict[tuple[str, int], tuple[int, int]]


@contextmanager
def driver(
    cluster: EmbeddedCluster,
    topic: str,
    *,
    heads: BoundsSettings = EAGER,
    clock: ManualClock | None = None,
    options: dict[str, str] | None = None,
    **more: str,
) -> Iterator[StreamDriver]:
    given = {"nameServer": cluster.name_server, "subscribe": topic} | more | (options or {})
    if "assign" in given or "subscribePattern" in given:
        del given["subscribe"]
    given = {name: text.replace("TOPIC", topic) for name, text in given.items()}
    found = StreamDriver(stream_options(given, {}), heads=heads, clock=clock)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def send(cluster: EmbeddedCluster, topic: str, count: int, *, queues: int = 4) -> None:
    fill(cluster.broker_addresses[0], topic, numbered(count, queues=queues))


def taken(stream: StreamDriver, start: Json, end: Json) -> Ranges:
    """The offsets of a batch by broker and queue, whichever task reads them."""
    found: Ranges = {}
    for part in stream.partitions(start, end):
        for each in part:
            assert (each.queue.broker, each.queue.id) not in found
            found[each.queue.broker, each.queue.id] = (each.start, each.end)
    return found


def ranges(*bounds: tuple[int, int]) -> Ranges:
    return {("broker-a", number): bound for number, bound in enumerate(bounds)}


def begun(stream: StreamDriver, *, once: bool = False) -> Json:
    """The end of the first batch, which only names the start unless it is the only one."""
    return stream.latest_offset(stream.initial_offset(), limit=None, take_all=once)


def after(stream: StreamDriver, position: Json, *, once: bool = False) -> Json:
    """The end of the batch that follows."""
    return stream.latest_offset(position, limit=None, take_all=once)


def reached(offset: Json) -> Json:
    """The positions of an end, without its notes."""
    return to_json(from_json(offset))


def at(topic: str, *offsets: int) -> Json:
    return {topic: {f"broker-a:{number}": offset for number, offset in enumerate(offsets)}}


def as_logged(offset: Json) -> Json:
    """An offset as it comes back from Spark's log."""
    found: Json = json.loads(json.dumps(offset))
    return found


@pytest.fixture
def two_queues(cluster, topic):
    """A topic with twenty messages in each of two queues."""
    topic = f"{topic}-two"
    make_topic(cluster, topic, 40, queues=2)
    return topic


@pytest.fixture
def four_queues(cluster, topic):
    """A topic with ten messages in each of four queues."""
    send(cluster, topic, 40)
    return topic


@pytest.fixture(scope="module")
def pair():
    """A cluster of two brokers."""
    with EmbeddedCluster(brokers=2) as cluster:
        yield cluster


@pytest.fixture
def on_both(pair, topic):
    """A topic with twenty messages on each of two brokers."""
    topic = f"{topic}-both"  # a name that no other test has
    pair.create_topic(topic, queues=1)
    for address in pair.broker_addresses:
        fill(address, topic, numbered(20))
    return topic


# ---- starts

STARTS = {
    "latest": {},
    "earliest": {"startingOffsets": "earliest"},
    "group": {"startingOffsets": "group", "group": "unknown"},
    "offsets": {"startingOffsets": '{"TOPIC": {"broker-a:0": 3, "broker-a:1": 4}}'},
    "time": {"startingTimestamp": "0"},
    "future": FUTURE,
}


@pytest.mark.parametrize("then", STARTS)
@pytest.mark.parametrize("first", ["latest", "earliest", "offsets"])
def test_another_start_option_changes_nothing_for_a_stream_that_has_begun(
    cluster, two_queues, first, then
):
    """Spark logs only the end of the first batch, and asks again for its start."""
    with driver(cluster, two_queues, options=STARTS[first]) as stream:
        logged = as_logged(begun(stream))
    begin = {"latest": (20, 20), "earliest": (0, 0), "offsets": (3, 4)}[first]
    send(cluster, two_queues, 10, queues=2)

    with driver(cluster, two_queues, options=STARTS[then]) as stream:
        repeated = taken(stream, stream.initial_offset(), logged)
        rest = taken(stream, logged, after(stream, logged))

    assert repeated == {}
    assert rest == ranges((begin[0], 25), (begin[1], 25))


@pytest.mark.parametrize("then", STARTS)
@pytest.mark.parametrize("first", ["earliest", "offsets"])
@pytest.mark.parametrize("reader", ["one batch", "PySpark 4.0"])
def test_a_first_batch_with_rows_is_repeated_with_the_same_rows(
    cluster, two_queues, reader, first, then
):
    with driver(cluster, two_queues, options=STARTS[first]) as stream:
        start = stream.initial_offset()
        logged = as_logged(begun(stream, once=True) if reader == "one batch" else stream.ends())
        planned = taken(stream, start, logged)
    begin = {"earliest": (0, 0), "offsets": (3, 4)}[first]
    send(cluster, two_queues, 10, queues=2)

    with driver(cluster, two_queues, options=STARTS[then]) as stream:
        repeated = taken(stream, stream.initial_offset(), logged)
        rest = taken(stream, logged, after(stream, logged))

    assert repeated == planned == ranges((begin[0], 20), (begin[1], 20))
    assert rest == ranges((20, 25), (20, 25))


def test_a_stream_that_has_begun_ignores_start_options_that_became_invalid(cluster, two_queues):
    """Spark 4.0 does not say whether it has begun; it asks for ends, then for the ranges."""
    options = {"startingOffsets": json.dumps(at(two_queues, 7))}  # a queue was added since

    with driver(cluster, two_queues, options=options) as stream:
        end = stream.ends()
        assert taken(stream, at(two_queues, 15), end) == ranges((15, 20), (0, 20))
        with pytest.raises(OptionRefused, match=r"no offset for .*broker-a:1"):
            stream.partitions(stream.initial_offset(), end)


@pytest.mark.parametrize("once", [True, False])
def test_a_stream_starts_at_the_offset_of_its_group(cluster, four_queues, once):
    options = {"group": f"g-{once}", "startingOffsets": "group"}
    with driver(cluster, four_queues, group=f"g-{once}") as stream:
        stream.finished({four_queues: {"broker-a:1": 7, "broker-a:2": 10}})

    with driver(cluster, four_queues, options=options) as stream:
        start = stream.initial_offset() if once else begun(stream)
        batch = taken(stream, start, after(stream, start, once=once))

    # Queues without a committed offset start at their first message.
    assert batch == {("broker-a", 0): (0, 10), ("broker-a", 1): (7, 10), ("broker-a", 3): (0, 10)}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"startingOffsets": '{"TOPIC": {"broker-a:0": 1, "broker-a:1": 2}}'},
            OptionRefused,
            "no offset for .*broker-a:2, .*broker-a:3",
        ),
        ({"startingOffsets": json.dumps(at("TOPIC", 1, 2, 3, 4, 5))}, OptionRefused, "broker-a:4"),
        ({"subscribe": "no-such-topic"}, NoRoute, "no broker serves topic 'no-such-topic'"),
        ({"subscribe": "TOPIC,absent"}, NoRoute, "no broker serves topic 'absent'"),
        (
            {"assign": '{"TOPIC": ["broker-a:9"]}'},
            OptionRefused,
            r"must be queues that exist: .*broker-a:0",
        ),
    ],
)
def test_a_start_that_cannot_work_is_named(cluster, topic, options, error, words):
    with (
        driver(cluster, topic, options=options | NO_RETRIES) as stream,
        pytest.raises(error, match=words),
    ):
        begun(stream)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_topic_that_appears_under_a_pattern_is_read_from_its_first_message(orbit_cluster, start):
    for topic in ("shop-orders", "shop-invoices", "bookshop-orders"):
        orbit_cluster.create_topic(topic, queues=1)
    options = {"subscribePattern": "shop-.*", "startingOffsets": start}

    with driver(orbit_cluster, "", options=options) as stream:
        before = begun(stream)
        make_topic(orbit_cluster, "shop-returns", 3, queues=1)
        seen = after(stream, before)

        assert sorted(reached(before)) == ["shop-invoices", "shop-orders"]
        assert taken(stream, seen, after(stream, seen)) == {("broker-a", 0): (0, 3)}


# ---- ends


@pytest.mark.feature("M7")
def test_a_batch_waits_for_enough_messages(cluster, topic):
    send(cluster, topic, 4)
    clock = ManualClock()
    options = {"minOffsetsPerTrigger": "8", "maxTriggerDelay": "1m", "startingOffsets": "earliest"}

    with driver(cluster, topic, clock=clock, options=options) as stream:
        first = after(stream, begun(stream))
        send(cluster, topic, 4)
        held = after(stream, first)
        send(cluster, topic, 4)
        enough = after(stream, first)
        send(cluster, topic, 4)
        held_again = after(stream, enough)
        clock.time += 60
        late = after(stream, enough)

    assert (held, held_again) == (first, enough)
    assert [reached(each) for each in (first, enough, late)] == [
        at(topic, *[offset] * 4) for offset in (1, 3, 4)
    ]


def test_a_run_over_what_is_there_ends_where_the_queues_ended_when_it_began(cluster, four_queues):
    options = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "1000"}

    with driver(cluster, four_queues, options=options) as stream:
        stream.take_only_what_is_there()
        send(cluster, four_queues, 40)
        end = after(stream, begun(stream))

        assert reached(end) == at(four_queues, 10, 10, 10, 10)
        assert after(stream, end) == end


@pytest.mark.parametrize("is_run_over", [False, True], ids=["stream", "available-now"])
@pytest.mark.parametrize(
    "start",
    [
        {"startingOffsets": "latest"},
        {"startingOffsets": '{"TOPIC": {"broker-a:0": -1}}'},
        {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "latest"},
    ],
    ids=["latest", "offsets", "time"],
)
def test_what_is_stored_between_the_requests_of_a_start_is_read(cluster, topic, start, is_run_over):
    topic = f"{topic}-fresh"
    cluster.create_topic(topic, queues=1)

    with driver(cluster, topic, options=start) as stream, slipping_in(cluster.brokers[0], topic):
        if is_run_over:
            stream.take_only_what_is_there()
        position = begun(stream)
    with driver(cluster, topic, options=start) as stream:
        assert taken(stream, position, after(stream, position)) == {("broker-a", 0): (0, 1)}


def test_a_batch_is_what_lies_between_two_offsets(cluster, four_queues):
    with driver(cluster, four_queues) as stream:
        same = at(four_queues, 5, 5)
        assert stream.partitions(same, same) == []
        assert taken(stream, at(four_queues, 5), at(four_queues, 6, 7)) == ranges((5, 6), (0, 7))
        with pytest.raises(DataLost, match="broker-a:0 was read up to offset 9 and now ends at 6"):
            stream.partitions(at(four_queues, 9), at(four_queues, 6))


# ---- losses


@pytest.fixture
def expired():
    """A cluster whose topic `orders` has lost its first messages, and the first offset left."""
    with EmbeddedCluster(adjust=with_small_files) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(5000, size=300))
        yield cluster, forget_old(cluster, "orders")


@pytest.mark.parametrize("trigger", ["once", "available now", "ordinary"])
def test_a_queue_that_ends_before_its_position_is_an_error_or_continues_at_its_end(
    cluster, topic, caplog, trigger
):
    send(cluster, topic, 10, queues=1)
    start, once = at(topic, 99, 0, 0, 0), trigger == "once"

    with (
        driver(cluster, topic) as stream,
        pytest.raises(DataLost, match="from offset 99 on and has 0 to 10"),
    ):
        after(stream, start)
    with driver(cluster, topic, failOnDataLoss="false") as stream:
        if trigger == "available now":
            stream.take_only_what_is_there()
        end = stream.latest_offset(start, limit=4, take_all=once)
        batch = taken(stream, start, end)
        again = stream.latest_offset(end, limit=4, take_all=once)
    send(cluster, topic, 5, queues=1)
    with driver(cluster, topic, failOnDataLoss="false") as stream:
        repeated = taken(stream, start, end)
        rest = taken(stream, end, after(stream, end))

    # Not from the start, which could repeat days of reading.
    assert end == again
    assert reached(end) == at(topic, 10, 0, 0, 0)
    assert batch == repeated == {}
    assert rest == {("broker-a", 0): (10, 15)}
    (warning,) = (each.getMessage() for each in caplog.records if "offset 99" in each.message)
    assert f"{topic}@broker-a:0 is to be read from offset 99 on and has 0 to 10" in warning
    assert "a stream goes on at its present end" in warning
    assert "read it with a new checkpointLocation, or with startingOffsets" in warning


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("start", ["offsets", "group"])
def test_a_start_beyond_the_end_of_a_queue_is_a_loss(cluster, topic, start, once):
    send(cluster, topic, 10, queues=1)
    options = {"startingOffsets": json.dumps(at(topic, 99, 0, 0, 0))}
    if start == "group":
        # As after the topic was created again.
        options = {"startingOffsets": "group", "group": f"beyond-{once}"}
        with driver(cluster, topic, options=options) as stream:
            stream.finished(at(topic, 99, 0, 0, 0))

    with (
        driver(cluster, topic, options=options) as stream,
        pytest.raises(DataLost, match="broker-a:0 is to be read from offset 99 on and has 0 to 10"),
    ):
        begun(stream, once=once)
    with driver(cluster, topic, options=options, failOnDataLoss="false") as stream:
        first = begun(stream, once=once)
        assert taken(stream, stream.initial_offset(), first) == {}
        assert reached(first) == at(topic, 10, 0, 0, 0)
        send(cluster, topic, 5, queues=1)
        end = after(stream, first, once=once)
        assert taken(stream, first, end) == {("broker-a", 0): (10, 15)}


# ---- brokers that do not answer


@pytest.mark.parametrize("chosen", ["subscribe", "assign"])
def test_a_stream_continues_without_a_broker_that_is_away(caplog, chosen):
    options = {"startingOffsets": "earliest", **NO_RETRIES}
    if chosen == "assign":
        options["assign"] = '{"orders": ["broker-a:0", "broker-b:0"]}'
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        addresses = cluster.broker_addresses
        for address in addresses:
            fill(address, "orders", numbered(10))
        with driver(cluster, "orders", options=options) as stream:
            before = after(stream, begun(stream))
            stop_broker(cluster, 1)
            fill(addresses[0], "orders", numbered(10))

            end = after(stream, before)
            batch = taken(stream, before, end)

    assert reached(end) == {"orders": {"broker-a:0": 20, "broker-b:0": 10}}
    assert batch == {("broker-a", 0): (10, 20)}
    assert "orders@broker-b:0 does not answer, and the stream continues without it" in caplog.text


def test_a_run_over_what_is_there_fails_without_a_broker_of_the_checkpoint():
    options = {"startingOffsets": "earliest", **NO_RETRIES}
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        for address in cluster.broker_addresses:
            fill(address, "orders", numbered(20))
        with driver(cluster, "orders", options=options) as stream:
            half = stream.latest_offset(begun(stream), limit=20)
        stop_broker(cluster, 1)

        def available_now() -> None:
            with driver(cluster, "orders", options=options) as stream:
                stream.take_only_what_is_there()  # fails while the broker's route is known
                after(stream, half)

        with pytest.raises(OrbitError, match="orders@broker-b:0"):
            available_now()


def hush(stream: StreamDriver, broker: str, *, patient_too: bool = False) -> list[Queue]:
    """Make a broker not answer, or only patient requests; returns the queues asked for."""
    asked: list[Queue] = []

    def silencing(usual):
        def ask(queues, *, patient=True):
            queues = list(queues)
            asked.extend(queues)
            hung: dict[Queue, OrbitError] = {
                each: BrokerUnavailable(broker, "it hangs")
                for each in queues
                if each.broker == broker and (patient_too or not patient)
            }
            found = usual([each for each in queues if each not in hung], patient=patient)
            return QueueResults(found.values, hung)

        return ask

    stream.cluster.bounds = silencing(stream.cluster.bounds)  # type: ignore[method-assign]
    stream.cluster.ends = silencing(stream.cluster.ends)  # type: ignore[method-assign]
    return asked


def test_a_run_over_what_is_there_reads_a_broker_that_fell_silent_since(pair, on_both):
    with driver(pair, on_both, startingOffsets="earliest") as stream:
        stream.take_only_what_is_there()
        hush(stream, "broker-b")
        start = begun(stream)
        end = after(stream, start)

        assert taken(stream, start, end) == {("broker-a", 0): (0, 20), ("broker-b", 0): (0, 20)}
        assert after(stream, end) == end


@pytest.mark.parametrize("start", ["earliest", "a checkpoint"])
def test_a_trigger_of_one_batch_asks_patiently_and_fails_without_an_answer(pair, on_both, start):
    with driver(pair, on_both, startingOffsets="earliest") as stream:
        position = stream.initial_offset() if start == "earliest" else as_logged(begun(stream))
    with driver(pair, on_both, startingOffsets="earliest") as stream:
        hush(stream, "broker-b")
        end = after(stream, position, once=True)

        assert taken(stream, position, end) == {("broker-a", 0): (0, 20), ("broker-b", 0): (0, 20)}
    with driver(pair, on_both, startingOffsets="earliest") as stream:
        hush(stream, "broker-b", patient_too=True)
        with pytest.raises(BrokerUnavailable, match="it hangs"):
            after(stream, position, once=True)


def test_a_broker_that_hangs_costs_a_small_part_of_the_time(pair, on_both):
    clock, hung = ManualClock(), 0.0
    heads = BoundsSettings(route=float("inf"))
    with driver(pair, on_both, heads=heads, clock=clock, startingOffsets="earliest") as stream:
        position = after(stream, begun(stream))
        asked = hush(stream, "broker-b")
        ends, began = stream.cluster.ends, clock.time

        def hanging(queues, *, patient=True):
            nonlocal hung
            found = ends(queues, patient=patient)
            if not found.failures:
                return found
            clock.time += 6.0
            hung += 6.0
            return QueueResults(found.values, found.failures, dict.fromkeys(found.failures, 6.0))

        stream.cluster.ends = hanging  # type: ignore[method-assign]
        for _ in range(1000):
            assert after(stream, position) == position
            clock.time += 1.0

    assert 12.0 <= hung <= 0.15 * (clock.time - began)
    assert sum(each.broker == "broker-a" for each in asked) > 500


@pytest.mark.parametrize("chosen", ["subscribe", "assign"])
def test_a_deleted_topic_does_not_hide_new_queues_of_others(orbit_cluster, chosen):
    for topic in ("grows", "goes"):
        make_topic(orbit_cluster, topic, 20, queues=2)
    options = {"startingOffsets": "earliest", "failOnDataLoss": "false", **NO_RETRIES}
    if chosen == "assign":
        names = ["broker-a:0", "broker-a:1"]
        options["assign"] = json.dumps({"grows": names, "goes": names})
    with driver(orbit_cluster, "grows,goes", options=options) as stream:
        before = after(stream, begun(stream))
        with Admin(name_server=orbit_cluster.name_server) as admin:
            admin.topics.delete("goes")
            admin.topics.update("grows", queues=4)
        send(orbit_cluster, "grows", 40, queues=4)

        end = after(stream, after(stream, before))

    ends = at("grows", 20, 20, 10, 10) if chosen == "subscribe" else at("grows", 20, 20)
    assert end["grows"] == ends["grows"]


# ---- queues that appear late


@pytest.fixture
def half_hidden(pair, topic):
    """A topic with ten messages on each of two brokers, not readable on the second."""
    topic = f"{topic}-hidden"  # a name that no other test has
    pair.create_topic(topic, queues=1)
    for address in pair.broker_addresses:
        fill(address, topic, numbered(10))
    allow(pair, topic, "W")
    return topic


def allow(cluster: EmbeddedCluster, topic: str, permission: str) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        admin.topics.update(topic, permission=permission, brokers=["broker-b"])


def late_rows(stream: StreamDriver, cluster: EmbeddedCluster, topic: str) -> tuple[int, int]:
    """The range of the second broker when it appears and then gets five messages."""
    start = after(stream, begun(stream))
    assert list(reached(start)[topic]) == ["broker-a:0"]
    allow(cluster, topic, "RW")
    seen = as_logged(after(stream, start))
    assert taken(stream, start, seen) == {}
    fill(cluster.broker_addresses[1], topic, numbered(5))
    return taken(stream, seen, after(stream, seen))["broker-b", 0]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ({"startingOffsets": "earliest"}, (0, 15)),
        ({"startingOffsets": "latest"}, (0, 15)),  # leaves nothing new out
        ({"startingTimestamp": "1"}, (0, 15)),
        (FUTURE, (10, 15)),
        ({"startingOffsetsByTimestamp": '{"TOPIC": {"broker-a:0": 1}}'}, (0, 15)),
        ({"startingOffsets": "group", "group": "UNKNOWN"}, (0, 15)),
    ],
    ids=["earliest", "latest", "time", "future", "times", "group"],
)
def test_a_queue_whose_broker_was_away_starts_where_the_stream_did(
    pair, half_hidden, start, expected
):
    options = {"startingOffsetsByTimestampStrategy": "latest"} | start

    with driver(pair, half_hidden, options=options) as stream:
        assert late_rows(stream, pair, half_hidden) == expected


@pytest.mark.parametrize(("committed", "expected"), [(4, (4, 15)), (10, (10, 15)), (99, (0, 15))])
def test_a_queue_that_appears_late_starts_at_the_offset_of_the_group(
    pair, half_hidden, committed, expected, caplog
):
    options = {"group": f"of-{half_hidden}", "startingOffsets": "group"}
    with driver(pair, half_hidden, options=options) as stream:
        stream.finished({half_hidden: {"broker-b:0": committed}})

    with driver(pair, half_hidden, options=options) as stream:
        assert late_rows(stream, pair, half_hidden) == expected
    # Beyond the end: the queue was created again.
    assert ("is read from its start, although the group" in caplog.text) is (committed == 99)


@pytest.mark.parametrize("then", ["latest", "earliest"])
def test_a_batch_in_which_a_queue_appeared_is_repeated_with_the_same_rows(pair, half_hidden, then):
    with driver(pair, half_hidden, options=FUTURE) as stream:
        start = as_logged(begun(stream))
        allow(pair, half_hidden, "RW")
        pinned = as_logged(after(stream, start))
        whole = as_logged(after(stream, start, once=True))

    with driver(pair, half_hidden, startingOffsets=then) as stream:
        assert taken(stream, start, pinned) == {}
        assert taken(stream, start, whole) == {}
    with driver(pair, half_hidden, startingOffsets="earliest") as stream:
        everything = as_logged(after(stream, start, once=True))
    with driver(pair, half_hidden, options=FUTURE) as stream:
        assert taken(stream, start, everything) == {("broker-b", 0): (0, 10)}


# ---- relative starts and limits


@pytest.mark.feature("T3")
def test_a_relative_start_stays_after_a_crash(cluster, four_queues):
    with driver(cluster, four_queues, startingOffsets="-4") as stream:
        first = stream.initial_offset()
        begin = as_logged(begun(stream))
    send(cluster, four_queues, 20)

    with driver(cluster, four_queues, startingOffsets="-4") as stream:
        assert stream.initial_offset() == first
        assert reached(begin) == at(four_queues, 6, 6, 6, 6)
        assert taken(stream, begin, after(stream, begin))["broker-a", 3] == (6, 15)


@pytest.mark.feature("T3")
@pytest.mark.parametrize("later", ["-1h", "now"])  # `now` stands for a crash hours later
def test_a_queue_whose_broker_was_away_starts_at_the_time_of_the_first_run(
    pair, half_hidden, later
):
    with driver(pair, half_hidden, startingTimestamp="-1h") as stream:
        start = as_logged(begun(stream))

    with driver(pair, half_hidden, startingTimestamp=later) as stream:
        allow(pair, half_hidden, "RW")
        seen = as_logged(after(stream, start))
        assert taken(stream, seen, after(stream, seen))["broker-b", 0] == (0, 10)


def test_a_relative_start_whose_time_is_not_known_leaves_nothing_out(pair, half_hidden):
    with driver(pair, half_hidden, startingOffsets="earliest") as stream:
        start = as_logged(begun(stream))

    with driver(pair, half_hidden, startingTimestamp="now") as stream:
        allow(pair, half_hidden, "RW")
        seen = as_logged(after(stream, start))
        assert taken(stream, seen, after(stream, seen))["broker-b", 0] == (0, 10)


@pytest.mark.feature("T2")
def test_batches_are_limited_by_their_bytes(cluster, topic):
    topic = f"{topic}-bytes"
    cluster.create_topic(topic, queues=1)
    sizes = [100] * 400 + [20_000] * 100 + [100] * 400
    bodies = [b"x" * size for size in sizes]
    fill(cluster.broker_addresses[0], topic, bodies)

    counts = []
    with driver(cluster, topic, startingOffsets="earliest", maxBytesPerTrigger="300k") as stream:
        start = begun(stream)
        while (end := after(stream, start)) != start:
            ((first, last),) = taken(stream, start, end).values()
            counts.append(last - first)
            assert sum(sizes[first:last]) < 2 * 300 * 1024
            start = end

    assert sum(counts) == len(sizes)
    assert 8 <= len(counts) <= 40
    assert counts[0] > 100


@pytest.mark.feature("T2")
def test_a_run_of_one_batch_takes_all_bytes(cluster, four_queues):
    options = {"startingOffsets": "earliest", "maxBytesPerTrigger": "1"}
    with driver(cluster, four_queues, options=options) as stream:
        begin = begun(stream)
        assert taken(stream, begin, after(stream, begin)) == ranges((0, 1), (0, 1), (0, 1), (0, 1))
        assert taken(stream, begin, after(stream, begin, once=True))["broker-a", 0] == (0, 10)


# ---- whose checkpoint it is


@pytest.mark.parametrize("losses", ["true", "false"])
@pytest.mark.parametrize(
    ("query", "reads"),
    [
        ({"subscribe": "orders"}, "orders"),
        ({"subscribePattern": "ord.*"}, "pattern ord.*"),
        ({"assign": '{"orders": ["broker-a:0"]}'}, "orders@broker-a:0"),
    ],
)
def test_a_checkpoint_of_another_topic_is_refused_before_anything_is_committed(
    orbit_cluster, query, reads, losses
):
    for topic in ("orders", "shop-orders"):
        make_topic(orbit_cluster, topic, 10, queues=1)
    other, end = at("shop-orders", 3), at("shop-orders", 7)
    options = query | {"group": "mixed", "failOnDataLoss": losses}

    with driver(orbit_cluster, "orders", options=options) as stream:
        stream.take_only_what_is_there()
        for call in (
            lambda: after(stream, other),
            lambda: stream.partitions(other, end),
            lambda: stream.partitions(other, at("orders", 10)),
            lambda: stream.finished(other),
        ):
            with pytest.raises(CheckpointOfOtherTopics) as refused:
                call()

    assert str(refused.value) == (
        f"the checkpoint belongs to a query on topic shop-orders, and this query reads {reads}; "
        "give this query a checkpointLocation of its own"
    )
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # noqa: S301
    assert orbit_cluster.progress("mixed", "shop-orders") == {}


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    ("query", "given_up"),
    [
        ({"subscribe": "kept"}, "topic left"),
        ({"assign": '{"kept": ["broker-a:0"]}'}, "topic left, queue kept@broker-a:1"),
    ],
)
def test_what_a_query_no_longer_reads_is_a_loss_and_its_commits_stay(
    orbit_cluster, query, given_up, once, caplog
):
    for topic, queues in (("kept", 2), ("left", 1)):
        orbit_cluster.create_topic(topic, queues=queues)
        send(orbit_cluster, topic, 10 * queues, queues=queues)
    before = at("kept", 3, 10) | at("left", 4)
    options = query | {"group": "billing"}

    with driver(orbit_cluster, "kept", options=options) as stream:
        if once:
            stream.take_only_what_is_there()
        for call in (
            lambda: after(stream, before),
            lambda: stream.partitions(before, at("kept", 9, 10) | at("left", 9)),
            lambda: stream.finished(before),
        ):
            with pytest.raises(DataLost, match="topic left is in the checkpoint, and the query no"):
                call()
    with driver(orbit_cluster, "kept", options=options, failOnDataLoss="false") as stream:
        if once:
            stream.take_only_what_is_there()
        stream.finished(before)
        end = after(stream, before)
        batch = taken(stream, before, end)
    with driver(orbit_cluster, "kept", options=options) as stream:  # reported once, and accepted
        assert after(stream, end) == end

    assert batch == {("broker-a", 0): (3, 10)}
    assert end["kept"]["broker-a:0"] == 10
    assert "left" not in end
    assert caplog.text.count(f"in the checkpoint, and no longer read: {given_up}") == 1
    # Another member of the group may continue there.
    assert orbit_cluster.progress("billing", "left") == {}
    assert (("broker-a", 1) in orbit_cluster.progress("billing", "kept")) == ("subscribe" in query)


def test_a_deleted_topic_of_a_pattern_is_not_given_up(orbit_cluster):
    orbit_cluster.create_topic("shop-orders", queues=1)
    before = at("shop-orders", 0) | at("shop-returns", 4)

    with driver(orbit_cluster, "", subscribePattern="shop-.*") as stream:
        assert after(stream, before) == before
        assert reached(after(stream, {})) == at("shop-orders", 0)


# ---- how often brokers are asked


def test_an_idle_stream_asks_brokers_a_few_times_a_second(cluster, four_queues):
    clock = ManualClock()
    options = {"startingOffsets": "earliest"}
    with driver(
        cluster, four_queues, heads=BoundsSettings(), clock=clock, options=options
    ) as stream:
        asked: list[int] = []
        ends = stream.cluster.ends

        def counted(queues, *, patient=True):
            asked.append(1)
            return ends(queues, patient=patient)

        stream.cluster.ends = counted  # type: ignore[method-assign]
        position = after(stream, begun(stream))
        after(stream, position)
        counts = []
        for _ in range(3):
            asked.clear()
            for _ in range(400):  # five seconds of Spark's polling
                assert after(stream, position) == position
                stream.latest_known()
                clock.time += 0.0125
            counts.append(len(asked))

    # More often at first, when more is likely to follow.
    assert 20 < counts[0] < 60
    assert counts[1:] == pytest.approx([20, 20], abs=2)


def test_a_finished_batch_is_followed_by_a_fresh_question(cluster, four_queues):
    options = {"startingOffsets": "earliest"}
    with driver(
        cluster, four_queues, heads=BoundsSettings(), clock=ManualClock(), options=options
    ) as stream:
        position = begun(stream)
        send(cluster, four_queues, 40)

        assert reached(after(stream, position)) == at(four_queues, 20, 20, 20, 20)


# ---- queues that were created again


@pytest.fixture
def read_up(cluster, topic):
    """A topic with one queue, and the position of a stream that has read its ten messages."""
    topic = f"{topic}-again"
    make_topic(cluster, topic, 10, queues=1)
    with driver(cluster, topic, startingOffsets="earliest") as stream:
        start = begun(stream)
        end = after(stream, start)
        assert taken(stream, start, end) == {("broker-a", 0): (0, 10)}
    return topic, as_logged(end)


def create_again(cluster: EmbeddedCluster, topic: str, count: int) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        admin.topics.delete(topic)
    make_topic(cluster, topic, count, queues=1)


_OTHER = "was read up to offset 10 and has another message at offset 9 now: it was created again"
#: The error about a queue that was read up to offset 10, by the messages that it has now.
CREATED_AGAIN = {7: "is to be read from offset 10 on and has 0 to 7", 10: _OTHER, 40: _OTHER}


@pytest.mark.parametrize("count", CREATED_AGAIN)
@pytest.mark.parametrize("trigger", ["once", "available now", "ordinary"])
def test_a_restarted_stream_notices_a_queue_that_was_created_again(
    cluster, read_up, trigger, count
):
    (topic, start), once = read_up, trigger == "once"
    create_again(cluster, topic, count)

    with (
        driver(cluster, topic) as stream,
        pytest.raises(DataLost, match=f"{topic}@broker-a:0 {CREATED_AGAIN[count]}"),
    ):
        after(stream, start, once=once)
    with driver(cluster, topic, failOnDataLoss="false") as stream:
        if trigger == "available now":
            stream.take_only_what_is_there()
        end = after(stream, start, once=once)
        batch = taken(stream, start, as_logged(end))
        assert after(stream, end, once=once) == end
    with driver(cluster, topic) as stream:
        assert taken(stream, start, end) == batch
        assert after(stream, end) == end

    assert reached(end) == at(topic, count)
    assert batch == {("broker-a", 0): (0, count)}


@pytest.mark.parametrize("count", CREATED_AGAIN)
def test_a_running_stream_notices_a_queue_that_is_created_again(cluster, read_up, count):
    (topic, start), clock = read_up, ManualClock()
    # The starts of queues are asked for once.
    heads = BoundsSettings(idle=0.0, busy=0.0, lows=3600.0, route=0.0)
    with (
        driver(cluster, topic, heads=heads, clock=clock) as strict,
        driver(cluster, topic, heads=heads, clock=clock, failOnDataLoss="false") as stream,
    ):
        for each in (strict, stream):
            assert after(each, start) == start
        create_again(cluster, topic, count)
        clock.time += 30.0

        with pytest.raises(DataLost, match=f"{topic}@broker-a:0 {CREATED_AGAIN[count]}"):
            after(strict, start)
        end = after(stream, start)

        assert taken(stream, start, end) == {("broker-a", 0): (0, count)}
        assert after(stream, end) == end


def test_a_batch_planned_before_the_change_was_noticed_is_followed_by_the_missing_part(
    cluster, read_up
):
    (topic, position), clock = read_up, ManualClock()
    send(cluster, topic, 10, queues=1)
    with driver(cluster, topic, clock=clock, failOnDataLoss="false") as stream:
        start = after(stream, position)
        create_again(cluster, topic, 40)

        unaware = after(stream, start)
        assert taken(stream, start, unaware) == {("broker-a", 0): (20, 40)}
        clock.time += 30.0
        assert taken(stream, unaware, after(stream, unaware)) == {("broker-a", 0): (0, 40)}

    with driver(cluster, topic) as stream, pytest.raises(DataLost, match="it was created again"):
        after(stream, unaware)


def test_a_repeated_batch_notices_a_queue_that_was_created_again(cluster, read_up):
    topic, start = read_up
    send(cluster, topic, 10, queues=1)
    with driver(cluster, topic) as stream:
        planned = as_logged(after(stream, start))
    create_again(cluster, topic, 40)

    with driver(cluster, topic) as stream, pytest.raises(DataLost, match="it was created again"):
        stream.partitions(start, planned)
    with driver(cluster, topic, failOnDataLoss="false") as stream:
        assert taken(stream, start, planned) == {("broker-a", 0): (0, 20)}
        # Once more, because the logged end is about the former queue.
        assert taken(stream, planned, after(stream, planned)) == {("broker-a", 0): (0, 40)}


def test_of_a_queue_that_lost_its_end_only_later_messages_are_read_again(orbit_cluster):
    make_topic(orbit_cluster, "cut", 5, queues=1)
    orbit_cluster.clock.advance(100)
    lost_at = round(orbit_cluster.clock.now() * 1000)
    orbit_cluster.clock.advance(100)
    send(orbit_cluster, "cut", 20, queues=1)
    queue = Queue("cut", "broker-a", 0)
    start = to_json({queue: 12}, marks={queue: Mark(11, lost_at)})

    with driver(orbit_cluster, "cut") as stream, pytest.raises(DataLost, match="lost its end"):
        after(stream, start)
    with driver(orbit_cluster, "cut", failOnDataLoss="false") as stream:
        assert taken(stream, start, after(stream, start)) == {("broker-a", 0): (5, 25)}


def test_a_mark_that_has_expired_is_no_loss_and_is_replaced(expired):
    cluster, low = expired
    queue = Queue("orders", "broker-a", 0)
    start = to_json({queue: low}, marks={queue: Mark(low - 1, 1)})

    with driver(cluster, "orders") as stream:
        end = after(stream, start)

        assert taken(stream, start, end) == {("broker-a", 0): (low, 5000)}
        assert marks_in(end)[queue].offset == 4999


def test_a_silent_broker_keeps_its_marks(cluster, read_up):
    topic, start = read_up
    send(cluster, topic, 10, queues=1)
    with driver(cluster, topic) as stream:

        def silent(offsets):
            return QueueResults(failures=dict.fromkeys(offsets, OrbitError("no answer")))

        stream.cluster.stored_at = silent  # type: ignore[method-assign]
        end = after(stream, start)

    assert reached(end) == at(topic, 20)
    assert marks_in(end) == marks_in(start) != {}


# ---- the group


def test_the_last_batch_is_committed_when_spark_asks_for_another(cluster, four_queues):
    topic, group = four_queues, f"last-{four_queues}"
    with driver(cluster, topic, group=group, startingOffsets="earliest") as stream:
        start = begun(stream)
        end = after(stream, start)
        stream.partitions(start, end)
        in_between = cluster.progress(group, topic)
        after(stream, end)

        assert set(in_between.values()) <= {0}
        assert cluster.progress(group, topic) == {("broker-a", n): 10 for n in range(4)}


def test_a_trigger_of_one_batch_is_committed_by_the_next_run(cluster, four_queues):
    """Whether the batch was written is not known before."""
    topic, group = four_queues, f"once-{four_queues}"
    options = {"group": group, "startingOffsets": "earliest"}

    with driver(cluster, topic, options=options) as stream:
        end = begun(stream, once=True)
        assert len(taken(stream, stream.initial_offset(), end)) == 4
    before = cluster.progress(group, topic)
    with driver(cluster, topic, options=options) as stream:
        assert after(stream, end, once=True) == end

    assert before == {}
    assert cluster.progress(group, topic) == {("broker-a", n): 10 for n in range(4)}


def test_nothing_is_committed_with_commit_progress_false(cluster, four_queues):
    options = {"group": "silent", "commitProgress": "false", "startingOffsets": "earliest"}
    with driver(cluster, four_queues, options=options) as stream:
        end = begun(stream)
        after(stream, end)
        stream.finished(end)

    assert cluster.progress("silent", four_queues) == {}


def test_a_commit_that_fails_is_tried_again_and_stops_nothing(cluster, four_queues):
    topic, clock, group = four_queues, ManualClock(), f"fails-{four_queues}"
    options = {"group": group, "startingOffsets": "earliest"}

    with driver(cluster, topic, options=options, clock=clock) as stream:
        end = after(stream, begun(stream))
        report = stream.cluster.report

        def failing(_):
            return CommitResult({Queue(topic, "broker-a", 2): SourceError("no")})

        stream.cluster.report = failing  # type: ignore[method-assign]
        assert after(stream, end) == end
        stream.cluster.report = report  # type: ignore[method-assign]
        after(stream, end)
        too_soon = cluster.progress(group, topic)
        clock.time += 1.0
        after(stream, end)

    assert too_soon.get(("broker-a", 2)) != 10
    assert cluster.progress(group, topic)["broker-a", 2] == 10


def test_commits_are_repeated_for_a_broker_that_lost_them_and_set_nobody_back(cluster, four_queues):
    """A broker that was killed restarts with what it had persisted; others may have gone on."""
    topic, clock, group = four_queues, ManualClock(), f"repeated-{four_queues}"
    position = at(topic, 7, 7, 7, 7)
    with driver(cluster, topic, group=group, clock=clock) as stream:
        after(stream, position)
        stream.cluster.report({Queue(topic, "broker-a", 1): 3, Queue(topic, "broker-a", 2): 9})
        repeat = stream.cluster.repeat
        after(stream, position)
        too_soon = cluster.progress(group, topic)

        def failing(positions):
            return CommitResult(dict.fromkeys(positions, SourceError("no")))

        stream.cluster.repeat = failing  # type: ignore[method-assign]
        clock.time += 30.0
        after(stream, position)
        stream.cluster.repeat = repeat  # type: ignore[method-assign]
        clock.time += 1.0
        after(stream, position)

    assert too_soon["broker-a", 1] == 3
    assert cluster.progress(group, topic) == {
        ("broker-a", number): offset for number, offset in enumerate((7, 7, 9, 7))
    }


@pytest.mark.parametrize("offset", [3, 9])
def test_a_repeated_commit_leaves_a_reset_that_nobody_has_followed(cluster, four_queues, offset):
    topic, clock, group = four_queues, ManualClock(), f"reset-{four_queues}"
    queue, position = Queue(topic, "broker-a", 2), at(topic, 7, 7, 7, 7)
    with driver(cluster, topic, group=group, clock=clock) as stream:
        after(stream, position)
        with Admin(name_server=cluster.name_server) as admin:
            admin.progress.reset(group, topic, ResetTo.by_queue({queue: offset}))
        clock.time += 30.0
        after(stream, position)

    assert cluster.progress(group, topic)["broker-a", 2] == offset


def test_the_driver_is_a_member_of_its_group_and_names_other_members(cluster, topic, caplog):
    group = f"shared-{topic}"
    caplog.set_level(logging.WARNING, "orbitmq.spark")
    with driver(cluster, topic, group=group) as one:
        after(one, begun(one))
        (first,) = members(cluster, group)
        with driver(cluster, topic, group=group) as other:
            after(other, begun(other))

    assert f"group {group} has other members" in caplog.text
    assert first in caplog.text
    assert members(cluster, group) == []
