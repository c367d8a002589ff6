"""A queue that a consumer owns."""

from __future__ import annotations

from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.routes import Queue


def owned_queue(topic: str = "orders") -> OwnedQueue:
    return OwnedQueue(Queue(topic, "broker-a", 1), 7, now=100.0)


def test_it_begins_where_it_is_told_and_is_not_stalled() -> None:
    owned = owned_queue()

    assert (owned.next_offset, owned.last_pull, owned.last_consumed) == (7, 100.0, 100.0)
    assert not owned.is_dropped
    assert not owned.is_draining


def test_what_is_dropped_is_not_begun_with_either() -> None:
    owned = owned_queue()

    owned.drop()

    assert owned.is_dropped
    assert owned.is_draining
    assert "dropped" in repr(owned)


def test_a_queue_that_is_gained_again_is_another_one() -> None:
    assert owned_queue() != owned_queue()


def test_retry_queues_are_known_by_their_topic() -> None:
    assert owned_queue("%RETRY%billing").is_retry
    assert not owned_queue().is_retry


def test_lag_counts_from_the_next_offset_until_messages_were_fetched() -> None:
    owned = owned_queue()
    owned.max_offset = 10

    assert owned.lag == 3
