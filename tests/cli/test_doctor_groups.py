"""`orbitmq doctor` on groups that are not well."""

from __future__ import annotations

import threading

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.console.collect import STALLED_AFTER
from orbitmq.testing import EmbeddedCluster
from tests.support.doctor import QUICK, consume, findings
from tests.support.orbitmqcli import Cli


def test_a_dead_letter_that_was_sent_again_is_no_finding(nursery):
    with EmbeddedCluster() as cluster:
        cli = Cli(cluster.name_server, nursery)
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", b"1", b"2", b"3")
        consumer = Consumer(
            "billing",
            name_server=cluster.name_server,
            max_retries=0,
            consume_from="first",
            rebalance=RebalanceSettings(persist=0.1),
        )

        @consumer.on("orders")
        def handle(_message: ReceivedMessage) -> None:
            raise ValueError("no money")

        with consumer:
            cluster.until_consumed("billing", "orders")
        cli.records("dlq", "resend", "billing", "--limit", "1", "--yes")
        (some,) = findings(cli)["dead letters"]
        cli.records("dlq", "resend", "billing", "--limit", "1", "--to", "origin", "--yes")
        cli.records("dlq", "resend", "billing", "--yes")
        none = cli.record("doctor", *QUICK)

    assert some["problem"] == (
        "2 messages died in the last hour and were not resent; 2 dead letters are open, "
        "1 was resent"
    )
    checks = {each["check"]: each["about"] for each in none["checks"]}
    assert none["is_well"]
    assert checks["dead letters"] == "1 group: 0 open, 3 resent"


def test_mistakes_inside_groups_are_found_and_explained(cluster, cli, consumers):
    cluster.create_topic("orders", queues=2)
    consume(cluster, consumers, "differing", tags="a")
    consume(cluster, consumers, "differing", tags="b")
    consume(cluster, consumers, "endless", ordered=True)
    consume(cluster, consumers, "limited", ordered=True, max_retries=3)

    found = findings(cli)
    text = cli.run("doctor", *QUICK)

    (different,) = found["subscriptions"]
    assert different["subject"] == "differing"
    assert all(member.client_id in different["problem"] for member in consumers[:2])
    assert "subscribe alike" in different["remedy"]
    (endless,) = found["endless retries"]
    assert endless["subject"] == "endless"
    assert "stops its queue" in endless["problem"]
    assert text.returncode == 1
    assert "! Members of group 'differing'" in text.stdout


def test_a_watch_that_is_too_short_says_so_instead_of_calling_a_group_stalled(nursery):
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        cli = Cli(cluster.name_server, nursery)
        has_begun, may_end = threading.Event(), threading.Event()
        consumer = Consumer("hanging", name_server=cluster.name_server, consume_from="first")

        @consumer.on("orders")
        def hang(_message: ReceivedMessage) -> None:
            has_begun.set()
            may_end.wait(120)

        consumer.start()
        try:
            cluster.send("orders", b"first", b"second")
            assert has_begun.wait(30)
            cluster.advance(STALLED_AFTER + 30)
            listed = cli.record("group", "list")
            record = cli.record("doctor", "--no-spark", "--watch", "500ms")
        finally:
            may_end.set()
            consumer.stop()

    assert (listed["group"], listed["lag"]) == ("hanging", 2)
    assert listed["lag_seconds"] >= STALLED_AFTER
    about = {each["check"]: each["about"] for each in record["checks"]}
    assert about["stuck queues"] == "1 group, 1 not judged, which takes --watch 10s"
    assert about["falling behind"] == "1 group, 1 not judged, which takes --watch 30s"
    assert about["dead letters"] == "1 group"


def test_one_group_is_looked_at_alone_and_has_to_be_there(cluster, cli, consumers):
    cluster.create_topic("orders", queues=2)
    consume(cluster, consumers, "differing", tags="a")
    consume(cluster, consumers, "differing", tags="b")
    consume(cluster, consumers, "billing")

    assert findings(cli).keys() == {"subscriptions"}
    assert cli.record("doctor", *QUICK, "--group", "billing")["is_well"]
    assert findings(cli, *QUICK, "--group", "differing").keys() == {"subscriptions"}
    mistyped = cli.run("doctor", *QUICK, "--group", "biling")
    assert mistyped.returncode == 1
    assert "no broker knows group 'biling'; do you mean billing?" in mistyped.stderr
