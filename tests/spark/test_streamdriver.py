"""What a stream decides on the driver, without Spark: beginnings, ends, losses, progress."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from orbitmq import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.ranges.cluster import Bounds, CommitResult, QueueResults
from orbitmq.client.ranges.connections import QueueRange
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
from tests.support.filling import fill, forget_old, numbered, with_small_files
from tests.support.rebalancing import slipping_in
from tests.support.remoting import ManualClock

#: Asks brokers at every call.
EAGER = BoundsSettings(idle=0.0, busy=0.0, lows=0.0, route=0.0)


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
    found = StreamDriver(stream_options(given, {}), heads=heads, clock=clock)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def send(cluster: EmbeddedCluster, topic: str, count: int, *, queues: int = 4) -> None:
    fill(cluster.broker_addresses[0], topic, numbered(count, queues=queues))


def taken(stream: StreamDriver, start: Json, end: Json) -> dict[tuple[str, int], tuple[int, int]]:
    """The offsets of a batch by broker and queue, whichever task reads them."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for part in stream.partitions(start, end):
        for each in part:
            assert (each.queue.broker, each.queue.id) not in found
            found[each.queue.broker, each.queue.id] = (each.start, each.end)
    return found


def begun(stream: StreamDriver) -> Json:
    """Where it begins, after the first batch, which only says so."""
    return stream.latest_offset(stream.initial_offset(), limit=None)


def reached(offset: Json) -> Json:
    """Where a batch ends, without what its end says besides."""
    return to_json(from_json(offset))


def at(topic: str, *offsets: int) -> Json:
    return {topic: {f"broker-a:{number}": offset for number, offset in enumerate(offsets)}}


# ---- beginnings


def test_a_stream_from_the_earliest_begins_at_offsets(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)

    with driver(orbit_shared_cluster, orbit_shared_topic, startingOffsets="earliest") as stream:
        start = begun(stream)
        end = stream.latest_offset(start, limit=None)

        assert reached(start) == at(orbit_shared_topic, 0, 0, 0, 0)
        assert reached(end) == at(orbit_shared_topic, 10, 10, 10, 10)
        assert taken(stream, start, end) == {("broker-a", n): (0, 10) for n in range(4)}
        assert stream.latest_offset(end, limit=None) == end


def test_rule_1_a_crash_in_the_first_batch_of_a_stream_from_the_end_loses_nothing(
    orbit_shared_cluster, orbit_shared_topic
):
    """Spark logs only where the first batch ends, and asks anew where it begins."""
    send(orbit_shared_cluster, orbit_shared_topic, 40)
    with driver(orbit_shared_cluster, orbit_shared_topic) as stream:
        first_start = stream.initial_offset()
        logged = stream.latest_offset(first_start, limit=None)
        stream.partitions(first_start, logged)
    send(orbit_shared_cluster, orbit_shared_topic, 400)

    with driver(orbit_shared_cluster, orbit_shared_topic) as stream:
        start = stream.initial_offset()
        repeated = taken(stream, start, logged)
        end = stream.latest_offset(logged, limit=None)
        rest = taken(stream, logged, end)

    assert json.dumps(start) == json.dumps(first_start)
    assert reached(logged) == at(orbit_shared_topic, 10, 10, 10, 10)
    assert repeated == {}
    assert rest == {("broker-a", n): (10, 110) for n in range(4)}


PLACES = {
    "latest": {},
    "earliest": {"startingOffsets": "earliest"},
    "group": {"startingOffsets": "group", "group": "nobody"},
    "offsets": {"startingOffsets": '{"TOPIC": {"broker-a:0": 3, "broker-a:1": 4}}'},
    "time": {"startingTimestamp": "0"},
    "a time to come": {
        "startingTimestamp": "32503680000000",
        "startingOffsetsByTimestampStrategy": "latest",
    },
}


def begin_at(place: str, topic: str) -> dict[str, str]:
    return {name: text.replace("TOPIC", topic) for name, text in PLACES[place].items()}


@pytest.mark.parametrize("then", PLACES)
@pytest.mark.parametrize("first", ["latest", "earliest", "offsets"])
def test_rule_1_another_place_to_begin_at_changes_nothing_for_a_stream_that_has_begun(
    two_queues, first, then
):
    cluster, topic = two_queues
    with driver(cluster, topic, options=begin_at(first, topic)) as stream:
        logged = as_logged(begun(stream))
    begin = {"latest": (20, 20), "earliest": (0, 0), "offsets": (3, 4)}[first]
    fill(cluster.broker_addresses[0], topic, numbered(10, queues=2))

    with driver(cluster, topic, options=begin_at(then, topic)) as stream:
        repeated = taken(stream, stream.initial_offset(), logged)
        rest = taken(stream, logged, stream.latest_offset(logged, limit=None))

    assert repeated == {}
    assert rest == {("broker-a", n): (begin[n], 25) for n in range(2)}


@pytest.mark.parametrize("then", PLACES)
@pytest.mark.parametrize("first", ["earliest", "offsets"])
@pytest.mark.parametrize("reader", ["one batch", "of old versions"])
def test_rule_1_a_first_batch_with_rows_is_repeated_with_the_same_rows(
    two_queues, reader, first, then
):
    """Where there will be no other batch; and for versions of Spark that do not say the start."""
    cluster, topic = two_queues
    with driver(cluster, topic, options=begin_at(first, topic)) as stream:
        start = stream.initial_offset()
        if reader == "one batch":
            logged = as_logged(stream.latest_offset(start, limit=None, take_all=True))
        else:
            logged = as_logged(stream.ends())
        planned = taken(stream, start, logged)
    begin = {"earliest": (0, 0), "offsets": (3, 4)}[first]
    fill(cluster.broker_addresses[0], topic, numbered(10, queues=2))

    with driver(cluster, topic, options=begin_at(then, topic)) as stream:
        repeated = taken(stream, stream.initial_offset(), logged)
        rest = taken(stream, logged, stream.latest_offset(logged, limit=None))

    assert repeated == planned == {("broker-a", n): (begin[n], 20) for n in range(2)}
    assert rest == {("broker-a", n): (20, 25) for n in range(2)}


def test_a_first_batch_that_an_older_version_has_planned_is_repeated_by_the_options(two_queues):
    """Its end does not say where it began."""
    cluster, topic = two_queues
    logged = at(topic, 20, 20)

    with driver(cluster, topic, options=begin_at("offsets", topic)) as stream:
        assert taken(stream, stream.initial_offset(), logged) == {
            ("broker-a", 0): (3, 20),
            ("broker-a", 1): (4, 20),
        }
        assert stream.latest_offset(logged, limit=None) == logged
    with driver(cluster, topic) as stream:
        assert taken(stream, stream.initial_offset(), logged) == {}


def test_a_stream_that_has_begun_does_not_mind_a_place_where_none_could_begin(two_queues):
    """Spark 4.0 does not say whether it has; it asks for ends, and then for what lies between."""
    cluster, topic = two_queues
    place = {"startingOffsets": json.dumps(at(topic, 7))}  # one queue has come since

    with driver(cluster, topic, options=place) as stream:
        end = stream.ends()
        assert taken(stream, at(topic, 15), end) == {
            ("broker-a", 0): (15, 20),
            ("broker-a", 1): (0, 20),
        }
        with pytest.raises(OptionRefused, match=r"no offset for .*broker-a:1"):
            stream.partitions(stream.initial_offset(), end)


@pytest.fixture
def two_queues(orbit_shared_cluster, orbit_shared_topic):
    """A topic with twenty messages in each of two queues."""
    topic = f"{orbit_shared_topic}-two"
    orbit_shared_cluster.create_topic(topic, queues=2)
    send(orbit_shared_cluster, topic, 40, queues=2)
    return orbit_shared_cluster, topic


def as_logged(offset: Json) -> Json:
    """An offset as it comes back from Spark's log."""
    found: Json = json.loads(json.dumps(offset))
    return found


@pytest.mark.parametrize("trigger", ["once", "ordinary"])
def test_a_stream_from_the_progress_of_its_group(orbit_shared_cluster, orbit_shared_topic, trigger):
    send(orbit_shared_cluster, orbit_shared_topic, 40)
    with driver(orbit_shared_cluster, orbit_shared_topic, group=f"g-{trigger}") as stream:
        stream.finished({orbit_shared_topic: {"broker-a:1": 7, "broker-a:2": 10}})

    with driver(
        orbit_shared_cluster, orbit_shared_topic, group=f"g-{trigger}", startingOffsets="group"
    ) as stream:
        start = stream.initial_offset()
        end = stream.latest_offset(start, limit=None, take_all=trigger == "once")
        batch = taken(stream, start, end)
        if trigger == "ordinary":
            assert batch == {}
            start, end = end, stream.latest_offset(end, limit=None)
            batch = taken(stream, start, end)

    # Queues without progress begin at their first message: nothing is left out.
    assert batch == {("broker-a", 0): (0, 10), ("broker-a", 1): (7, 10), ("broker-a", 3): (0, 10)}


