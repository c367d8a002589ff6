"""The pull consumer for programs without an event loop."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import orbitmq.client
from orbitmq.client.errors import QueueNotAssigned
from orbitmq.client.producer.producer import Producer
from orbitmq.client.pullconsumer.consumer import PullConsumer
from orbitmq.client.routes import Queue
from orbitmq.errors import NotRunning, WrongUse
from orbitmq.testing import EmbeddedCluster
from tests.support.askingthreads import StrikeAt
from tests.support.polling import BY_HAND, DEADLINE, GROUP, NO_TIMER, REBALANCE, TOPIC

QUEUE = Queue(TOPIC, "broker-a", 0)
CLIENT = str(Path(orbitmq.client.__file__).parent)


@pytest.fixture
def cluster(new_blocking_cluster):
    with new_blocking_cluster() as cluster:
        cluster.create_topic(TOPIC, queues=1)
        yield cluster


def consumer(cluster: EmbeddedCluster, **changes: Any) -> PullConsumer:
    given: dict[str, Any] = {
        "name_server": cluster.name_server,
        "polling": NO_TIMER,
        "consume_from": "first",
        "rebalance": REBALANCE,
    }
    return PullConsumer(GROUP, **(given | changes))


def send(cluster: EmbeddedCluster, count: int) -> None:
    with Producer("makers", name_server=cluster.name_server) as producer:
        for number in range(count):
            producer.send(TOPIC, b"%d" % number)


def progress(cluster: EmbeddedCluster) -> int | None:
    return cluster.progress(GROUP, TOPIC).get(("broker-a", 0))


@pytest.mark.feature("B2")
def test_messages_are_polled_and_committed_when_the_consumer_ends(cluster):
    send(cluster, 5)

    with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        first = reader.poll(DEADLINE, max_messages=3)
        second = reader.poll(timedelta(seconds=DEADLINE))

        assert [message.body for message in [*first, *second]] == [b"0", b"1", b"2", b"3", b"4"]
        assert reader.assignment() == (QUEUE,)
        assert reader.poll(0.01) == []
    assert progress(cluster) == 5


def test_an_iteration_that_is_left_gives_back_what_it_has_not_returned(cluster):
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


def test_a_stop_while_an_error_is_handled_leaves_the_last_poll_uncommitted(cluster):
    send(cluster, 10)

    def work():
        reader = consumer(cluster)
        reader.subscribe(TOPIC)
        reader.start()
        try:
            reader.poll(DEADLINE, max_messages=4)
            reader.poll(DEADLINE, max_messages=4)
            raise ZeroDivisionError
        finally:
            reader.stop()

    with pytest.raises(ZeroDivisionError):
        work()

    assert progress(cluster) == 4


@pytest.mark.parametrize(("done", "expected"), [(None, 8), (True, 8), (False, 4)])
def test_a_stop_says_whether_the_last_poll_is_done(cluster, done, expected):
    send(cluster, 10)
    reader = consumer(cluster)
    reader.subscribe(TOPIC)
    reader.start()
    reader.poll(DEADLINE, max_messages=4)
    reader.poll(DEADLINE, max_messages=4)

    reader.stop(done=done)

    assert progress(cluster) == expected


#: Python complains about a coroutine whose caller is interrupted before it can be begun.
NEVER_BEGUN = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


@NEVER_BEGUN
def test_wherever_a_poll_is_interrupted_its_messages_come_again(cluster):
    """What poll did not return is neither lost nor committed; what it did does not come twice."""
    send(cluster, 100)
    got: list[bytes] = []
    places = 0

    with consumer(cluster, polling=replace(NO_TIMER, max_cached_messages=1000)) as reader:
        reader.assign([QUEUE])
        got += [message.body for message in reader.poll(DEADLINE, max_messages=1)]
        while len(got) < 100:
            strike = StrikeAt(places, CLIENT)
            found = strike.during(lambda: reader.poll(DEADLINE, max_messages=1))
            if isinstance(found, list):
                got += [message.body for message in found]
            else:
                places += 1
            assert reader.position(QUEUE) == len(got), strike.where

    assert got == [b"%d" % number for number in range(100)]
    assert places > 20
    assert progress(cluster) == 100


def test_commits_by_hand_and_positions(cluster):
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


def test_record_batches_are_polled_too(cluster):
    send(cluster, 10)

    with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        batch = reader.poll_arrow(DEADLINE, min_messages=10, columns=["body"])

    assert batch.column("body").to_pylist() == [b"%d" % number for number in range(10)]
    assert progress(cluster) == 10


def test_what_is_assigned_before_the_start_is_read_after_it(cluster):
    send(cluster, 2)
    reader = consumer(cluster)
    reader.assign([QUEUE])
    with pytest.raises(WrongUse, match="cannot subscribe"):
        reader.subscribe(TOPIC)

    with reader:
        assert len(reader.poll(DEADLINE)) > 0


def test_a_stop_on_another_thread_ends_a_poll(cluster):
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
