"""`orbitmq topic` against a cluster of two brokers."""

from __future__ import annotations

import pytest


@pytest.mark.feature("L1")
def test_a_topic_is_made_listed_changed_looked_into_and_deleted(cluster, cli):
    made = cli.record("topic", "create", "life", "--write-queues", "3", "--read-queues", "4")
    assert made["result"] == "created"
    assert (made["after"]["write_queues"], made["after"]["read_queues"]) == (6, 8)
    assert made["before"] is None

    (listed,) = [each for each in cli.records("topic", "list") if each["topic"] == "life"]
    assert listed["brokers"] == ["broker-a", "broker-b"]
    assert (listed["permission"], listed["kind"], listed["is_uniform"]) == ("rw", "normal", True)

    changed = cli.record(
        *("topic", "update", "life", "--write-queues", "4"),
        *("--permission", "w", "--broker", "broker-a", "--yes"),
    )
    assert changed["result"] == "changed"

    cluster.send("life", *[b"x"] * 8)
    shown = cli.record("topic", "show", "life")
    brokers = {each["broker"]: each for each in shown["brokers"]}
    assert (brokers["broker-a"]["write_queues"], brokers["broker-a"]["permission"]) == (4, "w")
    assert (brokers["broker-b"]["write_queues"], brokers["broker-b"]["permission"]) == (3, "rw")
    assert [brokers[name]["addresses"]["0"] for name in sorted(brokers)] == list(
        cluster.broker_addresses
    )
    assert shown["messages"] == sum(each["messages"] for each in shown["queues"]) == 8
    assert len(shown["queues"]) == 8
    assert shown["first_stored_at"] <= shown["last_stored_at"]
    assert shown["messages_today"] == 8

    gone = cli.record("topic", "delete", "life", "--yes")
    assert gone["result"] == "deleted"
    assert "8 messages" in gone["remark"]
    assert "no broker has topic 'life'" in cli.refusal("topic", "show", "life", code=1)


def test_people_see_tables_with_numbers_to_the_right(cluster, cli):
    cluster.create_topic("seen", queues=4)
    cluster.send("seen", b"1", b"2")

    table = cli.text("topic", "list", "--status").splitlines()
    page = cli.text("topic", "show", "seen")
    exact = cli.text("topic", "show", "seen", "--exact")

    heading = table[0]
    row = next(line for line in table if line.startswith("seen"))
    end = heading.index("messages") + len("messages")
    assert row[:end].endswith("    2")
    assert "ago" in row
    for title in ("Where clients find it", "What is in it", "Consuming groups"):
        assert title in page
    assert "broker-b:3" in page
    assert "2026" in exact or "20" in exact.split("latest", 1)[1]
    assert "ago" not in exact


def test_retry_dead_letter_and_system_topics_are_listed_when_asked_for(cli):
    usual = {each["topic"] for each in cli.records("topic", "list")}
    everything = {each["topic"]: each["kind"] for each in cli.records("topic", "list", "--all")}
    system = {each["kind"] for each in cli.records("topic", "list", "--kind", "system")}

    assert "TBW102" not in usual
    assert everything["TBW102"] == "system"
    assert system == {"system"}


def test_a_dry_run_changes_nothing(cluster, cli):
    cluster.create_topic("kept", queues=4)

    created = cli.record("topic", "create", "never", "--dry-run")
    changed = cli.record("topic", "update", "kept", "--queues", "1", "--dry-run")
    deleted = cli.record("topic", "delete", "kept", "--dry-run")

    assert [each["result"] for each in (created, changed, deleted)] == [
        "would be created",
        "would be changed",
        "would be deleted",
    ]
    assert all(each["is_dry_run"] for each in (created, changed, deleted))
    assert "hides queues 1 to 3 on broker-a" in changed["remark"]
    listed = {each["topic"]: each for each in cli.records("topic", "list")}
    assert "never" not in listed
    assert listed["kept"]["read_queues"] == 8


def test_what_takes_something_away_needs_a_yes_without_a_terminal(cluster, cli):
    cluster.create_topic("guarded", queues=4)

    deleting = cli.refusal("topic", "delete", "guarded", code=2)
    hiding = cli.refusal(
        "topic", "update", "guarded", "--queues", "8", "--read-queues", "2", code=2
    )
    closing = cli.refusal("topic", "update", "guarded", "--permission", "r", code=2)
    growing = cli.record("topic", "update", "guarded", "--queues", "5")

    assert "this deletes topic 'guarded' with 0 messages" in deleting
    assert "do it with --yes, or see what would happen" in deleting
    assert "hides queues 2 to 3" in hiding
    assert "stops sending on broker-a" in closing
    assert growing["after"]["read_queues"] == 10