def test_a_stream_from_a_time(orbit_cluster, orbit_topic, orbit_broker):
    fill(orbit_broker, orbit_topic, numbered(40, queues=4))
    orbit_cluster.clock.advance(100)
    time = orbit_cluster.clock.now()
    orbit_cluster.clock.advance(100)
    fill(orbit_broker, orbit_topic, numbered(30, queues=3))
    options = {"startingTimestamp": str(round(time * 1000))}

    with (
        driver(orbit_cluster, orbit_topic, options=options) as stream,
        pytest.raises(SourceError, match=r"no message of .*broker-a:3 was stored at or after 2"),
    ):
        stream.latest_offset(stream.initial_offset(), limit=None)

    with driver(
        orbit_cluster, orbit_topic, options=options, startingOffsetsByTimestampStrategy="latest"
    ) as stream:
        begin = stream.latest_offset(stream.initial_offset(), limit=None)
        end = stream.latest_offset(begin, limit=None)

    assert reached(begin) == at(orbit_topic, 10, 10, 10, 10)
    assert reached(end) == at(orbit_topic, 20, 20, 20, 10)


def test_a_stream_from_offsets_of_its_own(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)
    topic = orbit_shared_topic

    with driver(
        orbit_shared_cluster, topic, startingOffsets=json.dumps(at(topic, 3, -2, 5, 9))
    ) as stream:
        assert reached(begun(stream)) == at(topic, 3, 0, 5, 9)
    with driver(
        orbit_shared_cluster, topic, startingOffsets=json.dumps(at(topic, 3, -2, -1, 9))
    ) as stream:
        assert reached(begun(stream)) == at(topic, 3, 0, 10, 9)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [((1, 2), "no offset for .*broker-a:2, .*broker-a:3"), ((1, 2, 3, 4, 5), "broker-a:4")],
)
def test_offsets_have_to_be_given_for_the_queues_that_are_read(
    orbit_shared_cluster, orbit_shared_topic, offsets, words
):
    given = json.dumps(at(orbit_shared_topic, *offsets))

    with (
        driver(orbit_shared_cluster, orbit_shared_topic, startingOffsets=given) as stream,
        pytest.raises(OptionRefused, match=words),
    ):
        begun(stream)


def test_a_topic_that_is_not_there_is_named(orbit_shared_cluster):
    options = {"fetchOffset.numRetries": "0"}

    with (
        driver(orbit_shared_cluster, "no-such-topic", options=options) as stream,
        pytest.raises(NoRoute, match="no broker serves topic 'no-such-topic'"),
    ):
        stream.latest_offset(stream.initial_offset(), limit=None)


def test_queues_can_be_chosen(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)
    chosen = json.dumps({orbit_shared_topic: ["broker-a:1", "broker-a:3"]})
    absent = json.dumps({orbit_shared_topic: ["broker-a:9"]})

    with driver(
        orbit_shared_cluster, orbit_shared_topic, assign=chosen, startingOffsets="earliest"
    ) as stream:
        start = begun(stream)
        assert taken(stream, start, stream.latest_offset(start, limit=None)) == {
            ("broker-a", 1): (0, 10),
            ("broker-a", 3): (0, 10),
        }
    with (
        driver(orbit_shared_cluster, orbit_shared_topic, assign=absent) as stream,
        pytest.raises(OptionRefused, match=r"must be queues that exist: .*broker-a:0"),
    ):
        stream.latest_offset(begun(stream), limit=None)


def test_topics_can_be_chosen_by_a_pattern(orbit_cluster):
    for topic in ("shop-orders", "shop-invoices", "bookshop-orders"):
        orbit_cluster.create_topic(topic, queues=1)

    with driver(
        orbit_cluster, "", subscribePattern="shop-.*", startingOffsets="earliest"
    ) as stream:
        assert sorted(reached(begun(stream))) == ["shop-invoices", "shop-orders"]
        orbit_cluster.create_topic("shop-returns", queues=1)
        fill(orbit_cluster.broker_addresses[0], "shop-returns", numbered(3))
        start = begun(stream)
        end = stream.latest_offset(start, limit=None)
        after = stream.latest_offset(end, limit=None)

        assert taken(stream, end, after) == {("broker-a", 0): (0, 3)}


# ---- ends


def test_a_batch_takes_no_more_than_allowed(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)

    with driver(orbit_shared_cluster, orbit_shared_topic, startingOffsets="earliest") as stream:
        position = begun(stream)
        sizes = []
        while (end := stream.latest_offset(position, limit=12)) != position:
            sizes.append(sum(to - at for at, to in taken(stream, position, end).values()))
            position = end

    assert sizes == [12, 12, 12, 4]


@pytest.mark.feature("M7")
def test_a_batch_waits_for_enough_messages(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 4)
    clock = ManualClock()
    topic = orbit_shared_topic

    with driver(
        orbit_shared_cluster,
        topic,
        clock=clock,
        startingOffsets="earliest",
        minOffsetsPerTrigger="8",
        maxTriggerDelay="1m",
    ) as stream:
        first = stream.latest_offset(begun(stream), limit=None)
        send(orbit_shared_cluster, topic, 4)
        held = stream.latest_offset(first, limit=None)
        send(orbit_shared_cluster, topic, 4)
        enough = stream.latest_offset(first, limit=None)
        send(orbit_shared_cluster, topic, 4)
        held_again = stream.latest_offset(enough, limit=None)
        clock.time += 60
        late = stream.latest_offset(enough, limit=None)

    assert reached(first) == at(topic, 1, 1, 1, 1)
    assert held == first
    assert reached(enough) == at(topic, 3, 3, 3, 3)
    assert held_again == enough
    assert reached(late) == at(topic, 4, 4, 4, 4)


def test_a_run_over_what_is_there_ends_where_the_queues_ended_when_it_began(
    orbit_shared_cluster, orbit_shared_topic
):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 40)

    with driver(
        orbit_shared_cluster, topic, startingOffsets="earliest", minOffsetsPerTrigger="1000"
    ) as stream:
        stream.take_only_what_is_there()
        send(orbit_shared_cluster, topic, 40)
        end = stream.latest_offset(begun(stream), limit=None)

        assert reached(end) == at(topic, 10, 10, 10, 10)
        assert stream.latest_offset(end, limit=None) == end


def test_a_run_over_what_is_there_may_begin_at_the_end(orbit_shared_cluster, orbit_shared_topic):
    topic = orbit_shared_topic

    with driver(orbit_shared_cluster, topic) as stream:
        stream.take_only_what_is_there()
        send(orbit_shared_cluster, topic, 40)
        begin = stream.latest_offset(stream.initial_offset(), limit=None)

        assert stream.latest_offset(begin, limit=None) == begin


@pytest.mark.parametrize("is_run_over", [False, True], ids=["stream", "available-now"])
@pytest.mark.parametrize(
    "place",
    [
        {"startingOffsets": "latest"},
        {"startingOffsets": '{"TOPIC": {"broker-a:0": -1}}'},
        {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "latest"},
    ],
    ids=["latest", "offsets", "time"],
)
def test_what_is_stored_between_the_requests_of_a_start_is_read(
    orbit_shared_cluster, orbit_shared_topic, place, is_run_over
):
    cluster, topic = orbit_shared_cluster, f"{orbit_shared_topic}-fresh"
    cluster.create_topic(topic, queues=1)
    options = {name: text.replace("TOPIC", topic) for name, text in place.items()}

    with (
        driver(cluster, topic, options=options) as stream,
        slipping_in(cluster._cluster.brokers[0], topic),
    ):
        if is_run_over:
            stream.take_only_what_is_there()
        start = begun(stream)
    with driver(cluster, topic, options=options) as stream:
        end = stream.latest_offset(start, limit=None)

        assert taken(stream, start, end) == {("broker-a", 0): (0, 1)}


def test_a_trigger_that_makes_one_batch_gets_everything(orbit_shared_cluster, orbit_shared_topic):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 40)

    with driver(orbit_shared_cluster, topic, startingTimestamp="0") as stream:
        start = stream.initial_offset()
        end = stream.latest_offset(start, limit=None, take_all=True)

        assert taken(stream, start, end) == {("broker-a", n): (0, 10) for n in range(4)}


