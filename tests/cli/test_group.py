"""`orbitmq group`: looking at groups and configuring them."""

from __future__ import annotations

from typing import Any

import pytest

from orbitmq.client.settings import ClientSettings
from tests.cli.conftest import consumer_of
from tests.support.orbitmqcli import Cli


@pytest.fixture(scope="module")
def billing(cluster):
    """A group online that has consumed 10 messages."""
    cluster.create_topic("orders", queues=2)
    cluster.send("orders", *[b"x"] * 10)
    client = ClientSettings(instance="worker-1")
    with consumer_of(cluster, "billing", "orders", client=client) as consumer:
        cluster.until_consumed("billing", "orders")
        yield consumer


def group_of(cli: Cli, name: str) -> Any:
    (found,) = [each for each in cli.records("group", "list") if each["group"] == name]
    return found


@pytest.mark.feature("L2")
def test_a_group_shows_lag_in_messages_and_seconds_its_members_and_its_subscription(
    cluster, cli, billing
):
    cli.record("group", "clone", "billing", "waiting", "--yes")
    cli.record("group", "reset", "waiting", "orders", "--to", "earliest", "--yes")

    online, offline = group_of(cli, "billing"), group_of(cli, "waiting")
    assert (online["state"], online["members"], online["lag"]) == ("online", 1, 0)
    assert online["lag_seconds"] == 0
    assert (offline["state"], offline["members"], offline["lag"]) == ("offline", 0, 10)
    assert offline["lag_seconds"] > 0

    shown = cli.record("group", "show", "billing")
    (member,) = shown["members"]
    assert member["client_id"] == billing.client_id
    assert member["language"] == "python"
    assert {"topic": "orders", "expression": "*", "expression_type": "TAG"} in shown[
        "subscriptions"
    ]
    queues = [each for each in shown["queues"] if each["topic"] == "orders"]
    assert sum(each["consumer_offset"] for each in queues) == 10
    assert [(each["lag"], each["lag_seconds"]) for each in queues] == [(0, 0.0)] * 4
    assert {each["owner"] for each in queues} == {billing.client_id}

    behind = cli.record("group", "show", "waiting")
    assert behind["lag"] == 10
    assert behind["members"] == []
    assert all(each["lag_seconds"] > 0 for each in behind["queues"] if each["lag"])


def test_what_waits_for_a_later_attempt_is_told_beside_the_lag(cluster, cli):
    cluster.create_topic("fragile", queues=1)
    cluster.send("fragile", *[b"x"] * 3)

    def fail(_message: object) -> None:
        raise LookupError("no such customer")

    with consumer_of(cluster, "failing", "fragile", fail):
        cluster.until_consumed("failing", "fragile")
        shown = cli.record("group", "show", "failing")
    page = cli.text("group", "show", "failing")

    assert (shown["lag"], shown["retry_lag"]) == (0, 0)
    assert (shown["later"], shown["is_later_all"]) == (3, True)
    assert "3 messages wait for a later attempt" in page
    # When the last finished message was stored, by a name that says so; the old one goes on.
    done = [each for each in shown["queues"] if each["finished_stored_at"] is not None]
    assert len(done) >= 1
    assert all(each["last_consumed_at"] == each["finished_stored_at"] for each in done)
    assert "finished up to" in page
    assert "empty in" in page


def test_one_consumer_tells_what_it_holds(cli, billing):
    record = cli.record("group", "member", "billing", "worker-1", "--stack")
    text = cli.text("group", "member", "billing", billing.client_id)

    assert record["client_id"] == billing.client_id
    owned = [each for each in record["queues"] if each["topic"] == "orders"]
    assert len(owned) == 4
    assert sum(each["commit_offset"] for each in owned) == 10
    assert all(each["last_pull_at"] > 0 for each in owned)
    assert "worker" in record["stack"] or "Thread" in record["stack"]
    assert "Owned queues" in text

    unknown = cli.refusal("group", "member", "billing", "nobody", code=1)
    assert billing.client_id in unknown
    assert "not online" in cli.refusal("group", "member", "ghosts", code=1)


