"""Queues: values that sort, hash and show themselves as their users need."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.routes import Queue

queues = st.builds(
    Queue, st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]), st.integers(0, 3)
)


def test_a_queue_is_shown_with_topic_broker_and_number():
    assert str(Queue("orders", "broker-a", 3)) == "orders@broker-a:3"


def test_the_java_text_is_that_of_a_message_queue():
    text = Queue("orders", "broker-a", 3).java_text

    assert text == "MessageQueue [topic=orders, brokerName=broker-a, queueId=3]"


@given(st.lists(queues))
def test_queues_sort_by_topic_then_broker_then_number(found):
    assert sorted(found) == sorted(found, key=lambda queue: (queue.topic, queue.broker, queue.id))


@given(queues)
def test_a_queue_travels_between_processes(queue):
    again = pickle.loads(pickle.dumps(queue))  # noqa: S301  # our own bytes

    assert again == queue
    assert {queue: 1}[again] == 1