def test_a_stream_from_the_end_takes_nothing_in_its_first_batch_whatever_the_trigger(
    orbit_shared_cluster, orbit_shared_topic
):
    """That batch has no rows, so what came meanwhile is for the next one."""
    topic = orbit_shared_topic

    with driver(orbit_shared_cluster, topic) as stream:
        begin = stream.latest_offset(stream.initial_offset(), limit=None)
        send(orbit_shared_cluster, topic, 40)

        assert stream.latest_offset(stream.initial_offset(), limit=None, take_all=True) == begin


def test_rule_2_nothing_new_is_the_same_text(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)

    with driver(orbit_shared_cluster, orbit_shared_topic, startingOffsets="earliest") as stream:
        end = stream.latest_offset(begun(stream), limit=None)
        # As it comes back from Spark's log.
        logged = json.loads(json.dumps(end))

        assert json.dumps(stream.latest_offset(logged, limit=None)) == json.dumps(end)
        assert stream.latest_known() == reached(end)


def test_a_queue_that_appears_is_read_from_its_beginning(orbit_cluster, orbit_topic, orbit_broker):
    fill(orbit_broker, orbit_topic, numbered(40, queues=4))
    with driver(orbit_cluster, orbit_topic, startingOffsets="earliest") as stream:
        before = stream.latest_offset(begun(stream), limit=None)
        orbit_cluster.create_topic(orbit_topic, queues=6)
        fill(orbit_broker, orbit_topic, numbered(60, queues=6))

        seen = stream.latest_offset(before, limit=None)
        first = taken(stream, before, seen)
        after = stream.latest_offset(seen, limit=None)
        second = taken(stream, seen, after)

    assert first == {("broker-a", n): (10, 20) for n in range(4)}
    assert second == {("broker-a", 4): (0, 10), ("broker-a", 5): (0, 10)}


def test_a_topic_that_is_made_after_a_stream_from_the_end_has_begun_is_read_from_its_beginning(
    orbit_cluster, orbit_broker
):
    with driver(orbit_cluster, "", subscribePattern="made-.*") as stream:
        before = begun(stream)
        orbit_cluster.create_topic("made-later", queues=1)
        fill(orbit_broker, "made-later", numbered(3))
        seen = stream.latest_offset(before, limit=None)
        after = stream.latest_offset(seen, limit=None)

        assert taken(stream, seen, after) == {("broker-a", 0): (0, 3)}


def test_rule_7_what_lies_between_two_offsets(orbit_shared_cluster, orbit_shared_topic):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 40)

    with driver(orbit_shared_cluster, topic) as stream:
        assert stream.partitions(at(topic, 5, 5), at(topic, 5, 5)) == []
        assert taken(stream, at(topic, 5), at(topic, 6, 7)) == {
            ("broker-a", 0): (5, 6),
            ("broker-a", 1): (0, 7),
        }
        with pytest.raises(DataLost, match="broker-a:0 was read up to offset 9 and now ends at 6"):
            stream.partitions(at(topic, 9), at(topic, 6))


def test_batches_are_cut_as_asked_for(orbit_shared_cluster, orbit_shared_topic):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 100, queues=1)

    with driver(orbit_shared_cluster, topic, maxRecordsPerPartition="30") as stream:
        parts = stream.partitions(at(topic, 0), at(topic, 100))

    queue = Queue(topic, "broker-a", 0)
    assert parts == [
        (QueueRange(queue, 0, 25),),
        (QueueRange(queue, 25, 50),),
        (QueueRange(queue, 50, 75),),
        (QueueRange(queue, 75, 100),),
    ]


# ---- losses


@pytest.fixture
def forgetful():
    """A cluster whose topic `orders` has lost its first messages, and where it begins."""
    with EmbeddedCluster(adjust=with_small_files) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(5000, size=300))
        yield cluster, forget_old(cluster, "orders")


def test_expired_offsets_are_an_error_that_says_what_to_do(forgetful):
    cluster, low = forgetful

    with driver(cluster, "orders") as stream:
        with pytest.raises(DataLost) as raised:
            stream.latest_offset(at("orders", 7), limit=None)
        with pytest.raises(DataLost, match=f"offsets 7 to 5000 .* and has {low} to 5000"):
            stream.partitions(at("orders", 7), at("orders", 5000))

    words = str(raised.value)
    assert f"orders@broker-a:0 is to be read from offset 7 on and has {low} to 5000" in words
    for remedy in (
        "failOnDataLoss to false",
        "goes on at the present end of a queue that ends before the wanted offset",
        "new checkpointLocation",
        "keep messages longer",
    ):
        assert remedy in words


def test_expired_offsets_can_be_left_out(forgetful, caplog):
    cluster, low = forgetful

    with driver(cluster, "orders", failOnDataLoss="false") as stream:
        end = stream.latest_offset(at("orders", 7), limit=None)

        assert taken(stream, at("orders", 7), end) == {("broker-a", 0): (low, 5000)}
    assert (
        "messages are gone and left out: orders@broker-a:0 was asked for offsets 7" in caplog.text
    )


def test_a_queue_that_ends_before_the_stream_is_an_error(orbit_shared_cluster, orbit_shared_topic):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 10, queues=1)

    with (
        driver(orbit_shared_cluster, topic) as stream,
        pytest.raises(DataLost, match="from offset 99 on and has 0 to 10"),
    ):
        stream.latest_offset(at(topic, 99, 0, 0, 0), limit=None)


@pytest.mark.parametrize("trigger", ["once", "what is there", "ordinary"])
def test_where_losses_are_allowed_a_stream_goes_on_at_the_end_of_a_queue_that_ends_before_it(
    orbit_shared_cluster, orbit_shared_topic, caplog, trigger
):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 10, queues=1)

    with driver(orbit_shared_cluster, topic, failOnDataLoss="false") as stream:
        if trigger == "what is there":
            stream.take_only_what_is_there()
        start = at(topic, 99, 0, 0, 0)
        end = stream.latest_offset(start, limit=4, take_all=trigger == "once")
        batch = taken(stream, start, end)
        again = stream.latest_offset(end, limit=4, take_all=trigger == "once")
    send(orbit_shared_cluster, topic, 5, queues=1)
    with driver(orbit_shared_cluster, topic, failOnDataLoss="false") as stream:
        repeated = taken(stream, start, end)
        rest = taken(stream, end, stream.latest_offset(end, limit=None))

    # Not back to what it has read, or could have: that might be days.
    assert end == again
    assert reached(end) == at(topic, 10, 0, 0, 0)
    assert batch == repeated == {}
    assert rest == {("broker-a", 0): (10, 15)}
    (warning,) = (each.getMessage() for each in caplog.records if "offset 99" in each.message)
    assert f"{topic}@broker-a:0 is to be read from offset 99 on and has 0 to 10" in warning
    assert "a stream goes on at its present end" in warning
    assert "read it with a new checkpointLocation, or with startingOffsets" in warning


def test_a_batch_that_passed_over_a_queue_is_not_repeated_where_losses_are_not_allowed(
    orbit_shared_cluster, orbit_shared_topic
):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 10, queues=1)

    with (
        driver(orbit_shared_cluster, topic) as stream,
        pytest.raises(DataLost, match="was read up to offset 99 and now ends at 10"),
    ):
        stream.partitions(at(topic, 99, 0, 0, 0), at(topic, 10, 0, 0, 0))


@pytest.mark.parametrize("trigger", ["once", "ordinary"])
@pytest.mark.parametrize("place", ["offsets", "group"])
def test_a_stream_that_is_to_begin_beyond_the_end_of_a_queue(
    orbit_shared_cluster, orbit_shared_topic, place, trigger
):
    topic = orbit_shared_topic
    send(orbit_shared_cluster, topic, 10, queues=1)
    options = {"startingOffsets": json.dumps(at(topic, 99, 0, 0, 0))}
    if place == "group":
        # As after the topic was made anew.
        options = {"startingOffsets": "group", "group": f"beyond-{trigger}"}
        with driver(orbit_shared_cluster, topic, options=options) as stream:
            stream.finished(at(topic, 99, 0, 0, 0))
    once = trigger == "once"

    with (
        driver(orbit_shared_cluster, topic, options=options) as stream,
        pytest.raises(DataLost, match="broker-a:0 is to be read from offset 99 on and has 0 to 10"),
    ):
        stream.latest_offset(stream.initial_offset(), limit=None, take_all=once)

    with driver(orbit_shared_cluster, topic, options=options, failOnDataLoss="false") as stream:
        first = stream.latest_offset(stream.initial_offset(), limit=None, take_all=once)
        assert taken(stream, stream.initial_offset(), first) == {}
        assert reached(first) == at(topic, 10, 0, 0, 0)
        send(orbit_shared_cluster, topic, 5, queues=1)
        end = stream.latest_offset(first, limit=None, take_all=once)
        assert taken(stream, first, end) == {("broker-a", 0): (10, 15)}


