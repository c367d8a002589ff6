"""librocketmq gets messages again from our broker: after failures, and after resets."""

from __future__ import annotations

from collections import Counter

import pytest

from orbitmq import Admin
from tests.support.clients import CppClient, bodies, consume, orders, rewind

RETRIES = 2


@pytest.fixture
def known_group(cluster):
    """A group that was online before, and so has its retry topic.

    The client looks for that when it starts, and then by its own timer after ten seconds.
    """
    with Admin(name_server=cluster.name_server) as admin:
        admin.groups.create("clumsy", max_retries=RETRIES)
    cluster.create_topic("%RETRY%clumsy", queues=1)
    return "clumsy"


def times(client: CppClient) -> dict[str, list[int]]:
    """By body, how often each delivery had failed before."""
    found: dict[str, list[int]] = {}
    for message in client.messages:
        found.setdefault(message["body"], []).append(message["times"])
    return found


def test_a_failed_message_comes_again_and_says_how_often(client, cluster, known_group):
    # One for each queue: with a failed message the client sends back all of the same pull.
    client.send("sync", *orders(3))

    consume(client, cluster, known_group, fail={"order 1": RETRIES})
    client.until(lambda: len(client.messages) >= 3 + RETRIES, "all attempts")

    assert times(client) == {"order 0": [0], "order 1": [0, 1, 2], "order 2": [0]}
    assert {message["topic"] for message in client.messages} == {"Orders"}
    assert cluster.messages("%DLQ%clumsy") == []


def test_what_fails_too_often_is_a_dead_letter(client, cluster, known_group):
    sent = client.send("sync", *orders(3, tag="red", keys="k", properties={"colour": "blau"}))

    consume(client, cluster, known_group, fail={"order 1": 99})
    client.until(lambda: cluster.messages("%DLQ%clumsy"), "the dead letter")
    # What the client tells of a delivery may come later than what it makes of it.
    client.until(lambda: len(client.messages) >= 3 + RETRIES, "all attempts")

    assert times(client) == {"order 0": [0], "order 1": [0, 1, 2], "order 2": [0]}
    (dead,) = cluster.messages("%DLQ%clumsy")
    kept = {name: dead.properties[name] for name in ("TAGS", "KEYS", "colour", "UNIQ_KEY")}
    _, message_id, _ = sent[1]
    assert dead.body == b"order 1"
    assert kept == {"TAGS": "red", "KEYS": "k", "colour": "blau", "UNIQ_KEY": message_id}
    assert dead.properties["RETRY_TOPIC"] == "Orders"


def test_a_reset_moves_a_consumer_that_is_online(client, cluster):
    client.send("sync", *orders(8))
    consume(client, cluster, "repeaters")
    client.until_bodies(bodies(8))

    rewind(cluster, "repeaters")
    client.until(lambda: len(client.messages) >= 16, "everything again")
    client.send("sync", *orders(4, first=8))
    client.until_bodies(bodies(12))
    # By itself, every five seconds.
    cluster.until_consumed("repeaters", "Orders", timeout=30)

    assert Counter(client.bodies()) == dict.fromkeys(bodies(8), 2) | dict.fromkeys(
        bodies(4, first=8), 1
    )


def test_a_reset_moves_a_group_while_nobody_is_online(start_client, client, cluster):
    client.send("sync", *orders(8))
    consume(client, cluster, "skippers")
    client.until_bodies(bodies(8))
    client.ask("stop_consuming")
    client.send("sync", *orders(8, first=8))

    with Admin(name_server=cluster.name_server) as admin:
        report = admin.progress.reset("skippers", "Orders", "last")
    client.send("sync", *orders(4, first=16))
    successor = start_client()
    consume(successor, cluster, "skippers")
    successor.until_bodies(bodies(4, first=16))

    # What it was given last may not have counted as consumed yet when it was stopped.
    assert report.plan.skipped >= 8
    assert sorted(successor.bodies()) == sorted(bodies(4, first=16))
