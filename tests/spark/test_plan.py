"""Plans: every offset once, none twice, ends exclusive, limits kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import QueueRange, RangeAccess, RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.spark.options import DataLost, batch_options
from orbitmq.spark.plan import batch_ends, partition
from orbitmq.spark.readers import RangePartition, RocketMQBatchReader
from orbitmq.spark.source import full_schema
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, numbered

A, B, C = (Queue("orders", "broker-a", number) for number in range(3))


def range_of(queue: Queue, start: int, length: int) -> QueueRange:
    return QueueRange(queue, start, start + length)


ranges = st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 5000)), max_size=12).map(
    lambda found: [
        range_of(Queue("orders", "broker-a", number), start, length)
        for number, (start, length) in enumerate(found)
    ]
)
maybe = st.one_of(st.none(), st.integers(1, 40))


@given(
    wanted=ranges,
    min_partitions=maybe,
    max_records=st.one_of(st.none(), st.integers(1, 3000)),
    small=st.integers(1, 10_000),
)
def test_every_offset_is_in_one_partition(wanted, min_partitions, max_records, small):
    parts = partition(wanted, min_partitions=min_partitions, max_records=max_records, small=small)

    # Put together again in order, the pieces are the ranges.
    pieces = [piece for part in parts for piece in part]
    again: dict[Queue, QueueRange] = {}
    for piece in pieces:
        assert len(piece) > 0
        before = again.get(piece.queue)
        assert before is None or before.end == piece.start
        start = piece.start if before is None else before.start
        again[piece.queue] = QueueRange(piece.queue, start, piece.end)
    assert sorted(again.values()) == sorted(each for each in wanted if len(each))
    assert all(parts)


@given(wanted=ranges, min_partitions=st.integers(1, 40), small=st.integers(1, 10_000))
def test_there_are_as_many_partitions_as_asked_for(wanted, min_partitions, small):
    parts = partition(wanted, min_partitions=min_partitions, small=small)

    assert len(parts) >= min(min_partitions, sum(map(len, wanted)))


@given(wanted=ranges, max_records=st.integers(1, 3000), min_partitions=maybe)
def test_no_partition_has_more_records_than_allowed(wanted, max_records, min_partitions):
    parts = partition(wanted, max_records=max_records, min_partitions=min_partitions)

    assert all(sum(map(len, part)) <= max_records for part in parts)


def test_small_queues_are_shared_out_evenly():
    wanted = [range_of(queue, 0, 6000) for queue in (A, B, C)]
    wanted.append(range_of(Queue("orders", "broker-c", 9), 0, 6000))

    parts = partition(wanted, small=16_000)

    assert [sum(map(len, part)) for part in parts] == [12_000, 12_000]


def test_a_big_queue_has_a_task_of_its_own_and_keeps_its_order():
    big = range_of(B, 0, 10**7)

    parts = partition([range_of(A, 0, 20_000), big, range_of(C, 0, 5)])

    assert [each for part in parts for each in part if each.queue == B] == [big]
    assert len(parts) >= 2


backlogs = st.dictionaries(
    st.builds(Queue, st.just("t"), st.just("a"), st.integers(0, 30)),
    st.tuples(st.integers(0, 10**12), st.integers(0, 10**6)),
    min_size=1,
    max_size=15,
)


@given(backlog=backlogs, limit=st.integers(1, 10**6))
def test_a_limit_is_shared_in_proportion(backlog, limit):
    start = {queue: at for queue, (at, _) in backlog.items()}
    available = {queue: at + size for queue, (at, size) in backlog.items()}

    ends = batch_ends(start, available, limit)

    taken = {queue: ends[queue] - start[queue] for queue in start}
    busy = [queue for queue, (_, size) in backlog.items() if size]
    total = sum(size for _, size in backlog.values())
    assert all(0 <= taken[queue] <= backlog[queue][1] for queue in start)
    assert sum(taken.values()) == min(total, max(limit, len(busy)))
    assert all(taken[queue] for queue in busy), "no queue starves"
    for queue in busy:
        share = limit * backlog[queue][1] / total
        assert taken[queue] <= max(1, min(backlog[queue][1], share + 1))
        if limit >= total:
            assert taken[queue] == backlog[queue][1]


@given(backlog=backlogs, limit=st.integers(1, 10**6), more=st.integers(0, 100))
def test_batches_follow_each_other_without_gap_until_the_end(backlog, limit, more):
    position = {queue: at for queue, (at, _) in backlog.items()}
    available = {queue: at + size for queue, (at, size) in backlog.items()}
    limit += sum(size for _, size in backlog.values()) // 50 + more

    batches = 0
    while (ends := batch_ends(position, available, limit)) != position:
        assert all(ends[queue] >= at for queue, at in position.items())
        position = ends
        batches += 1
        assert batches < 1000

    assert position == available


def test_a_queue_that_ends_before_it_begins_stays_where_it_is():
    assert batch_ends({A: 50, B: 0}, {A: 5, B: 7}, 100) == {A: 50, B: 7}


def test_a_queue_of_unknown_end_stays_where_it_is():
    assert batch_ends({A: 50, B: 0}, {B: 7}, None) == {A: 50, B: 7}


# ---- batch reads


def planned(cluster: EmbeddedCluster, topic: str, **options: str) -> dict[int, tuple[int, int]]:
    """The offsets that tasks would read, by queue."""
    given = {"nameServer": cluster.name_server, "subscribe": topic} | options
    reader = RocketMQBatchReader(batch_options(given, {}), full_schema(include_properties=True))
    found: dict[int, tuple[int, int]] = {}
    for part in reader.partitions():
        assert isinstance(part, RangePartition)
        for each in part.ranges:
            assert each.queue.id not in found
            found[each.queue.id] = (each.start, each.end)
    return found


def at(topic: str, *offsets: int) -> str:
    return json.dumps({topic: {f"broker-a:{number}": each for number, each in enumerate(offsets)}})


@pytest.fixture
def topic(cluster, topic):
    """Four queues of ten messages."""
    fill(cluster.broker_addresses[0], topic, numbered(40, queues=4))
    return topic


def test_the_progress_of_a_group_in_a_topic_that_was_made_anew_is_a_loss(cluster, topic):
    group = f"readers-of-{topic}"
    reported = {Queue(topic, "broker-a", number): 5 * number for number in range(4)}
    with RangeCluster(RangeAccess(name_servers=(cluster.name_server,)), group) as known:
        known.queues([topic])
        known.join([topic], RangeFilter())
        assert not known.report(reported).failures
    options = {"startingOffsets": "group", "group": group}

    with pytest.raises(DataLost, match=r"broker-a:3 is to be read from offset 15 on and has 0 to"):
        planned(cluster, topic, **options)
    found = planned(cluster, topic, failOnDataLoss="false", **options)
    assert found == {0: (0, 10), 1: (5, 10)}
    # A group that has read more than is wanted leaves nothing to read, which is no loss.
    assert planned(cluster, topic, queues="0,1,2", endingOffsets=at(topic, 3, 3, 3), **options) == {
        0: (0, 3)
    }