def test_of_a_queue_that_is_made_anew_while_the_stream_runs_is_said_what_it_has_now(
    forgetful, caplog
):
    cluster, low = forgetful
    # Beginnings are asked for once and then believed.
    heads = BoundsSettings(idle=0.0, busy=0.0, lows=3600.0, route=0.0)
    with driver(cluster, "orders", heads=heads, failOnDataLoss="false") as stream:
        start = at("orders", 5000)
        assert stream.latest_offset(start, limit=None) == start
        with Admin(name_server=cluster.name_server) as admin:
            admin.topics.delete("orders")
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(low + 7))

        first = stream.latest_offset(start, limit=None)
        fill(cluster.broker_addresses[0], "orders", numbered(3))
        end = stream.latest_offset(first, limit=None)

        assert reached(first) == at("orders", low + 7)
        assert taken(stream, start, first) == {}
        assert taken(stream, first, end) == {("broker-a", 0): (low + 7, low + 10)}
    # Not where it began in its former life.
    assert f"is to be read from offset 5000 on and has 0 to {low + 7}" in caplog.text


def test_a_broker_that_is_away_stops_nobody(caplog):
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        first, second = cluster.broker_addresses
        for address in (first, second):
            fill(address, "orders", numbered(10))
        options = {"startingOffsets": "earliest", "fetchOffset.numRetries": "0"}
        with driver(cluster, "orders", options=options) as stream:
            before = stream.latest_offset(begun(stream), limit=None)
            stop_broker(cluster, 1)
            fill(first, "orders", numbered(10))
            after = stream.latest_offset(before, limit=None)
            asked: list[Queue] = []
            bounds = stream.cluster.bounds

            def noted(queues, *, patient=True):
                asked.extend(queues)
                return bounds(queues, patient=patient)

            stream.cluster.bounds = noted  # type: ignore[method-assign]
            stream.latest_offset(after, limit=None)

            # It is left alone for a while, so that it delays no batch.
            assert {queue.broker for queue in asked} == {"broker-a"}
            assert reached(before) == {"orders": {"broker-a:0": 10, "broker-b:0": 10}}
            assert reached(after) == {"orders": {"broker-a:0": 20, "broker-b:0": 10}}
            assert taken(stream, before, after) == {("broker-a", 0): (10, 20)}
    assert "orders@broker-b:0 does not answer, and the stream continues without it" in caplog.text


def test_a_run_over_what_is_there_does_not_end_well_without_a_broker_that_is_away():
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        for address in cluster.broker_addresses:
            fill(address, "orders", numbered(20))
        options = {"startingOffsets": "earliest", "fetchOffset.numRetries": "0"}
        with driver(cluster, "orders", options=options) as stream:
            half = stream.latest_offset(begun(stream), limit=20)
        stop_broker(cluster, 1)

        with driver(cluster, "orders", options=options) as stream:
            try:
                stream.take_only_what_is_there()  # says so, as long as its route is known
                stream.latest_offset(half, limit=None)
            except OrbitError as error:
                told = str(error)
            else:
                told = ""
    assert "orders@broker-b:0" in told


@pytest.fixture
def two_brokers(hiding, orbit_shared_topic):
    """A topic with twenty messages on each of two brokers."""
    topic = f"{orbit_shared_topic}-both"  # a name that no other test has
    hiding.create_topic(topic, queues=1)
    for address in hiding.broker_addresses:
        fill(address, topic, numbered(20))
    return hiding, topic


def hush(stream: StreamDriver, broker: str, *, patient_too: bool = False) -> list[Queue]:
    """Have a broker not answer, or only those who ask it patiently; which queues were asked for."""
    bounds, ends = stream.cluster.bounds, stream.cluster.ends
    asked: list[Queue] = []

    def is_silent(queue: Queue, patient: bool) -> bool:
        return queue.broker == broker and (patient_too or not patient)

    def split(queues: Iterable[Queue], patient: bool) -> tuple[list[Queue], QueueResults[int]]:
        queues = list(queues)
        asked.extend(queues)
        silent = [each for each in queues if is_silent(each, patient)]
        failures: dict[Queue, OrbitError] = {
            each: BrokerUnavailable(broker, "it hangs") for each in silent
        }
        return [each for each in queues if each not in silent], QueueResults(failures=failures)

    def some_bounds(queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[Bounds]:
        others, without = split(queues, patient)
        return QueueResults(bounds(others, patient=patient).values, without.failures)

    def some_ends(queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[int]:
        others, without = split(queues, patient)
        return QueueResults(ends(others, patient=patient).values, without.failures)

    stream.cluster.bounds = some_bounds  # type: ignore[method-assign]
    stream.cluster.ends = some_ends  # type: ignore[method-assign]
    return asked


def test_a_run_over_what_is_there_takes_it_also_of_a_broker_that_has_fallen_silent_since(
    two_brokers,
):
    """Whoever reads it asks for longer, and the run does not end well if that is in vain."""
    cluster, topic = two_brokers
    with driver(cluster, topic, startingOffsets="earliest") as stream:
        stream.take_only_what_is_there()
        hush(stream, "broker-b")
        start = begun(stream)
        end = stream.latest_offset(start, limit=None)

        assert taken(stream, start, end) == {("broker-a", 0): (0, 20), ("broker-b", 0): (0, 20)}
        assert stream.latest_offset(end, limit=None) == end


@pytest.mark.parametrize("place", ["earliest", "a checkpoint"])
def test_a_trigger_that_makes_one_batch_asks_patiently(two_brokers, place):
    cluster, topic = two_brokers
    with driver(cluster, topic, startingOffsets="earliest") as stream:
        start = stream.initial_offset() if place == "earliest" else as_logged(begun(stream))
    with driver(cluster, topic, startingOffsets="earliest") as stream:
        hush(stream, "broker-b")
        end = stream.latest_offset(start, limit=None, take_all=True)

        assert taken(stream, start, end) == {("broker-a", 0): (0, 20), ("broker-b", 0): (0, 20)}
    with driver(cluster, topic, startingOffsets="earliest") as stream:
        hush(stream, "broker-b", patient_too=True)
        with pytest.raises(BrokerUnavailable, match="it hangs"):
            stream.latest_offset(start, limit=None, take_all=True)


def test_a_broker_that_hangs_costs_a_small_part_of_the_time(two_brokers):
    cluster, topic = two_brokers
    clock = ManualClock()
    heads = BoundsSettings(route=float("inf"))
    with driver(cluster, topic, heads=heads, clock=clock, startingOffsets="earliest") as stream:
        position = stream.latest_offset(begun(stream), limit=None)
        asked = hush(stream, "broker-b")
        ends = stream.cluster.ends
        began = clock.time
        hung = 0.0

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
            assert stream.latest_offset(position, limit=None) == position
            clock.time += 1.0

    assert hung >= 12.0  # it is not forgotten, either
    assert hung <= 0.15 * (clock.time - began)
    assert sum(each.broker == "broker-a" for each in asked) > 500


def test_a_broker_that_refuses_at_once_is_asked_again_soon(two_brokers):
    cluster, topic = two_brokers
    clock = ManualClock()
    heads = BoundsSettings(route=float("inf"), silence=5.0)
    with driver(cluster, topic, heads=heads, clock=clock, startingOffsets="earliest") as stream:
        position = stream.latest_offset(begun(stream), limit=None)
        asked = hush(stream, "broker-b")
        clock.time += 1.0
        stream.latest_offset(position, limit=None)
        asked.clear()
        clock.time += 4.9
        stream.latest_offset(position, limit=None)
        too_soon = {each.broker for each in asked}
        clock.time += 0.2
        stream.latest_offset(position, limit=None)
        clock.time += 0.3
        stream.latest_offset(position, limit=None)

    assert too_soon == {"broker-a"}
    assert {each.broker for each in asked} == {"broker-a", "broker-b"}


@pytest.mark.parametrize("chosen", ["subscribe", "assign"])
def test_a_topic_that_is_gone_does_not_hide_new_queues_of_others(orbit_cluster, chosen):
    cluster, address = orbit_cluster, orbit_cluster.broker_addresses[0]
    for topic in ("grows", "goes"):
        cluster.create_topic(topic, queues=2)
        fill(address, topic, numbered(20, queues=2))
    options = {"startingOffsets": "earliest", "fetchOffset.numRetries": "0"}
    if chosen == "assign":
        names = ["broker-a:0", "broker-a:1"]
        options["assign"] = json.dumps({"grows": names, "goes": names})
    with driver(cluster, "grows,goes", options=options, failOnDataLoss="false") as stream:
        before = stream.latest_offset(begun(stream), limit=None)
        with Admin(name_server=cluster.name_server) as admin:
            admin.topics.delete("goes")
            admin.topics.update("grows", queues=4)
        fill(address, "grows", numbered(40, queues=4))

        seen = stream.latest_offset(before, limit=None)
        after = stream.latest_offset(seen, limit=None)

    ends = at("grows", 20, 20, 10, 10) if chosen == "subscribe" else at("grows", 20, 20)
    assert after["grows"] == ends["grows"]


def test_a_topic_that_is_not_there_at_the_start_is_named_beside_others(two_queues):
    cluster, topic = two_queues
    options = {"fetchOffset.numRetries": "0"}

    with (
        driver(cluster, f"{topic},absent", options=options) as stream,
        pytest.raises(NoRoute, match="no broker serves topic 'absent'"),
    ):
        begun(stream)


@pytest.fixture(scope="module")
def hiding():
    """A cluster of two brokers."""
    with EmbeddedCluster(brokers=2) as cluster:
        yield cluster


@pytest.fixture
def half_hidden(hiding, orbit_shared_topic):
    """A topic with ten messages on each of two brokers, which cannot be read on the second."""
    topic = f"{orbit_shared_topic}-hidden"  # a name that no other test has
    hiding.create_topic(topic, queues=1)
    for address in hiding.broker_addresses:
        fill(address, topic, numbered(10))
    with Admin(name_server=hiding.name_server) as admin:
        admin.topics.update(topic, permission="W", brokers=["broker-b"])
    return hiding, topic


def show(cluster: EmbeddedCluster, topic: str) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        admin.topics.update(topic, permission="RW", brokers=["broker-b"])


def late_rows(stream: StreamDriver, cluster: EmbeddedCluster, topic: str) -> tuple[int, int]:
    """What a stream takes of the second broker when it shows, and then has five messages more."""
    start = stream.latest_offset(begun(stream), limit=None)
    assert list(reached(start)[topic]) == ["broker-a:0"]
    show(cluster, topic)
    seen = as_logged(stream.latest_offset(start, limit=None))
    assert taken(stream, start, seen) == {}
    fill(cluster.broker_addresses[1], topic, numbered(5))
    return taken(stream, seen, stream.latest_offset(seen, limit=None))["broker-b", 0]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({"startingOffsets": "earliest"}, (0, 15)),
        ({"startingOffsets": "latest"}, (0, 15)),  # nothing that is new is left out
        ({"startingTimestamp": "1"}, (0, 15)),
        ({"startingTimestamp": "32503680000000"}, (10, 15)),
        ({"startingOffsetsByTimestamp": '{"TOPIC": {"broker-a:0": 1}}'}, (0, 15)),
        ({"startingOffsets": "group", "group": "GROUP-OF-NOBODY"}, (0, 15)),
    ],
    ids=lambda each: "" if isinstance(each, tuple) else " ".join(each.values())[:24],
)
def test_a_queue_whose_broker_was_away_at_the_start_is_begun_where_the_stream_began(
    half_hidden, place, expected
):
    cluster, topic = half_hidden
    options = {name: text.replace("TOPIC", topic) for name, text in place.items()}
    options["startingOffsetsByTimestampStrategy"] = "latest"

    with driver(cluster, topic, options=options) as stream:
        assert late_rows(stream, cluster, topic) == expected


