"""librocketmq consumes from our broker, in every way it knows.

There is no sign by which this client tells that it has its queues, so the tests send first and let
a new group find the backlog, or wait for what they send.
"""

from __future__ import annotations

import itertools

from orbitmq import Admin
from orbitmq.client.admin.members import GroupSubscription
from tests.support.clients import bodies, consume, orders


def test_a_concurrent_consumer_gets_the_backlog_and_what_comes_later(client, cluster):
    client.send("sync", *orders(10, tag="red", keys="k", properties={"colour": "blau"}))

    consume(client, cluster, "billing")
    client.until_bodies(bodies(10))
    client.send("sync", *orders(5, first=10))
    client.until_bodies(bodies(15))

    assert sorted(client.bodies()) == sorted(bodies(15))
    (first,) = [message for message in client.messages if message["body"] == "order 0"]
    assert (first["topic"], first["tag"], first["keys"]) == ("Orders", "red", "k")
    assert (first["colour"], first["times"]) == ("blau", 0)


def test_only_messages_with_the_wanted_tags_come(client, cluster):
    for number, tag in enumerate(["red", "green", "blue", "red", "green", "blue"]):
        client.send("sync", {"topic": "Orders", "body": f"{tag} {number}", "tag": tag})

    consume(client, cluster, "painters", expression="red || blue")
    client.until_bodies(["red 0", "blue 2", "red 3", "blue 5"])
    # What is sent now passes all the others that did not match.
    client.send("sync", {"topic": "Orders", "body": "red last", "tag": "red"})
    client.until_bodies(["red last"])

    assert not [body for body in client.bodies() if body.startswith("green")]


def test_an_sql_expression_is_a_tag_to_this_client(client, cluster):
    """It has no filter but tags, and no means to say that an expression is SQL."""
    expression = "size >= 2"
    matching = {"topic": "Orders", "body": "large", "properties": {"size": "3"}}
    client.send("sync", matching, *orders(1, tag=expression, properties={"size": "1"}))

    consume(client, cluster, "measurers", expression=expression)
    client.until_bodies(bodies(1))
    # What is sent now passes what did not come.
    for tagged in orders(4, first=1, tag=expression):
        client.send("sync", matching, tagged)
    client.until_bodies(bodies(5))
    with Admin(name_server=cluster.name_server) as admin:
        subscriptions = admin.consumers.members("measurers").subscriptions

    assert sorted(client.bodies()) == bodies(5)
    assert GroupSubscription("Orders", expression, "TAG") in subscriptions


def test_an_orderly_consumer_gets_each_queue_in_order(client, cluster):
    client.send("sync", *orders(40))

    consume(client, cluster, "in-order", orderly=True)
    client.until_bodies(bodies(40))

    by_queue: dict[int, list[int]] = {}
    for message in client.messages:
        by_queue.setdefault(message["queue"], []).append(message["offset"])
    assert by_queue == {queue: list(range(10)) for queue in range(4)}


def test_a_pull_consumer_reads_everything_and_is_told_the_end(client, cluster):
    client.send("sync", *orders(20))

    found = client.ask("pull", group="readers", name_server=cluster.name_server, topic="Orders")

    assert sorted(message["body"] for message in found) == sorted(bodies(20))


def test_every_broadcasting_member_gets_every_message(start_client, client, cluster):
    members = [start_client(), start_client()]
    for member in members:
        consume(member, cluster, "all-of-us", broadcasting=True)

    # They begin at the end, wherever that is when they are ready: send until each has one.
    numbers = itertools.count()
    for member in members:

        def has_one_more(member=member):
            client.send("sync", {"topic": "Orders", "body": f"probe {next(numbers)}"})
            return bool(member.messages)

        member.until(has_one_more, "a first message")
    client.send("sync", *orders(8))
    for member in members:
        member.until_bodies(bodies(8))

    for member in members:
        got = [body for body in member.bodies() if body.startswith("order")]
        assert sorted(got) == sorted(bodies(8))


def test_progress_survives_a_restart_of_the_broker(start_client, client, cluster):
    client.send("sync", *orders(12))
    reader = start_client()
    consume(reader, cluster, "keepers")
    reader.until_bodies(bodies(12))
    reader.ask("stop_consuming")
    reader.until(
        lambda: sum(cluster.progress("keepers", "Orders").values()) == 12, "reported progress"
    )

    cluster.restart_broker()

    assert sum(cluster.progress("keepers", "Orders").values()) == 12
    maker = start_client()
    maker.produce("makers", cluster.name_server)
    maker.send("sync", *orders(4, first=12))
    again = start_client()
    consume(again, cluster, "keepers")
    again.until_bodies(bodies(4, first=12))
    assert sorted(again.bodies()) == sorted(bodies(4, first=12))


def test_a_new_member_takes_over_a_share_and_a_leaving_one_gives_it_back(
    start_client, client, cluster
):
    first, second = start_client(), start_client()
    numbers = itertools.count()

    def send_four():
        # One for each of the four queues.
        number = next(numbers) * 4
        client.send("sync", *orders(4, first=number))

    def queues(member, since):
        return {message["queue"] for message in member.messages[since:]}

    consume(first, cluster, "sharers", instance="first")
    send_four()
    first.until(lambda: queues(first, 0) == {0, 1, 2, 3}, "every queue at the first member")
    consume(second, cluster, "sharers", instance="second")

    def second_has_two():
        send_four()
        return len(queues(second, 0)) == 2

    second.until(second_has_two, "two queues at the second member")
    taken = queues(second, 0)
    second.ask("stop_consuming", instance="second")
    start = len(first.messages)

    def first_has_all_again():
        send_four()
        return taken <= queues(first, start)

    first.until(first_has_all_again, "the queues of the one that left")
    total = next(numbers) * 4
    first.until(
        lambda: set(first.bodies()) | set(second.bodies()) == set(bodies(total)), "every message"
    )
