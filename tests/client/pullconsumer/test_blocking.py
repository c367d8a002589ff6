"""The pull consumer for programs without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from orbitmq.client.errors import NotRunning, WrongUse
from orbitmq.client.producer.producer import Producer
from orbitmq.client.pullconsumer.errors import QueueNotAssigned
from orbitmq.client.pullconsumer.pullconsumer import PullConsumer
from orbitmq.client.queue import Queue
from orbitmq.testing import EmbeddedCluster
from tests.support.polling import BY_HAND, DEADLINE, GROUP, NO_TIMER, REBALANCE, TOPIC

QUEUE = Queue(TOPIC, "broker-a", 0)


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as cluster:
        cluster.create_topic(TOPIC, queues=1)
        yield cluster


def consumer(cluster: EmbeddedCluster, **changes: Any) -> PullConsumer:
    given: dict[str, Any] = {
        "name_server": cluster.name_server,
        "polling": NO_TIMER,
        "consume_from": "first",
        "rebalancing": REBALANCE,
    }
    return PullConsumer(GROUP, **(given | changes))


def send(cluster: EmbeddedCluster, count: int) -> None:
    with Producer("makers", name_server=cluster.name_server) as producer:
        for number in range(count):
            producer.send(TOPIC, b"%d" % number)


def progress(cluster: EmbeddedCluster) -> int | None:
    return cluster.progress(GROUP, TOPIC).get(("broker-a", 0))


@pytest.mark.feature("B2")
def test_messages_are_polled_and_committed_when_the_consumer_ends(
    cluster: EmbeddedCluster,
) -> None:
    send(cluster, 5)

    with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        first = reader.poll(DEADLINE, max_messages=3)
        second = reader.poll(timedelta(seconds=DEADLINE))

        assert [message.body for message in [*first, *second]] == [b"0", b"1", b"2", b"3", b"4"]
        assert reader.assignment() == (QUEUE,)
        assert reader.poll(0.01) == []
    assert progress(cluster) == 5


def test_an_iteration_that_is_left_gives_back_what_it_has_not_returned(
    cluster: EmbeddedCluster,
) -> None:
    send(cluster, 20)

    with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        for message in reader:
            if message.body == b"6":
                break
        assert reader.poll(DEADLINE, max_messages=1)[0].body == b"7"
        assert next(iter(reader)).body == b"8"
        assert reader.position(QUEUE) == 9
        assert next(iter(reader)).body == b"9"
        assert reader.commit() == {QUEUE: 10}
        assert next(iter(reader)).body == b"10"

    assert progress(cluster) == 11


def test_an_error_in_the_block_leaves_the_last_poll_uncommitted(cluster: EmbeddedCluster) -> None:
    send(cluster, 10)

    def work() -> None:
        with consumer(cluster) as reader:
            reader.subscribe(TOPIC)
            reader.poll(DEADLINE, max_messages=4)
            reader.poll(DEADLINE, max_messages=4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()

    assert progress(cluster) == 4


@pytest.mark.feature("G11")
def test_commits_by_hand_and_positions(cluster: EmbeddedCluster) -> None:
    send(cluster, 10)

    with consumer(cluster, polling=BY_HAND) as reader:
        reader.assign([QUEUE])
        found = reader.poll(DEADLINE, max_messages=4)
        assert reader.commit() == {QUEUE: 4}
        assert progress(cluster) == reader.committed(QUEUE) == 4
        assert reader.commit(found[0]) == {QUEUE: 1}

        reader.seek(QUEUE, 8)
        assert [message.body for message in reader.poll(DEADLINE)] == [b"8", b"9"]
        reader.seek_to_begin()
        assert reader.position(QUEUE) == 0
        reader.seek_to_time(0.0)
        reader.seek_to_end()
        assert reader.position(QUEUE) == 10
        assert reader.first_offsets() == {QUEUE: 0}
        assert reader.end_offsets() == {QUEUE: 10}
        assert reader.offsets_for_time(0.0) == {QUEUE: 0}
        assert reader.queues(TOPIC) == (QUEUE,)
        assert reader.lag() == {QUEUE: 0}
        with pytest.raises(QueueNotAssigned):
            reader.position(Queue(TOPIC, "broker-a", 5))
    assert progress(cluster) == 1


def test_record_batches_are_polled_too(cluster: EmbeddedCluster) -> None:
    send(cluster, 10)

    with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        batch = reader.poll_arrow(DEADLINE, min_messages=10, columns=["body"])

    assert batch.column("body").to_pylist() == [b"%d" % number for number in range(10)]
    assert progress(cluster) == 10


def test_a_queue_can_be_paused_from_another_thread(cluster: EmbeddedCluster) -> None:
    with consumer(cluster) as reader:
        reader.assign([QUEUE])
        pausing = threading.Thread(target=reader.pause)
        pausing.start()
        pausing.join(DEADLINE)
        send(cluster, 1)
        assert reader.poll(0.05) == []

        reader.resume(QUEUE)

        assert len(reader.poll(DEADLINE)) == 1
        assert reader.counts() is not None


def test_what_is_assigned_before_the_start_is_read_after_it(cluster: EmbeddedCluster) -> None:
    send(cluster, 2)
    reader = consumer(cluster)
    reader.assign([QUEUE])
    with pytest.raises(WrongUse, match="cannot subscribe"):
        reader.subscribe(TOPIC)

    with reader:
        assert len(reader.poll(DEADLINE)) > 0


def test_a_stop_on_another_thread_ends_a_poll(cluster: EmbeddedCluster) -> None:
    reader = consumer(cluster)
    reader.subscribe(TOPIC)
    reader.start()
    stopping = threading.Timer(0.05, reader.stop)
    stopping.start()

    found = reader.poll(DEADLINE)
    stopping.join(DEADLINE)

    assert found == []
    with pytest.raises(NotRunning, match="make a new one"):
        reader.poll()
    with pytest.raises(NotRunning):
        reader.start()
    reader.stop()


def test_nothing_is_left_running(cluster: EmbeddedCluster) -> None:
    before = threading.active_count()

    with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        reader.poll(0.01)
        assert threading.active_count() == before + 1

    assert threading.active_count() == before