def test_at_a_terminal_one_is_asked_and_may_decline(cluster, cli):
    cluster.create_topic("asked")

    with cli.at_terminal("topic", "delete", "asked") as declined:
        declined.until("[y/N]")
        declined.press("n\r")
        assert declined.wait() == 1
    assert "this deletes topic 'asked'" in declined.screen
    assert "nothing was changed" in declined.screen

    with cli.at_terminal("topic", "delete", "asked") as agreed:
        agreed.until("[y/N]")
        agreed.press("y\r")
        assert agreed.wait() == 0
    assert "topic asked deleted" in agreed.screen


def test_a_topic_that_is_there_is_not_made_over(cluster, cli):
    cluster.create_topic("taken", queues=2)

    refused = cli.refusal("topic", "create", "taken", "--queues", "9", code=1)
    left = cli.record("topic", "create", "taken", "--queues", "9", "--if-missing")

    assert "change it with: orbitmq topic update taken" in refused
    assert (left["result"], left["after"]["write_queues"]) == ("left", 4)


def test_a_topic_that_is_not_there_is_told_with_the_one_that_was_meant(cluster, cli):
    cluster.create_topic("invoices", queues=1)

    assert cli.refusal("topic", "show", "invoice", code=1) == (
        "no broker has topic 'invoice'; do you mean invoices?"
    )
    assert cli.refusal("topic", "delete", "zzz", code=1) == (
        "no broker has topic 'zzz'; there is nothing to delete"
    )
    assert "orbitmq topic create zzz" in cli.refusal("topic", "show", "zzz", code=1)


def test_a_topic_is_given_to_another_broker_as_well(cli):
    cli.record("topic", "create", "grown", "--queues", "3", "--broker", "broker-a")

    refused = cli.refusal("topic", "create", "grown", code=1)
    not_there = cli.refusal(
        "topic", "update", "grown", "--queues", "5", "--broker", "broker-b", code=1
    )
    planned = cli.record("topic", "create", "grown", "--broker", "broker-b", "--dry-run")
    made = cli.record("topic", "create", "grown", "--if-missing")
    again = cli.record("topic", "create", "grown", "--if-missing")

    assert refused == (
        "topic 'grown' exists on broker-a; to have it on broker-b as well: orbitmq topic "
        "create grown --broker broker-b"
    )
    assert not_there == (
        "topic 'grown' is not on broker-b; create it there with: orbitmq topic create grown "
        "--broker broker-b"
    )
    assert planned["result"] == "would be created"
    # As many queues as it has where it is.
    assert (made["result"], made["after"]["write_queues"]) == ("created", 6)
    assert made["before"]["brokers"] == ["broker-a"]
    assert made["after"]["brokers"] == ["broker-a", "broker-b"]
    assert again["result"] == "left"


def test_a_topic_on_another_broker_is_as_it_is_where_it_was_but_for_what_is_given(cli):
    cli.record(
        *("topic", "create", "alike", "--broker", "broker-a", "--type", "fifo", "--ordered"),
        *("--write-queues", "2", "--read-queues", "5", "--permission", "r"),
    )
    cli.record("topic", "create", "unlike", "--queues", "3", "--broker", "broker-a")

    planned = cli.record("topic", "create", "alike", "--if-missing", "--dry-run")
    cli.record("topic", "create", "alike", "--if-missing")
    given = ("--write-queues", "4", "--permission", "w", "--ordered")
    cli.record("topic", "create", "unlike", "--broker", "broker-b", *given)
    fresh = cli.record("topic", "create", "fresh", "--dry-run")

    def there(topic):
        names = ("write_queues", "read_queues", "permission", "is_ordered")
        found = cli.record("topic", "show", topic)["brokers"]
        return [tuple(each[name] for name in names) for each in found]

    assert there("alike") == [(2, 5, "r", True)] * 2
    assert cli.record("topic", "show", "alike")["kind"] == "fifo"
    assert there("unlike") == [(3, 3, "rw", False), (4, 3, "w", True)]
    assert planned["remark"] == (
        "2 queues to write and 5 to read on each of broker-b, permission r"
    )
    assert planned["before"]["brokers"] == ["broker-a"]
    assert "on each of broker-a, broker-b" in fresh["remark"]
