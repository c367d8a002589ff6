"""Plans: every offset once, none twice, ends exclusive, limits kept."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.ranges.cluster import RangeCluster, Sample
from orbitmq.client.ranges.connections import QueueRange, RangeAccess, RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.spark.options import DataLost, batch_options
from orbitmq.spark.plan import ByteEstimate, batch_ends, between, ends_within_bytes, partition
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


BIG, SMALL = (Queue("big", "broker-a", 0), Queue("small", "broker-a", 0))


@pytest.mark.feature("T2")
@pytest.mark.parametrize(
    ("limit", "least", "taken"),
    [
        (1000, 0, (999, 1)),
        (1000, 100, (901, 99)),  # it has no more
        (1000, 50, (950, 50)),
        (100, 80, (50, 50)),  # no room for the minimum: equal parts
        (None, 50, (100_000, 99)),
    ],
)
def test_each_topic_gets_its_minimum_before_the_rest_is_divided(limit, least, taken):
    ends = batch_ends({BIG: 0, SMALL: 0}, {BIG: 100_000, SMALL: 99}, limit, min_rows=least)

    assert (ends[BIG], ends[SMALL]) == pytest.approx(taken, abs=1)


@given(
    big=st.integers(1, 10**9),
    small=st.integers(1, 10**4),
    limit=st.integers(4, 10**6),
    least=st.integers(1, 2000),
)
def test_no_topic_starves_behind_a_bigger_one(big, small, limit, least):
    backlog = {Queue("big", "broker-a", 0): big, A: small, B: small // 2}
    start = dict.fromkeys(backlog, 7)

    ends = batch_ends(
        start, {queue: 7 + size for queue, size in backlog.items()}, limit, min_rows=least
    )

    taken = {queue: ends[queue] - 7 for queue in backlog}
    assert all(0 <= taken[queue] <= size for queue, size in backlog.items())
    assert sum(taken.values()) <= max(limit, 3)
    assert taken[A] + taken[B] >= min(small + small // 2, least, limit // 2)


@pytest.mark.feature("T2")
@pytest.mark.parametrize(
    ("limit", "least", "taken"),
    [
        (10**9, 0, (1000, 1000)),  # all fit
        (110_000, 0, (100, 100)),  # both in proportion to their bytes
        (1, 0, (1, 1)),  # none starves
        (200_000, 1000, (100, 1000)),
    ],
)
def test_a_batch_is_cut_to_its_bytes(limit, least, taken):
    sizes = {BIG: 1000, SMALL: 100}
    estimates = {
        queue: ByteEstimate(5, 1005, [Sample(5, 0, size)]) for queue, size in sizes.items()
    }

    ends = ends_within_bytes(
        {BIG: 5, SMALL: 5}, {BIG: 1005, SMALL: 1005}, estimates, limit, min_rows=least
    )

    assert (ends[BIG] - 5, ends[SMALL] - 5) == taken


def test_the_commit_log_bounds_what_samples_leave_open():
    """Ten messages: the sixth has 1,000 bytes, the others 10, and the log has no other queue."""
    sizes = [10] * 5 + [1000] + [10] * 4
    places = list(accumulate([0, *sizes]))
    samples = {at: Sample(at, places[at], sizes[at]) for at in range(10)}
    ends_only = ByteEstimate(0, 10, [samples[0], samples[9]])

    assert ends_only.most == sum(sizes)
    assert ends_only.total == 100
    assert ends_only.doubts(8) == (2, 4, 6)
    closer = ByteEstimate(0, 10, [samples[at] for at in (0, 2, 4, 6, 9)])
    assert closer.doubts(8) == (5,)
    exact = ByteEstimate(0, 10, samples.values())
    assert (exact.total, exact.doubts(8)) == (sum(sizes), ())
    assert [exact.rows_within(size) for size in (1, 35, 50, 1049, 1050, 9999)] == [
        1,
        3,
        5,
        5,
        6,
        10,
    ]


def test_a_range_without_samples_has_messages_of_the_usual_size():
    unknown = ByteEstimate(100, 200, [], usual=50)

    assert (unknown.rows, unknown.total, unknown.most, unknown.doubts(8)) == (100, 5000, None, ())
    assert unknown.rows_within(1000) == 20


@pytest.mark.parametrize(
    ("low", "high", "offsets"),
    [(0, 1, ()), (0, 2, (1,)), (10, 14, (11, 12, 13)), (0, 100, (25, 50, 75))],
)
def test_samples_are_spread_over_the_range(low, high, offsets):
    assert between(low, high, 3) == offsets


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


@pytest.mark.feature("T3")
def test_a_batch_reads_a_number_of_messages_before_the_end(cluster, topic):
    assert planned(cluster, topic, startingOffsets="-3") == dict.fromkeys(range(4), (7, 10))
    assert planned(cluster, topic, startingOffsets="-1000", endingOffsets="-4") == dict.fromkeys(
        range(4), (0, 6)
    )
    # An end before the start is an empty range.
    assert planned(cluster, topic, startingOffsets="-3", endingOffsets="-5") == {}


@pytest.mark.feature("T3")
def test_a_batch_reads_what_is_not_older_than_an_age(cluster, topic):
    assert planned(cluster, topic, startingTimestamp="-1h") == dict.fromkeys(range(4), (0, 10))
    assert planned(cluster, topic, endingTimestamp="-1h") == {}
    assert planned(cluster, topic, startingTimestamp="now") == {}


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