def test_a_group_is_made_configured_paused_resumed_and_deleted(cli):
    made = cli.record("group", "create", "life", "--max-retries", "3", "--consume-timeout", "30m")
    assert made["result"] == "created"
    assert [each["broker"] for each in made["settings"]] == ["broker-a", "broker-b"]
    assert {each["max_retries"] for each in made["settings"]} == {3}
    assert {each["consume_timeout_seconds"] for each in made["settings"]} == {1800.0}
    assert "exists" in cli.refusal("group", "create", "life", code=1)
    assert cli.record("group", "create", "life", "--if-missing")["result"] == "left"

    changed = cli.record("group", "update", "life", "--max-retries", "5", "--broker", "broker-b")
    assert [each["max_retries"] for each in changed["settings"]] == [5]
    assert not group_of(cli, "life")["is_uniform"]

    assert cli.record("group", "pause", "life", "--yes")["result"] == "paused"
    assert group_of(cli, "life")["state"] == "paused"
    assert cli.record("group", "resume", "life")["result"] == "resumed"
    assert group_of(cli, "life")["state"] == "offline"

    assert cli.record("group", "delete", "life", "--with-topics", "--yes")["result"] == "deleted"
    assert "no broker knows group 'life'" in cli.refusal("group", "show", "life", code=1)


def test_pausing_and_deleting_need_a_yes_and_members_online_are_not_deleted_from_under(
    cli, billing
):
    cli.record("group", "create", "idle")
    pausing = cli.refusal("group", "pause", "billing", code=2)
    deleting = cli.refusal("group", "delete", "idle", code=2)
    online = {
        cli.refusal("group", "delete", "billing", *words, code=1)
        for words in (("--yes",), ("--dry-run",), ())
    }

    assert "stops group 'billing' from consuming" in pausing
    assert "this deletes group 'idle'" in deleting
    (sentence,) = online
    assert sentence.startswith(f"group 'billing' has members online ({billing.client_id}); stop")


def test_a_group_that_is_not_there_cannot_be_deleted_and_one_alike_is_named(cli):
    cli.text("group", "create", "accounting")

    assert cli.refusal("group", "delete", "zzz", code=1) == (
        "no broker knows group 'zzz'; there is nothing to delete"
    )
    assert cli.refusal("group", "show", "acounting", code=1) == (
        "no broker knows group 'acounting'; do you mean accounting?"
    )


def test_a_group_is_given_to_another_broker_as_it_is_where_it_was_but_for_what_is_given(cli):
    cli.record(
        *("group", "create", "grown", "--broker", "broker-a", "--orderly", "--no-broadcast"),
        *("--max-retries", "3", "--retry-queues", "2", "--consume-timeout", "30m"),
    )
    cli.record("group", "pause", "grown", "--yes")

    refused = cli.refusal("group", "create", "grown", code=1)
    there = cli.refusal("group", "create", "grown", "--broker", "broker-a", code=1)
    planned = cli.record("group", "create", "grown", "--if-missing", "--dry-run")
    made = cli.record("group", "create", "grown", "--if-missing", "--max-retries", "4")
    again = cli.record("group", "create", "grown", "--if-missing")

    assert refused == (
        "group 'grown' exists on broker-a; to have it on broker-b as well: orbitmq group "
        "create grown --broker broker-b"
    )
    assert there.startswith("group 'grown' exists; change it with")
    assert planned["remark"] == "max retries 3, retry queues 2, in order, on broker-b"
    assert made["result"] == "created"
    before, after = again["settings"]
    assert again["result"] == "left"
    assert (before["broker"], after["broker"]) == ("broker-a", "broker-b")
    assert after == before | {"broker": "broker-b", "max_retries": 4}
    assert not after["is_enabled"]