@pytest.mark.parametrize(("read", "expected"), [(4, (4, 15)), (10, (10, 15)), (99, (0, 15))])
def test_a_queue_that_comes_late_is_begun_at_the_progress_of_the_group(
    half_hidden, read, expected, caplog
):
    """Beyond the end, it was made anew: all that it has is new to the group."""
    cluster, topic = half_hidden
    options = {"group": f"of-{topic}", "startingOffsets": "group"}
    with driver(cluster, topic, options=options) as stream:
        stream.finished({topic: {"broker-b:0": read}})

    with driver(cluster, topic, options=options) as stream:
        assert late_rows(stream, cluster, topic) == expected
    assert ("is read from its start, although the group" in caplog.text) is (read == 99)


@pytest.mark.parametrize("then", ["latest", "earliest"])
def test_a_batch_in_which_a_queue_came_late_is_repeated_with_the_same_rows(half_hidden, then):
    cluster, topic = half_hidden
    far = {"startingTimestamp": "32503680000000", "startingOffsetsByTimestampStrategy": "latest"}
    with driver(cluster, topic, options=far) as stream:
        start = as_logged(begun(stream))
        show(cluster, topic)
        pinned = as_logged(stream.latest_offset(start, limit=None))
        whole = as_logged(stream.latest_offset(start, limit=None, take_all=True))

    with driver(cluster, topic, startingOffsets=then) as stream:
        assert taken(stream, start, pinned) == {}
        assert taken(stream, start, whole) == {}
    with driver(cluster, topic, startingOffsets="earliest") as stream:
        everything = as_logged(stream.latest_offset(start, limit=None, take_all=True))
    with driver(cluster, topic, options=far) as stream:
        assert taken(stream, start, everything) == {("broker-b", 0): (0, 10)}


def test_a_queue_of_which_nobody_says_where_it_begins_waits_and_holds_nobody_up(
    half_hidden, caplog
):
    cluster, topic = half_hidden
    clock = ManualClock()
    with driver(cluster, topic, clock=clock, startingTimestamp="1") as stream:
        start = begun(stream)
        show(cluster, topic)
        at_times = stream.cluster.at_times
        asked: list[Queue] = []

        def silent(times, *, patient=True):
            asked.extend(times)
            return QueueResults(failures=dict.fromkeys(times, OrbitError("no answer")))

        stream.cluster.at_times = silent  # type: ignore[method-assign]
        without = stream.latest_offset(start, limit=None)
        assert stream.latest_offset(without, limit=None) == without
        stream.cluster.at_times = at_times  # type: ignore[method-assign]
        too_soon = stream.latest_offset(without, limit=None)
        clock.time += 1.0
        with_it = stream.latest_offset(without, limit=None)

    assert reached(without) == {topic: {"broker-a:0": 10}} == reached(too_soon)
    assert len(asked) == 1
    assert reached(with_it) == {topic: {"broker-a:0": 10, "broker-b:0": 0}}
    assert f"the start of {topic}@broker-b:0 is not known yet: no answer" in caplog.text


def test_queues_that_were_assigned_may_be_away_for_a_while():
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        first, second = cluster.broker_addresses
        for address in (first, second):
            fill(address, "orders", numbered(10))
        options = {
            "startingOffsets": "earliest",
            "fetchOffset.numRetries": "0",
            "assign": '{"orders": ["broker-a:0", "broker-b:0"]}',
        }
        with driver(cluster, "orders", options=options) as stream:
            before = stream.latest_offset(begun(stream), limit=None)
            stop_broker(cluster, 1)
            fill(first, "orders", numbered(10))

            after = stream.latest_offset(before, limit=None)

    assert reached(after) == {"orders": {"broker-a:0": 20, "broker-b:0": 10}}


# ---- whose checkpoint it is


@pytest.mark.parametrize(
    "query",
    [
        {"subscribe": "orders"},
        {"subscribePattern": "ord.*"},
        {"assign": '{"orders": ["broker-a:0"]}'},
    ],
    ids=lambda query: next(iter(query)),
)
@pytest.mark.parametrize("losses", ["true", "false"])
def test_a_checkpoint_of_another_topic_is_refused_as_such_before_the_broker_is_told(
    orbit_cluster, query, losses
):
    for topic in ("orders", "shop-orders"):
        orbit_cluster.create_topic(topic, queues=1)
        fill(orbit_cluster.broker_addresses[0], topic, numbered(10))
    other, end = at("shop-orders", 3), at("shop-orders", 7)
    options = query | {"group": "mixed", "failOnDataLoss": losses}

    with driver(orbit_cluster, "orders", options=options) as stream:
        stream.take_only_what_is_there()
        with pytest.raises(CheckpointOfOtherTopics) as told:
            stream.latest_offset(other, limit=None)
        # A batch that was planned and is to be repeated; and where the reader gave the end itself.
        for planned in (end, at("orders", 10)):
            with pytest.raises(CheckpointOfOtherTopics):
                stream.partitions(other, planned)
        with pytest.raises(CheckpointOfOtherTopics):
            stream.finished(other)

    reads = {"subscribePattern": "pattern ord.*", "assign": "orders@broker-a:0"}
    assert str(told.value) == (
        "the checkpoint belongs to a query on topic shop-orders, and this query reads "
        f"{reads.get(next(iter(query)), 'orders')}; give this query a checkpointLocation of its own"
    )
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)  # noqa: S301  # our own
    assert orbit_cluster.progress("mixed", "shop-orders") == {}


