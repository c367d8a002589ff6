"""Failed messages that go back without a consumer around them."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.consumer.verdict import DEAD, Failure
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.message.stored import StoredMessage
from orbitmq.spark.consuming.returns import SendBackClient, SendBackResult
from orbitmq.spark.consuming.verdicts import NO_PLACE
from tests.support.filling import make_topic
from tests.support.sparking import until


@pytest.mark.parametrize("number", range(4))  # which queue a producer chooses is chance
def test_a_group_that_no_broker_has_heard_of_gets_its_messages_back(orbit_cluster, number):
    """Its retry topic has one queue as soon as it exists; before, a producer expects more."""
    make_topic(orbit_cluster, "orders", 1, queues=1)
    queue = Queue("orders", "broker-a", 0)
    gone = StoredMessage.build(
        topic="orders", stored_body=b"gone", queue_offset=77, physical_offset=NO_PLACE
    )
    (there,) = orbit_cluster.messages("orders")
    returner = SendBackClient(
        RangeAccess(name_servers=(orbit_cluster.name_server,)), "billing", None
    )
    returner.start()

    try:
        taken = returner.send_back(
            [
                (ReceivedMessage(gone, queue, "billing"), Failure(reason="why not")),
                (ReceivedMessage(there, queue, "billing"), Failure(DEAD, reason="never")),
            ]
        )
    finally:
        returner.stop()
    orbit_cluster.advance(10)

    assert taken == [SendBackResult.RETRIED, SendBackResult.DEAD]
    until(lambda: orbit_cluster.messages("%RETRY%billing"), "it is delivered again")
    (copy,) = orbit_cluster.messages("%RETRY%billing")
    assert (copy.body, copy.reconsume_times) == (b"gone", 1)
    assert [each.body for each in orbit_cluster.messages("%DLQ%billing")] == [there.body]


@pytest.mark.parametrize(
    ("limit", "is_there", "dead", "retried"),
    [
        (0, True, 3, 0),
        (1, True, 0, 3),
        # A copy of it goes to the retry topic, and carries the limit.
        (0, False, 3, 0),
        (1, False, 1, 2),
    ],
)
def test_what_is_dead_is_counted_by_the_limit_of_the_group(
    orbit_cluster, limit, is_there, dead, retried
):
    make_topic(orbit_cluster, "orders", 3, queues=1)
    with Admin(name_server=orbit_cluster.name_server) as admin:
        admin.groups.create("billing", max_retries=limit)
    queue = Queue("orders", "broker-a", 0)
    failed = [
        StoredMessage.build(
            topic="orders",
            stored_body=stored.stored_body,
            queue_offset=stored.queue_offset,
            physical_offset=stored.physical_offset if is_there else NO_PLACE,
        )
        for stored in orbit_cluster.messages("orders")
    ]
    tried = [0, 0, 0 if is_there else 1]
    returner = SendBackClient(
        RangeAccess(name_servers=(orbit_cluster.name_server,)), "billing", None
    )
    returner.start()

    try:
        fates = returner.send_back(
            [
                (ReceivedMessage(stored, queue, "billing", times), Failure(reason="no"))
                for stored, times in zip(failed, tried, strict=True)
            ]
        )
    finally:
        returner.stop()

    assert (fates.count(SendBackResult.DEAD), fates.count(SendBackResult.RETRIED)) == (
        dead,
        retried,
    )
    assert len(orbit_cluster.messages("%DLQ%billing")) == dead
