"""A client for Node.js, unmodified, with our broker: `ali-ons` of the npm registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbitmq import Admin, Consumer, PullConsumer, ReceivedMessage
from orbitmq.broker.settings import AccessSettings, BrokerSettings
from orbitmq.testing import EmbeddedCluster
from tests.interop.nodeclient import NodeClient, obtain_node_client
from tests.support.clients import ACCOUNTS, MAKER, TAKER, bodies, orders
from tests.support.maven import Unavailable

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120)]

StartClient = Callable[[], NodeClient]


@pytest.fixture(scope="module")
def package() -> Path:
    try:
        return obtain_node_client()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def cluster(package: Path) -> Iterator[EmbeddedCluster]:
    del package  # where it cannot be had, no cluster is needed
    with EmbeddedCluster(adjust=_short_delays) as cluster:
        cluster.create_topic("Orders", queues=4)
        yield cluster


@pytest.fixture
def start_client(package: Path, tmp_path: Path) -> Iterator[StartClient]:
    started: list[NodeClient] = []

    def start() -> NodeClient:
        client = NodeClient(package, tmp_path / f"home-{len(started)}")
        started.append(client)
        return client

    yield start
    for client in started:
        client.close()


@pytest.fixture
def client(start_client: StartClient, cluster: EmbeddedCluster) -> NodeClient:
    """A client that has a producer."""
    client = start_client()
    client.produce("makers", cluster.name_server)
    return client


def consume(client: NodeClient, cluster: EmbeddedCluster, group: str, **more: object) -> None:
    settings = {"topic": "Orders", "group": group, "name_server": cluster.name_server}
    client.ask("consume", **(settings | more))


def test_what_it_sends_is_read_by_our_client_with_all_that_belongs_to_it(
    client: NodeClient, cluster: EmbeddedCluster
) -> None:
    large = "größer " * 2000  # which the client compresses
    results = client.send(
        "sync",
        {"topic": "Orders", "body": "short", "tag": "paid", "keys": ["k1", "k2"]},
        {"topic": "Orders", "body": large, "properties": {"colour": "grün"}},
    )

    with PullConsumer("audit", name_server=cluster.name_server, consume_from="first") as reader:
        reader.subscribe("Orders")
        found: dict[str, ReceivedMessage] = {}
        while len(found) < 2:
            polled = reader.poll(timeout=10)
            assert polled, f"only {sorted(found)} came"
            found |= {message.text(): message for message in polled}

    assert [status for status, *_ in results] == ["SEND_OK"] * 2
    assert (found["short"].tags, found["short"].keys) == ("paid", ("k1", "k2"))
    assert found[large].properties["colour"] == "grün"
    (_, _, queue, offset) = results[0]
    assert (found["short"].queue.id, found["short"].queue_offset) == (queue, offset)


def test_its_consumer_gets_the_backlog_and_what_comes_later_and_keeps_its_progress(
    client: NodeClient, cluster: EmbeddedCluster, start_client: StartClient
) -> None:
    client.send("sync", *orders(10, tag="red", keys=["k"]))
    consume(client, cluster, "billing")
    client.until_bodies(bodies(10))
    cluster.send("Orders", *bodies(5, first=10))
    client.until_bodies(bodies(15))
    (first,) = [message for message in client.messages if message["body"] == "order 0"]
    assert (first["topic"], first["tag"], first["keys"], first["times"]) == (
        "Orders",
        "red",
        "k",
        0,
    )

    client.ask("stop", group="billing")
    assert sum(cluster.progress("billing", "Orders").values()) == 15
    cluster.send("Orders", "after the stop")
    successor = start_client()
    consume(successor, cluster, "billing")
    successor.until_bodies(["after the stop"])

    assert successor.bodies() == ["after the stop"]


def test_tags_and_sql_choose_what_comes(client: NodeClient, cluster: EmbeddedCluster) -> None:
    for number, tag in enumerate(["red", "green", "blue", "red"]):
        message = {"body": f"{tag} {number}", "tag": tag, "properties": {"size": str(number)}}
        client.send("sync", {"topic": "Orders", **message})

    consume(client, cluster, "painters", expression="red || blue")
    sql = {"expressionType": "SQL92", "subString": "size >= 2"}
    consume(client, cluster, "measurers", expression=sql)

    def came(group: str) -> set[str]:
        return {message["body"] for message in client.messages if message["group"] == group}

    client.until(
        lambda: (
            came("painters") == {"red 0", "blue 2", "red 3"}
            and came("measurers") == {"blue 2", "red 3"}
        ),
        "what was asked for",
    )
    assert "green 1" not in client.bodies()


def test_a_message_that_fails_comes_again_and_in_the_end_is_a_dead_letter(
    client: NodeClient, cluster: EmbeddedCluster
) -> None:
    consume(client, cluster, "billing", fail={"order 0": 1, "order 1": 99}, retries=2)
    client.send("sync", *orders(3))

    client.until(lambda: len(cluster.messages("%DLQ%billing")) == 1, "the dead letter")

    times = {
        body: [each["times"] for each in client.messages if each["body"] == body]
        for body in bodies(3)
    }
    assert times == {"order 0": [0, 1], "order 1": [0, 1, 2], "order 2": [0]}
    (dead,) = cluster.messages("%DLQ%billing")
    assert dead.body == b"order 1"


def test_a_delayed_message_comes_at_its_time(client: NodeClient, cluster: EmbeddedCluster) -> None:
    consume(client, cluster, "billing")
    client.send("sync", {"topic": "Orders", "body": "later", "level": 3})
    client.until_bodies(["later"])

    (stored,) = [message for message in cluster.messages("Orders") if message.body == b"later"]
    (told,) = client.messages
    assert told["properties"]["REAL_TOPIC"] == "Orders"
    assert stored.store_ms - stored.born_ms >= 300


def test_it_shares_a_group_with_our_consumer(client: NodeClient, cluster: EmbeddedCluster) -> None:
    ours: list[str] = []
    consumer = Consumer("billing", name_server=cluster.name_server, consume_from="first")

    @consumer.on("Orders")
    def bill(message: ReceivedMessage) -> None:
        ours.append(message.text())

    def shares() -> bool:
        return sum(queue.topic == "Orders" for queue in consumer.queues) == 2

    with consumer:
        consume(client, cluster, "billing")
        client.until(shares, "two of the four queues for each")
        # The other one has its two when something comes from each; it hands nothing over, so that
        # what was sent before may come twice.
        sent = 0
        while len({message["queue"] for message in client.messages}) < 2:
            client.send("sync", *orders(4, first=sent))
            sent += 4
            assert sent < 4000, "the Node client got nothing"
        client.send("sync", *orders(40, first=sent))
        last = set(bodies(40, first=sent))
        client.until(lambda: {*ours, *client.bodies()} >= last, "all that was sent")
        with Admin(name_server=cluster.name_server) as admin:
            members = admin.consumers.members("billing")

    assert len(members.clients) == 2
    assert len([body for body in ours if body in last]) == 20
    assert len([body for body in client.bodies() if body in last]) == 20


def test_broadcasting_members_all_get_everything(
    client: NodeClient, cluster: EmbeddedCluster, start_client: StartClient
) -> None:
    client.send("sync", *orders(8))
    other = start_client()
    consume(client, cluster, "screens", broadcast=True)
    consume(other, cluster, "screens", broadcast=True)

    client.until_bodies(bodies(8))
    other.until_bodies(bodies(8))


def test_it_goes_on_after_the_broker_was_restarted(
    client: NodeClient, cluster: EmbeddedCluster
) -> None:
    consume(client, cluster, "billing")
    client.send("sync", *orders(4))
    client.until_bodies(bodies(4))

    cluster.restart_broker()
    answers = [client.try_to("send", group="makers", how="sync", messages=orders(4, first=4))]
    client.until(lambda: _sent(client, answers), "a send after the restart")

    client.until_bodies(bodies(8))


def test_its_signature_is_what_the_broker_expects(
    package: Path, tmp_path: Path, start_client: StartClient
) -> None:
    del package
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)

    def guarded(settings: BrokerSettings) -> BrokerSettings:
        return replace(_short_delays(settings), access=AccessSettings(accounts=accounts))

    with EmbeddedCluster(adjust=guarded) as cluster:
        cluster.create_topic("Orders", queues=4)
        maker, taker, stranger = start_client(), start_client(), start_client()
        maker.produce("makers", cluster.name_server, keys=MAKER)
        maker.send("sync", {"topic": "Orders", "body": "für Jörg", "keys": ["grün"]})
        consume(taker, cluster, "readers", keys=list(TAKER))
        taker.until_bodies(["für Jörg"])

        stranger.produce("makers", cluster.name_server, keys=(MAKER[0], "wrong"))
        refused = stranger.try_to("send", group="makers", how="sync", messages=orders(1))
        taker.produce("takers", cluster.name_server, keys=TAKER)
        unauthorised = taker.try_to("send", group="takers", how="sync", messages=orders(1))

        assert "failed" in refused
        assert "failed" in unauthorised
        assert [message.body for message in cluster.messages("Orders")] == ["für Jörg".encode()]


def _sent(client: NodeClient, answers: list[dict[str, Any]]) -> bool:
    if "done" in answers[-1]:
        return True
    answers.append(client.try_to("send", group="makers", how="sync", messages=orders(4, first=4)))
    return False


def _short_delays(settings: BrokerSettings) -> BrokerSettings:
    levels = tuple(level / 10 for level in range(1, 19))
    return replace(settings, store=replace(settings.store, delay_levels=levels))