@pytest.mark.parametrize("trigger", ["once", "ordinary"])
def test_a_topic_that_a_query_has_given_up_is_a_loss(orbit_cluster, trigger, caplog):
    for topic in ("kept", "left"):
        orbit_cluster.create_topic(topic, queues=1)
        fill(orbit_cluster.broker_addresses[0], topic, numbered(10))
    before = at("kept", 3) | at("left", 4)

    with driver(orbit_cluster, "kept") as stream:
        if trigger == "once":
            stream.take_only_what_is_there()
        with pytest.raises(
            DataLost, match="topic left is in the checkpoint, and the query no longer"
        ):
            stream.latest_offset(before, limit=None)
    with driver(orbit_cluster, "kept", failOnDataLoss="false") as stream:
        if trigger == "once":
            stream.take_only_what_is_there()
        after = stream.latest_offset(before, limit=None)
        batch = stream.partitions(before, after)

    assert [each for part in batch for each in part] == [
        QueueRange(Queue("kept", "broker-a", 0), 3, 10)
    ]
    assert reached(after) == at("kept", 10)
    with driver(orbit_cluster, "kept") as stream:  # The loss was told once, and accepted.
        assert stream.latest_offset(after, limit=None) == after
    assert caplog.text.count("in the checkpoint, and no longer read: topic left") == 1


def test_the_progress_of_a_topic_that_was_given_up_is_left_alone(orbit_cluster):
    """Somebody else of the group may go on with it."""
    for topic in ("kept", "left"):
        orbit_cluster.create_topic(topic, queues=1)
        fill(orbit_cluster.broker_addresses[0], topic, numbered(10))

    with driver(orbit_cluster, "kept", group="billing", failOnDataLoss="false") as stream:
        stream.finished(at("kept", 3) | at("left", 4))

    assert orbit_cluster.progress("billing", "kept") == {("broker-a", 0): 3}
    assert orbit_cluster.progress("billing", "left") == {}


def assigned(topic: str, *numbers: int) -> dict[str, str]:
    return {"assign": json.dumps({topic: [f"broker-a:{number}" for number in numbers]})}


def test_a_queue_that_is_not_assigned_any_more_is_a_loss(two_queues, caplog):
    cluster, topic = two_queues
    before = at(topic, 5, 5)

    with driver(cluster, topic, options=assigned(topic, 0)) as stream:
        for ask in (
            lambda: stream.latest_offset(before, limit=None),
            lambda: stream.partitions(before, at(topic, 9, 9)),
            lambda: stream.finished(before),
        ):
            with pytest.raises(DataLost, match=f"queue {topic}@broker-a:1 is in the checkpoint"):
                ask()
    with driver(cluster, topic, options=assigned(topic, 0), failOnDataLoss="false") as stream:
        after = stream.latest_offset(before, limit=None)
        batch = taken(stream, before, after)
        planned_before = taken(stream, before, at(topic, 9, 9))
    with driver(cluster, topic, options=assigned(topic, 0)) as stream:  # told once, and accepted
        assert stream.latest_offset(after, limit=None) == after

    assert reached(after) == at(topic, 20)
    assert batch == {("broker-a", 0): (5, 20)}
    assert planned_before == {("broker-a", 0): (5, 9)}
    assert caplog.text.count(f"and no longer read: queue {topic}@broker-a:1") == 1


def test_the_progress_of_a_queue_that_is_not_assigned_any_more_is_left_alone(two_queues):
    cluster, topic = two_queues
    group = f"of-{topic}"
    with driver(cluster, topic, options=assigned(topic, 1), group=group) as other:
        other.finished({topic: {"broker-a:1": 10}})

    with driver(
        cluster, topic, options=assigned(topic, 0), group=group, failOnDataLoss="false"
    ) as stream:
        stream.finished(at(topic, 5, 5))
        stream.latest_offset(at(topic, 6, 5), limit=None)

    assert cluster.progress(group, topic) == {("broker-a", 0): 6, ("broker-a", 1): 10}


def test_queues_that_are_assigned_anew_are_read_from_their_beginning(two_queues):
    cluster, topic = two_queues
    options = assigned(topic, 1)

    with driver(cluster, topic, options=options, failOnDataLoss="false") as stream:
        seen = stream.latest_offset(at(topic, 5), limit=None)
        after = stream.latest_offset(seen, limit=None)

        assert taken(stream, at(topic, 5), seen) == {}
        assert taken(stream, seen, after) == {("broker-a", 1): (0, 20)}


def test_a_topic_of_a_pattern_may_be_gone_without_being_given_up(orbit_cluster):
    orbit_cluster.create_topic("shop-orders", queues=1)
    before = at("shop-orders", 0) | at("shop-returns", 4)

    with driver(orbit_cluster, "", subscribePattern="shop-.*") as stream:
        assert stream.latest_offset(before, limit=None) == before
        assert reached(stream.latest_offset({}, limit=None)) == at("shop-orders", 0)


def stop_broker(cluster: EmbeddedCluster, place: int) -> None:
    cluster._run(cluster._cluster.brokers[place].stop())


def test_an_idle_stream_asks_brokers_a_few_times_a_second(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)
    clock = ManualClock()

    with driver(
        orbit_shared_cluster,
        orbit_shared_topic,
        heads=BoundsSettings(),
        clock=clock,
        startingOffsets="earliest",
    ) as stream:
        asked: list[int] = []
        ends = stream.cluster.ends

        def counted(queues, *, patient=True):
            asked.append(1)
            return ends(queues, patient=patient)

        stream.cluster.ends = counted  # type: ignore[method-assign]
        position = stream.latest_offset(begun(stream), limit=None)
        stream.latest_offset(position, limit=None)
        counts = []
        for _ in range(3):
            asked.clear()
            for _ in range(400):  # five seconds of Spark's polling
                assert stream.latest_offset(position, limit=None) == position
                stream.latest_known()
                clock.time += 0.0125
            counts.append(len(asked))

    # More often at first, when more is likely to follow.
    assert 20 < counts[0] < 60
    assert counts[1:] == pytest.approx([20, 20], abs=2)


def test_a_finished_batch_is_followed_by_a_fresh_look(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)
    clock = ManualClock()

    with driver(
        orbit_shared_cluster,
        orbit_shared_topic,
        heads=BoundsSettings(),
        clock=clock,
        startingOffsets="earliest",
    ) as stream:
        position = stream.latest_offset(stream.initial_offset(), limit=None)
        send(orbit_shared_cluster, orbit_shared_topic, 40)

        end = stream.latest_offset(position, limit=None)

    assert reached(end) == at(orbit_shared_topic, 20, 20, 20, 20)


# ---- queues that are made anew


def read_up(cluster: EmbeddedCluster, topic: str) -> Json:
    """Where a stream has got to that has read ten messages of a topic with one queue."""
    cluster.create_topic(topic, queues=1)
    send(cluster, topic, 10, queues=1)
    with driver(cluster, topic, startingOffsets="earliest") as stream:
        start = begun(stream)
        end = stream.latest_offset(start, limit=None)
        assert taken(stream, start, end) == {("broker-a", 0): (0, 10)}
    return as_logged(end)


def make_anew(cluster: EmbeddedCluster, topic: str, count: int) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        admin.topics.delete(topic)
    cluster.create_topic(topic, queues=1)
    send(cluster, topic, count, queues=1)


#: What is said of a queue that was read up to offset 10, by how many messages it has now.
MADE_ANEW = {
    7: "is to be read from offset 10 on and has 0 to 7",
    10: "was read up to offset 10 and has another message at offset 9 now: it was created again",
    40: "was read up to offset 10 and has another message at offset 9 now: it was created again",
}


@pytest.mark.parametrize("count", MADE_ANEW)
@pytest.mark.parametrize("trigger", ["once", "what is there", "ordinary"])
def test_a_stream_that_is_begun_again_does_not_go_on_in_a_queue_that_was_made_anew(
    orbit_shared_cluster, orbit_shared_topic, trigger, count
):
    cluster, topic = orbit_shared_cluster, f"{orbit_shared_topic}-anew"
    start = read_up(cluster, topic)
    make_anew(cluster, topic, count)

    with (
        driver(cluster, topic) as stream,
        pytest.raises(DataLost, match=f"{topic}@broker-a:0 {MADE_ANEW[count]}"),
    ):
        stream.latest_offset(start, limit=None, take_all=trigger == "once")
    with driver(cluster, topic, failOnDataLoss="false") as stream:
        if trigger == "what is there":
            stream.take_only_what_is_there()
        end = stream.latest_offset(start, limit=None, take_all=trigger == "once")
        batch = taken(stream, start, as_logged(end))
        assert stream.latest_offset(end, limit=None, take_all=trigger == "once") == end
    with driver(cluster, topic) as stream:
        assert taken(stream, start, end) == batch
        assert stream.latest_offset(end, limit=None) == end

    assert reached(end) == at(topic, count)
    assert batch == {("broker-a", 0): (0, count)}


