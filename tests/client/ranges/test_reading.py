"""Ranges read from real brokers: whole, in order, and through what brokers do meanwhile."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.errors import BrokerUnavailable, NoNameServer
from orbitmq.client.ranges.connections import (
    Credentials,
    OffsetsGone,
    QueueRange,
    RangeAccess,
    RangeConnections,
    RangeFilter,
)
from orbitmq.client.ranges.read import (
    Chunk,
    Missing,
    ProgressReset,
    RangeSettings,
    WindowLimits,
    read_ranges,
)
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.message.stored import StoredMessage, decode_messages
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import Sent, fill, forget_old, numbered, with_small_files

DEADLINE = 30.0


def messages_of(chunks: Iterator[Chunk] | Sequence[Chunk]) -> list[StoredMessage]:
    return [
        message
        for chunk in chunks
        for piece in chunk.pieces
        for message in decode_messages(bytes(piece))
    ]


def whole(topic: str, queue_id: int, count: int) -> QueueRange:
    return QueueRange(Queue(topic, "broker-a", queue_id), 0, count)


def test_ranges_come_whole_and_in_order(links, orbit_shared_cluster, orbit_shared_topic):
    fill(orbit_shared_cluster.broker_addresses[0], orbit_shared_topic, numbered(5000, queues=2))
    ranges = [
        QueueRange(Queue(orbit_shared_topic, "broker-a", 1), 100, 2100),
        QueueRange(Queue(orbit_shared_topic, "broker-a", 0), 0, 2500),
    ]

    found = messages_of(read_ranges(links, ranges, group="readers"))

    assert [(each.queue_id, each.queue_offset) for each in found] == [
        *((1, offset) for offset in range(100, 2100)),
        *((0, offset) for offset in range(2500)),
    ]
    assert [int(each.body) for each in found[:3]] == [201, 203, 205]


def test_a_reader_that_is_left_early_leaves_no_answers_to_the_next(
    links, orbit_shared_cluster, orbit_shared_topic
):
    fill(orbit_shared_cluster.broker_addresses[0], orbit_shared_topic, numbered(5000))
    reading = read_ranges(links, [whole(orbit_shared_topic, 0, 5000)], group="readers")

    first = next(reading)
    reading.close()  # type: ignore[attr-defined]  # it is a generator
    again = messages_of(read_ranges(links, [whole(orbit_shared_topic, 0, 5000)], group="readers"))

    assert first.start == 0
    assert [each.queue_offset for each in again] == list(range(5000))


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (RangeFilter("red"), lambda number: number % 3 == 0),
        (RangeFilter("red || green"), lambda number: number % 3 < 2),
        (RangeFilter("absent"), lambda _: False),
        (RangeFilter("size >= 2000", "SQL92"), lambda number: number >= 2000),
        (RangeFilter("TAGS = 'blue' AND size < 300", "SQL92"), lambda n: n % 3 == 2 and n < 300),
    ],
    ids=lambda value: getattr(value, "expression", ""),
)
def test_the_broker_leaves_out_what_is_not_wanted(
    links, orbit_shared_cluster, orbit_shared_topic, wanted, chosen
):
    colours = ("red", "green", "blue")
    fill(
        orbit_shared_cluster.broker_addresses[0],
        orbit_shared_topic,
        [
            Sent(b"%d" % number, 0, {"TAGS": colours[number % 3], "size": str(number)})
            for number in range(3000)
        ],
    )

    found = messages_of(
        read_ranges(links, [whole(orbit_shared_topic, 0, 3000)], group="readers", wanted=wanted)
    )

    assert callable(chosen)
    assert [int(each.body) for each in found] == [n for n in range(3000) if chosen(n)]


def test_an_offset_beyond_the_end_is_an_error_with_both_ranges_or_left_out(
    links, orbit_shared_cluster, orbit_shared_topic
):
    fill(orbit_shared_cluster.broker_addresses[0], orbit_shared_topic, numbered(100))
    wanted = QueueRange(Queue(orbit_shared_topic, "broker-a", 0), 50, 150)
    settings = RangeSettings(lag_patience=0.2)

    with pytest.raises(OffsetsGone) as raised:
        messages_of(read_ranges(links, [wanted], group="readers", settings=settings))

    assert (raised.value.wanted, raised.value.low, raised.value.high) == (wanted, 0, 100)
    assert "was asked for offsets 50 to 150 (exclusive) and has 0 to 100" in str(raised.value)
    copy = pickle.loads(pickle.dumps(raised.value))  # noqa: S301  # our own
    assert (copy.wanted, copy.low, str(copy)) == (wanted, 0, str(raised.value))
    skipping = replace(settings, missing=Missing.SKIP)
    found = messages_of(read_ranges(links, [wanted], group="readers", settings=skipping))
    assert [each.queue_offset for each in found] == list(range(50, 100))


def test_expired_offsets_are_an_error_or_left_out():
    with EmbeddedCluster(adjust=with_small_files) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(5000, size=300))
        low = forget_old(cluster, "orders")
        links = RangeConnections(RangeAccess(name_servers=(cluster.name_server,)))
        wanted = whole("orders", 0, 5000)
        skipping = RangeSettings(missing=Missing.SKIP)

        with pytest.raises(OffsetsGone, match=f"has {low} to 5000"):
            messages_of(read_ranges(links, [wanted], group="readers"))
        found = messages_of(read_ranges(links, [wanted], group="readers", settings=skipping))
        links.close()

    assert 0 < low < 5000
    assert [each.queue_offset for each in found] == list(range(low, 5000))


def test_a_topic_that_is_not_there_is_named(links):
    settings = RangeSettings(patience=0.3)
    wanted = QueueRange(Queue("no-such-topic", "broker-a", 0), 0, 1)

    with pytest.raises(BrokerUnavailable, match="no broker serves topic 'no-such-topic'"):
        messages_of(read_ranges(links, [wanted], group="readers", settings=settings))


def test_a_queue_that_is_not_there_is_refused_at_once(links, orbit_shared_topic):
    wanted = QueueRange(Queue(orbit_shared_topic, "broker-a", 77), 0, 1)

    with pytest.raises(BrokerRefused, match=r"queueId\[77\] is illegal"):
        messages_of(read_ranges(links, [wanted], group="readers"))


def test_reading_goes_on_after_the_broker_was_restarted(orbit_cluster, orbit_topic, orbit_broker):
    fill(orbit_broker, orbit_topic, numbered(20_000))
    links = RangeConnections(RangeAccess(name_servers=(orbit_cluster.name_server,)))
    found: list[StoredMessage] = []

    reading = read_ranges(
        links,
        [whole(orbit_topic, 0, 20_000)],
        group="readers",
        settings=RangeSettings(patience=DEADLINE, window=WindowLimits(requests=4)),
    )
    for chunk in reading:
        found += messages_of([chunk])
        if 5000 <= len(found) < 5032:
            orbit_cluster.restart_broker()
    links.close()

    assert [int(each.body) for each in found] == list(range(20_000))


def test_progress_of_the_group_is_left_alone(links, orbit_shared_cluster, orbit_shared_topic):
    fill(orbit_shared_cluster.broker_addresses[0], orbit_shared_topic, numbered(100))

    messages_of(read_ranges(links, [whole(orbit_shared_topic, 0, 100)], group="watched"))

    assert orbit_shared_cluster.progress("watched", orbit_shared_topic) == {}


def test_secrets_are_not_shown():
    access = RangeAccess(
        name_servers=("localhost:9876",),
        credentials=Credentials(
            access_key="reader",
            secret_key="hidden-1",  # noqa: S106  # not one
            security_token="hidden-2",  # noqa: S106
        ),
    )

    assert "hidden" not in repr(access)
    assert pickle.loads(pickle.dumps(access)) == access  # noqa: S301  # our own
    assert hash(access) == hash(replace(access))


def test_a_reset_of_the_group_is_reported_until_another_member_takes_it(orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(20))
    queue = Queue("orders", "broker-a", 0)
    with Admin(name_server=orbit_cluster.name_server) as admin:
        admin.groups.create("billing")
        admin.progress.reset("billing", "orders", ResetTo.by_queue({queue: 3}))
    links = RangeConnections(RangeAccess(name_servers=(orbit_cluster.name_server,)))

    def read(*, tells_resets):
        settings = RangeSettings(tells_resets=tells_resets)
        return list(
            read_ranges(links, [QueueRange(queue, 10, 20)], group="billing", settings=settings)
        )

    for _ in range(2):
        with pytest.raises(ProgressReset) as told:
            read(tells_resets=True)
        assert (told.value.queue, told.value.offset) == (queue, 3)
    others = read(tells_resets=False)
    again = read(tells_resets=True)
    links.close()

    assert [(chunk.start, chunk.end) for chunk in (*others, *again)] == [(10, 20)] * 2


def test_a_name_server_that_has_answered_once_may_go_away():
    with EmbeddedCluster() as cluster:
        address = cluster.name_server
        access = RangeAccess(name_servers=(address,))
        early = RangeConnections(access)
        early.check_reachable("a topic that nobody has")
        early.close()
    late = RangeConnections(access)

    early.check_reachable()
    with pytest.raises(NoNameServer, match=address):
        late.check_reachable()
