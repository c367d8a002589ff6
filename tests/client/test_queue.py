"""Queues: values that sort, hash and show themselves as their users need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.routes import Queue

queues = st.builds(
    Queue, st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]), st.integers(0, 3)
)


def test_the_java_text_is_that_of_a_message_queue():
    text = Queue("orders", "broker-a", 3).java_text

    assert text == "MessageQueue [topic=orders, brokerName=broker-a, queueId=3]"


@given(st.lists(queues))
def test_queues_sort_by_topic_then_broker_then_number(found):
    assert sorted(found) == sorted(found, key=lambda queue: (queue.topic, queue.broker, queue.id))