@pytest.mark.parametrize("count", MADE_ANEW)
def test_a_stream_that_runs_does_not_go_on_in_a_queue_that_is_made_anew(
    orbit_shared_cluster, orbit_shared_topic, count
):
    cluster, topic = orbit_shared_cluster, f"{orbit_shared_topic}-anew"
    start = read_up(cluster, topic)
    clock = ManualClock()
    with (
        driver(cluster, topic, clock=clock) as strict,
        driver(cluster, topic, clock=clock, failOnDataLoss="false") as stream,
    ):
        for each in (strict, stream):
            assert each.latest_offset(start, limit=None) == start
        make_anew(cluster, topic, count)
        clock.time += 30.0

        with pytest.raises(DataLost, match=f"{topic}@broker-a:0 {MADE_ANEW[count]}"):
            strict.latest_offset(start, limit=None)
        end = stream.latest_offset(start, limit=None)

        assert taken(stream, start, end) == {("broker-a", 0): (0, count)}
        assert stream.latest_offset(end, limit=None) == end


def test_a_batch_that_was_planned_unawares_is_followed_by_what_it_passed_over(
    orbit_shared_cluster, orbit_shared_topic
):
    """Marks are looked at now and then, and not renewed in between."""
    cluster, topic = orbit_shared_cluster, f"{orbit_shared_topic}-anew"
    position = read_up(cluster, topic)
    send(cluster, topic, 10, queues=1)
    clock = ManualClock()
    with driver(cluster, topic, clock=clock, failOnDataLoss="false") as stream:
        start = stream.latest_offset(position, limit=None)
        make_anew(cluster, topic, 40)

        unawares = stream.latest_offset(start, limit=None)
        assert taken(stream, start, unawares) == {("broker-a", 0): (20, 40)}
        clock.time += 30.0
        end = stream.latest_offset(unawares, limit=None)
        assert taken(stream, unawares, end) == {("broker-a", 0): (0, 40)}

    with driver(cluster, topic) as stream, pytest.raises(DataLost, match="it was created again"):
        stream.latest_offset(unawares, limit=None)


def test_a_batch_that_is_repeated_does_not_read_on_in_a_queue_that_was_made_anew(
    orbit_shared_cluster, orbit_shared_topic
):
    cluster, topic = orbit_shared_cluster, f"{orbit_shared_topic}-anew"
    start = read_up(cluster, topic)
    send(cluster, topic, 10, queues=1)
    with driver(cluster, topic) as stream:
        planned = as_logged(stream.latest_offset(start, limit=None))
    make_anew(cluster, topic, 40)

    with driver(cluster, topic) as stream, pytest.raises(DataLost, match="it was created again"):
        stream.partitions(start, planned)
    with driver(cluster, topic, failOnDataLoss="false") as stream:
        assert taken(stream, start, planned) == {("broker-a", 0): (0, 20)}
        end = stream.latest_offset(planned, limit=None)
        # Once more, rather than not at all: the end that was logged is about the former queue.
        assert taken(stream, planned, end) == {("broker-a", 0): (0, 40)}


def test_of_a_queue_that_lost_its_end_only_what_came_later_is_read_again(
    orbit_cluster, orbit_topic, orbit_broker
):
    """Other messages have the offsets of those that were lost."""
    orbit_cluster.create_topic("cut", queues=1)
    fill(orbit_broker, "cut", numbered(5))
    orbit_cluster.clock.advance(100)
    lost_at = round(orbit_cluster.clock.now() * 1000)
    orbit_cluster.clock.advance(100)
    fill(orbit_broker, "cut", numbered(20))
    queue = Queue("cut", "broker-a", 0)
    start = to_json({queue: 12}, marks={queue: Mark(11, lost_at)})

    with driver(orbit_cluster, "cut") as stream, pytest.raises(DataLost, match="lost its end"):
        stream.latest_offset(start, limit=None)
    with driver(orbit_cluster, "cut", failOnDataLoss="false") as stream:
        end = stream.latest_offset(start, limit=None)
        assert taken(stream, start, end) == {("broker-a", 0): (5, 25)}


def test_a_mark_that_has_expired_stops_nobody_and_is_followed_by_another(forgetful):
    cluster, low = forgetful
    queue = Queue("orders", "broker-a", 0)
    start = to_json({queue: low}, marks={queue: Mark(low - 1, 1)})

    with driver(cluster, "orders") as stream:
        end = stream.latest_offset(start, limit=None)
        assert taken(stream, start, end) == {("broker-a", 0): (low, 5000)}
        assert marks_in(end)[queue].offset == 4999


def test_marks_cost_a_message_of_each_queue_now_and_then_and_not_with_every_batch(
    orbit_shared_cluster, orbit_shared_topic
):
    cluster, topic = orbit_shared_cluster, orbit_shared_topic
    send(cluster, topic, 400)
    clock = ManualClock()
    with driver(cluster, topic, clock=clock, startingOffsets="earliest") as stream:
        asked: list[Queue] = []
        stored_at = stream.cluster.stored_at

        def noted(offsets):
            asked.extend(offsets)
            return stored_at(offsets)

        stream.cluster.stored_at = noted  # type: ignore[method-assign]
        position = begun(stream)
        for _ in range(20):
            end = stream.latest_offset(position, limit=16)
            taken(stream, position, end)
            position = end
            clock.time += 1.0
        in_twenty_batches = len(asked)
        clock.time += 30.0
        stream.latest_offset(position, limit=16)

    assert in_twenty_batches == 4
    # It is looked whether they are still there, and they are renewed.
    assert len(asked) == 12


def test_marks_are_renewed_also_where_most_looks_find_nothing_new(
    orbit_shared_cluster, orbit_shared_topic
):
    """An idle stream looks, too, and marks that are never renewed expire."""
    cluster, topic = orbit_shared_cluster, f"{orbit_shared_topic}-idle"
    position = read_up(cluster, topic)
    queue = Queue(topic, "broker-a", 0)
    clock = ManualClock()
    offsets = []
    with driver(cluster, topic, clock=clock) as stream:
        for _ in range(4):
            for _ in range(3):
                assert stream.latest_offset(position, limit=None) == position
                clock.time += 10.1
            send(cluster, topic, 10, queues=1)
            position = stream.latest_offset(position, limit=None)
            offsets.append(marks_in(position)[queue].offset)

    assert offsets == [19, 29, 39, 49]


def test_a_silent_broker_keeps_its_marks(orbit_shared_cluster):
    cluster, topic = orbit_shared_cluster, "marks-of-the-silent"
    start = read_up(cluster, topic)
    send(cluster, topic, 10, queues=1)
    with driver(cluster, topic) as stream:

        def silent(offsets):
            return QueueResults(failures=dict.fromkeys(offsets, OrbitError("no answer")))

        stream.cluster.stored_at = silent  # type: ignore[method-assign]
        end = stream.latest_offset(start, limit=None)

    assert reached(end) == at(topic, 20)
    assert marks_in(end) == marks_in(start) != {}


# ---- the group


def test_rule_5_the_last_batch_is_told_to_the_broker_too(orbit_shared_cluster, orbit_shared_topic):
    """Spark says that a batch is done only when it has another one; it asks for it before."""
    send(orbit_shared_cluster, orbit_shared_topic, 40)

    with driver(
        orbit_shared_cluster, orbit_shared_topic, group="counted", startingOffsets="earliest"
    ) as stream:
        start = begun(stream)
        end = stream.latest_offset(start, limit=None)
        stream.partitions(start, end)
        in_between = orbit_shared_cluster.progress("counted", orbit_shared_topic)
        stream.latest_offset(end, limit=None)

        assert set(in_between.values()) <= {0}
        assert orbit_shared_cluster.progress("counted", orbit_shared_topic) == {
            ("broker-a", n): 10 for n in range(4)
        }


