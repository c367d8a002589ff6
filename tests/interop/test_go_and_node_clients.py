"""Clients for Go and Node.js, unmodified, with our broker.

For Go it is Apache's own; for Node.js, where Apache has none that speaks this protocol, `ali-ons`
of the npm registry. What only the first can do comes last.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from orbitmq import Admin, Consumer, PullConsumer, ReceivedMessage
from orbitmq.broker.settings import AccessSettings, BrokerSettings, TransactionSettings
from orbitmq.testing import EmbeddedCluster
from tests.interop.goclient import obtain_go_client
from tests.interop.nodeclient import obtain_node_client
from tests.support.clients import (
    ACCOUNTS,
    MAKER,
    TAKER,
    DrivenClient,
    bodies,
    consume,
    orders,
    rewind,
)
from tests.support.maven import Unavailable

pytestmark = [pytest.mark.interop, pytest.mark.timeout(180)]

StartClient = Callable[[], DrivenClient]

OBTAIN = {"go": obtain_go_client, "node": obtain_node_client}
only_go = pytest.mark.parametrize("launch", ["go"], indirect=True)

#: Go's rebalances every 20 s, and at once when the broker says that members changed.
JOINING = 90.0


@pytest.fixture(scope="module", params=OBTAIN)
def launch(request):
    try:
        return OBTAIN[request.param]()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def cluster(launch):
    del launch  # where it cannot be had, no cluster is needed
    with EmbeddedCluster(adjust=_short_times) as cluster:
        cluster.create_topic("Orders", queues=4)
        yield cluster


@pytest.fixture
def start_client(launch, tmp_path):
    homes = (tmp_path / f"home-{number}" for number in itertools.count())
    with contextlib.ExitStack() as started:
        yield lambda: started.enter_context(launch(next(homes)))


@pytest.fixture
def client(start_client, cluster):
    """A client that has a producer."""
    client = start_client()
    client.produce("makers", cluster.name_server)
    return client


def read(cluster: EmbeddedCluster, wanted: set[str]) -> dict[str, ReceivedMessage]:
    """What our client reads of the orders, by body, until all that is wanted is there."""
    found: dict[str, ReceivedMessage] = {}
    with PullConsumer("audit", name_server=cluster.name_server, consume_from="first") as reader:
        reader.subscribe("Orders")
        while not found.keys() >= wanted:
            polled = reader.poll(timeout=10)
            assert polled, f"only {sorted(found)} came"
            found |= {message.text(): message for message in polled}
    return found


def test_what_it_sends_is_read_by_our_client_with_all_that_belongs_to_it(client, cluster):
    large = "größer " * 2000  # which the client compresses
    alone = {"topic": "Orders", "tag": "paid", "keys": ["k1", "k2"]}

    results = client.send(
        "sync", alone | {"body": "short"}, alone | {"body": large, "properties": {"colour": "grün"}}
    )

    found = read(cluster, {"short", large})
    assert found.keys() == {"short", large}
    assert found[large].properties["colour"] == "grün"
    for body, (_, message_id, queue, offset) in zip(("short", large), results, strict=True):
        message = found[body]
        assert (message.tags, message.keys) == ("paid", ("k1", "k2"))
        # Go's tells the id that it has given, Node's that of the broker.
        assert message_id in (message.unique_id, message.offset_id)
        assert (message.queue.id, message.queue_offset) == (queue, offset)


def test_its_consumer_gets_the_backlog_and_what_comes_later_and_keeps_its_progress(
    client, cluster, start_client
):
    client.send("sync", *orders(10, tag="red", keys=["k"]))
    consume(client, cluster, "billing")
    client.until_bodies(bodies(10))
    cluster.send("Orders", *bodies(5, first=10))
    client.until_bodies(bodies(15))
    first = next(message for message in client.messages if message["body"] == "order 0")
    told = (first["topic"], first["tag"], first["keys"], first["times"])
    assert told == ("Orders", "red", "k", 0)

    # A message is told of before it counts as consumed, which a stop would not wait for.
    cluster.until_consumed("billing", "Orders", timeout=JOINING)
    client.ask("stop", group="billing")
    cluster.send("Orders", "after the stop")
    successor = start_client()
    consume(successor, cluster, "billing")
    successor.until_bodies(["after the stop"], JOINING)

    assert successor.bodies() == ["after the stop"]


def test_tags_and_sql_choose_what_comes(client, cluster):
    for number, tag in enumerate(["red", "green", "blue", "red"]):
        message = {"body": f"{tag} {number}", "tag": tag, "properties": {"size": str(number)}}
        client.send("sync", {"topic": "Orders", **message})

    consume(client, cluster, "painters", expression="red || blue")
    consume(client, cluster, "measurers", sql="size >= 2")

    def came(group):
        return {message["body"] for message in client.messages if message["group"] == group}

    client.until(
        lambda: (
            came("painters") == {"red 0", "blue 2", "red 3"}
            and came("measurers") == {"blue 2", "red 3"}
        ),
        "what was asked for",
    )
    assert "green 1" not in client.bodies()


def test_a_message_that_fails_comes_again_and_in_the_end_is_a_dead_letter(client, cluster):
    # As after the first start of the group; otherwise clients find it when they ask again.
    cluster.create_topic("%RETRY%billing", queues=1)
    consume(client, cluster, "billing", fail={"order 0": 1, "order 1": 99}, retries=2)
    client.send("sync", *orders(3))

    client.until(lambda: len(cluster.messages("%DLQ%billing")) == 1, "the dead letter", JOINING)

    times = {
        body: [each["times"] for each in client.messages if each["body"] == body]
        for body in bodies(3)
    }
    assert times == {"order 0": [0, 1], "order 1": [0, 1, 2], "order 2": [0]}
    (dead,) = cluster.messages("%DLQ%billing")
    assert dead.body == b"order 1"


def test_a_reset_moves_its_consumer_while_it_is_online(client, cluster):
    client.send("sync", *orders(8))
    consume(client, cluster, "repeaters")
    client.until_bodies(bodies(8))

    rewind(cluster, "repeaters")
    # Go's stops for ten seconds then, and looks for its queues ten seconds later.
    client.until(lambda: len(client.messages) >= 16, "everything again", JOINING)
    cluster.until_consumed("repeaters", "Orders", timeout=JOINING)

    assert Counter(client.bodies()) == dict.fromkeys(bodies(8), 2)


def test_a_delayed_message_comes_at_its_time(client, cluster):
    consume(client, cluster, "billing")
    client.send("sync", {"topic": "Orders", "body": "later", "level": 3})
    client.until_bodies(["later"])

    (told,) = client.messages
    (stored,) = cluster.messages("Orders")
    assert told["properties"]["REAL_TOPIC"] == "Orders"
    assert stored.store_ms - stored.born_ms >= 300


def test_it_shares_a_group_with_our_consumer(client, cluster):
    ours: list[str] = []
    consumer = Consumer("billing", name_server=cluster.name_server, consume_from="first")

    @consumer.on("Orders")
    def bill(message: ReceivedMessage) -> None:
        ours.append(message.text())

    def shares():
        return sum(queue.topic == "Orders" for queue in consumer.assignment()) == 2

    with consumer:
        consume(client, cluster, "billing")
        client.until(shares, "two of the four queues for each")
        # It has its two when something comes from each; what was sent before may come twice.
        sent = 0

        def holds_two():
            nonlocal sent
            client.send("sync", *orders(4, first=sent))
            sent += 4
            return len({message["queue"] for message in client.messages}) == 2

        client.until(holds_two, "messages from two queues", JOINING)
        client.send("sync", *orders(40, first=sent))
        last = set(bodies(40, first=sent))
        client.until(lambda: {*ours, *client.bodies()} >= last, "all that was sent")
        with Admin(name_server=cluster.name_server) as admin:
            members = admin.consumers.members("billing")

    assert len(members.clients) == 2
    came = Counter(body for body in [*ours, *client.bodies()] if body in last)
    assert set(came.values()) == {1}


def test_broadcasting_members_all_get_everything(client, cluster, start_client):
    other = start_client()
    consume(client, cluster, "screens", broadcast=True)
    consume(other, cluster, "screens", broadcast=True)
    client.send("sync", *orders(8))

    client.until_bodies(bodies(8))
    other.until_bodies(bodies(8))


def test_it_goes_on_after_the_broker_was_restarted(client, cluster):
    consume(client, cluster, "billing")
    client.send("sync", *orders(4))
    client.until_bodies(bodies(4))

    cluster.restart_broker()
    asked = {"group": "makers", "how": "sync", "messages": orders(4, first=4)}
    client.until(lambda: "done" in client.try_to("send", **asked), "a send after the restart")

    client.until_bodies(bodies(8), JOINING)


def test_its_signature_is_what_the_broker_expects(tmp_path, start_client):
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)

    def guarded(settings):
        return replace(_short_times(settings), access=AccessSettings(accounts=accounts))

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


@only_go
def test_every_way_of_sending_arrives(client, cluster):
    client.send("async", *orders(5))
    client.send("one-way", *orders(5, first=5))
    client.send("batch", *orders(5, first=10, tag="together"))

    found = read(cluster, set(bodies(15)))
    assert sorted(found) == sorted(bodies(15))
    assert {found[body].tags for body in bodies(5, first=10)} == {"together"}


@only_go
def test_a_sharding_key_keeps_messages_in_one_queue_and_an_orderly_consumer_in_order(
    client, cluster
):
    for number in range(20):
        key = f"customer {number % 3}"
        client.send("sync", {"topic": "Orders", "body": f"{key}: {number}", "sharding_key": key})

    consume(client, cluster, "in-order", orderly=True, fail={"customer 1: 4": 2})
    client.until(lambda: len(set(client.bodies())) == 20, "all of them")

    by_customer: dict[str, list[str]] = {}
    for message in client.messages:
        by_customer.setdefault(message["body"].split(":")[0], []).append(message["body"])
    for customer, came in by_customer.items():
        numbers = [int(body.rpartition(" ")[2]) for body in came]
        assert numbers == sorted(numbers), f"{customer} came as {numbers}"
    assert client.bodies().count("customer 1: 4") == 3
    places = {(message["body"].split(":")[0], message["queue"]) for message in client.messages}
    assert len(places) == 3


@only_go
def test_open_transactions_are_asked_about_and_end_as_it_says(client, cluster):
    messages = [{"topic": "Orders", "body": body} for body in ("good", "bad")]
    verdicts = {"good": "commit", "bad": "rollback"}
    asked = {"group": "payers", "messages": messages, "verdicts": verdicts}
    client.ask("transact", name_server=cluster.name_server, **asked)

    client.until(lambda: {"good", "bad"} <= set(client.checked), "both checks", JOINING)
    client.until(lambda: cluster.messages("Orders"), "what was committed")

    assert [message.body for message in cluster.messages("Orders")] == [b"good"]


def _short_times(settings: BrokerSettings) -> BrokerSettings:
    levels = tuple(level / 10 for level in range(1, 19))
    asking = TransactionSettings(check_interval=0.2, timeout=0.5, check_max=10_000)
    store = replace(settings.store, delay_levels=levels)
    return replace(settings, store=store, transactions=asking)
