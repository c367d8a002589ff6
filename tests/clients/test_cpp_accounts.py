"""librocketmq signs its requests for a broker that knows accounts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbitmq.broker.settings import AccessSettings
from orbitmq.testing import EmbeddedCluster
from tests.clients.conftest import short_delays
from tests.support.clients import ACCOUNTS, MAKER, TAKER


@pytest.fixture
def cluster(plain_package, tmp_path):
    del plain_package  # where it cannot be had, no cluster is needed
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)

    def guarded(settings):
        return replace(short_delays(settings), access=AccessSettings(accounts=accounts))

    with EmbeddedCluster(adjust=guarded) as cluster:
        cluster.create_topic("Orders", queues=4)
        yield cluster


def order(number: int) -> dict[str, object]:
    # Letters beyond ASCII take part in the signature, too.
    return {"topic": "Orders", "body": f"Bestellung {number} für Jörg", "keys": f"grün-{number}"}


@pytest.mark.parametrize("orderly", [False, True])
def test_what_an_account_sends_another_consumes_and_retries(start_client, cluster, orderly):
    maker, taker = start_client(), start_client()
    maker.produce("makers", cluster.name_server, MAKER)

    results = maker.send("sync", *(order(number) for number in range(8)))
    batch = maker.send("batch", *(order(number) for number in range(8, 12)))
    taker.ask(
        "consume",
        group="readers",
        name_server=cluster.name_server,
        topic="Orders",
        orderly=orderly,
        fail=1,
        keys=TAKER,
    )
    wanted = [str(order(number)["body"]) for number in range(12)]
    taker.until(
        lambda: all(taker.bodies().count(body) >= 2 for body in wanted), "every message twice"
    )

    assert [status for status, _, _ in (*results, *batch)] == [0] * 9


@pytest.mark.parametrize(
    "keys",
    [TAKER, (MAKER[0], "a-gu3ss"), ("nobody-key", MAKER[1]), ()],
    ids=["only-reads", "wrong-secret", "unknown", "unsigned"],
)
def test_who_may_not_send_is_refused(start_client, cluster, keys):
    client = start_client()
    client.produce("makers", cluster.name_server, keys)

    answer = client.try_to("send", group="makers", how="sync", messages=[order(0)])

    assert "failed" in answer
    assert cluster.messages("Orders") == []


def test_who_may_not_read_gets_nothing(start_client, cluster):
    maker, reader, taker = start_client(), start_client(), start_client()
    maker.produce("makers", cluster.name_server, MAKER)
    maker.send("sync", order(0))
    reading = {"name_server": cluster.name_server, "topic": "Orders"}

    reader.ask("consume", group="readers", keys=MAKER, **reading)
    taker.ask("consume", group="readers", keys=TAKER, instance="two", **reading)
    taker.until_bodies([str(order(0)["body"])])

    # The broker does not count who was refused, so the whole topic is the other's.
    assert reader.messages == []
