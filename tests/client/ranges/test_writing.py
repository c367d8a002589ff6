"""Frames of messages written by a thread that makes them: stored in order, or an error."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from orbitmq.client.errors import NoNameServer
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.ranges.write import Frame, RangeWriter, WritingSettings
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, SendFailed, SettingError
from orbitmq.message.stored import BatchElement
from orbitmq.testing.cluster import AsyncEmbeddedCluster, EmbeddedCluster


@pytest.fixture
def writer(access):
    # Small, so that writing waits when much is in flight.
    found = RangeWriter(access, "writers", WritingSettings(ahead_bytes=100_000))
    found.start()
    yield found
    found.stop()


def frame(queue: Queue, first: int, count: int, *, size: int = 0, bound: bool = False) -> Frame:
    elements = [
        BatchElement(b"%d" % number + b"." * size, 0, f"UNIQ_KEY\x01id-{number}\x02".encode())
        for number in range(first, first + count)
    ]
    return Frame(queue, elements, f"id-{first}", may_go_elsewhere=not bound)


def stored(cluster: EmbeddedCluster, topic: str) -> dict[int, list[int]]:
    """The numbers in each queue, in the order of the queue."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for message in cluster.messages(topic):
        number = int(message.body.rstrip(b"."))
        found[message.queue_id].append((message.queue_offset, number))
    return {queue: [number for _, number in sorted(pairs)] for queue, pairs in found.items()}


def test_each_queue_keeps_the_order_of_its_frames(writer, orbit_shared_cluster, orbit_shared_topic):
    queues = writer.queues(orbit_shared_topic)
    for number in range(100):
        writer.send(frame(queues[number % 4], number * 10, 10))

    writer.finish()

    found = stored(orbit_shared_cluster, orbit_shared_topic)
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(1000))
    assert all(numbers == sorted(numbers) for numbers in found.values())
    assert {len(numbers) for numbers in found.values()} == {250}


def test_messages_keep_the_ids_that_they_bring(writer, orbit_shared_cluster, orbit_shared_topic):
    (queue, *_) = writer.queues(orbit_shared_topic)
    writer.send(frame(queue, 0, 5))
    alone = BatchElement(b"5", 7, b"UNIQ_KEY\x01id-5\x02DELAY\x011\x02")
    writer.send(Frame(queue, [alone], "id-5", is_alone=True))

    writer.finish()
    orbit_shared_cluster.advance(2.0)

    found = {message.body: message for message in orbit_shared_cluster.messages(orbit_shared_topic)}
    assert {bytes(body) for body in found} >= {b"0", b"1", b"2", b"3", b"4"}
    assert found[b"3"].properties["UNIQ_KEY"] == "id-3"


def test_a_name_server_that_stays_away_is_said_to_be(dead):
    access = RangeAccess(name_servers=(dead,))
    writer = RangeWriter(access, "writers", WritingSettings(timeout=0.5))
    writer.start()
    try:
        with pytest.raises(NoNameServer, match="no name server answers"):
            writer.queues("orders")
    finally:
        writer.stop()


def test_a_restart_of_the_broker_loses_nothing_and_mixes_nothing_up(orbit_cluster, orbit_topic):
    writer = RangeWriter(RangeAccess(name_servers=(orbit_cluster.name_server,)), "writers")
    writer.start()
    queues = writer.queues(orbit_topic)

    for number in range(200):
        writer.send(frame(queues[number % 4], number * 10, 10, bound=True))
        if number == 100:
            orbit_cluster.restart_broker()
    writer.finish()
    writer.stop()

    found = stored(orbit_cluster, orbit_topic)
    assert set().union(*found.values()) == set(range(2000))
    for numbers in found.values():
        # A frame whose answer was lost is there twice, but never behind a later one only.
        first_seen = list(dict.fromkeys(numbers))
        assert first_seen == sorted(first_seen)


def test_what_is_refused_is_raised_and_nothing_follows_it(
    writer, orbit_shared_cluster, orbit_shared_topic
):
    queue = Queue(orbit_shared_topic, "broker-a", 77)

    writer.send(frame(queue, 0, 1, bound=True))
    writer.send(frame(queue, 1, 1, bound=True))
    with pytest.raises((BrokerRefused, SendFailed)):
        writer.finish()

    assert stored(orbit_shared_cluster, orbit_shared_topic) == {}
    writer.finish()  # the failure was told


def test_a_message_that_no_broker_takes_is_told_of_and_the_others_of_its_frame_are_stored(
    writer, orbit_shared_cluster, orbit_shared_topic
):
    (queue, *_) = writer.queues(orbit_shared_topic)
    mixed = frame(queue, 0, 9)
    large = BatchElement(b"4" + b"." * (4 * 1024 * 1024), 0, b"UNIQ_KEY\x01id-4\x02")
    elements = [*mixed.elements[:4], large, *mixed.elements[5:]]
    numbers = range(100, 109)

    writer.send(Frame(queue, elements, mixed.unique_id, numbers=numbers))
    writer.finish()
    (refusal,) = writer.take_refused()

    assert (refusal.number, refusal.reason.name) == (104, "MESSAGE_ILLEGAL")
    assert writer.take_refused() == ()
    assert stored(orbit_shared_cluster, orbit_shared_topic) == {queue.id: [0, 1, 2, 3, 5, 6, 7, 8]}
    ids = {each.properties["UNIQ_KEY"] for each in orbit_shared_cluster.messages(queue.topic)}
    assert len(ids) == 8


def test_after_a_failure_the_writer_can_be_used_again(
    writer, orbit_shared_cluster, orbit_shared_topic
):
    writer.send(frame(Queue(orbit_shared_topic, "broker-a", 77), 0, 1, bound=True))
    writer.abandon()

    writer.send(frame(Queue(orbit_shared_topic, "broker-a", 2), 5, 1))
    writer.finish()

    assert stored(orbit_shared_cluster, orbit_shared_topic) == {2: [5]}


async def test_a_frame_goes_elsewhere_when_its_broker_is_away():
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        await cluster.create_topic("orders", queues=1)
        access = RangeAccess(name_servers=(cluster.name_server,))
        writer = RangeWriter(access, "writers", WritingSettings(timeout=2.0))
        await asyncio.to_thread(writer.start)
        queues = await asyncio.to_thread(writer.queues, "orders")

        def write(number, place, *, bound=False):
            writer.send(frame(queues[place], number, 1, bound=bound))
            writer.finish()

        await asyncio.to_thread(write, 0, 0)
        await asyncio.to_thread(write, 1, 1)
        await cluster.brokers[1].stop()

        await asyncio.to_thread(write, 2, 1)

        assert cluster.brokers[0].parts.store.max_offset("orders", 0) == 2
        with pytest.raises(SendFailed):
            await asyncio.to_thread(write, 3, 1, bound=True)
        await asyncio.to_thread(writer.stop)


@pytest.mark.parametrize("name", ["timeout", "ahead_bytes"])
def test_settings_must_be_positive(name):
    with pytest.raises(SettingError, match=f"writing.{name} must be .*got 0"):
        WritingSettings(**{name: 0})
