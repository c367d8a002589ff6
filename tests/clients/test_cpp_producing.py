"""librocketmq sends to our broker; what it is told and what is stored."""

from __future__ import annotations

import pytest

from orbitmq.testing import EmbeddedCluster
from tests.support.clients import bodies, orders

OK = 0


def stored(cluster: EmbeddedCluster, topic: str = "Orders") -> list[str]:
    return [message.body.decode() for message in cluster.messages(topic)]


def test_a_synchronous_send_is_stored_as_it_was_sent(client, cluster):
    message = {
        "topic": "Orders",
        "body": "grün",
        "tag": "red",
        "keys": "k1 k2",
        "properties": {"colour": "blau"},
    }

    ((status, message_id, offset),) = client.send("sync", message)

    assert (status, offset) == (OK, 0)
    (found,) = cluster.messages("Orders")
    assert found.body.decode() == "grün"
    assert found.properties["TAGS"] == "red"
    assert found.properties["KEYS"] == "k1 k2"
    assert found.properties["colour"] == "blau"
    assert found.properties["UNIQ_KEY"] == message_id


def test_offsets_that_are_answered_count_up_within_each_queue(client, cluster):
    results = client.send("sync", *orders(8))

    assert [status for status, _, _ in results] == [OK] * 8
    # Turn by turn over four queues, wherever it begins.
    assert [offset for _, _, offset in results] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert stored(cluster) == bodies(8)


def test_one_way_sends_arrive(client, cluster):
    client.send("oneway", *orders(3))

    client.until(lambda: len(stored(cluster)) == 3, "three messages at the broker")
    assert sorted(stored(cluster)) == bodies(3)


def test_asynchronous_sends_are_all_answered(client, cluster):
    results = client.send("async", *orders(20))

    assert [result[0] for result in results] == [OK] * 20
    assert len({result[1] for result in results}) == 20
    assert sorted(stored(cluster)) == sorted(bodies(20))


def test_ordered_sends_go_to_one_queue_in_order(client, cluster):
    results = client.send("ordered", *orders(5))

    assert [offset for _, _, offset in results] == [0, 1, 2, 3, 4]
    assert {message.queue_id for message in cluster.messages("Orders")} == {1}
    assert stored(cluster) == bodies(5)


def test_a_batch_becomes_single_messages(client, cluster):
    """The client marks a batch with "1", which Apache's broker does not take for true."""
    ((status, _, offset),) = client.send("batch", *orders(4, tag="red"))

    assert (status, offset) == (OK, 0)
    found = cluster.messages("Orders")
    assert [message.body.decode() for message in found] == bodies(4)
    assert [message.queue_offset for message in found] == [0, 1, 2, 3]
    assert {message.properties["TAGS"] for message in found} == {"red"}


def test_a_topic_that_must_not_be_sent_to_is_refused(client, cluster):
    message = {"topic": "SCHEDULE_TOPIC_XXXX", "body": "forged"}

    answer = client.try_to("send", group="makers", how="sync", messages=[message])

    assert "failed" in answer
    assert stored(cluster, "SCHEDULE_TOPIC_XXXX") == []


def test_a_delayed_message_is_readable_when_it_is_due(client, cluster):
    client.send("sync", {"topic": "Orders", "body": "later", "delay": 5})

    assert stored(cluster) == []
    client.until(lambda: stored(cluster) == ["later"], "the delayed message")
    (found,) = cluster.messages("Orders")
    # Level 5 takes half a second here.
    assert found.store_ms - found.born_ms >= 450


@pytest.mark.parametrize("count", [3])
def test_a_client_that_was_started_before_a_restart_goes_on_sending(client, cluster, count):
    client.send("sync", *orders(count))

    cluster.restart_broker()
    # The first attempt may meet the closed connection; the client itself tries others.
    for _ in range(5):
        answer = client.try_to("send", group="makers", how="sync", messages=orders(1))
        if "done" in answer:
            break

    assert "done" in answer, answer
    assert len(stored(cluster)) == count + 1