def test_of_a_trigger_that_makes_one_batch_the_broker_hears_with_the_next_run(
    orbit_shared_cluster, orbit_shared_topic
):
    """Spark ends it without a word, and whether the batch was written is not known till then."""
    cluster, topic = orbit_shared_cluster, orbit_shared_topic
    send(cluster, topic, 40)
    given = {"group": f"once-{topic}", "startingOffsets": "earliest"}

    with driver(cluster, topic, options=given) as stream:
        start = stream.initial_offset()
        end = stream.latest_offset(start, limit=None, take_all=True)
        assert len(taken(stream, start, end)) == 4
    unheard = cluster.progress(f"once-{topic}", topic)
    with driver(cluster, topic, options=given) as stream:
        assert stream.latest_offset(end, limit=None, take_all=True) == end

    assert unheard == {}
    assert cluster.progress(f"once-{topic}", topic) == {("broker-a", n): 10 for n in range(4)}


def test_progress_is_not_told_unless_it_is_wanted(orbit_shared_cluster, orbit_shared_topic):
    send(orbit_shared_cluster, orbit_shared_topic, 40)

    with driver(
        orbit_shared_cluster,
        orbit_shared_topic,
        group="silent",
        commitProgress="false",
        startingOffsets="earliest",
    ) as stream:
        end = stream.latest_offset(stream.initial_offset(), limit=None)
        stream.latest_offset(end, limit=None)
        stream.finished(end)

    assert orbit_shared_cluster.progress("silent", orbit_shared_topic) == {}


def test_a_report_that_fails_is_made_again_and_stops_nothing(
    orbit_cluster, orbit_topic, orbit_broker
):
    fill(orbit_broker, orbit_topic, numbered(40, queues=4))
    clock = ManualClock()

    with driver(
        orbit_cluster, orbit_topic, group="g", startingOffsets="earliest", clock=clock
    ) as stream:
        end = stream.latest_offset(begun(stream), limit=None)
        report = stream.cluster.report

        def failing(_):
            return CommitResult({Queue(orbit_topic, "broker-a", 2): SourceError("no")})

        stream.cluster.report = failing  # type: ignore[method-assign]
        assert stream.latest_offset(end, limit=None) == end
        stream.cluster.report = report  # type: ignore[method-assign]
        stream.latest_offset(end, limit=None)
        too_soon = orbit_cluster.progress("g", orbit_topic)
        clock.time += 1.0
        stream.latest_offset(end, limit=None)

    assert too_soon.get(("broker-a", 2)) != 10
    assert orbit_cluster.progress("g", orbit_topic)["broker-a", 2] == 10


def test_a_broker_that_hangs_delays_few_reports_and_none_to_others(two_brokers):
    cluster, topic = two_brokers
    clock = ManualClock()
    group = f"hangs-{topic}"
    with driver(cluster, topic, group=group, clock=clock) as stream:
        report = stream.cluster.report
        began = clock.time
        hung = 0.0

        def hanging(positions):
            nonlocal hung
            answering = {each: at for each, at in positions.items() if each.broker == "broker-a"}
            if len(answering) < len(positions):
                clock.time += 6.0
                hung += 6.0
            assert not report(answering).failures
            hanging = positions.keys() - answering.keys()
            return CommitResult(
                dict.fromkeys(hanging, SourceError("no")), dict.fromkeys(hanging, 6.0)
            )

        stream.cluster.report = hanging  # type: ignore[method-assign]
        for step in range(400):
            stream.finished({topic: {"broker-a:0": 1 + step // 100, "broker-b:0": 1}})
            assert cluster.progress(group, topic) == {("broker-a", 0): 1 + step // 100}
            clock.time += 2.0

    assert hung >= 12.0
    assert hung <= 0.15 * (clock.time - began)


def test_a_report_is_repeated_now_and_then(orbit_shared_cluster, orbit_shared_topic):
    """A broker that was killed comes back with the progress that it had saved before."""
    cluster, topic = orbit_shared_cluster, orbit_shared_topic
    send(cluster, topic, 40)
    clock = ManualClock()
    group = f"repeated-{topic}"
    position = at(topic, 7, 7, 7, 7)
    with driver(cluster, topic, group=group, clock=clock) as stream:
        stream.latest_offset(position, limit=None)
        # As if the broker had not saved it.
        stream.cluster.report({Queue(topic, "broker-a", 2): 3})
        stream.latest_offset(position, limit=None)
        before = cluster.progress(group, topic)
        clock.time += 30.0
        stream.latest_offset(position, limit=None)

    assert before["broker-a", 2] == 3
    assert cluster.progress(group, topic) == {("broker-a", n): 7 for n in range(4)}


def test_a_repetition_sets_nobody_back(orbit_shared_cluster, orbit_shared_topic):
    cluster, topic = orbit_shared_cluster, orbit_shared_topic
    send(cluster, topic, 40)
    clock = ManualClock()
    group = f"shared-{topic}"
    position = at(topic, 7, 7, 7, 7)
    with driver(cluster, topic, group=group, clock=clock) as stream:
        stream.latest_offset(position, limit=None)
        # As another member of the group does.
        stream.cluster.report({Queue(topic, "broker-a", 2): 9})
        clock.time += 30.0
        stream.latest_offset(position, limit=None)

    assert cluster.progress(group, topic)["broker-a", 2] == 9


@pytest.mark.parametrize("offset", [3, 9])
def test_a_repetition_leaves_a_reset_that_nobody_has_taken_yet(
    orbit_shared_cluster, orbit_shared_topic, offset
):
    cluster, topic = orbit_shared_cluster, orbit_shared_topic
    send(cluster, topic, 40)
    clock = ManualClock()
    group = f"reset-{topic}"
    queue = Queue(topic, "broker-a", 2)
    position = at(topic, 7, 7, 7, 7)
    with driver(cluster, topic, group=group, clock=clock) as stream:
        stream.latest_offset(position, limit=None)
        with Admin(name_server=cluster.name_server) as admin:
            admin.progress.reset(group, topic, ResetTo.by_queue({queue: offset}))
        clock.time += 30.0
        stream.latest_offset(position, limit=None)

    assert cluster.progress(group, topic)["broker-a", 2] == offset


def test_a_repetition_that_fails_is_made_again_and_is_still_none_of_its_own(
    orbit_shared_cluster, orbit_shared_topic
):
    cluster, topic = orbit_shared_cluster, orbit_shared_topic
    send(cluster, topic, 40)
    clock = ManualClock()
    group = f"again-{topic}"
    position = at(topic, 7, 7, 7, 7)
    with driver(cluster, topic, group=group, clock=clock) as stream:
        stream.latest_offset(position, limit=None)
        stream.cluster.report({Queue(topic, "broker-a", 1): 3, Queue(topic, "broker-a", 2): 9})
        repeat = stream.cluster.repeat

        def failing(positions):
            return CommitResult(dict.fromkeys(positions, SourceError("no")))

        stream.cluster.repeat = failing  # type: ignore[method-assign]
        clock.time += 30.0
        stream.latest_offset(position, limit=None)
        stream.cluster.repeat = repeat  # type: ignore[method-assign]
        clock.time += 1.0
        stream.latest_offset(position, limit=None)

    told = cluster.progress(group, topic)
    assert [told["broker-a", number] for number in range(4)] == [7, 7, 9, 7]


def test_a_member_says_where_all_queues_stand_also_after_a_report_of_some(
    orbit_shared_cluster, orbit_shared_topic
):
    cluster, topic = orbit_shared_cluster, orbit_shared_topic
    with driver(cluster, topic, group=f"whole-{topic}") as stream:
        stream.finished(at(topic, 1, 1, 1, 1))
        stream.finished(at(topic, 1, 2, 1, 1))
        member = stream.cluster._member

        assert member is not None
        assert member.positions == from_json(at(topic, 1, 2, 1, 1))


def members(cluster: EmbeddedCluster, group: str) -> list[str]:
    def look() -> list[str]:
        consumers = cluster._cluster.brokers[0].parts.consumers
        return [member.client.id for member in consumers.members(group)]

    return cluster._call(look)


def test_the_driver_is_a_member_of_its_group(orbit_cluster, orbit_topic):
    with driver(orbit_cluster, orbit_topic, group="seen") as stream:
        begin = stream.latest_offset(stream.initial_offset(), limit=None)
        stream.latest_offset(begin, limit=None)

        assert len(members(orbit_cluster, "seen")) == 1
    assert members(orbit_cluster, "seen") == []


def test_other_members_of_the_group_are_named(orbit_cluster, orbit_topic, caplog):
    caplog.set_level(logging.WARNING, "orbitmq.spark")
    with (
        driver(orbit_cluster, orbit_topic, group="shared") as one,
        driver(orbit_cluster, orbit_topic, group="shared") as other,
    ):
        for stream in (one, other):
            begin = stream.latest_offset(stream.initial_offset(), limit=None)
            stream.latest_offset(begin, limit=None)
        (first, *_) = members(orbit_cluster, "shared")

    assert "group shared has other members" in caplog.text
    assert first in caplog.text
